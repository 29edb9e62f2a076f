"""The frozen description of one call, and what calls return."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..arrays import dtypes
from ..arrays.typed import A, B
from ..masks import Mask
from ..scores import Score
from .formats import Format

Array = np.ndarray[Any, Any]
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


class Gradients(NamedTuple, Generic[A, B]):
    """Gradients, each with the shape and dtype of its array.

    Attributes
    ----------
    dq, dk, dv : array
        Summed over the axes along which q, k or v was broadcast, and over the query heads that
        share a key-value head.
    dbias, dsink : array or None
        None if the call had no bias or no sink.
    """

    dq: A
    dk: A
    dv: A
    dbias: B = None  # type: ignore[assignment]
    dsink: B = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Problem:
    """Sizes, types and numbers of a call, without its arrays.

    Lengths and starts are numbers, or in variable-length calls arrays over the sequences.
    """

    lead: tuple[int, ...]
    heads: int
    heads_kv: int
    len_q: Any
    len_k: Any
    start_q: Any
    start_k: Any
    packed: bool
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
class Codes:
    """What codes mean: attention is that of ``scale * code``.

    Attributes
    ----------
    k_form, v_form : Format or None
        The formats of keys and of values; None of those that are numbers. If queries are codes,
        too, all three have one format.
    k_scale, v_scale : array of float32 or None
        They broadcast to the rows of keys and of values, with a last axis of 1, or one scale for
        each group of columns; None where there are no codes.
    q_scale : array of float32 or None
        The same of queries; None if these are numbers.
    """

    k_form: Format | None
    v_form: Format | None
    k_scale: Array | None
    v_scale: Array | None
    q_scale: Array | None = None

    @property
    def scales(self) -> dict[str, Array]:
        """The scales that there are, by name."""
        named = {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: scale for name, scale in named.items() if scale is not None}

    @property
    def form(self) -> Format:
        """The one format of queries, keys and values that are all codes."""
        assert self.k_form is not None
        assert self.k_form == self.v_form
        return self.k_form

    @property
    def words(self) -> str:
        """The formats in words."""
        if self.k_form == self.v_form and self.k_form is not None:
            return self.k_form.name
        sides = {"keys": self.k_form, "values": self.v_form}
        return " and ".join(f"{form.name} {side}" for side, form in sides.items() if form)


def scale_steps(scale: Array) -> tuple[int, int, int, int]:
    """Return the bytes between scales along pages or entries, heads, rows and groups of columns.

    They are 0 where there is one scale for all.
    """
    steps = [0 if n == 1 else step for n, step in zip(scale.shape, scale.strides, strict=True)]
    page, head, row, group = [0] * (4 - len(steps)) + steps
    return page, head, row, group


@dataclass(frozen=True, eq=False)
class Cache:
    """Where the keys and values of a call over a cache are, and how many it holds.

    Attributes
    ----------
    capacity : int
        The most positions of an entry.
    lengths : int or array
        How many positions every entry holds, or (B,) integers, how many each entry holds.
    table : array or None
        (B, N) integers, the pages of each entry's positions; None if k and v have a row for each
        position.
    page_size : int
        Positions of a page; without a table, the capacity.
    codes : Codes or None
        What keys and values mean if they are codes.
    shared : int
        Positions, from the first one on, at which all entries have the rows of entry 0.
    """

    capacity: int
    lengths: Any
    table: Array | None
    page_size: int
    codes: Codes | None = None
    shared: int = 0


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
    offsets: tuple[Any, Any] | None = None  # of packed arrays, as passed; a cache has the first
    cache: Cache | None = None  # k and v are its arrays, and lengths of keys lie in its capacity
    device: int | None = None  # the device of all arrays of the call; None: host memory
    beside: bool = False  # other kernels, which send and receive, hold some SMs for a while
    codes: Codes | None = None  # what q, k and v mean if all three are codes

    @property
    def matrices(self) -> bool:
        """Whether every operand came as a matrix, so that the output is one."""
        return all(self.were_matrices)

    @property
    def axes(self) -> str:
        """Which axis of q, k and v is which, in words."""
        q, k, v = (
            self._axes_of(x, rows)
            for x, rows in zip("qkv", ("queries", "keys", "keys"), strict=True)
        )
        return f"q: {q}; k and v: {k}" if k == v else f"q: {q}; k: {k}; v: {v}"

    def _axes_of(self, name: str, rows: str) -> str:
        *lead, heads, length, _ = getattr(self, name).shape
        size = self.problem.d_v if name == "v" else self.problem.d
        words = [f"batch {' x '.join(map(str, lead))}"] if lead else []
        words += [f"heads {heads}", f"{rows} {length}"]
        if self.cache is not None and rows == "keys":
            words[-1] = f"room for {length} keys"
            if self.cache.table is not None:
                words[0], words[-1] = f"pages {lead[0]}", f"keys of a page {length}"
        elif self.problem.packed:
            words[-1] += f" in {self.problem.batch} sequences"
        return ", ".join([*words, f"head size {size}"])


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
