"""The forward by warpgroups, on the CPU: pairs and tiles that take no part; who waits for whom."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from emulator import build
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits
from warpgroup_calls import (
    EACH_TYPE,
    TYPES,
    draw,
    emulated,
    run,
    tiles_to_visit,
    within_the_bound,
)

from cupyflash import masks, scores
from cupyflash.gpu import specialisation
from cupyflash.gpu.kernels import grid, sm90

MASKS = {
    "causal": masks.causal(),
    "first keys": masks.causal(offset=-130),  # and queries that see none
    "window": masks.window(120, 20),
    "documents": masks.segments(np.arange(400) // 110),
    "chosen": masks.chosen([[1, 2], [-1, 0], [2, 2], [9, 0]], (128, 64)) & masks.causal(),
    "no range": masks.mask(lambda b, h, i, j: (i + j) % 3 > 0),
    "both ends": masks.mask(lambda b, h, i, j: (j < 3) | (j > 280 + i)),
    "no key": masks.mask(lambda b, h, i, j: j < 0),
    "every key": masks.causal(400),
}


@emulated
@mostly_thorough(
    "name",
    MASKS,
    quick=("chosen", "documents", "no range"),
    why="more masks; a window is quick below, and an entry without keys",
)
def test_masks(monkeypatch, name):
    rows = ["masks", "masks, smaller"][list(MASKS).index(name) % 2]
    monkeypatch.setattr(sm90, "register_class", lambda call: rows)
    dtype, mask = TYPES[len(name) % 2], MASKS[name]
    q, k, v = draw(dtype, (1, 2, 400, 64), *[(1, 1, 400, 64)] * 2)
    sink = np.array([-np.inf, 0.5], np.float32)
    out, lse, visited = run(q, k, v, randomly(1), mask=mask, sink=sink)
    within_the_bound(q, k, v, out, lse, mask=mask, sink=sink)
    assert visited == tiles_to_visit(q, k, v, sm90.FORWARD_TILES[rows][64], mask)


@pytest.mark.thorough("masks are quick in the tiles of other heads")
@emulated
@pytest.mark.parametrize(
    ("sizes", "name"),
    [((40, 72), "causal"), ((128, 128), "no range"), ((192, 136), "causal"), ((64, 256), "causal")],
    ids=str,
)
def test_masks_of_other_heads(sizes, name):
    d, d_v = sizes
    q, k, v = draw(TYPES[0], (2, 140, d), (2, 300, d), (2, 300, d_v))
    out, lse, visited = run(q, k, v, mask=MASKS[name])
    within_the_bound(q, k, v, out, lse, mask=MASKS[name])
    block = sm90.fit_forward(d, d_v, "masks")
    assert visited == tiles_to_visit(q, k, v, (block.block_q, block.block_kv), MASKS[name])


@emulated
@pytest.mark.parametrize("rows", [192 + 1, 192 + 100, 2 * 192 - 1, 2 * 192])
def test_tiles_end_with_the_last_query_under_a_causal_mask(monkeypatch, rows):
    monkeypatch.setattr(sm90, "FEW_QUERIES", 0)
    # The first query sees 3 tiles of 128 keys, and the second one another tile.
    q, k, v = draw(TYPES[1], (1, rows, 64), *[(1, rows + 383, 64)] * 2)
    out, lse, visited = run(q, k, v, multiprocessors=1, mask=masks.causal())
    within_the_bound(q, k, v, out, lse, mask=masks.causal())
    first = -(-(rows - 192) // 16) * 16
    assert visited == -(-(rows + 383) // 128) + -(-(first + 383) // 128)
    assert visited == tiles_to_visit(q, k, v, (192, 128), masks.causal())


@emulated
def test_lengths_of_a_batch_one_of_them_zero():
    lengths = masks.lengths(np.array([0, 1, 128, 129, 300]))
    q, k, v = draw(TYPES[1], (5, 1, 20, 64), *[(1, 1, 300, 64)] * 2)
    out, lse, visited = run(q, k, v, mask=lengths)
    within_the_bound(q, k, v, out, lse, mask=lengths)
    assert visited == 0 + 1 + 1 + 2 + 3


@pytest.mark.thorough("tiles that lie far apart are quick")
@emulated
@pytest.mark.parametrize("name", ["causal", "both ends", "window"])
def test_neighbouring_tiles_share_a_class_where_there_are_many(monkeypatch, name):
    groups, few = sm90.TILE_GROUPS, 32

    def read(path):
        return build.read(path).replace(f"GROUPS = {groups};", f"GROUPS = {few};")

    less = sm90.WORK_STAGES * (groups - few) // 4
    monkeypatch.setattr(sm90, "SCHEDULER_BYTES", sm90.SCHEDULER_BYTES - less)
    length = 70 * 128 + 5  # a class for every 4 tiles
    (q,) = draw(TYPES[0], (1, 30, 64))
    k, v = draw(TYPES[0], *[(1, length, 64)] * 2, seed=1)
    mask = {
        "causal": masks.causal(2000),
        "both ends": masks.mask(lambda b, h, i, j: (j < 3) | (j > 7200 + i)),
        "window": masks.window(900, 0, offset=6000),
    }[name]
    out, lse, visited = run(q, k, v, read=read, mask=mask)
    within_the_bound(q, k, v, out, lse, mask=mask)
    # 4 tiles are 512 keys: 0 to 2030; 0 and from 7201 on; 5100 to 6030.
    assert visited == {"causal": 16, "both ends": 4 + 15, "window": 12}[name]


@emulated
def test_tiles_that_lie_far_apart():
    (q,) = draw(TYPES[0], (1, 30, 64))
    k, v = draw(TYPES[0], *[(1, 80 * 128 - 3, 64)] * 2, seed=1)
    mask = masks.mask(lambda b, h, i, j: (j % 2560 == 300) | (j == 10235) | (j == 8191))
    out, lse, visited = run(q, k, v, mask=mask)
    within_the_bound(q, k, v, out, lse, mask=mask)
    assert visited == attend(q, k, v, tiles=(192, 128), mask=mask).visited == 6


# -- keys that take no part -----------------------------------------------------------------------


@emulated
@mostly_thorough(
    ("value", "d"),
    [(np.nan, 64), (-np.inf, 64), (np.inf, 256)],
    quick=lambda case: case[1] == 64,
    why="another tile of the same code",
    ids=str,
)
def test_a_value_reaches_only_the_rows_that_see_it(value, d):
    dtype = TYPES[d // 256]
    q, k, v = draw(dtype, *[(1, 300, d)] * 3)
    options = {"mask": masks.causal()}
    plain, lse, _ = run(q, k, v, **options)
    v[0, 150, d - 5] = value
    other, other_lse, _ = run(q, k, v, **options)
    assert same_bits(lse, other_lse)
    elsewhere = np.ones(plain.shape, bool)
    elsewhere[0, 150:, d - 5] = False
    assert same_bits(plain[elsewhere], other[elsewhere])
    seen = other[0, 150:, d - 5].astype(np.float32)
    assert (np.isnan(seen) if np.isnan(value) else seen == value).all()


@emulated
@EACH_TYPE
def test_a_key_or_a_query_reaches_only_its_rows(dtype):
    q, k, v = draw(dtype, *[(1, 300, 64)] * 3)
    plain, lse, _ = run(q, k, v, mask=masks.causal())
    k[0, 150, 3], q[0, 7, 2] = np.nan, np.inf
    other, other_lse, _ = run(q, k, v, mask=masks.causal())
    rest = np.arange(150) != 7
    assert same_bits(plain[:, :150][:, rest], other[:, :150][:, rest])
    assert same_bits(lse[:, :150][:, rest], other_lse[:, :150][:, rest])
    assert np.isnan(other[:, 150:].astype(np.float32)).all()


@pytest.mark.thorough("calls without a mask are quick")
@emulated
def test_no_bit_of_a_masked_call_depends_on_the_schedule():
    q, k, v = draw(TYPES[0], (2, 300, 64), *[(1, 520, 64)] * 2)
    v[0, ::50] = np.inf
    first, first_lse, _ = run(q, k, v, FORWARD, mask=MASKS["window"])
    for schedule in (REVERSE, randomly(1), randomly(2)):
        out, lse, _ = run(q, k, v, schedule, mask=MASKS["window"])
        assert same_bits(first, out)
        assert same_bits(first_lse, lse)


# -- packed sequences -----------------------------------------------------------------------------

ENDS_Q, ENDS_K = np.array([0, 1, 1, 200, 340, 420]), np.array([0, 129, 130, 130, 390, 518])
PACKED = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(40, 3), "dropout": 0.2, "seed": 5, "scale": -0.1},
    "alibi": {"score_mod": scores.alibi(np.array([0.5, 0.03], np.float32))},
}


@emulated
@mostly_thorough(
    ("name", "d"),
    [("plain", 64), ("causal", 136), ("window", 136), ("alibi", 64)],
    quick=[("window", 136)],
    why="options alone that the window has together",
)
def test_packed_sequences(name, d):
    dtype, options = TYPES[d // 136], PACKED[name]
    q, k, v = draw(dtype, (2, 420, d), *[(1, 518, d)] * 2)
    offsets = ENDS_Q, ENDS_K
    out, lse, _ = run(q, k, v, randomly(1), offsets=offsets, **options)
    within_the_bound(q, k, v, out, lse, offsets, **options)


@pytest.mark.thorough("sequences are held to their own bounds in a quick test")
@emulated
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_packed_neighbours_change_no_bit(name):
    dtype = TYPES[len(name) % 2]
    q, k, v = draw(dtype, (2, 420, 64), *[(1, 518, 64)] * 2)
    offsets, options = (ENDS_Q, ENDS_K), PACKED[name]
    plain, lse, _ = run(q, k, v, offsets=offsets, **options)
    own_q, own_k = slice(*ENDS_Q[3:5]), slice(*ENDS_K[3:5])
    for x, own in ((q, own_q), (k, own_k), (v, own_k)):
        others = np.ones(x.shape[1], bool)
        others[own] = False
        x[:, others] = np.array([np.nan, np.inf, -np.inf], dtype)[np.arange(others.sum()) % 3][
            :, None
        ]
    other, other_lse, _ = run(q, k, v, offsets=offsets, **options)
    assert same_bits(plain[:, own_q], other[:, own_q])
    assert same_bits(lse[:, own_q], other_lse[:, own_q])
    # Alone, it has the same bits.
    alone = (np.array([0, x.stop - x.start]) for x in (own_q, own_k))
    only, only_lse, _ = run(q[:, own_q], k[:, own_k], v[:, own_k], offsets=alone, **options)
    assert same_bits(only, other[:, own_q])
    assert same_bits(only_lse, other_lse[:, own_q])


@emulated
@pytest.mark.parametrize("last", [4224, 5000], ids=["long", "longer"])
@pytest.mark.thorough("tiles in masses; those that lie far apart are quick")
def test_full_tiles_in_a_row(last):
    # More of them than a word has bits, with EMPTY ones between, or a PARTIAL one at an edge.
    q, k, v = draw(TYPES[0], (1, 70, 8), *[(1, 5000, 8)] * 2)
    seen = [
        masks.causal(last - 5000),
        masks.mask(lambda b, h, i, j: (j < 512) | (j >= 640)) & masks.causal(last - 5000),
        masks.mask(lambda b, h, i, j: (j >= 384) & ((j < 4096) | (j >= 4360))),
        masks.mask(lambda b, h, i, j: j >= 4864),
    ]
    for mask in seen:
        out, lse, visited = run(q, k, v, randomly(1), mask=mask)
        within_the_bound(q, k, v, out, lse, mask=mask)
        tiles = mask.to_array(1, 1, 70, 5000)[0, 0].any(axis=0)
        assert visited == tiles[:4992].reshape(39, 128).any(axis=1).sum() + tiles[4992:].any()


@pytest.mark.thorough("another grid of packed sequences, which are quick")
@emulated
def test_packed_sequences_may_be_dealt_out_too(monkeypatch):
    # Some of a packed array's blocks have no queries.
    q, k, v = draw(TYPES[0], (2, 420, 64), *[(1, 518, 64)] * 2)
    options = {"offsets": (ENDS_Q, ENDS_K), "mask": masks.causal()}
    each = run(q, k, v, **options)
    by_queries = grid.by_queries
    monkeypatch.setattr(grid, "by_queries", lambda *x: by_queries(*x)._replace(size=2))
    dealt = run(q, k, v, **options)
    assert same_bits(each[0], dealt[0])
    assert same_bits(each[1], dealt[1])
    assert each[2] == dealt[2]


# -- the kernel's own waits -----------------------------------------------------------------------

KERNEL, PRODUCER, BLOCK, CHECK, ROWS = (
    "sm90/forward_sm90.cu", "sm90/forward_producer.cuh", "sm90/forward_block.cuh",
    "sm90/finite_check.cuh", "sm90/warpgroup_rows.cuh",
)  # fmt: skip
STORES = re.compile(r"void tma_store_(?:wait|rows)\(.*?\n}\n", re.DOTALL)  # of ROWS, what is called
# What orders accesses in calls without pages; test_forward_cached.py has what pages need. The
# ping-pong barriers only say who is first.
ORDERS = re.compile(
    r"\b[\w.]+\.wait_(?:full|empty)\([^;]*;|"
    r"warpgroup::(?:mbarrier_wait|arrive_warp|arrive_warpgroup)\([^;]*;|"
    r"ptx::(?:wgmma_wait<\d>|wgmma_fence|wgmma_commit|fence_mbarrier_init|mbarrier_arrive|"
    r"mbarrier_arrive_expect_tx|fence_proxy_async|tma_store_commit|tma_store_wait_read)"
    r"\([^;]*;(?!  // again)|"
    r"ptx::named_barrier_sync\(ALL[^;]*;|(?<!PAGED\) )__sync(?:threads|warp)\(\);"
)


def statements(name):
    """Return what orders accesses in a file, as far as the kernel runs it."""
    text = build.read(name)
    if name == ROWS:
        text = "".join(STORES.findall(text))
    return ORDERS.findall(text)


# The number of the statement that is missing, which is no memory of the kernel's.
MISSING = """
static unsigned long long missing;
__attribute__((noinline, no_sanitize("thread"))) void miss(unsigned long long n) { missing = n; }
__attribute__((noinline, no_sanitize("thread"))) bool has(unsigned long long n) {
  return missing != n;
}
"""
FILES = (KERNEL, PRODUCER, BLOCK, CHECK, ROWS)
COUNT = sum(len(statements(name)) for name in FILES)


def each_may_be_missing(name):
    """Return a file with statement n of the kernel's passed over where the seed is n."""
    text = build.read(name)
    if name == "common/params.cuh":  # which all others include
        return text + MISSING
    if name not in FILES:
        return text
    before = FILES[: FILES.index(name)]
    numbers = itertools.count(sum(len(statements(each)) for each in before))

    def may_be_missing(match):
        return f"if (has({next(numbers)})) {match[0]}"

    if name == ROWS:
        return STORES.sub(lambda match: ORDERS.sub(may_be_missing, match[0]), text)
    text = ORDERS.sub(may_be_missing, text)
    begin = "extern __shared__ Aligned shared_smem[];"
    assert (begin in text) == (name == KERNEL)
    return text.replace(begin, f"{begin}\nmiss(p.seed);")


