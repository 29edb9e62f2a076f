"""Models of transformers, with random weights: a training step and generated text, as by sdpa."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import ArgumentError

WANTED = 'needs PyTorch and transformers: pip install ".[torch]" transformers'
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

from cupyflash.torch import attention_cached  # noqa: E402
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


@pytest.mark.parametrize("dropout", [0, 0.0, False, np.float32(0)], ids=repr)
def test_a_layer_without_dropout_is_recognised_at_once(monkeypatch, dropout):
    """A model says 0 as its configuration does, and between two layers each look-up takes long."""
    x = torch.randn(2, 4, 5, 16, requires_grad=True)

    def layer():
        return adapter.attention_forward(torch.nn.Module(), x, x, x, None, dropout=dropout)[0]

    wanted = layer()
    monkeypatch.setattr(adapter, "run", None)
    assert torch.equal(layer(), wanted)


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


def test_no_mask_means_the_last_queries():
    x = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    call = adapter.attention_forward
    every = call(torch.nn.Module(), x, x, x, None)[0]
    for left in range(1, 5):
        rest = call(torch.nn.Module(), x[:, :, -left:], x, x, None)[0]
        torch.testing.assert_close(rest, every[:, -left:])
    with pytest.raises(ArgumentError, match="attention_mask: got None with 5 queries and 3 keys"):
        call(torch.nn.Module(), x, x[:, :, :3], x[:, :, :3], None)
    call(torch.nn.Module(), x, x[:, :, :3], x[:, :, :3], None, is_causal=False)


@pytest.mark.parametrize("kind", ["sliding_window", "chunked"])
@pytest.mark.parametrize("held", [0, 1, 4])
def test_windows_and_chunks_are_not_taken_for_causal_masks(kind, held):
    """Masks of five new tokens, written as sdpa_mask's docstring shows."""
    utils = transformers.masking_utils
    function = (
        utils.sliding_window_causal_mask_function(3)
        if kind == "sliding_window"
        else utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=int))
    )
    sizes = {"batch_size": 1, "q_length": 5, "kv_length": 5 + held, "q_offset": held}
    mask = adapter.attention_mask(**sizes, mask_function=function)
    i, j = held + torch.arange(5)[:, None], torch.arange(5 + held)
    near = i - j < 3 if kind == "sliding_window" else i // 3 == j // 3
    assert torch.equal(mask[0, 0], (j <= i) & near)
    x = torch.randn(1, 2, 5 + held, 8, generator=torch.Generator().manual_seed(0))
    found = adapter.attention_forward(torch.nn.Module(), x[:, :, held:], x, x, mask)[0]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(x[:, :, held:], x, x, attn_mask=(j <= i) & near)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("steps", [(5, 1, 1, 1), (2, 1), (1, 3, 3)], ids=str)
def test_what_a_cache_holds(window, static, steps):
    """The rows are those that were put in, at their positions, and attention over them is right."""
    kinds = transformers.cache_utils
    if static:
        kind = kinds.StaticSlidingWindowLayer if window else kinds.StaticLayer
        layer = kind(max_cache_len=12, **{"sliding_window": window} if window else {})
    else:
        layer = kinds.DynamicSlidingWindowLayer(window) if window else kinds.DynamicLayer()
    with pytest.raises(ArgumentError, match="layer: nothing is in it yet"):
        adapter.held(layer)
    rows = torch.randn(2, 3, 2, sum(steps), 8, generator=torch.Generator().manual_seed(0))
    for new in rows.split(steps, dim=3):
        layer.update(*new)
    found, count = adapter.held(layer), sum(steps)
    limit = count if window is None else window if static else window - 1
    assert found.first == max(count - limit, 0)
    assert found.lengths.tolist() == [count - found.first] * 3
    for held, put in zip((found.k, found.v), rows, strict=True):
        assert torch.equal(held[:, :, : count - found.first], put[:, :, found.first :])
    q = rows[0, :, :, -1:]
    out = attention_cached(q, found.k, found.v, found.lengths)
    keys, values = rows[:, :, :, found.first :].contiguous()
    assert torch.equal(out, attention_cached(q, keys, values, found.lengths))


def shifted(**sizes):
    """A layer with codes of 4 bits and a shift, whose library is not needed."""
    kind = transformers.cache_utils.QuantoQuantizedLayer

    class Shifted(kind):
        def __init__(self):
            super(kind, self).__init__(**sizes)

        def _quantize(self, x, axis):
            low = x.amin(-1, keepdim=True)
            scale = (x.amax(-1, keepdim=True) - low) / 15
            return ((x - low) / scale).round(), scale, low

        def _dequantize(self, codes):
            return codes[0] * codes[1] + codes[2]

    return Shifted()


LAYERS = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}
NEEDS = {"quanto": "optimum.quanto", "hqq": "hqq"}


