"""Which integers of an expression fit into 32 bits, whatever the numbers of the call are.

Only the structure of a tree may decide this, so that a thousand different offsets compile one
kernel: every position, length and constant is assumed to have any magnitude up to `LIMIT`, and it
is checked that the problem and its constants keep to that.
"""

from __future__ import annotations

from .nodes import Expr, walk

LIMIT = 2**21
_WORD = 2**31

_Span = tuple[int, int]

_TYPES: dict[str, _Span] = {
    "bool": (0, 1),
    "int8": (-(2**7), 2**7 - 1),
    "uint8": (0, 2**8 - 1),
    "int16": (-(2**15), 2**15 - 1),
    "uint16": (0, 2**16 - 1),
    "int32": (-_WORD, _WORD - 1),
}


def narrow(*roots: Expr) -> dict[Expr, _Span]:
    """Return the integers below bound expressions that, like their operands, fit into 32 bits.

    Each has its least and its largest value.

    Parameters
    ----------
    *roots : Expr
        The trees. Their positions, lengths and integer constants are at most `LIMIT`; constants
        beyond it are not returned.
    """
    found = spans(*roots)
    return {node: span for node, span in found.items() if node.type == "int" and span is not None}


def spans(*roots: Expr) -> dict[Expr, _Span | None]:
    """Return the ranges of the integers and conditions below `roots`.

    None means that a node or one of its operands does not fit into 32 bits.
    """
    found: dict[Expr, _Span | None] = {}
    for node in walk(*roots):
        if node.type == "bool":
            found[node] = (0, 1)
        elif node.type == "int":
            found[node] = _held(_span(node, [found.get(arg) for arg in node.args]))
    return found


def _held(span: _Span | None) -> _Span | None:
    fits = span is not None and span[0] >= -_WORD and span[1] < _WORD
    return span if fits else None


def _span(node: Expr, args: list[_Span | None]) -> _Span | None:
    """Return the least and the largest value of an integer, or None where nothing is known."""
    if node.op == "symbol":
        return 0, LIMIT
    if node.op == "constant":
        return (-LIMIT, LIMIT) if abs(node.value) <= LIMIT else None
    if node.op == "lookup":
        return _TYPES.get(node.value[0].dtype.name)
    if node.op == "where":
        args = args[1:]
    known = [span for span in args if span is not None]
    if len(known) < len(args) or node.op not in _KNOWN:
        return None
    lows, highs = zip(*known, strict=True)
    if node.op == "to_int":
        return known[0]
    if node.op in ("minimum", "maximum"):
        choose = min if node.op == "minimum" else max
        return choose(lows), choose(highs)
    if node.op == "where":
        return min(lows), max(highs)
    if node.op == "negative":
        return -highs[0], -lows[0]
    if node.op == "absolute":
        return 0, max(-lows[0], highs[0])
    if node.op == "add":
        return sum(lows), sum(highs)
    if node.op == "subtract":
        return lows[0] - highs[1], highs[0] - lows[1]
    if node.op == "multiply":
        products = [x * y for x in known[0] for y in known[1]]
        return min(products), max(products)
    if node.op == "right_shift":
        return min(lows[0], 0), max(highs[0], 0)
    # A quotient is no larger than the dividend, a remainder than the divisor.
    size = max(abs(end) for end in known[0 if node.op == "floor_divide" else 1])
    return -size, size


_KNOWN = (
    "to_int", "minimum", "maximum", "where", "negative", "absolute", "add", "subtract", "multiply",
    "floor_divide", "remainder", "right_shift",
)  # fmt: skip
