"""Recognises calls on a GPU that look like an earlier one, and launches it without arrays of CuPy.

`launch_cache` recognises calls on arrays. To make the arrays of a call takes longer than all of
that, so calls on tensors are recognised a second time, by the tensors' own attributes. Results and
scratch memory of such a call are new, and hence overlap nothing.

Half of a call's time on the host is spent here. In a backward, what runs first on a thread of
PyTorch's takes several times as long as later, so that little code matters more than quick code.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..arrays.device_arrays import is_device_array
from ..gpu import driver, launch_cache
from ..gpu.launch import ALIGNMENT, CompiledRecipe
from ..masks import Mask
from . import tensors
from .operands import Operands, Settings
from .tensors import PLAIN, SEEDS

MOST = 2048  # signatures that are remembered: a generation has one for each number of keys
SMALL = 1 << 20  # bytes of gradients and scratch memory that a forward asks for
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
        at = addresses["q"], addresses["k"], addresses["v"], addresses["out"]
        rest = [addresses[name] for name in found.names]
        expected = *found.do, *at, *self._strides, out.stride()
        pending = Pending(found, expected, self._mask, (*at, addresses["lse"]), rest)
        if found.are_small and (ready := found.prepared(pending, out)) is not None:
            pending.ready.append(ready)
        return pending

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


class Pending:
    """The gradients of one call, which are computed later.

    Parameters
    ----------
    gradients : Gradients
        What computes them.
    expected : tuple
        What their tensors look like.
    mask : torch.Tensor or None
        The mask of the call, if that is a tensor.
    places : tuple of int
        The addresses of q, k, v, out and lse.
    rest : list of int
        Further addresses.

    Attributes
    ----------
    ready : list of Ready
        What is there already, once at most.
    """

    __slots__ = ("expected", "gradients", "mask", "places", "ready", "rest")

    def __init__(
        self,
        gradients: Gradients,
        expected: tuple[Any, ...],
        mask: torch.Tensor | None,
        places: tuple[int, ...],
        rest: list[int],
    ) -> None:
        self.gradients, self.expected, self.mask = gradients, expected, mask
        self.places, self.rest = places, rest
        self.ready: list[Ready] = []

    def __del__(self) -> None:
        if self.ready:
            self.gradients.launches.unused.append(self.ready.pop().buffer)


class Ready(NamedTuple):
    """The results of a backward, and launches that lack one address.

    Attributes
    ----------
    results : tuple of torch.Tensor
        dq, dk and dv.
    buffer : driver.Buffer
        What the driver is told.
    sums : int
        The address of sums of dq, which are 0 before.
    scratch : torch.Tensor or None
        What is kept until the launches.
    """

    results: tuple[torch.Tensor, ...]
    buffer: driver.Buffer
    sums: int
    scratch: torch.Tensor | None


class Gradients:
    """Gradients of calls with one signature, which need no signature of their own.

    They are computed on a thread of PyTorch's that has nothing of this in its caches: each function
    and each object takes several times as long as in a forward. So the forward prepares all that it
    can; memory is asked for there only if it is little, as the time of the host matters only then.

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
    are_small : bool
        Whether their memory is asked for in the forward.
    launches : CompiledLaunches
        What computes them.
    """

    __slots__ = (
        "_adds", "_maps", "_maps_of_do", "_of_do", "_queue", "_results", "_size", "_sums", "_words",
        "are_small", "do", "launches", "names",
    )  # fmt: skip

    def __init__(self, known: Known, do: torch.Tensor) -> None:
        compiled = known.compiled
        self.launches, self._queue = compiled.launches, compiled.queue
        self.do = _form_of(do, do.data_ptr())
        self._results = [(shape, strides) for _, shape, strides, _ in known.forms]
        item = known.dtype.itemsize
        self._size = -(-compiled.workspace_size // item)
        elements = sum(math.prod(shape) for shape, _ in self._results) + self._size
        self.are_small = elements * item <= SMALL
        scratch, tables = dict(compiled.places), dict(known.tables)
        self._sums = scratch.get("dq_accum", 0), compiled.sums // 4
        self._adds = compiled.adds_to_dq
        names = [*_TOLD, *({*self.launches.names} - {*_TOLD, *scratch, "d_out"})]
        self.names = tuple(tables.get(name, name) for name in names[len(_TOLD) :])
        number = {name: n for n, name in enumerate(names)} | dict.fromkeys(scratch, _SCRATCH)
        words, maps = self.launches.words, self.launches.maps
        self._of_do = [place for place, name in words if name == "d_out"]
        self._maps_of_do = [(place, made) for place, name, made in maps if name == "d_out"]
        self._words = [(x, number[y], scratch.get(y, 0)) for x, y in words if y != "d_out"]
        self._maps = [(place, number[y], made) for place, y, made in maps if y != "d_out"]

    def prepared(self, pending: Pending, q: torch.Tensor) -> Ready | None:
        """Return new results, and launches that know all but the address of do.

        Returns None if the results must go through CuPy.
        """
        empty = q.new_empty_strided
        of_q, of_k, of_v = self._results
        results = dq, dk, dv = empty(*of_q), empty(*of_k), empty(*of_v)
        at_dq, at_dk, at_dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
        if (at_dq | at_dk | at_dv) & 15:
            return None
        begin, scratch = 0, None
        if self._size:
            scratch = empty((self._size,), (1,))
            begin = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
        told = *pending.places, at_dq, at_dk, at_dv, begin, *pending.rest
        buffer = self.launches.buffer()
        words = buffer.words
        for place, n, offset in self._words:
            words[place] = told[n] + offset
        for places, n, encoded in self._maps:
            words[places] = encoded.words(told[n])
        return Ready(results, buffer, begin + self._sums[0], scratch)

    def compute(
        self, pending: Pending, saved: Sequence[Any], do: Any
    ) -> tuple[torch.Tensor, ...] | None:
        """Compute gradients, given the operands of a call and out; None if they are unlike.

        PyTorch has checked the versions of saved tensors; users' hooks may have put others in place
        of them, elsewhere or with other strides.
        """
        if type(do) not in PLAIN:
            return None
        if len(saved) == _FEWEST:
            q, k, v, out = saved
        else:
            q, k, v, *others, out = saved
            if others[_MASK] is not pending.mask:
                return None
        place, queue = do.data_ptr(), self._queue
        found = (
            do.dtype, do.shape, do.stride(), do.get_device(), place & 15,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(),
            q.stride(), k.stride(), v.stride(), out.stride(),
        )  # fmt: skip
        if found != pending.expected or not queue.is_open():
            return None
        ready: Ready | None
        try:
            ready = pending.ready.pop()
        except IndexError:
            if (ready := self.prepared(pending, q)) is None:
                return None
        results, buffer, sums, _ = ready
        words = buffer.words
        for n in self._of_do:
            words[n] = place
        for places, encoded in self._maps_of_do:
            words[places] = encoded.words(place)
        stream = tensors.raw_stream(queue.device)
        count = self._sums[1]
        if count and (error := queue.clear(sums, 0, count, stream)):
            raise driver.error(error, driver.CLEAR)
        if self._adds:
            results[0].zero_()
        if stream != buffer.stream:
            buffer.move(stream)
        launch = queue.launch
        for arguments in buffer.calls:
            if error := launch(*arguments):
                raise self.launches.error(error, buffer, arguments)
        self.launches.unused.append(buffer)
        return results


# The order in which launches of gradients are told addresses but that of do.
_TOLD = "q", "k", "v", "out", "lse", "dq", "dk", "dv", "scratch"
_SCRATCH = _TOLD.index("scratch")
_FEWEST = 4  # tensors that are saved: q, k, v and out


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
