"""Many heads that share compressed keys, by the kernel for warpgroups on the CPU."""

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
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.gpu import route, source
from cupyflash.gpu.kernels import decode, grid, registry, sm90_decode
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import cached
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
F16, BF16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
HOPPER = Blocks(hopper=True)
D, D_V, HEADS = 576, 512, 16
CAUSAL = {"mask": masks.causal()}


def draw(batch, heads, len_q, room, dtype=F16, heads_kv=1, seed=0):
    """Return queries, and keys whose first columns are the values."""
    rng = np.random.default_rng(seed)
    shapes = (batch, heads, len_q, D), (batch, heads_kv, room, D)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(q, k, lengths, table=None, offsets_q=None, emulator=None, workspace=None, **options):
    """Compute out and lse over a cache, into memory that holds NaN, by the kernel of this file."""
    call = cached.call(q, k, k[..., :D_V], lengths, table, offsets_q, Options(**options))
    out, lse = results(call)
    names = []
    emulator = emulator or Emulator(HOPPER, REVERSE)
    emulator = dataclasses.replace(
        emulator, runs=lambda special: names.append(special.kernel) or True
    )
    emulator.forward(call, out, lse, workspace=workspace)
    assert set(names) == {"decode_sm90", "decode_combine"}
    return out, lse


def within_the_bound(q, k, lengths, out, lse, entry_options=lambda b: {}):
    """Hold every entry to the bound of a call over the keys that it holds."""
    for b, length in enumerate(lengths):
        keys = k[b : b + 1, :, :length]
        bound = forward_bound(
            q[b : b + 1],
            keys,
            keys[..., :D_V],
            precision=Precision.of(q.dtype, True),
            block_kv=64,
            **entry_options(b),
        )
        assert rho(out[b : b + 1], *bound.out).value <= 1
        assert rho(lse[b : b + 1], *bound.lse).value <= 1


def same(got, want):
    return same_bits(got[0], want[0]) and same_bits(got[1], want[1])


@mostly_thorough(
    ("dtype", "lengths"),
    [(F16, (65, 600)), (BF16, (65, 511)), (F16, (0, 1)), (F16, (63, 64)), (BF16, (512, 513))],
    quick=[(F16, (65, 600))],
    why="the other type and other edges of leaves and nodes",
    ids=str,
)
def test_every_entry_is_attention_over_what_it_holds(dtype, lengths):
    q, k = draw(2, HEADS, 1, 640, dtype)
    got = run(q, hidden(k, lengths), np.array(lengths))
    within_the_bound(q, k, lengths, *got)


OPTIONS = {
    "causal": CAUSAL,
    "window": {"mask": masks.window(40, 0)},
    "prefix of a window": {"mask": masks.window(3, 0) | masks.prefix(70)},
    "not a range": {"mask": masks.mask(lambda b, h, i, j: (i + j + h) % 3 != 0)},
    "hides a head": {"mask": masks.mask(lambda b, h, i, j: h != 1)},
    "softcap": {"score_mod": scores.softcap(2.0)},
    "alibi": {"score_mod": scores.alibi(np.linspace(0.1, 1, HEADS)), **CAUSAL},
    "hides by its score": {
        "score_mod": scores.score(lambda s, b, h, i, j: s - (j % 2) * 1e30 * 1e30)
    },
    "negative scale": {"scale": -0.03},
    "scale 0": {"scale": 0.0},
    "sink": {"sink": np.append(np.linspace(-1, 3, HEADS - 1), -np.inf).astype(np.float32)},
}


@mostly_thorough("name", OPTIONS, quick=["alibi"], why="other masks and scores, a build each")
def test_masks_and_scores(name):
    lengths, options = (600, 70), OPTIONS[name]
    q, k = draw(2, HEADS, 3, 640, seed=1)
    got = run(q, hidden(k, lengths), np.array(lengths), **options)
    within_the_bound(q, k, lengths, *got, lambda b: options)


