"""A cache of PyTorch's tensors on a GPU, masks that are inputs of graphs, and maps."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import Rotary, masks, scores

torch = pytest.importorskip("torch", reason="needs PyTorch, compiled for CUDA")

from cupyflash.torch import (  # noqa: E402 (after the skip)
    append,
    attention,
    attention_cached,
    flash_attn_with_kvcache,
    graph_inputs,
    rope,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of torch.compile itself


@pytest.fixture(autouse=True)
def cupy(gpu):
    import cupy

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return cupy


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to("cuda", dtype)


@pytest.mark.parametrize("kind", [None, "int8", "float8_e4m3fn", "float8_e5m2", "int4"])
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_gives_the_bits_of_arrays(kind, paged, cupy):
    """Rows are appended, rotated and read; a cache of arrays has the same bytes and results."""
    shape, rows = ((8, 2, 16), 2) if paged else ((2, 2, 64), 2)
    dtype = torch.float16 if kind is None else torch.uint8
    columns = 32 if kind == "int4" else 64
    k, v = (torch.zeros(*shape, columns, dtype=dtype, device="cuda") for _ in "kv")
    options = {}
    if kind is not None:
        options = {name: torch.zeros(*shape, 1, device="cuda") for name in ("k_scale", "v_scale")}
    if paged:
        options["table"] = torch.tensor([[3, 0, 5, 4], [6, 1, 2, 7]], device="cuda")
    angles = torch.outer(torch.arange(70.0), torch.tensor([1.0, 0.1, 0.01])).cuda()
    rotary = Rotary(angles.cos(), angles.sin())
    new, q = draw(rows, 2, 40, 64, dtype=torch.float16), draw(rows, 8, 40, 64, dtype=torch.float16)
    lengths = torch.tensor([40, 60], device="cuda")
    # The same with arrays, from copies.
    arrays = {name: cupy.from_dlpack(x.clone()) for name, x in options.items()}
    held = [cupy.from_dlpack(x.clone()) for x in (k, v)]
    given = [cupy.from_dlpack(x) for x in (new, new)]
    named = {} if kind is None else {"kv_dtype": kind}
    rotated = append(new, new, k, v, lengths, q=q, rotary=rotary, **options, **named)
    wanted = cupyflash.append(
        *given, *held, cupy.from_dlpack(lengths), q=cupy.from_dlpack(q), rotary=rotary, **arrays,
        **named,
    )  # fmt: skip
    out, lse = attention_cached(
        rotated[:, :, -1:], k, v, lengths, return_lse=True, mask=masks.causal(), **options, **named
    )
    theirs = cupyflash.attention_cached(
        wanted[:, :, -1:], *held, cupy.from_dlpack(lengths), return_lse=True, mask=masks.causal(),
        **arrays, **named,
    )  # fmt: skip
    pairs = [(rotated, wanted), (k, held[0]), (v, held[1]), (out, theirs[0]), (lse, theirs[1])]
    pairs += [(options[name], x) for name, x in arrays.items()]
    for ours, array in pairs:
        assert bool((cupy.from_dlpack(ours.contiguous()) == array).all())


def test_rotation_has_a_gradient():
    angles = torch.outer(torch.arange(70.0), torch.tensor([1.0, 0.1, 0.01])).cuda()
    rotary, places = Rotary(angles.cos(), angles.sin()), torch.arange(5, device="cuda")
    x = draw(1, 2, 5, 8, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope(x, places, rotary), x)


def test_a_cache_may_begin_with_padding():
    q, k, v = (draw(2, 40, 4, 64, dtype=torch.float16, seed=n) for n in range(3))
    pad = torch.tensor([7, 0], dtype=torch.int32, device="cuda")
    last = torch.tensor([33, 40], dtype=torch.int32, device="cuda")
    out = flash_attn_with_kvcache(
        q[:, :3], k, v, cache_seqlens=last, cache_leftpad=pad, causal=True
    )
    for b in range(2):
        held = [x[b : b + 1, pad[b] : last[b]] for x in (k, v)]
        alone = flash_attn_with_kvcache(q[b : b + 1, :3], *held, causal=True)
        torch.testing.assert_close(out[b : b + 1], alone, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_masks_made_in_each_step_compile_no_new_graph(mode):
    """Arrays on the GPU are inputs of the graph, in captured CUDA graphs, too."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graph_inputs.watch()
    compiled = torch.compile(
        lambda q, mask, change: attention(2 * q, q, q, mask=mask, score_mod=change),
        fullgraph=True, mode=mode,
    )  # fmt: skip
    for step in range(14):
        q = draw(2, 4, 64, 64, dtype=torch.float16, seed=step).requires_grad_()
        lengths = torch.tensor([64 - step, 3 + step], device="cuda")
        mask = masks.lengths(lengths) & masks.causal()
        change = scores.alibi(torch.rand(4, device="cuda"))
        wanted = attention(2 * q, q, q, mask=mask, score_mod=change)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), q)
        torch.compiler.cudagraph_mark_step_begin()
        found = compiled(q, mask, change)
        torch.testing.assert_close(found, wanted)
        (ours,) = torch.autograd.grad(found.square().sum(), q)
        torch.testing.assert_close(ours, gradient, rtol=1e-2, atol=1e-2)
    counters = torch._dynamo.utils.counters
    assert not any("recompile_limit" in str(key) for key in counters["recompiles"])
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_what_is_mapped_alone(name):
    q = draw(2, 4, 100, 64, dtype=torch.float16)
    x = draw(3, 4, 100, 100, dtype=torch.float16)
    x = x if name == "bias" else x < 0.5
    found = torch.vmap(lambda each: attention(q, q, q, **{name: each}))(x)
    assert torch.equal(found, torch.stack([attention(q, q, q, **{name: each}) for each in x]))


