"""Heads of 257 to 512 in 16-bit types by tensor cores, where warps share rows, on the CPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from caches import hidden, in_pages, results
from cuda_specialisations import SHARED_MEMORY, capability
from emulator import build
from emulator.blocks import Blocks, Chosen
from emulator.calls import Emulator
from emulator.machine import randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, sm80, sm90, sm90_wide
from cupyflash.gpu.kernels.spec import REGISTERS, Extent, Request
from cupyflash.problem import cached, validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.reference.cpu import philox
from cupyflash.testing import Precision, backward_bound, forward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
BLOCKS, HOPPER = Blocks(32, 32, 128), Blocks(hopper=True)
NINE = Blocks(32, 32, 128, hopper=True)  # the same small tiles on compute capability 9.0
SLOPES = np.ones(4, np.float32)
OPTIONS = {
    "plain": {},
    "causal": {"mask": masks.causal(), "sink": np.array([0.5, -np.inf], np.float32)},
    "window": {"mask": masks.window(30, 5), "score_mod": scores.softcap(3.0)},
    "documents": {"mask": masks.segments(np.arange(70) // 31, np.arange(83) // 40)},
    "dropout": {"dropout": 0.3, "seed": 2**40 + 3, "mask": masks.causal(13)},
    "slopes": {"score_mod": scores.alibi(SLOPES[:2]), "scale": -0.02},
    "no keys": {"mask": masks.lengths(np.array([0]))},
}
SIZES = [(257, 257), (320, 384), (384, 320), (511, 64), (16, 512), (512, 512)]


def draw(dtype, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays(dtype, d, d_v, len_q=70, len_k=83):
    """q, k, v and do of two heads that share keys."""
    shapes = (2, len_q, d), (1, len_k, d), (1, len_k, d_v), (2, len_q, d_v)
    return draw(dtype, *shapes, seed=d + d_v)


class Ran:
    """A call that ran on the emulator, into memory that held NaN, and its kernels."""

    def __init__(self, q, k, v, do=None, blocks=BLOCKS, deterministic=False, **options):
        self.kernels = []
        emulator = Emulator(
            blocks,
            randomly(1),
            deterministic=deterministic,
            runs=lambda special: self.kernels.append(special.kernel) or True,
        )
        call = validate.call(q, k, v, Options(**options))
        self.out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
        self.lse = np.full(q.shape[:-1], np.nan, np.float32)
        emulator.forward(call, self.out, self.lse)
        self.owners = [q, k, v, call.bias]
        if do is not None:
            made = Gradients(*(None if x is None else np.full_like(x, np.nan) for x in self.owners))
            emulator.backward(call, do, self.out, self.lse, None, made)
            self.gradients = [x for x in made if x is not None]

    def worst(self, do=None, **options):
        """Return the worst ratio of an error to its bound."""
        how = {"precision": Precision.of(self.out.dtype, tensor_cores=True), "block_kv": 16}
        q, k, v, _ = self.owners
        if do is None:
            bound = forward_bound(q, k, v, **how, **options)
            return max(rho(self.out, *bound.out).value, rho(self.lse, *bound.lse).value)
        bounds = [x for x in backward_bound(do, q, k, v, **how, **options) if x is not None]
        pairs = zip(self.gradients, bounds, strict=False)
        return max(rho(x, *bound).value for x, bound in pairs)


# -- numbers --------------------------------------------------------------------------------------


@emulated
@mostly_thorough(
    ("sizes", "name"),
    [(SIZES[n % len(SIZES)], name) for n, name in enumerate(OPTIONS)] + [(SIZES[5], "causal")],
    quick=[(SIZES[0], "plain"), (SIZES[2], "window")],
    why="other masks and scores of the same loop",
    ids=str,
)
@mostly_thorough("dtype", [HALF, BRAIN], quick=[BRAIN], why="types differ in conversions", ids=str)
def test_the_forward_is_within_the_bound(sizes, name, dtype):
    q, k, v, _ = arrays(dtype, *sizes)
    ran = Ran(q, k, v, **OPTIONS[name])
    assert ran.kernels[-1] == "forward_sm80"
    assert ran.worst(**OPTIONS[name]) <= 1


@emulated
@mostly_thorough(
    ("sizes", "name", "deterministic"),
    [
        (SIZES[(n + m) % len(SIZES)], name, bool(m))
        for n, name in enumerate(OPTIONS)
        if name != "no keys"
        for m in range(2)
    ],
    quick=[(SIZES[5], "dropout", True)],
    why="other masks and scores of the same loops",
    ids=str,
)
@mostly_thorough("dtype", [HALF, BRAIN], quick=[HALF], why="float16 also scales dS", ids=str)
def test_the_backward_is_within_the_bound(sizes, name, deterministic, dtype):
    options = {key: x for key, x in OPTIONS[name].items() if key != "sink"}
    q, k, v, do = arrays(dtype, *sizes, len_q=40, len_k=50)
    if name == "documents":
        options = {"mask": masks.segments(np.arange(40) // 31, np.arange(50) // 40)}
    ran = Ran(q, k, v, do, deterministic=deterministic, **options)
    assert "backward_sm80_dkdv" in ran.kernels
    assert ("backward_sm80_dq" in ran.kernels) == deterministic
    assert ran.worst(do, **options) <= 1


@emulated
def test_queries_are_copied_apart_from_do_where_one_stage_has_room():
    d, options = 384, {"mask": masks.window(40, 20)}
    q, k, v, do = arrays(BRAIN, d, d, 140, 40)
    blocks = Chosen(shared_memory=SHARED_MEMORY["sm_90"])
    request = Request(validate.call(q, k, v).problem, target_of("sm_90"))
    assert registry.select("dkdv", request).tiles.stages == 1
    ran = Ran(q, k, v, do, blocks, **options)
    assert "backward_sm80_dkdv" in ran.kernels
    assert ran.worst(do, **options) <= 1


@emulated
@mostly_thorough(
    "blocks", [BLOCKS, NINE, Chosen(hopper=True)], quick=[NINE], why="other tiles and layouts",
    ids=["small", "hopper", "chosen"],
)  # fmt: skip
@mostly_thorough(
    ("dtype", "d"), [(BRAIN, 264), (HALF, 511)], quick=[(BRAIN, 264)], why="types differ in scales"
)
def test_sums_of_dq_have_the_layout_of_their_gpu(blocks, dtype, d):
    q, k, v, do = arrays(dtype, d, 264, 70, 50)
    q[..., 9], k[0, 20, 9] = -1, np.inf  # a score of -inf for the queries that see key 20
    ran = Ran(q, k, v, do, blocks, mask=masks.causal(0))
    options = {"mask": masks.mask(lambda b, h, i, j: (j <= i) & (j != 20))}
    without = Ran(q, k, v, do, blocks, **options)
    assert {"backward_sm80_dkdv", "backward_dq_rows"} <= set(ran.kernels)
    assert without.worst(do, **options) <= 1
    product = np.zeros(q.shape, bool)  # 0 times infinity
    product[:, 20:, 9] = True
    dq, expected = (x.gradients[0].astype(np.float32) for x in (ran, without))
    np.testing.assert_array_equal(np.isnan(dq), product)
    np.testing.assert_allclose(dq[~product], expected[~product], rtol=0.01, atol=1e-3)


@emulated
@pytest.mark.thorough("the kernel of the bias is quick with other heads, and has no other code")
@pytest.mark.parametrize("sizes", SIZES)
def test_the_gradient_of_a_bias_is_within_the_bound(sizes):
    q, k, v, do = arrays(BRAIN, *sizes, len_q=40, len_k=50)
    (bias,) = draw(BRAIN, (1, 40, 50), seed=9)
    ran = Ran(q, k, v, do, bias=bias)
    assert "backward_sm80_bias" in ran.kernels
    assert ran.worst(do, bias=bias) <= 1


@emulated
@pytest.mark.thorough("small tiles are quick, which have the same code")
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("sizes", [(320, 320), (384, 384), (448, 320), (512, 512)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["adds", "deterministic"])
def test_the_tiles_that_gpus_get(arch, sizes, deterministic):
    q, k, v, do = arrays(BRAIN, *sizes)
    blocks, options = Chosen(shared_memory=SHARED_MEMORY[arch]), {"mask": masks.causal()}
    ran = Ran(q, k, v, do, blocks, deterministic, **options)
    assert ran.worst(**options) <= 1
    assert ran.worst(do, **options) <= 1


@emulated
@mostly_thorough(
    ("sizes", "name"),
    [
        ((320, 320), "plain"), ((264, 304), "causal"), ((320, 64), "window"),
        ((72, 312), "documents"), ((312, 264), "dropout"), ((320, 320), "slopes"),
        ((264, 264), "no keys"), ((512, 512), "plain"), ((384, 384), "window"),
        ((328, 264), "causal"), ((512, 328), "dropout"), ((448, 64), "slopes"),
        ((16, 512), "documents"), ((504, 496), "no keys"),
    ],
    quick=[((264, 304), "causal"), ((328, 264), "causal"), ((16, 512), "documents")],
    why="other masks and scores, which small heads have, too",
    ids=str,
)  # fmt: skip
def test_warpgroups_have_wide_heads(sizes, name):
    q, k, v, _ = arrays(BRAIN, *sizes)
    ran = Ran(q, k, v, blocks=HOPPER, **OPTIONS[name])
    assert set(ran.kernels) == {"forward_sm90"}
    assert ran.worst(**OPTIONS[name]) <= 1


@emulated
@mostly_thorough(
    "name",
    ["plain", "causal", "window", "documents", "dropout", "slopes", "nan"],
    quick=["dropout"],
    why="other masks and scores of the same loop",
)
def test_parts_of_wide_values_have_the_same_weights(name):
    q, k, v, _ = arrays(BRAIN, 328, 256)
    if name == "nan":
        v[0, 20, 9], v[0, 21, 100] = np.nan, np.inf
    options = OPTIONS["causal" if name == "nan" else name]
    ran = Ran(q, k, np.concatenate((v, v), -1), blocks=HOPPER, **options)
    one = Ran(q, k, v, blocks=HOPPER, **options)
    assert same_bits(ran.out[..., :256], ran.out[..., 256:])
    assert same_bits(ran.out[..., :256], one.out)
    assert same_bits(ran.lse, one.lse)


@emulated
@mostly_thorough("d_v", [264, 512], quick=[264], why="whole parts are a simpler case")
def test_parts_of_wide_values_store_float32(d_v):
    q, k, v, _ = arrays(HALF, 72, d_v)
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    out, lse = np.full((2, 70, d_v), np.nan, np.float32), np.full((2, 70), np.nan, np.float32)
    names = []
    Emulator(HOPPER, runs=lambda special: names.append(special.kernel) or True).forward(
        call, out, lse
    )
    assert set(names) == {"forward_sm90"}
    how = {"precision": Precision.of(HALF, tensor_cores=True), "block_kv": 16}
    bound = forward_bound(q, k, v, mask=masks.causal(), **how)
    assert rho(out, *bound.out).value <= 1
    assert same_bits(out.astype(HALF), Ran(q, k, v, blocks=HOPPER, mask=masks.causal()).out)


@emulated
@pytest.mark.thorough("equal words are quick in the tests of Philox")
@pytest.mark.parametrize("blocks", [BLOCKS, Chosen()], ids=["small", "chosen"])
def test_dropped_pairs_are_those_of_the_twin(blocks):
    size, seed, p = 80, 2**63 + 12345, 0.37
    q = np.zeros((3, size, 264), HALF)
    v = np.broadcast_to(np.eye(size, dtype=HALF), (3, size, size))
    kept = philox.keep(
        seed, p, np.arange(3).reshape(3, 1, 1), np.arange(size)[:, None], np.arange(size)
    )
    # dv[j] = sum over i of the weights of (i, j) times do[i]: here it is the weight itself.
    ran = Ran(q, q, v, np.array(v), blocks, dropout=p, seed=seed)
    np.testing.assert_array_equal(ran.out != 0, kept)
    np.testing.assert_array_equal(ran.gradients[2] != 0, kept.swapaxes(-2, -1))


# -- keys that take no part, and rows -------------------------------------------------------------


@emulated
@mostly_thorough("value", [np.nan, np.inf], quick=[np.nan], why="infinities take the same way")
@mostly_thorough("deterministic", [False, True], quick=[False], why="the other dq is quick above")
def test_masked_queries_and_keys_change_no_bit(value, deterministic):
    q, k, v, do = arrays(HALF, 257, 264, 50, 50)
    mask = masks.mask(lambda b, h, i, j: (j <= i) & (i != 40) & (j != 3))
    found = []
    for bad in (0, value):
        q[:, 40], do[:, 40], k[:, 3], v[:, 3] = bad, bad, bad, bad
        ran = Ran(q, k, v, do, deterministic=deterministic, mask=mask)
        found.append([ran.out, ran.lse, *ran.gradients])
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)
        assert np.isfinite(a).all() or a is found[0][1]


@emulated
@mostly_thorough("value", [np.nan, -np.inf], quick=[-np.inf], why="NaN takes the same way", ids=str)
def test_a_value_reaches_only_the_rows_that_see_it(value):
    q, k, v, _ = arrays(BRAIN, 40, 300, 40, 40)
    plain = Ran(q, k, v, mask=masks.causal())
    v[0, 20, 289] = value
    other = Ran(q, k, v, mask=masks.causal())
    assert same_bits(plain.lse, other.lse)
    elsewhere = np.ones(plain.out.shape, bool)
    elsewhere[:, 20:, 289] = False
    assert same_bits(plain.out[elsewhere], other.out[elsewhere])
    seen = other.out[:, 20:, 289].astype(np.float32)
    assert (np.isnan(seen) if np.isnan(value) else seen == value).all()


@emulated
@pytest.mark.thorough("logits of any size are quick with other heads, by the same softmax")
def test_a_large_row_changes_no_bit_of_its_neighbours():
    q, k, v, _ = arrays(BRAIN, 320, 320)
    plain = Ran(q, k, v, scale=1e3)
    q[0, 5] *= 1000
    other = Ran(q, k, v, scale=1e3)
    rest = np.arange(70) != 5
    assert same_bits(plain.out[0, rest], other.out[0, rest])
    assert same_bits(plain.lse[0, rest], other.lse[0, rest])


@emulated
@mostly_thorough("paged", [False, True], quick=[True], why="memory without pages is simpler")
def test_a_cache_is_filled_by_the_same_kernel(paged):
    lengths, d = np.array([100, 0]), 264
    q, k, v = draw(BRAIN, (2, 1, 70, d), (2, 1, 112, d), (2, 1, 112, d))
    held, table = (hidden(k, lengths), hidden(v, lengths)), None
    if paged:
        pages, table = in_pages(np.concatenate(held, -1), 16, np.random.default_rng(1))
        held = [np.ascontiguousarray(x) for x in (pages[..., :d], pages[..., d:])]
    call = cached.call(q, *held, lengths, table, None, Options(mask=masks.causal()))
    out, lse = results(call)
    names = []
    emulator = Emulator(BLOCKS, runs=lambda special: names.append(special.kernel) or True)
    emulator.forward(call, out, lse)
    assert set(names) == {"forward_sm80"}
    how = {"precision": Precision.of(BRAIN, tensor_cores=True), "block_kv": 16}
    bound = forward_bound(q[:1], k[:1, :, :100], v[:1, :, :100], mask=masks.causal(), **how)
    assert rho(out[:1], *bound.out).value <= 1
    assert rho(lse[:1], *bound.lse).value <= 1
    assert not out[1].any()


# -- when they are chosen -------------------------------------------------------------------------


def target_of(arch):
    return Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])


@pytest.mark.parametrize("arch", [x for x in SHARED_MEMORY if x != "sm_75"])
@pytest.mark.parametrize("part", ["forward", "dkdv", "dq", "bias"])
def test_every_gpu_has_tiles_for_every_head(arch, part):
    for d in (257, 272, 320, 321, 384, 385, 448, 511, 512):
        for d_v in (1, d, 512):
            problem = validate.call(*(np.zeros((1, n), HALF) for n in (d, d, d_v))).problem
            choice = registry.select(part, Request(problem, target_of(arch)))
            tiles = choice.tiles
            assert choice.spec.name == {"forward": "forward_sm80"}.get(
                part, f"backward_sm80_{part}"
            )
            assert tiles.shared_memory <= SHARED_MEMORY[arch]
            assert tiles.threads * 128 <= REGISTERS
            if part in ("forward", "dq"):
                rows = tiles.block_q * tiles.row_sharers * 32 // tiles.threads
                assert rows in (16, 32)
                assert tiles.block_kv // tiles.row_sharers in (8, 16)


def test_heads_up_to_256_share_no_rows():
    for table in (*sm80.FORWARD_TILES.values(), *sm80.BACKWARD_TILES.values()):
        for largest, rows in table.items():
            for block_q, block_kv, warps, _, _ in rows:
                if table is not sm80.BACKWARD_TILES["backward_sm80_dkdv"] and largest <= 256:
                    bias = table is sm80.BACKWARD_TILES["backward_sm80_bias"]
                    assert bias or sm80.row_sharers(block_q, block_kv, warps) == 1


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_the_plan_names_them(arch):
    q = np.zeros((2, 40, 328), HALF)
    call = validate.call(q, q, q, Options())
    plan = route.of(call, target_of(arch)).plan
    hardware = "simt" if arch == "sm_75" else "sm80"
    assert plan.kernel == f"forward_{'sm90' if arch == 'sm_90' else hardware}"
    parts = [step.kernel for step in route.of_gradients(call, target_of(arch), True).steps]
    assert f"backward_{hardware}_dkdv" in parts
    assert f"backward_{hardware}_dq" in parts


def test_hopper_has_warpgroups_for_wide_heads():
    target = target_of("sm_90")
    for d, d_v, kernel in (
        (320, 320, "sm90"),
        (264, 8, "sm90"),
        (8, 328, "sm90"),
        (512, 512, "sm90"),
        (511, 512, "sm80"),  # rows of which not all begin at multiples of 16 bytes
        (300, 8, "sm80"),
    ):
        shapes = (2, 600, d), (2, 600, d), (2, 600, d_v)
        call = validate.call(*(np.zeros(shape, HALF) for shape in shapes), Options())
        assert route.of(call, target).plan.kernel == f"forward_{kernel}"


@pytest.mark.parametrize("d_v", [8, 256, 257, 320, 384, 448, 511, 512])
@pytest.mark.parametrize("d", [8, 256, 328, 384, 448, 512])
def test_parts_of_wide_values_fit(d, d_v):
    tiles = sm90.fit_forward(d, d_v, "masks")
    parts, columns = sm90_wide.parts_of(d_v)
    if max(d, d_v) > 320:
        assert tiles.v_parts == parts
        assert (parts - 1) * columns < d_v <= parts * columns
        assert columns <= 256
    else:
        assert tiles.v_parts == 1
    assert tiles.shared_memory <= SHARED_MEMORY["sm_90"]


def test_every_part_has_its_work_tiles():
    extent = Extent(queries=600, keys=600, heads=5, entries=3, multiprocessors=132)
    for d_v, parts in ((256, 1), (264, 2), (512, 2)):
        made = sm90.FORWARD.grid(extent, sm90.fit_forward(328, d_v))
        assert made.work_tiles == 3 * 5 * parts * 5
        assert made.blocks == 5
        assert made.size == min(made.work_tiles, 132)


def test_a_result_that_joins_another_one_is_not_divided():
    for d_v, kernel in ((512, "sm80"), (256, "sm90")):
        q, v = np.zeros((2, 600, 512), HALF), np.zeros((2, 600, d_v), HALF)
        call = validate.call(q, q, v, Options())
        out, lse = np.zeros((2, 600, d_v), np.float32), np.zeros((2, 600), np.float32)
        made = route.forward(call, target_of("sm_90"), out, lse, before=(out, lse))
        assert made.plan.kernel == f"forward_{kernel}"


def test_other_types_have_the_portable_kernels():
    for dtype in (np.float32, np.float64):
        q = np.zeros((2, 40, 320), dtype)
        call = validate.call(q, q, q, Options())
        assert route.of(call, target_of("sm_90")).plan.kernel == "forward_simt"
