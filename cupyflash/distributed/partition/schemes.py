"""The plan of a call on one rank: its scheme, and the steps that it takes.

Layouts remember plans, so that a loop of calls with one mask finds its steps once. Arrays that a
mask reads are compared by digests of what they hold.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import ArgumentError
from ...expr.evaluate import host
from ...problem.call import Array, Call
from .exchange_schedule import SCHEMES, Scheme, Step, ranks_of_a_node, steps
from .layouts import Layout
from .model import H100, Model
from .proofs import Proofs

BY_HEADS: tuple[Scheme, ...] = ("heads", "heads x rounds")
ALIKE = 1.001  # a longer time by less is none
MOST_REMEMBERED = 16  # calls of a layout whose plans it keeps
MOST_DECIDED = 1024  # kinds of calls of a communicator for which it keeps what "auto" is


class Plan(NamedTuple):
    """What a rank does.

    Attributes
    ----------
    scheme : str
        "rounds", "gather", "nodes", "heads" or "heads x rounds".
    steps : list of Step
        What is sent, received and computed between two exchanges of keys. With "heads x rounds",
        those of its group, whose ranks count as one; none with "heads".
    group : int
        How many ranks in a row divide the heads among them; 1 if none do.
    kind : hashable
        For what "auto" is this scheme; None if another one was asked for.
    """

    scheme: Scheme
    steps: list[Step]
    group: int = 1
    kind: Hashable = None


class Decisions:
    """Which scheme "auto" is on a communicator: that of the first call of its kind on its layouts.

    Ranks keep it when they have agreed on a call, in the same order.
    """

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[weakref.ref[Layout], weakref.ref[Layout], Scheme]] = {}

    def of(self, kind: Hashable, layout: Layout, layout_k: Layout) -> Scheme | None:
        """Return the scheme, or None if there is none yet."""
        found = self._made.get((kind, id(layout), id(layout_k)))
        if found is None or found[0]() is not layout or found[1]() is not layout_k:
            return None
        return found[2]

    def keep(self, plan: Plan, layout: Layout, layout_k: Layout) -> None:
        """Keep what a plan has decided, unless an earlier one has."""
        if plan.kind is None or self.of(plan.kind, layout, layout_k) is not None:
            return
        refs = weakref.ref(layout), weakref.ref(layout_k)
        key = plan.kind, id(layout), id(layout_k)
        _keep(self._made, key, (*refs, plan.scheme), MOST_DECIDED)

    def schemes(self, layout: Layout) -> list[Scheme]:
        """Return those of a layout of queries, the first one first."""
        return [scheme for of, _, scheme in self._made.values() if of() is layout]


def check_scheme(scheme: object) -> None:
    """Refuse a scheme that there is not."""
    if scheme not in SCHEMES:
        known = ", ".join(f'"{each}"' for each in SCHEMES)
        raise ArgumentError(f"scheme: got {scheme!r}; expected one of {known}.")


def _check_nodes(nodes: Sequence[int]) -> None:
    """Refuse to relay where that cannot be done."""
    each = ranks_of_a_node(nodes)
    if not 1 < each < len(nodes):
        raise ArgumentError(
            f'scheme: got "nodes" with ranks on the nodes {list(nodes)}; expected several nodes '
            'with as many ranks each, two or more, in a row. Pass scheme="rounds".'
        )


def _check_heads(call: Call, ranks: int, scheme: Scheme, group: int) -> None:
    """Refuse to divide heads where that cannot be done."""
    heads = call.problem.heads_kv
    if scheme == "heads" and ranks > heads:
        raise ArgumentError(
            f'scheme: got "heads" with {ranks} ranks for {heads} key-value heads; expected a head '
            'or more for each rank. Pass scheme="rounds", or repeat the heads of k and v.'
        )
    if scheme == "heads x rounds" and group == 1:
        raise ArgumentError(
            f'scheme: got "heads x rounds" with {ranks} ranks for {heads} key-value heads; '
            "expected nodes with as many ranks each, some of which, but not all ranks, divide the "
            'heads. Pass scheme="rounds", or "heads" if there is a head for each rank.'
        )


def group_size(call: Call, scheme: Scheme, nodes: Sequence[int]) -> int:
    """Return how many ranks in a row divide the heads of a call; 1 if none do.

    With "heads x rounds" they are those of a node, or as many as divide their number.
    """
    ranks, heads = len(nodes), call.problem.heads_kv
    if scheme == "heads":
        return ranks
    if scheme != "heads x rounds":
        return 1
    in_node = ranks_of_a_node(nodes)
    if not in_node:
        return 1
    largest = max(n for n in range(1, in_node + 1) if n <= max(heads, 1) and in_node % n == 0)
    return largest if largest < ranks else 1


def candidates(call: Call, nodes: Sequence[int], by_heads: bool = True) -> list[Scheme]:
    """Return the schemes that can serve a call; `by_heads` says whether its rows may travel."""
    found: list[Scheme] = ["rounds", "gather"]
    if 1 < ranks_of_a_node(nodes) < len(nodes):
        found.append("nodes")
    for scheme in BY_HEADS if len(nodes) > 1 and by_heads else ():
        try:
            _check_heads(call, len(nodes), scheme, group_size(call, scheme, nodes))
        except ArgumentError:
            continue
        found.append(scheme)
    return found


def cheapest(
    call: Call,
    proofs: Proofs,
    nodes: Sequence[int],
    by_heads: bool = True,
    backward: bool = False,
) -> Scheme:
    """Return the scheme that takes the least time, by the model of H100s.

    Of several that hardly differ, it is the first one: rounds hold the fewest keys.
    """
    model = Model(call, proofs, nodes, H100, backward)
    known = candidates(call, nodes, by_heads)
    times = [model.seconds(scheme, group_size(call, scheme, nodes)) for scheme in known]
    return next(x for x, time in zip(known, times, strict=True) if time <= ALIKE * min(times))


def plan(
    call: Call,
    layout: Layout,
    layout_k: Layout,
    scheme: Scheme,
    nodes: Sequence[int],
    by_heads: bool = True,
    copies: bool = False,
    backward: bool = False,
    decisions: Decisions | None = None,
) -> Plan:
    """Return the plan of this rank, whose peers are on these nodes.

    A layout remembers it. What the arrays hold that a mask reads is compared in every call, because
    their elements may have changed; with the scheme "heads" no plan depends on it. Which scheme
    "auto" is may have been decided for its kind, with other such elements: `decisions` says so.
    `by_heads` says whether rows may travel to the ranks of their heads: divided look-ups do not.
    `copies` says whether messages take SMs only where they arrive.
    """
    if scheme in BY_HEADS and not by_heads:
        raise ArgumentError(
            f'scheme: got "{scheme}" with a sharded look-up, which ranks hold in part; expected '
            '"rounds", "gather" or "auto". Pass the whole array, without distributed.sharded.'
        )
    if scheme == "nodes":
        _check_nodes(nodes)
    if scheme in BY_HEADS:
        _check_heads(call, layout.size, scheme, group_size(call, scheme, nodes))
    if not by_heads:
        return _made(call, layout, layout_k, scheme, nodes, by_heads, copies, backward)
    expr, arrays = (None, ()) if call.mask is None else call.mask.structure
    problem = call.problem
    sizes = _sizes(call.q), _sizes(call.k), _sizes(call.v), problem.dtype, call.device is not None
    facts = problem.lead, problem.heads, problem.heads_kv, sizes, bool(problem.dropout)
    change = call.score_mod
    of_score = None if change is None else (change.structure[0], bool(change.learned_tables))
    options = of_score, call.sink is None
    bias = None if call.bias is None else call.bias.shape[-1:]
    how = scheme, tuple(nodes), copies, backward and scheme == "auto"
    kind = expr, facts, options, bias, problem.rows.of_queries.layout, how
    of_auto = kind if scheme == "auto" else None
    if of_auto and decisions is not None:
        scheme = decisions.of(kind, layout, layout_k) or scheme
    if scheme == "heads":
        return Plan(scheme, [], group_size(call, scheme, nodes), of_auto)
    key = kind, scheme, tuple(map(_content, arrays))
    known = layout.remembered.get(key)
    if known is None or known[0] is not layout_k:
        made = _made(call, layout, layout_k, scheme, nodes, by_heads, copies, backward)
        known = layout_k, made._replace(kind=of_auto)
        _keep(layout.remembered, key, known, MOST_REMEMBERED)
    found: Plan = known[1]
    return found


def _keep(remembered: dict[Hashable, Any], key: Hashable, value: Any, most: int) -> None:
    """Keep a value, and let the oldest ones go."""
    while len(remembered) >= most and key not in remembered:
        del remembered[next(iter(remembered))]
    remembered[key] = value


def _content(array: Array) -> Hashable:
    """Return what tells an array that a mask reads from others, whatever memory it lies in."""
    elements = np.ascontiguousarray(host(array))
    return elements.shape, elements.dtype.str, hashlib.sha256(elements.tobytes()).digest()


def _sizes(x: Array) -> tuple[int, ...]:
    """Return all sizes of an array but that of its axis of positions."""
    return *x.shape[:-2], x.shape[-1]


def _made(
    call: Call,
    layout: Layout,
    layout_k: Layout,
    scheme: Scheme,
    nodes: Sequence[int],
    by_heads: bool,
    copies: bool,
    backward: bool,
) -> Plan:
    proofs: Proofs | None = None
    if scheme == "auto":
        proofs = Proofs(call, layout, layout_k)
        scheme = cheapest(call, proofs, nodes, by_heads, backward)
    group = group_size(call, scheme, nodes)
    if scheme == "heads":
        return Plan(scheme, [], group)
    proofs = (proofs or Proofs(call, layout, layout_k)).of_groups(group)
    own = layout.rank // group
    return Plan(scheme, steps(call, proofs, own, scheme, nodes[::group], copies), group)