@pytest.mark.thorough("arrays are read as by the other kernels")
def test_a_bias_and_a_mask_as_arrays():
    lengths = (600, 70)
    q, k = draw(2, HEADS, 2, 640, BF16, seed=2)
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((2, 1, 2, 640)).astype(np.float32)
    mask = rng.random((2, HEADS, 1, 640)) < 0.5
    got = run(q, k, np.array(lengths), bias=bias, mask=mask)

    def of_entry(b):
        own = slice(b, b + 1), Ellipsis, slice(lengths[b])
        return {"bias": bias[own], "mask": mask[own]}

    within_the_bound(q, k, lengths, *got, of_entry)


@mostly_thorough("junk", [np.inf, np.nan], quick=[np.inf], why="other numbers, the same code")
def test_what_is_masked_may_hold_anything(junk):
    """Also where one query sees what another one does not."""
    q, k = draw(1, HEADS, 2, 200, seed=4)
    mask = np.ones((2, 200), bool)
    mask[:, 50:90] = mask[0, 199] = False
    want = run(q, k, 200, mask=mask)
    k[..., 50:90, :] = junk
    assert same(run(q, k, 200, mask=mask), want)
    k[..., 199, 3], k[..., 199, 300] = junk, -junk  # in the columns of either consumer
    out, lse = run(q, k, 200, mask=mask)
    assert same((out[:, :, :1], lse[:, :, :1]), (want[0][:, :, :1], want[1][:, :, :1]))
    assert np.isnan(out[:, :, 1].astype(np.float32)).any()


@mostly_thorough("page", [1, 3, 16, 64, 100], quick=[3], why="other sizes of pages")
def test_pages_change_no_bit(page):
    lengths, rng = np.array([600, 131]), np.random.default_rng(page)
    q, k = draw(2, HEADS, 2, 640, seed=5)
    k = hidden(k, lengths)
    want = run(q, k, lengths, **CAUSAL)
    pages, table = in_pages(k, page, rng)
    assert same(run(q, pages, lengths, table, **CAUSAL), want)
    wide = lengths.astype(np.int32), table.astype(np.int64)
    assert same(run(q, pages, *wide, **CAUSAL), want)


@mostly_thorough("multiprocessors", [1, 3, 40], quick=[3], why="grids of other sizes")
@mostly_thorough(
    "schedule", [FORWARD, randomly(7)], quick=[randomly(7)], why="one more schedule",
    ids=["forward", "random"],
)  # fmt: skip
def test_no_bit_depends_on_the_grid_or_the_schedule(multiprocessors, schedule):
    lengths = np.array([1500, 10, 700])
    q, k = draw(3, HEADS, 1, 1500, seed=6)
    want = run(q, k, lengths)
    blocks = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    got = run(q, k, lengths, emulator=Emulator(blocks, schedule))
    assert same(got, want)
    within_the_bound(q, k, lengths, *got)


@mostly_thorough(
    ("parts", "options"),
    [(2, {}), (4, {}), (4, CAUSAL), (2, {"score_mod": scores.softcap(2.0)})],
    quick=[(4, CAUSAL)],
    why="other parts; no mask, and scores",
    ids=str,
)
def test_blocks_that_share_the_columns_of_nodes(parts, options):
    """Each computes all scores; one block, which is in no whole team, has nothing to do."""
    lengths = np.array([600, 10])
    q, k = draw(2, 17, 1, 600, seed=25)
    k[:, :, 70, 300] = k[:, :, 590, 500] = np.inf  # in one part each
    call = cached.call(q, k, k[..., :D_V], lengths, None, None, Options(**options))
    got = []
    for count in (1, 4 * parts + 1):  # two nodes of each entry
        emulator = Emulator(dataclasses.replace(HOPPER, multiprocessors=count), randomly(8))
        tiles = registry.select("decode", Request.of(call, emulator.blocks.device)).tiles
        assert tiles.v_parts == (1 if count == 1 else parts)
        got.append(run(q, hidden(k, lengths), lengths, emulator=emulator, **options))
    assert same(*got)


