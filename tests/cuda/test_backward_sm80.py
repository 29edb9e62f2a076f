"""The backward by tensor cores, on the CPU: what is particular to it, and when it is chosen."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import REVERSE, randomly
from halves import mostly_thorough
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.expr import len_q, log
from cupyflash.gpu import route
from cupyflash.gpu.kernels import registry, sm80
from cupyflash.gpu.kernels.spec import REGISTERS, Request
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients, Plan
from cupyflash.problem.options import Options
from cupyflash.testing import Precision, backward_bound, rho

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
HALF = np.dtype(np.float16)
BLOCKS = Blocks(32, 32, 64)
# Two warps share the queries of their keys, or each has all queries of its own, in two parts.
TILES = pytest.mark.parametrize("blocks", [BLOCKS, Blocks(64, 64, 64)], ids=["shared", "held"])
DIAGONAL = mostly_thorough(
    ("deterministic", "blocks"),
    [(mode, blocks) for mode in (False, True) for blocks in (BLOCKS, Blocks(64, 64, 64))],
    quick=[(False, BLOCKS), (True, Blocks(64, 64, 64))],
    why="both sums and both ways to share queries, but each with the other",
    ids=["adds-shared", "adds-held", "deterministic-shared", "deterministic-held"],
)
MODES = pytest.mark.parametrize("deterministic", [False, True], ids=["adds", "deterministic"])


def draw(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def run(q, k, v, do, deterministic, blocks=BLOCKS, schedule=REVERSE, **options):
    """Compute dq, dk and dv on the emulator, into memory that holds NaN."""
    emulator = Emulator(blocks, schedule, deterministic=deterministic)
    call = validate.call(q, k, v, Options(**options))
    out, lse = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype), np.empty(q.shape[:-1], np.float32)
    emulator.forward(call, out, lse)
    made = Gradients(*(np.full(x.shape, np.nan, x.dtype) for x in (q, k, v)))
    emulator.backward(call, do, out, lse, None, made)
    return made[:3]


FAR = {
    "documents": masks.segments(np.arange(1100) // 450, np.arange(40) // 20),
    "the last queries": masks.mask(lambda b, h, i, j: i >= 1090 + j),
    "both ends": masks.mask(lambda b, h, i, j: (i < 3) | (i > 1040 + j)),
}


def worst(q, k, v, do, made, **options):
    precision = Precision.of(q.dtype, tensor_cores=True)
    bound = backward_bound(do, q, k, v, precision=precision, block_kv=32, **options)
    return max(rho(x, *b).value for x, b in zip(made, bound[:3], strict=True))


# -- dS in float16 --------------------------------------------------------------------------------


@pytest.mark.thorough("tiles in masses; many without pairs are quick")
@emulated
@MODES
@pytest.mark.parametrize("name", FAR)
def test_more_tiles_than_are_classified_at_once(name, deterministic):
    # One warp: 32 tiles of 16 at a time.
    q, do, k, v = (x.astype(HALF) for x in draw((1, 1100, 8), (1, 1100, 8), (1, 40, 8), (1, 40, 8)))
    made = run(q, k, v, do, deterministic, Blocks(16, 16, 32), mask=FAR[name])
    assert worst(q, k, v, do, made, mask=FAR[name]) <= 1


@emulated
@pytest.mark.thorough("tiles in masses")
def test_more_blocks_of_keys_than_take_turns():
    q, k, v, do = (x.astype(HALF) for x in draw((2, 20, 8), *[(2, 4200, 8)] * 2, (2, 20, 8)))
    mask = masks.mask(lambda b, h, i, j: (i + j) % 2 == 0)
    made = run(q, k, v, do, False, Blocks(16, 16, 32), mask=mask)
    assert worst(q, k, v, do, made, mask=mask) <= 1


@emulated
@DIAGONAL
@pytest.mark.parametrize("order", [1, -1], ids=["grows", "shrinks"])
@mostly_thorough("heads", [1, 2], quick=[2], why="one head is simpler")
def test_ds_of_any_size(deterministic, blocks, order, heads):
    # From tile to tile 2^8 times larger or smaller: unscaled, the small ones vanish, and the large
    # ones overflow, times values of 200.
    q, do = draw((heads, 128, 16), (heads, 128, 16))
    k, v = draw((1, 96, 16), (1, 96, 16), seed=1)
    steps = 2.0 ** (8 * np.arange(-2, 2))[::order]
    do = do * np.repeat(steps, 32)[:, None]
    k = k * np.repeat(2.0 ** np.arange(-8, 4, 4), 32)[:, None]
    q, k, v, do = (x.astype(HALF) for x in (q, k, 200 * v, do))
    with np.errstate(over="ignore"):
        made = run(q, k, v, do, deterministic, blocks)
    assert worst(q, k, v, do, made) <= 1


@pytest.mark.thorough("gradients of any size are quick")
@emulated
@MODES
@TILES
def test_gradients_of_nothing_are_0(deterministic, blocks):
    q, k, v, do = (x.astype(HALF) for x in draw(*[(2, 40, 16)] * 4))
    made = run(q, k, v, 0 * do, deterministic, blocks)
    assert all(not x.any() for x in made)
    made = run(q, k, v, do, deterministic, blocks, mask=masks.mask(lambda b, h, i, j: j < 0))
    assert all(not x.any() for x in made)


# -- what is not finite ---------------------------------------------------------------------------


@emulated
@DIAGONAL
@mostly_thorough("value", [np.nan, np.inf], quick=[np.inf], why="infinities make NaN, too")
def test_masked_queries_and_keys_change_no_bit(deterministic, blocks, value):
    q, k, v, do = (x.astype(HALF) for x in draw(*[(2, 70, 24)] * 4))
    mask = masks.mask(lambda b, h, i, j: (j <= i) & (i != 50) & (j != 3))
    results = []
    for bad in (0, value):
        q[:, 50], do[:, 50], k[:, 3], v[:, 3] = bad, bad, bad, bad
        results.append(run(q, k, v, do, deterministic, blocks, mask=mask))
    for a, b in zip(*results, strict=True):
        assert same_bits(a, b)
        assert np.isfinite(a).all()


@pytest.mark.thorough("masked queries and keys are quick, which are not finite")
@emulated
@DIAGONAL
def test_a_query_that_is_not_finite_spoils_what_it_sees(deterministic, blocks):
    q, k, v, do = (x.astype(HALF) for x in draw(*[(1, 70, 24)] * 4))
    do[0, 40, 5] = np.nan
    dq, dk, dv = run(q, k, v, do, deterministic, blocks, mask=masks.causal())
    assert np.isnan(dq[0, 40]).all()
    assert np.isfinite(np.delete(dq, 40, axis=1)).all()
    assert np.isnan(dk[0, :41]).all()
    assert np.isfinite(dk[0, 41:]).all()
    assert np.isnan(dv[0, :41, 5]).all()
    assert np.isfinite(np.delete(dv, 5, axis=2)).all()
    assert np.isfinite(dv[0, 41:]).all()


# -- tiles that are passed by ---------------------------------------------------------------------


@emulated
@mostly_thorough(
    "deterministic", [False, True], quick=[True], why="tiles without pairs are passed by alike"
)
@mostly_thorough("first", [0, 40, 2290, 2399], quick=(40,), why="the same at the ends")
def test_many_tiles_without_pairs_are_passed_by(deterministic, first):
    # 75 tiles of queries, of which one or two have pairs: after none, few or many that have none.
    q, do = (x.astype(HALF) for x in draw(*[(1, 2400, 16)] * 2))
    k, v = (x.astype(HALF) for x in draw(*[(1, 40, 16)] * 2, seed=1))
    mask = masks.mask(lambda b, h, i, j: (i >= first) & (i < first + 20) & (j < 39))
    made = run(q, k, v, do, deterministic, mask=mask)
    assert worst(q, k, v, do, made, mask=mask) <= 1
    assert made[1][:, :39].any(axis=-1).all()


# -- dq that is added -----------------------------------------------------------------------------


@pytest.mark.thorough("odd sizes are quick without it")
@emulated
@MODES
@TILES
def test_scores_of_queries_that_do_not_exist_are_nobodys(deterministic, blocks):
    # Behind the last query it is the logarithm of what is negative, and NaN.
    late = scores.score(lambda s, b, h, i, j: s + log(len_q - i) * 0.1)
    q, do, k, v = (x.astype(HALF) for x in draw((1, 70, 8), (1, 70, 8), (1, 64, 8), (1, 64, 8)))
    made = run(q, k, v, do, deterministic, blocks, score_mod=late)
    assert worst(q, k, v, do, made, score_mod=late) <= 1


@pytest.mark.thorough("a search over broadcast axes; frontend tests have quick cases")
@emulated
def test_shared_queries_and_keys():
    q, do = (x.astype(HALF) for x in draw((2, 40, 24), (3, 2, 40, 16)))
    k, v = (x.astype(HALF) for x in draw((3, 1, 50, 24), (1, 50, 16), seed=1))
    for deterministic in (False, True):
        options = {"mask": masks.window(9, 2), "score_mod": scores.softcap(3.0)}
        emulator = Emulator(BLOCKS, randomly(1), deterministic=deterministic)
        call = validate.call(q, k, v, Options(**options))
        out, lse = np.empty((3, 2, 40, 16), HALF), np.empty((3, 2, 40), np.float32)
        emulator.forward(call, out, lse)
        made = Gradients(*(np.full(x.shape, np.nan, HALF) for x in (q, k, v)))
        workspace = np.full(emulator.workspace_size(call), 255, np.uint8)
        emulator.backward(call, do, out, lse, None, made, workspace)
        assert worst(q, k, v, do, made[:3], **options) <= 1


# -- the choice -----------------------------------------------------------------------------------


def kernels(q, arch, deterministic, plan=None, **options):
    """Return the names of the kernels of a backward on a GPU."""
    call = validate.call(q, q, q, Options(**options))
    gradients = Gradients(q, q, q)
    lse = np.zeros(q.shape[:-1], call.problem.accumulator)
    target = Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])
    made = route.backward(
        call, target, q, q, lse, None, gradients, plan, deterministic=deterministic
    ).recipe
    return [x.special.kernel for x in made.launches], made


def test_which_kernels_are_launched():
    q = np.zeros((2, 152, 64), HALF)
    names, made = kernels(q, "sm_80", False)
    assert names == ["backward_delta", "backward_sm80_dkdv", "backward_dq_rows"]
    assert made.atomic_dq
    assert made.launches[1].special.name.endswith("__dq__q128_kv128")
    assert made.scratch["dq_accum"].nbytes == 4 * q.size
    names_of_tensor_cores, made = kernels(q, "sm_80", True)
    assert names_of_tensor_cores == ["backward_delta", "backward_sm80_dkdv", "backward_sm80_dq"]
    assert "dq_accum" not in made.scratch
    portable = ["backward_delta", "backward_simt_dkdv", "backward_simt_dq"]
    assert kernels(q, "sm_75", False)[0] == portable
    for dtype, adds in ((np.float32, True), (np.float64, False)):
        wide = q.astype(dtype)
        names, made = kernels(wide, "sm_75", False)
        assert names == (portable[:2] if adds else portable)
        assert made.atomic_dq == adds
        assert "dq" not in made.scratch  # blocks add to dq itself
        assert kernels(wide, "sm_75", True)[0] == portable
    assert kernels(np.zeros((2, 240, 257), HALF), "sm_80", True)[0] == names_of_tensor_cores
    plan = Plan("backward_simt", 32, 32, "for a test")
    assert kernels(q, "sm_80", False, plan)[0] == portable


@pytest.mark.parametrize("arch", [arch for arch in SHARED_MEMORY if arch != "sm_75"])
@pytest.mark.parametrize("part", ["dkdv", "dq", "bias"])
def test_every_gpu_has_tiles_for_every_head(arch, part):
    target = Target(0, arch, capability(arch), 1, SHARED_MEMORY[arch])
    for d in (1, 17, 64, 65, 128, 129, 256):
        for d_v in (1, d, 256):
            problem = validate.call(*(np.zeros((1, n), HALF) for n in (d, d, d_v))).problem
            request = Request(problem, target)
            spec = registry.SPECS[f"backward_sm80_{part}"]
            tiles = spec.configure(request)
            assert arch == "sm_90" or registry.select(part, request)[:2] == (spec, tiles)
            assert tiles.shared_memory <= target.shared_memory


def test_blocks_that_share_a_multiprocessor_have_registers():
    for table in sm80.BACKWARD_TILES.values():
        for rows in table.values():
            for _, _, warps, _, resident in rows:
                assert 32 * warps * resident * 128 <= REGISTERS
