"""Lists of tiles on the emulator: kernels that read them visit the same tiles, bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks
from cupyflash.arrays.cuda_device import Target
from cupyflash.expr.interval import EMPTY, FULL, PARTIAL
from cupyflash.expr.tile_classes import tile_classes
from cupyflash.gpu import route, tile_lists
from cupyflash.gpu.kernels import simt, sm90
from cupyflash.pieces.parts import call_of, part, problem_of_heads
from cupyflash.pieces.schedule import Piece
from cupyflash.problem import validate
from cupyflash.problem.bound_exprs import trees
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, forward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))

HALF, BRAIN, SINGLE, DOUBLE = (
    np.dtype(x) for x in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
)
DEVICES = {
    "simt": (SINGLE, Blocks(tensor=False)),
    "simt, half": (HALF, Blocks(tensor=False)),
    "sm80": (BRAIN, Blocks()),
    "f64": (DOUBLE, Blocks()),
    "sm90": (HALF, Blocks(hopper=True)),
}
LENGTHS = 330, 300
DOCUMENTS = np.sort(np.random.default_rng(1).integers(0, 7, max(LENGTHS)))
INDICES = np.random.default_rng(2).integers(-2, 7, (2, 1, 11, 3))
MASKS = {
    "documents": masks.segments(DOCUMENTS[: LENGTHS[0]], DOCUMENTS[: LENGTHS[1]]) & masks.causal(),
    "chosen": masks.chosen(INDICES.reshape(1, 2, 11, 3), (30, 50)),  # for heads of keys
    "chosen, causal": masks.chosen(INDICES, (30, 50)) & masks.causal(),
    "by head": masks.mask(lambda b, h, i, j: (h // 2 == 0) | (abs(i - 2 * j) < 60)),
    "no key": masks.mask(lambda b, h, i, j: (j < 0) | (i * j < 0)),
}


@pytest.fixture
def listed(monkeypatch):
    """Say whether calls have lists, however short they are."""
    monkeypatch.setattr(tile_lists, "FEWEST_TILES", 1)
    return lambda how: monkeypatch.setattr(tile_lists, "SWITCH", how)


def draw(dtype, d=24):
    rng = np.random.default_rng(0)
    shapes = (2, 4, LENGTHS[0], d), (2, 2, LENGTHS[1], d), (2, 2, LENGTHS[1], d)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def forward(q, k, v, blocks, **options):
    call = validate.call(q, k, v, Options(**options))
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = np.full(q.shape[:-1], np.nan, np.float64 if q.dtype == DOUBLE else np.float32)
    visited = np.zeros(1, np.uint64)
    Emulator(blocks, REVERSE).forward(call, out, lse, visited)
    return out, lse, visited


def backward(q, k, v, out, lse, blocks, **options):
    call = validate.call(q, k, v, Options(**options))
    do = np.random.default_rng(5).standard_normal(out.shape).astype(q.dtype)
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    emulator, visited = Emulator(blocks, REVERSE, deterministic=True), np.zeros(1, np.uint64)
    workspace = np.empty(emulator.workspace_size(call), np.uint8)  # none of it is written beyond
    emulator.backward(call, do, out, lse, None, made, workspace, visited)
    return *made[:3], visited


@emulated
@mostly_thorough(
    ("device", "name"),
    [(device, name) for device in DEVICES for name in MASKS],
    quick=[("sm90", "chosen, causal")],
    why="more kernels and masks",
)
def test_lists_change_no_bit_and_no_tile(listed, device, name):
    dtype, blocks = DEVICES[device]
    q, k, v = draw(dtype)
    options = {"mask": MASKS[name]}
    found = []
    for how in ("0", "1", "ordered"):
        listed(how)
        made = forward(q, k, v, blocks, **options)
        found.append((*made, *backward(q, k, v, *made[:2], blocks, **options)))
    for without, with_lists, ordered in zip(*found, strict=True):
        assert same_bits(without, with_lists)
        assert same_bits(without, ordered)
    out, lse, _ = found[1][:3]
    precision = Precision.of(dtype, tensor_cores=device.startswith("sm"))
    bound = forward_bound(q, k, v, precision=precision, block_kv=64, **options)
    assert rho(out, *bound.out).value <= 1
    assert rho(lse, *bound.lse).value <= 1


@emulated
@mostly_thorough(
    ("device", "name"),
    [(device, name) for device in DEVICES for name in MASKS],
    quick=[("sm90", "documents")],
    why="more kernels and masks",
)
def test_lists_of_pieces_are_those_of_their_positions(listed, monkeypatch, device, name):
    dtype, blocks = DEVICES[device]
    q, k, v = draw(dtype)
    whole = validate.call(q, k, v, Options(mask=MASKS[name]))
    piece = Piece(range(70, 330), range(40, 300), True, True)
    arrays = part(q, piece.rows), part(k, piece.keys), part(v, piece.keys)
    made = call_of(whole, piece, *arrays, None)
    problem = problem_of_heads(made.problem, range(1, 2))
    heads = {"q": made.q[:, 2:], "k": made.k[:, 1:], "v": made.v[:, 1:]}
    call = dataclasses.replace(made, problem=problem, **heads)
    number, found, of_kernels = np.float64 if dtype == DOUBLE else np.float32, [], []
    find = tile_lists.of
    monkeypatch.setattr(tile_lists, "of", lambda *x: of_kernels.append(find(*x)) or of_kernels[-1])
    for how in "01":
        listed(how)
        of_kernels.clear()
        out, lse = np.full(call.q.shape, np.nan, number), np.full(call.q.shape[:-1], np.nan, number)
        emulator = Emulator(blocks, REVERSE, deterministic=True)
        emulator.forward_piece(call, (out, lse), True)
        do = np.random.default_rng(5).standard_normal(out.shape).astype(dtype)
        grads = Gradients(*(np.full(x.shape, np.nan, number) for x in heads.values()))
        emulator.backward_piece(call, do, out.astype(dtype), lse, None, grads, True)
        found.append((out, lse, *grads[:3]))
        assert any(of_kernels) == (how == "1")
    for without, with_lists in zip(*found, strict=True):
        assert same_bits(without, with_lists)


@emulated
@pytest.mark.parametrize("at_once", [simt.ORDERED_AT_ONCE, 2])
def test_lists_have_the_classes_of_all_tiles_and_rows_in_order(at_once, listed, monkeypatch):
    monkeypatch.setattr(simt, "ORDERED_AT_ONCE", at_once)
    listed("1")
    dtype, blocks = DEVICES["sm90"]
    q, k, v = draw(dtype)
    mask = MASKS["chosen, causal"]
    call = validate.call(q, k, v, Options(mask=mask))
    out, lse = np.empty_like(q), np.empty(q.shape[:-1], np.float32)
    memory = np.zeros(1 << 16, np.uint8)
    memory = memory[-memory.ctypes.data % 256 :][: 1 << 15]  # lists begin where it does
    Emulator(blocks, REVERSE).forward(call, out, lse, workspace=memory)
    chosen = sm90.fit_forward(24, 24, sm90.register_class(call))
    block_q, block_kv = chosen.block_q, chosen.block_kv
    rows, tiles = -(-LENGTHS[0] // block_q), -(-LENGTHS[1] // block_kv)
    i, j = np.arange(rows)[:, None] * block_q, np.arange(tiles) * block_kv
    ends = {
        "i_low": i, "i_high": np.minimum(i + block_q, LENGTHS[0]) - 1,
        "j_low": j, "j_high": np.minimum(j + block_kv, LENGTHS[1]) - 1,
        "len_q": LENGTHS[0], "len_k": LENGTHS[1],
    }  # fmt: skip
    words = memory.view(np.uint32)
    for b in range(2):
        symbols = {name: np.asarray(x) for name, x in (ends | {"b": b, "h": 0}).items()}
        classes = np.broadcast_to(tile_classes(trees(call).classes, symbols, "gpu"), (rows, tiles))
        for n, least in enumerate((PARTIAL, FULL)):
            bits = ((classes >= least) << np.arange(tiles)).sum(1)
            assert (words[b * rows * 2 + n : (b + 1) * rows * 2 : 2] == bits).all()
        cost = 5 * (classes != EMPTY).sum(1) - (classes == FULL).sum(1)
        order = words[4 * rows + b * rows :][:rows].astype(int)
        assert sorted(order) == list(range(rows))
        assert (np.diff(cost[order]) <= 0).all()


@pytest.mark.thorough("long rows; lists of short ones are quick")
@emulated
def test_neighbours_share_a_bit_where_a_row_has_many_tiles(listed, monkeypatch):
    """The forward of warpgroups tells 2048 tiles apart."""
    listed("1")
    dtype, _ = DEVICES["sm90"]
    length = 2100 * 32
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, n, 8)).astype(dtype) for n in (20, length, length))
    mask = masks.chosen([[3, 2090, 41, 42], [2099, 700, 0, -1]], (16, 32))
    narrow = Blocks(hopper=True, warpgroups=(64, 32, 1))
    out, lse, _ = forward(q, k, v, narrow, mask=mask)
    monkeypatch.setattr(tile_lists, "SWITCH", "0")
    for one, other in zip((out, lse), forward(q, k, v, narrow, mask=mask), strict=False):
        assert same_bits(one, other)


@emulated
@mostly_thorough(
    ("heads", "by_head"),
    [(2, False), (4, False), (4, True)],
    quick=[(4, False)],
    why="more heads, and lists of their own",
)
def test_blocks_of_keys_begin_with_the_first_span_that_is_listed(heads, by_head, listed):
    """A span of queries has 256 tiles; a block of keys sees some of the second one, or of two."""
    of_queries, of_keys = np.full(40000, 1000, np.int32), np.arange(400, dtype=np.int32) // 128
    for document, first, last in ((0, 20000, 20050), (1, 100, 130), (1, 39000, 39010), (2, 5, 70)):
        of_queries[first:last] = document  # no query sees the last keys
    mask = masks.segments(of_queries, of_keys)
    if by_head:
        mask = mask & masks.mask(lambda b, h, i, j: (h != 1) | (i < 30000))
    rng = np.random.default_rng(0)
    q, out, do = (rng.standard_normal((heads, 40000, 8)).astype(BRAIN) for _ in range(3))
    k, v = (rng.standard_normal((2, 400, 8)).astype(BRAIN) for _ in "kv")
    lse = np.full(q.shape[:-1], 3.0, np.float32)
    call, found = validate.call(q, k, v, Options(mask=mask)), []
    for how in ("0", "1"):
        listed(how)
        made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
        emulator = Emulator(
            Blocks(hopper=True),
            REVERSE,
            deterministic=True,
            runs=lambda special: special.spec.part != "dq",
        )
        visited = np.zeros(1, np.uint64)
        emulator.backward(call, do, out, lse, None, made, visited=visited)
        found.append((made.dk, made.dv, visited))
    for without, with_lists in zip(*found, strict=True):
        assert same_bits(without, with_lists)
    dk = found[1][0].astype(np.float32)
    assert np.abs(dk[:, :384]).max(-1).all()
    assert not dk[:, 384:].any()


SINGLE_MASKS = {
    "documents": MASKS["documents"],
    "by head": MASKS["documents"] & masks.mask(lambda b, h, i, j: (h != 1) | (j < 64)),
    "by entry": masks.chosen(
        [[[[0, 1], [1, -1], [1, -1]]], [[[0, -1], [0, 2], [1, -1]]]], (128, 128)
    ),
}


class Marking(Emulator):
    """An emulator that keeps what the kernel of marks has read and written, as words."""

    lists = words = None

    def _launch(self, made, addresses):
        super()._launch(made, addresses)
        if made.special.spec.part == "singles":
            begin, size = addresses["tiles of keys"], self.lists.array.nbytes
            self.words = np.frombuffer(ctypes.string_at(begin, size), np.uint32)


def backward_by(how, q, k, v, out, lse, mask, listed, monkeypatch):
    """Return an emulator, and gradients for which dq of single tiles is stored or summed."""
    listed("1")
    monkeypatch.setattr(tile_lists, "LARGE_SUMS", {"summed": 2**60, "stored": 0}[how])
    call = validate.call(q, k, v, Options(mask=mask))
    do = np.random.default_rng(5).standard_normal(out.shape).astype(q.dtype)
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    if q.shape[-1] == 40:  # rows that are not aligned
        made = made._replace(dq=np.full((*q.shape[:-1], 41), np.nan, q.dtype)[..., :40])
    emulator = Marking(Blocks(hopper=True), REVERSE)
    find = tile_lists.with_singles

    def with_singles(*arguments):
        emulator.lists = find(*arguments)
        return emulator.lists

    with monkeypatch.context() as patch:
        patch.setattr(tile_lists, "with_singles", with_singles)
        workspace = np.full(emulator.workspace_size(call), 0xFF, np.uint8)  # sums of NaN
        emulator.backward(call, do, out, lse, None, made, workspace)
    return emulator, made[:3]


def marks_of(call, lists):
    """Whether one block of keys alone sees a tile of queries, of each entry and head."""
    len_q, len_k = call.problem.len_q, call.problem.len_k
    block_kv, count = 128, -(-len_q // lists.single_queries)
    i = np.arange(count) * lists.single_queries
    j = np.arange(lists.rows)[:, None] * block_kv
    ends = {
        "i_low": i, "i_high": np.minimum(i + lists.single_queries, len_q) - 1,
        "j_low": j, "j_high": np.minimum(j + block_kv, len_k) - 1, "len_q": len_q, "len_k": len_k,
    }  # fmt: skip
    for b, h in np.ndindex(lists.entries, lists.heads):
        more = {"b": b, "h": h * lists.each}
        symbols = {name: np.asarray(x) for name, x in (ends | more).items()}
        classes = tile_classes(trees(call).classes, symbols, "gpu")
        yield (np.broadcast_to(classes, (lists.rows, count)) != EMPTY).sum(0) == 1


@emulated
@mostly_thorough(
    ("dtype", "d", "name"),
    [
        (BRAIN, 72, "documents"), (HALF, 24, "documents"), (BRAIN, 72, "by head"),
        (HALF, 72, "by entry"), (HALF, 160, "documents"), (BRAIN, 40, "documents"),
    ],
    quick=[(BRAIN, 72, "by head"), (HALF, 24, "documents")],
    why="other heads and lists",
)  # fmt: skip
def test_dq_of_tiles_that_one_block_of_keys_alone_sees_is_stored(
    listed, monkeypatch, dtype, d, name
):
    q, k, v = draw(dtype, d)
    mask = SINGLE_MASKS[name]
    listed("1")
    out, lse, _ = forward(q, k, v, Blocks(hopper=True), mask=mask)
    summed, without = backward_by("summed", q, k, v, out, lse, mask, listed, monkeypatch)
    stored, marked = backward_by("stored", q, k, v, out, lse, mask, listed, monkeypatch)
    assert summed.words is None
    lists = stored.lists
    assert lists.heads == (4 if name == "by head" else 1)
    assert lists.entries == (2 if name == "by entry" else 1)
    for one, other in zip(without, marked, strict=True):
        assert np.isfinite(one.astype(np.float32)).all()
        assert same_bits(one, other)
    if d <= 128:  # blocks of wide heads have fewer keys
        call = validate.call(q, k, v, Options(mask=mask))
        found = [sum(int(x) << n for n, x in enumerate(bits)) for bits in marks_of(call, lists)]
        words = stored.words[-lists.single_words :]
        assert words.tolist() == found
        assert all(0 < x < 2**6 - 1 for x in found)


@pytest.mark.thorough("a result in float32, which pieces of a call have")
@emulated
def test_stored_dq_of_a_piece_is_in_float32(listed, monkeypatch):
    q, k, v = draw(BRAIN)
    whole = validate.call(q, k, v, Options(mask=MASKS["documents"]))
    piece = Piece(range(70, 330), range(40, 300), True, True)
    arrays = part(q, piece.rows), part(k, piece.keys), part(v, piece.keys)
    call, found = call_of(whole, piece, *arrays, None), []
    out, lse = np.full(call.q.shape, np.nan, np.float32), np.zeros(call.q.shape[:-1], np.float32)
    listed("1")
    Emulator(Blocks(hopper=True), REVERSE).forward_piece(call, (out, lse), True)
    for large in (2**60, 0):
        monkeypatch.setattr(tile_lists, "LARGE_SUMS", large)
        do = np.random.default_rng(5).standard_normal(out.shape).astype(BRAIN)
        grads = Gradients(*(np.full(x.shape, np.nan, np.float32) for x in arrays))
        emulator = Emulator(Blocks(hopper=True), REVERSE)
        emulator.backward_piece(call, do, out.astype(BRAIN), lse, None, grads, True)
        found.append(grads[:3])
    for one, other in zip(*found, strict=True):
        assert np.isfinite(one).all()
        assert same_bits(one, other)


def test_dq_is_stored_where_its_sums_outgrow_the_cache():
    mask, large = masks.segments(np.arange(16384) // 64) & masks.causal(), (2, 16, 16384, 128)
    made = route_of(mask, backward=True, shape=large)
    steps = {step.part: step for step in made.steps}
    assert list(steps) == ["lists", "singles", "delta", "dkdv", "dq_rows"]
    assert [x for x, step in steps.items() if step.special.singles] == ["delta", "dkdv", "dq_rows"]
    assert steps["singles"].grid == 8  # of 32 tiles of 64 queries
    held = made.recipe.scratch["tiles of keys"]
    assert held.shape == (128 * 8 * 2 + 8,)
    assert tile_lists.most_scratch(made.call, H200)["dkdv"].nbytes >= held.nbytes
    assert "stores dq of those that one block of keys alone sees" in steps["dkdv"].reason
    smaller = route_of(mask, backward=True, shape=(1, 16, 16384, 128))
    assert [step.part for step in smaller.steps] == ["delta", "lists", "dkdv", "dq_rows"]
    assert not any(step.special.singles for step in smaller.steps)
    assert smaller.recipe.scratch["tiles of keys"].shape == (128 * 8 * 2,)


def test_other_calls_sum_dq():
    large = 2, 16, 16384, 128
    of_numbers = masks.mask(lambda b, h, i, j: (j <= i) & ((j < 9) | (i < j + 99)))
    made = route_of(of_numbers, backward=True, shape=large)
    assert [step.part for step in made.steps] == ["delta", "lists", "dkdv", "dq_rows"]
    q, k = (np.empty((n, 16, 16384, 128), BRAIN) for n in (1, 2))
    mask = masks.segments(np.arange(16384) // 64) & masks.causal()
    call = validate.call(q, k, k, Options(mask=mask))
    shared = route.of_gradients(call, H200)  # both entries add to the same sums
    assert "singles" not in [step.part for step in shared.steps]


def route_of(mask, backward=False, shape=(2, 16, 4096, 128), **options):
    q, k, v = (np.empty(shape, BRAIN) for _ in "qkv")
    call = validate.call(q, k, v, Options(mask=mask, **options))
    return route.of_gradients(call, H200) if backward else route.of(call, H200)


H200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
IDS = np.arange(4096) // 100
ROWS = np.zeros((32, 4), np.int32)
SHARED_LISTS = {
    "chosen": (masks.chosen(ROWS, 128), (1, 1, 1)),
    "chosen, causal": (masks.chosen(ROWS, 128) & masks.causal(), (1, 1, 1)),
    "for heads of keys": (masks.chosen(np.stack([ROWS] * 4), 128), (1, 4, 1)),
    "of an entry": (masks.chosen(np.stack([ROWS] * 2)[:, None], 128), (2, 1, 1)),
}


@pytest.mark.parametrize("name", SHARED_LISTS)
def test_lists_are_written_once_for_what_shares_them(name):
    mask, shape = SHARED_LISTS[name]
    made = route_of(mask)
    assert [step.part for step in made.steps] == ["lists", "order", "forward"]
    lists, _, main = made.steps
    assert made.main is main
    assert "from lists" in made.plan.reason
    assert lists.special.tiles.block_q == main.block_q
    assert lists.special.tiles.block_kv == main.block_kv
    rows = -(-4096 // main.block_q)
    planes, words = shape[0] * shape[1], shape[2]
    # Two words of 32 bits, and where a row comes in the order of their lengths.
    size = planes * rows * (words * 2 + 1)
    assert made.recipe.scratch["tiles of queries"].shape == (size,)
    gradients = route_of(mask, backward=True)
    parts = [step.part for step in gradients.steps]
    assert parts.index("lists") == parts.index("dkdv") - 1
    keys = next(step for step in gradients.steps if step.part == "dkdv").block_kv
    held = gradients.recipe.scratch["tiles of keys"]
    assert held.shape == (planes * -(-4096 // keys) * 2 * 2,)
    # What users are told to bring is enough.
    most = tile_lists.most_scratch(gradients.call, H200)
    assert most["dkdv"].nbytes >= held.nbytes


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (masks.causal(), {}),
        (masks.window(100, 0), {}),
        (masks.chosen(ROWS[:4], 128), {"shape": (2, 16, 512, 128)}),  # few tiles
    ],
    ids=["range", "window", "short"],
)
def test_calls_without_lists(mask, options):
    assert [step.part for step in route_of(mask, **options).steps] == ["forward"]


def test_a_mask_of_which_nothing_is_proven_has_no_lists(monkeypatch):
    monkeypatch.setattr(tile_lists, "SWITCH", "1")
    for mask in (masks.dense(np.ones((4096, 4096), bool)), masks.dilated(3)):
        assert [step.part for step in route_of(mask).steps] == ["forward"]


def test_the_switch(monkeypatch):
    mask = masks.segments(IDS) & masks.causal()
    assert [step.part for step in route_of(mask).steps] == ["lists", "order", "forward"]
    assert "order" not in [step.part for step in route_of(mask, backward=True).steps]
    monkeypatch.setattr(tile_lists, "SWITCH", "ordered")
    assert [step.part for step in route_of(mask).steps] == ["lists", "order", "forward"]
    gradients = route_of(mask, backward=True)
    parts = [step.part for step in gradients.steps]
    assert parts[parts.index("dkdv") - 2 :][:2] == ["lists", "order"]
    most = tile_lists.most_scratch(gradients.call, H200)
    assert most["dkdv"].nbytes >= gradients.recipe.scratch["tiles of keys"].nbytes
    monkeypatch.setattr(tile_lists, "SWITCH", "0")
    assert [step.part for step in route_of(masks.chosen(ROWS, 128)).steps] == ["forward"]


def test_what_nobody_shares_is_listed_where_it_takes_a_search(monkeypatch):
    own = masks.chosen(np.zeros((1, 16, 32, 4), int), 128)
    assert len(route_of(own, shape=(1, 16, 4096, 128)).steps) == 3
    monkeypatch.setattr(tile_lists, "SWITCH", "1")
    by_head = masks.mask(lambda b, h, i, j: (h == 3) | (i * j > 9))
    assert len(route_of(by_head, shape=(1, 16, 4096, 128)).steps) == 1


def test_their_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(tile_lists, "MOST_BYTES", 100)
    assert [step.part for step in route_of(masks.chosen(ROWS, 128)).steps] == ["forward"]
