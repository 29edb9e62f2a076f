"""The functions of PyTorch and flash_attn by their names: held to PyTorch's own results."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from halves import mostly_thorough

from cupyflash import ArgumentError, ArgumentTypeError, Rotary, append, rope

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from torch.nn.functional import scaled_dot_product_attention as pytorch  # noqa: E402 (after the skip)

from cupyflash.torch import (  # noqa: E402 (after the skip)
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def agree(function, wanted, *tensors):
    """Compare results and gradients in float64."""
    for each in tensors:
        each.requires_grad_()
    ours, theirs = function(*tensors), wanted(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    pair = [torch.autograd.grad(x.square().sum(), tensors) for x in (ours, theirs)]
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


DENSE = torch.arange(35).reshape(5, 7) % 3 != 0
SHAPES = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)
CALLS = {
    "plain": (SHAPES, {}),
    "scale": (SHAPES, {"scale": 0.3}),
    "causal, top left": (SHAPES, {"is_causal": True}),
    "causal, more queries": (((1, 2, 7, 8), (1, 2, 5, 8), (1, 2, 5, 8)), {"is_causal": True}),
    "bool": (SHAPES, {"attn_mask": DENSE}),
    "bool per head": (SHAPES, {"attn_mask": DENSE.flip(0).expand(4, 5, 7)}),
    "floats": (SHAPES, {"attn_mask": draw(2, 1, 5, 7)}),
    "grouped": (((2, 8, 5, 8), *SHAPES[1:]), {"enable_gqa": True}),
    "three axes": (((3, 5, 8), (3, 7, 8), (3, 7, 8)), {"is_causal": True}),
    "matrices": (((5, 8), (7, 8), (7, 8)), {}),
    "one head of keys": (((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_scaled_dot_product_attention_is_that_of_pytorch(name):
    shapes, options = CALLS[name]
    agree(
        lambda *x: scaled_dot_product_attention(*x, **options),
        lambda *x: pytorch(*x, **options),
        *(draw(*shape, seed=n) for n, shape in enumerate(shapes)),
    )


HEADS = [(q, k, v) for q in (1, 2, 4) for k in (1, 2, 4) for v in (1, 2, 4)]


@pytest.mark.parametrize("grouped", [False, True])
def test_heads_are_broadcast_or_refused_as_by_pytorch(grouped):
    """One head of queries, keys or values stands for all; a remedy in a message works."""
    refused = 0
    for counts in HEADS:
        x = [
            draw(2, heads, length, 8, seed=n)
            for n, (heads, length) in enumerate(zip(counts, (5, 7, 7), strict=True))
        ]
        try:
            pytorch(*x, enable_gqa=grouped)
        except RuntimeError:
            refused += 1
            with pytest.raises(ArgumentError, match="heads") as error:
                scaled_dot_product_attention(*x, enable_gqa=grouped)
            if "enable_gqa=True" in str(error.value):
                scaled_dot_product_attention(*x, enable_gqa=True)
            continue
        agree(
            lambda *x: scaled_dot_product_attention(*x, enable_gqa=grouped),
            lambda *x: pytorch(*x, enable_gqa=grouped),
            *x,
        )
    assert refused == (13 if grouped else 12)


RANKS = [(), (4,), (1,), (2, 4), (2, 1), (1, 4)]


@mostly_thorough(
    ("query", "key", "value"),
    list(itertools.product(RANKS, RANKS, RANKS)),
    quick=[((), (4,), (2, 4)), ((2, 4), (1,), ()), ((1, 4), (2, 1), (4,))],
    why="the rest of the table of ranks",
)
def test_axes_before_the_rows_are_broadcast_as_by_pytorch(query, key, value):
    x = draw(*query, 5, 8), draw(*key, 7, 8, seed=1), draw(*value, 7, 6, seed=2)
    agree(scaled_dot_product_attention, pytorch, *x)


def test_a_float_mask_has_a_gradient():
    agree(
        scaled_dot_product_attention,
        pytorch,
        *(draw(*shape, seed=n) for n, shape in enumerate((*SHAPES, (4, 5, 7)))),
    )


def test_dropout_follows_the_generator():
    x = torch.ones(1, 2, 64, 8)
    torch.manual_seed(3)
    first, second = (scaled_dot_product_attention(x, x, x, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(x, x, x, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - 1) < 0.05


REFUSED = {
    "mask and causal": ({"attn_mask": DENSE, "is_causal": True}, "is_causal: .*one of them"),
    "heads": ({"query": draw(2, 8, 5, 8)}, "key: .*enable_gqa=True"),
    "integers": ({"attn_mask": DENSE.int()}, "attn_mask: got a tensor of torch.int32"),
    "a list": ({"attn_mask": [1]}, "attn_mask: got list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused(name):
    change, words = REFUSED[name]
    names = ("query", "key", "value")
    arguments = {n: draw(*shape) for n, shape in zip(names, SHAPES, strict=True)} | change
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        scaled_dot_product_attention(**arguments)


# -- flash_attn -----------------------------------------------------------------------------------


def formula(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None):
    """What flash_attn documents, in plain PyTorch, of (B, L, H, D)."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    s = q @ k.mT / q.shape[-1] ** 0.5
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i = torch.arange(s.shape[-2])[:, None] + s.shape[-1] - s.shape[-2]
    j = torch.arange(s.shape[-1])
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * (i - j).abs()
    left, right = window_size
    seen = (j <= i) if causal else torch.ones(s.shape[-2:], dtype=torch.bool)
    seen = seen & (j >= i - left) if left >= 0 else seen
    seen = seen & (j <= i + right) if right >= 0 else seen
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return (p @ v).transpose(1, 2)


