"""Models of transformers, with random weights: a training step and generated text, as by sdpa."""

from __future__ import annotations

import pytest

from cupyflash import ArgumentError

WANTED = 'needs PyTorch and transformers: pip install ".[torch]" transformers'
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

from cupyflash.torch import transformers as adapter  # noqa: E402 (after the skip)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about each other
OURS = "cupy_attention"
SIZES = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def gpt2():
    sizes = {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    off = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **off, **ends))


def mistral():
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=5))


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


def results(model, implementation, ids, mask, **options):
    """Logits, gradients of a training step, and what is generated."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    output = model.train()(ids, attention_mask=mask, labels=labels)
    output.loss.backward()
    gradients = [x.grad.clone() for x in model.parameters()]
    seen = slice(None) if mask is None else mask.bool()
    text = model.eval().generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options
    )
    return output.logits.detach()[seen], gradients, text


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        llama,
        gpt2,
        pytest.param(mistral, marks=pytest.mark.thorough("a window; Llama is quick")),
    ],
    ids=lambda f: f.__name__,
)
def test_models_agree_with_sdpa(make, padded):
    torch.manual_seed(0)
    model, ids, mask = make(), torch.randint(3, 101, (2, 11)), None
    if padded:
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
    options = {} if padded else {"cache_implementation": "static"}
    calls = []
    model.set_attn_implementation(OURS)
    own = adapter.attention_forward

    def counted(*args, **keywords):
        calls.append(args)
        return own(*args, **keywords)

    transformers.AttentionInterface.register(OURS, counted)
    logits, gradients, text = results(model, OURS, ids, mask, **options)
    assert len(calls) >= 2 * 7  # layers, of a step and of every new token
    wanted_logits, wanted_gradients, wanted_text = results(model, "sdpa", ids, mask, **options)
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert torch.equal(text, wanted_text)


def layer(**options):
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    return adapter.attention_forward(torch.nn.Module(), x, x, x, **options)[0], x


def test_what_models_add_to_scores():
    bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1))
    out, x = layer(attention_mask=None, is_causal=False, position_bias=bias)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(out, sdpa(x, x, x, attn_mask=bias).transpose(1, 2))
    both, _ = layer(attention_mask=bias, position_bias=bias)
    torch.testing.assert_close(both, sdpa(x, x, x, attn_mask=2 * bias).transpose(1, 2))
    capped, _ = layer(attention_mask=None, is_causal=False, softcap=0.5, s_aux=torch.zeros(4))
    s = 0.5 * torch.tanh(x @ x.mT / 8**0.5 / 0.5)
    weights = torch.cat([s, torch.zeros(2, 4, 5, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(capped, (weights @ x).transpose(1, 2))


def test_refusals():
    with pytest.raises(ArgumentError, match=r'output_attentions.*"eager"'):
        layer(attention_mask=None, output_attentions=True)
    with pytest.raises(ArgumentError, match='expected one without "flash"'):
        adapter.register("cupyflash")
