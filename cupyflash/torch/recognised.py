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
from typing import Any

import torch

from ..arrays.device_arrays import is_device_array
from ..gpu import launch_cache
from ..gpu.launch import CompiledRecipe
from ..masks import Mask
from . import tensors
from .operands import Operands, Settings
from .tensors import PLAIN, SEEDS

MOST = 2048  # signatures that are remembered: a generation has one for each number of keys
MOST_GRADIENTS = 16  # of one of them
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
    """

    __slots__ = ("_mask", "_strides", "known")

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

    def gradients(
        self,
        deterministic: bool,
        operands: Sequence[Any],
        out: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor | None,
    ) -> list[torch.Tensor] | None:
        """Compute the gradients of a call, if they are like some of an earlier one.

        It may have a mask, and no other tensors than q, k and v. This is quicker than a signature
        of their own. PyTorch has checked the versions of its saved tensors; users' hooks may have
        put others in place of them, elsewhere or with other strides.
        """
        addresses, known = self.addresses, self.known
        q, k, v, *others = operands
        if known is None or do is None or type(do) not in PLAIN:
            return None
        if others and others[_MASK] is not self._mask:
            return None
        at = do.data_ptr()
        found = known.gradients.get(_kind_of(deterministic, do, at))
        if (
            found is None
            or q.data_ptr() != addresses["q"]
            or k.data_ptr() != addresses["k"]
            or v.data_ptr() != addresses["v"]
            or out.data_ptr() != addresses.get("out")  # nothing if CuPy had to launch
            or lse.data_ptr() != addresses.get("lse")
            or (q.stride(), k.stride(), v.stride()) != self._strides
            or out.stride() != known.strides
        ):
            return None
        return found.launch({**addresses, "d_out": at}, q)

    def keep_gradients(self, deterministic: bool, do: torch.Tensor, seen: Signature) -> None:
        """Keep gradients of this call, whose signature was `seen`, for `gradients`."""
        if self.known is not None and seen.known is not None:
            kept = self.known.gradients
            if len(kept) >= MOST_GRADIENTS:
                kept.clear()
            kept[_kind_of(deterministic, do, do.data_ptr())] = seen.known


def _kind_of(deterministic: bool, do: torch.Tensor, place: int) -> Hashable:
    """Return what tells gradients of a call from others of it."""
    return deterministic, do.dtype, do.shape, do.stride(), do.is_cuda, do.get_device(), place & 15


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
    strides : tuple of int
        Of its first result.
    gradients : dict
        What is kept about the gradients of such calls.
    """

    __slots__ = ("_compiled", "_forms", "_queue", "_scratch", "_tables", "gradients", "strides")

    def __init__(
        self,
        compiled: CompiledRecipe,
        tables: Sequence[tuple[str, str]],
        results: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._compiled, self._tables, self._queue = compiled, tables, compiled.queue
        self._scratch = compiled.workspace_size
        self._forms = [
            (name, tuple(x.shape), x.stride(), None if x.dtype is dtype else x.dtype)
            for name, x in results.items()
        ]
        self.strides = self._forms[0][2]
        self.gradients: dict[Hashable, Known] = {}

    def launch(self, addresses: dict[str, int], q: torch.Tensor) -> list[torch.Tensor] | None:
        """Compute a call into new tensors; None if it must go through CuPy."""
        compiled, queue, empty = self._compiled, self._queue, q.new_empty_strided
        if not queue.is_open():
            return None
        made = []
        for name, shape, strides, dtype in self._forms:
            x = empty(shape, strides) if dtype is None else empty(shape, strides, dtype=dtype)
            addresses[name] = place = x.data_ptr()
            if place & 15:
                return None
            made.append(x)
        for name, place_name in self._tables:
            addresses[name] = addresses[place_name]
        if compiled.adds_to_dq:
            made[0].zero_()
        workspace = 0
        if self._scratch:
            scratch = empty((self._scratch,), (1,), dtype=torch.uint8)
            workspace = scratch.data_ptr()
        compiled.start(addresses, workspace, tensors.raw_stream(queue.device))
        return made


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
