"""How CUDA C++ divides integers by a positive number that is written out."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .nodes import Expr, walk

SHIFT, UNSIGNED = 1, 4  # approximate costs, in multiplications


def divisors_of(*roots: Expr | None) -> frozenset[Expr]:
    """Return the constants other than 0 by which expressions divide integers."""
    nodes = walk(*(root for root in roots if root is not None))
    divided = (node.args[1] for node in nodes if node.op in ("floor_divide", "remainder"))
    return frozenset(x for x in divided if x.op == "constant" and x.value != 0)


def division(
    node: Expr, divisors: Collection[Expr], words: Mapping[Expr, tuple[int, int]]
) -> tuple[str, int] | None:
    """Return how to divide without a function, and what it costs; None where that is not known.

    Parameters
    ----------
    node : Expr
        Any operation.
    divisors : collection of Expr
        Constants that are written out.
    words : mapping of Expr to (int, int)
        The integers of 32 bits, and their least and largest values.
    """
    if node.op not in ("floor_divide", "remainder"):
        return None
    number, divisor = node.args
    if divisor not in divisors or divisor.value < 1:
        return None
    by, is_quotient = divisor.value, node.op == "floor_divide"
    if by.bit_count() == 1:  # a shift rounds down, as the division does
        rest = f"{{0}} & {by - 1}{'' if node in words else 'LL'}"
        return f"{{0}} >> {by.bit_length() - 1}" if is_quotient else rest, SHIFT
    if node in words and words[number][0] >= 0:
        unsigned = f"static_cast<unsigned int>({{0}}) {'/' if is_quotient else '%'} {by}u"
        return f"static_cast<int>({unsigned})", UNSIGNED
    return None
