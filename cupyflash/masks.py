"""Masks: which query i may see which key j. True means attend.

Every mask is one expression over the batch entry b, the query head h and the positions i and j. The
CPU's and the GPU's code, and the proof of which tiles can be skipped, are made from it. Masks
combine with ``&``, ``|`` and ``~``, and `mask` makes one from a function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from .arrays.integers import integer
from .arrays.typed import Booleans
from .errors import ArgumentError, ArgumentTypeError, TraceError
from .expr import arguments
from .expr.arguments import (
    ArrayLike,
    Bound,
    Indices,
    PerBatch,
    as_array,
    boolean_array,
    length_or_per_batch,
    number_or_per_batch,
    positive,
    remembered,
    traced,
    untraced,
)
from .expr.bind import Alignment, Axis, Dense, aligned, bind
from .expr.evaluate import evaluate
from .expr.functions import POSITIONS, clip, len_k, len_q
from .expr.nodes import Expr, array_type, as_expr
from .expr.sizes import flat_sizes, position_symbols
from .expr.structure import Structured
from .hints import other_libraries

__all__ = [
    "Mask",
    "blocks",
    "causal",
    "chosen",
    "dense",
    "dilated",
    "lengths",
    "mask",
    "prefix",
    "segments",
    "tree",
    "window",
]

if not TYPE_CHECKING:  # for which a misspelt name is an error

    def __getattr__(name: str) -> object:
        raise other_libraries.no_attribute(__name__, name, __all__, other_libraries.MASKS)


def __dir__() -> list[str]:
    return sorted(__all__)


_B, _H, _I, _J = POSITIONS


class Mask(Structured):
    """A condition over (b, h, i, j). Join masks with ``&``, ``|``, ``^`` and ``~``."""

    __slots__ = ()

    def __and__(self, other: Mask) -> Mask:
        return self._join(other, lambda a, b: a & b)

    def __or__(self, other: Mask) -> Mask:
        return self._join(other, lambda a, b: a | b)

    def __xor__(self, other: Mask) -> Mask:
        return self._join(other, lambda a, b: a ^ b)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__
    __array_ufunc__ = None  # `array & mask` comes here, and is told to wrap the array

    def __invert__(self) -> Mask:
        return Mask(~self.expr)

    def _join(self, other: Any, how: Callable[[Expr, Expr], Expr]) -> Mask:
        other = arguments.meant(other)
        if not isinstance(other, Mask):
            raise ArgumentTypeError(
                f"got {type(other).__name__} joined with a mask; expected another mask. Wrap an "
                "array with masks.dense(array), or a function with masks.mask(function)."
            )
        return Mask(how(self.expr, other.expr))

    def __bool__(self) -> bool:
        raise TraceError("A mask has no truth value; join masks with &, | and ~, not and, or, not.")

    def __repr__(self) -> str:
        return f"<mask {self.expr}>"

    def _repr_svg_(self) -> str | None:
        from .costs.figures import example

        made = example(self)
        return None if made is None else made.svg

    def evaluate(self, b: Indices, h: Indices, i: Indices, j: Indices, sizes: object) -> Booleans:
        """Return the mask at given positions.

        Parameters
        ----------
        b, h, i, j : array_like of int
            Positions that broadcast against each other; b is the flat batch index.
        sizes : object
            The problem's ``lead``, ``heads``, ``len_q``, ``len_k``, ``start_q`` and ``start_k``.
            They are numbers, or in variable-length problems arrays that broadcast with `b`.

        Returns
        -------
        numpy.ndarray
            An array of bool, with the broadcast shape of b, h, i and j.
        """
        symbols = position_symbols(b, h, i, j, sizes)
        bound = bind(self.expr, flat_sizes(sizes))
        shape = np.broadcast_shapes(*(np.shape(x) for x in (b, h, i, j)))
        if not math.prod(shape):
            return np.zeros(shape, np.bool_)
        return np.broadcast_to(evaluate(bound, symbols), shape)

    def to_array(self, B: int | tuple[int, ...], H: int, Lq: int, Lk: int) -> Booleans:
        r"""Return the whole mask of a problem.

        Parameters
        ----------
        B : int or tuple of int
            The number of batch entries, or the leading axes, whose product is that number.
        H : int
            Query heads.
        Lq, Lk : int
            The numbers of queries and keys.

        Returns
        -------
        numpy.ndarray
            An array of bool of shape ``(B, H, Lq, Lk)``, or ``(*B, H, Lq, Lk)`` for a tuple; True
            means attend.
        """
        lead = B if isinstance(B, tuple) else (B,)
        sizes = Dense(lead, H, Lq, Lk)
        count = math.prod(lead)
        b, h, i, j = np.ix_(np.arange(count), np.arange(H), np.arange(Lq), np.arange(Lk))
        values = self.evaluate(b, h, i, j, sizes)
        return np.array(values).reshape((*lead, H, Lq, Lk))


@untraced
def mask(function: Callable[[Expr, Expr, Expr, Expr], Any]) -> Mask:
    """Make a mask from a function of (b, h, i, j).

    Parameters
    ----------
    function : callable
        It is called once with symbols: the flat batch index b, the query head h, the query position
        i and the key position j. It returns a condition, made of arithmetic, comparisons, ``&``,
        ``|``, ``~``, `lookup` and the functions of `cupyflash.expr`.

    Returns
    -------
    Mask

    Raises
    ------
    TraceError
        If the function branches on a symbol (use ``where``), or does not return a condition.

    Examples
    --------
    >>> from cupyflash import masks
    >>> masks.mask(lambda b, h, i, j: (i - j) % 2 == 0).to_array(1, 1, 2, 4)[0, 0]
    array([[ True, False,  True, False],
           [False,  True, False,  True]])
    """
    expr = traced(function, POSITIONS, "mask")
    if expr.type != "bool":
        raise TraceError(f"mask: its function returned {expr} ({expr.type}); expected a condition.")
    return Mask(expr)


def _diagonal(offset: Any, argument: str) -> Expr:
    return _I + (len_k - len_q if offset is None else number_or_per_batch(offset, argument))


@remembered
def causal(offset: PerBatch | None = None) -> Mask:
    """Let query i see key j when ``j <= i + offset``.

    Parameters
    ----------
    offset : int or array of int, optional
        A number, or one per batch entry. Default: Lk - Lq, so that the last query sees every key.

    Returns
    -------
    Mask
    """
    return Mask(_diagonal(offset, "causal: offset") >= _J)


@remembered
def window(left: Bound, right: Bound, offset: PerBatch | None = None) -> Mask:
    """Let query i see keys from ``i + offset - left`` to ``i + offset + right``.

    Parameters
    ----------
    left, right : int or None
        How many keys before and after the query's own it sees, 0 or more; None is unbounded.
        ``window(None, 0)`` is causal.
    offset : int or array of int, optional
        As in `causal`.

    Returns
    -------
    Mask

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a bound is not an integer, or is negative (some libraries write -1 for "unbounded"; write
        None).
    """
    diagonal = _diagonal(offset, "window: offset")
    expr = as_expr(True)
    for side, value in (("left", left), ("right", right)):
        if value is None:
            continue
        size = integer(value)
        if size is None:
            raise ArgumentTypeError(
                f"window: {side} is {value!r}; expected an integer, or None for unbounded."
            )
        if size < 0:
            raise ArgumentError(
                f"window: {side} is {value!r}; expected 0 or more keys, or None for unbounded. "
                "Pass offset= to move the window."
            )
        bound = diagonal - size <= _J if side == "left" else diagonal + size >= _J
        expr = bound if expr.op == "constant" else expr & bound
    return Mask(expr)


@remembered
def lengths(k_lengths: PerBatch, q_lengths: PerBatch | None = None) -> Mask:
    """Let queries see the first `k_lengths` keys of their batch entry: padded batches.

    Parameters
    ----------
    k_lengths : int or array of int
        The true number of keys, 0 or more, for all batch entries or for each. With a number beyond
        Lk, queries see every key; so after a batch is truncated, its old lengths still work.
    q_lengths : int or array of int, optional
        The true number of queries. Later queries see nothing (output 0, LSE -inf, zero gradients).

    Returns
    -------
    Mask

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a length is negative, or not an integer. Arrays in device memory are not checked: there,
        a negative length counts as 0.

    Notes
    -----
    Joined masks do not know of each other. For causal attention aligned by true lengths, write
    ``lengths(n) & causal(offset=n - q_lengths)``.
    """
    expr = length_or_per_batch(k_lengths, "lengths: k_lengths") > _J
    if q_lengths is not None:
        expr = expr & (length_or_per_batch(q_lengths, "lengths: q_lengths") > _I)
    return Mask(expr)


@untraced
def segments(q_ids: ArrayLike, k_ids: ArrayLike | None = None) -> Mask:
    """Let queries see the keys of their own segment (document).

    Parameters
    ----------
    q_ids : array of int
        The segment of every query: (Lq,), or one row per batch entry; (total,) in variable-length
        calls.
    k_ids : array of int, optional
        The segment of every key. Default: `q_ids`.

    Returns
    -------
    Mask
    """

    def ids(array: Any, argument: str, size: str, index: Expr) -> Expr:
        array = as_array(array, argument)
        if np.dtype(array.dtype).kind not in "iub":
            raise ArgumentTypeError(f"{argument}: got dtype {array.dtype}; expected integers.")
        return aligned(Alignment(array, argument, (Axis(index, size),), packed=True))

    return Mask(
        ids(q_ids, "segments: q_ids", "len_q", _I)
        == ids(q_ids if k_ids is None else k_ids, "segments: k_ids", "len_k", _J)
    )


@remembered
def prefix(n: PerBatch) -> Mask:
    """Let every query see the first `n` keys; join it with `causal` for a prefix language model.

    Parameters
    ----------
    n : int or array of int
        A number of keys, 0 or more, for all batch entries or for each. With a number beyond Lk,
        queries see every key.

    Returns
    -------
    Mask

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As in `lengths`.
    """
    return Mask(length_or_per_batch(n, "prefix: n") > _J)


@remembered
def dilated(step: int) -> Mask:
    """Let query i see every `step`-th key from its own on: ``(i + Lk - Lq - j) % step == 0``.

    Parameters
    ----------
    step : int
        1 or more.

    Returns
    -------
    Mask
    """
    return Mask((_I + len_k - len_q - _J) % positive(step, "dilated: step") == 0)


@untraced
def blocks(layout: ArrayLike, block_q: SupportsIndex, block_k: SupportsIndex) -> Mask:
    r"""Let block (i // block_q) of queries see block (j // block_k) of keys if `layout` says so.

    Parameters
    ----------
    layout : array of bool
        One entry per block; it broadcasts to (..., Hq, ceil(Lq / block_q), ceil(Lk / block_k)).
    block_q, block_k : int
        Block sizes, 1 or more.

    Returns
    -------
    Mask

    References
    ----------
    Dao et al. 2022, FlashAttention, section 3.3 (block-sparse FlashAttention).
    """
    block_q, block_k = positive(block_q, "blocks: block_q"), positive(block_k, "blocks: block_k")
    array = boolean_array(layout, "blocks: layout")
    axes = (
        Axis(_H, "heads"),
        Axis(_I // block_q, f"len_q/{block_q}"),
        Axis(_J // block_k, f"len_k/{block_k}"),
    )
    return Mask(aligned(Alignment(array, "blocks: layout", axes)))


@untraced
def chosen(indices: ArrayLike, block: SupportsIndex | tuple[SupportsIndex, SupportsIndex]) -> Mask:
    r"""Let each block of queries see the blocks of keys that are chosen for it.

    Query i sees key j when ``j // block_k`` is an element of ``indices[..., h, i // block_q, :]``.
    Join it with `causal` or `segments` as any mask: a chosen block may have keys of the future.

    Parameters
    ----------
    indices : array of int
        Blocks of keys, in any order; -1 stands for none, and so does every number that is no block
        of keys. A block that comes twice counts once. It broadcasts to
        (..., Hq, ceil(Lq / block_q), n), and is read in place, when the call is computed. With
        fewer heads, as many as divide Hq, a group of query heads shares those of one.
    block : int or tuple of 2 int
        The size of blocks, 1 or more, or ``(block_q, block_k)``: how many queries share a row of
        `indices`, and how many keys are a block. ``(1, 64)`` chooses for each query.

    Returns
    -------
    Mask

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import masks
    >>> chosen = masks.chosen(np.array([[0, -1], [1, 0]]), block=2)
    >>> (chosen & masks.causal()).to_array(1, 1, 4, 4)[0, 0].astype(int)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 1, 1]])
    """
    sizes = block if isinstance(block, tuple) else (block, block)
    if len(sizes) != 2:
        raise ArgumentError(f"chosen: block is {block!r}; expected (block_q, block_k).")
    block_q, block_k = (positive(size, "chosen: block") for size in sizes)
    array = as_array(indices, "chosen: indices")
    if array_type(array, "chosen: indices") != "int" or not array.ndim:
        got = f"dtype {array.dtype}, shape {array.shape}"
        raise ArgumentTypeError(f"chosen: indices: got {got}; expected rows of integers.")
    axes = (
        Axis(_H, "heads", shared=True),
        Axis(_block(_I, block_q), f"len_q/{block_q}"),
        Axis(_block(_J, block_k), f"len_k/{block_k}", exact=int(array.shape[-1])),
    )
    return Mask(aligned(Alignment(array, "chosen: indices", axes, contains=True)))


def _block(position: Expr, size: int) -> Expr:
    return position if size == 1 else position // size


@untraced
def tree(ancestors: ArrayLike) -> Mask:
    """Let a tree of drafts, the last Lq positions, see all earlier positions and their ancestors.

    The drafts are the queries and the last Lq keys: query i sees key j when ``j < Lk - Lq`` or
    ``ancestors[i, j - (Lk - Lq)]``. One call then verifies several continuations of a sequence.

    Parameters
    ----------
    ancestors : array of bool, shape (Lq, Lq) or (B, Lq, Lq)
        Whether draft i descends from draft n; usually a draft counts as its own ancestor, too. For
        packed queries the shape is (B, max Lq, max Lq). The array is read in place, as in `dense`.

    Returns
    -------
    Mask

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the array has other axes, is not square, or is not of dtype bool.

    Examples
    --------
    Two drafts that both follow the last position, and one that follows the first draft:

    >>> import numpy as np
    >>> from cupyflash import masks
    >>> ancestors = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=bool)
    >>> masks.tree(ancestors).to_array(1, 1, 3, 5)[0, 0].astype(int)
    array([[1, 1, 1, 0, 0],
           [1, 1, 0, 1, 0],
           [1, 1, 1, 0, 1]])
    """
    array = boolean_array(ancestors, "tree: ancestors")
    shape = tuple(array.shape)
    if len(shape) not in (2, 3) or shape[-1] != shape[-2]:
        raise ArgumentError(
            f"tree: got ancestors of shape {shape}; expected (Lq, Lq) or (B, Lq, Lq), whose "
            "element (i, n) says whether query i sees draft n."
        )
    draft = _J - (len_k - len_q)
    held = clip(draft, 0, len_q - 1)  # it is read for keys before the drafts, too
    axes = (Axis(_I, "len_q"), Axis(held, "len_q"))
    return Mask((draft < 0) | aligned(Alignment(array, "tree: ancestors", axes)))


@untraced
def dense(array: ArrayLike) -> Mask:
    r"""Make a mask from a boolean array; passing the plain array as ``mask=`` means the same.

    Parameters
    ----------
    array : array of bool
        It broadcasts to (..., Hq, Lq, Lk), or to (n, Hq, max Lq, max Lk) in variable-length calls.
        It is read in place: if its elements change later, so does the mask.

    Returns
    -------
    Mask
    """
    axes = (Axis(_H, "heads"), Axis(_I, "len_q"), Axis(_J, "len_k"))
    return Mask(aligned(Alignment(boolean_array(array, "mask"), "mask", axes)))
