"""What a call over ranks would do and take, without them: sizes, proofs and a model of time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..expr.interval import EMPTY
from ..pieces.schedule import chunks, classes
from ..problem.call import Call
from .heads import shares
from .layouts import BLOCK, Layout, cheapest_layout
from .model import Machine, Model
from .plans import candidates, cheapest
from .proofs import Proofs
from .rounds import rounds_of

MOST_BLOCKS = 2**26  # pairs of chunks of queries and blocks of keys that are examined


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
        Bytes of `moved` for keys that the mask lets the receiver see, in blocks of 128, as far as
        its proofs tell. None where rows travel by heads.
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
    scheme: str
    rounds: int
    moved: int
    needed: int | None
    memory: int
    one_rank: float | None
    schemes: Mapping[str, float]

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
    """Return the keys that ranks need of others, in blocks, each as often as a rank needs it."""
    rows, owners = layout.chunks
    of_keys, key_owners = layout_k.chunks
    size = BLOCK * -(-len(rows) * layout_k.length // (BLOCK * MOST_BLOCKS))
    blocks = [
        range(chunk.start + part.start, chunk.start + part.stop)
        for chunk in of_keys
        for part in chunks(len(chunk), size)
    ]
    counts = [-(-len(chunk) // size) for chunk in of_keys]
    ranks = np.repeat(key_owners, counts)
    sizes = np.array([len(block) for block in blocks], np.int64)
    seen = classes(call.mask, call.problem, rows, blocks) != EMPTY
    total = 0
    for rank in np.unique(owners):
        here = seen[owners == rank].any(axis=0) & (ranks != rank)
        total += int(sizes[here].sum())
    return total


class _Amounts:
    """Bytes that travel, and that a rank allocates."""

    def __init__(self, call: Call, proofs: Proofs, backward: bool) -> None:
        problem = call.problem
        self._proofs, self._backward, self._problem = proofs, backward, problem
        self._item, self._wide = problem.dtype.itemsize, problem.accumulator.itemsize
        self._q, self._k, self._v = (math.prod(x.shape) // x.shape[-2]
                                     for x in (call.q, call.k, call.v))  # fmt: skip
        self._o = problem.batch * problem.heads * problem.d_v
        self._both = 2 if backward else 1  # keys and values, and their gradients

    def of_keys(self, keys: int) -> int:
        """Return the bytes for keys, values and, in the backward, their gradients."""
        each = self._item + (self._wide if self._backward else 0)
        return keys * (self._k + self._v) * each

    def rounds(self, scheme: str) -> int:
        """Return the exchanges."""
        if scheme == "heads":
            return 2 if self._proofs.size > 1 else 0
        return len(rounds_of(self._proofs.pairs(), scheme))

    def moved(self, scheme: str) -> int:
        """Return the bytes that all ranks send."""
        proofs = self._proofs
        if scheme != "heads":
            keys = proofs.keys
            return self.of_keys(int(keys.sum() - np.trace(keys)))
        share = np.array([len(x) for x in shares(self._problem.heads_kv, proofs.size)])
        share = 1 - share / share.sum()  # of a rank's rows, what goes to others
        rows, keys = (float(x @ share) for x in proofs.held)
        row, key = self._of_row(), self._k + self._v
        statistics = self._problem.batch * self._problem.heads * self._wide
        return round(rows * (row * self._item + statistics) + self._both * keys * key * self._item)

    def _of_row(self) -> int:
        """Return the numbers of a query that travel by heads, there and back."""
        return 2 * (self._q + self._o) if self._backward else self._q + self._o

    def memory(self, scheme: str) -> int:
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
