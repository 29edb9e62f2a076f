"""Recognises calls on a GPU that look like an earlier one, and launches it without arrays of CuPy.

`launch_cache` recognises calls on arrays. To make the arrays of a call takes longer than all of
that, so calls on tensors are recognised a second time, by the tensors' own attributes. Results and
scratch memory of such a call are new, and hence overlap nothing.

Half of a call's time on the host is spent here. In a backward, what runs first on a thread of
PyTorch's takes several times as long as later, so that little code matters more than quick code.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..arrays.device_arrays import is_device_array
from ..gpu import driver, launch_cache
from ..gpu.launch import ALIGNMENT, CompiledRecipe
from ..masks import Mask
from . import tensors
from .operands import Operands, Settings
from .tensors import PLAIN, SEEDS

MOST = 2048  # signatures that are remembered: a generation has one for each number of keys
_MASK = Operands._fields.index("mask") - 3  # its place behind q, k and v
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
    seed : Any
        The seed, as a number or as a tensor.
    read : mapping of str to (torch.Tensor or None)
        Further tensors, by the kernels' names.

    Attributes
    ----------
    known : Known or None
        What is kept of calls like this one.
    has_gradients : bool
        Whether it has a mask and no other tensors than q, k and v.
    """

    __slots__ = ("_mask", "_strides", "has_gradients", "known")

    def __init__(
        self,
        kind: Hashable,
        settings: Settings,
        x: Operands,
        seed: Any,
        read: Mapping[str, torch.Tensor | None] = _NOTHING,
    ) -> None:
        q, k, v, bias, sink, mask, _, offsets_q, offsets_k = x
        made, changes, scale, dropout, _, precision, _, _ = settings
        if not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
            raise launch_cache.UnlikeError
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        self._mask = mask
        of_q, of_k, of_v = self._strides = q.stride(), k.stride(), v.stride()
        self.addresses = {"seed": 0, "q": at_q, "k": at_k, "v": at_v}
        self._parts: list[Any] = []
        self.read = ()
        if read:
            self._take_arrays(read)
        if offsets_q is not None:
            self._take_arrays({"offsets_q": offsets_q})
            if offsets_k is not offsets_q:
                self._take_arrays({"offsets_k": offsets_k})
        key = (
            kind,
            q.dtype, q.shape, of_q, q.is_cuda, q.get_device(), at_q & 15,
            k.dtype, k.shape, of_k, k.is_cuda, k.get_device(), at_k & 15,
            v.dtype, v.shape, of_v, v.is_cuda, v.get_device(), at_v & 15,
            None if made is None else self._expression(made),
            None if mask is None else self._expression(mask),
            None if changes is None else self._expression(changes),
            None if bias is None else self._expression(bias),
            None if sink is None else self._sink(sink),
            None if scale is None else self._number(scale),
            dropout if type(dropout) is float else self._probability(dropout),
            None if seed is None else self._seed(seed),
            None if precision is None else self._word(precision),
        )  # fmt: skip
        self.key = (*key, *self._parts) if self._parts else key
        self.known = _known.get(self.key)
        self.has_gradients = False

    def _expression(self, made: Any) -> Hashable:
        if type(made) is Mask:  # the shortest way for the most frequent one
            structure, read = made.structure
            if not read:
                return structure
        return super()._expression(made)

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

    def pending(self, deterministic: bool, out: torch.Tensor) -> Pending | None:
        """Return how gradients of the call, which was launched, are computed; None if unknown."""
        known = self.known
        if known is None or not self.has_gradients:
            return None
        found = known.gradients.get(deterministic)
        if found is None:
            return None
        addresses = self.addresses
        at = addresses["q"], addresses["k"], addresses["v"], addresses["out"], addresses["lse"]
        rest = [addresses[name] for name in found.names]
        return found, (*found.do, *at, *self._strides, out.stride()), self._mask, rest

    def keep_gradients(self, deterministic: bool, do: torch.Tensor, seen: Signature) -> None:
        """Keep gradients of this call, whose signature was `seen`, for later calls like it."""
        known, found = self.known, seen.known
        if known is None or found is None or not self.has_gradients:
            return
        made = Gradients(found, do)
        if all(name in self.addresses for name in made.names):
            known.gradients[deterministic] = made


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

    Attributes
    ----------
    compiled, tables, dtype
        As they were given.
    forms : list of (str, tuple of int, tuple of int, torch.dtype or None)
        Names, shapes, strides and dtypes of its results; None for the dtype of its queries.
    gradients : dict
        What is kept about the gradients of such calls, by whether they are deterministic.
    """

    __slots__ = ("_sizes", "compiled", "dtype", "forms", "gradients", "tables")

    def __init__(
        self,
        compiled: CompiledRecipe,
        tables: Sequence[tuple[str, str]],
        results: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self.compiled, self.tables, self.dtype = compiled, tables, dtype
        self._sizes = compiled.workspace_size, compiled.sums
        self.forms = [
            (name, tuple(x.shape), x.stride(), None if x.dtype is dtype else x.dtype)
            for name, x in results.items()
        ]
        self.gradients: dict[bool, Gradients] = {}

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
        if compiled.reports:
            compiled.refuse_reported(addresses)
        if compiled.adds_to_dq:
            made[0].zero_()
        stream = tensors.raw_stream(queue.device)
        size, sums = self._sizes
        if size:
            scratch = empty((size,), (1,), dtype=torch.uint8)
            begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
            for name, place in compiled.places:
                addresses[name] = begin + place
            if sums:
                queue.clear(addresses["dq_accum"], 0, sums // 4, stream)
        compiled.launches.start(addresses, stream)
        return made


class Gradients:
    """Gradients of calls with one signature, which need no signature of their own.

    What computes them is one function without loops over names. It runs on a thread of PyTorch's
    that has nothing of it in its caches, so that each function, object and name takes time.

    Parameters
    ----------
    known : Known
        What is kept about gradients that were computed of such a call.
    do : torch.Tensor
        What they were computed of.

    Attributes
    ----------
    do : tuple
        What tells it from others.
    names : tuple of str
        The names of addresses, in the signature of the call, that are told in addition.
    """

    __slots__ = (
        "_adds", "_clear", "_launches", "_maps", "_numbers", "_offsets", "_queue", "_results",
        "_size", "_words", "do", "names",
    )  # fmt: skip

    def __init__(self, known: Known, do: torch.Tensor) -> None:
        compiled = known.compiled
        self._launches, self._queue = compiled.launches, compiled.queue
        self.do = _form_of(do, do.data_ptr())
        self._results = [(shape, strides) for _, shape, strides, _ in known.forms]
        self._size = -(-compiled.workspace_size // known.dtype.itemsize)
        scratch, tables = dict(compiled.places), dict(known.tables)
        self._clear = scratch.get("dq_accum", 0), compiled.sums // 4
        self._adds = compiled.adds_to_dq
        names = [*_TOLD, *({*compiled.launches.names} - {*_TOLD, *scratch})]
        self.names = tuple(tables.get(name, name) for name in names[len(_TOLD) :])
        number = {name: n for n, name in enumerate(names)} | dict.fromkeys(scratch, _SCRATCH)
        self._words = [place for place, _ in compiled.launches.words]
        self._numbers = [number[name] for _, name in compiled.launches.words]
        self._offsets = [scratch.get(name, 0) for _, name in compiled.launches.words]
        self._maps = [(place, number[name], made) for place, name, made in compiled.launches.maps]

    def compute(
        self, pending: Pending, saved: Sequence[Any], do: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute gradients, given the operands of a call, out and lse; None if they are unlike.

        PyTorch has checked the versions of saved tensors; users' hooks may have put others in place
        of them, elsewhere or with other strides.
        """
        _, expected, mask, rest = pending
        if type(do) not in PLAIN:
            return None
        if len(saved) == _FEWEST:
            q, k, v, out, lse = saved
        else:
            q, k, v, *others, out, lse = saved
            if others[_MASK] is not mask:
                return None
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        at_out, at_lse, at_do = out.data_ptr(), lse.data_ptr(), do.data_ptr()
        found = (
            do.dtype, do.shape, do.stride(), do.get_device(), at_do & 15,
            at_q, at_k, at_v, at_out, at_lse, q.stride(), k.stride(), v.stride(), out.stride(),
        )  # fmt: skip
        queue = self._queue
        if found != expected or not queue.is_open():
            return None
        empty = q.new_empty_strided
        of_q, of_k, of_v = self._results
        dq, dk, dv = empty(*of_q), empty(*of_k), empty(*of_v)
        at_dq, at_dk, at_dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        if (at_dq | at_dk | at_dv) & 15:
            return None
        stream = tensors.raw_stream(queue.device)
        begin = 0
        if self._size:
            scratch = empty((self._size,), (1,))
            begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
            place, count = self._clear
            if count and (error := queue.clear(begin + place, 0, count, stream)):
                raise driver.error(error, driver.CLEAR)
        if self._adds:
            dq.zero_()
        told = (
            at_q, at_k, at_v, at_out, at_lse, at_do, at_dq, at_dk, at_dv, begin, *rest,
        )  # fmt: skip
        launches = self._launches
        try:
            buffer = launches.unused.pop()
        except IndexError:
            buffer = launches.buffer()
        words = buffer.words
        for place, n, offset in zip(self._words, self._numbers, self._offsets, strict=True):
            words[place] = told[n] + offset
        for places, n, encoded in self._maps:
            words[places] = encoded.words(told[n])
        if stream != buffer.stream:
            buffer.move(stream)
        launch = queue.launch
        for arguments in buffer.calls:
            if error := launch(*arguments):
                raise launches.error(error, buffer, arguments)
        launches.unused.append(buffer)
        return dq, dk, dv