SLOPES = torch.tensor([[0.5, 0.25, 0.125, 0.0], [1.0, 0.1, 0.2, 0.3]], dtype=torch.float64)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (2, -1)},
    "all": {"causal": True, "window_size": (3, 5), "softcap": 3.0, "alibi_slopes": SLOPES},
}


def operands(keys=9):
    return draw(2, 5, 4, 8), draw(2, keys, 2, 8, seed=1), draw(2, keys, 2, 8, seed=2)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("keys", [9, 3])
def test_flash_attn_func(name, keys):
    options = OPTIONS[name]
    if keys < 5:  # then some queries see nothing, and the formula's gradient is NaN
        q, k, v = operands(keys)
        found = flash_attn_func(q, k, v, **options)
        torch.testing.assert_close(found, formula(q, k, v, **options), rtol=1e-12, atol=1e-12)
        return
    agree(
        lambda *x: flash_attn_func(*x, **options),
        lambda *x: formula(*x, **options),
        *operands(keys),
    )


def test_flash_attn_returns_the_lse():
    q, k, v = operands()
    out, lse, weights = flash_attn_func(q, k, v, return_attn_probs=True)
    s = q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).mT / 8**0.5
    torch.testing.assert_close(lse, s.logsumexp(-1))
    assert weights is None
    assert out.shape == q.shape
    packed = torch.stack([q, q + 1, q - 1], 2)
    torch.testing.assert_close(
        flash_attn_qkvpacked_func(packed, causal=True),
        flash_attn_func(q, q + 1, q - 1, causal=True),
    )


@pytest.mark.parametrize("name", ["plain", "all"])
def test_packed_tensors_are_their_parts(name):
    """Each function that takes packed tensors, and its gradient."""
    q, k, v = draw(2, 5, 2, 8), draw(2, 5, 2, 8, seed=1), draw(2, 5, 2, 8, seed=2)
    options = dict(OPTIONS[name])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = SLOPES[:, :2]
    places = torch.tensor([0, 5, 10]).int()
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    functions = {
        flash_attn_qkvpacked_func: (torch.stack([q, k, v], 2),),
        flash_attn_kvpacked_func: (q, torch.stack([k, v], 2)),
        flash_attn_varlen_qkvpacked_func: (torch.stack(rows, 1), places, 5),
        flash_attn_varlen_kvpacked_func: (
            rows[0], torch.stack(rows[1:], 1), places, places, 5, 5,
        ),
    }  # fmt: skip
    wanted = formula(q, k, v, **options)
    for function, args in functions.items():
        last = args[0] if len(args) in (1, 3) else args[1]
        last.requires_grad_()
        found, lse, weights = function(*args, **options, return_attn_probs=True)
        torch.testing.assert_close(found.reshape(q.shape), wanted, rtol=1e-12, atol=1e-12)
        assert weights is None
        assert lse.shape == ((2, 10) if "varlen" in function.__name__ else (2, 2, 5))
        (gradient,) = torch.autograd.grad(found.sum(), last)
        parts = [x.detach().requires_grad_() for x in (q, k, v)]
        each = torch.autograd.grad(formula(*parts, **options).sum(), parts)
        stacked = torch.stack(each[3 - last.shape[-3] :], 2).reshape(gradient.shape)
        torch.testing.assert_close(gradient, stacked, rtol=1e-11, atol=1e-11)
        with pytest.raises(ArgumentError, match=r"kv: got shape .*expected \("):
            function(*(x.flatten(-2) if x is last else x for x in args))


