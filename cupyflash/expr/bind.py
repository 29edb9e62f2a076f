"""Binds an expression to a problem's shape: aligned arrays become look-ups, indices are proven.

An array that a constructor aligns with the batch, the heads or the positions (`dense`, `segments`,
`lengths`, a bias) broadcasts like any array operand. Which of its axes have length 1, and how the
flat batch index splits over leading axes, is known only when it meets a problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from ..arrays.device_arrays import is_device_array, to_device
from ..errors import ArgumentError
from .evaluate import evaluate_exactly, host
from .functions import POSITIONS
from .interval import EVERYTHING, Bounds, bounds
from .nodes import (
    LOOKUPS,
    Expr,
    LookupTable,
    array_type,
    as_expr,
    lookup_node,
    operation,
    rebuild,
    remade,
    symbol,
    walk,
)
from .sharded import HeldArray, check_whole

_B = POSITIONS[0]
NO_NUMBERS: Mapping[str, int] = {}


class Sizes(Protocol):
    """The sizes of a problem, as far as masks and scores need them."""

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading axes; their product is the number of batch entries."""

    @property
    def heads(self) -> int:
        """Query heads."""

    @property
    def len_q(self) -> Any:
        """Queries of each batch entry: a number, or an array over b."""

    @property
    def len_k(self) -> Any:
        """Keys of each batch entry."""

    @property
    def start_q(self) -> Any:
        """First packed row of each sequence; 0 where nothing is packed."""

    @property
    def start_k(self) -> Any:
        """First packed row of each sequence's keys."""

    @property
    def packed(self) -> bool:
        """Whether sequences of different lengths lie one after the other."""


@dataclass(frozen=True)
class Dense:
    """Sizes of a problem whose batch entries all have the same lengths."""

    lead: tuple[int, ...]
    heads: int
    len_q: int
    len_k: int
    start_q: int = 0
    start_k: int = 0
    packed: bool = False


@dataclass(frozen=True)
class Axis:
    """One trailing axis of an aligned array: the index that reads it, and the size that fits."""

    index: Expr
    size: str  # "heads", "len_q", "len_k", or a quotient rounded up, as in "len_q/64"
    exact: int | None = None  # a fixed size instead
    shared: bool = False  # the array's length may divide the size: neighbours share an element


@dataclass(frozen=True)
class Alignment:
    """How an array lines up with a problem."""

    array: Any
    argument: str
    axes: tuple[Axis, ...]
    lead: bool = True  # leading axes broadcast with the batch's
    packed: bool = False  # in variable-length calls packed rows index it, without a batch axis
    contains: bool = False  # a condition: whether a row of the last axis has its index
    table: LookupTable | None = None  # the look-up that has the array's gradient


def aligned(alignment: Alignment) -> Expr:
    """Return a node that reads an aligned array at the positions of a problem."""
    kind = "bool" if alignment.contains else array_type(alignment.array, alignment.argument)
    return Expr("aligned", tuple(axis.index for axis in alignment.axes), kind, alignment)


def bind(root: Expr, sizes: Sizes, numbers: Mapping[str, int] = NO_NUMBERS) -> Expr:
    """Return `root` with every aligned array resolved for a problem of these sizes.

    `numbers` are symbols of `root`, and how far from 0 they are at most.

    Raises
    ------
    ArgumentError
        If an array does not broadcast, or if an index may be out of range, a divisor may be 0, a
        shift may be negative, or an integer may leave 64 bits.
    """

    def resolved(node: Expr) -> Expr | None:
        if node.op in LOOKUPS:
            check_whole(node.value[0], "lookup")
        return resolve(node.value, sizes) if node.op == "aligned" else None

    bound = rebuild(root, resolved)
    prove(bound, sizes, numbers)
    return hold_indices(bound)


def hold_indices(root: Expr) -> Expr:
    """Return `root` with each index that depends on an array's elements clamped to its axis.

    The elements may change between the proof and the kernel, which reads them again. The minimum is
    taken first: compilers do not know the length of an axis, so they cannot infer from their
    assumptions about the index that clamping is unnecessary.
    """
    done: dict[Expr, Expr] = {}
    reads: set[Expr] = set()  # nodes that depend on elements
    for node in walk(root):
        args = tuple(done[arg] for arg in node.args)
        if node.op in LOOKUPS:
            shape = node.value[0].shape
            axes = len(shape) - (node.op == "contains")  # its last operand is not an index
            args = tuple(
                operation("maximum", operation("minimum", held, shape[n] - 1), 0)
                if n < axes and index in reads
                else held
                for n, (index, held) in enumerate(zip(node.args, args, strict=True))
            )
        if node.op in LOOKUPS or any(arg in reads for arg in node.args):
            reads.add(node)
        same = all(new is old for new, old in zip(args, node.args, strict=True))
        done[node] = node if same else Expr(node.op, args, node.type, node.value)
    return done[root]


