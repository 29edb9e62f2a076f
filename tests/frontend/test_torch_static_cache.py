"""Generation by models of transformers that are compiled for a static cache: as by eager."""

from __future__ import annotations

import pytest

from cupyflash import ArgumentError

WANTED = 'needs PyTorch and transformers: pip install ".[torch]" transformers'
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

from test_torch_generation import SIZES, llama  # noqa: E402 (after the skip)

from cupyflash.torch import attention_cached, cached_calls, held  # noqa: E402 (after the skip)
from cupyflash.torch import transformers as adapter  # noqa: E402 (after the skip)
from cupyflash.torch.static_cache import StaticLayer  # noqa: E402 (after the skip)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about each other
OF_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
MODELS = {
    "llama": llama,
    "a soft cap, and windows": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, **OF_GEMMA)
    ),
    "sinks": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=5
        )
    ),
}
TOKENS = torch.arange(24).reshape(2, 12) * 7 % 98 + 3
PADDED = torch.ones(2, 12, dtype=torch.long)
PADDED[0, :5] = 0


def compiled():
    """Return the options of `generate` that compile the steps of a model, on a CPU, too."""
    how = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    how._compile_all_devices = True
    return {"compile_config": how}


def generated(model, attention, mask=None, **options):
    model.set_attn_implementation(attention)
    torch._dynamo.reset()
    return model.generate(
        TOKENS, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, **options
    )


@pytest.fixture
def lengths(monkeypatch):
    """Return what steps over a cache are told of its lengths."""
    adapter.register()
    told, compute = [], cached_calls.attention

    def watched(q, k, v, lengths, **options):
        told.append(lengths.tolist())
        return compute(q, k, v, lengths, **options)

    monkeypatch.setattr(cached_calls, "attention", watched)
    return told


@pytest.mark.parametrize("mask", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_eager(name, mask, lengths):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    wanted = generated(model, "eager", mask)
    cache = adapter.static_cache(model.config, 32)
    assert torch.equal(generated(model, "cupy_attention", mask, cache=cache, **compiled()), wanted)
    steps = [n for n in range(13, 20) for layer in cache.layers if type(layer) is StaticLayer]
    assert [each for each in lengths if max(each) > 8] == [[n, n] for n in steps]
    own = generated(
        model, "cupy_attention", mask, cache_implementation="static", **compiled()
    )  # the library's layers
    assert torch.equal(own, wanted)


def test_the_room_behind_is_not_read(lengths):
    torch.manual_seed(0)
    model = MODELS["llama"]().eval()
    wanted = generated(model, "eager")
    cache = adapter.static_cache(model.config, 32)
    model.set_attn_implementation("cupy_attention")
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
        for layer in cache.layers:
            assert layer.keys[:, :, 12:].eq(0).all()
            layer.keys[:, :, 12:] = layer.values[:, :, 12:] = float("nan")
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        mask = (torch.arange(32) < 13)[None, None, None].expand(2, 1, 1, 32)
        logits = step(
            wanted[:, 12:13], attention_mask=mask, position_ids=torch.full((2, 1), 12),
            past_key_values=cache,
        ).logits  # fmt: skip
    assert torch.equal(logits[:, -1].argmax(-1), wanted[:, 13])
    assert lengths == [[13, 13]] * 2
    found = held.held(cache.layers[0])
    assert found.lengths.tolist() == [13, 13]
    q = torch.ones(2, 4, 1, 8)
    assert attention_cached(q, found.k, found.v, found.lengths).isfinite().all()


def test_models_that_are_not_compiled_and_rows_with_gradients():
    torch.manual_seed(0)
    adapter.register()
    model = MODELS["llama"]()
    wanted = generated(model, "eager")
    cache = adapter.static_cache(model.config, 32)
    assert torch.equal(generated(model, "cupy_attention", cache=cache), wanted)
    cache = adapter.static_cache(model.config, 32)
    model(TOKENS, past_key_values=cache).logits.sum().backward()  # by the library's own update
    assert int(cache.layers[0].get_seq_length()) == 12


def test_autocast_gives_rows_of_other_types():
    """Rotated keys are float32 then, and values bfloat16: the library's own update takes them."""
    torch.manual_seed(0)
    adapter.register()
    model = MODELS["llama"]().eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds = transformers.StaticCache(config=model.config, max_cache_len=32)
        wanted = generated(model, "cupy_attention", cache=kinds)
        cache = adapter.static_cache(model.config, 32)
        assert torch.equal(generated(model, "cupy_attention", cache=cache), wanted)


def test_more_tokens_than_rows_are_refused():
    torch.manual_seed(0)
    adapter.register()
    model = MODELS["llama"]().eval()
    for how, error in (({}, ArgumentError), (compiled(), RuntimeError)):
        cache = adapter.static_cache(model.config, 16)
        with pytest.raises(error, match="rows: got 16 for static_cache, and a sequence with more"):
            generated(model, "cupy_attention", cache=cache, **how)
        if not how:  # nothing is written by a call that is refused
            assert int(cache.get_seq_length()) == 16
        cache = adapter.static_cache(model.config, 19)  # the last token is in no cache
        assert generated(model, "cupy_attention", cache=cache, **how).shape == (2, 20)


def test_another_batch_has_a_cache_of_its_own():
    cache = adapter.static_cache(transformers.LlamaConfig(**SIZES), 16)
    cache.update(*torch.zeros(2, 2, 2, 5, 8), 0)
    with pytest.raises(ArgumentError, match="Give other sequences a cache of their own"):
        cache.update(*torch.zeros(2, 3, 2, 1, 8), 0)


def test_models_without_layers_of_all_keys_are_refused():
    config = transformers.MistralConfig(**SIZES, sliding_window=5)
    with pytest.raises(ArgumentError, match="StaticCache") as caught:
        adapter.static_cache(config, 16)
    assert "transformers.StaticCache(config=config, max_cache_len=rows)" in str(caught.value)
    transformers.StaticCache(config=config, max_cache_len=16)


@pytest.mark.parametrize("rows", [0, -1, 2.5, None])
def test_rooms_that_hold_no_token_are_refused(rows):
    with pytest.raises(ArgumentError, match=r"rows: got .*with its prompt"):
        adapter.static_cache(transformers.LlamaConfig(**SIZES), rows)
