"""Few queries and many keys, and attention over a cache, by the CUDA kernels on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from caches import hidden, in_pages, results
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores, workspace_size_cached
from cupyflash.gpu import route, source
from cupyflash.gpu.kernels import decode
from cupyflash.problem import cached, validate
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
TENSOR, PORTABLE = Blocks(), Blocks(tensor=False)
HOPPER = Blocks(hopper=True)  # two blocks to an SM, or a small one if leaves are few
KERNELS = {
    "sm80-f16": (F16, TENSOR),
    "sm80-bf16": (BF16, TENSOR),
    "hopper-bf16": (BF16, HOPPER),
    "simt-f32": (F32, TENSOR),
    "simt-f64": (F64, TENSOR),
    "simt-f16": (F16, PORTABLE),
}
EACH = pytest.mark.parametrize(("dtype", "blocks"), KERNELS.values(), ids=KERNELS)
FORMS = {
    "sm80": KERNELS["sm80-f16"],
    "hopper": KERNELS["hopper-bf16"],
    "simt": KERNELS["simt-f32"],
}
OF_ALL = pytest.mark.parametrize(("dtype", "blocks"), FORMS.values(), ids=FORMS)


def of_one(name):
    """Parametrize with all forms; one is quick, for all of them deal out work and join it alike."""
    return mostly_thorough(
        ("dtype", "blocks"),
        FORMS.values(),
        quick=[FORMS[name]],
        why="the other forms share what this is about; their products have quick tests",
        ids=FORMS,
    )


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(
    q,
    k,
    v,
    lengths,
    blocks,
    table=None,
    offsets_q=None,
    schedule=REVERSE,
    workspace=None,
    late=(),
    **options,
):
    """Compute out and lse over a cache, into memory that holds NaN."""
    call = cached.call(q, k, v, lengths, table, offsets_q, Options(**options))
    out, lse = results(call)
    Emulator(blocks, schedule, late=late).forward(call, out, lse, workspace=workspace)
    return out, lse


def within_the_bound(blocks, q, k, v, lengths, out, lse, entry_options=lambda b: {}):
    """Hold every entry to the bound of a call over the keys that it holds."""
    tensor = blocks.tensor and q.dtype in (F16, BF16)
    for b, length in enumerate(lengths):
        own = [x[b : b + 1, :, : length if n else None] for n, x in enumerate((q, k, v))]
        precision = Precision.of(q.dtype, tensor)
        bound = forward_bound(*own, precision=precision, block_kv=64, **entry_options(b))
        assert rho(out[b : b + 1], *bound.out).value <= 1
        assert rho(lse[b : b + 1], *bound.lse).value <= 1


@EACH
@mostly_thorough(
    "lengths",
    [(0, 1), (63, 64), (65, 511), (512, 513), (640, 100)],
    quick=[(65, 511)],
    why="other edges of leaves and nodes",
    ids=str,
)
def test_every_entry_is_attention_over_what_it_holds(dtype, blocks, lengths):
    q, k, v = draw(dtype, (2, 4, 1, 24), (2, 2, 640, 24), (2, 2, 640, 40))
    out, lse = run(q, hidden(k, lengths), hidden(v, lengths), np.array(lengths), blocks)
    within_the_bound(blocks, q, k, v, lengths, out, lse)


@mostly_thorough(
    ("d", "d_v"),
    [(192, 128), (136, 136), (160, 64), (144, 24), (128, 192), (256, 200)],
    quick=[(192, 128)],
    why="rows of as many lines of shared memory, of keys or of values",
)
def test_heads_whose_rows_do_not_fill_a_stage(d, d_v):
    """Rows of 129 to 192 columns: a stage has room for 21 of them, and is filled with 16."""
    dtype, blocks = FORMS["sm80"]
    q, k, v = draw(dtype, (2, 4, 2, d), (2, 2, 200, d), (2, 2, 200, d_v), seed=9)
    out, lse = run(q, hidden(k, (200, 70)), hidden(v, (200, 70)), np.array([200, 70]), blocks)
    within_the_bound(blocks, q, k, v, (200, 70), out, lse)


OPTIONS = {
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(40, 0)},
    "prefix of a window": {"mask": masks.window(3, 0) | masks.prefix(70)},
    "not a range": {"mask": masks.mask(lambda b, h, i, j: (i + j + h) % 3 != 0)},
    "hides a head": {"mask": masks.mask(lambda b, h, i, j: h != 1)},
    "softcap": {"score_mod": scores.softcap(2.0)},
    "alibi": {"score_mod": scores.alibi([0.5, 0.25, 0.125, 1.0]), "mask": masks.causal()},
    "negative scale": {"scale": -0.3},
    "scale 0": {"scale": 0.0},
    "sink": {"sink": np.array([0.5, -1.0, 3.0, -np.inf], np.float32)},
}


@of_one("sm80")
@mostly_thorough(
    "name", OPTIONS, quick=["not a range", "scale 0"], why="other masks and scores, a build each"
)
def test_masks_and_scores(dtype, blocks, name):
    lengths = (600, 70)
    q, k, v = draw(dtype, (2, 4, 3, 32), (2, 2, 640, 32), (2, 2, 640, 32), seed=1)
    options = OPTIONS[name]
    out, lse = run(q, hidden(k, lengths), hidden(v, lengths), np.array(lengths), blocks, **options)
    within_the_bound(blocks, q, k, v, lengths, out, lse, lambda b: options)


@of_one("sm80")
def test_a_bias_and_a_mask_as_arrays(dtype, blocks):
    lengths = (600, 70)
    q, k, v = draw(dtype, (2, 4, 2, 32), (2, 2, 640, 32), (2, 2, 640, 32), seed=2)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((2, 1, 2, 640)).astype(np.float32)
    mask = rng.random((2, 4, 1, 640)) < 0.5
    out, lse = run(q, k, v, np.array(lengths), blocks, bias=bias, mask=mask)

    def of_entry(b):
        return {
            "bias": bias[b : b + 1, ..., : lengths[b]],
            "mask": mask[b : b + 1, ..., : lengths[b]],
        }

    within_the_bound(blocks, q, k, v, lengths, out, lse, of_entry)


@of_one("simt")
def test_what_is_masked_may_hold_anything(dtype, blocks):
    q, k, v = draw(dtype, (1, 2, 2, 32), (1, 1, 200, 32), (1, 1, 200, 32), seed=4)
    mask = np.ones((2, 200), bool)
    mask[:, 50:90] = False
    want = run(q, k, v, 200, blocks, mask=mask)
    k[..., 50:90, :], v[..., 50:90, :] = np.inf, np.nan
    got = run(q, k, v, 200, blocks, mask=mask)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@of_one("sm80")
@mostly_thorough("page", [1, 3, 16, 64, 100], quick=[3], why="other sizes of pages")
def test_pages_change_no_bit(dtype, blocks, page):
    lengths, rng = np.array([600, 131]), np.random.default_rng(page)
    q, k, v = draw(dtype, (2, 4, 2, 32), (2, 2, 640, 32), (2, 2, 640, 40), seed=5)
    k, v = hidden(k, lengths), hidden(v, lengths)
    want = run(q, k, v, lengths, blocks, mask=masks.causal())
    paged, table = in_pages(np.concatenate([k, v], -1), page, rng)
    split = paged[..., :32], paged[..., 32:]
    got = run(q, *split, lengths, blocks, table, mask=masks.causal())
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    wide = run(q, *split, lengths.astype(np.int32), blocks, table.astype(np.int64),
               mask=masks.causal())  # fmt: skip
    assert same_bits(wide[0], want[0])


LATE = {
    "nothing": ((600, 131), None),
    "the first length": ((599, 131), None),
    "the last length": ((600, 70), None),
    "all lengths": ((0, 640), None),
    "the table": ((600, 131), slice(None)),
    "a page": ((600, 131), 40),  # of this position
    "both": ((640, 1), slice(None)),
}


@of_one("sm80")
@mostly_thorough("masked", [False, True], quick=[False], why="masks have their units counted later")
@mostly_thorough("page", [None, 3, 16], quick=[None, 16], why="pages of another size")
@pytest.mark.parametrize("name", LATE)
def test_what_the_grid_ahead_writes_at_its_end_is_read(dtype, blocks, masked, page, name):
    """A kernel that begins early counts units of the lengths before, and looks up their pages."""
    lengths, rng = np.array([600, 131]), np.random.default_rng(3)
    before, moves = LATE[name]
    q, k, v = draw(dtype, (2, 4, 2, 32), (2, 2, 640, 32), (2, 2, 640, 40), seed=5)
    options = {"mask": masks.causal()} if masked else {}
    want = run(q, k, v, lengths, blocks, **options)
    table = None
    if page is not None:
        paged, table = in_pages(np.concatenate([k, v], -1), page, rng)
        k, v = paged[..., :32], paged[..., 32:]
    held = np.array(before)
    late = [(held, lengths), (q, q.copy())]
    if table is not None:
        late.append((table, table.copy()))
        if moves is not None:
            moved = moves if isinstance(moves, slice) else moves // page
            table[:, moved] = (table[:, moved] + 1) % len(k)
    q[...] = np.nan
    few = dataclasses.replace(blocks, multiprocessors=2)  # so that the first warp has work
    late = {"late": tuple(late), "schedule": FORWARD}
    got = run(q, k, v, held, few, table, **late, **options)
    assert np.array_equal(held, lengths)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])


@of_one("sm80")
@mostly_thorough("multiprocessors", [1, 3, 40], quick=[3], why="grids of other sizes")
@pytest.mark.parametrize("schedule", [FORWARD, randomly(7)], ids=["forward", "random"])
def test_no_bit_depends_on_the_grid_or_the_schedule(dtype, blocks, multiprocessors, schedule):
    lengths = np.array([1500, 10, 700])
    q, k, v = draw(dtype, (3, 2, 1, 16), (3, 1, 1500, 16), (3, 1, 1500, 16), seed=6)
    want = run(q, k, v, lengths, blocks)
    other = dataclasses.replace(blocks, multiprocessors=multiprocessors)
    got = run(q, k, v, lengths, other, schedule=schedule)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    within_the_bound(blocks, q, k, v, lengths, *got)


@of_one("simt")
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "causal"])
def test_more_entries_than_lanes(dtype, blocks, masked):
    """A lane counts several entries, some without keys; a mask makes threads count tasks."""
    lengths = np.random.default_rng(5).integers(0, 200, 70)
    lengths[[0, 33, 69]] = 0, 0, 130
    q, k, v = draw(dtype, (70, 2, 1, 8), (70, 1, 200, 8), (70, 1, 200, 8))
    options = {"mask": masks.causal()} if masked else {}
    few = dataclasses.replace(blocks, multiprocessors=3)
    out, lse = run(q, k, v, lengths, few, **options)
    for first in (0, 24, 48):  # so few that a lane counts one
        some = slice(first, first + 24)
        own = run(*(x[some] for x in (q, k, v)), lengths[some], few, **options)
        assert same_bits(out[some], own[0])
        assert same_bits(lse[some], own[1])


@of_one("simt")
@mostly_thorough("multiprocessors", [1, 2, 12], quick=[2], why="other shares of a row")
def test_rows_are_joined_by_warps_or_blocks(dtype, blocks, multiprocessors):
    """Two warps have a row each, and one is left over; or blocks of two sizes have it."""
    q, k, v = draw(dtype, (1, 6, 5, 8), (1, 2, 900, 8), (1, 2, 900, 8))
    lengths = np.array([900])
    few = dataclasses.replace(blocks, multiprocessors=multiprocessors)
    out, lse = run(q, k, v, lengths, few)
    within_the_bound(few, q, k, v, lengths, out, lse)
    one = run(q, k, v, lengths, dataclasses.replace(blocks, multiprocessors=60))
    assert same_bits(out, one[0])
    assert same_bits(lse, one[1])


@of_one("simt")
def test_leaves_whose_scores_lie_far_apart(dtype, blocks):
    """A maximum that grows from leaf to leaf: weights by the first one would overflow."""
    blocks = dataclasses.replace(blocks, multiprocessors=1)  # units are nodes of 8 leaves
    q, k, v = draw(dtype, (1, 2, 1, 8), (1, 1, 1536, 8), (1, 1, 1536, 8), seed=16)
    q[...], k[..., 0] = 1, 300 * (np.arange(1536) // 64)
    for order in (1, -1):
        arrays = q, k[:, :, ::order], v
        within_the_bound(blocks, *arrays, [1536], *run(*arrays, 1536, blocks))


@of_one("sm80")
def test_no_bit_depends_on_the_batch_or_the_capacity(dtype, blocks):
    lengths = np.array([900, 10, 700])
    q, k, v = draw(dtype, (3, 2, 1, 16), (3, 1, 900, 16), (3, 1, 900, 16), seed=7)
    want = run(q, k, v, lengths, blocks)
    for b in range(3):
        for capacity in (int(lengths[b]), 900):
            own = q[b : b + 1], k[b : b + 1, :, :capacity], v[b : b + 1, :, :capacity]
            got = run(*own, int(lengths[b]), blocks)
            assert same_bits(got[0], want[0][b : b + 1])
            assert same_bits(got[1], want[1][b : b + 1])


@of_one("sm80")
def test_drafts_are_single_steps(dtype, blocks):
    """Verifying n tokens in one call gives the bits of n calls."""
    end = 580
    q, k, v = draw(dtype, (1, 4, 6, 16), (1, 2, 640, 16), (1, 2, 640, 16), seed=8)
    out, lse = run(q, k, v, end, blocks, mask=masks.causal())
    for n in range(6):
        step = run(q[:, :, n : n + 1], k, v, end - 5 + n, blocks, mask=masks.causal())
        assert same_bits(step[0], out[:, :, n : n + 1])
        assert same_bits(step[1], lse[:, :, n : n + 1])


@pytest.mark.thorough("many keys; smaller nodes are quick")
@OF_ALL
def test_large_nodes(dtype, blocks):
    """With one block, units are nodes of 512 and of 4096 keys; the bits stay."""
    lengths = np.array([4500, 4200, 4100])
    q, k, v = draw(dtype, (3, 1, 1, 8), (3, 1, 4500, 8), (3, 1, 4500, 8), seed=9)
    one, many = (dataclasses.replace(blocks, multiprocessors=n) for n in (1, 60))
    got, want = run(q, k, v, lengths, one), run(q, k, v, lengths, many)
    assert same_bits(got[0], want[0])
    within_the_bound(blocks, q, k, v, lengths, *got)


@pytest.mark.thorough("many keys; fewer nodes are quick")
@OF_ALL
def test_more_nodes_than_have_room_in_shared_memory(dtype, blocks):
    """Their kernel keeps 64 nodes of 512 keys there, and others where their units were.

    The last node of the first head has one unit, and those of the second head follow it.
    """
    q, k, v = draw(dtype, (1, 2, 1, 8), (1, 2, 32_800, 8), (1, 2, 32_800, 8), seed=17)
    blocks = dataclasses.replace(blocks, multiprocessors=60)
    for lengths in ([32_768], [32_800]):
        within_the_bound(blocks, q, k, v, lengths, *run(q, k, v, lengths[0], blocks))


@of_one("simt")
def test_packed_queries(dtype, blocks):
    counts, lengths = [3, 0, 5, 1], np.array([600, 300, 70, 5])
    offsets = np.cumsum([0, *counts])
    q, k, v = draw(dtype, (4, 9, 16), (4, 2, 640, 16), (4, 2, 640, 16), seed=10)
    out, lse = run(q, k, v, lengths, blocks, offsets_q=offsets, mask=masks.causal())
    for b, (first, last) in enumerate(itertools.pairwise(offsets)):
        if first == last:
            continue
        own = q[None, :, first:last], k[b : b + 1], v[b : b + 1]
        want = run(*own, int(lengths[b]), blocks, mask=masks.causal())
        assert same_bits(out[:, first:last], want[0][0])
        assert same_bits(lse[:, first:last], want[1][0])


@OF_ALL
@mostly_thorough(
    ("heads", "heads_kv"), [(20, 1), (6, 2), (3, 3)], quick=[(20, 1)], why="groups of other sizes"
)
def test_groups_of_any_size(dtype, blocks, heads, heads_kv):
    q, k, v = draw(dtype, (1, heads, 2, 16), (1, heads_kv, 130, 16), (1, heads_kv, 130, 16))
    out, lse = run(q, k, v, 130, blocks, mask=masks.causal())
    within_the_bound(blocks, q, k, v, [130], out, lse, lambda b: {"mask": masks.causal()})


@of_one("sm80")
@mostly_thorough("d", [1, 7, 40, 128, 200, 256], quick=[7], why="other heads, a build each")
def test_heads_of_any_size(dtype, blocks, d):
    q, k, v = draw(dtype, (1, 2, 1, d), (1, 1, 130, d), (1, 1, 130, max(d - 3, 1)), seed=d)
    out, lse = run(q, k, v, 130, blocks)
    within_the_bound(blocks, q, k, v, [130], out, lse)


@mostly_thorough("dtype", [F16, F32], quick=[F16], why="the other kernel of wide heads", ids=str)
def test_compressed_keys(dtype):
    """Values are a view of the keys: D = 576, Dv = 512."""
    q, k = draw(dtype, (1, 4, 1, 576), (1, 1, 130, 576), seed=11)
    out, lse = run(q, k, k[..., :512], 130, TENSOR)
    within_the_bound(PORTABLE, q, k, k[..., :512], [130], out, lse)


@pytest.mark.thorough("the emulator is slow on strided rows")
@OF_ALL
def test_any_strides(dtype, blocks):
    q, k, v = draw(dtype, (2, 3, 4, 32), (2, 300, 2, 64), (2, 300, 2, 33), seed=12)
    views = q.swapaxes(1, 2), k.swapaxes(1, 2)[..., ::2], v.swapaxes(1, 2)[..., :0:-1]
    want = run(*map(np.ascontiguousarray, views), 290, blocks)
    got = run(*views, 290, blocks)
    assert same_bits(got[0], want[0])


@of_one("sm80")
def test_lengths_and_tables_of_a_device_are_held_in_range(dtype, blocks, monkeypatch):
    """They are not read before the kernel runs, and lead nowhere outside of the cache."""
    q, k, v = draw(dtype, (3, 2, 1, 16), (5, 1, 16, 16), (5, 1, 16, 16), seed=13)
    table = np.array([[0, 1, 2], [-1, 2**31 - 1, 4], [-5, 9, 9]], np.int32)
    monkeypatch.setattr(cached, "readable", lambda value: None)
    got = run(q, k, v, np.array([48, 2**40, -3]), blocks, table)
    monkeypatch.undo()
    held = np.clip(table, 0, 4)
    want = run(q, k, v, np.array([48, 48, 0]), blocks, held)
    assert same_bits(got[0], want[0])


def test_rows_with_more_nodes_than_a_block_folds_at_once():
    """By blocks of 16 warps; and an SM has two blocks that compute them."""
    keys = 64 * 8 * 20 - 100
    q, k, v = draw(F16, (1, 1, 1, 16), (1, 1, keys, 16), (1, 1, keys, 16), seed=18)
    target = dataclasses.replace(target_of("sm_90"), multiprocessors=30)
    call = cached.call(q, k, v, keys)
    launches = route.forward(call, target, *results(call)).recipe.launches
    sizes = [(x.special.tiles.threads, x.special.tiles.resident_blocks) for x in launches]
    assert sizes == [(128, 2), (512, 1)]
    many = Blocks(hopper=True, multiprocessors=30)
    out, lse = run(q, k, v, keys, many)
    within_the_bound(many, q, k, v, [keys], out, lse)
    assert same_bits(run(q, k, v, keys, many, schedule=randomly(4))[0], out)
    assert same_bits(run(q, k, v, keys, TENSOR)[0], out)


@of_one("simt")
def test_a_workspace_may_hold_anything_and_serves_again(dtype, blocks):
    q, k, v = draw(dtype, (2, 2, 1, 16), (2, 1, 1100, 16), (2, 1, 1100, 16), seed=14)
    blocks = dataclasses.replace(blocks, multiprocessors=9)
    want = run(q, k, v, 1100, blocks)
    rng = np.random.default_rng(0)
    for fill in (0, None):
        workspace = (
            rng.integers(0, 256, 1 << 24, np.uint8) if fill is None else np.zeros(1 << 24, np.uint8)
        )
        for schedule in (FORWARD, randomly(3)):
            got = run(q, k, v, 1100, blocks, schedule=schedule, workspace=workspace)
            assert same_bits(got[0], want[0])


@mostly_thorough(
    ("dtype", "blocks"),
    KERNELS.values(),
    quick=[KERNELS["sm80-bf16"]],
    why="each type has a quick test over a cache",
    ids=KERNELS,
)
def test_attention_takes_them_where_queries_are_few(dtype, blocks):
    q, k, v = draw(dtype, (2, 3, 8, 4, 16), (3, 2, 600, 16), (2, 1, 2, 600, 16), seed=15)
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    names = []
    emulator = Emulator(blocks, runs=lambda special: names.append(special.kernel) or True)
    out, lse = np.full(q.shape, np.nan, dtype), np.full(q.shape[:-1], np.nan)
    lse = lse.astype(call.problem.accumulator)
    emulator.forward(call, out, lse)
    decode = "decode_sm80" if blocks.tensor and dtype in (F16, BF16) else "decode_simt"
    assert set(names) == {decode, "decode_combine"}
    precision = Precision.of(dtype, blocks.tensor and dtype in (F16, BF16))
    bound = forward_bound(q, k, v, precision=precision, block_kv=64, mask=masks.causal())
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1


def test_host_memory_needs_no_workspace():
    q, k, v = draw(F32, (2, 4, 1, 16), (7, 2, 16, 16), (7, 2, 16, 16))
    table = np.zeros((2, 3), np.int64)
    assert workspace_size_cached(q, k, v, table=table) == 0


@of_one("simt")
def test_a_cache_without_pages_holds_nothing(dtype, blocks, monkeypatch):
    """Whatever lengths and tables of a device say."""
    q, k = draw(dtype, (2, 2, 1, 16), (0, 1, 16, 16))
    monkeypatch.setattr(cached, "readable", lambda value: None)
    out, lse = run(q, k, k, np.array([16, 3]), blocks, np.zeros((2, 1), np.int32))
    assert not out.any()
    assert np.all(lse == -np.inf)


def test_a_call_without_heads_needs_no_heads_for_its_workspace():
    q, k = draw(F32, (2, 0, 1, 16), (2, 0, 64, 16))
    assert route.of(cached.call(q, k, k, 64), target_of("sm_90")).scratch >= 0


def test_sizes_are_those_of_the_kernels():
    """What the host assumes of units is what the kernels choose them by."""
    text = (source.read("decode/tasks.cuh") + source.read("decode/workspace.cuh")).replace(",", ";")
    found = dict(re.findall(r"(?:constexpr int|;) (\w+) = (\d+)", text))
    for name in ("LEAF", "FILL", "FEW_WARPS", "MOST_UNITS", "LEVELS"):
        assert int(found[name]) == getattr(decode, name)
