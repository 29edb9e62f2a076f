"""The backward by warpgroups, on the CPU: what is particular to it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits

import cupyflash.kernels_cu
from cupyflash import masks, scores
from cupyflash.expr import len_q, log
from cupyflash.gpu import specialisation
from cupyflash.gpu.kernels import tma_operands
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def run(
    q, k, v, do, deterministic=False, schedule=REVERSE, read=build.read, few_keys=False, **options
):
    """Compute dq, dk and dv on the emulator, into memory that holds NaN, and count tiles."""
    saved = attend(q, k, v, **options)
    call = validate.call(q, k, v, Options(**options))
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    blocks = Blocks(hopper=True, few_keys=few_keys)
    emulator = Emulator(blocks, schedule, read=read, deterministic=deterministic)
    visited = np.zeros(1, np.uint64)
    emulator.backward(call, do, saved.out, saved.lse, None, made, visited=visited)
    return made[:3], int(visited[0])


def run_packed(
    q, k, v, do, offsets_q, offsets_k, deterministic, schedule, read=build.read, **options
):
    """The same of packed sequences, without the count."""
    out, lse = np.zeros_like(do), np.zeros(do.shape[:-1], np.float32)
    ends = zip(*(itertools.pairwise(x) for x in (offsets_q, offsets_k)), strict=True)
    for (i, i_end), (j, j_end) in ends:
        if i < i_end and j < j_end:
            saved = attend(q[:, i:i_end], k[:, j:j_end], v[:, j:j_end], **options)
            out[:, i:i_end], lse[:, i:i_end] = saved.out, saved.lse
    call = validate.varlen_call(q, k, v, offsets_q, offsets_k, True, Options(**options))
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    emulator = Emulator(Blocks(hopper=True), schedule, read=read, deterministic=deterministic)
    emulator.backward(call, do, out, lse, None, made)
    return made


def worst(q, k, v, do, made, **options):
    precision = Precision.of(q.dtype, tensor_cores=True)
    bound = backward_bound(do, q, k, v, precision=precision, block_kv=64, **options)
    return max(rho(x, *b).value for x, b in zip(made, bound[:3], strict=True))


# -- numbers --------------------------------------------------------------------------------------

BIAS = draw(np.float32, (70, 150))[0]
# Heads, shared heads, queries, keys, D, Dv, options, and how many tiles have pairs.
PROBLEMS = {
    "edges": (1, 1, 64, 128, 64, 64, {}, 1),
    "more": (2, 1, 65, 129, 128, 128, {}, 8),
    "less": (1, 1, 127, 1, 40, 104, {}, 2),
    "causal": (1, 1, 200, 260, 64, 128, {"mask": masks.causal()}, 8),
    "window": (2, 2, 200, 200, 128, 72, {"mask": masks.window(9, 2)}, 12),
    "scores": (1, 1, 70, 150, 128, 128, {"bias": BIAS, "score_mod": scores.softcap(3.0)}, 4),
    "dropout": (2, 1, 70, 150, 16, 16, {"dropout": 0.3, "seed": 7, "scale": -0.3}, 8),
    "wide": (1, 1, 70, 130, 256, 256, {}, 6),
    "odd": (1, 1, 130, 65, 192, 136, {"mask": masks.causal()}, 3),
    # Queries of a tile in two parts; edges within and between them, and heads of other sums.
    "parts": (2, 1, 165, 260, 192, 128, {"mask": masks.causal()}, 14),
    "parts, plain": (1, 1, 97, 129, 136, 72, {}, 4),
    "wide values": (2, 1, 130, 140, 72, 184, {"mask": masks.window(50, 3)}, 14),
    "three slabs": (2, 1, 200, 130, 168, 40, {"mask": masks.causal()}, 8),
    "whole dq in parts": (2, 1, 165, 60, 192, 128, {"mask": masks.causal()}, 4),
    "everything": (
        2, 1, 70, 150, 128, 128,
        {"mask": masks.causal(), "bias": BIAS, "dropout": 0.2, "seed": 3, "score_mod":
         scores.softcap(3.0), "sink": np.array([0.5, -1], np.float32)}, 8,
    ),
    # Weights between the steps of a product that are fewer than columns; dq deferred over heads.
    "mixed": (1, 1, 130, 70, 64, 40, {}, 3),
    "deferred": (2, 1, 330, 200, 96, 128, {"dropout": 0.1, "seed": 5}, 24),
    # Dropout drawn during the product for the scores, in turns for dq, and by those who share keys.
    "drawn": (2, 1, 200, 260, 64, 64, {"mask": masks.causal(), "dropout": 0.3, "seed": 2**40}, 16),
    "shared": (2, 1, 70, 130, 192, 136, {"dropout": 0.2, "seed": 9}, 12),
}  # fmt: skip


@emulated
@mostly_thorough(
    "dtype",
    [HALF, BRAIN],
    quick=[BRAIN],
    why="sizes of dS in float16 have their own tests",
    ids=str,
)
@mostly_thorough("name", PROBLEMS, quick=("edges",), why="sizes between those, and options")
def test_gradients_are_within_the_bound(name, dtype):
    heads, heads_kv, len_q, len_k, d, d_v, options, tiles = PROBLEMS[name]
    shapes = (heads, len_q, d), (heads_kv, len_k, d), (heads_kv, len_k, d_v), (heads, len_q, d_v)
    q, k, v, do = draw(dtype, *shapes)
    made, visited = run(q, k, v, do, **options)
    assert worst(q, k, v, do, made, **options) <= 1
    assert visited == tiles


@pytest.mark.thorough("the first scale is quick")
@emulated
@pytest.mark.parametrize("order", [1, -1], ids=["grows", "shrinks"])
@mostly_thorough(
    ("d", "d_v"),
    [(64, 64), (128, 128), (192, 192), (192, 128)],
    quick=[(64, 64)],
    why="other tiles, which share the code",
)
def test_warps_have_scales_of_their_own(d, d_v, order):
    # None in the first tile, and then from tile to tile 2^8 times larger or smaller; from warp to
    # warp 2^5 times: each soon has a scale of its own, unless warps share keys.
    q, k, v, do = draw(np.float32, (2, 300, d), (1, 140, d), (1, 140, d_v), (2, 300, d_v))
    tiles, warps = np.arange(300) // 64, np.arange(140) // 16
    do *= np.where(tiles > 0, 2.0 ** (8 * order * (tiles - 2.5)), 0)[:, None]
    v *= 2.0 ** (5 * (warps % 3))[:, None]
    q, k, v, do = (x.astype(HALF) for x in (q, k, v, do))
    for deterministic in (False, True):
        with np.errstate(over="ignore"):
            made, _ = run(q, k, v, do, deterministic)
        assert worst(q, k, v, do, made) <= 1


@pytest.mark.thorough("a scale of its own; dS of any size is quick")
@emulated
def test_the_first_scale_is_of_dk_alone():
    # The first tile's queries see one key, and of do one column is not 0, so that their dS is 0
    # exactly, but dv is not.
    q, k, v, do = draw(HALF, *[(1, 130, 128)] * 4)
    do[..., 1:] = 0
    one_key = masks.mask(lambda b, h, i, j: (i >= 64) | (j == 0))
    made, _ = run(q, k, v, do, mask=one_key)
    assert worst(q, k, v, do, made, mask=one_key) <= 1


@pytest.mark.thorough("places in memory; every other test has arrays as they come")
@emulated
def test_shared_queries_and_keys_in_any_place():
    # Sequences before heads, do with gaps, keys and values of other batch entries.
    q, k, v, do = draw(
        HALF, (2, 30, 2, 64), (2, 1, 40, 64), (2, 2, 1, 40, 64), (2, 2, 30, 2, 72), seed=1
    )
    q, do = q.swapaxes(1, 2), do.swapaxes(2, 3)[..., :64]
    k = k[:, None]
    results = [run(q, k, v, do, each, randomly(1))[0] for each in (False, True)]
    for made in results:
        assert worst(q, k, v, do, made) <= 1
    for ours, others in zip(*(x[1:] for x in results), strict=True):
        assert same_bits(ours, others)


@emulated
@mostly_thorough(
    ("dtype", "deterministic"),
    [(HALF, False), (BRAIN, True)],
    quick=[(HALF, False)],
    why="the other type and sum",
    ids=str,
)
def test_packed_sequences(dtype, deterministic):
    # What follows a sequence is the next one's, and not finite.
    offsets = np.array([[0, 70, 70, 110, 170], [0, 150, 160, 160, 290]])
    mask = masks.causal()
    q, k, v, do = draw(dtype, (2, 170, 72), (1, 290, 72), (1, 290, 64), (2, 170, 64), seed=2)
    q[:, 110:], k[:, 160:], v[:, 160:], do[:, 110:] = np.nan, np.inf, np.nan, np.inf
    made = run_packed(q, k, v, do, *offsets, deterministic, randomly(1), mask=mask)
    ends = zip(*(itertools.pairwise(x) for x in offsets), strict=True)
    for (i, i_end), (j, j_end) in itertools.islice(ends, 3):
        rows, keys = slice(i, i_end), slice(j, j_end)
        own = q[:, rows], k[:, keys], v[:, keys]
        found = made.dq[:, rows], made.dk[:, keys], made.dv[:, keys]
        if all(x.size for x in own):
            assert worst(*own, do[:, rows], found, mask=mask) <= 1
        else:
            assert not any(x.any() for x in found)


@emulated
@mostly_thorough(
    "cap", [None, 3.0], quick=[3.0], why="a slope of 1 is simpler", ids=["slope 1", "any slope"]
)
def test_scores_of_queries_that_do_not_exist_are_nobodys(cap):
    # Behind the last query it is the logarithm of what is negative, and NaN.
    late = scores.score(lambda s, b, h, i, j: s + log(len_q - i) * 0.1)
    options = {"score_mod": late if cap is None else [scores.softcap(cap), late]}
    q, k, v, do = draw(BRAIN, (1, 70, 64), (1, 128, 64), (1, 128, 64), (1, 70, 64))
    made, _ = run(q, k, v, do, **options)
    assert worst(q, k, v, do, made, **options) <= 1


@pytest.mark.thorough("long sequences; sm80 has quick cases")
@emulated
def test_more_tiles_than_are_classified_at_once():
    # Of 260 tiles of queries the first and the last three see keys.
    length = 16600
    q, k, v, do = draw(HALF, (1, length, 8), (1, 40, 8), (1, 40, 8), (1, length, 8))
    options = {"mask": masks.mask(lambda b, h, i, j: (i < 3) | (i > length - 150 + j))}
    made, visited = run(q, k, v, do, **options)
    assert worst(q, k, v, do, made, **options) <= 1
    assert visited == 4


@emulated
@pytest.mark.thorough("tiles in masses; those that are skipped are quick")
def test_more_full_tiles_than_are_classified_at_once():
    length = 16600
    q, k, v, do = draw(HALF, (1, length, 8), (1, 40, 8), (1, 40, 8), (1, length, 8))
    options = {"mask": masks.mask(lambda b, h, i, j: i != 16590)}
    made, visited = run(q, k, v, do, **options)
    assert worst(q, k, v, do, made, **options) <= 1
    assert visited == 260


@emulated
@pytest.mark.parametrize("d", [8, 136])
@pytest.mark.thorough("tiles in masses; those that are skipped are quick")
def test_full_tiles_in_a_row(d):
    # Tiles 30 to 66 of 64 queries, then an EMPTY one, two more, and one of five queries.
    length = 64 * 70 + 5
    q, k, v, do = draw(BRAIN, (1, length, d), (1, 128, d), (1, 128, d), (1, length, d))
    seen = masks.mask(lambda b, h, i, j: (i >= 64 * 30) & ((i < 64 * 67) | (i >= 64 * 68)))
    for mask in (seen, seen & masks.causal(offset=-64 * 32)):
        made, visited = run(q, k, v, do, mask=mask)
        assert worst(q, k, v, do, made, mask=mask) <= 1
        keys = 128 if d == 8 else 64  # of a block
        tiles = mask.to_array(1, 1, length, 128)[0, 0].reshape(length, 128 // keys, keys)
        some = tiles[: 64 * 70].reshape(70, 64, 128 // keys, keys).any(axis=(1, 3))
        assert visited == some.sum() + tiles[64 * 70 :].any(axis=(0, 2)).sum()


# -- dS in float16, and what is not finite --------------------------------------------------------


@emulated
@mostly_thorough(
    ("deterministic", "order"),
    [(False, 1), (True, 1), (False, -1)],
    quick=[(True, 1)],
    why="the other sum and order",
)
def test_ds_of_any_size(deterministic, order):
    q, k, v, do = draw(HALF, (2, 256, 16), (1, 96, 16), (1, 96, 16), (2, 256, 16), seed=1)
    steps = 2.0 ** (8 * np.arange(-2, 2))[::order]
    do *= np.repeat(steps, 64)[:, None].astype(HALF)
    k *= np.repeat(2.0 ** np.arange(-8, 4, 4), 32)[:, None].astype(HALF)
    v *= HALF.type(200)
    with np.errstate(over="ignore"):
        made, _ = run(q, k, v, do, deterministic)
    assert worst(q, k, v, do, made) <= 1


SINK = np.array([0.5], np.float32)


@emulated
@mostly_thorough(
    ("dtype", "deterministic", "d", "sink"),
    [
        (HALF, False, 72, None),
        (BRAIN, False, 104, None),
        (BRAIN, False, 104, SINK),
        (BRAIN, False, 192, None),
        (BRAIN, False, (192, 128), None),
        (BRAIN, False, (136, 72), SINK),
        (HALF, False, (192, 128), None),
        (BRAIN, True, (192, 128), None),
        (BRAIN, True, 72, SINK),
        (HALF, True, 192, None),
    ],
    quick=lambda case: case[:3] == (BRAIN, True, 72),
    why="other tiles and sums, which share the code",
    ids=str,
)
def test_masked_queries_and_keys_change_no_bit(dtype, deterministic, d, sink):
    d, d_v = d if isinstance(d, tuple) else (d, d)
    q, k, v, do = draw(dtype, (1, 130, d), (1, 130, d), (1, 130, d_v), (1, 130, d_v))
    mask = masks.mask(lambda b, h, i, j: (j <= i) & (i != 50) & (j != 3))
    results = []
    for bad in (0, np.nan, np.inf):
        q[:, 50], do[:, 50], k[:, 3], v[:, 3] = bad, bad, bad, bad
        results.append(run(q, k, v, do, deterministic, mask=mask, sink=sink)[0])
    for first, *others in zip(*results, strict=True):
        assert np.isfinite(first.astype(np.float32)).all()
        assert all(same_bits(first, x) for x in others)


@pytest.mark.thorough("keys of narrower heads have quick cases")
@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [HALF, BRAIN], ids=str)
def test_few_keys_of_wide_heads_have_the_bits_of_tiles_of_more(dtype, deterministic):
    # Sizes of dS differ from warp to warp, and grow from tile to tile.
    q, k, v, do = draw(np.float32, (2, 200, 192), (1, 60, 192), (1, 60, 128), (2, 200, 128))
    q[..., 0] = 8
    k[:, 16:32, 0] -= 20
    do *= 2.0 ** (4 * (np.arange(200) // 32) - 14)[:, None]
    arrays = [x.astype(dtype) for x in (q, k, v, do)]
    few, more = (
        run(*arrays, deterministic, few_keys=few, mask=masks.causal())[0] for few in (True, False)
    )
    for x, y in zip(few, more, strict=True):
        assert same_bits(x, y)


@pytest.mark.thorough("the sm80 kernels have quick cases")
@emulated
@pytest.mark.parametrize("sink", [None, SINK], ids=str)
@pytest.mark.parametrize(("d", "d_v"), [(64, 64), (128, 128), (160, 96)])
def test_do_that_is_not_finite_where_the_output_is_0(d, d_v, sink):
    q, k, do = draw(BRAIN, (1, 130, d), (1, 130, d), (1, 130, d_v))
    do[:, 40, 5] = np.nan
    made, _ = run(q, k, np.zeros_like(do), do, mask=masks.causal(), sink=sink)
    for name, x in zip(("dq", "dk", "dv"), made, strict=True):
        spoilt = np.isnan(x[0].astype(np.float32)).any(axis=1)
        assert list(np.flatnonzero(spoilt)) == ([40] if name == "dq" else list(range(41)))


@pytest.mark.thorough("masked queries and keys are quick, which are not finite")
@emulated
@pytest.mark.parametrize("where", ["q", "k", "v", "do"])
@pytest.mark.parametrize("kind", ["in order", "deferred", "parts", "changed"])
def test_what_is_not_finite_spoils_what_sees_it(kind, where):
    dtype, d = (BRAIN, 128) if kind == "deferred" else (HALF, 256 if where in ("k", "do") else 64)
    more = {"score_mod": scores.softcap(30.0)} if kind == "changed" else {}
    if kind == "parts":
        d = 192
    d_v = 128 if kind == "parts" else d
    drawn = draw(dtype, (1, 130, d), (1, 130, d), (1, 130, d_v), (1, 130, d_v))
    arrays = dict(zip(("q", "k", "v", "do"), drawn, strict=True))
    arrays[where][0, 40, 5] = np.nan
    made, _ = run(*arrays.values(), mask=masks.causal(), **more)
    spoilt = {name: np.isnan(x[0]) for name, x in zip(("dq", "dk", "dv"), made, strict=True)}
    if where in ("q", "do"):  # query 40 and the keys that it sees
        assert spoilt["dq"][40].all()
        assert spoilt["dq"].sum() == d
        assert spoilt["dk"][:41].all()
        assert not spoilt["dk"][41:].any()
        seen = spoilt["dv"][:41] if where == "q" else spoilt["dv"][:41, 5]
        assert seen.all()
        assert spoilt["dv"].sum() == seen.size
    else:  # the queries that see key 40, and what they see
        assert spoilt["dq"][40:].all()
        assert not spoilt["dq"][:40].any()
        assert spoilt["dk"].all()


@pytest.mark.thorough("masked keys are quick, and what is not finite")
@emulated
@pytest.mark.parametrize(
    ("dtype", "d", "d_v"),
    [(HALF, 64, 64), (BRAIN, 128, 128), (BRAIN, 192, 136), (BRAIN, 192, 128), (HALF, 136, 72)],
    ids=str,
)
def test_an_infinite_key_that_weighs_nothing_is_as_if_masked(dtype, d, d_v):
    q, k, v, do = draw(dtype, (1, 200, d), (1, 130, d), (1, 130, d_v), (1, 200, d_v))
    q[..., 5] = -abs(q[..., 5]) - 1
    k[:, 60, 5] = np.inf
    own, _ = run(q, k, v, do, mask=masks.causal())
    unseen, _ = run(q, k, v, do, mask=masks.causal() & masks.mask(lambda b, h, i, j: j != 60))
    assert all(np.isfinite(x.astype(np.float32)).all() for x in own)
    assert all(same_bits(x, y) for x, y in zip(own, unseen, strict=True))


# -- the kernel's own waits -----------------------------------------------------------------------

FOLDER = Path(cupyflash.kernels_cu.__file__).parent
ORDERS = re.compile(
    r"warpgroup::mbarrier_wait\([^;{}]*\);|consumers_sync\(\);|"
    r"\w+(?:\.\w+)?\.wait_(?:full|empty)\([^;{}]*\);|"
    r"warpgroup::(?:arrive_warp|arrive_warpgroup)\([^;]*;|"
    r"ptx::(?:wgmma_wait<[^>]*>|wgmma_fence|wgmma_commit|fence_mbarrier_init|named_barrier_sync|"
    r"fence_proxy_async|mbarrier_arrive_expect_tx|mbarrier_arrive|tma_store_wait_read)\([^;]*;|"
    r"__sync(?:threads|warp)\(\);"
)

# The emulator multiplies when a product is issued: no run needs a wait for registers alone.
FOR_REGISTERS = re.compile(r"ptx::wgmma_wait<\d>\(\);\s*add_dq\(")


def numbers_of(text):
    """Return which statements are needed on the emulator."""
    found = enumerate(ORDERS.finditer(text))
    return [number for number, x in found if not FOR_REGISTERS.match(text, x.start())]


STATEMENTS = [
    (name, number)
    for name in (
        "sm90/backward_sm90_dkdv.cu",
        "sm90/backward_producer.cuh",
        "sm90/backward_results.cuh",
        "sm90/backward_storage.cuh",
        "sm90/warpgroup_dropout.cuh",
        "sm90/warpgroup_gradient.cuh",
        "sm90/ds_scale.cuh",
    )
    for number in numbers_of((FOLDER / name).read_text())
]


def everything(read, schedule):
    """Run what meets every wait: dS that outgrows its scale, masks, non-finite values."""
    q, k, v, do = draw(HALF, (4, 200, 128), *[(1, 140, 128)] * 2, (4, 200, 128))
    do[:, :64] *= HALF.type(2.0**-9)
    do[-1, 192:] *= HALF.type(2.0**11)  # in the last tile of all, too
    options = {"schedule": schedule, "read": read}
    factors = 2.0 ** (5 * (np.arange(140) // 16 % 3))
    run(q, k, v * factors[:, None].astype(HALF), do, **options)
    do[:, 150], k[:, 3] = np.inf, np.nan
    changed = {"score_mod": scores.softcap(30.0)}
    for dtype, d, deterministic, more in (
        (HALF, 64, False, {}), (BRAIN, 192, False, changed), (BRAIN, 64, True, {}),
        (BRAIN, 128, False, {}),
    ):  # fmt: skip
        arrays = (np.tile(x, 2)[..., :d].astype(dtype) for x in (q, k, v, do))
        run(*arrays, deterministic, mask=masks.causal(), **options, **more)
    run(*(x.astype(BRAIN) for x in (q, k, v, np.clip(do, -1, 1))), **options)
    arrays = (x[..., :64].astype(BRAIN) for x in (q, k, v))
    run_packed(*arrays, do[..., :64].astype(BRAIN), [0, 70, 200], [0, 30, 140], False, **options)
    # Queries in parts, and dS of tiles that outgrow the scales of some warps.
    parts = q, k, v * factors[:, None].astype(HALF), np.clip(do, -(2.0**11), 2.0**11)
    parts = [np.tile(x, 2)[..., :n] for x, n in zip(parts, (192, 192, 128, 128), strict=True)]
    run(*parts, mask=masks.causal(), **options)
    run(*(x.astype(BRAIN) for x in parts), mask=masks.causal(), **options)
    for d in (64, 128):  # blocks of one consumer
        few = [x[..., :d].astype(BRAIN) for x in (q, k[:, 4:60], v[:, 4:60], np.clip(do, -1, 1))]
        run(*few, few_keys=True, mask=masks.causal(), **options)


@emulated
@pytest.mark.parametrize(("file", "number"), STATEMENTS[1::9])
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_what_orders_may_not_be_missing(file, number):
    def read(name):
        text = build.read(name)
        if name != file:
            return text
        match = list(ORDERS.finditer(text))[number]
        return f"{text[: match.start()]};{text[match.end() :]}"

    def run_often():
        for schedule in (FORWARD, REVERSE, *map(randomly, range(3))):
            everything(read, schedule)

    with pytest.raises(Fault):
        run_often()


@pytest.mark.thorough("another way to say what is quick")
@emulated
def test_each_thread_may_say_that_it_has_read(monkeypatch):
    arrays = draw(HALF, *[(1, 200, 64)] * 4)
    one, _ = run(*arrays, True, mask=masks.causal())
    monkeypatch.setattr(specialisation, "EACH_LANE_ARRIVES", True)
    each, _ = run(*arrays, True, mask=masks.causal())
    assert all(same_bits(x, y) for x, y in zip(one, each, strict=True))


@pytest.mark.thorough("copies by threads, which few GPUs need")
@emulated
@pytest.mark.parametrize(("d", "d_v"), [(64, 104), (192, 136), (192, 128)])
def test_boxes_bring_the_same_bits(d, d_v, monkeypatch):
    arrays = draw(BRAIN, (2, 70, d), (1, 150, d), (1, 150, d_v), (2, 70, d_v))
    by_boxes, _ = run(*arrays, deterministic=True)
    monkeypatch.setattr(tma_operands, "NO_TMA_STORE", True)
    row_by_row, _ = run(*arrays, deterministic=True)
    assert all(same_bits(x, y) for x, y in zip(by_boxes, row_by_row, strict=True))