# The order in which launches of gradients are told addresses.
_TOLD = "q", "k", "v", "out", "lse", "d_out", "dq", "dk", "dv", "scratch"
_SCRATCH = _TOLD.index("scratch")
_FEWEST = 5  # tensors that are saved: q, k, v, out and lse

# Gradients of one call: what computes them, what their tensors look like, its mask if that is a
# tensor, and the further addresses.
Pending: TypeAlias = tuple[Gradients, tuple[Any, ...], torch.Tensor | None, list[int]]


def _form_of(do: torch.Tensor, place: int) -> tuple[Any, ...]:
    """Return what tells gradients of a call from others of it."""
    return do.dtype, do.shape, do.stride(), do.get_device(), place & 15


_lock = threading.Lock()  # for writing; look-ups need no lock
_known: dict[Hashable, Known] = {}


def signature(
    kind: Hashable,
    settings: Settings,
    x: Operands,
    read: Mapping[str, torch.Tensor | None] = _NOTHING,
) -> Signature | None:
    """Return the signature of a call, or None if it must be checked every time.

    The arguments are those of `Signature`, and need not have been checked.
    """
    if x.offsets_q is not None:
        if settings.check is not None and settings.check is not False:
            return None  # what its offsets hold is read every time
        kind = kind, settings.check, x.offsets_k is x.offsets_q
    try:
        seed = settings.seed if x.seed is None else _seed(x.seed)
        return Signature(kind, settings, x, seed, read)
    except (launch_cache.UnlikeError, RuntimeError):  # PyTorch's, of a tensor without memory
        return None


FORWARD = "forward without lse", "forward"
# By whether they are deterministic, and whether they have that of the bias.
GRADIENTS = (
    ("backward without dbias", "backward"),
    ("deterministic backward without dbias", "deterministic backward"),
)


def _seed(seed: torch.Tensor) -> Any:
    """Return a seed on a GPU as it is, and any other as a number."""
    if type(seed) not in PLAIN or seed.ndim or seed.dtype not in SEEDS:
        raise launch_cache.UnlikeError
    return seed if seed.is_cuda else int(seed) % 2**64


def keep(
    seen: Signature | None,
    of_arrays: launch_cache.Signature | None,
    results: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Keep a call that was computed, whose signature with arrays was `of_arrays`.

    `dtype` is that of its queries.
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
    with _lock:
        _known[seen.key] = seen.known = Known(compiled, tables, results, dtype)
        while len(_known) > MOST:
            del _known[next(iter(_known))]
