"""Statistics of attention's weights: what `cupyflash.reduce` sums, or takes the maximum of.

A reduction is one expression of the weight p of a pair, its logit t and its positions b, h, i and
j, and what becomes of its values over all pairs that attend. Neither weights nor logits are stored.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import numpy as np

from .arrays.dtypes import DTYPES
from .arrays.integers import integer
from .arrays.typed import FloatArray
from .errors import ArgumentError, ArgumentTypeError, TraceError
from .expr.arguments import ArrayLike, Indices, as_array, positive, traced, untraced
from .expr.bind import Alignment, Axis, aligned, bind
from .expr.derivative import derivative
from .expr.evaluate import evaluate
from .expr.functions import POSITIONS, SCORE
from .expr.nodes import Expr, convert, rebuild, walk
from .expr.rounding import evaluate_with_error
from .expr.sizes import flat_sizes, position_symbols

__all__ = [
    "Reduction",
    "TopKeys",
    "blocks",
    "distance",
    "entropy",
    "mass",
    "max_logit",
    "reduction",
    "top_keys",
]


def __dir__() -> list[str]:
    return sorted(__all__)


_H, _I = POSITIONS[1:3]
# Of a pair: its weight, its logit, and the log-sum-exp of its query.
WEIGHT, LOGIT, LSE = (Expr("symbol", (), "float", name) for name in ("p", "t", "lse"))
MOST_TOP = 64

ALONG = {  # what can be taken of the values of pairs, and over which of them
    "keys": ("sum", "max", "argmax", "top"),
    "queries": ("sum", "max"),
    "distance": ("sum", "max"),
    "blocks": ("sum", "max"),
}

Block: TypeAlias = SupportsIndex | tuple[SupportsIndex, SupportsIndex]


def is_symbol(node: Expr, *symbols: Expr) -> bool:
    """Whether a node is one of some symbols, or a copy of one."""
    return node.op == "symbol" and any(node.value == each.value for each in symbols)


class TopKeys(NamedTuple):
    """The keys of each query at which an expression is largest.

    Attributes
    ----------
    values : array, shape (..., Hq, Lq, n)
        The values there, in falling order; -inf where a query sees fewer than n keys.
    indices : array of int64, shape (..., Hq, Lq, n)
        Their positions j, or -1. Of equal values, the one of the smaller position comes first.
    """

    values: FloatArray
    indices: np.ndarray[Any, Any]


class Reduction:
    """What becomes of an expression of the pairs that attend: made by functions of this module.

    Attributes
    ----------
    expr : Expr
        The expression of p, t, b, h, i and j.
    along : {"keys", "queries", "distance", "blocks"}
        Over which pairs it is taken.
    by : {"sum", "max", "argmax", "top"}
        What is taken.
    """

    __slots__ = ("along", "block", "by", "count", "expr", "name", "per_head", "queries", "raw")

    def __init__(
        self,
        expr: Expr,
        along: str,
        by: str,
        *,
        name: str = "",
        count: int = 1,
        block: tuple[int, int] = (1, 1),
        queries: slice | None = None,
        raw: bool = False,
        per_head: bool = False,
    ) -> None:
        self.expr, self.along, self.by, self.name = expr, along, by, name
        self.count, self.block, self.queries = count, block, queries
        self.raw, self.per_head = raw, per_head

    def __repr__(self) -> str:
        return f"<reduction {self.name or self.expr} by {self.by} along {self.along}>"

    @property
    def reads_lse(self) -> bool:
        """Whether its values depend on the log-sum-exp."""
        return any(is_symbol(node, WEIGHT, LSE) for node in walk(self.expr))

    @property
    def slope(self) -> Expr | None:
        """The derivative of its expression by p, where t follows p; None if it has no gradient."""
        if self.by != "sum" or self.raw:
            return None
        if self.name == "entropy":  # of p (LSE - t), which is -p log p
            return LSE - LOGIT - 1.0
        if any(is_symbol(node, LOGIT, LSE) for node in walk(self.expr)):
            return None
        of_score = rebuild(self.expr, lambda node: SCORE if is_symbol(node, WEIGHT) else None)
        made = convert(derivative(of_score), "float")
        return rebuild(made, lambda node: WEIGHT if is_symbol(node, SCORE) else None)

    def rows_seen(self, len_q: int) -> tuple[int, int]:
        """Return the first query that takes part, and the one after the last."""
        start, stop, _ = (self.queries or slice(None)).indices(len_q)
        return start, max(start, stop)

    def evaluate(
        self,
        p: FloatArray,
        t: FloatArray,
        lse: FloatArray,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
    ) -> FloatArray:
        """Return the values of its expression.

        Parameters
        ----------
        p, t, lse : numpy.ndarray
            Weights, logits, and the log-sum-exps of their queries; they broadcast.
        b, h, i, j : array_like of int
            Positions that broadcast with them.
        sizes : object
            As in `Mask.evaluate`.

        Returns
        -------
        numpy.ndarray
            An array of the shape and dtype of `p`.
        """
        return _evaluated(self.expr, (p, t, lse), (b, h, i, j), sizes)

    def evaluate_slope(
        self,
        p: FloatArray,
        t: FloatArray,
        lse: FloatArray,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
    ) -> FloatArray:
        """Return values of `slope`, the derivative by p; the parameters are those of `evaluate`."""
        assert self.slope is not None, "there is a gradient"
        return _evaluated(self.slope, (p, t, lse), (b, h, i, j), sizes)

    def evaluate_with_error(
        self,
        values: tuple[FloatArray, FloatArray, FloatArray],
        errors: tuple[FloatArray, FloatArray, FloatArray],
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
        unit: float,
        slope: bool = False,
    ) -> tuple[FloatArray, FloatArray]:
        """Return values of its expression, with a bound on the error of computed ones.

        Parameters
        ----------
        values, errors : tuple of 3 numpy.ndarray
            p, t and lse, and bounds on the errors of their computed values.
        b, h, i, j, sizes
            As in `evaluate`.
        unit : float
            Unit roundoff of the arithmetic.
        slope : bool
            Of `slope` instead.

        Returns
        -------
        values, error : numpy.ndarray
            Arrays of the shape of p; an error is infinite where it cannot be bounded.
        """
        names = "p", "t", "lse"
        symbols = position_symbols(b, h, i, j, sizes) | dict(zip(names, values, strict=True))
        symbols["score"] = values[1]
        expr = self.slope if slope else self.expr
        assert expr is not None, "there is a gradient"
        root = bind(expr, flat_sizes(sizes))
        known = dict(zip(names, errors, strict=True))
        ((value, error),) = evaluate_with_error((root,), symbols, errors[1], unit, known)
        shape = values[0].shape
        return np.broadcast_to(value, shape), np.broadcast_to(error, shape)


def _evaluated(
    expr: Expr,
    values: tuple[FloatArray, FloatArray, FloatArray],
    positions: tuple[Indices, Indices, Indices, Indices],
    sizes: object,
) -> FloatArray:
    p, t, lse = values
    symbols = position_symbols(*positions, sizes) | {"p": p, "t": t, "lse": lse, "score": t}
    made = evaluate(bind(expr, flat_sizes(sizes)), symbols, p.dtype.type)
    return np.broadcast_to(made, p.shape)


@untraced
def reduction(
    function: Callable[[Expr, Expr, Expr, Expr, Expr, Expr], Any],
    along: str = "keys",
    by: str = "sum",
    *,
    n: SupportsIndex | None = None,
    block: Block | None = None,
) -> Reduction:
    """Make a reduction from a function of (p, t, b, h, i, j).

    Parameters
    ----------
    function : callable
        It is called once with symbols: the weight p of a pair, which is ``exp(t - lse)``, before
        dropout; its logit t, after score changes and bias; the flat batch index b, the query head
        h, the query position i and the key position j. It returns a number.
    along : {"keys", "queries", "distance", "blocks"}
        Over which pairs: all keys of a query, all queries of a key, all pairs of one ``i - j``, or
        those of a block.
    by : {"sum", "max", "argmax", "top"}
        What is taken of the values; the latter two along keys only. Pairs that do not attend are
        left out: the sum of none is 0, and the maximum -inf.
    n : int, optional
        How many of the largest, by "top": 1 to 64.
    block : int or tuple of 2 int, optional
        Along blocks: their size, or ``(block_q, block_k)``.

    Returns
    -------
    Reduction

    Raises
    ------
    ArgumentError, ArgumentTypeError, TraceError
        If the function cannot be recorded, or along and by do not fit.

    Examples
    --------
    >>> from cupyflash import reductions
    >>> reductions.reduction(lambda p, t, b, h, i, j: p * abs(i - j))  # the mean distance
    <reduction (p * absolute((i - j))) by sum along keys>
    """
    expr = traced(function, (WEIGHT, LOGIT, *POSITIONS), "reduction")
    if along not in ALONG:
        known = ", ".join(map(repr, ALONG))
        raise ArgumentError(f"reduction: along is {along!r}; expected one of {known}.")
    if by not in ALONG[along]:
        known = ", ".join(map(repr, ALONG[along]))
        raise ArgumentError(
            f"reduction: by is {by!r} with along={along!r}; expected one of {known}."
        )
    if (n is not None) != (by == "top"):
        raise ArgumentError(
            f"reduction: got n={n!r} with by={by!r}; expected n= with by='top', and only there."
        )
    if (block is not None) != (along == "blocks"):
        raise ArgumentError(
            f"reduction: got block={block!r} with along={along!r}; expected block= with "
            "along='blocks', and only there."
        )
    count = 1 if n is None else _count(n, "reduction: n")
    sizes = (1, 1) if block is None else _sizes(block, "reduction: block")
    return Reduction(_number(expr), along, by, count=count, block=sizes)


def _number(expr: Expr) -> Expr:
    """Return an expression as a float; that of a condition counts the pairs for which it holds."""
    if any(is_symbol(node, SCORE) for node in walk(expr)):
        raise TraceError(
            f"reduction: {expr} has the score of a score change; expected an expression of its own "
            "symbols p, t, b, h, i and j."
        )
    return convert(expr, "float")


def _count(value: Any, name: str) -> int:
    number = integer(value)
    if number is None or not 1 <= number <= MOST_TOP:
        raise ArgumentError(f"{name} is {value!r}; expected an integer from 1 to {MOST_TOP}.")
    return number


def _sizes(value: Any, name: str) -> tuple[int, int]:
    sizes = value if isinstance(value, tuple) else (value, value)
    if len(sizes) != 2:
        raise ArgumentError(f"{name} is {value!r}; expected (block_q, block_k).")
    return positive(sizes[0], name), positive(sizes[1], name)


def max_logit(*, raw: bool = False, per_head: bool = False) -> Reduction:
    """Take the largest logit that each query sees: (..., Hq, Lq).

    A sink is no key and does not count. A query that sees no key has -inf.

    Parameters
    ----------
    raw : bool
        Take ``scale * q.k`` of the pairs that attend instead, before score changes and bias. QK
        clipping scales weights down by it.
    per_head : bool
        Take the maximum over queries, too: (..., Hq).

    Returns
    -------
    Reduction

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import reduce, reductions
    >>> q, k = np.ones((2, 1, 5, 4))
    >>> reduce(q, k, {"m": reductions.max_logit(per_head=True)})["m"]
    array([2.])
    """
    for name, value in (("raw", raw), ("per_head", per_head)):
        if not isinstance(value, (bool, np.bool_)):
            raise ArgumentTypeError(f"max_logit: {name} is {value!r}; expected True or False.")
    return Reduction(LOGIT, "keys", "max", name="max_logit", raw=bool(raw), per_head=bool(per_head))


def entropy() -> Reduction:
    """Take the entropy of each query's weights, in nats: (..., Hq, Lq).

    It is the sum of ``-p log p`` over keys, from 0 (one key has all weight) to log Lk (all have the
    same). A sink is one more key, whose weight belongs to the distribution. A query that sees
    nothing has 0.

    Returns
    -------
    Reduction
    """
    return Reduction(WEIGHT * (LSE - LOGIT), "keys", "sum", name="entropy")


@untraced
def mass(weights: ArrayLike | None = None, queries: slice | None = None) -> Reduction:
    """Take the weight that each key gets from all queries together: (..., Hq, Lk).

    Parameters
    ----------
    weights : array, optional
        Factors of the queries, broadcasting to (..., Hq, Lq); 1 if None.
    queries : slice, optional
        The queries that count, as in ``slice(-32, None)``, the last 32; all if None. Its step is 1.

    Returns
    -------
    Reduction

    References
    ----------
    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
    Language Models"; Li et al. 2024, "SnapKV: LLM Knows What You Are Looking for Before
    Generation" (the last queries).
    """
    expr = WEIGHT
    if weights is not None:
        read = as_array(weights, "mass: weights")
        if np.dtype(read.dtype).name not in DTYPES:
            raise ArgumentTypeError(f"mass: weights: got dtype {read.dtype}; expected floats.")
        axes = Axis(_H, "heads"), Axis(_I, "len_q")
        expr = aligned(Alignment(read, "mass: weights", axes)) * WEIGHT
    if queries is not None:
        queries = _checked_slice(queries)
    return Reduction(expr, "queries", "sum", name="mass", queries=queries)


def _checked_slice(queries: Any) -> slice:
    if not isinstance(queries, slice):
        raise ArgumentTypeError(
            f"mass: queries is {queries!r}; expected a slice, as in slice(-32, None)."
        )
    try:
        ends = [None if x is None else operator.index(x) for x in (queries.start, queries.stop)]
    except TypeError:
        raise ArgumentTypeError(f"mass: queries is {queries}; expected whole numbers.") from None
    if queries.step not in (None, 1):
        raise ArgumentError(
            f"mass: queries is {queries}; expected a step of 1. Pass weights=, which are 0 for the "
            "others."
        )
    return slice(*ends)


def top_keys(n: SupportsIndex) -> Reduction:
    """Take the n keys that each query weighs most, by their logits: a `TopKeys`.

    With ``masks.chosen(top.indices, block=(1, 1))`` each query sees these keys alone.

    Parameters
    ----------
    n : int
        How many, 1 to 64.

    Returns
    -------
    Reduction
    """
    return Reduction(LOGIT, "keys", "top", name="top_keys", count=_count(n, "top_keys: n"))


def distance() -> Reduction:
    """Take the weight of all pairs of one distance i - j: (..., Hq, Lq + Lk - 1).

    Element n is the sum of p over pairs with ``i - j == n - (Lk - 1)``.

    Returns
    -------
    Reduction
    """
    return Reduction(WEIGHT, "distance", "sum", name="distance")


def blocks(block: Block, by: str = "sum", of: str = "p") -> Reduction:
    """Take a number of each block of queries and keys: (..., Hq, ceil(Lq / bq), ceil(Lk / bk)).

    The blocks of keys with the largest numbers are what `masks.chosen` takes.

    Parameters
    ----------
    block : int or tuple of 2 int
        The size of blocks, or ``(block_q, block_k)``.
    by : {"sum", "max"}
        What is taken.
    of : {"p", "t"}
        Of weights or of logits.

    Returns
    -------
    Reduction
    """
    sizes = _sizes(block, "blocks: block")
    for name, value, known in (("by", by, ALONG["blocks"]), ("of", of, ("p", "t"))):
        if value not in known:
            raise ArgumentError(
                f"blocks: {name} is {value!r}; expected one of {', '.join(map(repr, known))}."
            )
    return Reduction(WEIGHT if of == "p" else LOGIT, "blocks", by, name="blocks", block=sizes)