@pytest.mark.parametrize("pair", [torch.tensor([2, 1]), np.array([2, 1]), [np.int64(2), 1]])
def test_windows_may_be_integers_of_any_kind(pair):
    q, k, v = operands()
    wanted = flash_attn_func(q, k, v, window_size=(2, 1))
    assert torch.equal(flash_attn_func(q, k, v, window_size=pair), wanted)
    torch.testing.assert_close(flash_attn_with_kvcache(q, k, v, window_size=pair), wanted)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_flash_attn_varlen_func(name):
    q, k, v = operands()
    cu_q, cu_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 9, 18]).int()

    def packed(q, k, v):
        rows = (x.flatten(0, 1) for x in (q, k, v))
        return flash_attn_varlen_func(*rows, cu_q, cu_k, 5, 9, **OPTIONS[name]).reshape(q.shape)

    agree(packed, lambda *x: formula(*x, **OPTIONS[name]), q, k, v)


def pages(x, order):
    """Cut (B, S, H, D) into pages of 3 positions, and return them and their table."""
    cut = x.reshape(-1, 3, *x.shape[2:])
    table = torch.argsort(order).reshape(x.shape[0], -1).int()
    return cut[order].contiguous(), table


ORDER = torch.tensor([4, 1, 5, 0, 3, 2])


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_that_is_read(name, paged):
    q, k, v = operands()
    (k_pages, table), (v_pages, _) = pages(k, ORDER), pages(v, ORDER)
    where = (k_pages, v_pages) if paged else (k, v)
    extra = {"block_table": table} if paged else {}
    seqlens = torch.tensor([9, 6]).int()
    out, lse = flash_attn_with_kvcache(
        q, *where, cache_seqlens=seqlens, return_softmax_lse=True, **extra, **OPTIONS[name]
    )
    for b, length in enumerate(seqlens.tolist()):
        options = dict(OPTIONS[name])
        if "alibi_slopes" in options:
            options["alibi_slopes"] = SLOPES[b : b + 1]
        wanted = formula(q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length], **options)
        torch.testing.assert_close(out[b : b + 1], wanted, rtol=1e-12, atol=1e-12)
    assert lse.shape == (2, 4, 5)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_may_begin_with_padding(name, paged):
    """The keys of an entry begin at its leftpad, and end as they do without padding."""
    q, k, v = operands()
    (k_pages, table), (v_pages, _) = pages(k, ORDER), pages(v, ORDER)
    where = (k_pages, v_pages) if paged else (k, v)
    extra = {"block_table": table} if paged else {}
    first, last = [2, 0], [9, 6]
    out = flash_attn_with_kvcache(
        q, *where, cache_seqlens=torch.tensor(last).int(), **OPTIONS[name], **extra,
        cache_leftpad=torch.tensor(first).int(),
    )  # fmt: skip
    for b in range(2):
        options = dict(OPTIONS[name])
        if "alibi_slopes" in options:
            options["alibi_slopes"] = SLOPES[b : b + 1]
        held = [x[b : b + 1, first[b] : last[b]] for x in (k, v)]
        wanted = formula(q[b : b + 1], *held, **options)
        torch.testing.assert_close(out[b : b + 1], wanted, rtol=1e-12, atol=1e-12)


