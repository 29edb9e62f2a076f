"""Which heads a rank computes, and in which turns."""

from __future__ import annotations

import itertools

from ...expr.key_range import key_range
from ...pieces.heads import TILES
from ...problem.bound_exprs import trees
from ...problem.call import Call


def shares(heads_kv: int, size: int) -> list[range]:
    """Return the key-value heads that each rank computes."""
    ends = [heads_kv * rank // size for rank in range(size + 1)]
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def sees_a_range(call: Call) -> bool:
    """Return whether the keys that a query sees are a range: neighbouring tiles are alike then."""
    allowed = trees(call).allowed
    return allowed is None or key_range(allowed, call.problem) is not None


def head_batches(call: Call, of_ranks: list[range]) -> list[list[range]]:
    """Return the key-value heads that each rank computes in each turn, of those that it has.

    The first and the last turn are as short as fills a GPU, with twice as many tiles if these take
    very different times; each of those between has twice as many heads as the one before, as long
    as there are so many. Calls with a bias or a sink have one turn, and those on packed sequences.
    """
    problem = call.problem
    if call.bias is not None or call.sink is not None or not problem.rows.divisible:
        return [of_ranks]
    fewest = min(map(len, of_ranks))
    tiles = problem.batch * -(-min(problem.rows.known_q, problem.rows.known_k) // 128)
    least = -(-TILES * (1 if sees_a_range(call) else 2) // max(tiles, 1))
    ends: list[int] = []
    more = least
    while (end := sum(ends[-1:]) + more) + least <= fewest:
        ends.append(end)
        more *= 2
    if ends and ends[-1] + 2 * least <= fewest:  # else what is left is the last turn
        ends.append(-least)
    return [
        [own[first:last] for own in of_ranks]
        for first, last in itertools.pairwise([0, *ends, None])
    ]