def in_host_memory(root: Expr) -> Expr:
    """Return `root` with copies of the arrays that it reads in device memory."""
    return with_arrays(root, lambda array: host(array) if is_device_array(array) else array)


def in_device_memory(root: Expr) -> Expr:
    """Return `root` with copies, on the current device, of the arrays it reads in host memory."""
    return with_arrays(
        root, lambda array: array if is_device_array(array) else to_device(array, array.dtype)
    )


def with_arrays(root: Expr, copy: Callable[[Any], Any]) -> Expr:
    """Return `root` with what `copy` makes of each array that it reads, which it is asked once."""
    copies: dict[int, Any] = {}

    def replaced(node: Expr, args: tuple[Expr, ...]) -> Expr | None:
        if node.op not in (*LOOKUPS, "aligned"):
            return None
        array = node.value.array if node.op == "aligned" else node.value[0]
        if isinstance(array, HeldArray):
            return None  # pieces have its elements
        if id(array) not in copies:
            copies[id(array)] = copy(array)
        mine = copies[id(array)]
        if mine is array:
            return None
        if node.op in LOOKUPS:
            return Expr(node.op, args, node.type, (mine, *node.value[1:]))
        return Expr(node.op, args, node.type, replace(node.value, array=mine))

    return remade(root, replaced)


