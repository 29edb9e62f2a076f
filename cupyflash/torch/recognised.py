"""Recognises calls on a GPU that look like an earlier one, and launches it without arrays of CuPy.

`launch_cache` recognises calls on arrays. To make the arrays of a call takes longer than all of
that, so calls on tensors are recognised a second time, by the tensors' own attributes. Results and
scratch memory of such a call are new, and hence overlap nothing.

Half of a call's time on the host is spent here. In a backward, what runs first on a thread of
PyTorch's takes several times as long as later, so that little code matters more than quick code.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ..arrays.device_arrays import is_device_array
from ..gpu import growing, launch_cache
from ..gpu.launch import ALIGNMENT, CompiledRecipe
from ..masks import Mask
from ..problem.call import Call
from . import tensors
from .operands import Operands, Settings, by_heads
from .pending import Gradients, Pending, Prepared
from .tensors import PLAIN, SEEDS

MOST = 2048  # signatures that are remembered: a generation has one for each number of keys
MOST_GROWING = 64  # forms of calls whose keys grow
_AXES = 4
_OPERAND = 7  # parts of a key: the kind, and six of the queries; then six of keys, and of values
_NOTHING: Mapping[str, torch.Tensor | None] = {}


class Signature(launch_cache.Signature):
    """The signature of a call on tensors, which need not have been checked.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    settings : Settings
        The options that are not tensors.
    x : Operands
        The tensors of the call.
    read : mapping of str to (torch.Tensor or None)
        Further tensors, by the kernels' names.

    Raises
    ------
    UnlikeError, RuntimeError
        These are `UNLIKE`: the call must be checked every time. PyTorch raises the latter of a
        tensor without memory.

    Attributes
    ----------
    known : Known or None
        What is kept of calls like this one.
    has_gradients : bool
        Whether it has a mask and offsets, and no other tensors than q, k and v.
    form : hashable
        Equal for calls of one query that differ in the number of keys, too; None for others.
    """

    __slots__ = ("_others", "_strides", "form", "has_gradients", "known")

    def __init__(
        self,
        kind: Hashable,
        settings: Settings,
        x: Operands,
        read: Mapping[str, torch.Tensor | None] = _NOTHING,
    ) -> None:
        q, k, v, bias, sink, mask, of_seed, offsets_q, offsets_k = x
        made, changes, scale, dropout, seed, precision, _, check, rows_first, by_rows = settings
        if of_seed is not None:
            seed = number_of(of_seed)
        if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
            raise launch_cache.UnlikeError
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        self._others = mask, offsets_q, offsets_k
        of_q, of_k, of_v = self._strides = q.stride(), k.stride(), v.stride()
        self.addresses = {"seed": 0, "q": at_q, "k": at_k, "v": at_v}
        self._parts: list[Any] = []
        self.read = ()
        of_heads = kind
        if read:
            self._take_arrays(read)
        if offsets_q is not None:
            if check is not None and check is not False:
                raise launch_cache.UnlikeError  # what its offsets hold is read every time
            kind = kind, check, offsets_k is offsets_q
            self._take_arrays({"offsets_q": offsets_q})
            if offsets_k is not offsets_q:
                self._take_arrays({"offsets_k": offsets_k})
        structure: Hashable = None
        if made is not None:
            read_too: Any = True
            if type(made) is Mask:  # the shortest way for the most frequent one
                structure, read_too = made.structure
            if read_too:
                structure = self._expression(made)
        key = (
            kind,
            q.dtype, q.shape, of_q, q.is_cuda, q.get_device(), at_q & 15,
            k.dtype, k.shape, of_k, k.is_cuda, k.get_device(), at_k & 15,
            v.dtype, v.shape, of_v, v.is_cuda, v.get_device(), at_v & 15,
            structure,
            None if mask is None else self._expression(mask),
            None if changes is None else self._expression(changes),
            None if bias is None else self._expression(bias),
            None if sink is None else self._sink(sink),
            None if scale is None else self._number(scale),
            dropout if type(dropout) is float else self._probability(dropout),
            None if seed is None else self._seed(seed),
            None if precision is None else self._word(precision),
            rows_first, by_rows,
        )  # fmt: skip
        self.key = (*key, *self._parts) if self._parts else key
        self.has_gradients = False
        self.form: Hashable = None
        self.known = _known.get(self.key)
        if self.known is not None:
            return
        if by_rows:
            self._look_by_heads(of_heads, settings, x)
        elif q.shape[-2] == 1 and q.ndim == k.ndim == v.ndim == _AXES:
            others = mask, bias, sink, made, changes, seed, offsets_q
            if not read and all(each is None for each in others):
                self._look_for_others(key, k, v)

    def _look_by_heads(self, kind: Hashable, settings: Settings, x: Operands) -> None:
        """Look for the same call with heads before rows, which is how calls are checked."""
        axes = _AXES if x.offsets_q is None else _AXES - 1
        if x.q.ndim == x.k.ndim == x.v.ndim == axes:
            known = Signature(kind, *by_heads(settings, x)).known
            if known is not None:
                _remember(self, known.by_rows())

    def _look_for_others(self, key: tuple[Any, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        """Look for calls with other numbers of keys; only this number and strides tell them.

        Keys and values have no gaps, or are part of a room, of which they keep the strides.
        """
        keys = k.shape[-2]
        kind, *of_q = key[:_OPERAND]
        of_k, of_v = key[_OPERAND : 2 * _OPERAND - 1], key[2 * _OPERAND - 1 : 3 * _OPERAND - 2]
        if v.shape[-2] != keys or of_k[-1] or of_v[-1]:  # launches are made for aligned ones
            return
        rooms = [None if x.is_contiguous() else x.stride() for x in (k, v)]
        shapes = [(*x.shape[:-2], x.shape[-1]) for x in (k, v)]
        rest = key[3 * _OPERAND - 2 :]
        sizes = of_k[0], *of_k[3:], of_v[0], *of_v[3:]
        self.form = form = (kind, *of_q, *shapes, *rooms, *sizes, *rest)
        found = _growing.get(form)
        if found is not None and found[0].least <= keys <= found[0].most:
            growing, known = found
            _remember(self, known.told(growing.told(keys)))

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        parts, addresses = self._parts, self.addresses
        for name, x in named.items():
            if x is None:
                parts.append(None)
            elif type(x) in PLAIN:
                addresses[name] = place = x.data_ptr()
                parts += (x.dtype, x.shape, x.stride(), x.is_cuda, x.get_device(), place & 15)
            elif is_device_array(x):  # in a mask or a score change
                data = x.data
                addresses[name] = place = data.ptr
                parts += (x.dtype, x.shape, x.strides, data.device_id, place & 15)
            else:
                raise launch_cache.UnlikeError

    def launch(self, q: torch.Tensor) -> list[torch.Tensor] | None:
        """Compute the call if there was one like it; its addresses grow by those of results."""
        return None if self.known is None else self.known.launch(self.addresses, q)

    def pending(self, how: tuple[bool, bool], out: torch.Tensor) -> Pending | None:
        """Return how gradients of the call, which was launched, are computed; None if unknown.

        `how` says whether they are deterministic, and whether they have that of the bias.
        """
        known = self.known
        if known is None or not self.has_gradients:
            return None
        found = known.gradients.get(how)
        if found is None:
            return None
        addresses = self.addresses
        at = addresses["q"], addresses["k"], addresses["v"], addresses["out"]
        rest = addresses["lse"], *map(addresses.__getitem__, found.names)
        if found.are_small:
            stream = tensors.raw_stream(found.device)
            if not tensors.records_graph(stream):  # which may run several times
                ready = found.prepared(at, rest, out)
                if ready is not None:
                    return Prepared(found, self._others, at, rest, ready)
        return Pending(found, self._others, at, rest)

    def keep_gradients(self, how: tuple[bool, bool], do: torch.Tensor, seen: Signature) -> None:
        """Keep gradients of this call, whose signature was `seen`, for later calls like it."""
        known, found = self.known, seen.known
        if known is None or found is None or not self.has_gradients:
            return
        results = [(shape, strides) for _, shape, strides, _ in found.forms]
        if known.is_by_rows:
            results = [(_swapped(shape), _swapped(strides)) for shape, strides in results]
        if known.is_by_rows or known.has_rows_first:
            do = do.transpose(-3, -2)
        (of_out,) = (strides for name, _, strides, _ in known.forms if name == "out")
        strides = *self._strides, of_out
        made = Gradients(found.compiled, dict(found.tables), results, do, strides)
        if all(name in self.addresses for name in made.names):
            known.gradients[how] = made


class Known:
    """What is kept about a call.

    Parameters
    ----------
    compiled : CompiledRecipe
        Its launches.
    tables : sequence of (str, str)
        Names of the arrays that its kernels look up: in the kernels, and in the signature.
    results : mapping of str to torch.Tensor
        What it writes, by the kernels' names.
    dtype : torch.dtype
        That of its queries.
    rows_first : bool
        Whether later calls return out as (B, L, H, D): who wants it so needs no transposed view, of
        which PyTorch would record a derivative.

    Attributes
    ----------
    compiled, tables, dtype
        As they were given.
    forms : list of (str, tuple of int, tuple of int, torch.dtype or None)
        Names, shapes, strides and dtypes of its results; None for the dtype of its queries.
    gradients : dict
        What is kept about the gradients of such calls, by `how` of `Signature.pending`.
    has_rows_first : bool
        Whether the output is (B, L, H, D), with heads behind rows.
    is_by_rows : bool
        Whether q, k, v and their gradients are so, too.
    """

    __slots__ = (
        "_numbers", "_size", "compiled", "dtype", "forms", "gradients", "has_rows_first",
        "is_by_rows", "tables",
    )  # fmt: skip

    def __init__(
        self,
        compiled: CompiledRecipe,
        tables: Sequence[tuple[str, str]],
        results: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        rows_first: bool = False,
    ) -> None:
        self.compiled, self.tables, self.dtype = compiled, tables, dtype
        self._size = compiled.workspace_size
        if rows_first and "out" in results:
            results = {**results, "out": results["out"].transpose(-3, -2)}
        self.forms = [
            (name, tuple(x.shape), x.stride(), None if x.dtype is dtype else x.dtype)
            for name, x in results.items()
        ]
        self.gradients: dict[tuple[bool, bool], Gradients] = {}
        self._numbers: Mapping[str, int] = {}
        self.has_rows_first, self.is_by_rows = rows_first, False

    def told(self, numbers: Mapping[str, int]) -> Known:
        """Return the same for a call that is told further numbers."""
        made = copy.copy(self)
        made._numbers, made.gradients = numbers, {}
        return made

    def by_rows(self) -> Known:
        """Return the same for a call whose q, k, v and output are (..., L, H, D)."""
        made = copy.copy(self)
        made.is_by_rows, made.gradients = True, {}
        made.forms = [
            (name, _swapped(shape), _swapped(strides), dtype) if name == "out" else
            (name, shape, strides, dtype) for name, shape, strides, dtype in self.forms
        ]  # fmt: skip
        return made

    def launch(self, addresses: dict[str, int], q: torch.Tensor) -> list[torch.Tensor] | None:
        """Compute a call into new tensors; None if it must go through CuPy."""
        compiled, empty = self.compiled, q.new_empty_strided
        queue = compiled.queue
        if not queue.is_open():
            return None
        made = []
        for name, shape, strides, dtype in self.forms:
            x = empty(shape, strides) if dtype is None else empty(shape, strides, dtype=dtype)
            addresses[name] = place = x.data_ptr()
            if place & 15:
                return None
            made.append(x)
        for name, place_name in self.tables:
            addresses[name] = addresses[place_name]
        if self._numbers:
            addresses.update(self._numbers)
        if compiled.reports:
            compiled.refuse_reported(addresses)
        if compiled.adds_to_dq:
            made[0].zero_()
        stream = tensors.raw_stream(queue.device)
        if self._size:
            scratch = empty((self._size,), (1,), dtype=torch.uint8)
            begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
            for name, place in compiled.places:
                addresses[name] = begin + place
        compiled.launches.start(addresses, stream)
        return made


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes of axes, of which those of heads and of rows have changed places."""
    *lead, first, second, last = sizes
    return *lead, second, first, last