def test_new_keys_come_after_a_cache_that_begins_with_padding():
    q, k, v = operands()
    new, pad = draw(2, 1, 2, 8, seed=5), torch.tensor([3, 1]).int()
    angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.1]))
    plain = [x.clone() for x in (k, v)]
    options = {"cache_seqlens": 4, "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    found = flash_attn_with_kvcache(q, k, v, new, new, **options, causal=True, cache_leftpad=pad)
    flash_attn_with_kvcache(q, *plain, new, new, **options, causal=True)
    assert torch.equal(k, plain[0])  # rows are rotated by their positions in the cache
    assert torch.equal(v[:, 4], new[:, 0])
    chosen = torch.tensor([1, 0]).int()
    swapped = flash_attn_with_kvcache(
        q.flip(0), k.clone(), v.clone(), new.flip(0), new.flip(0), **options, causal=True,
        cache_batch_idx=chosen, cache_leftpad=pad.flip(0),
    )  # fmt: skip
    torch.testing.assert_close(swapped.flip(0), found)  # the padding is that of an entry of q


def test_varlen_with_pages():
    q, k, v = operands()
    (k_pages, table), (v_pages, _) = pages(k, ORDER), pages(v, ORDER)
    cu_q, cu_k = torch.tensor([0, 5, 10]).int(), torch.tensor([0, 9, 18]).int()
    out = flash_attn_varlen_func(
        q.flatten(0, 1), k_pages, v_pages, cu_q, cu_k, 5, 9, causal=True, block_table=table
    )
    torch.testing.assert_close(out.reshape(q.shape), formula(q, k, v, causal=True))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_cache_that_is_written(interleaved, causal):
    q, k, v = operands()
    new_k, new_v = draw(2, 2, 2, 8, seed=3), draw(2, 2, 2, 8, seed=4)
    angles = torch.outer(torch.arange(20.0), torch.tensor([1.0, 0.1]))
    cos, sin = angles.cos(), angles.sin()
    held = torch.tensor([3, 6]).int()
    arrays = {"k": k.numpy().copy(), "v": v.numpy().copy()}
    rotary = Rotary(cos.numpy(), sin.numpy(), interleaved=interleaved)
    swapped = [x.swapaxes(1, 2) for x in (new_k.numpy(), new_v.numpy(), *arrays.values())]
    append(*swapped, (held + 2).numpy(), rotary=rotary)
    positions = held.numpy()[:, None] + np.arange(5) * causal
    rotated = rope(q.numpy().swapaxes(1, 2), positions, rotary).swapaxes(1, 2)
    out = flash_attn_with_kvcache(
        q, k, v, new_k, new_v, cos, sin, held, causal=causal, rotary_interleaved=interleaved
    )
    assert np.array_equal(k.numpy(), arrays["k"])
    assert np.array_equal(v.numpy(), arrays["v"])
    for b, length in enumerate((5, 8)):
        rows = (
            torch.from_numpy(rotated.copy())[b : b + 1],
            k[b : b + 1, :length],
            v[b : b + 1, :length],
        )
        torch.testing.assert_close(out[b : b + 1], formula(*rows, causal=causal))


def test_entries_of_a_cache_may_be_chosen():
    q, k, v = operands()
    chosen = torch.tensor([1, 0]).int()
    new = draw(2, 1, 2, 8, seed=5)
    out = flash_attn_with_kvcache(q, k, v, new, new, cache_seqlens=4, cache_batch_idx=chosen)
    assert torch.equal(k[1, 4], new[0, 0])
    assert torch.equal(v[0, 4], new[1, 0])
    torch.testing.assert_close(out, formula(q, k.flip(0)[:, :5], v.flip(0)[:, :5]))


KV_REFUSED = {
    "leftpad of floats": ({"cache_leftpad": torch.ones(2)}, "cache_leftpad: .*int32"),
    "one leftpad": ({"cache_leftpad": torch.ones(1).int()}, r"cache_leftpad: .*\(2,\)"),
    "no leftpad": ({"cache_leftpad": torch.tensor([1, -1])}, "cache_leftpad: got -1"),
    "a window of floats": ({"window_size": (1.5, 0)}, r"window_size: got \(1\.5, 0\)"),
    "half a window": ({"window_size": (1,)}, "window_size: .*left, right"),
    "k without v": ({"k": draw(2, 1, 2, 8)}, "k, v: got one without the other"),
    "no lengths": ({"k": draw(2, 1, 2, 8), "v": draw(2, 1, 2, 8)}, "cache_seqlens: got None"),
    "cos alone": ({"rotary_cos": torch.ones(9, 2)}, "rotary_cos, rotary_sin: got one"),
    "two tables": (
        {"block_table": torch.ones(2, 1), "cache_batch_idx": torch.ones(2)}, "one of them",
    ),
    "too long": ({"cache_seqlens": 10}, "lengths: entry 0 is 10"),
    "a float": ({"cache_seqlens": 1.5}, "cache_seqlens: got float"),
    "three axes": ({"q": draw(2, 4, 8)}, "q: .*four axes"),
    "a gradient": ({"q": draw(2, 5, 4, 8).requires_grad_()}, "q: .*requires a gradient"),
}  # fmt: skip


@pytest.mark.parametrize("name", KV_REFUSED)
def test_what_a_cache_cannot_serve_is_refused(name):
    change, words = KV_REFUSED[name]
    q, k, v = operands()
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        flash_attn_with_kvcache(**({"q": q, "k_cache": k, "v_cache": v} | change))


def test_slopes_have_no_gradient():
    q, k, v = operands()
    with pytest.raises(ArgumentError, match=r"alibi_slopes: .*\.detach\(\)"):
        flash_attn_func(q, k, v, alibi_slopes=torch.ones(4, requires_grad=True))
