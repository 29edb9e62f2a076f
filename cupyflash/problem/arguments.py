"""Where the rows of a call lie, as users pass it: dense, packed, or with keys in a cache.

Each kind checks the operands that belong to it, and has the parts of a signature that do.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from ..arrays import cuda_device
from ..arrays.device_arrays import address, is_device_array
from ..errors import ArgumentError
from . import cached, coded, codes, device_args, validate
from .call import Array, Call, Problem, changed
from .options import DEFAULTS, Options


class Operands(NamedTuple):
    """Queries, keys and values as users pass them."""

    q: Any
    k: Any
    v: Any


class Part(NamedTuple):
    """What a rank has of a call.

    Attributes
    ----------
    len_q, len_k : int
        The queries and keys of all ranks.
    check : callable
        Refuses a call on arrays that do not have this rank's rows.
    placed : callable or None
        Returns options, for a problem, whose look-ups read what this rank has.
    """

    len_q: int
    len_k: int
    check: Callable[[Call], None]
    placed: Callable[[Options, Problem], Options] | None


Named: TypeAlias = dict[str, Any]
_NOTHING: Named = {}
_NO_NUMBERS: Mapping[str, int] = {}


@dataclass(frozen=True, eq=False)
class Dense:
    """Entries of equal lengths, (..., H, L, D), or one head, (L, D).

    Parameters
    ----------
    in_one_place : bool
        Whether all arrays have to be in one device's memory.
    """

    in_one_place: bool = True
    name: ClassVar[str] = "attention"
    has_whole_bias: ClassVar[bool] = False  # over ranks: one for all, not one with a rank's rows
    numbers: ClassVar[Mapping[str, int]] = _NO_NUMBERS

    def checked(self, x: Operands, given: coded.Fp8 | codes.NoCodes, options: Options) -> Call:
        """Return the validated call."""
        return validate.call(*x, options, self.in_one_place, given)

    @staticmethod
    def compute(backend: Any, call: Call, out: Array, lse: Any, scratch: Any) -> Any:  # noqa: ARG004, of a cache
        """Compute a validated call on a back end."""
        return backend.forward(call, out, lse)

    def checked_part(self, x: Operands, options: Options, part: Part) -> Call:
        """Return the validated call of a rank; its lengths are those of all ranks."""
        given = validate.call(*x)
        part.check(given)
        # A bias has this rank's rows, and columns for all keys.
        problem = given.problem.sized(len_k=part.len_k)
        if part.placed is not None:
            options = part.placed(options, problem.sized(len_q=part.len_q))
        arrays = given.q, given.k, given.v
        call = validate.with_options(problem, *arrays, given.were_matrices, options)
        return changed(call, problem=call.problem.sized(len_q=part.len_q))

    def signature(self, q: Any, k: Any, v: Any) -> tuple[str, Named] | None:  # noqa: ARG002, others look at them
        """Return words and arrays that tell calls apart, or None if they are not recognised."""
        return "", _NOTHING

    @property
    def alone(self) -> tuple[Hashable, Any, Any] | None:
        """A name for such calls and their two other operands, if there is nothing else."""
        return (self.name, None, None) if self.in_one_place else None

    def host_signature(self) -> tuple[str, Named] | None:
        """Return the same of a call on NumPy arrays; what these arrays contain tells calls apart.

        Lengths of a cache are no part of it.
        """
        return "", _NOTHING


class Packed:
    """Sequences one after the other, (H, total, D).

    What offsets hold is taken once: a later change of those in host memory changes nothing.

    Parameters
    ----------
    offsets_q, offsets_k : Any
        As users pass them.
    check : Any
        Whether offsets in device memory are read back; None: kernels check them.
    longest : pair of int, optional
        The most queries and keys of a sequence, where offsets are not read.
    """

    __slots__ = ("_taken", "_words", "check", "longest", "offsets_k", "offsets_q")
    name: ClassVar[str] = "attention_varlen"
    has_whole_bias: ClassVar[bool] = True
    numbers: ClassVar[Mapping[str, int]] = _NO_NUMBERS
    compute = staticmethod(Dense.compute)

    def __init__(
        self,
        offsets_q: Any,
        offsets_k: Any,
        check: Any = None,
        longest: tuple[int, int] | None = None,
    ) -> None:
        self.offsets_q, self.offsets_k, self.check = offsets_q, offsets_k, check
        self.longest = longest
        self._taken: tuple[Any, Any] | None = None
        self._words: tuple[str, Named] | None = None

    def _take(self, q: Any) -> tuple[Any, Any]:
        """Return offsets in device memory that nobody reads, and copies of all others."""
        if self._taken is None:
            reads = self.check is True
            if self.check is None and cached.CHECKS_ALL and is_device_array(q):
                reads = not cuda_device.is_capturing()
            offsets_q = offsets_k = self.offsets_q
            if reads or not is_device_array(offsets_q):
                offsets_q = device_args.taken(offsets_q, "offsets_q", q, reads)
            if self.offsets_k is offsets_k:
                offsets_k = offsets_q
            else:
                offsets_k = device_args.taken(self.offsets_k, "offsets_k", q, reads)
            self._taken = offsets_q, offsets_k
        return self._taken

    def _refuse_longer(self, q: Any, offsets: tuple[Any, Any]) -> None:
        """Refuse sequences in device memory that are longer than the caller says."""
        assert self.longest is not None
        if is_device_array(q) and not cuda_device.is_capturing():
            for name, x, most in zip(OFFSETS, offsets, self.longest, strict=True):
                if is_device_array(x):  # others are checked in any case
                    device_args.refuse_longer(name, device_args.read_offsets(x, name, q), most)

    def checked(self, x: Operands, given: coded.Fp8 | codes.NoCodes, options: Options) -> Call:
        """Return the validated call."""
        offsets = self._take(x.q)
        if self.longest is not None and cached.CHECKS_ALL:
            self._refuse_longer(x.q, offsets)
        return validate.varlen_call(
            *x, *offsets, self.check, options, given=given, longest=self.longest
        )

    def checked_part(self, x: Operands, options: Options, part: Part) -> Call:
        """Return the validated call of a rank, whose lengths are those of all ranks."""
        # Which rank computes what depends on lengths, so offsets are read.
        offsets, totals = (self.offsets_q, self.offsets_k, True), (part.len_q, part.len_k)
        if part.placed is not None:
            whole = validate.varlen_call(*x, *offsets, DEFAULTS, totals)
            options = part.placed(options, whole.problem)
        call = validate.varlen_call(*x, *offsets, options, totals)
        part.check(call)
        return call

    def signature(self, q: Any, k: Any, v: Any) -> tuple[str, Named] | None:  # noqa: ARG002, others look at them
        """Return words and arrays that tell calls apart, or None if they are not recognised.

        What offsets in host memory hold is among the words.
        """
        if self._words is None:
            self._words = self._signature(q)
        return self._words

    def _signature(self, q: Any) -> tuple[str, Named] | None:
        check = self.check
        if check is None:
            words = " packed"
        elif check is True or check is False:
            words = " packed, checked" if check else " packed, trusted"
        else:
            return None  # it may be wrong
        if self.longest is not None:
            if cached.CHECKS_ALL:
                return None
            words += f" of at most {self.longest}"
        offsets_q, offsets_k = self._take(q)
        if offsets_k is offsets_q and is_device_array(offsets_q):
            return words + " alike", {"offsets_q": offsets_q}
        named = {"offsets_q": offsets_q, "offsets_k": offsets_k}
        for name in OFFSETS:
            array = named[name]
            if is_device_array(array):
                continue
            if type(array) is not np.ndarray or array.nbytes > MOST_CONTENTS:
                return None
            words += f" {name} {array.dtype.str} {array.shape} {array.tobytes().decode('latin-1')}"
            del named[name]
        return words, named

    @property
    def alone(self) -> tuple[Hashable, Any, Any] | None:
        """As in `Dense`: offsets as they were taken, which nobody read of the device's memory."""
        if self._taken is None or self.longest is not None:
            return None
        if not (self.check is None or self.check is False):
            return None
        return (self.name, self.check), *self._taken

    def host_signature(self) -> tuple[str, Named] | None:
        """Return the same of a call on NumPy arrays, which these arrays' contents tell apart."""
        return " packed", {"offsets_q": self.offsets_q, "offsets_k": self.offsets_k}


