"""What a call over ranks would do and take, without them: sizes, proofs and a model of time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...expr.interval import EMPTY
from ...pieces.schedule import classes
from ...problem.call import Array, Call
from .divisions import cheapest_layout
from .exchange_schedule import Scheme, ranks_of_a_node, rounds_of
from .head_batches import shares
from .layouts import BLOCK, Layout
from .model import Machine, Model
from .proofs import Proofs
from .schemes import BY_HEADS, candidates, cheapest, group_size

MOST_BLOCKS = 2**26  # pairs of blocks that are examined


@dataclass(frozen=True)
class Simulation:
    """What a call over ranks would do, according to the mask's proofs and a model.

    Nothing of it is measured. The model knows the speed that kernels reach with long pieces, that
    of the connections, and the time of a short message; it does not know what is lost on short
    pieces, nor what transfers take from the kernels that run meanwhile.

    Attributes
    ----------
    ranks, nodes : int
        Ranks, each of which has a GPU, and the machines that have them, as many each.
    layout : str
        How positions are divided: "contiguous", "zigzag", "cyclic", "proofs" or
        "documents".
    imbalance : float
        The pairs that the heaviest rank computes, divided by the mean of all ranks.
    scheme : str
        What ``scheme="auto"`` would choose.
    rounds : int
        Exchanges of keys and values between the ranks.
    moved : int
        Bytes that travel between ranks: keys and values, and for gradients theirs, too.
    needed : int or None
        Bytes of `moved` for keys that the mask lets the receiver see, as far as its proofs tell for
        blocks of 128, or of more if the sequence has more than a million positions. None where
        rows travel by heads.
    memory : int
        Bytes that a rank allocates besides its arrays and results.
    one_rank : float or None
        Seconds on one GPU; None if the device's speed, or that of its connections, is not known.
    schemes : mapping of str to float
        Seconds over all ranks by each scheme.
    """

    ranks: int
    nodes: int
    layout: str
    imbalance: float
    scheme: Scheme
    rounds: int
    moved: int
    needed: int | None
    memory: int
    one_rank: float | None
    schemes: Mapping[Scheme, float]

    @property
    def seconds(self) -> float | None:
        """Seconds over all ranks; None if they are not known."""
        return self.schemes.get(self.scheme)

    @property
    def efficiency(self) -> float | None:
        """The seconds of one rank, divided by those of all together; 1 is the most."""
        if self.one_rank is None or self.seconds is None:
            return None
        return self.one_rank / (self.ranks * self.seconds) if self.seconds else 1.0


def simulate(
    call: Call, ranks: int, nodes: int, backward: bool, machine: Machine | None
) -> Simulation:
    """Return what a call of all positions would do over ranks.

    Without a machine, times are not known; the scheme is chosen as it always is.
    """
    problem = call.problem
    lead, heads = problem.lead, problem.heads
    len_q, len_k = int(problem.len_q), int(problem.len_k)
    layout_k = None
    if len_q != len_k:
        layout_k = cheapest_layout(ranks, len_k, None, None, (), 1)
    layout = cheapest_layout(ranks, len_q, call.mask, layout_k, lead, heads)
    keys_of = layout if layout_k is None else layout_k
    proofs = Proofs(call, layout, keys_of)
    of_ranks = [rank * nodes // ranks for rank in range(ranks)]
    known = candidates(call, of_ranks)
    scheme = cheapest(call, proofs, of_ranks, backward=backward)
    one_rank, seconds = None, {}
    if machine is not None:
        model = Model(call, proofs, of_ranks, machine, backward)
        one_rank = model.one_rank
        seconds = {each: model.seconds(each, group_size(call, each, of_ranks)) for each in known}
    amounts = _Amounts(call, proofs, group_size(call, scheme, of_ranks), of_ranks, backward)
    return Simulation(
        ranks=ranks,
        nodes=nodes,
        layout=layout.kind,
        imbalance=amounts.imbalance(),
        scheme=scheme,
        rounds=amounts.rounds(scheme),
        moved=amounts.moved(scheme),
        needed=None if scheme in BY_HEADS else amounts.of_keys(_needed(call, layout, keys_of)),
        memory=amounts.memory(scheme),
        one_rank=one_rank,
        schemes=seconds,
    )


def _needed(call: Call, layout: Layout, layout_k: Layout) -> int:
    """Return the keys that ranks need of others, each as often as a rank needs it.

    They are counted in blocks; the longer sequences are, the larger.
    """
    size = BLOCK
    while math.prod(-(-each.length // size) for each in (layout, layout_k)) > MOST_BLOCKS:
        size += BLOCK
    (rows, owners), (keys, ranks) = (_blocks(each, size) for each in (layout, layout_k))
    sizes = np.array([len(block) for block in keys], np.int64)
    seen = classes(call.mask, call.problem, rows, keys) != EMPTY
    total = 0
    for rank in np.unique(owners):
        here = seen[owners == rank].any(axis=0) & (ranks != rank)
        total += int(sizes[here].sum())
    return total


def _blocks(layout: Layout, size: int) -> tuple[list[range], Array]:
    """Return the blocks of all ranks, and the rank of each."""
    of_ranks = [runs.cut(size) for runs in layout.runs]
    owners = np.repeat(np.arange(layout.size), [len(x) for x in of_ranks])
    return [block for each in of_ranks for block in each], owners


class _Amounts:
    """Bytes that travel, and that a rank allocates."""

    def __init__(
        self, call: Call, proofs: Proofs, group: int, nodes: Sequence[int], backward: bool
    ) -> None:
        problem, self._of_node = call.problem, ranks_of_a_node(nodes)
        self._group, self._of_groups = group, proofs.of_groups(group)
        self._proofs, self._backward, self._problem = proofs, backward, problem
        self._item: int = problem.dtype.itemsize
        self._wide: int = problem.accumulator.itemsize
        numbers = [math.prod(map(int, x.shape)) // x.shape[-2] for x in (call.q, call.k, call.v)]
        self._q, self._k, self._v = (int(n) for n in numbers)
        self._o: int = problem.batch * problem.heads * problem.d_v

    def of_keys(self, keys: int) -> int:
        """Return the bytes for keys, values and, in the backward, their gradients."""
        each = self._item + (self._wide if self._backward else 0)
        return keys * (self._k + self._v) * each

    def _share(self) -> Array:
        """Return the part of the heads that each rank of a group computes."""
        heads = np.array([len(x) for x in shares(self._problem.heads_kv, self._group)])
        return heads / max(int(heads.sum()), 1)

    def imbalance(self) -> float:
        """Return the pairs that the heaviest rank computes, divided by the mean."""
        pairs = self._of_groups.work.sum(axis=0)[:, None] * self._share()
        mean = float(pairs.mean())
        return float(pairs.max()) / mean if mean else 1.0

    def rounds(self, scheme: Scheme) -> int:
        """Return the exchanges."""
        if scheme == "nodes":
            inside, across = self._by_nodes()
            between = rounds_of(self._proofs.of_groups(self._of_node).pairs(), "rounds")
            return int(inside > 0 or across > 0) + len(between)
        travels = 2 if scheme in BY_HEADS and self._group > 1 else 0
        return travels + len(rounds_of(self._of_groups.pairs(), scheme))

    def _by_nodes(self) -> tuple[int, int]:
        """Return the keys that travel inside of nodes, and those between them."""
        size, keys = self._of_node, self._proofs.keys
        owner, user = np.indices(keys.shape)
        is_relay = (owner % size == user % size) & (owner // size != user // size)
        inside = int(keys[(owner != user) & ~is_relay].sum())
        of_nodes = self._proofs.keys_of_groups(size)
        owner, node = np.indices(of_nodes.shape)
        return inside, int(of_nodes[owner // size != node].sum())

    def moved(self, scheme: Scheme) -> int:
        """Return the bytes that all ranks send."""
        if scheme == "nodes":
            return self.of_keys(sum(self._by_nodes()))
        keys = self._of_groups.keys
        in_rounds = self.of_keys(int(keys.sum() - np.trace(keys)))
        if scheme not in BY_HEADS:
            return in_rounds
        leaves = np.tile(1 - self._share(), self._of_groups.size)  # of each rank's rows
        count_q, count_k = (float(x @ leaves) for x in self._proofs.held)
        statistics = self._problem.batch * self._problem.heads * self._wide
        of_row = 2 * (self._q + self._o) if self._backward else self._q + self._o
        of_key = (2 if self._backward else 1) * (self._k + self._v)
        of_rows = count_q * (of_row * self._item + statistics)
        return in_rounds + round(of_rows + count_k * of_key * self._item)

    def memory(self, scheme: Scheme) -> int:
        """Return the bytes that the rank with the most of them allocates."""
        rows, keys = (int(x.max()) for x in self._proofs.held)
        width = self._k + self._v
        there = self._q + (2 * self._o if self._backward else 0)
        of_heads = self._item * (there * rows + width * keys)  # as many as the rank's own
        if scheme == "heads":
            return 3 * of_heads
        if scheme == "gather":
            needed = self._proofs.keys.sum(axis=0) - np.diag(self._proofs.keys)
            keys = int(needed.max())
        here, there = 3, 5  # as many times all keys of a step, and their gradients
        if scheme == "nodes":
            here, there = 3 * self._of_node + 2, 3 * self._of_node + 2
        of_rounds = self._wide * self._o * rows + here * self._item * width * keys
        if self._backward:
            of_rounds = 2 * self._wide * self._q * rows
            of_rounds += (here * self._item + there * self._wide) * width * keys
        if scheme == "heads x rounds":
            results = width * keys + self._q * rows if self._backward else self._o * rows
            return max(3 * of_heads, of_heads + self._item * results + of_rounds)
        return of_rounds
