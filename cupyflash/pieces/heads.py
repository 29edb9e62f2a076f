"""Calls of which a GPU has all keys of some heads at a time: each group of heads is a whole call.

Nothing is summed over pieces. So a group takes the time of a call in the memory of the GPU, and has
its bits; the keys and values of the next heads arrive meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..expr.interval import EMPTY
from ..problem.call import Array, Call, Gradients, changed
from .parts import problem_of_heads, some_heads, some_heads_of_statistic
from .place import Parts, Place
from .schedule import Schedule

# Tiles of 128 positions, of all heads of a group: some for each SM, so that all end together. With
# half as many, there are more groups, for which the host takes longer, and calls do so, too.
TILES = 512
FEWEST = 4  # groups: nothing is computed before the first one is there


class Group(NamedTuple):
    """Some heads.

    Attributes
    ----------
    kv : range
        Key-value heads.
    heads : range
        The query heads that share them.
    """

    kv: range
    heads: range


def groups(
    call: Call, schedule: Schedule, rows: int, keys: int, travel: Sequence[Array]
) -> list[Group]:
    """Return groups of heads, or none where the keys are divided instead.

    No bit of a result depends on the batch, so this does not, either.

    Parameters
    ----------
    call : Call
        The call.
    schedule : Schedule
        Its pieces if the keys are divided. All keys of a group are read, so that there are groups
        only if somebody sees some keys of each chunk.
    rows, keys : int
        The queries and the keys of each head for which there is memory if all heads are there;
        no `rows` if queries do not travel.
    travel : sequence of array, shape (..., H, L, D)
        The arrays in host memory. A file whose rows have all heads would be read for each group.
    """
    problem = call.problem
    if call.bias is not None or call.sink is not None or not problem.len_q * problem.heads_kv:
        return []
    share = problem.heads // problem.heads_kv
    least = -(-TILES // (-(-problem.len_q // 128) * share))  # key-value heads
    is_small = least * problem.len_k <= keys * problem.heads_kv
    if rows:
        is_small &= least * problem.len_q <= rows * problem.heads_kv
    by_heads = all(abs(x.strides[-3]) >= abs(x.strides[-2]) for x in travel)
    is_seen = (schedule.classes != EMPTY).any(axis=0).all()
    if not (is_small and by_heads and is_seen) or problem.heads_kv < FEWEST * least:
        return []
    ends = [*range(0, problem.heads_kv, least), problem.heads_kv]
    return [
        Group(range(first, last), range(share * first, share * last))
        for first, last in itertools.pairwise(ends)
    ]


def _read(call: Call, group: Group, rows: Mapping[str, Array]) -> Parts:
    """Return what is read of a group's heads; `rows` are further arrays that queries have."""
    made = {"k": some_heads(call.k, group.kv), "v": some_heads(call.v, group.kv)}
    for name, array in {"q": call.q, **rows}.items():
        take = some_heads_of_statistic if name in ("lse", "dlse") else some_heads
        made[name] = take(array, group.heads)
    return made


def _call_of(whole: Call, group: Group, parts: Parts) -> Call:
    arrays = {name: parts[name] for name in "qkv"}
    return changed(whole, problem=problem_of_heads(whole.problem, group.kv), **arrays)


def _computed(targets: Sequence[Array], place: Place) -> list[Array]:
    """Return the arrays themselves if they are at the place, and else new ones like them."""
    return [x if place.has(x) else place.empty(x.shape, x.dtype) for x in targets]


def _store(computed: Sequence[Array], targets: Sequence[Array], place: Place) -> None:
    for each, target in zip(computed, targets, strict=True):
        if each is not target:
            place.store(each, target)


def forward(call: Call, of: Sequence[Group], place: Place, out: Array, lse: Array) -> None:
    """Write out and lse, wherever they live."""
    arrays = place.feed(_read(call, group, {}) for group in of)
    with place:
        for group, parts in zip(of, arrays, strict=True):
            targets = some_heads(out, group.heads), some_heads_of_statistic(lse, group.heads)
            results, statistics = computed = _computed(targets, place)
            place.backend.forward_piece(_call_of(call, group, parts), (results, statistics), True)
            _store(computed, targets, place)


def backward(
    call: Call,
    of: Sequence[Group],
    place: Place,
    rows: Mapping[str, Array],
    gradients: Gradients,
    deterministic: bool,
) -> None:
    """Write dq, dk and dv, wherever they live.

    `rows` are do, out, lse and, if it is given, dlse.
    """
    arrays = place.feed(_read(call, group, rows) for group in of)
    with place:
        for group, parts in zip(of, arrays, strict=True):
            each = zip(gradients[:3], (group.heads, group.kv, group.kv), strict=True)
            targets = [some_heads(target, heads) for target, heads in each]
            dq, dk, dv = computed = _computed(targets, place)
            do, out, lse = parts["do"], parts["out"], parts["lse"]
            assert do is not None
            assert out is not None
            assert lse is not None
            made = Gradients(dq, dk, dv)
            place.backend.backward_piece(
                _call_of(call, group, parts), do, out, lse, parts.get("dlse"), made, deterministic
            )
            _store(computed, targets, place)