@dataclass(frozen=True, eq=False)
class Cached:
    """Queries (B, Hq, L, D), or packed, of keys in a cache; the rest is as users pass it."""

    lengths: Any
    table: Any = None
    offsets_q: Any = None
    shared: Any = 0
    name: ClassVar[str] = "attention_cached"

    def checked(
        self, x: Operands, given: codes.CacheCodes | codes.NoCodes, options: Options
    ) -> Call:
        """Return the validated call."""
        integers = self.lengths, self.table, self.offsets_q
        return cached.call(*x, *integers, options, given, self.shared)

    @staticmethod
    def compute(backend: Any, call: Call, out: Array, lse: Any, scratch: Any) -> Any:
        """Compute a validated call on a back end."""
        return backend.cached(call, out, lse, scratch)

    def signature(self, q: Any, k: Any, v: Any) -> tuple[str, Named] | None:  # noqa: ARG002, others look at it
        """Return words and arrays that tell calls apart, or None if they are not recognised.

        A length of all entries is none of them, as the kernels that serve a call do not depend on
        it: `numbers` has it.
        """
        if cached.CHECKS_ALL or type(self.shared) is not int:
            return None
        words = f" of a cache with {self.shared} shared" if self.shared else " of a cache"
        lengths, table = self.lengths, self.table
        if not is_device_array(lengths):
            number = self._length
            if number is None or not is_device_array(k) or k.ndim != 4:
                return None
            room = k.shape[-2]
            if table is not None:
                room = room * table.shape[1] if is_device_array(table) and table.ndim == 2 else -1
            if not 0 <= number <= room:
                return None  # the check says why
            words, lengths = words + " of one length", None
        if is_device_array(k) and is_device_array(v) and address(k) == address(v):
            words += " of values in keys"  # which a kernel may rely on
        if lengths is table is self.offsets_q is None:
            return words, _NOTHING
        return words, {"lengths": lengths, "table": table, "offsets_q": self.offsets_q}

    @property
    def _length(self) -> int | None:
        """The length of all entries, if that is one number, or None."""
        lengths = self.lengths
        if type(lengths) is int:
            return lengths
        return int(lengths) if isinstance(lengths, np.integer) else None

    @property
    def numbers(self) -> Mapping[str, int]:
        """What kernels are told at each launch besides addresses, by name."""
        number = self._length
        return _NO_NUMBERS if number is None else {"len_k": number}

    @property
    def alone(self) -> tuple[Hashable, Any, Any] | None:
        """As in `Dense`: the lengths."""
        if self.table is not None or self.offsets_q is not None or self.shared != 0:
            return None
        return self.name, self.lengths, None

    def host_signature(self) -> tuple[str, Named] | None:
        """Return the same of a call on NumPy arrays, which these arrays' contents tell apart."""
        if type(self.shared) is not int:
            return None  # it may be wrong
        named = {"table": self.table, "offsets_q": self.offsets_q}
        return f" {self.shared} shared", {name: x for name, x in named.items() if x is not None}


def dense_or_packed(offsets_q: Any, offsets_k: Any) -> Dense | Packed:
    """Return dense rows, or packed ones if there are offsets."""
    if (offsets_q is None) != (offsets_k is None):
        raise ArgumentError(
            "offsets_q, offsets_k: got one without the other; expected both or neither."
        )
    return DENSE if offsets_q is None else Packed(offsets_q, offsets_k)


OFFSETS = "offsets_q", "offsets_k"
MOST_CONTENTS = 1 << 14  # bytes of offsets by which calls are told apart
DENSE, ANYWHERE = Dense(), Dense(in_one_place=False)
