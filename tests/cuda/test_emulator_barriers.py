"""Without any one of the barriers of the sources, the emulator reports a fault."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from caches import results
from coded_arrays import Coded
from cuda_specialisations import SHARED_MEMORY
from emulator import build
from emulator.blocks import Blocks, Chosen
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from emulator.problems import lean_kernels, reduce_in_every_form
from unread_lengths import unread

import cupyflash.kernels_cu
from cupyflash import lookup, masks, scores
from cupyflash.gpu import source, tile_lists
from cupyflash.gpu.kernels import decode, short_packed, simt
from cupyflash.problem import cached, coded, validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.hadamard import transform
from cupyflash.problem.options import Options
from cupyflash.problem.reduction_form import Form
from cupyflash.problem.tangents import SecondTangents, Tangents
from cupyflash.rowwise import HADAMARD

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

FOLDER = Path(cupyflash.kernels_cu.__file__).parent
BARRIER = re.compile(r"__syncthreads\(\);.*|ptx::barrier_or(?=\()")
# It orders rows of dq in global memory, of which the emulator compares no two plain accesses.
OF_GLOBAL_MEMORY = "the tile's dq, written by all threads"
# They are for lists of more rows, or sequences, than a block has threads: minutes here.
OF_LONG_LISTS = (
    "costs that other threads may still read",
    "the sums, which the next round overwrites",
)


def _barriers() -> list[tuple[str, int]]:
    paths = [path for path in FOLDER.rglob("*.cu*") if path.parent.name != "ptx"]
    paths.remove(FOLDER / "ide_prelude.cuh")  # no kernel includes it
    for name in ("checksum", "offsets"):  # theirs order nothing: without one, results are wrong
        paths.remove(FOLDER / "rowwise" / f"{name}.cu")
    return [
        (path.relative_to(FOLDER).as_posix(), n)
        for path in sorted(paths)
        for n, found in enumerate(BARRIER.findall(path.read_text()))
        if OF_GLOBAL_MEMORY not in found and not any(x in found for x in OF_LONG_LISTS)
    ]


def _everything(emulator):
    """Run every kernel that has a barrier, with all that puts one into them, on several tiles."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def run(q, k, do, bias=None, sink=None, **options):
        call = validate.call(q, k, k, Options(bias=bias, sink=sink, **options))
        out, lse = draw(*do.shape), draw(*do.shape[:-1])
        emulator.forward(call, out, lse)
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = [None if x is None else np.empty_like(x) for x in (q, k, k, bias, sink)]
            each.backward(call, do, out, lse, None, Gradients(*made))

    chosen = {"mask": masks.causal(), "sink": np.zeros(2, np.float32), "bias": draw(40, 33)}
    shape = (2, 2, 40, 72)
    run(draw(*shape), draw(1, 33, 72), draw(*shape), dropout=0.5, seed=1, **chosen)
    run(draw(2, 40, 8), draw(2, 1, 33, 8), draw(2, 2, 40, 8))
    # Tiles of keys that share what a query adds to its scores.
    run(draw(2, 40, 8), draw(1, 150, 8), draw(2, 40, 8), bias=draw(40, 1))
    # Batch entries share queries; the first sees nothing, and the rows of the second one's do begin
    # where they cannot be read as vectors.
    do = draw(2, 2 * 40 * 8 + 1)[:, :-1].reshape(2, 2, 40, 8, copy=False)
    run(draw(2, 40, 8), draw(2, 1, 33, 8), do, mask=masks.lengths(np.array([0, 33])))

    # Tensor cores: values that are not finite where a tile is masked; tiles that are not; no tile.
    def run_half(d, last, **options):
        q, k, v = (draw(2, 1, n, d).astype(np.float16) for n in (40, 33, 33))
        v[:, :, 20] = last
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.empty_like(q), draw(2, 1, 40)
        emulator.forward(call, out, lse)
        out = np.nan_to_num(out, posinf=0)
        lse[~np.isfinite(lse)] = 0
        do = np.asfortranarray(
            draw(*out.shape).astype(np.float16)
        )  # copied at once, not on its way
        do[:, :, 30] = last
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = (np.empty_like(x) for x in (q, k, v))
            each.backward(call, do, out, lse, None, Gradients(*made, None, None))

    def run_shared(emulator, d, last, dtype, **options):
        q, k, v, do = (
            draw(*shape).astype(dtype)
            for shape in ((2, 40, d), *[(2, 1, 33, d)] * 2, (2, 2, 40, d))
        )
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.empty_like(do), draw(2, 2, 40).astype(call.problem.accumulator)
        emulator.forward(call, out, lse)
        k[:, :, 20], do[:, :, 30] = last, last
        for each in (emulator, dataclasses.replace(emulator, deterministic=True)):
            made = (np.empty_like(x) for x in (q, k, v))
            each.backward(call, do, out, lse, None, Gradients(*made, None, None))

    def run_tile(last, dtype, **options):
        # Two heads, of each of which a block has all.
        q, k, v, do = (draw(2, rows, 8).astype(dtype) for rows in (40, 33, 33, 40))
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.zeros_like(do), np.zeros((2, 40), np.float32)
        k[:, 20], do[:, 30] = last, last
        blocks = Blocks(64, 64, 128, one_tile=True)  # a block has all keys
        made = (np.empty_like(x) for x in (q, k, v))
        arrays = do, out, lse, None, Gradients(*made, None, None)
        dataclasses.replace(emulator, blocks=blocks).backward(call, *arrays)

    for dtype in (np.float16, ml_dtypes.bfloat16):
        run_tile(np.inf, dtype, mask=masks.causal())
        run_tile(1, dtype, mask=masks.causal())
        run_tile(1, dtype)

    def run_bias(emulator, d, order):
        # Two entries that were given the same bias; rows are copied on their way, or at once.
        q, k, v, do = (
            draw(2, *shape, d).astype(np.float16, order=order)
            for shape in ((2, 40), (1, 33), (1, 33), (2, 40))
        )
        bias = draw(2, 40, 33).astype(np.float16)
        call = validate.call(q, k, v, Options(bias=bias))
        out, lse = np.zeros_like(q), np.zeros((2, 2, 40), np.float32)
        made = (np.empty_like(x) for x in (q, k, v, bias))
        emulator.backward(call, do, out, lse, None, Gradients(*made, None))

    def run_windows(emulator, d, hides, infinite):
        # Several entries of a block, which share a bias; with infinity beside hidden pairs.
        q, k, v, do = (draw(9, 1, rows, d).astype(np.float16) for rows in (40, 33, 33, 40))
        bias = draw(1, 40, 33).astype(np.float16)
        if hides:
            bias[0, 5, 7] = -np.inf
        if infinite:
            v[3, 0, 7] = np.inf
        call = validate.call(q, k, v, Options(bias=bias))
        out, lse = np.zeros_like(q), np.zeros((9, 1, 40), np.float32)
        made = (np.empty_like(x) for x in (q, k, v, bias))
        emulator.backward(call, do, out, lse, None, Gradients(*made, None))

    windows = Blocks(64, 64, 128, one_tile=True, multiprocessors=9, bias_tiles=True)
    for d in (8, 32):
        for hides, infinite in ((False, False), (True, False), (True, True)):
            run_windows(dataclasses.replace(emulator, blocks=windows), d, hides, infinite)

    # More tiles than are classified at once, the first ones EMPTY. Before the others: one small
    # kernel shows what they do not.
    q, k = draw(1, 40, 8).astype(np.float16), draw(1, 1100, 8).astype(np.float16)
    call = validate.call(q, k, k, Options(mask=masks.mask(lambda b, h, i, j: j >= 1060)))
    emulator.forward(call, np.empty_like(q), draw(1, 40))

    # Few queries and many keys: a task that two blocks share, and tasks that one has alone.
    for dtype in (np.float16, np.float32):
        for lead in ((), (3,)):
            q, k = draw(*lead, 2, 1, 8).astype(dtype), draw(*lead, 1, 1300, 8).astype(dtype)
            # Tasks are alike, or not: one query would see all keys under a causal mask.
            for options in (Options(), Options(mask=masks.window(1200, 0))):
                call = validate.call(q, k, k, options)
                emulator.forward(call, np.empty_like(q), draw(*lead, 2, 1))

    # Entries that share their first keys: a team of warps has them, whose last one has no rows.
    q, k = draw(9, 8, 1, 8).astype(np.float16), draw(1, 1, 600, 8).astype(np.float16)
    for options in (Options(), Options(mask=masks.causal())):
        call = cached.call(q, k, k, np.full(9, 600), None, None, options, shared=512)
        with mock.patch.object(decode, "FEWEST_SHARED_BYTES", 0):
            emulator.forward(call, *results(call))

    # Caches whose tasks have a block each, that joins its leaves itself.
    blocks = dataclasses.replace(emulator.blocks, multiprocessors=64)
    for dtype in (np.float16, np.float32):
        q, k = draw(2, 4, 1, 8).astype(dtype), draw(2, 2, 480, 8).astype(dtype)
        call = cached.call(q, k, k, np.array([480, 131]), None, None, Options())
        dataclasses.replace(emulator, blocks=blocks).forward(call, *results(call))

    # Rows that are transformed by several passes, and by a small matrix after them.
    for columns in (256, 4096, 640):
        rows = draw(2, columns)
        checked = transform(rows, 1, False, None)
        emulator.rowwise(HADAMARD, checked, out=np.empty_like(rows))

    for order in "CF":
        run_bias(emulator, 8, order)
        # Two warpgroups.
        run_bias(dataclasses.replace(emulator, blocks=Blocks(hopper=True)), 200, order)

    # Warps that share keys, and warps that do not.
    for each in (emulator, dataclasses.replace(emulator, blocks=Blocks(16, 32, 64))):
        run_shared(each, 24, np.inf, ml_dtypes.bfloat16, mask=masks.causal())
        run_shared(each, 24, 1, np.float16)
        run_shared(each, 24, 1, ml_dtypes.bfloat16)
    run_shared(emulator, 24, np.inf, np.float64, mask=masks.causal())
    run_shared(emulator, 24, 1, np.float64)
    run_shared(emulator, 24, 1, np.float64, mask=masks.lengths(np.array([0, 33])))
    run_half(72, np.inf, mask=masks.causal())
    run_half(72, 1)
    run_half(256, 1, mask=masks.lengths(np.array([0, 33])))

    q, k = draw(1, 70, 64).astype(np.float16), draw(1, 200, 64).astype(np.float16)
    call = validate.call(q, k, k)
    warpgroups = dataclasses.replace(emulator, blocks=Blocks(hopper=True))
    warpgroups.forward(call, np.empty_like(q), draw(1, 70))
    made = (np.empty_like(x) for x in (q, k, k))
    warpgroups.backward(call, q, q, draw(1, 70), None, Gradients(*made, None, None))

    # A wide head with room for one stage, of which the next queries are copied apart from do.
    q, k = draw(1, 70, 384).astype(np.float16), draw(1, 40, 384).astype(np.float16)
    wide = dataclasses.replace(emulator, blocks=Chosen(shared_memory=SHARED_MEMORY["sm_90"]))
    made = (np.empty_like(x) for x in (q, k, k))
    wide.backward(validate.call(q, k, k), q, q, draw(1, 70), None, Gradients(*made, None, None))

    # Tangents, whose tile and that of weights have pairs dropped.
    q, k, tq, tk = draw(1, 70, 24), draw(1, 200, 24), draw(1, 70, 24), draw(1, 200, 24)
    written = draw(1, 70, 24), draw(1, 70, 24), draw(1, 70), draw(1, 70)
    call = validate.call(q, k, k, Options(dropout=0.5, seed=1))
    emulator.forward_tangent(call, Tangents(tq, tk, tk), written)

    # Those of 16 bits: values that are not finite where a tile is masked, tiles that are not, no
    # tile, and rows that warps share.
    for d, last, options in (
        (24, np.inf, Options(mask=masks.causal())), (136, 1, Options()),
        (24, 1, Options(mask=masks.lengths(np.array([0, 33])))),
    ):  # fmt: skip
        q, k, v = (draw(2, 1, n, d).astype(np.float16) for n in (40, 33, 33))
        v[:, :, 20] = last
        written = np.empty_like(q), np.empty_like(q), draw(2, 1, 40), draw(2, 1, 40)
        emulator.forward_tangent(validate.call(q, k, v, options), Tangents(q, k, k), written)
    q, k = draw(1, 70, 64).astype(np.float16), draw(1, 200, 64).astype(np.float16)
    written = np.empty_like(q), np.empty_like(q), draw(1, 70), draw(1, 70)
    warpgroups.forward_tangent(validate.call(q, k, k), Tangents(q, k, k), written)

    # Their gradients, whose tangents are resident or not, and of a bias that heads share.
    bias, sink = draw(70, 200), draw(2)
    q, tq, k, tk = draw(2, 2, 70, 24), draw(2, 2, 70, 24), draw(2, 1, 200, 24), draw(1, 1, 200, 24)
    options = Options(dropout=0.5, seed=1, bias=bias, sink=sink, mask=masks.window(40, 30))
    call = validate.call(q, k, tk, options)
    made = (np.empty_like(x) for x in (q, k, tk, bias, sink))
    rows = {"do": q, "out": tq, "lse": draw(2, 2, 70), "dlse": draw(2, 2, 70)}
    moved = SecondTangents(Tangents(tq, k, tk, bias, sink), q, draw(2, 2, 70))
    written = Gradients(*made), (np.empty_like(q), draw(2, 2, 70))
    for deterministic in (False, True):
        emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)
        with mock.patch.dict(simt.KERNELS, lean_kernels()):
            emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)
    # As above: entries share queries, and the first one sees nothing.
    q, k = draw(2, 40, 8), draw(2, 1, 33, 8)
    call = validate.call(q, k, k, Options(mask=masks.lengths(np.array([0, 33]))))
    made = *(np.empty_like(x) for x in (q, k, k)), None, None
    rows = {"do": do, "out": draw(2, 2, 40, 8), "lse": draw(2, 2, 40)}
    moved = SecondTangents(Tangents(q, k, k), do)
    written = Gradients(*made), (draw(2, 2, 40, 8), draw(2, 2, 40))
    for deterministic in (False, True):
        emulator.backward_tangent(call, rows, moved, *written, deterministic=deterministic)

    # Those of 16 bits, of one stage and of two: numbers that are not finite where a tile is masked,
    # tiles that are not, and queries that entries share.
    for d, last, options in (
        (24, np.inf, Options(mask=masks.causal())), (40, np.inf, Options(mask=masks.causal())),
        (24, 1, Options()), (40, 1, Options()),
        (24, 1, Options(mask=masks.lengths(np.array([0, 33])))),
    ):  # fmt: skip
        q, k = draw(2, 70, d).astype(np.float16), draw(2, 1, 73, d).astype(np.float16)
        q[:, 20] = k[:, :, 20] = last
        of_rows = draw(2, 2, 70, d).astype(np.float16)
        call = validate.call(q, k, k, options)
        rows = {"do": of_rows, "out": of_rows, "lse": draw(2, 2, 70)}
        moved = SecondTangents(Tangents(q, k, k), of_rows)
        made = *(np.empty_like(x) for x in (q, k, k)), None, None
        written = Gradients(*made), (np.empty_like(of_rows), draw(2, 2, 70))
        emulator.backward_tangent(call, rows, moved, *written)

    # Gradients of learned look-ups: of queries, over several tiles, and of one number.
    gate = lookup(draw(40), learned=True), lookup(draw(), learned=True)
    q, k = draw(2, 2, 40, 8), draw(2, 1, 33, 8)
    changes = [scores.score(lambda s, b, h, i, j: s * gate[0][i]), scores.softcap(gate[1])]
    call = validate.call(q, k, k, Options(score_mod=changes, dropout=0.5, seed=1))
    rows = {"do": q, "out": draw(*q.shape), "lse": draw(2, 2, 40)}
    emulator.backward_lookups(call, rows, {x: np.empty_like(x.array) for x in gate})

    # Reductions: lists of the largest, and results that are joined over several tiles of keys.
    some = masks.mask(lambda b, h, i, j: ((j < 16) | (j >= 32)) & (j <= i))
    call = validate.call(q, k, k, Options(mask=some, score_mod=scores.softcap(3.0)))
    reduce_in_every_form(emulator, call, draw(2, 2, 40))
    call = validate.call(*(x.astype(np.float16) for x in (q, k, k)), Options(mask=some))
    form = Form("weight", "blocks", "sum", rows=(0, 40), block=(40, 40))
    emulator.reduce(call, form, draw(2, 2, 40), None)

    # Lists of tiles, whose rows are dealt in an order.
    chosen = masks.chosen(np.array([[0, 2], [1, -1], [3, 0]]), (64, 64))
    q, k = draw(1, 180, 64).astype(np.float16), draw(1, 250, 64).astype(np.float16)
    with mock.patch.object(tile_lists, "FEWEST_TILES", 1):
        call = validate.call(q, k, k, Options(mask=chosen))
        warpgroups.forward(call, np.empty_like(q), draw(1, 180))

    # Long ones of packed sequences are listed, and blocks take turns at them.
    ends = np.cumsum([0, 130, 2, 300, 1, 0, 70, *[3] * 12])
    x = draw(2, ends[-1], 64).astype(np.float16)
    call = unread(validate.varlen_call(x, x, x, ends, ends, True, Options(mask=masks.causal())))
    warpgroups.forward(call, np.empty_like(x), draw(2, ends[-1]))
    made = Gradients(*(np.empty_like(x) for _ in range(3)), None, None)
    with mock.patch.dict(short_packed.OF_LISTED, {"dkdv": 1, "dq_rows": 1}):
        warpgroups.backward(call, x, x, draw(2, ends[-1]), None, made, deterministic=False)

    held = Coded.of("float8_e4m3fn", draw(1, 70, 64), *(draw(1, 200, 64) for _ in range(2)))
    given = coded.Fp8(*held.scales, held.form, "float32")
    call = validate.call(*held.arrays, Options(), given=given)
    warpgroups.forward(call, draw(1, 70, 64), draw(1, 70))

    # Compressed keys of a cache, whose first columns are the values.
    q, k = draw(1, 16, 1, 576).astype(np.float16), draw(1, 1, 130, 576).astype(np.float16)
    call = cached.call(q, k, k[..., :512], np.array([130]), None, None, Options())
    warpgroups.forward(call, *results(call))

    # Rows of the output are longer than those of the queries, whose place they take.
    q, k, v = draw(1, 70, 72), draw(1, 200, 72), draw(1, 200, 128)
    v[:, 20] = np.inf
    call = validate.call(q, k, v, Options(mask=masks.causal(), precision="tf32x3"))
    warpgroups.forward(call, draw(1, 70, 128), draw(1, 70))
    q = draw(1, 40, 64)  # which registers hold
    warpgroups.forward(
        validate.call(q, q, q, Options(precision="tf32x3")), draw(1, 40, 64), draw(1, 40)
    )


@pytest.mark.parametrize(("path", "number"), _barriers())
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_no_barrier_of_the_sources_may_be_missing(path, number):
    def read(name):
        text = build.read(name)
        if name != path:
            return text
        match = list(BARRIER.finditer(text))[number]
        return text[: match.start()] + text[match.end() :].removeprefix("\n")

    def has_it(special):
        # Deltas and pieces of tasks are what other kernels compute with.
        included = source.flatten((special.spec.source,))
        needed = special.spec.part in ("delta", "tangent_delta", "decode", "shared")
        return needed or f"// {path}\n" in included

    with pytest.raises(
        Fault, match=r"no barrier since|fence_device since|no thread has written|has not fini"
    ):
        _everything(Emulator(read=read, runs=has_it))


@pytest.mark.thorough("goes with the barriers that are missing")
def test_with_all_barriers_no_fault_is_reported():
    for schedule in (FORWARD, REVERSE, randomly(0)):
        _everything(Emulator(schedule=schedule))
