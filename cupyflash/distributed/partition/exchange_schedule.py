"""The steps of a call on one rank: which keys it sends and receives, and what it computes.

The mask's proofs say which rank needs which chunks of another rank's keys. In a round every rank
sends to one rank and receives from one rank at most. With "nodes", the nodes do so: a rank gets
what any rank of its node needs of one rank of another node, and relays it. All ranks find the same
rounds from the mask and the layouts, so nobody has to be asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from ...pieces.schedule import Piece
from ...problem.call import Array, Call
from .fused_calls import Task, divided, tasks
from .intervals import Intervals
from .proofs import Proofs

Scheme: TypeAlias = Literal["auto", "rounds", "gather", "nodes", "heads", "heads x rounds"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)

Pair = tuple[int, int]  # the owner of keys, and the rank that uses them


class Step(NamedTuple):
    """What a rank does between two exchanges.

    Attributes
    ----------
    sends, receives : dict of int to Intervals
        The positions of keys that go to, or come from, each rank, in the order of ranks.
    sends_far, receives_far : dict of int to Intervals
        Those that go to a rank of another node, which relays them, or come from there to be
        relayed: an exchange earlier. What is sent is then what came from there.
    relayed : Intervals
        The positions of what came from there that the rank needs itself.
    keys : Intervals
        The positions of all keys that the pieces use.
    pieces : list of Piece
        What is computed with them. Rows and keys are positions.
    forward, backward : list of Task
        The calls that compute them.
    later : list of Task
        Of own keys, what the backward computes at last, while gradients travel.
    ahead : int
        Tasks of the forward that a device is asked for before the messages are posted, so that it
        does not wait while the host posts them.
    """

    sends: Mapping[int, Intervals]
    receives: Mapping[int, Intervals]
    keys: Intervals
    pieces: list[Piece]
    forward: list[Task]
    backward: list[Task]
    later: list[Task] = []  # noqa: RUF012, it is never changed
    ahead: int = 0
    sends_far: Mapping[int, Intervals] = {}
    receives_far: Mapping[int, Intervals] = {}
    relayed: Intervals = Intervals(())


NOTHING = Step({}, {}, Intervals(()), [], [], [])


def steps(
    call: Call, proofs: Proofs, own: int, scheme: Scheme, nodes: Sequence[int], copies: bool
) -> list[Step]:
    """Return the steps of a rank: its own keys first, then a step for each round.

    `copies` says whether copy engines move messages, so that they travel whatever is computed.
    """
    if scheme == "nodes":
        travel = _by_nodes(proofs, own, nodes)
    else:
        travel = [
            _direct(proofs, own, pairs.tolist()) for pairs in rounds_of(proofs.pairs(), scheme)
        ]
    keys = [proofs.needed(own, own)]
    keys += [Intervals.of(run for x in (*each.receives.values(), each.relayed) for run in x)
             for each in travel]  # fmt: skip
    rows, own_keys = proofs.own
    there = [own_keys, *keys[1:]]
    made = []
    for n, pieces in enumerate(proofs.pieces(keys)):
        forward, backward = tasks(call, pieces, rows, there[n])
        step = travel[n - 1] if n else NOTHING
        step = step._replace(keys=keys[n], pieces=pieces, forward=forward, backward=backward)
        made.append(step)
    if len(made) == 1:  # all of it is computed at once where that can be
        made[0] = made[0]._replace(forward=made[0].backward)
    elif call.rows.divisible:
        # A sink belongs to the first piece of a whole run.
        own_pieces = proofs.cut_pieces(keys[0]) if call.sink is None else made[0].pieces
        early, later = divided(call, own_pieces, rows, own_keys)
        made[0] = made[0]._replace(backward=early, later=later)
        peers = {*made[1].sends, *made[1].receives}
        # From another node, messages take so long that they are better posted first.
        is_near = scheme != "nodes" and all(nodes[peer] == nodes[own] for peer in peers)
        if call.device is not None and copies:
            made[0] = made[0]._replace(ahead=len(made[0].forward))
        elif call.device is not None and is_near:
            made[0] = _ahead(made[0], rows)
    return made


def _direct(proofs: Proofs, own: int, pairs: Sequence[Sequence[int]]) -> Step:
    """Return what a rank sends and receives if some owners send keys to users."""
    users = sorted(user for owner, user in pairs if owner == own)
    owners = sorted(owner for owner, user in pairs if user == own)
    sends = {user: proofs.needed(user, own) for user in users}
    return NOTHING._replace(sends=sends, receives={x: proofs.needed(own, x) for x in owners})


def _by_nodes(proofs: Proofs, own: int, nodes: Sequence[int]) -> list[Step]:
    """Return what a rank sends and receives: keys of its own node, then those of each other one."""
    size = ranks_of_a_node(nodes)
    node, place = divmod(own, size)
    mates = range(node * size, (node + 1) * size)
    inside = [(owner, user) for owner in mates for user in mates if owner != user]
    made = [_direct(proofs, own, [pair for pair in inside if proofs.keys[pair]])]
    for pairs in rounds_of(proofs.of_groups(size).pairs(), "rounds"):
        step = NOTHING
        for owner, user in pairs.tolist():
            relay = user * size + place
            users = range(user * size, (user + 1) * size)
            if owner == node and (wanted := proofs.needed_by_any(users, own)):
                step = step._replace(sends_far={relay: wanted})
            if user == node:
                owners = range(owner * size, (owner + 1) * size)
                step = step._replace(**_relays(proofs, own, owners, mates))
        made.append(step)
    return made


def _relays(proofs: Proofs, own: int, owners: range, mates: range) -> dict[str, Any]:
    """Return what a rank relays to the others of its node, and gets from them, of another node."""
    mine = owners[own - mates.start]
    came = proofs.needed_by_any(mates, mine)
    others = [(mate, owner) for mate, owner in zip(mates, owners, strict=True) if mate != own]
    sends = {mate: proofs.needed(mate, mine) for mate, _ in others}
    receives = {mate: proofs.needed(own, owner) for mate, owner in others}
    return {
        "sends": {mate: runs for mate, runs in sends.items() if runs},
        "receives": {mate: runs for mate, runs in receives.items() if runs},
        "receives_far": {mine: came} if came else {},
        "relayed": proofs.needed(own, mine),
    }


def ranks_of_a_node(nodes: Sequence[int]) -> int:
    """Return how many ranks each node has, in a row; 0 if they are not as many on each."""
    firsts = np.flatnonzero(np.diff(nodes, prepend=-1))
    each = len(nodes) // max(len(firsts), 1)
    alike = len(set(nodes)) == len(firsts) and not np.any(firsts != each * np.arange(len(firsts)))
    return each if alike and each * len(firsts) == len(nodes) else 0


def _ahead(step: Step, rows: Intervals) -> Step:
    """Return the step of own keys with a task that is computed ahead of the others, if it can be.

    Where one task has all rows, its halves are those of the backward. Rows of later steps are whole
    runs, so each half of a run has to have a task here, which begins it.
    """
    halves = [*step.backward, *step.later]
    if len(step.forward) == 1 and len(halves) > 1:
        parts = sorted((task.rows.start, task.rows.stop) for task in halves)
        ends = [0, *(stop for _, stop in parts)]
        if [start for start, _ in parts] == ends[:-1] and ends[-1] == rows.count:
            begun = [x._replace(piece=x.piece._replace(first=True)) for x in halves]
            step = step._replace(forward=begun)
    return step._replace(ahead=int(len(step.forward) > 1))


def rounds_of(pairs: Array, scheme: Scheme) -> list[Array]:
    """Return the pairs (owner, user) that exchange keys in each round, (pairs, 2)."""
    found = np.argwhere(pairs)
    if scheme == "gather":
        return [found] if len(found) else []
    size = len(pairs)
    distances = (found[:, 1] - found[:, 0]) % max(size, 1)
    order = np.argsort(distances, kind="stable")
    starts = np.flatnonzero(np.diff(distances[order], prepend=-1))
    by_distance = np.split(found[order], starts[1:]) if len(found) else []
    most = int(max(pairs.sum(axis=0).max(), pairs.sum(axis=1).max())) if size else 0
    if len(by_distance) <= most:
        return by_distance
    listed = [(int(owner), int(user)) for owner, user in found]
    return [np.array(each, np.int64) for each in coloured(listed, size, most)]


def coloured(pairs: Sequence[Pair], size: int, rounds: int) -> list[list[Pair]]:
    """Divide pairs into rounds in which a rank sends once and receives once at most.

    `rounds`, the most pairs in which one rank sends or in which one receives, are always enough
    (Koenig's theorem). Where the round that is free for the sender is taken for the receiver, the
    pairs along the path of these two rounds are exchanged.
    """
    sends = [[-1] * rounds for _ in range(size)]  # whom a rank sends to in each round
    receives = [[-1] * rounds for _ in range(size)]
    for owner, user in pairs:
        free, other = sends[owner].index(-1), receives[user].index(-1)
        if receives[user][free] >= 0:
            _swap(sends, receives, user, free, other)
        sends[owner][free], receives[user][free] = user, owner
    return [
        [(owner, sends[owner][n]) for owner in range(size) if sends[owner][n] >= 0]
        for n in range(rounds)
    ]


def _swap(
    sends: list[list[int]], receives: list[list[int]], user: int, taken: int, free: int
) -> None:
    """Exchange two rounds along the path that begins where a rank receives in round `taken`."""
    path = []
    receiver, this, that = user, taken, free
    while True:
        owner = receives[receiver][this]
        if owner < 0:
            break
        path.append((owner, receiver, this))
        following = sends[owner][that]
        if following < 0:
            break
        path.append((owner, following, that))
        receiver = following
    for owner, receiver, n in path:
        sends[owner][n] = receives[receiver][n] = -1
    for owner, receiver, n in path:
        other = that if n == this else this
        sends[owner][other], receives[receiver][other] = receiver, owner
