"""Attention on PyTorch's tensors on a GPU: bits, gradients, streams, memory, graphs."""

from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError, lookup, masks, scores

torch = pytest.importorskip("torch", reason="needs PyTorch, compiled for CUDA")

from cupyflash.torch import (  # noqa: E402
    attention,
    attention_cached,
    attention_varlen,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from cupyflash.torch import transformers as adapter  # noqa: E402
from cupyflash.torch.functions import drawn_seed  # noqa: E402
from cupyflash.torch.tensors import array_of  # noqa: E402

pytestmark = pytest.mark.gpu
CAUSAL = masks.causal()
TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def cupy(gpu):
    import cupy

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return cupy


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to("cuda", dtype)


def qkv(dtype=torch.float32, length=100):
    return [draw(2, 4, length, 64, dtype=dtype, seed=n) for n in range(3)]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_tensors_give_the_bits_of_arrays(cupy, dtype):
    tensors = [*qkv(dtype), draw(4, 100, 100), draw(4, dtype=dtype)]
    for x in tensors:
        x.requires_grad_()
    options = {"mask": CAUSAL, "score_mod": [scores.softcap(3.0)], "dropout": 0.25, "seed": 7}
    for _ in range(2):  # the second one is recognised
        for x in tensors:
            x.grad = None
        out, lse = attention(
            *tensors[:3], bias=tensors[3], sink=tensors[4], return_lse=True,
            deterministic=True, **options,
        )  # fmt: skip
        (out * 3 + lse[..., None].to(dtype)).sum().backward()
        torch.cuda.synchronize()
    arrays = [array_of(x.detach()) for x in tensors]
    options |= {"bias": arrays[3], "sink": arrays[4]}
    wanted, wanted_lse, vjp = cupyflash.attention_vjp(
        *arrays[:3], return_lse=True, deterministic=True, **options
    )
    gradients = vjp(cupy.full_like(wanted, 3), cupy.full_like(wanted_lse, 64))
    assert bool((array_of(out.detach()) == wanted).all())
    assert bool((array_of(lse.detach()) == wanted_lse).all())
    for x, gradient in zip(tensors, gradients, strict=True):
        np.testing.assert_allclose(
            array_of(x.grad).get().astype(np.float64),
            gradient.get().astype(np.float64),
            rtol=2e-2, atol=2e-2,
        )  # fmt: skip


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_that_are_recognised_by_their_forward(cupy, masked):
    mask = torch.ones(100, 100, dtype=torch.bool, device="cuda").tril() if masked else None
    for n in range(5):  # the first of a thread goes through CuPy, and the next has a signature
        q, k, v, do = (
            draw(2, 100, 4, 64, dtype=torch.float16, seed=10 * n + m).transpose(1, 2)
            for m in range(4)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=mask, deterministic=True)
        found = torch.autograd.grad(out, leaves, do)
        arrays = [array_of(x.detach()) for x in (q, k, v)]
        options = {"mask": None if mask is None else array_of(mask)}
        wanted, lse = cupyflash.attention(*arrays, **options, return_lse=True)
        assert bool((array_of(out.detach()) == wanted).all())
        gradients = cupyflash.attention_backward(
            array_of(do), *arrays, wanted, lse, deterministic=True, **options
        )
        for a, b in zip(found, gradients[:3], strict=True):
            assert bool((array_of(a) == b).all()), n


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("length", [60, 500])
def test_gradients_that_the_forward_prepares(cupy, dtype, length):
    """Their sums are 0 in time, also if they are computed twice, or late."""
    leaves = [x.requires_grad_() for x in qkv(dtype, length)]
    do = draw(2, 4, length, 64, dtype=dtype, seed=9)
    wanted = torch.autograd.grad(attention(*leaves, deterministic=True), leaves, do)
    for _ in range(4):
        late, out = attention(*leaves), attention(*leaves)
        found = [torch.autograd.grad(out, leaves, do, retain_graph=True) for _ in range(2)]
        found.append(torch.autograd.grad(late, leaves, do))
        for a, b in zip(sum(found, ()), wanted * 3, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_graph_of_the_backward_alone(cupy):
    """It runs several times after one forward."""
    leaves = [x.requires_grad_() for x in qkv(torch.float16, 100)]
    do = draw(2, 4, 100, 64, dtype=torch.float16, seed=9)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            wanted = torch.autograd.grad(attention(*leaves), leaves, do)
        out = attention(*leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = torch.autograd.grad(out, leaves, do)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("d", [20, 64, 128])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8)], ids=str)
