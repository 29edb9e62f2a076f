"""An explanation from the kernels of a call: tiles, traffic, FLOPs and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...expr.nodes import Expr
from ...gpu.kernels.spec import Tiles
from ...problem.bound_exprs import trees
from ...problem.call import Call
from ...problem.route import Route
from ..figures.mask import MOST_CELLS, Figure, tiles_svg, words_of
from ..figures.survey import Survey, survey, together
from ..figures.terminal import MOST_CELLS as MOST_SIGNS
from ..figures.terminal import picture
from . import traffic
from .kernel_uses import Use, uses_of
from .occupancy import LIMITS, occupancy
from .registers import UnknownError, registers
from .results import Explanation, KernelUse, Occupancy, Registers
from .target import Place
from .times import flops_of, rooflines, standard

GRIDS = MOST_CELLS, MOST_SIGNS  # of the drawing, and of the picture in a terminal


@dataclass(frozen=True, eq=False)
class Subject:
    """What is explained.

    Attributes
    ----------
    call : Call
        The call, with heads and queries as its main kernel has them.
    shapes : tuple
        The shapes of q, k and v, as the user knows them.
    axes : str
        Which axis of these is which.
    where : Place
        The device.
    backward : bool
        Whether the gradients are explained.
    tangents : bool
        Whether tangents of all arrays, and those of results, are part of the call.
    route : Route
        The kernels, in order, and their scratch memory.
    sizes : traffic.Sizes
        Bytes of the arrays.
    unknown : list of str
        What could not be found out; more is added.
    entries : sequence of (tuple of int, int)
        The batch entries of equal lengths, with this length, the longest ones first; none if keys
        have the length in the call.
    allowed : Expr, optional
        The mask for heads and queries of this call; by default, that of the call.
    rows : int
        Rows of a tile of the main kernel in which there are queries; 0: all.
    cache : str
        What is known of the cache, in words.
    coded : Call, optional
        The call on codes of float8, if they become the numbers of `call` first.
    """

    call: Call
    shapes: tuple[tuple[int, ...], ...]
    axes: str
    where: Place
    backward: bool
    route: Route
    sizes: traffic.Sizes
    unknown: list[str]
    entries: Sequence[tuple[tuple[int, ...], int]] = ()
    allowed: Expr | None = None
    rows: int = 0
    cache: str = ""
    coded: Call | None = None
    tangents: bool = False


def assembled(subject: Subject, compile: bool) -> Explanation:
    """Count everything; with `compile`, compile kernels to find out registers and occupancy."""
    call, where, works = subject.call, subject.where, uses_of(subject.route)
    problem, sizes, unknown = call.problem, subject.sizes, subject.unknown
    backward, tangents = subject.backward, subject.tangents
    allowed = trees(call).allowed if subject.allowed is None else subject.allowed
    surveys: dict[tuple[int, int, int], Survey] = {}
    kernels = tuple(
        _use(
            subject,
            work,
            _survey(subject, allowed, work, surveys),
            compile=compile,
        )
        for work in works
    )
    main = next(work for work in works if work.block_kv)
    found = surveys[main.blocks_of_tiles(call)]
    least = sizes.least(backward, found, tangents)
    pairs = found.visited_pairs if found.pairs is None else found.pairs
    if found.pairs is None:
        unknown.append(
            "pairs that attend: too many lie in PARTIAL tiles to be asked one by one; all pairs of "
            "visited tiles are counted as FLOPs"
        )
    flops = flops_of(pairs, problem.d, problem.d_v, backward, tangents)
    units = [work.units for work in works]
    coded = call if subject.coded is None else subject.coded
    best, theirs = rooflines(where, coded, kernels, units, flops, least, unknown)
    keys = [(len(numbers), length) for numbers, length in subject.entries]
    rows = sizes.results + sizes.row
    results = sizes.q + sizes.k + sizes.v if backward else rows
    if tangents:
        results += rows
    dtype, told = coded.encoding.type_words(coded.problem.dtype)
    title = f"{words_of(call.mask, 44)}, {dtype}, {kernels[works.index(main)].name}"
    return Explanation(
        q_shape=subject.shapes[0],
        k_shape=subject.shapes[1],
        v_shape=subject.shapes[2],
        axes=subject.axes,
        dtype=told,
        mask=words_of(call.mask, 200),
        score="no change" if call.score_mod is None else str(call.score_mod.expr),
        backward=backward,
        device=where.words,
        reason=subject.route.main.reason,
        kernels=kernels,
        pairs=found.pairs,
        flops=flops,
        least=least,
        most=traffic.total([kernel.most for kernel in kernels]),
        expected=traffic.total([kernel.expected for kernel in kernels]),
        roofline=best,
        kernels_roofline=theirs,
        memory=results + subject.route.scratch,
        standard=standard(call, where, backward, results, keys, tangents),
        unknown=tuple(dict.fromkeys(unknown)),
        figure=_figure(call, found, title),
        cache=subject.cache,
        tangents=tangents,
    )


def _survey(
    subject: Subject, allowed: Expr | None, work: Use, known: dict[tuple[int, int, int], Survey]
) -> Survey | None:
    key = work.blocks_of_tiles(subject.call)
    if not work.block_kv:
        return None
    if key not in known:
        problem, tile = subject.call.problem, (subject.rows or work.block_q, work.block_kv)
        machine = "cpu" if subject.where.target is None else "gpu"
        first = not known  # pairs are the same for all
        lengths = subject.entries or [(tuple(range(problem.batch)), problem.rows.known_k)]
        known[key] = together([
            survey(
                allowed, problem.sized(len_k=length), *tile, missing=key[2],
                machine=machine, most_cells=() if n else GRIDS, at=(numbers[0], 0),
                count_pairs=first, entries=numbers,
            )
            for n, (numbers, length) in enumerate(lengths)
        ])  # fmt: skip
    return known[key]


def _use(subject: Subject, work: Use, found: Survey | None, *, compile: bool) -> KernelUse:
    """Count everything of one kernel."""
    where, sizes, unknown = subject.where, subject.sizes, subject.unknown
    problem, tiles = subject.call.problem, work.tiles
    joins = tiles is None or not tiles.whole
    once, most = sizes.moved(
        work.part, work.adds_dq, found, joins, work.whole_dq, work.parts, work.lists, work.own_delta
    )
    taken: Registers | None = None
    held = None
    if work.special is not None and tiles is not None and compile:
        assert where.target is not None
        try:
            taken = registers(work.special, where.target.capability)
        except UnknownError as error:
            unknown.append(str(error))
        if taken is not None:
            held = _occupancy(where, work, tiles, taken, unknown)
    pairs = 0 if found is None else _computed_pairs(found, work)
    if work.part == "shared":
        pairs = sizes.shared.pairs
    elif work.special is not None and work.special.shared and found is not None:
        pairs = max(pairs - sizes.sharers * sizes.shared_keys * work.block_q, 0)
    return KernelUse(
        name=work.step.kernel,
        computes=work.computes + _of_dq(work),
        blocks=work.blocks,
        block_q=work.block_q,
        block_kv=work.block_kv,
        warps=None if tiles is None else tiles.threads // 32,
        stages=None if tiles is None else tiles.stages,
        shared_memory=None if tiles is None else tiles.shared_memory,
        registers=taken,
        occupancy=held,
        tiles=None if found is None else found.tiles,
        visited_pairs=0 if found is None else found.visited_pairs,
        flops=traffic.flops(work.part, work.atomic_dq, pairs, problem.d, problem.d_v),
        once=once,
        most=most,
        in_cache=_in_cache(subject.call, where, work, sizes),
    )


def _of_dq(work: Use) -> str:
    """Return in words what the kernel of dk and dv computes of dq."""
    if work.whole_dq:
        return ", and dq"
    return ", and sums of dq" if work.atomic_dq else ""


def _occupancy(
    where: Place, work: Use, tiles: Tiles, taken: Registers, unknown: list[str]
) -> Occupancy | None:
    facts = where.target
    assert facts is not None
    if facts.capability not in LIMITS:
        major, minor = facts.capability
        unknown.append(
            f"occupancy: what a multiprocessor of compute capability {major}.{minor} holds is not "
            "in the table of cupyflash.explanation"
        )
        return None
    return occupancy(tiles, taken.count, facts.capability, work.blocks, facts.multiprocessors)


def _computed_pairs(found: Survey, work: Use) -> int:
    """Return the pairs that products are computed of: a GPU's kernels multiply whole tiles."""
    if work.tiles is None:
        return found.visited_pairs
    return found.tiles.visited * work.block_q * work.block_kv


def _in_cache(call: Call, where: Place, work: Use, sizes: traffic.Sizes) -> bool | None:
    """Whether the heads that are worked on at a time have room in the cache for what passes by."""
    if not work.block_kv:
        return True
    if where.device is None or work.tiles is None:
        return None
    of_keys = work.part in ("dkdv", "tangent_dkdv")
    length, block = (
        (call.problem.len_k, work.block_kv) if of_keys else (call.problem.len_q, work.block_q)
    )
    blocks_of_head = -(-int(length) // block)
    at_a_time = work.tiles.resident_blocks * where.device.multiprocessors
    heads = -(-min(at_a_time, work.blocks) // blocks_of_head)
    if not of_keys:  # query heads share a head of keys
        heads = -(-heads * call.problem.heads_kv // call.problem.heads)
    return heads * sizes.passing(work.part, work.adds_dq) <= where.device.l2


def _figure(call: Call, found: Survey, title: str) -> Figure:
    heads = call.problem.batch * call.problem.heads
    notes = [] if heads == 1 else [f"the first of {heads:,} heads"]
    fine, coarse = found.grids
    return Figure(tiles_svg(fine, title, notes), picture(coarse))
