"""Functions of flash_attn on a GPU, and generation over a cache with room."""

from __future__ import annotations

import pytest

from cupyflash import ArgumentError, masks, scores

torch = pytest.importorskip("torch", reason="needs PyTorch, compiled for CUDA")

from cupyflash.torch import (  # noqa: E402 (after the skip)
    attention,
    attention_varlen,
    cute,
    flash_attn_func,
    flash_attn_varlen_func,
    varlen_attn,
)
from cupyflash.torch import transformers as adapter  # noqa: E402 (after the skip)

pytestmark = pytest.mark.gpu
CAUSAL = masks.causal()


@pytest.fixture(autouse=True)
def cupy(gpu):
    import cupy

    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return cupy


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to("cuda", dtype)


ENDS = torch.tensor([0, 37, 37, 90], dtype=torch.int32)
BY_ROWS = {
    "dense": (lambda x, _: flash_attn_func(*x, causal=True), {"mask": CAUSAL}),
    "softcap": (
        lambda x, _: flash_attn_func(*x, softcap=5.0), {"score_mod": [scores.softcap(5.0)]}
    ),
    "sink": (
        lambda x, _: cute.flash_attn_func(*x, learnable_sink=torch.ones(4, device="cuda"))[0],
        {"sink": torch.ones(4)},
    ),
    "packed": (
        lambda x, ends: flash_attn_varlen_func(*x, ends, ends, 53, 53, causal=True),
        {"mask": CAUSAL},
    ),
    "varlen_attn": (
        lambda x, ends: varlen_attn(*x, ends, ends.clone(), 53, 53, window_size=(9, 0)),
        {"mask": masks.window(9, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_ROWS)
def test_recognised_calls_by_rows_give_the_bits_of_attention(name):
    """Also where they are computed anew, and where gradients of gradients are asked for."""
    call, options = BY_ROWS[name]
    options = {x: y.cuda() if x == "sink" else y for x, y in options.items()}
    ends = ENDS.cuda()
    for n in range(5):
        shape = (90, 4, 64) if name in ("packed", "varlen_attn") else (2, 90, 4, 64)
        q, k, v, do = (draw(*shape, dtype=torch.float16, seed=4 * n + m) for m in range(4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        with torch.no_grad():
            alone = call(leaves, ends)
        out = call(leaves, ends)
        found = torch.autograd.grad(out, leaves, do, create_graph=n == 4)
        turned = [x.detach().transpose(-3, -2).requires_grad_() for x in leaves]
        if len(shape) == 3:
            wanted = attention_varlen(*turned, ends, ends, **options)
        else:
            wanted = attention(*turned, **options)
        gradients = torch.autograd.grad(wanted, turned, do.transpose(-3, -2))
        assert torch.equal(out, alone)
        assert torch.equal(out, wanted.transpose(-3, -2)), n
        for a, b in zip(found, gradients, strict=True):
            assert a.is_contiguous()
            # Sums of dq are added in the order in which blocks come.
            torch.testing.assert_close(a, b.transpose(-3, -2), rtol=1e-2, atol=1e-3)
    assert all(x.isfinite().all() for x in torch.autograd.grad(found[0].sum(), leaves[1:]))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_short_sequences_have_the_bits_of_kernels_for_any(d, dtype):
    """Whatever the longest lengths are said to be; a longer sequence is an error later."""
    lengths = torch.randint(0, 65, (70,), generator=torch.Generator().manual_seed(d))
    lengths[:3] = torch.tensor([64, 0, 1])
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths]).cumsum(0).to("cuda", torch.int32)
    q, k, v, do = (draw(int(ends[-1]), 4, d, dtype=dtype, seed=n) for n in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    made = []
    for most in (1000, 64, 128, 90, 64):
        out = flash_attn_varlen_func(
            *leaves, ends, ends, most, most, causal=True, deterministic=True
        )
        made.append((out, *torch.autograd.grad(out, leaves, do)))
    for each in made[1:]:
        assert all(torch.equal(x, y) for x, y in zip(each, made[0], strict=True))
    padded = [torch.cat([x.detach(), x.new_full((7, 4, d), float("nan"))]) for x in leaves]
    for most in (1000, 64):  # rows behind the last sequence are nothing wrong
        out = flash_attn_varlen_func(*padded, ends, ends, most, most, causal=True)
        assert torch.equal(out[: len(q)], made[0][0])
    flash_attn_varlen_func(*leaves, ends, ends, 30, 30)
    torch.cuda.synchronize()
    with pytest.raises(ArgumentError, match="longer than bias, mask or max_seqlen"):
        flash_attn_varlen_func(*leaves, ends, ends, 64, 64)
    flash_attn_varlen_func(*leaves, ends, ends, 64, 64)


@pytest.mark.parametrize("window", [None, 48])
def test_a_generation_over_a_growing_cache(window):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
    kind, more = ("Llama", {}) if window is None else ("Mistral", {"sliding_window": window})
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **more)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to("cuda", torch.float64).eval()
    adapter.register("ours in a test")
    ids = torch.randint(3, 300, (2, 40), device="cuda")
    options = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.set_attn_implementation("eager")
    wanted = model.generate(ids, **options)
    model.set_attn_implementation("ours in a test")
    for _ in range(2):
        cache = adapter.growing_cache(config)
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), wanted)