def extent(sizes: Sizes, name: str) -> int:
    """Return the largest length along an axis: "heads", "len_q", "len_k" or a quotient."""
    base, _, divisor = name.partition("/")
    longest = int(max(_ends(getattr(sizes, base))))
    return -(-longest // int(divisor or 1))


def _ends(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (int(value.min()), int(value.max())) if value.size else (0, 0)


def _padding_hint(shape: tuple[int, ...], full: tuple[int, ...]) -> str:
    """Return how to pass (B, Lk) or (B, 1, Lk), which say what each entry's keys are."""
    if len(full) == 4 and len(shape) in (2, 3) and shape in (full[::3], (full[0], 1, full[3])):
        index = ":, None, None, :" if len(shape) == 2 else ":, None"
        return f" For the keys of each batch entry, pass keep[{index}]."
    return ""


def resolve(alignment: Alignment, sizes: Sizes) -> Expr:
    """Return the look-up that reads an aligned array in a problem of these sizes."""
    array, axes = alignment.array, alignment.axes
    check_whole(array, alignment.argument)
    shape = tuple(array.shape)
    packed = alignment.packed and sizes.packed
    wanted = tuple(
        axis.exact if axis.exact is not None else extent(sizes, axis.size) for axis in axes
    )
    if packed:
        wanted = tuple(_total(sizes, axis.size) for axis in axes)
    lead = sizes.lead if alignment.lead and not packed else ()
    if not axes and shape == (math.prod(lead),):
        return lookup_node(array, (_B,), True, alignment.table)  # one entry per flat batch index
    full = lead + wanted
    # The specification asks for one sequence at a time, and an array may serve longer ones.
    some = sizes.packed and np.size(sizes.len_q) < math.prod(sizes.lead)
    shares = (False,) * len(lead) + tuple(axis.shared for axis in axes)
    fits = len(shape) <= len(full) and all(
        size in (1, want) or (some and size > want) or (share and size > 0 and want % size == 0)
        for size, want, share in zip(*map(reversed, (shape, full, shares)), strict=False)
    )
    if not fits:
        names = "".join(f", {axis.size}" for axis in axes if axis.exact is None)
        raise ArgumentError(
            f"{alignment.argument}: got an array of shape {shape}; expected one that broadcasts "
            f"to {full}{' (the leading axes' + names + ')' if lead else ''}."
            + _padding_hint(shape, full)
        )
    indices: list[Expr] = []
    stride = math.prod(lead)
    for size in lead:
        stride //= max(size, 1)
        indices.append(_B // stride % size if len(lead) > 1 else _B)
    for axis in axes:
        start = symbol(axis.size.replace("len", "start")) if packed else None
        indices.append(axis.index if start is None else start + axis.index)
    missing = len(full) - len(shape)
    of_axes = zip(indices[missing:], shape, full[missing:], shares[missing:], strict=True)
    indices = [
        index // (want // size) if share and 1 < size < want else index
        for index, size, want, share in of_axes
    ]
    zero = as_expr(0)
    chosen = tuple(zero if size == 1 else index for index, size in zip(indices, shape, strict=True))
    if alignment.contains:
        return Expr("contains", (*chosen[:-1], indices[-1]), "bool", (array, True))
    return lookup_node(array, chosen, True, alignment.table)


def _total(sizes: Sizes, name: str) -> int:
    start = sizes.start_q if name == "len_q" else sizes.start_k
    length = sizes.len_q if name == "len_q" else sizes.len_k
    return int((start + length).max()) if length.size else 0


_OVERFLOWING = ("add", "subtract", "multiply", "negative", "absolute", "left_shift")


def prove(root: Expr, sizes: Sizes, numbers: Mapping[str, int] = NO_NUMBERS) -> None:
    """Prove that no index of a bound expression leaves its array, and that integers fit 64 bits.

    `numbers` are as in `bind`.

    Raises
    ------
    ArgumentError
        If one may, or if a divisor may be 0 or a shift negative.
    """
    ranges = {name: _range(name, sizes) for name in EVERYTHING}
    if not math.prod(sizes.lead) or any(high < low for low, high in ranges.values()):
        return  # an empty axis: nothing is evaluated
    ranges |= {name: (-most, most) for name, most in numbers.items()}
    symbols: dict[str, int | float] = {}
    for name, (low, high) in ranges.items():
        symbols |= {f"{name}_low": low, f"{name}_high": high}
    ends = bounds(root, ranges)
    # A score's floats may be of either type, and an integer may depend on how they round.
    float_types: list[Any] = [np.float32]
    if any(node.op == "floor" or _compares_floats(node) for node in ends):
        float_types.append(np.float64)
    for float_type in float_types:
        _prove_nodes(root, ends, symbols, float_type)


def _compares_floats(node: Expr) -> bool:
    return node.type == "bool" and any(arg.type == "float" for arg in node.args)


def _prove_nodes(
    root: Expr, ends: dict[Expr, Bounds], symbols: dict[str, int | float], float_type: Any
) -> None:
    values: dict[Expr, Any] = {}

    def span(node: Expr) -> tuple[int, int]:
        low, high = (evaluate_exactly(end, symbols, values, float_type) for end in ends[node])
        return low, high

    # Operands come first, so that nothing is evaluated before what it reads has been proven.
    for node in walk(root):
        if node.op in ("left_shift", "right_shift"):
            _prove_shift(node.args[1], span(node.args[1])[0])
        if node.op in _OVERFLOWING and node.type == "int":
            _prove_no_overflow(node, *span(node))
        elif node.op in ("floor_divide", "remainder"):
            low, high = span(node.args[1])
            _prove_divisor(node.args[1], low, high)
            if low <= -1 <= high and span(node.args[0])[0] == -(2**63):
                _prove_no_overflow(node, -(2**63), 2**63)
        elif node.op == "lookup" and not node.value[1]:
            for axis, index in enumerate(node.args):
                _prove_index(node.value[0], axis, index, *span(index))


def _prove_no_overflow(node: Expr, low: int, high: int) -> None:
    if low < -(2**63) or high >= 2**63:
        raise ArgumentError(
            f"{node} may leave the range of 64-bit integers (it lies between {low} and {high}); "
            "limit its operands with cupyflash.expr.clip."
        )


def _prove_divisor(divisor: Expr, low: int, high: int) -> None:
    if low <= 0 <= high:
        raise ArgumentError(
            f"the divisor {divisor} may be 0 (it lies between {low} and {high}); limit it with "
            "cupyflash.expr.maximum(..., 1)."
        )


def _prove_shift(number: Expr, low: int) -> None:
    if low < 0:
        raise ArgumentError(
            f"the number of bits {number} of a shift may be negative (it may be {low}); limit it "
            "with cupyflash.expr.maximum(..., 0)."
        )


def _prove_index(array: Any, axis: int, index: Expr, low: int, high: int) -> None:
    size = array.shape[axis]
    if low < 0 or high >= size:
        raise ArgumentError(
            f"lookup: axis {axis} of an array of shape {tuple(array.shape)} is read at {index}, "
            f"which lies between {low} and {high} here; expected 0 to {size - 1}. Limit the index "
            "with cupyflash.expr.clip."
        )


def _range(name: str, sizes: Sizes) -> tuple[int, int]:
    if name == "b":
        return 0, math.prod(sizes.lead) - 1
    if name == "h":
        return 0, sizes.heads - 1
    if name in ("i", "j"):
        return 0, _ends(sizes.len_q if name == "i" else sizes.len_k)[1] - 1
    return _ends(getattr(sizes, name))
