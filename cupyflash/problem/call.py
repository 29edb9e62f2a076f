"""The frozen description of one call, and what calls return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

import numpy as np

from ..arrays import dtypes
from ..arrays.typed import A, Array, B
from ..expr.nodes import LookupTable
from ..masks import Mask
from ..scores import Score
from .cache import Cache, Length
from .cached_rows import Rows
from .encoding import NUMBERS, Encoding, scale_steps

__all__ = [
    "Array",
    "Cache",
    "Call",
    "Gradients",
    "Plan",
    "Problem",
    "Results",
    "changed",
    "scale_steps",
]

Results = tuple[Array, Array]  # out and lse
T = TypeVar("T")


def changed(record: T, **fields: Any) -> T:
    """Return a record with other fields.

    A call by pieces makes two for each piece, and `dataclasses.replace`, which runs the constructor
    of a frozen class, takes five times as long.
    """
    made: T = object.__new__(type(record))
    made.__dict__.update(record.__dict__, **fields)
    return made


class _Gradients(NamedTuple, Generic[A, B]):
    dq: A
    dk: A
    dv: A
    dbias: B
    dsink: B


class Gradients(_Gradients[A, B]):
    """Gradients, each with the shape and dtype of its array.

    They are a tuple of five, and what learned look-ups have is an attribute besides.

    Attributes
    ----------
    dq, dk, dv : array
        Summed over the axes along which q, k or v was broadcast, and over the query heads that
        share a key-value head.
    dbias, dsink : array or None
        None if the call had no bias or no sink.
    dlookups : mapping of LookupTable to array
        The gradient of ``table.array`` for each ``table = lookup(array, learned=True)`` that the
        score changes read; empty if there is none.
    """

    dlookups: Mapping[LookupTable, Any] = MappingProxyType({})

    def __new__(
        cls,
        dq: A,
        dk: A,
        dv: A,
        dbias: B = None,  # type: ignore[assignment]  # B is None then
        dsink: B = None,  # type: ignore[assignment]  # as above
        *,
        dlookups: Mapping[LookupTable, Any] | None = None,
    ) -> Self:
        """Make gradients of arrays."""
        made = tuple.__new__(cls, (dq, dk, dv, dbias, dsink))
        if dlookups is not None:
            made.dlookups = dlookups
        return made


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes, types and numbers of a call, without its operands."""

    lead: tuple[int, ...]
    heads: int
    heads_kv: int
    rows: Rows
    d: int
    d_v: int
    dtype: np.dtype[Any]
    scale: float = 1.0
    dropout: float = 0.0
    seed: Any = 0  # a number, or a 0-d array of uint64 in device memory
    precision: str | None = None  # "tf32x3": float32 may be multiplied by tensor cores
    heads_in_rows: int = 1  # query heads whose queries are rows of one head: see pack_gqa
    # The problem may be a piece of a larger one, `whole`. Its first query, key, head and entry have
    # these positions there: see positions.
    origin_q: int = 0
    origin_k: int = 0
    origin_h: int = 0
    origin_b: int = 0
    whole: Problem | None = None

    @property
    def len_q(self) -> Length:
        """Queries of entries: a number, or an array over them."""
        return self.rows.len_q

    @property
    def len_k(self) -> Length:
        """Keys of entries: a number, or an array over them."""
        return self.rows.len_k

    @property
    def start_q(self) -> Length:
        """The first row of the queries of each entry."""
        return self.rows.start_q

    @property
    def start_k(self) -> Length:
        """The first row of the keys of each entry."""
        return self.rows.start_k

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other."""
        return self.rows.packed

    @property
    def array_lead(self) -> tuple[int, ...]:
        """The leading axes of results and of other arrays of queries."""
        return self.rows.array_lead(self.lead)

    def sized(self, len_q: Any = None, len_k: Any = None) -> Problem:
        """Return the same problem with other lengths."""
        return changed(self, rows=self.rows.sized(len_q, len_k))

    @property
    def accumulator(self) -> np.dtype[Any]:
        """The dtype of scores, sums, LSE and every intermediate result."""
        return dtypes.accumulator(self.dtype)

    @property
    def heads_of_entry(self) -> int:
        """Query heads of each entry of the whole problem."""
        return self.heads if self.whole is None else self.whole.heads

    @property
    def origin_b_h(self) -> int:
        """Number of the first head of the first entry among those of all entries."""
        return self.origin_b * self.heads_of_entry + self.origin_h

    @property
    def batch(self) -> int:
        """Number of batch entries or sequences."""
        return math.prod(self.lead)


@dataclass(frozen=True, eq=False)
class Call:
    """A validated call: its problem, its operands as (..., H, L, D), and its options."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    mask: Mask | None
    score_mod: Score | None
    bias: Array | None
    sink: Array | None
    were_matrices: tuple[bool, bool, bool]  # q, k, v came as two-dimensional arrays, one head
    device: int | None = None  # the device of all arrays of the call; None: host memory
    beside: bool = False  # other kernels, which send and receive, hold some SMs for a while
    encoding: Encoding = NUMBERS  # what the elements of q, k and v mean

    @property
    def rows(self) -> Rows:
        """Where rows of entries lie."""
        return self.problem.rows

    @property
    def cache(self) -> Cache:
        """The cache of a call over one."""
        return cast(Cache, self.problem.rows.cache)

    @property
    def matrices(self) -> bool:
        """Whether every operand came as a matrix, so that the output is one."""
        return all(self.were_matrices)

    @property
    def axes(self) -> str:
        """Which axis of q, k and v is which, in words."""
        q, k, v = map(self._axes_of, "qkv")
        return f"q: {q}; k and v: {k}" if k == v else f"q: {q}; k: {k}; v: {v}"

    def _axes_of(self, name: str) -> str:
        *lead, heads, length, _ = getattr(self, name).shape
        problem = self.problem
        before, rows = problem.rows.axis_words(name, tuple(lead), length, problem.batch)
        size = problem.d_v if name == "v" else problem.d
        words = [before] if before else []
        return ", ".join([*words, f"heads {heads}", rows, f"head size {size}"])


@dataclass(frozen=True)
class Plan:
    """Which kernel serves a problem, with which tiles, and why.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    block_q, block_kv : int
        Queries and keys of a tile.
    reason : str
        Why this kernel and these tiles.
    axes : str
        Which axis of q, k and v is which; arrays of shape (B, L, H, D) show here.
    """

    kernel: str
    block_q: int
    block_kv: int
    reason: str
    axes: str = field(default="", compare=False)