def test_a_generation_gives_the_bits_of_arrays(cupy, d, heads):
    k, v = (draw(1, heads[1], 600, d, dtype=torch.float16, seed=n) for n in range(2))
    for keys in (*range(55, 75), *range(125, 135), *range(505, 520)):
        q = draw(1, heads[0], 1, d, dtype=torch.float16, seed=keys)
        room = q, k[:, :, :keys], v[:, :, :keys]  # whose strides stay
        alone = q, room[1].contiguous(), room[2].contiguous()
        for arrays in (alone, alone, room, room):
            found = attention(*arrays)
            wanted = cupyflash.attention(*map(array_of, arrays))
            assert bool((array_of(found) == wanted).all()), keys


def test_saved_tensors_that_were_on_the_cpu(cupy):
    """They come back elsewhere, or at the same address with other strides."""
    q, k, v, do = (
        draw(2, 100, 4, 64, dtype=torch.float16, seed=n).transpose(1, 2) for n in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(4):
        wanted = torch.autograd.grad(attention(*leaves, deterministic=True), leaves, do)
    with torch.autograd.graph.save_on_cpu():
        out = attention(*(x * 1 for x in leaves), deterministic=True)
    found = torch.autograd.grad(out, leaves, do)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("how", ["causal", "mask", "dropout"])
@pytest.mark.parametrize("copied", [False, True], ids=["views of rows", "copies"])
def test_a_layer_of_transformers_gives_the_bits_of_attention(cupy, monkeypatch, how, copied):
    """Its output and gradients lie elsewhere: rows come before heads."""
    monkeypatch.setattr(adapter, "_is_deterministic", lambda: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    dropout, seed, mask = (0.3 if how == "dropout" else 0.0), None, None
    if how == "mask":
        mask = torch.arange(200, device="cuda") < torch.tensor([[200], [77]], device="cuda")
        mask = mask[:, None, None]
    rows = [draw(2, 200, 4, 64, dtype=torch.bfloat16, seed=n) for n in range(4)]
    do = rows.pop()
    q, k, v = (x.transpose(1, 2).contiguous() if copied else x.transpose(1, 2) for x in rows)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    module = types.SimpleNamespace(is_causal=True)
    for n in range(4):
        torch.manual_seed(n)
        if dropout:
            seed = drawn_seed(dropout)
            torch.manual_seed(n)
        out = adapter.attention_forward(module, *leaves, mask, dropout=dropout)[0]
        found = torch.autograd.grad(out, leaves, do)
        seen = CAUSAL if mask is None else mask
        options = {"dropout": dropout, "seed": seed, "deterministic": True}
        wanted = attention(*leaves, mask=seen, **options)
        assert out.is_contiguous()
        assert torch.equal(out, wanted.transpose(1, 2)), n
        gradients = torch.autograd.grad(wanted, leaves, do.transpose(1, 2))
        for a, b in zip(found, gradients, strict=True):
            assert a.transpose(1, 2).is_contiguous()
            assert torch.equal(a, b), n


@pytest.mark.parametrize("length", [200, 6000], ids=["prepared", "large"])
def test_gradients_of_packed_sequences_that_differ_in_their_offsets(cupy, length):
    for n in range(5):
        end = 37 + n
        ends = torch.tensor([0, end, length], dtype=torch.int32, device="cuda")
        q, k, v, do = (draw(4, length, 64, dtype=torch.bfloat16, seed=n + m) for m in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention_varlen(*leaves, ends, ends, mask=CAUSAL)
        found = torch.autograd.grad(out, leaves, do)
        apart = [
            attention(*(x[:, rows] for x in leaves), mask=CAUSAL)
            for rows in (slice(end), slice(end, None))
        ]
        wanted = torch.autograd.grad(torch.cat(apart, 1), leaves, do)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_recognised_calls_over_a_cache(cupy):
    k, v = (draw(2, 4, 300, 64, dtype=torch.float16, seed=n) for n in range(2))
    for n in range(4):
        q = draw(2, 4, 1, 64, dtype=torch.float16, seed=n)
        lengths = torch.tensor([50 + 60 * n, 300 - n], device="cuda")
        found = attention_cached(q, k, v, lengths)
        wanted = cupyflash.attention_cached(*map(array_of, (q, k, v, lengths)))
        assert bool((array_of(found) == wanted).all()), n


def test_gradcheck(cupy):
    tensors = [draw(2, 4, 5, 16, dtype=torch.float64, seed=n).requires_grad_() for n in range(3)]
    tensors.append(draw(4, 5, 5, dtype=torch.float64).requires_grad_())

    def function(q, k, v, bias):
        return attention(q, k, v, bias=bias, mask=CAUSAL, return_lse=True)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


def test_a_call_runs_on_the_current_stream(cupy):
    q, k, v = qkv(torch.float16, 2000)
    attention(q, k, v)
    wanted = attention(q * 2, k, v)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # some 30 ms, before q is doubled
        late = q * 2
        found = attention(late, k, v)
        assert not stream.query()  # nothing was waited for
    stream.synchronize()
    assert torch.equal(found, wanted)
    assert cupy.cuda.get_current_stream().ptr == cupy.cuda.Stream.null.ptr


def test_memory_is_pytorchs(cupy):
    q, k, v = (x.requires_grad_() for x in qkv(torch.float16, 1000))
    attention(q, k, v, mask=CAUSAL).sum().backward()  # compiles
    torch.cuda.synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    held = cupy.get_default_memory_pool().total_bytes()
    allocated = torch.cuda.memory_allocated()
    out = attention(q, k, v, mask=CAUSAL)
    assert torch.cuda.memory_allocated() >= allocated + out.nbytes
    out.sum().backward()
    assert cupy.get_default_memory_pool().total_bytes() == held


def test_masks_and_seeds_in_device_memory(cupy):
    q, k, v = qkv()
    document = torch.arange(100, device="cuda") // 30
    table = lookup(document)
    mask = masks.mask(lambda b, h, i, j: table[i] == table[j])
    dense = document[:, None] == document
    torch.testing.assert_close(attention(q, k, v, mask=mask), attention(q, k, v, mask=dense))
    number = attention(q, k, v, dropout=0.5, seed=5)
    seed = torch.tensor(5, device="cuda")
    assert torch.equal(attention(q, k, v, dropout=0.5, seed=seed), number)
    assert torch.equal(attention(q, k, v, dropout=0.5, seed=seed.cpu()), number)


def test_a_cuda_graph(cupy):
    q, k, v = (x.requires_grad_() for x in qkv(torch.float16, 500))

    def step():
        return torch.autograd.grad(
            attention(q, k, v, mask=CAUSAL).float().square().sum(), (q, k, v)
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            wanted = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        q.mul_(1)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_packed_and_cached(cupy):
    packed = draw(4, 90, 64, dtype=torch.float16).requires_grad_()
    offsets = torch.tensor([0, 40, 40, 90], dtype=torch.int32, device="cuda")
    for check in (None, None, True, False, False):
        out = attention_varlen(packed, packed, packed, offsets, offsets, check=check, mask=CAUSAL)
        out.sum().backward()
        alone = packed[None, :, 40:].detach()
        torch.testing.assert_close(out[:, 40:], attention(alone, alone, alone, mask=CAUSAL)[0])
    q, k, v = draw(2, 4, 1, 64), draw(2, 2, 300, 64), draw(2, 2, 300, 64, seed=1)
    lengths = torch.tensor([300, 120], dtype=torch.int32, device="cuda")
    out = attention_cached(q, k, v, lengths)
    wanted = attention(q[1:], k[1:, :, :120], v[1:, :, :120])
    torch.testing.assert_close(out[1:], wanted)
    rows = (x.transpose(1, 2) for x in (q, k, v))
    found = flash_attn_with_kvcache(*rows, cache_seqlens=lengths)
    assert torch.equal(found.transpose(1, 2), out)


BACK_ENDS = ["CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"]


@pytest.mark.parametrize("name", BACK_ENDS)
def test_a_row_that_a_mask_hides_is_0_whatever_pytorch_gives(cupy, name):
    """With a Boolean mask, cuDNN gives it the result of attention to all keys, and a gradient."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv(torch.float16, 64)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
    mask[5] = False
    results = []
    for attend in (scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with sdpa_kernel(getattr(SDPBackend, name)):
            out = attend(*leaves, attn_mask=mask)
            out[:, :, torch.arange(64) != 5].float().square().sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    ours, theirs = results
    assert not ours[0][:, :, 5].any()
    assert not ours[1][:, :, 5].any()
    rest = torch.arange(64) != 5
    for a, b in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(a[:, :, rest], b[:, :, rest], rtol=2e-2, atol=2e-2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    scaled_dot_product_attention(*leaves, attn_mask=mask)[:, :, 5].sum().backward()
    assert not any(x.grad.any() for x in leaves)


def test_names_and_autocast(cupy):
    q, k, v = qkv(torch.float16)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    ours = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert attention(*qkv()).dtype is torch.bfloat16


@pytest.mark.filterwarnings("ignore")
def test_compiled(cupy):
    q, k, v = (x.requires_grad_() for x in qkv(torch.float16))

    def function(q, k, v):
        return attention(2 * q, k, v, mask=CAUSAL).float().square().sum()

    compiled = torch.compile(function, fullgraph=True)
    wanted = torch.autograd.grad(function(q, k, v), (q, k, v))
    for a, b in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_wrong_places(cupy):
    q, k, v = qkv()
    with pytest.raises(
        ArgumentTypeError, match=r"k: got a tensor on device cpu, .*\.to\(\"cuda:0\"\)"
    ):
        attention(q, k.cpu(), v)
    with pytest.raises(ArgumentTypeError, match="array 0 of mask"):
        attention(q, k, v, mask=masks.lengths([3, 5]))


@pytest.mark.parametrize("order", ["cupy, torch", "torch, cupy"])
def test_both_libraries_in_either_order(cupy, order, tmp_path):
    program = f"""
import {order}
import cupyflash, cupyflash.torch
y = cupy.ones((1, 2, 50, 64), cupy.float16)
x = torch.ones(1, 2, 50, 64, dtype=torch.float16, device="cuda", requires_grad=True)
out = cupyflash.torch.attention(x, x, x)
out.sum().backward()
assert float(cupyflash.attention(y, y, y).sum()) == float(out.sum()) == 6400
assert torch.isfinite(x.grad).all()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_learned_look_ups_have_the_gradients_of_arrays(cupy, dtype):
    operands = [x.requires_grad_() for x in qkv(dtype)]
    slopes, gate = (draw(*shape, seed=9).requires_grad_() for shape in ((4,), (4, 100)))

    def changes(*tables):
        gates = scores.score(lambda s, b, h, i, j: s + tables[1][h, j])
        return [scores.alibi(tables[0]), gates]

    held = [lookup(x, learned=True) for x in (slopes, gate)]
    do = draw(2, 4, 100, 64, dtype=dtype, seed=5)
    for _ in range(2):
        out = attention(*operands, mask=CAUSAL, score_mod=changes(*held))
        made = torch.autograd.grad(out, [slopes, gate], do)
    arrays = [lookup(array_of(x), learned=True) for x in (slopes, gate)]
    how = {"mask": CAUSAL, "score_mod": changes(*arrays)}
    _, vjp = cupyflash.attention_vjp(*map(array_of, operands), **how)
    expected = vjp(array_of(do)).dlookups
    for x, table in zip(made, arrays, strict=True):
        assert x.is_cuda
        assert bool((array_of(x) == expected[table]).all())
    slopes.data = slopes.data.clone()
    with pytest.raises(cupyflash.ArgumentError, match="other memory"):
        attention(*operands, score_mod=changes(*held))
