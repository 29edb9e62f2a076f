"""Documents of a sequence: runs of positions that see nothing of each other under a mask.

A document begins where a position and the one before it do not see each other. That takes one look
at each position. At some of these, the mask's own proofs have to say that nothing before sees
anything behind, or the other way round; so masks with gaps have no documents.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...expr.bind import Dense, bind
from ...expr.evaluate import evaluate
from ...expr.interval import EMPTY
from ...expr.nodes import walk
from ...masks import Mask
from ...pieces.schedule import chunks_of, classes
from ...problem.call import Array

MOST_LOOKS = 2**24  # at pairs of neighbours
MOST = 1024  # documents; shorter ones that follow each other count as one
TRIED = 8  # beginnings that are proven
FEW, TRIES = 64, 16  # so many documents are dealt in so many other orders, too
PARTNERS = 8  # the least loaded ranks, to which documents of the most loaded one may go


def starts(mask: Mask | None, sizes: Dense) -> Array:
    """Return the positions that begin a document, in ascending order and without 0."""
    length, batch = sizes.len_q, math.prod(sizes.lead)
    none = np.zeros(0, np.int64)
    if mask is None or not batch * sizes.heads or length != sizes.len_k:
        return none
    allowed = bind(mask.expr, sizes)
    reads = {node.value for node in walk(allowed) if node.op == "symbol"}
    entries = batch if "b" in reads else 1
    heads = sizes.heads if "h" in reads else 1
    if length * entries * heads > MOST_LOOKS:
        return none
    after = np.arange(1, length)
    lengths = {"len_q": length, "len_k": length, "start_q": 0, "start_k": 0}
    symbols: dict[str, Any] = {name: np.int64(value) for name, value in lengths.items()}
    symbols |= {"b": np.arange(entries)[:, None, None], "h": np.arange(heads)[:, None]}
    shape = entries, heads, len(after)
    sees = np.zeros(len(after), bool)
    for i, j in ((after, after - 1), (after - 1, after)):
        found = evaluate(allowed, symbols | {"i": i, "j": j})
        sees |= np.broadcast_to(found, shape).any(axis=(0, 1))
    begins = after[~sees]
    some = begins[np.linspace(0, len(begins) - 1, min(TRIED, len(begins))).astype(np.int64)]
    for each in some.tolist():
        halves = range(each), range(each, length)
        found = classes(mask, sizes, halves, halves)
        if found[0, 1] != EMPTY or found[1, 0] != EMPTY:
            return none
    return begins


def between(length: int, begins: Array) -> list[range]:
    """Return the documents of a sequence, given where they begin.

    Short ones are joined with what follows, so that there are about `MOST` at most.
    """
    ends: list[int] = [0]
    for each in begins.tolist():
        if each - ends[-1] >= length / MOST:
            ends.append(each)
    return [range(*x) for x in itertools.pairwise([*ends, length])]


def cut(whole: Sequence[range], which: Array, size: int) -> list[range]:
    """Return documents, some of which are cut into parts of so many positions."""
    made = []
    for each, is_cut in zip(whole, which.tolist(), strict=True):
        made += chunks_of(each, size if is_cut else max(len(each), 1))
    return made


def loads(sizes: Array, work: Array, ranks: int) -> Array:
    """Return the work and the positions of documents, (2, documents); 1 is a rank's share."""
    made: Array = np.stack([work / max(work.sum(), 1.0), sizes / max(sizes.sum(), 1)]) * ranks
    return made


def deal(shares: Array, ranks: int) -> Array:
    """Return the rank of each document, so that all have about as many positions and as much work.

    Those with most work go first, each to the rank that is then the least loaded of all in what it
    has most of. Documents of the most loaded rank move, or change places, while that helps. Few
    documents are dealt in other orders, too, as one more or less of them matters then. `shares` are
    what `loads` returns.
    """
    count = shares.shape[1]
    by_work = np.lexsort((-shares[1], -shares[0]))
    rng = np.random.default_rng(0)  # all ranks deal alike
    tries = [by_work, *(rng.permutation(by_work) for _ in range(TRIES if count <= FEW else 0))]
    found = [_dealt(order, shares, ranks) for order in tries]
    return min(found, key=lambda x: x[1])[0]


def _dealt(order: Array, shares: Array, ranks: int) -> tuple[Array, float]:
    """Return the rank of each document if they are dealt in an order, and the largest load."""
    owners = np.zeros(len(order), np.int64)
    held = np.zeros((2, ranks))
    for n in order:
        rank = int(np.argmin((held + shares[:, n, None]).max(axis=0)))
        owners[n] = rank
        held[:, rank] += shares[:, n]
    for _ in range(4 * len(order)):
        if not _improve(owners, held, shares):
            break
    return owners, float(held.max())


def _improve(owners: Array, held: Array, shares: Array) -> bool:
    """Move a document of the most loaded rank, or exchange it; return whether that helped."""
    most = held.max(axis=0)
    worst = int(np.argmax(most))
    mine = np.flatnonzero(owners == worst)
    best, chosen = most[worst] * (1 - 1e-9), None
    for rank in np.argsort(most, kind="stable")[:PARTNERS].tolist():
        if rank == worst:
            continue
        theirs = np.flatnonzero(owners == rank)
        given = np.concatenate([np.zeros((2, 1)), shares[:, theirs]], axis=1)  # nothing, or one
        moved = shares[:, mine][:, :, None] - given[:, None, :]
        after = np.maximum(
            (held[:, worst, None, None] - moved).max(axis=0),
            (held[:, rank, None, None] + moved).max(axis=0),
        )
        at = np.unravel_index(int(np.argmin(after)), after.shape)
        if after[at] < best:
            best, chosen = float(after[at]), (rank, int(mine[at[0]]), theirs[: at[1]][-1:])
    if chosen is None:
        return False
    rank, one, other = chosen
    for each, before, to in ((one, worst, rank), *((x, rank, worst) for x in other.tolist())):
        owners[each] = to
        held[:, before] -= shares[:, each]
        held[:, to] += shares[:, each]
    return True
