"""What a call over ranks would do and take, without them: sizes, proofs and a model of time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..expr.interval import EMPTY
from ..pieces.schedule import classes
from ..problem.call import Array, Call
from .heads import shares
from .layouts import BLOCK, Layout, cheapest_layout
from .model import Machine, Model
from .plans import candidates, cheapest
from .proofs import Proofs
from .rounds import Scheme, rounds_of

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
        How positions are divided: "contiguous", "zigzag", "cyclic" or "proofs".
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
    known = candidates(call, ranks)
    scheme = cheapest(call, proofs, of_ranks)
    one_rank, seconds = None, {}
    if machine is not None:
        model = Model(call, proofs, of_ranks, machine, backward)
        one_rank = model.one_rank
        seconds = {each: model.seconds(each) for each in known}
    price = layout.price
    assert price is not None
    amounts = _Amounts(call, proofs, backward)
    return Simulation(
        ranks=ranks,
        nodes=nodes,
        layout=layout.kind,
        imbalance=price.imbalance,
        scheme=scheme,
        rounds=amounts.rounds(scheme),
        moved=amounts.moved(scheme),
        needed=None if scheme == "heads" else amounts.of_keys(_needed(call, layout, keys_of)),
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

    def __init__(self, call: Call, proofs: Proofs, backward: bool) -> None:
        problem = call.problem
        self._proofs, self._backward, self._problem = proofs, backward, problem
        self._item: int = problem.dtype.itemsize
        self._wide: int = problem.accumulator.itemsize
        numbers = [math.prod(map(int, x.shape)) // x.shape[-2] for x in (call.q, call.k, call.v)]
        self._q, self._k, self._v = (int(n) for n in numbers)
        self._o: int = problem.batch * problem.heads * problem.d_v
        self._both = 2 if backward else 1  # keys and values, and their gradients

    def of_keys(self, keys: int) -> int:
        """Return the bytes for keys, values and, in the backward, their gradients."""
        each = self._item + (self._wide if self._backward else 0)
        return keys * (self._k + self._v) * each

    def rounds(self, scheme: Scheme) -> int:
        """Return the exchanges."""
        if scheme == "heads":
            return 2 if self._proofs.size > 1 else 0
        return len(rounds_of(self._proofs.pairs(), scheme))

    def moved(self, scheme: Scheme) -> int:
        """Return the bytes that all ranks send."""
        proofs = self._proofs
        if scheme != "heads":
            return self.of_keys(int(proofs.keys.sum() - np.trace(proofs.keys)))
        heads = np.array([len(x) for x in shares(self._problem.heads_kv, proofs.size)])
        leaves = 1 - heads / heads.sum()  # of each rank's rows
        count_q, count_k = (float(x @ leaves) for x in proofs.held)
        row, key = self._of_row(), self._k + self._v
        statistics = self._problem.batch * self._problem.heads * self._wide
        of_keys = self._both * count_k * key * self._item
        return round(count_q * (row * self._item + statistics) + of_keys)

    def _of_row(self) -> int:
        """Return the numbers of a query that travel by heads, there and back."""
        return 2 * (self._q + self._o) if self._backward else self._q + self._o

    def memory(self, scheme: Scheme) -> int:
        """Return the bytes that the rank with the most of them allocates."""
        rows, keys = (int(x.max()) for x in self._proofs.held)
        width = self._k + self._v
        if scheme == "heads":
            there = self._q + (2 * self._o if self._backward else 0)
            return 3 * self._item * (there * rows + width * keys)
        if scheme == "gather":
            needed = self._proofs.keys.sum(axis=0) - np.diag(self._proofs.keys)
            keys = int(needed.max())
        if self._backward:
            return (
                2 * self._wide * self._q * rows + (3 * self._item + 5 * self._wide) * width * keys
            )
        return self._wide * self._o * rows + 3 * self._item * width * keys
