"""The backward by warpgroups: when it is chosen, and how it is launched."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, capability

from cupyflash import masks, scores
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu import params, route, strides
from cupyflash.gpu.kernels import registry, sm90, sm90_dkdv, tma_operands
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options

HALF, BRAIN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def launches(arch="sm_90", d=64, length=512, deterministic=False, lacks="", do=None, **options):
    q = np.zeros((2, length, d), HALF)
    call = validate.call(q, q, q, Options(**options))
    gpu = Target(0, arch, capability(arch), 132, SHARED_MEMORY[arch], lacks=lacks)
    made = Gradients(q, q, q)
    lse = np.zeros(q.shape[:-1], np.float32)
    do = q if do is None else do
    found = route.backward(call, gpu, do, q, lse, None, made, deterministic=deterministic)
    return found.recipe.launches


def test_which_kernels_are_launched():
    special = [x.special for x in launches()]
    names = ["backward_delta", "backward_sm90_dkdv", "backward_dq_rows"]
    assert [x.kernel for x in special] == names
    assert special[1].architecture == "sm_90a"
    assert special[1].atomic_dq
    names = ["backward_delta", "backward_sm90_dkdv", "backward_sm80_dq"]
    assert [x.special.kernel for x in launches(deterministic=True)] == names
    everything = {"mask": masks.causal(), "score_mod": scores.softcap(3.0), "dropout": 0.1,
                  "seed": 1}  # fmt: skip
    assert launches(**everything)[1].special.kernel == "backward_sm90_dkdv"
    for d in (48, 64, 96, 128, 192, 256):
        made = launches(d=d)[1]
        assert [x.name for x in made.maps] == ["q", "k", "v", "d_out", "dk", "dv"]
        assert [x.rows for x in made.maps] == [64] * 4 + [16] * 2
        assert made.special.tma_store
        assert made.special.tiles.block_kv == (128 if d <= 128 else 64)
    gap = np.zeros((2, 512, 68), HALF)[..., :64]
    for other in ({"arch": "sm_80"}, {"arch": "sm_100"}, {"lacks": "NVRTC"},
                  {"d": 60}, {"d": 20}, {"do": gap}):  # fmt: skip
        assert launches(**other)[1].special.kernel == "backward_sm80_dkdv"
    (alone,) = launches(length=49, d=32)
    assert alone.special.kernel == "backward_sm80_dkdv_tile"


@pytest.mark.parametrize(
    ("d", "d_v", "options", "keys", "length"),
    [
        (192, 128, {}, 128, 512),
        (192, 128, {"mask": masks.causal()}, 128, 512),
        (136, 72, {"mask": masks.window(9, 0)}, 128, 512),
        (72, 192, {}, 64, 512),  # of which more than half is dv
        (64, 192, {}, 64, 512),  # of whose dq two consumers compute every other tile
        (192, 136, {}, 64, 512),  # whose dk and dv take too many registers
        (200, 64, {}, 64, 512),
        (192, 128, {}, 128, 65),
        (192, 128, {"dropout": 0.1, "seed": 1}, 64, 512),
        (192, 128, {"score_mod": scores.softcap(3.0)}, 64, 512),
    ],
)
def test_blocks_of_wide_heads_have_128_keys_if_registers_suffice(d, d_v, options, keys, length):
    assert keys_of_block(HALF, d, d_v, length, **options) == keys


@pytest.mark.parametrize(
    ("dtype", "d_v", "keys"),
    [
        (BRAIN, 128, 64),  # of which one of two consumers would have all keys
        (HALF, 128, 128),  # whose dS has other scales if keys are shared
        (HALF, 192, 64),
    ],
    ids=str,
)
def test_few_keys_of_wide_heads_are_shared_if_no_bit_changes(dtype, d_v, keys):
    assert keys_of_block(dtype, 192, d_v, 64) == keys


def keys_of_block(dtype, d, d_v, length, **options):
    q, do = (np.zeros((2, 2048, x), dtype) for x in (d, d_v))
    k, v = (np.zeros((2, length, x), dtype) for x in (d, d_v))
    call = validate.call(q, k, v, Options(**options))
    gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    lse, made = np.zeros(q.shape[:-1], np.float32), Gradients(q.copy(), k.copy(), v.copy())
    special = route.backward(call, gpu, do, do.copy(), lse, None, made).recipe.launches[1].special
    assert special.kernel == "backward_sm90_dkdv"
    return special.tiles.block_kv


@pytest.mark.parametrize(
    ("what", "stores"),
    [("plain", True), ("apart", False), ("shared", False), ("packed", False), ("tools", False)],
)
def test_when_dk_and_dv_are_stored_by_boxes(what, stores, monkeypatch):
    q = np.zeros((2, 2, 512, 64), HALF)
    k = q[:1] if what == "shared" else q  # by v's leading axis, so that dk is summed on
    dk, dv = np.zeros((2, *k.shape[:-1], 68), HALF)
    dk, dv = (dk[..., :64], np.zeros_like(q)) if what == "apart" else (np.zeros_like(k), q.copy())
    if what == "tools":
        monkeypatch.setattr(tma_operands, "NO_TMA_STORE", True)
    if what == "packed":
        q, k, dk, dv = q[0], k[0], dk[0], dv[0]
        call = validate.varlen_call(q, k, q, [0, 512], [0, 512], True)
    else:
        call = validate.call(q, k, q)
    gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    lse, made = np.zeros(q.shape[:-1], np.float32), Gradients(q.copy(), dk, dv)
    launch = route.backward(call, gpu, q, q, lse, None, made).recipe.launches[1]
    assert launch.special.kernel == "backward_sm90_dkdv"
    assert launch.special.tma_store == stores
    assert [x.name for x in launch.maps[4:]] == (["dk", "dv"] if stores else ["q", "k"])


def test_dq_sums_say_how_they_lie():
    for arch, apart in (("sm_90", 1), ("sm_80", 32)):
        for launch in launches(arch)[1:]:
            layout = params.params(0, 0, 0)
            column = layout.place("dq_accum") + 8 * (len(params.OPERAND) + params.MAX_LEAD - 2)
            assert int.from_bytes(launch.template[column : column + 8], "little") == apart


@pytest.mark.parametrize(
    ("shape", "do", "size", "words"),
    [
        ((512, 64), {}, 2000, None),
        ((49, 32), {}, 2000, "of an SM by backward_sm80_dkdv"),
        ((512, 20), {}, 2000, "of q, rows do not begin at multiples of 16"),
        ((512, 64), {"shape": (512, 68)}, 2000, "of do, rows do not begin at multiples of 16"),
        ((512, 64), {}, 3800, "too many arrays or numbers"),
    ],
)
def test_what_it_cannot_serve(shape, do, size, words):
    q = np.zeros((2, *shape), HALF)
    do = np.zeros((2, *do.get("shape", shape)), HALF)[..., : shape[1]]
    call = validate.call(q, q, q)
    arrays = {"q": q, "k": q, "v": q, "d_out": do}
    lead = strides.lead_of((), {name: (x, 3) for name, x in arrays.items()})
    gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    request = Request(call.problem, gpu, call, arrays, lead, params_bytes=size)
    found = sm90.DKDV.serves(request)
    assert found is None if words is None else words in found


def test_its_tiles_fit():
    for d in range(1, sm90.DKDV.heads["float16"] + 1):
        for d_v, plain in itertools.product((1, 64, 128, d, 256), (False, True)):
            tiles = sm90_dkdv.fit_dkdv(d, d_v, plain)
            assert tiles.shared_memory <= SHARED_MEMORY["sm_90"]
    problem = validate.call(*[np.zeros((1, 64), HALF)] * 3).problem
    gpu = Target(0, "sm_90", (9, 0), 132, SHARED_MEMORY["sm_90"])
    for part in ("dkdv", "dq"):
        choice = registry.select(part, Request(problem, gpu))
        assert choice.spec.name == f"backward_sm80_{part}"