def test_codes_of_pytorchs_types_are_told_by_the_tensor():
    k = torch.zeros(1, 2, 64, 64, device="cuda").to(torch.float8_e4m3fn)
    scale, new = torch.zeros(1, 2, 64, 1, device="cuda"), draw(1, 2, 1, 64, dtype=torch.float16)
    append(new, new, k, k.clone(), 5, k_scale=scale, v_scale=scale.clone())
    out = attention_cached(new, k, k, 5, k_scale=scale, v_scale=scale)
    assert bool(torch.isfinite(out).all())
    assert np.isfinite(float(scale.max()))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_step_over_a_cache_is_one_graph(mode):
    def step(new, k, v, lengths):
        append(new, 2 * new, k, v, lengths)
        return attention_cached(new.repeat(1, 4, 1, 1), k, v, lengths)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rooms = [torch.zeros(2, 2, 256, 64, device="cuda", dtype=torch.float16) for _ in "kv"]
    others = [room.clone() for room in rooms]
    for room in rooms:
        torch._dynamo.mark_static_address(room)
    compiled = torch.compile(step, fullgraph=True, mode=mode)
    with torch.no_grad():
        for n in range(6):
            new = draw(2, 2, 1, 64, dtype=torch.float16, seed=n)
            lengths = torch.tensor([n + 1, n + 100], dtype=torch.int32, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            found = compiled(new, *rooms, lengths).clone()
            assert torch.equal(found, step(new, *others, lengths))
            assert all(map(torch.equal, rooms, others))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_generation_over_a_static_cache_is_compiled():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from cupyflash.torch import transformers as adapter

    adapter.register()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=101, hidden_size=256, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to("cuda").eval()
    tokens = torch.arange(24, device="cuda").reshape(2, 12) * 7 % 98 + 3
    padded = torch.ones_like(tokens)
    padded[0, :5] = 0
    cache = adapter.static_cache(config, 64)
    for mask in (None, padded):
        options = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
        model.set_attn_implementation("sdpa")
        wanted = model.generate(tokens, max_new_tokens=20, **options)
        model.set_attn_implementation("cupy_attention")
        cache.reset()
        found = model.generate(tokens, max_new_tokens=20, past_key_values=cache, **options)
        assert torch.equal(found, wanted)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]  # its steps were compiled
