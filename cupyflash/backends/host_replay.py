"""Computes calls on NumPy arrays again that look like an earlier one (see `problem.replay`).

What an entry keeps is the call of `reference.cpu`, with its proofs, packed parameters and scratch;
only addresses are new, and the contents of small arrays that proofs have read are part of the key.
Of Booleans that must all be true for a mask, it is enough to know whether all or any are true.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..expr.structure import Structure
from ..expr.tile_classes import RANGE_LIMIT
from ..masks import Mask
from ..problem import replay
from ..problem.call import Call, Gradients
from ..problem.options import Options
from ..problem.replay import Entry, Signature, UnlikeError
from .cpu_tiles import FEWEST_KEYS
from .host_calls import Calls

MOST_CONTENTS = 1 << 16  # bytes of an array that is compared by its contents
MOST_LOOKED_AT = 1 << 12  # bytes of arrays that a proof reads, unless they are the whole mask
_ALIGNED, _WRITEABLE = 0x100, 0x400  # of numpy.ndarray.flags.num

_ndarray = np.ndarray
_NOTHING: Mapping[str, Any] = {}


class HostSignature(Signature):
    """The signature of a call on NumPy arrays."""

    __slots__ = (
        "_conditions",
        "_extremes",
        "_form",
        "_mask_at",
        "grows",
        "mask",
        "named",
        "nbytes",
        "numbers",
        "rows",
    )

    def __init__(
        self,
        call: Hashable,
        read: Mapping[str, Any],
        options: Options,
        written: Mapping[str, Any],
        grows: bool = False,
    ) -> None:
        self.grows = grows  # the number of keys is no part of it
        self.named: dict[str, Any] = {}  # all arrays, and None
        self.rows: Any = None
        self.mask: Any = options.mask
        # Ids of arrays of which it is enough to know whether all or any are true.
        self._conditions = {id(options.mask)}
        self._extremes: list[Any] = []  # those of them that were read
        self.nbytes = 0  # of contents
        self._form: Structure | None = None  # of the mask
        self._mask_at = 0
        self.numbers: tuple[int, ...] = ()  # of the mask, for which its form has symbols
        super().__init__(call, read, options, written)

    def _take_arrays(self, named: Mapping[str, Any]) -> None:
        """Take arrays, or None, by the names that kernels have for them."""
        if "seed_gmem" in named:
            raise UnlikeError  # kernels are told the number
        parts = self._parts
        self._taken.append(named)
        self.named.update(named)
        for name, array in named.items():
            if array is None:
                parts.append(None)
                continue
            if type(array) is not _ndarray:
                raise UnlikeError
            flags = array.flags.num & (_ALIGNED | _WRITEABLE)
            if self.grows and name in ("k", "v"):
                shape, is_long = array.shape, array.shape[-2] >= FEWEST_KEYS
                parts += (array.dtype, shape[:-2], shape[-1], array.strides[-1], is_long, flags)
                continue
            parts += (array.dtype, array.shape, array.strides, flags)

    def _take_read(self, name: str, array: Any) -> None:
        """Take an array that a mask, a score change or the bias reads.

        Proofs, and the ranges of keys that a mask gives, depend on the contents of some.
        """
        self._take_arrays({name: array})
        if id(array) in self._conditions and array.dtype.kind == "b":
            self._parts.append(extremes(array))
            self._extremes.append(array)
        elif self._option == "mask" or array.dtype.kind in "iub":
            self.take_contents(array)

    def _look_at(self, structure: Structure, read: Sequence[Any]) -> None:
        """Refuse an index that may depend on the contents of an array of floats."""
        if self._option == "mask" and read:
            self._find_conditions(structure, read)
        if read and structure.has_floor and any(x.dtype.kind not in "iub" for x in read):
            raise UnlikeError
        if self._option == "mask" and not read and structure.form is not None:
            self._form, self.numbers = structure.form, structure.numbers
            self._mask_at = len(self._parts) + 1  # behind its name

    def _find_conditions(self, structure: Structure, read: Sequence[Any]) -> None:
        """Find the arrays of a mask whose contents no proof reads, but for whether all are true."""
        is_whole = structure.nodes[-1][0] in ("lookup", "aligned")
        for place in structure.conditions:
            if is_whole or read[place].nbytes > MOST_LOOKED_AT:
                self._conditions.add(id(read[place]))

    def hold(self, entry: Entry) -> None:
        """Keep nothing: an entry has scratch, and who has the signature may live long."""

    @property
    def form(self) -> Hashable:
        """The key of calls that differ in numbers of the mask; None if there are none."""
        if self._form is None:
            return None
        parts = list(self._parts)
        parts[self._mask_at] = self._form
        return tuple(parts)

    def take_contents(self, array: Any) -> None:
        """Make the contents of an array part of the key."""
        if type(array) is not _ndarray:
            raise UnlikeError
        if array.dtype.kind == "b" and (found := extremes(array)) != (False, True):
            self._parts.append(found)
            return
        if array.nbytes > MOST_CONTENTS:
            raise UnlikeError
        self._parts.append(array.tobytes())
        self.nbytes += array.nbytes

    def has_contents(self, array: Any) -> bool:
        """Return whether the contents of an array that a mask reads are part of the key."""
        from cupyflash.reference.cpu.addresses import address

        if not self._extremes:
            return True  # those of all arrays are
        place = address(array)
        known = [x for name, x in self.named.items() if name.startswith("read ")]
        return any(address(x) == place for x in known) and all(
            address(x) != place for x in self._extremes
        )

    @property
    def places(self) -> Mapping[str, int]:
        """Where the arrays are, by name."""
        from cupyflash.reference.cpu.addresses import address

        return {name: address(x) for name, x in self.named.items() if x is not None}

    def forward(self, out: Any, lse: Any, workspace: Any = None) -> Any:  # noqa: ARG002, a GPU's
        """Compute a forward again."""
        entry = replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        out_spec, lse_spec = entry.specs
        if out is None:
            out = out_spec.empty()
        if lse is None:
            lse = lse_spec.empty()
        is_done = call.forward(self, out, lse)
        entry.compiled.free.append(call)
        return (out, lse) if is_done else None

    def forward_tangent(self, results: Sequence[Any]) -> Any:
        """Compute a forward with tangents again."""
        entry = replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        made = [
            spec.empty() if x is None else x for x, spec in zip(results, entry.specs, strict=True)
        ]
        is_done = call.forward_tangent(self, made)
        entry.compiled.free.append(call)
        return made if is_done else None

    def backward(self, grads_out: Gradients | None, workspace: Any) -> Any:
        """Compute the gradients of a call again."""
        entry = None if workspace is not None else replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        gradients = self._made(entry, grads_out)
        is_done = call.backward(self, gradients)
        entry.compiled.free.append(call)
        return gradients if is_done else None

    def backward_of_unchanged(self, before: Any) -> Any:
        """Compute the gradients of a call again, if the arrays are as they were before."""
        entry = replay.find(self)
        if entry is None or (call := entry.compiled.take()) is None:
            return None
        gradients = None
        if call.sums_inputs and before.is_unchanged_apart_from_summed():
            made = self._made(entry, None)
            if call.backward(self, made, sums_inputs=True) and before.has(call.found):
                gradients = made
        entry.compiled.free.append(call)
        return gradients

    def _made(self, entry: Entry, grads_out: Gradients | None) -> Gradients:
        """Return arrays for gradients: those given, and new ones."""
        made = self.given(grads_out)
        for n, spec in enumerate(entry.specs):
            if spec is not None and made[n] is None:
                made[n] = spec.empty()
        return self.gradients(made)

    def keep(self, served: Any, results: Any) -> None:
        """Keep a call that was checked and computed."""
        call = served.compiled
        if call is None or call.nbytes > replay.MOST_BYTES // 4 or not call.bind(self):
            return
        results = self.every(results)
        key = self.form if call.serves_numbers else self.key
        before = replay.find_as(self, key)
        calls = Calls() if before is None else before.compiled
        if count := calls.add(call):
            nbytes = count * call.nbytes + self.nbytes + calls.of_quick
            replay.keep_as(self, calls, (), results, nbytes, key)

    def spec(self, array: Any) -> Any:
        """Return how an array like a result is made."""
        return _Spec(array)


def extremes(array: Any) -> tuple[bool, bool]:
    """Return whether all Booleans of an array are true, and whether any is.

    Most arrays are not read to the end. Of small ones, kernels find out themselves whether any is
    true; they count as if it were.
    """
    own = array
    if 0 in array.strides:
        own = array[tuple(slice(None if stride else 1) for stride in array.strides)]
    every = bool(own.all())
    return every, every or array.size <= RANGE_LIMIT["cpu"] or bool(own.any())


class _Spec:
    """Shape, dtype and memory order of an array to make, which has no gaps."""

    __slots__ = ("_dtype", "_order", "_shape")

    def __init__(self, array: Any) -> None:
        order = sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], axis))
        self._shape, self._dtype = tuple(array.shape[axis] for axis in order), array.dtype
        self._order = None
        if order != list(range(array.ndim)):
            self._order = tuple(int(x) for x in np.argsort(order))

    def empty(self) -> Any:
        """Return such an array, uninitialised."""
        made = np.empty(self._shape, self._dtype)
        return made if self._order is None else made.transpose(self._order)


def grows(options: Options | Call, dropout: Any) -> bool:
    """Return whether a call of one query can be made again with any number of keys.

    The call is dense and has a batch axis.
    """
    mask = options.mask
    plain = mask is None or (isinstance(mask, Mask) and not mask.structure[1])
    if not (plain and options.bias is None is options.score_mod):
        return False
    return isinstance(dropout, (int, float)) and not dropout


def _is_growing(kind: Hashable, read: Mapping[str, Any], options: Options) -> bool:
    """Return whether the number of keys is no part of a call's signature."""
    if kind not in ("forward", "forward without lse"):
        return False
    q, k, v = read["q"], read["k"], read["v"]
    if q.ndim < 3 or q.shape[-2] != 1 or k.ndim < 3 or v.ndim < 3 or k.dtype != q.dtype:
        return False
    return grows(options, options.dropout)


def signature(
    kind: Hashable,
    read: Mapping[str, Any],
    options: Options,
    written: Mapping[str, Any],
    contents: Mapping[str, Any] = _NOTHING,
    rows: Any = None,
) -> HostSignature | None:
    """Return the signature of a call on NumPy arrays, or None if it must be checked every time.

    Parameters
    ----------
    kind : hashable
        Which function, and what else tells calls of it apart.
    read, written : mapping of str to (array or None)
        Arrays by the kernels' names.
    options : Options
        The options of the call.
    contents : mapping of str to array
        Arrays whose contents tell calls apart.
    rows : Any
        Where rows lie, as users pass it; of a cache, it has the lengths.
    """
    try:
        grows = _is_growing(kind, read, options)
        if read["q"].dtype.itemsize == 2:  # see `reference.cpu.amx`
            kind = kind, os.environ.get("CUPYFLASH_AMX")
        seen = HostSignature(kind, read, options, written, grows)
        if contents:
            seen._take_arrays(contents)
            for array in contents.values():
                seen.take_contents(array)
            seen.key = tuple(seen._parts)
        seen.rows = rows
        return seen
    except (UnlikeError, AttributeError):
        return None
