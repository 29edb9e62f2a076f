"""Score changes: what happens to scale * q.k before bias, mask and softmax.

Every change is one expression of the score s and the positions b, h, i, j. Its derivative with
respect to s, which the backward needs, is made from the same tree. Changes are chained in order:
``score_mod=[a, b]`` or ``a.then(b)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .arrays.dtypes import DTYPES
from .arrays.integers import integer
from .arrays.typed import FloatArray
from .errors import ArgumentError, ArgumentTypeError, TraceError
from .expr import arguments
from .expr.arguments import ArrayLike, Indices, as_array, remembered, traced, untraced
from .expr.bind import Alignment, Axis, aligned, bind
from .expr.derivative import derivative, second_derivative
from .expr.evaluate import evaluate
from .expr.functions import (
    POSITIONS,
    SCORE,
    clip,
    len_k,
    len_q,
    tanh,
)
from .expr.learned import reads
from .expr.nodes import Expr, LookupTable, convert, rebuild
from .expr.rounding import evaluate_with_error
from .expr.sizes import flat_sizes, position_symbols
from .expr.structure import Structured
from .hints import other_libraries

__all__ = ["Score", "alibi", "alibi_slopes", "relative_bias", "score", "softcap"]

if not TYPE_CHECKING:  # for which a misspelt name is an error

    def __getattr__(name: str) -> object:
        raise other_libraries.no_attribute(__name__, name, __all__, other_libraries.SCORES)


def __dir__() -> list[str]:
    return sorted(__all__)


_B, _H, _I, _J = POSITIONS


class Score(Structured):
    """A function of a score and its position (b, h, i, j)."""

    __slots__ = ()

    def __init__(self, expr: Expr) -> None:
        super().__init__(convert(expr, "float"))

    def then(self, other: Score) -> Score:
        """Return the change that applies this one first and `other` to its result."""
        other = arguments.meant(other)
        if not isinstance(other, Score):
            raise ArgumentTypeError(
                f"then: got {type(other).__name__}; expected a score change of cupyflash.scores."
            )
        return Score(rebuild(other.expr, lambda node: self.expr if is_score(node) else None))

    def __repr__(self) -> str:
        return f"<score {self.expr}>"

    def evaluate(
        self,
        s: FloatArray,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
    ) -> tuple[FloatArray, FloatArray]:
        """Return the changed scores and their derivative with respect to the score.

        Parameters
        ----------
        s : numpy.ndarray
            Scores; all arithmetic happens in its dtype.
        b, h, i, j : array_like of int
            Positions that broadcast with `s`.
        sizes : object
            As in `Mask.evaluate`.

        Returns
        -------
        changed, slope : numpy.ndarray
            Arrays with the shape and dtype of `s`.
        """
        bound = bind(self.expr, flat_sizes(sizes))
        symbols = position_symbols(b, h, i, j, sizes) | {"score": s}
        if not s.size:
            return s.copy(), np.ones_like(s)
        pair = (evaluate(tree, symbols, s.dtype.type) for tree in (bound, derivative(bound)))
        changed, slope = (np.broadcast_to(value, s.shape) for value in pair)
        return changed, slope

    def evaluate_with_error(
        self,
        s: FloatArray,
        s_error: npt.ArrayLike,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
        unit: float,
    ) -> tuple[FloatArray, ...]:
        """Return changed scores and slopes, each with a bound on the error of its computed value.

        Parameters
        ----------
        s : numpy.ndarray
            Scores; the values are computed in its dtype.
        s_error : array_like
            Bound on ``|computed s - s|``.
        b, h, i, j, sizes
            As in `evaluate`.
        unit : float
            Unit roundoff of the arithmetic for which the bounds hold.

        Returns
        -------
        changed, changed_error, slope, slope_error : numpy.ndarray
            Arrays with the shape of `s`; an error is infinite where it cannot be bounded.
        """
        bound = bind(self.expr, flat_sizes(sizes))
        symbols = position_symbols(b, h, i, j, sizes) | {"score": s}
        if not s.size:
            none = np.zeros(s.shape)
            return s.copy(), none, np.ones_like(s), none
        roots = (bound, derivative(bound))
        parts = [x for pair in evaluate_with_error(roots, symbols, s_error, unit) for x in pair]
        return tuple(np.broadcast_to(part, s.shape) for part in parts)

    def curvature(
        self,
        s: FloatArray,
        s_error: npt.ArrayLike,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
        unit: float,
    ) -> tuple[FloatArray, FloatArray]:
        """Return the second derivative with respect to the score, with a bound on its error.

        Parameters
        ----------
        s, s_error, b, h, i, j, sizes, unit
            As in `evaluate_with_error`.

        Returns
        -------
        curve, curve_error : numpy.ndarray
            Arrays with the shape of `s`; the error is as in `evaluate_with_error`.
        """
        bound = bind(self.expr, flat_sizes(sizes))
        symbols = position_symbols(b, h, i, j, sizes) | {"score": s}
        if not s.size:
            return np.zeros(s.shape, s.dtype), np.zeros(s.shape)
        (pair,) = evaluate_with_error((second_derivative(bound),), symbols, s_error, unit)
        curve, error = (np.broadcast_to(part, s.shape) for part in pair)
        return curve, error

    def learned(
        self,
        s: FloatArray,
        s_error: npt.ArrayLike,
        b: Indices,
        h: Indices,
        i: Indices,
        j: Indices,
        sizes: object,
        unit: float,
    ) -> list[tuple[LookupTable, npt.NDArray[np.int64], FloatArray, FloatArray]]:
        """Return what the change reads of learned look-ups, and its derivatives by that.

        Parameters
        ----------
        s, s_error, b, h, i, j, sizes, unit
            As in `evaluate_with_error`.

        Returns
        -------
        list of (table, place, slope, slope_error)
            The look-up; then arrays with the shape of `s`: the number, in C order, of the element
            of ``table.array`` that a pair reads, the derivative by it, and a bound on its error.
            A look-up that is read in several places of the tree may be there several times.
        """
        symbols = position_symbols(b, h, i, j, sizes) | {"score": s}
        if not s.size:
            return []
        found = []
        for table, _, place, slope in reads(bind(self.expr, flat_sizes(sizes))):
            (pair,) = evaluate_with_error((slope,), symbols, s_error, unit)
            parts = evaluate(place, symbols, s.dtype.type), *pair
            places, slopes, errors = (np.broadcast_to(part, s.shape) for part in parts)
            found.append((table, places, slopes, errors))
        return found


def is_score(node: Expr) -> bool:
    """Whether a node is the symbol of the score."""
    return node.op == "symbol" and node.value == "score"


def chain(changes: Any) -> Score | None:
    """Return one change for None, a change, or a sequence of changes applied in order."""
    if changes is None or isinstance(changes, Score):
        return changes
    if isinstance(changes, Sequence) and not isinstance(changes, str):
        result: Score | None = None
        for change in changes:
            if not isinstance(change, Score):
                changes = change
                break
            result = change if result is None else result.then(change)
        else:
            return result
    raise ArgumentTypeError(
        f"score_mod: got {type(changes).__name__}; expected a score change of cupyflash.scores, "
        "or a sequence of them. Wrap a function with scores.score(function)."
    )


@untraced
def score(function: Callable[[Expr, Expr, Expr, Expr, Expr], Any]) -> Score:
    """Make a score change from a function of (s, b, h, i, j).

    Parameters
    ----------
    function : callable
        It is called once with symbols: the score s (scale * q.k), the flat batch index b, the query
        head h, the query position i and the key position j. It returns the new score; -inf hides
        the pair.

    Returns
    -------
    Score

    Raises
    ------
    TraceError
        If the function branches on a symbol (use ``where``), or does not return a number.

    Examples
    --------
    >>> from cupyflash import scores
    >>> scores.score(lambda s, b, h, i, j: s - 0.1 * abs(i - j))
    <score (score - (0.1 * absolute((i - j))))>
    """
    expr = traced(function, (SCORE, *POSITIONS), "score")
    if expr.type == "bool":
        raise TraceError(f"score: its function returned the condition {expr}; expected a number.")
    return Score(expr)


@untraced
def alibi(slopes: ArrayLike) -> Score:
    """Subtract a penalty that grows with the distance: ``s - slope_h |i + Lk - Lq - j|``.

    Parameters
    ----------
    slopes : array of float, or LookupTable
        One slope per query head, (Hq,), or per batch entry and query head, (..., Hq), with leading
        axes that broadcast with those of q, k and v; (n, Hq) in variable-length calls.
        `alibi_slopes` returns the usual slopes. ``lookup(slopes, learned=True)`` has gradients.

    Returns
    -------
    Score

    References
    ----------
    Press, Smith & Lewis 2022, "Train Short, Test Long", section 3.
    """
    array = _floats(slopes, "alibi: slopes")
    axes = (Axis(_H, "heads"),)
    slope = aligned(Alignment(array, "alibi: slopes", axes, table=_learned(slopes)))
    return Score(SCORE - slope * abs(_I + len_k - len_q - _J))


def alibi_slopes(heads: int) -> np.ndarray[Any, Any]:
    """Return the slopes of ALiBi for a number of heads: a geometric sequence below 1.

    If the number of heads n is a power of 2, they are ``2**(-8 / n)``, ``2**(-16 / n)``, … down to
    ``2**-8``. For any other n, let p be the largest power of 2 below it. The first p slopes are
    those for p heads; the rest are the first, third, fifth, … slope for 2 p heads.

    Parameters
    ----------
    heads : int
        The number of query heads, at least 1.

    Returns
    -------
    numpy.ndarray of float32, shape (heads,)
        The slopes for `alibi`. For calls on CuPy arrays, convert them with ``cupy.asarray``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        `heads` is not a whole number of 1 or more.

    References
    ----------
    Press, Smith & Lewis 2022, "Train Short, Test Long", section 3; for other numbers of heads,
    appendix A.

    Examples
    --------
    >>> from cupyflash import scores
    >>> scores.alibi_slopes(4)
    array([0.25      , 0.0625    , 0.015625  , 0.00390625], dtype=float32)
    """
    count = integer(heads)
    if count is None:
        raise ArgumentTypeError(f"alibi_slopes: heads is {heads!r}; expected a whole number.")
    if count < 1:
        raise ArgumentError(f"alibi_slopes: heads is {heads}; expected at least 1.")
    power = 1 << (count.bit_length() - 1)
    first = np.arange(1, power + 1) / power
    between = np.arange(1, 2 * power, 2)[: count - power] / (2 * power)
    slopes: np.ndarray[Any, Any] = np.exp2(-8 * np.concatenate([first, between]))
    return slopes.astype(np.float32)


@remembered
def softcap(c: float | LookupTable) -> Score:
    """Limit scores smoothly to (-c, c): ``c tanh(s / c)``.

    Parameters
    ----------
    c : float or LookupTable
        Positive and finite. A look-up, as of ``lookup(array, learned=True)``, has one limit, of
        shape () or (1,), or one for each query head, as the slopes of `alibi`.

    Returns
    -------
    Score
    """
    if isinstance(c, LookupTable):
        limits = _floats(c, "softcap: c")
        axes = (Axis(_H, "heads"),)
        limit = aligned(Alignment(limits, "softcap: c", axes, table=_learned(c)))
        return Score(limit * tanh(SCORE / limit))
    if isinstance(c, bool) or not isinstance(c, (int, float, np.integer, np.floating)):
        raise ArgumentTypeError(f"softcap: c is {c!r}; expected a positive number.")
    if not (math.isfinite(c) and c > 0):
        raise ArgumentError(f"softcap: c is {c!r}; expected a positive, finite number.")
    cap = float(c)
    if 2.0**-100 < cap < 2.0**100:  # its reciprocal is a normal number of float32, too
        return Score(cap * tanh(SCORE * (1.0 / cap)))
    return Score(cap * tanh(SCORE / cap))


@untraced
def relative_bias(table: ArrayLike) -> Score:
    """Add a learned number for every distance.

    ``s + table[h, R + clip(j - i - (Lk - Lq), -R, R)]``

    Parameters
    ----------
    table : array of float, or LookupTable
        Shape (Hq, 2 R + 1), (1, 2 R + 1) or (2 R + 1,), with entries from R keys before the query's
        own to R keys after it. Distances beyond R use the first or last entry.
        ``lookup(table, learned=True)`` has gradients.

    Returns
    -------
    Score

    References
    ----------
    Shaw, Uszkoreit & Vaswani 2018, "Self-Attention with Relative Position Representations" (the
    clipping); Raffel et al. 2020, section 2.1 (a scalar per head and distance).
    """
    read = _floats(table, "relative_bias: table")
    if read.ndim not in (1, 2) or read.shape[-1] % 2 == 0:
        raise ArgumentError(
            f"relative_bias: got a table of shape {tuple(read.shape)}; expected (Hq, 2 R + 1) or "
            "(2 R + 1,), with an odd number of distances."
        )
    size = int(read.shape[-1])
    reach = size // 2
    position = clip(_J - _I - (len_k - len_q), -reach, reach) + reach
    axes = (Axis(_H, "heads"), Axis(position, "distance", exact=size))
    own = _learned(table)
    alignment = Alignment(read, "relative_bias: table", axes, lead=False, table=own)
    return Score(SCORE + aligned(alignment))


def _learned(value: Any) -> LookupTable | None:
    """Return a look-up that has gradients."""
    return value if isinstance(value, LookupTable) and value.learned else None


def _floats(value: Any, argument: str) -> Any:
    if isinstance(value, LookupTable):
        value = value.array
    array = as_array(value, argument)
    if np.dtype(array.dtype).name not in DTYPES:
        raise ArgumentTypeError(f"{argument}: got dtype {array.dtype}; expected floats.")
    return array
