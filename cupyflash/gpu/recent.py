"""Recognises calls on a GPU that say nothing but arrays and a mask, before a request is made.

The host's time of a small call is that of reading objects: each function and each dictionary takes
a part of it. So a call that was checked is found under a second key, too, by its arrays alone
(see `problem.replay`), and its launches are told addresses by their places and not by their names.
All that is unusual is left to `launch_cache`: another device or a thread without a context, a graph
that is being captured, arrays that are not aligned.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..arrays import reports, tape
from ..arrays.device_arrays import OutputSpec
from ..masks import Mask
from ..problem import cached, replay
from ..problem.arguments import MOST_CONTENTS, OFFSETS
from ..problem.replay import Entry
from .launch import CompiledRecipe

_ndarray = np.ndarray
_UNALIGNED = 15  # bits of addresses; see `launch_cache`
_AXES = 4  # of a cache
Told: TypeAlias = tuple[int, ...]


def again(
    rows: Hashable, q: Any, k: Any, v: Any, mask: Any, first: Any = None, second: Any = None
) -> Any:
    """Compute a call like an earlier one into a new array, and return that; or return None.

    Parameters
    ----------
    rows : hashable
        The function, and its arguments that are neither arrays nor masks.
    q, k, v : array
        CuPy's.
    mask : Mask or None
        As users pass it.
    first, second : array or int, optional
        The lengths of a cache, or offsets of queries and of keys.
    """
    seen = _seen(rows, q, k, v, mask, first, second)
    if seen is None:
        return None
    key, told = seen
    quick: Quick | None = replay.find_quick(key)
    return None if quick is None else quick.forward(told)


def keep(
    entry: Entry, rows: Hashable, q: Any, k: Any, v: Any, mask: Any, first: Any, second: Any
) -> None:
    """Keep a call that was checked; the last arguments are those of `again`."""
    if mask is not None and type(mask) is not Mask:
        return
    seen = _seen(rows, q, k, v, mask, first, second)
    if seen is None:
        return
    names: tuple[str, ...] = OFFSETS
    if second is None:
        names = ("len_k" if type(first) is int else "lengths",)
    quick = entry.quick or Quick.of(entry, names[: len(seen[1]) - len(_OPERANDS)])
    if quick is not None:
        replay.keep_quick(entry, quick, seen[0])


def _seen(
    rows: Hashable, q: Any, k: Any, v: Any, mask: Any, first: Any, second: Any
) -> tuple[Hashable, Told] | None:
    """Return the key of a call, and its addresses; None if it is none of those meant here."""
    kind = type(q)
    if type(k) is not kind or type(v) is not kind or cached.CHECKS_ALL:
        return None
    if mask is not None:
        mask, read = mask.structure
        if read:
            return None
    of_q, of_k, of_v = q.data, k.data, v.data
    at_q, at_k, at_v = of_q.ptr, of_k.ptr, of_v.ptr
    device = of_q.device_id
    bits = at_q | at_k | at_v
    form: Hashable
    told: Told
    if first is None:
        form, told = None, (at_q, at_k, at_v)
    elif type(first) is int:
        if k.ndim != _AXES or not 0 <= first <= k.shape[-2]:
            return None  # the check says why
        form, told = int, (at_q, at_k, at_v, first)
    elif type(first) is _ndarray:
        if type(second) is not _ndarray or first.nbytes + second.nbytes > MOST_CONTENTS:
            return None
        form = first.dtype, first.shape, first.tobytes()
        if second is not first:
            form = form, second.dtype, second.shape, second.tobytes()
        told = at_q, at_k, at_v
    elif type(first) is kind:
        of_first = first.data
        at_first = of_first.ptr
        bits |= at_first
        form = first.dtype, first.shape, first.strides, of_first.device_id
        if second is None or second is first:
            told = at_q, at_k, at_v, at_first
        elif type(second) is kind:
            of_second = second.data
            at_second = of_second.ptr
            bits |= at_second
            form = form, second.dtype, second.shape, second.strides, of_second.device_id
            told = at_q, at_k, at_v, at_first, at_second
        else:
            return None
    else:
        return None
    if bits & _UNALIGNED:
        return None
    key = (
        rows, mask, form, device, of_k.device_id, of_v.device_id, at_k == at_v,
        q.dtype, q.shape, q.strides, k.dtype, k.shape, k.strides, v.dtype, v.shape, v.strides,
    )  # fmt: skip
    return key, told


class Quick:
    """Makes the launches of a forward again, from the addresses alone.

    Parameters
    ----------
    compiled : CompiledRecipe
        The launches.
    spec : OutputSpec
        The output.
    places : mapping of str to (int, int)
        For each address that launches take: its place in what `forward` is told, to which the
        addresses of the output, of scratch and of uploads are added, and 0; and an offset.
    """

    __slots__ = ("_buffers", "_parts")

    def __init__(
        self, compiled: CompiledRecipe, spec: OutputSpec, places: Mapping[str, tuple[int, int]]
    ) -> None:
        launches, queue, uploads = compiled.launches, compiled.queue, compiled.uploads
        self._buffers = launches.buffers(launches.told(places))
        has_reports, size = bool(compiled.reports), compiled.scratch_size
        own = size > 0 or uploads is not None  # memory that a graph would need
        memory = spec.new, queue.alloc, size
        self._parts = queue, queue.device, *memory, uploads, own, has_reports

    @staticmethod
    def of(entry: Entry, others: Sequence[str]) -> Quick | None:
        """Return what launches a call that is kept, or None; `others` are told after q, k and v."""
        compiled, specs = entry.compiled, entry.specs
        if type(compiled) is not CompiledRecipe or entry.tables or entry.pairs:
            return None
        if compiled.launches.waits or not compiled.queue.functions.launch:
            return None
        names = [*_OPERANDS, *others, "out"]
        places = {name: (n, 0) for n, name in enumerate(names)}
        scratch, uploads, nothing = range(len(names), len(names) + 3)
        places |= {name: (scratch, place) for name, place in compiled.places}
        if compiled.uploads is not None:
            places |= {name: (uploads, place) for name, place in compiled.uploads.places.items()}
        places |= {name: (nothing, address) for name, address in (compiled.reports or {}).items()}
        places["seed"] = nothing, 0
        if not compiled.launches.names <= places.keys():
            return None
        return Quick(compiled, specs[0], places)

    def forward(self, told: Told) -> Any:
        """Return the output for some addresses; None if the call must go another way."""
        queue, device, empty, alloc, size, uploads, own, has_reports = self._parts
        if not queue.is_open() or tape.current() is not None:
            return None
        stream = queue.current_stream()
        pointer = stream.ptr
        if own and pointer and stream.is_capturing():
            return None
        if has_reports:
            reports.refuse_offsets(device)
        at_scratch = at_upload = 0
        try:
            out = empty()
            if size:
                scratch = alloc(size)
                at_scratch = scratch.ptr
            if uploads is not None:
                upload = uploads.of(pointer)
                at_upload = upload.owner.data.ptr
        except MemoryError:
            return None  # the other way says for what there was none
        told += out.data.ptr, at_scratch, at_upload, 0
        buffer = self._buffers.take()
        if failed := queue.launch(buffer.block, pointer, *told):
            raise buffer.error(failed)
        self._buffers.unused.append(buffer)
        return out


_OPERANDS = "q", "k", "v"