def test_blocks_take_units_of_many_tasks_in_turns():
    """Their tasks are more than the blocks, and change with every unit."""
    find = "begin_found(schedule_->find(unit_));"
    assert source.read("decode/cursor.cuh").count(find) == 1

    def without(asked):
        return build.read(asked).replace(find, "")

    lengths = np.array([700, 10, 1030])
    q, k = draw(3, 96, 1, 1030, seed=21)  # two tasks of each entry
    want = run(q, hidden(k, lengths), lengths, emulator=Emulator(HOPPER, FORWARD))
    within_the_bound(q, k, lengths, *want)
    two = dataclasses.replace(HOPPER, multiprocessors=2)
    assert same(run(q, k, lengths, emulator=Emulator(two, randomly(3))), want)
    try:
        found = run(q, k, lengths, emulator=Emulator(two, REVERSE, read=without))
    except Fault:  # or what one block writes another one reads too early
        return
    assert not same(found, want)


def test_no_bit_depends_on_the_batch_or_the_capacity():
    lengths = np.array([900, 10])
    q, k = draw(2, HEADS, 1, 900, seed=7)
    out, lse = run(q, k, lengths)
    for b, capacity in itertools.product(range(2), (None, 900)):
        own = q[b : b + 1], k[b : b + 1, :, : capacity or lengths[b]]
        assert same(run(*own, int(lengths[b])), (out[b : b + 1], lse[b : b + 1]))