def run_often(missing):
    # Work tiles of 8 tiles of keys, two of none, of 2 and 1, of none, and four of 1; of d = 64 with
    # more stages.
    lengths = masks.lengths(np.array([900, 0, 0, 140, 1, 0, 1, 1, 1, 1]))
    options = {"mask": masks.causal(offset=830) & lengths, "scale": -0.1, "seed": missing}
    for d in (64, 72):
        q, k, v = draw(TYPES[0], (10, 1, 70, d), *[(1, 900, d)] * 2)
        v[0, 50::40] = np.nan
        for schedule in (FORWARD, REVERSE, *map(randomly, range(4))):
            run(q, k, v, schedule, read=each_may_be_missing, multiprocessors=1, **options)
    # Keys and values of one tile.
    q, k, v = draw(TYPES[0], (24, 1, 70, 64), *[(24, 1, 77, 64)] * 2)
    one_tile = {"warpgroups": (64, 80, 3), "multiprocessors": 1, "seed": missing}
    for schedule in (FORWARD, REVERSE, *map(randomly, range(4))):
        run(q, k, v, schedule, read=each_may_be_missing, **one_tile)


@emulated
@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_nothing_that_orders_may_be_missing(number):
    with pytest.raises(Fault):
        run_often(number)


@pytest.mark.thorough("a search; each missing barrier is quick elsewhere")
@emulated
def test_nothing_is_missing():
    run_often(COUNT)


@pytest.mark.thorough("a search over schedules")
@emulated
def test_lanes_meet_before_one_arrives_for_all(monkeypatch):
    def read(name):
        text = build.read(name)
        if name == "sm90/warpgroup.cuh":
            assert "__syncwarp();" in text
            text = text.replace("__syncwarp();", "")
        return text

    def results(read=build.read):
        options = {"mask": masks.causal(), "multiprocessors": 1, "read": read}
        return [
            x
            for dtype in (TYPES[0], np.dtype(np.float32))
            for x in run(*draw(dtype, *[(4, 200, 64)] * 3), randomly(2), **options)
        ]

    with pytest.raises(Fault):
        results(read)
    one = results()
    monkeypatch.setattr(specialisation, "EACH_LANE_ARRIVES", True)
    each = results(read)  # without a warp's barrier: it is for the one lane alone
    assert all(np.array_equal(x, y) for x, y in zip(one, each, strict=True))
