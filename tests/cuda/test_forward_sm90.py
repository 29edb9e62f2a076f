"""The forward by warpgroups, on the CPU: what is particular to it, and when it is chosen."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability
from emulator.machine import FORWARD, REVERSE, randomly
from halves import mostly_thorough
from harness import attend
from placement import same_bits
from warpgroup_calls import EACH_TYPE, TYPES, draw, emulated, run, within_the_bound

from cupyflash import masks, scores
from cupyflash.arrays import cuda_device
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import route, tma
from cupyflash.gpu.kernels import registry, sm90, tma_operands
from cupyflash.gpu.kernels.spec import Request
from cupyflash.gpu.strides import Operand
from cupyflash.problem import validate
from cupyflash.problem.options import Options

# -- numbers --------------------------------------------------------------------------------------


@emulated
@EACH_TYPE
@mostly_thorough(
    "heads",
    [64, 128, 192, 256],
    quick=(64,),
    why="other tiles, of which heads of any size are quick",
)
@pytest.mark.parametrize("edge", [-1, 0, 1], ids=["less", "whole", "more"])
def test_sizes_at_the_edges_of_tiles(dtype, heads, edge):
    block_q, block_kv = sm90.FORWARD_TILES["plain, few keys"][heads]
    q, k, v = draw(dtype, (1, block_q + edge, heads), *[(1, 2 * block_kv + edge, heads)] * 2)
    out, lse, visited = run(q, k, v)
    within_the_bound(q, k, v, out, lse)
    assert visited == (2 if edge > 0 else 1) * (3 if edge > 0 else 2)


@emulated
@EACH_TYPE
@mostly_thorough(
    "sizes",
    [(8, 8), (16, 64), (40, 104), (72, 72), (136, 8), (200, 248), (256, 64)],
    quick=[(40, 104)],
    why="more heads that fill no tile",
    ids=str,
)
@pytest.mark.parametrize("lengths", [(1, 1), (65, 7), (30, 500)], ids=str)
def test_heads_of_any_size(dtype, sizes, lengths):
    (d, d_v), (len_q, len_k) = sizes, lengths
    q, k, v = draw(dtype, (1, len_q, d), (1, len_k, d), (1, len_k, d_v))
    within_the_bound(q, k, v, *run(q, k, v, randomly(1))[:2])


@emulated
@EACH_TYPE
def test_shared_heads_a_sink_and_broadcast_leading_axes(dtype):
    q, k, v = draw(dtype, (3, 1, 4, 70, 64), (2, 2, 150, 64), (3, 2, 2, 150, 64))
    sink = np.array([0.5, -np.inf, 3, -2], np.float32)
    out, lse, _ = run(q, k, v, sink=sink)
    within_the_bound(q, k, v, out, lse, sink=sink)


@emulated
@EACH_TYPE
def test_strides(dtype):
    # Sequences before heads, rows with a gap, heads that repeat, an output in another order.
    q, k, v, o = draw(dtype, (2, 70, 4, 64), (2, 1, 150, 72), (150, 2, 2, 64), (2, 66, 4, 70))
    q, k, v = q.swapaxes(1, 2), np.broadcast_to(k, (2, 2, 150, 72))[..., :64], v.swapaxes(0, 2)
    v = v.swapaxes(0, 1)
    out = o[:, :64].transpose(0, 2, 3, 1)
    found, lse, _ = run(q, k, v, out=out)
    plain, plain_lse, _ = run(*(np.ascontiguousarray(x) for x in (q, k, v)))
    assert same_bits(found, plain)
    assert same_bits(lse, plain_lse)
    within_the_bound(q, k, v, plain, plain_lse)


@emulated
@EACH_TYPE
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-300, 3.0, 3e38])
@mostly_thorough(
    "options",
    [{}, {"mask": masks.causal()}, {"mask": masks.causal(), "score_mod": scores.softcap(2.0)}],
    quick=lambda options: not options,
    why="a mask leaves the scale where it is; a changed score is quick with the usual one",
    ids=len,
)
def test_every_finite_scale(dtype, scale, options):
    q, k, v = draw(dtype, (2, 70, 40), (2, 140, 40), (2, 140, 64))
    if scale > 1e30:
        q[:] = 0
    out, lse, _ = run(q, k, v, scale=scale, **options)
    within_the_bound(q, k, v, out, lse, scale=scale, **options)


@emulated
@EACH_TYPE
def test_logits_of_any_size(dtype):
    # s c - m c with a rounded m c would be off by thousands: the maximum's own weight is not 1.
    size = 60000 if dtype == np.float16 else 133120
    q, k = np.full((1, 70, 64), size, dtype), np.full((1, 200, 64), size, dtype)
    (v,) = draw(dtype, (1, 200, 64))
    out, lse, _ = run(q, k, v)
    mean = v.astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out.astype(np.float64), np.broadcast_to(mean, out.shape), atol=0.01)
    exact = 64 / 8 * float(dtype.type(size)) ** 2 + np.log(200)
    np.testing.assert_allclose(lse, exact, rtol=1e-6)


@emulated
@EACH_TYPE
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_is_where_the_twin_has_it(dtype, where, value):
    arrays = dict(zip("qkv", draw(dtype, *[(1, 150, 64)] * 3), strict=True))
    arrays[where][0, 20, 3] = value
    out, lse, _ = run(**arrays)
    twin = attend(*arrays.values())
    for ours, theirs in ((out, twin.out), (lse, twin.lse)):
        a, b = ours.astype(np.float64), np.asarray(theirs).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
        np.testing.assert_array_equal(a[np.isinf(b)], b[np.isinf(b)])
        assert (np.isinf(a) == np.isinf(b)).all()


@emulated
@EACH_TYPE
@mostly_thorough("d", [64, 256], quick=[64], why="another tile of the same code")
def test_no_bit_depends_on_the_schedule(dtype, d):
    q, k, v = draw(dtype, (2, 200, d), (1, 400, d), (1, 400, d))
    first, first_lse, _ = run(q, k, v, FORWARD)
    for schedule in (REVERSE, randomly(1), randomly(2)):
        out, lse, _ = run(q, k, v, schedule)
        assert same_bits(first, out)
        assert same_bits(first_lse, lse)


# -- maps of arrays -------------------------------------------------------------------------------


def test_maps_are_those_of_the_arrays():
    q, k, v = draw(TYPES[0], (3, 2, 600, 4, 64), (2, 512, 2, 128), (3, 2, 2, 512, 56))
    q, k = q.swapaxes(-3, -2), k.swapaxes(-3, -2)[..., ::1][..., :64]
    call = validate.call(q, k, v)
    out = np.empty((3, 2, 4, 600, 56), np.float16)
    hopper_gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    (launch,) = route.forward(call, hopper_gpu, out, None).recipe.launches
    assert launch.special.kernel == "forward_sm90"
    assert launch.special.architecture == "sm_90a"
    assert launch.special.tma_store
    assert [made.name for made in launch.maps] == ["q", "k", "v", "out"]
    shapes = [(64, 600, 4, 2, 3), (64, 512, 2, 2, 1), (56, 512, 2, 2, 3), (56, 600, 4, 2, 3)]
    assert [made.shape for made in launch.maps] == shapes
    assert launch.maps[0].strides == (512, 128, 600 * 512, 2 * 600 * 512)
    assert launch.maps[1].strides[:3] == (512, 256, 512 * 512)
    assert launch.maps[2].strides == (112, 512 * 112, 2 * 512 * 112, 4 * 512 * 112)
    block_kv = launch.special.tiles.block_kv
    assert launch.maps[3].strides == (112, 600 * 112, 4 * 600 * 112, 2 * 4 * 600 * 112)
    assert [made.rows for made in launch.maps] == [64, block_kv, block_kv, 16]


@pytest.mark.parametrize(
    ("d_v", "columns", "len_k", "packed", "stores"),
    [
        (64, slice(None), 512, False, True),
        (64, slice(0, 64), 512, False, True),
        (64, slice(4, 68), 512, False, False),  # rows begin between pieces of 16 bytes
        (64, slice(63, None, -1), 512, False, False),
        (60, slice(0, 60), 512, False, False),
        (64, slice(None), 512, True, False),  # a box would reach into the next sequence's rows
        (128, slice(0, 128), 4096, False, True),
        (128, slice(0, 128), 4097, False, False),  # tiles of 176 keys leave no room
        (256, slice(0, 256), 512, False, False),
    ],
    ids=str,
)
def test_when_results_are_stored_by_boxes(d_v, columns, len_k, packed, stores):
    d = max(d_v, 64)
    q, k = np.zeros((2, 512, d), np.float16), np.zeros((2, len_k, d), np.float16)
    v = np.zeros((2, len_k, 256), np.float16)[..., :d_v]
    rows = 60 if d_v == 60 else 256  # of out; of 60 they begin at multiples of 120 bytes
    out = np.zeros((2, 512, rows), np.float16)[..., columns][..., :d_v]
    if packed:
        call = validate.varlen_call(q, k, v, [0, 100, 512], [0, 100, 512], True)
    else:
        call = validate.call(q, k, v)
    (launch,) = route.forward(call, target_of("sm_90"), out, None).recipe.launches
    assert launch.special.kernel == "forward_sm90"
    assert launch.special.tma_store == stores
    assert launch.special.name.endswith("tma__q192_kv128") == (stores and d == 64)
    assert [made.name for made in launch.maps] == ["q", "k", "v", "out" if stores else "q"]


def test_for_some_tools_no_boxes_are_stored(monkeypatch):
    call, out = call_of(), np.zeros((2, 512, 64), np.float16)
    (launch,) = route.forward(call, target_of("sm_90"), out, None).recipe.launches
    monkeypatch.setattr(tma_operands, "NO_TMA_STORE", True)
    (other,) = route.forward(call, target_of("sm_90"), out, None).recipe.launches
    assert (launch.special.tma_store, other.special.tma_store) == (True, False)
    assert launch.special.kernel == other.special.kernel == "forward_sm90"


@pytest.mark.parametrize(
    ("change", "sizes", "address", "words"),
    [
        ({}, {}, 0, None),
        ({}, {}, 8, "multiples of 16 bytes"),
        ({"row": 68}, {}, 0, "multiples of 16 bytes"),
        ({"row": -64}, {}, 0, "backwards"),
        ({"head": -6400}, {}, 0, "backwards"),
        ({"row": 0}, {}, 0, "rows repeat"),
        ({"row": 0}, {"rows": 1}, 0, None),
        ({"head": 0}, {}, 0, None),
        ({"head": 4}, {"heads": 1}, 0, None),
        ({"col": 2}, {}, 0, "columns lie apart"),
        ({"lead": (0, 0, 0, 0)}, {}, 0, None),
        ({}, {"lead": (1, 2, 3, 2)}, 0, "two leading axes"),
        ({}, {"rows": 0}, 0, "empty"),
        ({"row": 2**39}, {}, 0, "too large"),
    ],
)
def test_what_cannot_be_copied_by_boxes(change, sizes, address, words):
    plain = Operand(0, (0, 0, 25600, 12800), 6400, 64, 1)._replace(**change)
    sizes = {"lead": (1, 1, 3, 2), "heads": 2, "rows": 100, "columns": 64} | sizes
    lead, *rest = sizes.values()
    found = tma.obstacle(plain, address, (*lead, *rest))
    assert found is None if words is None else words in found


# -- when it is chosen ----------------------------------------------------------------------------


def target_of(arch, **more):
    return Target(0, arch, capability(arch), 132, SHARED_MEMORY[arch], **more)


def call_of(d=64, d_v=None, len_q=512, len_k=512, dtype=np.float16, **options):
    q, k, v = (
        np.zeros((2, n, size), dtype) for n, size in ((len_q, d), (len_k, d), (len_k, d_v or d))
    )
    return validate.call(q, k, v, Options(**options))


def plan_of(call, gpu):
    return route.of(call, gpu).plan


@pytest.mark.parametrize("d", [48, 64, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"score_mod": scores.softcap(3.0)},
        {"bias": np.zeros((512, 512), np.float32)},
        {"dropout": 0.1, "seed": 1},
        {"scale": -1.0},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_it_serves_long_rows_on_its_hardware_only(dtype, d, options):
    call = call_of(d, dtype=dtype, **options)
    assert plan_of(call, target_of("sm_90")).kernel == "forward_sm90"
    for arch in ("sm_80", "sm_89", "sm_100", "sm_120"):
        plan = plan_of(call, target_of(arch))
        assert plan.kernel == "forward_sm80"
        assert "sm90" not in plan.reason


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"d": 60}, "of q, rows do not begin at multiples of 16 bytes"),
    ],
)
def test_the_plan_says_why_not(options, words):
    plan = plan_of(call_of(**options), target_of("sm_90"))
    assert plan.kernel == "forward_sm80"
    assert "not by forward_sm90, because" in plan.reason
    assert words in plan.reason


def test_tiles_of_short_rows_that_are_masked():
    def block_q(length, **options):
        return plan_of(call_of(len_q=length, len_k=2048, **options), target_of("sm_90")).block_q

    mask = masks.causal()
    assert block_q(1024, mask=mask) == 128
    assert block_q(1152, mask=mask) == block_q(1152) == 192
    # A sequence's result does not depend on others that are packed with it.
    q = np.zeros((8, 600, 64), np.float16)
    packed = validate.varlen_call(q, q, q, [0, 600], [0, 600], True, Options(mask=mask))
    assert plan_of(packed, target_of("sm_90")).block_q == 192


def test_the_plan_says_what_is_not_installed():
    plan = plan_of(call_of(), target_of("sm_90", lacks="NVRTC is 12.4 and not 12.9"))
    assert plan.kernel == "forward_sm80"
    assert "because NVRTC is 12.4 and not 12.9" in plan.reason


@pytest.mark.parametrize(
    ("version", "finds", "words"),
    [
        ((13, 0), True, ""),
        ((12, 9), True, ""),
        ((12, 8), True, "NVRTC is 12.8 and not 12.9"),
        ((13, 0), False, "cuda-bindings is not installed"),
        ((13, 0), None, "cuda-bindings is not installed"),
    ],
)
def test_what_it_lacks(monkeypatch, version, finds, words):
    def find_spec(name):
        assert name == "cuda.bindings"
        if finds is None:
            raise ModuleNotFoundError(name="cuda")
        return name if finds else None

    nvrtc = SimpleNamespace(getVersion=lambda: version)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(nvrtc=nvrtc)))
    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    assert cuda_device._lacks() == words


def test_blocks_share_what_is_of_one_length():
    q = np.zeros((1024, 200, 64), np.float16).swapaxes(0, 1)
    gpu, out = target_of("sm_90"), np.empty_like(q)
    (launch,) = route.forward(validate.call(q, q, q), gpu, out, None).recipe.launches
    assert launch.grid == gpu.multiprocessors == 132
    (launch,) = route.forward(
        validate.call(q[:3], q[:3], q[:3]), gpu, out[:3], None
    ).recipe.launches
    assert launch.grid == 3 * -(-1024 // 192)
    packed = validate.varlen_call(q, q, q, [0, 500, 1024], [0, 500, 1024], True)
    (launch,) = route.forward(packed, gpu, out, None).recipe.launches
    assert launch.grid == 200 * 2 * -(-524 // 192)  # as many for each sequence as for the longest


@pytest.mark.thorough("five grids of the same call; work is shared out in every quick one")
@emulated
@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}], ids=["plain", "causal"])
def test_any_number_of_blocks_shares_any_number_of_jobs(options):
    # 10 jobs; under the mask, a block's last round may have none.
    q, k, v = draw(TYPES[1], (5, 200, 64), *[(5, 150, 64)] * 2)
    whole = run(q, k, v, multiprocessors=10, **options)
    within_the_bound(q, k, v, *whole[:2], **options)
    for multiprocessors in (1, 3, 4, 7):
        shared = run(q, k, v, multiprocessors=multiprocessors, **options)
        assert same_bits(shared[0], whole[0])
        assert same_bits(shared[1], whole[1])
        assert shared[2] == whole[2]


@pytest.mark.parametrize("offsets", [[0, 512, 1024], [0, 1, 1024]], ids=str)
def test_packed_sequences_of_any_length(offsets):
    q = np.zeros((1024, 2, 64), np.float16).swapaxes(0, 1)
    call = validate.varlen_call(q, q, q, offsets, offsets, True)
    assert plan_of(call, target_of("sm_90")).kernel == "forward_sm90"


def test_its_tiles_fit():
    for d in range(1, sm90.FORWARD.heads["float16"] + 1):
        for d_v, registers in itertools.product((1, d, 256), sm90.FORWARD_TILES):
            tiles = sm90.fit_forward(d, d_v, registers)
            assert tiles.shared_memory <= SHARED_MEMORY["sm_90"]
            assert tiles.threads == 2 * tiles.block_q + 128


def test_another_plan_is_taken():
    request = Request.of(call_of(), target_of("sm_90"))
    assert registry.select("forward", request).spec is sm90.FORWARD
    choice = registry.select("forward", dataclasses.replace(request, blocks=(32, 32)))
    assert choice.spec.name == "forward_simt"
