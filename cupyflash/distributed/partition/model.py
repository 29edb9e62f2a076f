"""How long a call takes over ranks, by a model: what the schemes are compared with.

A rank computes with the keys of a step while those of the next one arrive. A message begins when
both of its ranks have come to it. Nothing here is measured on the machine at hand; ranks have to
choose the same scheme, so the model of a call is that of H100s wherever it runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...problem.call import Array, Call
from .exchange_schedule import Scheme, ranks_of_a_node, rounds_of
from .head_batches import head_batches, shares
from .proofs import Proofs

MESSAGE = 15e-6  # seconds of a short message: measured between two H100 by NCCL
# Seconds until the host knows whether the arrays of a mask hold what they held, where keys travel
# by them. Where none do, it is told meanwhile.
LOOKED_AT = 0.2e-3


@dataclass(frozen=True)
class Machine:
    """What a rank and its connections can do.

    Attributes
    ----------
    flops : float
        FLOP per second that kernels reach.
    memory : float
        Bytes per second to and from the memory of the rank.
    link, network : float
        Bytes per second that a rank sends and, at the same time, receives: within a node, and
        between nodes.
    piece : tuple of 2 float
        Seconds that each piece of a call takes besides, in the forward and in the backward: the
        last blocks of a kernel leave SMs idle, and small kernels run before and after it.
    """

    flops: float
    memory: float
    link: float
    network: float
    piece: tuple[float, float] = (0.0, 0.0)


REACHED = 0.627  # of the peak: causal forward in 16-bit types with 64k positions, on an H100
LINKS = {"H100-SXM": 266e9, "H200": 266e9}  # NVLink as NCCL uses it, both directions at once
PIECE = 20e-6, 60e-6  # measured on H200s, of causal calls of 16,384 positions over two
NETWORK = 45e9  # a card of 400 Gbit/s for each GPU


def machine_of(device: str, peak: float, bandwidth: float) -> Machine | None:
    """Return what GPUs of a name can do; None if it is not known how fast they send."""
    link = LINKS.get(device)
    return None if link is None else Machine(REACHED * peak, bandwidth, link, NETWORK, PIECE)


H100 = Machine(REACHED * 989.4e12, 3.35e12, LINKS["H100-SXM"], NETWORK, PIECE)


class Traffic:
    """Messages of one exchange, each from a rank to a rank."""

    def __init__(self, size: int, nodes: Array, machine: Machine) -> None:
        self._nodes, self._machine, self._size = nodes, machine, size
        self._from: list[Array] = []
        self._to: list[Array] = []
        self._bytes: list[Array] = []

    def add(self, sender: Any, receiver: Any, count: Any) -> None:
        """Add messages; the arguments broadcast."""
        parts = (np.asarray(x).reshape(-1) for x in np.broadcast_arrays(sender, receiver, count))
        for held, part in zip((self._from, self._to, self._bytes), parts, strict=True):
            held.append(part)

    def _messages(self) -> tuple[Array, Array, Array]:
        """Return who sends and who receives how many bytes, of all that travels."""
        sender, receiver, count = (
            np.concatenate([np.zeros(0, np.int64), *parts])
            for parts in (self._from, self._to, self._bytes)
        )
        some = (count > 0) & (sender != receiver)
        return sender[some], receiver[some], count[some]

    def copied(self) -> Array:
        """Return the seconds in which each rank copies what it receives to where it belongs.

        SMs do that, which compute meanwhile.
        """
        _, receiver, count = self._messages()
        found: Array = 2 * np.bincount(receiver, count, self._size)
        return found / self._machine.memory

    def done(self, begin: Array) -> Array:
        """Return when each rank has all of its messages, given when it comes to the exchange."""
        sender, receiver, count = self._messages()
        outside = self._nodes[sender] != self._nodes[receiver]
        busy = np.zeros(self._size)
        for which, speed in ((~outside, self._machine.link), (outside, self._machine.network)):
            for ranks in (sender, receiver):
                moved = np.bincount(ranks[which], count[which], self._size)
                busy = np.maximum(busy, moved / speed)
        first = np.maximum(begin[sender], begin[receiver])
        end = first + MESSAGE + np.maximum(busy[sender], busy[receiver])
        result = begin.copy()
        for ranks in (sender, receiver):
            np.maximum.at(result, ranks, end)
        return result


class Model:
    """The times of a call over ranks.

    Parameters
    ----------
    call : Call
        The call of one rank, whose lengths are those of all.
    proofs : Proofs
        What each rank needs and computes.
    nodes : sequence of int
        The node of each rank.
    machine : Machine
        What they can do.
    backward : bool
        Whether gradients are computed.
    """

    def __init__(
        self, call: Call, proofs: Proofs, nodes: Sequence[int], machine: Machine, backward: bool
    ) -> None:
        problem = call.problem
        self._call = call
        self._proofs, self._machine, self._backward = proofs, machine, backward
        self._size, self._nodes = proofs.size, np.asarray(nodes)
        self._item, self._wide = problem.dtype.itemsize, problem.accumulator.itemsize
        self._heads_kv = problem.heads_kv
        self._piece = machine.piece[backward]  # seconds
        batch = math.prod(problem.array_lead)
        d, d_v = problem.d, problem.d_v
        each = 2 * (3 * d + 2 * d_v) if backward else 2 * (d + d_v)
        self._of_pair = batch * problem.heads * each / machine.flops  # seconds
        self._of_row = batch * problem.heads * (d if backward else d_v)  # numbers that are summed
        # Numbers of a row of q and of out, and of a key and its value.
        self._q, k, v = (math.prod(x.shape[:-2]) * x.shape[-1] for x in (call.q, call.k, call.v))
        self._o, self.kv = batch * problem.heads * d_v, k + v

    @property
    def one_rank(self) -> float:
        """Seconds on one rank."""
        return float(self._proofs.work.sum() * self._of_pair)

    def _traffic(self) -> Traffic:
        return Traffic(self._size, self._nodes, self._machine)

    def _compute(
        self, proofs: Proofs, owners: Array, users: Array, at_once: bool = False, pieces: int = 1
    ) -> Array:
        """Return the seconds that each rank computes with the keys of some others.

        `at_once` says that one kernel takes the keys of all of them; else there are so many
        `pieces` of those of each.
        """
        at, size = (owners, users), proofs.size
        pairs = np.bincount(users, proofs.work[at], size)
        some = proofs.work[at] > 0
        rows = np.bincount(users[some], proofs.rows[at][some], size)
        if at_once:
            rows[:] = 0
            np.maximum.at(rows, users[some], proofs.rows[at][some])
        moved = 2 * rows * self._of_row  # partial results are read and written
        if self._backward:  # gradients are written, and added to the sums
            keys = np.bincount(users, proofs.keys[at], size)
            moved = 2 * moved + 4 * keys * self.kv
        count = np.minimum(np.bincount(users[some], minlength=size), 1 if at_once else size)
        seconds = pairs * self._of_pair + moved * self._wide / self._machine.memory
        result: Array = seconds + count * pieces * self._piece
        return result

    def seconds(self, scheme: Scheme, group: int) -> float:
        """Return the seconds until the last rank is done.

        `group` is how many ranks in a row divide the heads among them.
        """
        of_ranks = shares(self._heads_kv, group)
        share = self._part(of_ranks)
        begin = np.zeros(self._size)
        mask = self._call.mask
        if scheme != "heads" and mask is not None and mask.structure[1]:
            begin += LOOKED_AT * bool(self._proofs.pairs().any())
        if scheme == "heads":
            begin = self._by_heads(begin, of_ranks)
        elif scheme == "heads x rounds":
            begin = self._rounds(self._travel(share, there=True).done(begin), scheme, share)
            begin = self._travel(share, there=False).done(begin)
        elif scheme == "nodes":
            begin = self._by_nodes(begin)
        else:
            begin = self._rounds(begin, scheme, share)
        return float(begin.max(initial=0))

    def _part(self, heads: list[range]) -> Array:
        """Return which part of the heads some of them are, for each rank of a group."""
        return np.array([len(x) for x in heads]) / max(self._heads_kv, 1)

    def _by_heads(self, begin: Array, of_ranks: list[range]) -> Array:
        """Return when each rank is done if it computes some heads, in turns."""
        parts = list(map(self._part, head_batches(self._call, of_ranks)))
        there, back = ([self._travel(part, there) for part in parts] for there in (True, False))
        moving = there[0].done(begin)
        whole = self._proofs.work.sum() * self._of_pair
        for n, part in enumerate(parts):
            copied = there[n].copied() + back[n].copied()
            begin = np.maximum(begin, moving) + whole * part + copied + self._piece
            if n + 1 < len(parts):  # meanwhile
                moving = there[n + 1].done(moving)
        for traffic in back[:-1]:
            moving = traffic.done(moving)
        return back[-1].done(np.maximum(begin, moving))

    def _rounds(self, begin: Array, scheme: Scheme, share: Array) -> Array:
        """Return when each rank is done with all keys, of which it computes a share of the heads.

        Groups of ranks count as one; all ranks of one share do the same at the same time.
        """
        proofs, group = self._proofs.of_groups(len(share)), len(share)
        keys, own = proofs.keys, np.arange(proofs.size)
        pairs = rounds_of(proofs.pairs(), "gather" if scheme == "gather" else "rounds")
        steps = [(own, own), *(tuple(each.T) for each in pairs)]

        def add(traffic: Traffic, senders: Array, receivers: Array, count: Array) -> None:
            numbers = np.arange(group)
            traffic.add(
                senders[:, None] * group + numbers, receivers[:, None] * group + numbers,
                count[:, None] * self.kv * share,
            )  # fmt: skip

        def returned(traffic: Traffic, n: int) -> None:
            owners, users = steps[n]
            add(traffic, users, owners, keys[owners, users] * self._wide)

        for n, step in enumerate(steps):
            traffic = self._traffic()
            if n + 1 < len(steps):
                owners, users = steps[n + 1]
                add(traffic, owners, users, keys[owners, users] * self._item)
            if self._backward and n > 1:
                returned(traffic, n - 1)
            pieces = 2 if n == 0 and len(steps) > 1 else 1  # own keys, at first and at last
            busy = self._compute(proofs, step[0], step[1], pieces=pieces)[:, None] * share
            busy = busy.reshape(-1) + traffic.copied()
            begin = np.maximum(begin + busy, traffic.done(begin))
        if self._backward and len(steps) > 1:
            traffic = self._traffic()
            returned(traffic, len(steps) - 1)
            begin = traffic.done(begin)
        return begin

    def _by_nodes(self, begin: Array) -> Array:
        """Return when each rank is done if keys cross the network once for a node."""
        proofs, size = self._proofs, ranks_of_a_node(self._nodes.tolist())
        own, mates = np.arange(proofs.size), np.arange(size)
        of_nodes = proofs.keys_of_groups(size)

        def pairs(nodes: Array) -> tuple[Array, Array, Array]:
            """Return all owners and users of pairs of nodes, and who relays between them."""
            owners, users = (x[:, None] * size + mates for x in nodes.T)
            relays = np.repeat(users[:, :, None], size, axis=2)
            both = np.broadcast_arrays(owners[:, :, None], users[:, None, :], relays)
            owner, user, relay = (x.reshape(-1) for x in both)
            return owner, user, relay

        groups = np.arange(proofs.size // size)
        owner, user, _ = pairs(np.stack([groups, groups], axis=1))
        others = owner != user
        inside = owner[others], user[others], owner[others]
        rounds = rounds_of(proofs.of_groups(size).pairs(), "rounds")
        nothing = np.zeros((0, 2), np.int64)
        steps = [(own, own, own), inside, *map(pairs, rounds)]
        far = [nothing, nothing, *rounds, nothing]

        def near(traffic: Traffic, n: int, item: int, back: bool) -> None:
            owner, user, relay = steps[n]
            ends = (user, relay) if back else (relay, user)
            traffic.add(*ends, proofs.keys[owner, user] * self.kv * item)

        def across(traffic: Traffic, n: int, item: int, back: bool) -> None:
            owners, users = (x[:, None] * size + mates for x in far[n].T)
            count = of_nodes[owners, far[n][:, 1:]] * self.kv * item
            traffic.add(*((users, owners) if back else (owners, users)), count)

        for n in range(len(steps) + (2 if self._backward else 0)):
            traffic = self._traffic()
            if n + 1 < len(steps):
                near(traffic, n + 1, self._item, False)
                across(traffic, n + 2, self._item, False)
            if self._backward and 1 < n <= len(steps):
                near(traffic, n - 1, self._wide, True)
            if self._backward and n > 2:
                across(traffic, n - 2, self._wide, True)
            busy = np.zeros(self._size)
            if n < len(steps):
                busy = self._compute(proofs, *steps[n][:2], at_once=True)
            begin = np.maximum(begin + busy + traffic.copied(), traffic.done(begin))
        return begin

    def _travel(self, share: Array, there: bool) -> Traffic:
        """Return the rows that travel to the ranks of their heads, or results that return."""
        group = len(share)
        rows, keys = self._proofs.held
        q, o, kv = (x * self._item for x in (self._q, self._o, self.kv))
        of_row = (q + 2 * o if there else q) if self._backward else (q if there else o)
        of_key = kv if there or self._backward else 0
        count = (rows * of_row + keys * of_key)[:, None] * share
        holders = np.arange(self._size)[:, None]
        users = holders // group * group + np.arange(group)
        traffic = self._traffic()
        traffic.add(*((holders, users, count) if there else (users, holders, count)))
        return traffic
