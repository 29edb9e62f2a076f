"""What generated code of a call's masks and scores is: its text, what is in it, its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .nodes import Expr, walk


@dataclass(frozen=True)
class Functions:
    """The functions of a call's expressions, for which a kernel is compiled.

    Attributes
    ----------
    source : str
        CUDA C++, the same for every call whose expressions have the same structure.
    num_ints, num_floats, num_tables : int
        How many constants and looked-up arrays they read at run time.
    has_mask, has_score, has_dscore, has_range, has_tangent, has_curve : bool
        Which functions are defined; the last three are for the range of keys, for the tangent of a
        bias, and for the second derivative of score changes.
    has_edges : bool
        Whether the mask has edges: see `edges.has_edges`.
    mask_steps, score_steps : int
        The approximate cost of the mask, and of the changed score with its slope, in
        multiplications.
    mask_block : int
        Keys of a block of which a query sees one range: see `block_range`; 0 if it may see others.
    score_reads : bool
        Whether changed scores depend on elements of an array at the query's or the key's position.
    num_given : int
        How many numbers in scores are the same for all pairs of a head.
    """

    source: str = ""
    num_ints: int = 0
    num_floats: int = 0
    num_tables: int = 0
    has_mask: bool = False
    has_score: bool = False
    has_dscore: bool = False
    has_range: bool = False
    has_edges: bool = False
    mask_steps: int = 0
    score_steps: int = 0
    mask_block: int = 0
    score_reads: bool = False
    num_given: int = 0
    has_tangent: bool = False
    has_curve: bool = False


@dataclass(frozen=True)
class Generated:
    """The generated code of a call's expressions, and its data.

    Attributes
    ----------
    functions : Functions
        The functions for which kernels are compiled.
    ints, floats : tuple
        Constants, in the order of ``p.ints`` and ``p.floats``.
    arrays : tuple
        Looked-up arrays, in the order of ``p.tables``.
    """

    functions: Functions
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    arrays: tuple[Any, ...] = ()


def reads_by_place(root: Expr) -> bool:
    """Whether an expression reads an array at the query's or the key's position."""
    moves: set[Expr] = set()  # with that position
    for node in walk(root):
        if node.op == "symbol" and node.value in ("i", "j"):
            moves.add(node)
        elif any(arg in moves for arg in node.args):
            if node.op == "lookup":
                return True
            moves.add(node)
    return False
