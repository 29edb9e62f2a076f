"""Forward mode by warpgroups, on the emulator: its bounds, and when it is chosen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import target_of
from emulator import build
from emulator.blocks import Blocks
from emulator.calls import Emulator
from emulator.machine import FORWARD, REVERSE, Fault, randomly
from emulator.problems import run_tangent
from halves import mostly_thorough
from placement import same_bits
from tangents import jvp_ratios

from cupyflash import masks, scores
from cupyflash.gpu import route, source
from cupyflash.gpu.kernels import sm90_tangent
from cupyflash.gpu.kernels.registry import Choice
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.options import Options
from cupyflash.problem.tangents import Tangents
from cupyflash.testing import Directions, problem

emulated = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))
EACH_TYPE = mostly_thorough(
    "dtype",
    ["float16", "bfloat16"],
    quick=["bfloat16"],
    why="float16 differs from bfloat16 in its conversions, and where tangents of scores are large",
)


@dataclass(frozen=True)
class Warpgroups(Blocks):
    """Calls go to `forward_sm90_tangent`, or nowhere."""

    hopper: bool = True

    def find(self, part: str, request: Request) -> Choice | None:
        """Return the kernel of forward mode, and its tiles."""
        choice = super().find(part, request)
        assert choice is not None
        assert choice.spec is sm90_tangent.TANGENTS
        return choice


def drawn(made, names="qkvbs", seed=3):
    """Return a direction whose arrays lie as NumPy makes them; tangents of other names are None."""
    rng = np.random.default_rng(seed)
    arrays = made.q, made.k, made.v, *map(made.options.get, ("bias", "sink"))
    return Directions(*(
        None if x is None or name not in names else rng.standard_normal(x.shape).astype(x.dtype)
        for name, x in zip("qkvbs", arrays, strict=True)
    ))  # fmt: skip


def results_of(made, direction, schedule=REVERSE):
    return run_tangent(made, Emulator(Warpgroups(), schedule), direction)


def worst(made, direction, schedule=REVERSE):
    """Return the largest rho of the results on the emulator."""
    bounded = dataclasses.replace(made, tiles=(16, 16))
    ratios = jvp_ratios(bounded, direction, results_of(made, direction, schedule), True)
    assert min(ratios.values()) >= 0
    return max(ratios.values())


# -- numbers --------------------------------------------------------------------------------------


@emulated
@EACH_TYPE
@mostly_thorough(
    "d", [64, 128], quick=[128], why="other tiles, of which heads that fill none are quick"
)
@pytest.mark.parametrize("edge", [-1, 0, 1], ids=["less", "whole", "more"])
def test_sizes_at_the_edges_of_tiles(dtype, d, edge):
    tiles = sm90_tangent.fit(d, d, False)
    keys = 2 * tiles.block_kv + edge
    made = problem(dtype, (1, 2, tiles.block_q + edge, d), (1, 1, keys, d), (1, 1, keys, d))
    assert 0 < worst(made, drawn(made)) <= 1


@emulated
@EACH_TYPE
@mostly_thorough(
    "sizes",
    [(8, 64), (24, 40), (72, 104), (128, 8), (104, 128)],
    quick=[(24, 40), (72, 104)],
    why="more heads that fill no tile",
    ids=str,
)
@pytest.mark.parametrize("lengths", [(65, 7), (200, 300)], ids=str)
def test_heads_of_any_size(dtype, sizes, lengths):
    (d, d_v), (len_q, len_k) = sizes, lengths
    made = problem(dtype, (1, 1, len_q, d), (1, 1, len_k, d), (1, 1, len_k, d_v))
    assert 0 < worst(made, drawn(made), randomly(1)) <= 1


def with_every_option(dtype, d, d_v, mask="window"):
    return problem(
        dtype, (2, 4, 70, d), (2, 2, 145, d), (2, 2, 145, d_v), mask=mask, seed=3,
        scores=("softcap",), bias="float16", sink="float32", dropout=0.2,
    )  # fmt: skip


@emulated
@EACH_TYPE
@mostly_thorough(
    "sizes", [(24, 40), (128, 72)], quick=[(24, 40)], why="other tiles of the same heads", ids=str
)
def test_a_call_with_every_option_is_within_the_bound(dtype, sizes):
    made = with_every_option(dtype, *sizes)
    direction = drawn(made)
    assert all(x is not None for x in direction)
    assert 0 < worst(made, direction) <= 1


@emulated
@mostly_thorough(
    "names", ["q", "k", "v", "qv", "kv", "qk", "s"], quick=["kv", "s"], why="a kernel for each"
)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_directions_that_lack_tangents(dtype, names):
    made = problem(dtype, (1, 2, 70, 24), (1, 2, 130, 24), sink="float32")
    assert worst(made, drawn(made, names)) <= 1


@emulated
@EACH_TYPE
@mostly_thorough(
    "mask", ["causal", "segments", "array"], quick=["segments"], why="other generated code"
)
def test_masks_with_sinks_and_dropout(dtype, mask):
    more = {"sink": "float32", "dropout": 0.3}
    made = problem(dtype, (2, 2, 150, 40), (2, 1, 150, 40), mask=mask, seed=0, **more)
    assert 0 < worst(made, drawn(made)) <= 1


@emulated
@EACH_TYPE
def test_packed_sequences(dtype):
    offsets = [0, 70, 70, 75, 210], [0, 130, 140, 140, 250]
    made = problem(dtype, (2, 210, 24), (1, 250, 24), (1, 250, 40), offsets=offsets)
    assert 0 < worst(made, drawn(made)) <= 1


@emulated
@EACH_TYPE
@pytest.mark.parametrize("scale", [-0.3, 0.0, 3.0])
def test_scales(dtype, scale):
    made = problem(dtype, (1, 2, 70, 40), (1, 2, 130, 40), scale=scale)
    assert 0 < worst(made, drawn(made)) <= 1


@emulated
@EACH_TYPE
def test_strides_and_tangents_that_repeat(dtype):
    rng = np.random.default_rng(0)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)

    def rows(*shape):
        return rng.standard_normal(shape).astype(dtype)

    q, k, v = rows(2, 70, 4, 24).swapaxes(1, 2), rows(2, 2, 130, 32)[..., :24], rows(1, 2, 130, 40)
    tq, tk, tv = rows(1, 4, 70, 24), rows(2, 1, 130, 24), rows(130, 2, 2, 40).swapaxes(0, 2)
    along = np.broadcast_to(tq, q.shape), np.broadcast_to(tk, k.shape), tv.swapaxes(0, 1)[:1]
    call = validate.call(q, k, v, Options())
    whole = validate.call(*map(np.ascontiguousarray, (q, k, v)), Options())
    found = []
    for each, tangents in ((call, along), (whole, map(np.ascontiguousarray, along))):
        out, tout = np.full((2, 2, 4, 70, 40), np.nan, dtype)
        lse, tlse = np.full((2, 2, 4, 70), np.nan, np.float32)
        results = out, tout, lse, tlse
        Emulator(Warpgroups()).forward_tangent(each, Tangents(*tangents), results)
        found.append(results)
    for ours, right in zip(*found, strict=True):
        assert np.isfinite(right.astype(np.float32)).all()
        assert same_bits(ours, right)


@emulated
def test_what_tangents_of_a_row_have_in_common_costs_no_digits():
    made = problem("bfloat16", (1, 1, 70, 24), (1, 1, 130, 24))
    rng = np.random.default_rng(0)
    tk = np.broadcast_to(100 * rng.standard_normal(24), made.k.shape).astype(made.dtype)
    tk = tk + rng.standard_normal(made.k.shape).astype(made.dtype)
    assert worst(made, Directions(None, tk, None, None, None)) <= 1


@emulated
def test_large_tangents_of_scores_fit_float16():
    made = problem("float16", (1, 1, 70, 24), (1, 1, 250, 24))
    rng = np.random.default_rng(0)
    made.v[...] *= np.float16(0.01)  # so that tangents of the output fit, too
    tq, tk, tv = rng.uniform(-1, 1, (3, *made.k.shape))
    tq = tq[..., :70, :]
    tq[..., ::2, :] *= 60000  # every other row
    direction = Directions(*(x.astype(made.dtype) for x in (tq, 300 * tk, tv)), None, None)
    assert worst(made, direction) <= 1


@emulated
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("changed", [False, True], ids=["mask", "score"])
def test_keys_that_nobody_sees_change_no_bit(dtype, changed):
    rng = np.random.default_rng(0)
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    q, k, v, tq, tk, tv = rng.standard_normal((6, 1, 2, 140, 16)).astype(dtype)
    options = {"score_mod": scores.softcap(5.0)} if changed else {}
    call = validate.call(q, k, v, Options(mask=masks.lengths([100]), **options))

    def run():
        out, tout = np.full((2, *q.shape), np.nan, dtype)
        lse, tlse = np.full((2, *q.shape[:-1]), np.nan, np.float32)
        Emulator(Warpgroups()).forward_tangent(call, Tangents(tq, tk, tv), (out, tout, lse, tlse))
        return out, tout, lse, tlse

    expected = run()
    for hidden in (k, v, tk, tv):
        hidden[:, :, 100:] = np.nan
    for ours, right in zip(run(), expected, strict=True):
        assert same_bits(ours, right)


@emulated
@pytest.mark.parametrize("where", [4, 5], ids=["v", "tv"])
def test_what_is_not_finite_and_seen_is_in_the_results(where):
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((6, 1, 1, 140, 16)).astype(np.float16)
    q, k, tq, tk, v, tv = arrays
    arrays[where][0, 0, 20, 3] = np.inf
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    out, tout = np.zeros((2, *q.shape), np.float16)
    lse, tlse = np.zeros((2, *q.shape[:-1]), np.float32)
    Emulator(Warpgroups()).forward_tangent(call, Tangents(tq, tk, tv), (out, tout, lse, tlse))
    seen = np.zeros(q.shape, bool)
    seen[..., 20:, 3] = True
    np.testing.assert_array_equal(~np.isfinite(out), seen & (where == 4))
    np.testing.assert_array_equal(~np.isfinite(tout), seen)
    assert np.isfinite(lse).all()
    assert np.isfinite(tlse).all()


@emulated
@EACH_TYPE
def test_no_bit_depends_on_the_schedule(dtype):
    made = problem(dtype, (2, 2, 200, 40), (2, 2, 260, 40), mask="causal")
    direction = drawn(made)
    first = results_of(made, direction, FORWARD)
    for schedule in (REVERSE, randomly(1), randomly(2)):
        for ours, right in zip(results_of(made, direction, schedule), first, strict=True):
            assert same_bits(ours, right)


@emulated
def test_empty_tiles_are_not_visited():
    rng = np.random.default_rng(0)
    q, k, v, tq, tk, tv = rng.standard_normal((6, 1, 256, 24)).astype(np.float16)
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    visited = np.zeros(1, np.uint64)
    out, tout = np.zeros((2, *call.q.shape), np.float16)
    lse, tlse = np.zeros((2, *call.q.shape[:-1]), np.float32)
    along = Tangents(*(x[None] for x in (tq, tk, tv)))
    Emulator(Warpgroups()).forward_tangent(call, along, (out, tout, lse, tlse), visited)
    block_kv = sm90_tangent.fit(24, 24, False).block_kv
    assert visited[0] == -(-128 // block_kv) + -(-256 // block_kv)


KERNEL, STORAGE = "sm90/forward_sm90_tangent.cu", "sm90/tangent_storage.cuh"
FAULTS = {
    "keys": (KERNEL, "shared.k_pipeline.wait_full(kv_uses);", ""),
    "next keys": (KERNEL, "if (next >= 0) shared.k_pipeline.wait_full(n + 1);", ""),
    "values": (KERNEL, "shared.v_pipeline.wait_full(n);", ""),
    "queries": (KERNEL, "warpgroup::mbarrier_wait(shared.q_full_barrier(index), q_uses % 2);", ""),
    "products": (KERNEL, "ptx::wgmma_wait<0>();\n        ptx::fence_accumulator(s);", ""),
    "bytes of keys": (STORAGE, "KTiles::BYTES * (HAS_TK ? 2 : 1)", "KTiles::BYTES"),
}


@emulated
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.thorough("mutants; that the emulator reports faults is quick")
def test_what_has_not_come_is_reported(name):
    path, before, after = FAULTS[name]
    assert source.read(path).count(before) == 1
    made = problem("bfloat16", (1, 1, 140, 24), (1, 1, 400, 24))
    direction = drawn(made)

    def read(asked):
        text = build.read(asked)
        return text.replace(before, after) if asked == path else text

    def run_in_many_ways():
        for schedule in (FORWARD, REVERSE, *map(randomly, range(8))):
            run_tangent(
                made, Emulator(Warpgroups(multiprocessors=1), schedule, read=read), direction
            )

    with pytest.raises(Fault):
        run_in_many_ways()


# -- which calls it serves ------------------------------------------------------------------------


def plan_of(q, k=None, **options):
    k = q if k is None else k
    call = validate.call(q, k, k, Options(**options))
    return route.of_tangents(call, target_of("sm_90")).plan


@pytest.mark.parametrize(
    ("d", "options", "block_kv"),
    [
        (128, {}, 64),
        (64, {"mask": masks.causal()}, 112),
        (64, {"score_mod": scores.softcap(5.0)}, 64),
        (128, {"bias": np.zeros((2, 200, 200), np.float16)}, 48),
    ],
    ids=["128", "64", "changed 64", "changed 128"],
)
def test_its_tiles(d, options, block_kv):
    found = plan_of(np.zeros((2, 200, d), np.float16), **options)
    assert (found.kernel, found.block_q) == ("forward_sm90_tangent", 128)
    assert found.block_kv == block_kv


@pytest.mark.parametrize(
    ("q", "why"),
    [
        (np.zeros((2, 64, 64), np.float16), "it is for more than 64 queries"),
        (np.zeros((2, 200, 136), np.float16), "head sizes 136 and 136 are beyond its 128"),
        (np.zeros((2, 200, 60), np.float16), "of q, rows do not begin at multiples of 16 bytes"),
        (np.zeros((2, 64, 200), np.float16).swapaxes(1, 2), "of q, its columns lie apart"),
    ],
    ids=["few queries", "wide", "narrow rows", "columns"],
)
def test_what_the_portable_tensor_cores_compute_instead(q, why):
    found = plan_of(q)
    assert found.kernel == "forward_sm80_tangent"
    assert f"not by forward_sm90_tangent, because {why}" in found.reason


def test_tangents_that_tma_cannot_load_go_elsewhere():
    q = np.zeros((1, 2, 200, 64), np.float16)
    call = validate.call(q, q, q, Options())
    results = np.zeros_like(q), np.zeros_like(q), *np.zeros((2, 1, 2, 200), np.float32)
    tk = np.broadcast_to(np.zeros(64, np.float16), q.shape)
    found = route.forward_tangent(call, target_of("sm_90"), Tangents(q, tk, None), results).plan
    assert found.kernel == "forward_sm80_tangent"
    assert "because of tk, its rows repeat" in found.reason
