"""`explain`: shows from shapes what a call would run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np

from ..analysis import Device
from ..arrays.device_arrays import is_device_array
from ..arrays.dtypes import FLOATS
from ..arrays.interop import DLPackArray, array, one_home
from ..distributed.model import LINKS
from ..distributed.simulation import Simulation, simulate
from ..errors import ArgumentError, ArgumentTypeError
from ..expr.bind import in_host_memory
from ..expr.evaluate import host
from ..expr.nodes import Expr
from ..figures.mask import MOST_CELLS, Figure, tiles_svg, words_of
from ..figures.survey import Survey, survey
from ..figures.terminal import MOST_CELLS as MOST_SIGNS
from ..figures.terminal import picture
from ..gpu.kernels.spec import Tiles
from ..install import ML_DTYPES
from ..masks import Mask
from ..problem import pack_gqa, validate
from ..problem.bound_exprs import trees
from ..problem.call import Call
from ..problem.keywords import explained
from ..problem.options import Options
from ..scores import Score
from . import traffic
from .occupancy import LIMITS, occupancy
from .places import Place, place
from .registers import UnknownError, registers
from .results import Explanation, KernelUse, Occupancy, Registers
from .times import flops_of, machine, rooflines, standard
from .works import Work, fake_array, on_cpu, on_gpu

GRIDS = MOST_CELLS, MOST_SIGNS  # of the drawing, and of the picture in a terminal


@explained
def explain(
    q: tuple[int, ...] | DLPackArray,
    k: tuple[int, ...] | DLPackArray | None = None,
    v: tuple[int, ...] | DLPackArray | None = None,
    *,
    dtype: Any = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    device: Device | str | None = None,
    backward: bool = False,
    deterministic: bool = False,
    precision: Literal["tf32x3"] | None = None,
    compile: bool = True,
    ranks: SupportsIndex | None = None,
    nodes: SupportsIndex = 1,
) -> Explanation:
    """Say what a call of attention would run, and what that costs, without running it.

    Parameters
    ----------
    q : tuple of int, or array
        Shape of q: (..., Hq, Lq, D), or (Lq, D) for one head; or q itself, whose shape and dtype
        are read.
    k, v : tuple of int, or array, optional
        The same for k, (..., Hkv, Lk, D), and for v, (..., Hkv, Lk, Dv). By default, k is like q
        and v is like k. Arrays are assumed to be contiguous.
    dtype : dtype or str, optional
        float16, bfloat16, float32 or float64. Default: the dtype of the arrays, or float16 for
        shapes.
    mask, score_mod : Mask, Score or list of Score, optional
        As in `attention`.
    device : Device or str, optional
        A name in `cupyflash.analysis.DEVICES` (you need not have this device), "cpu", or "gpu" for
        the current GPU. Default: where the arrays are; for shapes, the current GPU, or the CPU if
        there is none.
    backward : bool
        Explain the gradients instead of the forward.
    deterministic : bool
        As in `attention_backward`.
    precision : str, optional
        As in `attention`.
    compile : bool
        Whether to compile kernels, which takes a second each, to find out registers and occupancy.
        This needs NVRTC but no GPU.
    ranks : int, optional
        Also simulate `cupyflash.distributed.attention` over so many GPUs, each of which holds a
        part of the sequence.
    nodes : int
        How many machines have these GPUs, as many each.

    Returns
    -------
    Explanation
        Kernels, tiles by class, traffic, FLOPs, time by the roofline, and what standard attention
        would need. Tiles are counted exactly; the memory that this takes does not grow with their
        number. With `ranks`, the layout, the scheme, bytes, balance, memory and a model's times.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a shape, mask or device is wrong.

    Examples
    --------
    >>> import cupyflash
    >>> from cupyflash import masks
    >>> made = cupyflash.explain((2, 16, 4096, 128), mask=masks.causal(), device="A100-80GB",
    ...                          compile=False)
    >>> made.main.computes, made.main.block_q, made.main.block_kv
    ('out and log-sum-exp', 128, 64)
    >>> made.main.tiles
    TileCount(empty=31744, partial=2048, full=31744)
    """
    operands = {"q": q, "k": k, "v": v}
    arrays = {name: array(x, name) for name, x in operands.items() if hasattr(x, "shape")}
    if device is None and arrays:
        device = "cpu" if one_home(arrays) is None else "gpu"
    where = place(device)
    kind = _dtype(dtype, arrays)
    call = _call(
        {**operands, **{name: x.shape for name, x in arrays.items()}},
        kind,
        Options(
            mask=_in_host_memory(mask), score_mod=_in_host_memory(score_mod), precision=precision
        ),
    )
    axes, shapes = call.axes, (call.q.shape, call.k.shape, call.v.shape)
    unknown: list[str] = []
    over_ranks = None
    if ranks is not None:
        over_ranks = _over_ranks(call, where, ranks, nodes, backward, unknown)
    if where.target is not None and not backward:
        call, _ = pack_gqa.joined(call)
    problem = call.problem
    if where.target is None:
        reason, works, scratch = on_cpu(call, backward)
    else:
        reason, works, scratch = on_gpu(call, where, backward, deterministic)
    allowed = trees(call).allowed
    surveys: dict[tuple[int, int], Survey] = {}
    sizes = traffic.Sizes(call)
    kernels = tuple(
        _use(
            call,
            where,
            work,
            _survey(call, where, allowed, work, surveys),
            sizes,
            unknown,
            compile=compile,
        )
        for work in works
    )
    main = next(work for work in works if work.block_kv)
    found = surveys[main.block_q, main.block_kv]
    least = sizes.least(backward, found)
    pairs = found.visited_pairs if found.pairs is None else found.pairs
    if found.pairs is None:
        unknown.append(
            "pairs that attend: too many lie in PARTIAL tiles to be asked one by one; all pairs of "
            "visited tiles are counted as FLOPs"
        )
    flops = flops_of(pairs, problem.d, problem.d_v, backward)
    cores = [work.tensor_cores for work in works]
    best, theirs = rooflines(where, call, kernels, cores, flops, least, unknown)
    results = sizes.q + sizes.k + sizes.v if backward else sizes.o + sizes.row
    title = f"{words_of(call.mask, 44)}, {problem.dtype}, {kernels[works.index(main)].name}"
    return Explanation(
        q_shape=shapes[0],
        k_shape=shapes[1],
        v_shape=shapes[2],
        axes=axes,
        dtype=problem.dtype.name,
        mask=words_of(call.mask, 200),
        score="no change" if call.score_mod is None else str(call.score_mod.expr),
        backward=backward,
        device=where.words,
        reason=reason,
        kernels=kernels,
        pairs=found.pairs,
        flops=flops,
        least=least,
        most=traffic.total([kernel.most for kernel in kernels]),
        expected=traffic.total([kernel.expected for kernel in kernels]),
        roofline=best,
        kernels_roofline=theirs,
        memory=results + scratch,
        standard=standard(call, where, backward, results),
        unknown=tuple(dict.fromkeys(unknown)),
        figure=_figure(call, found, title),
        over_ranks=over_ranks,
    )


def _over_ranks(
    call: Call, where: Place, ranks: Any, nodes: Any, backward: bool, unknown: list[str]
) -> Simulation:
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise ArgumentTypeError(f"{name}: got {value!r}; expected an integer.")
        if value < 1:
            raise ArgumentError(f"{name}: got {value}; expected 1 or more.")
    if ranks % nodes:
        raise ArgumentError(
            f"nodes: got {nodes} for {ranks} ranks; expected a divisor, so that every node has as "
            "many GPUs."
        )
    made = machine(where, call)
    if made is None:
        unknown.append(
            f"time over ranks: how fast {where.words.partition(',')[0]} computes, or sends to "
            f"others, is not known; it is for {' and '.join(LINKS)}"
        )
    return simulate(call, int(ranks), int(nodes), backward, made)


def _shape(value: Any, name: str) -> tuple[int, ...]:
    wanted = "expected an array, or integers of 1 or more: (..., H, L, D), or (L, D) for one head."
    if not isinstance(value, (tuple, list)) or len(value) < 2:
        raise ArgumentTypeError(f"{name}: got {value!r}; {wanted}")
    for n in value:
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < 1:
            raise ArgumentError(f"{name}: got {tuple(value)}; {wanted}")
    if math.prod(map(int, value)) >= 2**59:  # addresses of the widest type end at 2^63 bytes
        raise ArgumentError(f"{name}: got {tuple(value)}; expected fewer than 2^59 numbers.")
    return tuple(int(n) for n in value)


def _dtype(value: Any, arrays: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype that is asked for; unless one is, that of the arrays."""
    found = {x.dtype.name: name for name, x in arrays.items()}
    if value is None:
        if len(found) > 1:
            came = ", ".join(f"{name} {dtype}" for dtype, name in found.items())
            raise ArgumentTypeError(f"got {came}; expected one dtype. Convert with .astype(...).")
        value = next(iter(found), FLOATS[0])
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    if name not in FLOATS:
        name = str(np.dtype(value)) if not isinstance(value, str) else value
    if name not in FLOATS:
        raise ArgumentTypeError(f"dtype: got {value!r}; expected one of {', '.join(FLOATS)}.")
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            f"dtype: got bfloat16, which needs the package ml_dtypes: {ML_DTYPES}."
        ) from None
    made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return made


