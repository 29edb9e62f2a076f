"""The plan of a call on one rank: its scheme, and the steps that it takes.

Layouts remember plans, so that a loop of calls with one mask finds its steps once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..problem.call import Array, Call, Problem
from .layouts import Layout
from .model import H100, Model
from .proofs import Proofs
from .rounds import SCHEMES, Scheme, Step, steps

MOST_REMEMBERED = 16  # calls of a layout whose plans it keeps


class Plan(NamedTuple):
    """What a rank does.

    Attributes
    ----------
    scheme : str
        "rounds", "gather" or "heads".
    steps : list of Step
        What is sent, received and computed between two exchanges; none if rows travel by heads.
    """

    scheme: Scheme
    steps: list[Step]


def check_scheme(scheme: object) -> None:
    """Refuse a scheme that there is not."""
    if scheme not in SCHEMES:
        known = ", ".join(f'"{each}"' for each in SCHEMES)
        raise ArgumentError(f"scheme: got {scheme!r}; expected one of {known}.")


def _check_heads(call: Call, ranks: int) -> None:
    """Refuse to divide heads where that cannot be done."""
    heads = call.problem.heads_kv
    if ranks > heads:
        raise ArgumentError(
            f'scheme: got "heads" with {ranks} ranks for {heads} key-value heads; expected a head '
            'or more for each rank. Pass scheme="rounds", or repeat the heads of k and v.'
        )
    if call.device is not None and call.problem.dropout:
        raise ArgumentError(
            'scheme: got "heads" with dropout for CuPy arrays, whose kernels count heads from 0; '
            'expected scheme="rounds" or "gather".'
        )


def candidates(call: Call, ranks: int) -> list[Scheme]:
    """Return the schemes that can serve a call."""
    try:
        _check_heads(call, ranks)
    except ArgumentError:
        ranks = 1
    return ["rounds", "gather", "heads"] if ranks > 1 else ["rounds", "gather"]


def cheapest(call: Call, proofs: Proofs, nodes: Sequence[int]) -> Scheme:
    """Return the scheme that takes the least time for the forward, by the model of H100s."""
    model = Model(call, proofs, nodes, H100, backward=False)
    return min(candidates(call, proofs.size), key=model.seconds)


def plan(
    call: Call, layout: Layout, layout_k: Layout, scheme: Scheme, nodes: Sequence[int]
) -> Plan:
    """Return the plan of this rank, whose peers are on these nodes.

    A mask that reads arrays is examined in every call, because their elements may have changed.
    """
    if scheme == "heads":
        _check_heads(call, layout.size)
        return Plan(scheme, [])
    expr, arrays = (None, ()) if call.mask is None else call.mask.structure
    if arrays:
        return _made(call, layout, layout_k, scheme, nodes)
    problem = call.problem
    sizes = _sizes(call.q), _sizes(call.k), _sizes(call.v), problem.dtype, call.device is not None
    facts = problem.lead, problem.heads, problem.heads_kv, sizes, bool(problem.dropout)
    key = expr, facts, _offsets(problem), scheme, tuple(nodes)
    known = layout.remembered.get(key)
    if known is None or known[0] is not layout_k:
        while len(layout.remembered) >= MOST_REMEMBERED:
            del layout.remembered[next(iter(layout.remembered))]
        known = layout_k, _made(call, layout, layout_k, scheme, nodes)
        layout.remembered[key] = known
    made: Plan = known[1]
    return made


def _sizes(x: Array) -> tuple[int, ...]:
    """Return all sizes of an array but that of its axis of positions."""
    return *x.shape[:-2], x.shape[-1]


def _offsets(problem: Problem) -> bytes | None:
    """Return what tells the packed sequences of a call from those of others."""
    if not problem.packed:
        return None
    return np.stack([problem.len_q, problem.len_k]).tobytes()


def _made(
    call: Call, layout: Layout, layout_k: Layout, scheme: Scheme, nodes: Sequence[int]
) -> Plan:
    proofs = Proofs(call, layout, layout_k)
    if scheme == "auto":
        scheme = cheapest(call, proofs, nodes)
    return Plan(scheme, [] if scheme == "heads" else steps(proofs, layout.rank, scheme))