@pytest.mark.filterwarnings("ignore")  # of quanto and hqq
@pytest.mark.parametrize("kind", [*LAYERS, "shifted"])
@pytest.mark.parametrize("reordered", [False, True])
def test_what_a_quantised_cache_holds(kind, reordered):
    """Bit by bit what the layer itself gives to attention beside the next keys."""
    if kind in NEEDS:
        reason = f"{NEEDS[kind]} is not installed: a stand-in is tried"
        pytest.importorskip(NEEDS[kind], reason=reason)
    made = shifted if kind == "shifted" else getattr(transformers.cache_utils, LAYERS[kind], None)
    if made is None:
        pytest.skip(f"this transformers has no {LAYERS[kind]}")
    layer = made() if kind == "fp8" else made(nbits=4, q_group_size=32, residual_length=4)
    with pytest.raises(ArgumentError, match="layer: nothing is in it yet"):
        adapter.held(layer)
    rows = torch.randn(2, 3, 2, 9, 32, generator=torch.Generator().manual_seed(0))
    for new in rows[..., :8, :].split([5, 2, 1], dim=3):
        layer.update(*new)
    if reordered:
        layer.reorder_cache(torch.tensor([2, 0, 1]))
    found = adapter.held(layer)
    assert (found.first, found.lengths.tolist()) == (0, [8] * 3)
    k, v = found.k, found.v
    if kind == "fp8":
        assert k.dtype is v.dtype is torch.float8_e4m3fn
        k, v = k.float() * found.k_scale, v.float() * found.v_scale
    wanted = layer.update(*(x.clone() for x in rows[..., 8:, :]))
    assert torch.equal(k, wanted[0][:, :, :8])
    assert torch.equal(v, wanted[1][:, :, :8])
    q = rows[0, :, :, -1:]
    scales = {"k_scale": found.k_scale, "v_scale": found.v_scale} if kind == "fp8" else {}
    out = attention_cached(q, found.k, found.v, found.lengths, **scales)
    torch.testing.assert_close(out, attention_cached(q, k, v, 8))


def test_caches_that_are_not_read():
    with pytest.raises(ArgumentError, match="layer: got DynamicCache; expected one of DynamicL"):
        adapter.held(transformers.DynamicCache())


def test_an_empty_static_cache_needs_a_mask_of_the_keys_that_it_holds():
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": 0, "kv_offset": 0}
    mask = adapter.attention_mask(**sizes, dtype=torch.float32)
    assert torch.equal(mask, torch.ones(2, 1, 4, 4, dtype=torch.bool).tril())
    assert adapter.attention_mask(**{**sizes, "kv_length": 4}, dtype=torch.float32) is None
    x = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(1, 4, 4, 9, generator=torch.Generator().manual_seed(1))
    whole = adapter.attention_forward(
        torch.nn.Module(), x[:, :, :4], x, x, mask, position_bias=bias
    )[0]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    held = x[:, :, :4]
    wanted = sdpa(held, held, held, attn_mask=bias[..., :4].masked_fill(~mask, float("-inf")))
    torch.testing.assert_close(whole, wanted.transpose(1, 2))


@pytest.mark.parametrize("kind", ["none", "bool", "floats"])
def test_chosen_keys(kind):
    random = torch.Generator().manual_seed(2)
    chosen = torch.rand(2, 5, 5, generator=random).argsort(-1)[..., :3].int()
    seen = torch.zeros(2, 1, 5, 5, dtype=torch.bool)
    seen.scatter_(-1, chosen.long().unsqueeze(1), True)
    seen &= torch.ones(5, 5, dtype=torch.bool).tril()
    mask = {"none": None, "bool": torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()}.get(kind)
    if kind == "floats":
        mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1) > 0, float("-inf"))
    out, x = layer(attention_mask=mask, indices=chosen)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = seen.any(-1).squeeze(1)
    wanted = sdpa(x, x, x, attn_mask=seen).transpose(1, 2)
    torch.testing.assert_close(out[rows], wanted[rows])
    assert not out[~rows].any()
    for wrong in (chosen[:, :4], chosen[0], chosen.float()):
        with pytest.raises(ArgumentError, match=r'indices: got.*"eager"'):
            layer(attention_mask=mask, indices=wrong)


UNKNOWN = {
    "block_indices": torch.zeros(2, 1, 5, 1, dtype=torch.int64),
    "sinks": torch.zeros(2, 4, 5, 1),
    "something_new": torch.zeros(3),
    "switched_on": True,
    "a_number": 2,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_arguments_of_a_model_are_errors(name):
    with pytest.raises(ArgumentError, match=f'^{name}: got.*attn_implementation="eager"'):
        layer(attention_mask=None, **{name: UNKNOWN[name]})
    layer(attention_mask=None, **{name: None})
    layer(attention_mask=None, **{name: False})


def test_sinks_of_other_shapes_are_errors():
    layer(attention_mask=None, s_aux=torch.zeros(4))
    for wrong in (torch.zeros(2, 4, 5, 1), torch.zeros(1, 4), torch.zeros(3)):
        with pytest.raises(ArgumentError, match="sink"):
            layer(attention_mask=None, s_aux=wrong)


def test_sequences_that_lie_one_after_the_other_need_a_mask():
    two = {"cu_seq_lens_q": torch.tensor([0, 2, 5]), "max_length_q": 3}
    with pytest.raises(ArgumentError, match=r"cu_seq_lens_q: got 2 sequences.*position_ids"):
        layer(attention_mask=None, **two)
    layer(attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool), **two)
    layer(attention_mask=None, cu_seq_lens_q=torch.tensor([0, 5]))
    adapter.register()
    torch.manual_seed(0)
    model = llama().eval()
    model.set_attn_implementation(OURS)
    ids, places = torch.randint(3, 101, (1, 5)), torch.tensor([[0, 1, 0, 1, 2]])
    together = model(ids, position_ids=places, use_cache=False, **two).logits  # the remedy
    torch.testing.assert_close(together[:, 2:], model(ids[:, 2:]).logits, rtol=1e-5, atol=1e-5)


def test_refusals():
    with pytest.raises(ArgumentError, match=r'output_attentions.*"eager"'):
        layer(attention_mask=None, output_attentions=True)
    with pytest.raises(ArgumentError, match='expected one without "flash"'):
        adapter.register("cupyflash")