_lock = threading.Lock()  # for writing; look-ups need no lock
_known: dict[Hashable, Known] = {}
_growing: dict[Hashable, tuple[growing.Growing, Known]] = {}
_last: dict[Hashable, int] = {}  # numbers of keys


def signature(
    kind: Hashable,
    settings: Settings,
    x: Operands,
    read: Mapping[str, torch.Tensor | None] = _NOTHING,
) -> Signature | None:
    """Return the signature of a call, or None if it must be checked every time.

    The arguments are those of `Signature`, and need not have been checked.
    """
    try:
        return Signature(kind, settings, x, read)
    except UNLIKE:
        return None


UNLIKE = launch_cache.UnlikeError, RuntimeError
FORWARD = "forward without lse", "forward"
# By whether they are deterministic, and whether they have that of the bias.
GRADIENTS = (
    ("backward without dbias", "backward"),
    ("deterministic backward without dbias", "deterministic backward"),
)


def number_of(seed: torch.Tensor) -> Any:
    """Return a seed on a GPU as it is, and any other as a number."""
    if type(seed) not in PLAIN or seed.ndim or seed.dtype not in SEEDS:
        raise launch_cache.UnlikeError
    return seed if seed.is_cuda else int(seed) % 2**64


def keep(
    seen: Signature | None,
    of_arrays: launch_cache.Signature | None,
    results: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    rows_first: bool = False,
) -> None:
    """Keep a call that was computed, whose signature with arrays was `of_arrays`.

    `dtype` is that of its queries, and `rows_first` is as in `Known`.
    """
    if seen is None or of_arrays is None or (entry := launch_cache.find(of_arrays)) is None:
        return
    compiled = entry.compiled
    if compiled.needs_arrays or any(x.data_ptr() & 15 for x in results.values()):
        return
    places = [f"read {n}" for n in range(len(seen.read))]
    tables = []
    for name, place in entry.tables:
        found = [x for x in places if seen.addresses[x] == of_arrays.addresses[place]]
        if len(found) != 1:
            return  # which array is read is not sure
        tables.append((name, found[0]))
    _remember(seen, Known(compiled, tables, results, dtype, rows_first))


def _remember(seen: Signature, known: Known) -> None:
    with _lock:
        _known[seen.key] = seen.known = known
        while len(_known) > MOST:
            del _known[next(iter(_known))]


def keep_growing(
    seen: Signature | None,
    call: Call,
    results: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    rows_first: bool = False,
) -> None:
    """Keep a call that was computed for those with more keys, if it has a key more than the last.

    The current device is that of the call; the rest is as in `keep`.
    """
    if seen is None or seen.known is None or seen.form is None:
        return
    keys = call.k.shape[-2]
    with _lock:
        before = _last.pop(seen.form, None)
        _last[seen.form] = keys
        while len(_last) > MOST_GROWING:
            del _last[next(iter(_last))]
        served = _growing.get(seen.form)
    if keys - 1 not in (before, served and served[0].most):
        return
    found = growing.of(call, "lse" in results)
    if found is None or found.compiled.needs_arrays:
        return
    with _lock:
        _growing[seen.form] = found, Known(found.compiled, [], results, dtype, rows_first)
        while len(_growing) > MOST_GROWING:
            del _growing[next(iter(_growing))]