def _call(operands: Mapping[str, Any], dtype: np.dtype[Any], options: Options) -> Call:
    """Return a call of such shapes, whose arrays have no elements."""
    q = _shape(operands["q"], "q")
    k = q if operands["k"] is None else _shape(operands["k"], "k")
    v = k if operands["v"] is None else _shape(operands["v"], "v")
    q_array, k_array, v_array = (fake_array(shape, dtype) for shape in (q, k, v))
    return validate.call(q_array, k_array, v_array, options)


def _in_host_memory(value: Any) -> Any:
    """Return a mask or scores whose arrays lie where the made-up q does."""
    if is_device_array(value):
        return host(value)
    if isinstance(value, (list, tuple)):
        return [_in_host_memory(each) for each in value]
    return type(value)(in_host_memory(value.expr)) if isinstance(value, (Mask, Score)) else value


def _survey(
    call: Call,
    where: Place,
    allowed: Expr | None,
    work: Work,
    known: dict[tuple[int, int], Survey],
) -> Survey | None:
    key = work.block_q, work.block_kv
    if not work.block_kv:
        return None
    if key not in known:
        machine = "cpu" if where.target is None else "gpu"
        first = not known  # pairs are the same for all
        known[key] = survey(
            allowed, call.problem, *key, machine=machine, most_cells=GRIDS, count_pairs=first
        )
    return known[key]


