"""Subclasses of tensors, whose memory may not hold their values: translated, or refused by name."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, lookup, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask, create_mask  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as pytorch  # noqa: E402

import cupyflash.torch as own  # noqa: E402
from cupyflash.torch import transformers as adapter  # noqa: E402

LENGTHS = (5, 5), (3, 7), (7, 3)


class Named(torch.Tensor):
    """As libraries of pictures have it: whatever is computed from it stays of this class."""


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def named(x):
    return x.as_subclass(Named)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_causal_biases_mean_what_pytorch_says(make, queries, keys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rows without keys
        bias = make(queries, keys)
    q, k, v = draw(2, 4, queries, 8), draw(2, 4, keys, 8), draw(2, 4, keys, 6)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    seen = bias._materialize()
    rows = seen.any(1)
    out = own.scaled_dot_product_attention(*tensors, attn_mask=bias)
    wanted = pytorch(*tensors, attn_mask=seen)
    torch.testing.assert_close(out[..., rows, :], wanted[..., rows, :])
    assert not out[..., ~rows, :].any()
    pair = [torch.autograd.grad(x[..., rows, :].square().sum(), tensors) for x in (out, wanted)]
    for ours, theirs in zip(*pair, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_causal_biases_of_other_lengths_and_places():
    q = draw(1, 2, 5, 8)
    with pytest.raises(ArgumentError, match=r"got a CausalBias of \(4, 6\).*causal_lower_right"):
        own.scaled_dot_product_attention(q, q, q, attn_mask=causal_lower_right(4, 6))
    with pytest.raises(ArgumentError, match="is_causal"):
        own.scaled_dot_product_attention(q, q, q, attn_mask=causal_upper_left(5, 5), is_causal=True)
    bias = causal_upper_left(5, 5)
    for options in ({"mask": bias}, {"bias": bias}):
        with pytest.raises(ArgumentTypeError, match=r"CausalBias.*masks\.causal\(0\)"):
            own.attention(q, q, q, **options)
    wanted = pytorch(q, q, q, is_causal=True)
    torch.testing.assert_close(own.attention(q, q, q, mask=masks.causal(0)), wanted)


def calls():
    """Every public function of tensors, with the names of the tensors it takes."""
    x, rows, packed = draw(2, 4, 6, 8), draw(2, 6, 4, 8), draw(4, 6, 8)
    seen, bias, sink = torch.ones(6, 6, dtype=torch.bool), draw(6, 6), draw(4)
    offsets, lengths = torch.tensor([0, 2, 6]), torch.tensor([6, 6], dtype=torch.int32)
    seed = torch.tensor(3)
    options = {"mask": seen, "bias": bias, "sink": sink}
    slopes = {"alibi_slopes": torch.ones(4)}
    flat = packed.transpose(0, 1).contiguous()
    return {
        "attention": (
            own.attention,
            {"q": x, "k": x, "v": x, **options, "dropout": 0.5, "seed": seed},
        ),
        "attention_varlen": (
            own.attention_varlen,
            {
                "q": packed, "k": packed, "v": packed, "offsets_q": offsets, "offsets_k": offsets,
                "sink": sink,
            },
        ),
        "attention_cached": (
            own.attention_cached,
            {"q": x, "k": x, "v": x, "lengths": lengths, **options},
        ),
        "scaled_dot_product_attention": (
            own.scaled_dot_product_attention,
            {"query": x, "key": x, "value": x, "attn_mask": bias},
        ),
        "flash_attn_func": (own.flash_attn_func, {"q": rows, "k": rows, "v": rows, **slopes}),
        "flash_attn_qkvpacked_func": (
            own.flash_attn_qkvpacked_func,
            {"qkv": torch.stack([rows] * 3, 2), **slopes},
        ),
        "flash_attn_varlen_func": (
            own.flash_attn_varlen_func,
            {
                "q": flat, "k": flat, "v": flat, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
                "max_seqlen_q": 4, "max_seqlen_k": 4,
            },
        ),
        "flash_attn_with_kvcache": (
            own.flash_attn_with_kvcache,
            {"q": rows, "k_cache": rows, "v_cache": rows, "cache_seqlens": lengths, **slopes},
        ),
        "attention_forward": (
            lambda **named: adapter.attention_forward(torch.nn.Module(), **named),
            {
                "query": x, "key": x, "value": x, "attention_mask": seen[None, None],
                "s_aux": sink, "position_bias": bias,
            },
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", calls())
def test_no_function_takes_an_unknown_subclass(name):
    function, given = calls()[name]
    function(**given)
    for argument, x in given.items():
        if not isinstance(x, torch.Tensor):
            continue
        with pytest.raises(ArgumentTypeError, match=r"Named.*as_subclass\(torch\.Tensor\)"):
            function(**{**given, argument: named(x)})
        function(**{**given, argument: named(x).as_subclass(torch.Tensor)})  # the remedy
        function(**{**given, argument: torch.nn.Parameter(x, requires_grad=False)})
        function(**{**given, argument: torch.nn.Buffer(x)})


HOST = np.ones((1, 2, 3, 8), np.float32)


def reads(table):
    held = lookup(table)
    return masks.mask(lambda b, h, i, j: held[i] > 0)


ARRAYS = {
    "q": lambda x: cupyflash.attention(x, HOST, HOST),
    "mask": lambda x: cupyflash.attention(HOST, HOST, HOST, mask=x[0, 0, :, :3] > 0),
    "bias": lambda x: cupyflash.attention(HOST, HOST, HOST, bias=x[0, 0, :, :3]),
    "a table": lambda x: reads(x[0, 0, 0]),
    "slopes": lambda x: scores.alibi(x[0, 0, 0, :2]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_functions_of_arrays_take_none_either(name):
    x = torch.ones(1, 2, 3, 8)
    ARRAYS[name](x)
    ARRAYS[name](torch.nn.Buffer(x))
    with pytest.raises(ArgumentTypeError, match=r"Named.*as_subclass\(torch\.Tensor\)"):
        ARRAYS[name](named(x))
    ARRAYS[name](named(x).as_subclass(torch.Tensor))


def test_fake_tensors_give_shapes_where_calls_are_operators():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.ones(2, 4, 5, 8)
        assert own.attention(x, x, x).shape == x.shape
        lengths = torch.tensor([5, 5], dtype=torch.int32)
        assert own.attention_cached(x, x, x, lengths).shape == x.shape
        positions = torch.arange(5)
    turns = Rotary(np.ones((8, 4)), np.ones((8, 4)))
    with pytest.raises(ArgumentTypeError, match="FakeTensor, which has no elements"):
        own.rope(x, positions, turns)


def test_other_kinds_are_refused_with_remedies_that_work():
    q = draw(1, 2, 6, 8)
    block = create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, device="cpu")
    for call in (
        lambda: own.scaled_dot_product_attention(q, q, q, attn_mask=block),
        lambda: own.attention(q, q, q, bias=block),
    ):
        with pytest.raises(ArgumentTypeError, match=re.escape("create_mask(x.mask_mod, None")):
            call()
    seen = create_mask(block.mask_mod, None, None, *block.seq_lengths, device=q.device)
    wanted = pytorch(q, q, q, is_causal=True)
    torch.testing.assert_close(own.scaled_dot_product_attention(q, q, q, attn_mask=seen), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        masked = torch.masked.masked_tensor(q, q > 0)
    with pytest.raises(ArgumentTypeError, match=r"MaskedTensor.*get_data\(\)"):
        own.attention(masked, q, q)
    own.attention(masked.get_data(), q, q)
    nested = torch.nested.nested_tensor([q[0], q[0]], layout=torch.jagged)
    with pytest.raises(ArgumentTypeError, match="got a nested tensor"):
        own.attention(nested, q, q)