@pytest.mark.thorough("drafts are quick")
def test_no_bit_depends_on_leaves_that_others_see():
    """Each of the queries sees leaves that no other one does, and so do the tiles of a block."""
    q, k = draw(1, HEADS, 3, 520, seed=20)
    leaf = masks.mask(lambda b, h, i, j: (j // 64) % 3 != i % 3)
    out, lse = run(q, k, 520, mask=leaf)
    for n in range(3):
        own = masks.mask(lambda b, h, i, j, n=n: (j // 64) % 3 != n)
        got = run(q[:, :, n : n + 1], k, 520, mask=own)
        assert same(got, (out[:, :, n : n + 1], lse[:, :, n : n + 1]))


def test_drafts_are_single_steps():
    """Verifying n tokens in one call gives the bits of n calls."""
    end = 515
    q, k = draw(1, HEADS, 6, 640, seed=8)
    out, lse = run(q, k, end, **CAUSAL)
    for n in range(6):
        step = run(q[:, :, n : n + 1], k, end - 5 + n, **CAUSAL)
        assert same(step, (out[:, :, n : n + 1], lse[:, :, n : n + 1]))


@pytest.mark.thorough("many keys; smaller nodes are quick")
def test_large_nodes():
    """With one block, units are nodes of 4096 keys; the bits stay."""
    lengths = np.array([4096, 8100])
    q, k = draw(2, HEADS, 1, 8192, seed=9)
    one, many = (Emulator(dataclasses.replace(HOPPER, multiprocessors=n), REVERSE) for n in (1, 60))
    got = run(q, k, lengths, emulator=one)
    assert same(got, run(q, k, lengths, emulator=many))
    within_the_bound(q, k, lengths, *got)


@pytest.mark.thorough("packed queries are read as by the other kernels")
def test_packed_queries():
    counts, lengths = [3, 0, 5, 1], np.array([600, 300, 70, 5])
    offsets = np.cumsum([0, *counts])
    q, k = draw(4, HEADS, 9, 640, seed=10)
    q = np.ascontiguousarray(q[0])
    out, lse = run(q, k, lengths, offsets_q=offsets, **CAUSAL)
    for b, (first, last) in enumerate(itertools.pairwise(offsets)):
        if first == last:
            continue
        want = run(q[None, :, first:last], k[b : b + 1], int(lengths[b]), **CAUSAL)
        assert same((out[:, first:last], lse[:, first:last]), (want[0][0], want[1][0]))


@mostly_thorough(
    ("heads", "heads_kv"),
    [(128, 1), (64, 1), (48, 2), (96, 1), (34, 2)],
    quick=[(96, 1)],
    why="groups of other sizes",
)
def test_groups_of_any_size(heads, heads_kv):
    q, k = draw(1, heads, 2, 130, heads_kv=heads_kv, seed=heads)
    got = run(q, k, 130, **CAUSAL)
    within_the_bound(q, k, [130], *got, lambda b: CAUSAL)


@pytest.mark.thorough("the emulator is slow on strided rows")
@pytest.mark.parametrize("step", [1, 2])
def test_any_strides(step):
    """Rows that do not begin at multiples of 16 bytes, and columns that are not adjacent."""
    q, k = draw(1, 40, 3, 200, seed=12)
    wide = np.full((1, 200, 1, D * step + 3), np.nan, F16)
    views = wide[..., 1 : 1 + D * step : step].swapaxes(1, 2)
    views[...] = k
    want = run(q, k, 190)
    assert same(run(np.asfortranarray(q), views, 190), want)


@pytest.mark.thorough("a quick test of the other kernels shows it")
def test_lengths_and_tables_of_a_device_are_held_in_range(monkeypatch):
    """They are not read before the kernel runs, and lead nowhere outside of the cache."""
    q, k = draw(3, HEADS, 1, 16, seed=13)
    k = np.concatenate([k, k[:2] + 1])
    table = np.array([[0, 1, 2], [-1, 2**31 - 1, 4], [-5, 9, 9]], np.int32)
    monkeypatch.setattr(cached, "readable", lambda value: None)
    got = run(q, k, np.array([48, 2**40, -3]), table)
    monkeypatch.undo()
    want = run(q, k, np.array([48, 48, 0]), np.clip(table, 0, 4))
    assert same(got, want)


@pytest.mark.thorough("a quick test of the other kernels shows it")
def test_a_workspace_may_hold_anything_and_serves_again():
    q, k = draw(2, HEADS, 1, 1100, seed=14)
    want = run(q, k, 1100)
    rng = np.random.default_rng(0)
    workspace = rng.integers(0, 256, 1 << 24, np.uint8)
    for schedule in (FORWARD, randomly(3)):
        assert same(run(q, k, 1100, emulator=Emulator(HOPPER, schedule), workspace=workspace), want)


# -- which calls it serves ------------------------------------------------------------------------


def chosen(q, k, v, **options):
    call = cached.call(q, k, v, 64, None, None, Options(**options))
    return registry.select("decode", Request.of(call, target_of("sm_90")))


def test_values_that_are_no_columns_of_the_keys_go_to_the_portable_kernel():
    q, k = draw(2, HEADS, 1, 64)
    assert chosen(q, k, k[..., :D_V]).spec is sm90_decode.DECODE
    for v in (k[..., 64:], k[..., :D_V].copy(), k[:, :, ::-1, :D_V]):
        choice = chosen(q, k, v)
        assert choice.spec.name == "decode_simt"
        reasons = {spec.name: why for spec, why in choice.passed_over}
        assert reasons["decode_sm90"] == "v is not k[..., :512], a view of the keys"


def test_it_is_chosen_by_heads_and_not_by_queries():
    """Or as many drafts would not have the bits of single steps."""
    for len_q in (1, 40):
        q, k = draw(1, 15, len_q, 64)
        choice = chosen(q, k, k[..., :D_V])
        assert choice.spec.name == "decode_simt"
        assert choice.passed_over[-1] == (
            sm90_decode.DECODE, "it is for 16 heads or more that share keys",
        )  # fmt: skip
        q, k = draw(1, 16, len_q, 64)
        assert chosen(q, k, k[..., :D_V]).spec is sm90_decode.DECODE


def test_the_workspace_has_room_for_every_unit():
    """Nodes of 512 keys up to MOST_OF_BLOCK for each block, and nodes of 4096 without limit."""
    text = source.read("decode/tasks.cuh").replace(",", ";")
    found = dict(re.findall(r"(?:constexpr int|;) (\w+) = (\d+)", text))
    assert int(found["MOST_OF_BLOCK"]) == decode.MOST_OF_BLOCK
    target = dataclasses.replace(target_of("sm_90"), multiprocessors=10)
    tasks = 2 * 2  # entries, and 64 heads each
    for capacity, units in (
        (1000, tasks * 2),
        (1 << 16, 10 * decode.MOST_OF_BLOCK),
        (1 << 20, tasks * 256),
    ):
        q, k = np.zeros((2, 128, 1, D), F16), np.broadcast_to(F16.type(0), (2, 1, capacity, D))
        call = cached.call(q, k, k[..., :D_V], 0, None, None, Options())
        row = 4 * D_V + 64
        assert route.of(call, target).scratch == 128 + units * 64 * row  # records of 16 bytes
    text = source.read("decode/workspace.cuh")
    for constant in (
        f"PIECE = {decode.COLUMNS}",
        f"ROWS_OF_PIECES = OF_BLOCKS ? {grid.ROWS_OF_PIECES} : 1",
        f"RECORDS = OF_BLOCKS ? {decode.LINE} / sizeof(TaskRecord) : 1",
    ):
        assert constant in text


@pytest.mark.parametrize("multiprocessors", [2, 3, 20, 40])
def test_rows_of_slots_that_begin_within_pieces(multiprocessors):
    """Tasks of 17 rows: the pieces of 8 rows have rows of two slots, and the last ones no others.

    Nodes are joined from a workspace of as many bytes as asked for: by threads that have four
    vectors of a row, two and one, and in shared memory.
    """
    lengths = np.array([5200, 700])
    q, k = draw(2, 17, 1, 5200, seed=22)
    blocks = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    got = run(q, hidden(k, lengths), lengths, emulator=Emulator(blocks, randomly(5)))
    within_the_bound(q, k, lengths, *got)
    own = run(q[1:], k[1:, :, :700], 700)
    assert same((got[0][1:], got[1][1:]), own)


# -- faults ---------------------------------------------------------------------------------------

KERNEL, PRODUCER = "sm90/decode_sm90.cu", "sm90/decode_producer.cuh"
OWN_BARRIER = "  ptx::named_barrier_sync(barrier, warpgroup::WARPGROUP_SIZE);  // the values, "
FAULTS = {
    "keys that wgmma may not see": (PRODUCER, "      ptx::fence_proxy_async();\n", ""),
    "keys that have not come": (PRODUCER, "      ptx::cp_async_wait_all();\n", ""),
    "queries that are still multiplied": (
        PRODUCER, "if (n > 0) shared.wait_scored(n - 1);", "",
    ),
    "a half that is still read": (PRODUCER, "      shared.wait_half(n, 0);\n", ""),
    "the other half that is still read": (PRODUCER, "      shared.wait_half(n, 1);\n", ""),
    "keys that are not waited for": (KERNEL, "    shared_.pipeline.wait_full(n);\n", ""),
    "weights that are not waited for": (
        KERNEL, "named_barrier_sync(WEIGHTS + (1 - INDEX), BOTH_CONSUMERS)",
        "named_barrier_arrive(WEIGHTS + (1 - INDEX), BOTH_CONSUMERS)",
    ),
    "weights that take the place of others": (
        KERNEL, "    ptx::named_barrier_sync(ALONE, BOTH_CONSUMERS);\n", "",
    ),
    "weights in keys that are still multiplied": (
        KERNEL, "    ptx::wgmma_wait<PENDING>();\n    ptx::fence_accumulator(s_);\n", "",
    ),
    "values that are cleared while others read them": (
        KERNEL, f"{OWN_BARRIER}read by all threads\n", "",
    ),
    "values that are multiplied while others clear them": (
        KERNEL, f"{OWN_BARRIER}made finite\n", "",
    ),
    "cleared values that wgmma may not see": (
        KERNEL, f"  ptx::fence_proxy_async();\n{OWN_BARRIER}made finite\n",
        f"{OWN_BARRIER}made finite\n",
    ),
}  # fmt: skip


@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_reported(name):
    path, before, after = FAULTS[name]
    assert source.read(path).count(before) == 1

    def read(asked):
        text = build.read(asked)
        return text.replace(before, after) if asked == path else text

    q, k = draw(2, 96, 1, 260, seed=15)  # two tasks of each entry
    k[:, :, 70] = np.nan
    mask = np.ones((1, 260), bool)
    mask[:, 70] = False
    emulator = Emulator(dataclasses.replace(HOPPER, multiprocessors=1), REVERSE, read=read)
    with pytest.raises(Fault):
        run(q, k, np.array([260, 200]), emulator=emulator, mask=mask)


@pytest.mark.thorough("a mutant; that the emulator reports faults is quick")
def test_a_part_of_the_keys_that_has_not_come_is_reported():
    """By a schedule in which the first part lands before another one: few do that."""
    wait = "      shared_.wait_part(n, part);\n"
    assert source.read(KERNEL).count(wait) == 1

    def read(asked):
        return build.read(asked).replace(wait, f"      if (part == 0) {wait.strip()}\n")

    q, k = draw(1, HEADS, 1, 260, seed=15)
    one = dataclasses.replace(HOPPER, multiprocessors=1)

    def run_in_many_ways():
        for seed in range(40):
            run(q, k, 260, emulator=Emulator(one, randomly(seed), read=read))

    with pytest.raises(Fault, match="has not finished"):
        run_in_many_ways()


WRONG = {
    "m of another tile": (KERNEL, "if (tile.begins()) {", "if (tile.begins() || n % 2 == 0) {"),
    "no rescaling": (KERNEL, "      fragment_softmax::scale_rows(o_, alpha_);\n", ""),
    "the other half of the values": (KERNEL, "+ first_slab(INDEX)", "+ first_slab(1 - INDEX)"),
    "units that do not open": (KERNEL, "    if (opens) {\n", "    if (true) {\n"),
    "o that is not cleared": (KERNEL, "bool adds = !tile.begins();", "bool adds = true;"),
    "leaves in the wrong node": (PRODUCER, "now.shares_node(next, 1)", "now.shares_node(next, 2)"),
    "rows in the place of others": (PRODUCER, "piece ^ row % 8", "piece ^ row % 4"),
    "keys beyond the length": (PRODUCER, "key < leaf.keys", "key <= leaf.keys"),
}


@pytest.mark.thorough("mutants; the bound and the bits have quick tests")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_noticed(name):
    path, before, after = WRONG[name]
    assert source.read(path).count(before) == 1

    def read(asked):
        text = build.read(asked)
        return text.replace(before, after) if asked == path else text

    # One unit of level 2, whose second node has larger scores in its second leaf.
    length = np.array([4090])
    q, k = draw(1, HEADS, 1, 4096, seed=16)
    k[:, :, 576:640] *= 3
    k[:, :, 4090:] = np.nan
    one = Emulator(dataclasses.replace(HOPPER, multiprocessors=1), REVERSE)
    want = run(q, k, length, emulator=one)
    within_the_bound(q, k, length, *want)
    try:
        got = run(q, k, length, emulator=dataclasses.replace(one, read=read))
    except Fault:
        return
    assert not same(got, want)