def _use(
    call: Call,
    where: Place,
    work: Work,
    found: Survey | None,
    sizes: traffic.Sizes,
    unknown: list[str],
    *,
    compile: bool,
) -> KernelUse:
    """Count everything of one kernel."""
    problem, tiles = call.problem, work.tiles
    once, most = sizes.moved(work.part, work.atomic_dq, found)
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
    return KernelUse(
        name=work.name,
        computes=work.computes + (", and sums of dq" if work.atomic_dq else ""),
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
        in_cache=_in_cache(call, where, work, sizes),
    )


def _occupancy(
    where: Place, work: Work, tiles: Tiles, taken: Registers, unknown: list[str]
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


def _computed_pairs(found: Survey, work: Work) -> int:
    """Return the pairs that products are computed of: a GPU's kernels multiply whole tiles."""
    if work.tiles is None:
        return found.visited_pairs
    return found.tiles.visited * work.block_q * work.block_kv


def _in_cache(call: Call, where: Place, work: Work, sizes: traffic.Sizes) -> bool | None:
    """Whether the heads that are worked on at a time have room in the cache for what passes by."""
    if not work.block_kv:
        return True
    if where.device is None or work.tiles is None:
        return None
    of_keys = work.part == "dkdv"
    length, block = (
        (call.problem.len_k, work.block_kv) if of_keys else (call.problem.len_q, work.block_q)
    )
    blocks_of_head = -(-int(length) // block)
    at_a_time = work.tiles.resident_blocks * where.device.multiprocessors
    heads = -(-min(at_a_time, work.blocks) // blocks_of_head)
    if not of_keys:  # query heads share a head of keys
        heads = -(-heads * call.problem.heads_kv // call.problem.heads)
    return heads * sizes.passing(work.part, work.atomic_dq) <= where.device.l2


def _figure(call: Call, found: Survey, title: str) -> Figure:
    heads = call.problem.batch * call.problem.heads
    notes = [] if heads == 1 else [f"the first of {heads:,} heads"]
    fine, coarse = found.grids
    return Figure(tiles_svg(fine, title, notes), picture(coarse))
