"""Lists of tiles on a GPU: the bits of calls without them; hostile indices; graphs."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import masks
from cupyflash.gpu import tile_lists
from cupyflash.problem import replay
from cupyflash.reference.spec import naive

pytestmark = pytest.mark.gpu
LENGTH = 3000
IDS = np.sort(np.random.default_rng(1).integers(0, 40, LENGTH)).astype(np.int32)
INDICES = np.random.default_rng(2).integers(-3, 26, (2, 2, 24, 4)).astype(np.int32)
LAYOUT = np.random.default_rng(3).random((24, 24)) < 0.2


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


def draw(cupy, dtype, length=LENGTH, d=64):
    rng = np.random.default_rng(0)
    shapes = (2, 4, length, d), (2, 2, length, d), (2, 2, length, d)
    return [cupy.asarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def masks_of(cupy):
    return {
        "documents": masks.segments(cupy.asarray(IDS)) & masks.causal(),
        "windows": masks.segments(cupy.asarray(IDS)) & masks.window(100, 0),
        "blocks": masks.blocks(cupy.asarray(LAYOUT), 128, 128) & masks.causal(),
        "chosen": masks.chosen(cupy.asarray(INDICES), (128, 128)),
        "chosen, causal": masks.chosen(cupy.asarray(INDICES[:1]), (128, 128)) & masks.causal(),
    }


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", ["documents", "windows", "blocks", "chosen", "chosen, causal"])
def test_lists_change_no_bit(cupy, monkeypatch, name, dtype):
    q, k, v = draw(cupy, dtype)
    mask, found = masks_of(cupy)[name], []
    for switch in "01":
        monkeypatch.setattr(replay, "_entries", {})
        monkeypatch.setattr(tile_lists, "SWITCH", switch)
        for _ in range(2):  # checked, and recognised
            out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
            made = cupyflash.attention_backward(q, q, k, v, out, lse, mask=mask, deterministic=True)
            found.append([x.get() for x in (out, lse, *made[:3])])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("shift", [0, 32], ids=["one block of keys", "one or two"])
def test_stored_dq_has_the_bits_of_its_sums(cupy, monkeypatch, shift, d):
    """Two summands have the same sum in any order."""
    q, k, v = draw(cupy, np.float16, d=d)
    ids, found = ((np.arange(LENGTH) + shift) // 64).astype(np.int32), []
    mask = masks.segments(cupy.asarray(ids)) & masks.causal()
    for large in (2**60, 0):
        monkeypatch.setattr(replay, "_entries", {})
        monkeypatch.setattr(tile_lists, "LARGE_SUMS", large)
        out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
        for _ in range(2):  # checked, and recognised
            made = cupyflash.attention_backward(q, q, k, v, out, lse, mask=mask)
            found.append([x.get() for x in made[:3]])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


def test_no_index_reads_outside(cupy):
    q, k, v = draw(cupy, np.float16, 2100)
    ends = [-(2**63), -(2**31), -1, 16, 17, 2**31, 2**62, 2**63 - 1]
    indices = cupy.asarray(np.array(ends, np.int64)[None].repeat(17, 0))
    mask = masks.chosen(indices, 128)
    out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
    made = cupyflash.attention_backward(q, q, k, v, out, lse, mask=mask)
    layout = np.zeros((17, 17), bool)
    layout[:, 16] = True
    wanted = cupyflash.attention(q, k, v, mask=masks.blocks(cupy.asarray(layout), 128, 128))
    np.testing.assert_array_equal(out.get(), wanted.get())
    assert all(np.isfinite(x.get().astype(np.float32)).all() for x in made[:3])


def test_a_captured_call_reads_its_indices_at_each_replay(cupy):
    q, k, v = draw(cupy, np.float32, 1100, 32)
    indices = cupy.asarray(INDICES[:1, :1, :18] % 18)
    mask = masks.chosen(indices, 64)
    out, lse = cupyflash.attention(q, k, v, mask=mask, return_lse=True)
    cupyflash.attention_backward(q, q, k, v, out, lse, mask=mask)
    workspace = cupy.empty(cupyflash.workspace_size(q, k, v, mask=mask), np.uint8)
    gradients = [cupy.empty_like(x) for x in (q, k, v)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        cupyflash.attention(q, k, v, mask=mask, out=out, lse_out=lse)
        cupyflash.attention_backward(
            q, q, k, v, out, lse, mask=mask, grads_out=gradients, workspace=workspace
        )
        graph = stream.end_capture()
    for seed in range(3):
        indices[...] = cupy.asarray(np.random.default_rng(seed).integers(-1, 18, indices.shape))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        host = [x.get() for x in (q, k, v)]
        plain = {"mask": masks.chosen(indices.get(), 64)}
        np.testing.assert_allclose(
            out.get(), naive.attention(*host, **plain).out, rtol=2e-5, atol=2e-5
        )
        wanted = naive.attention_backward(host[0], *host, **plain)
        for ours, theirs in zip(gradients, wanted, strict=False):
            np.testing.assert_allclose(ours.get(), theirs, rtol=1e-4, atol=1e-4)
