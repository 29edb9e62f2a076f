"""A cache of PyTorch's tensors: the bits of arrays, in memory that the tensors share."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, masks

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import append, attention_cached, rope  # noqa: E402 (after the skip)
from cupyflash.torch.tensors import array_of  # noqa: E402 (after the skip)

KINDS = ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]
LENGTHS = [7, 12]


def draw(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def same(a, b):
    return np.array_equal(array_of(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def angles(count=40):
    angle = torch.outer(torch.arange(float(count)), torch.tensor([1.0, 0.1, 0.01]))
    return angle.cos(), angle.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("paged", [False, True])
def test_rows_are_appended_and_read_in_place(dtype, paged):
    shape = (8, 2, 4, 16) if paged else (2, 2, 16, 16)
    options = {"table": torch.tensor([[3, 0, 5], [6, 1, 2]])} if paged else {}
    k, v = torch.zeros(2, *shape, dtype=dtype)
    mine = [array_of(x).copy() for x in (k, v)]
    new, q = draw(2, 2, 3, 16, dtype=dtype), draw(2, 4, 3, 16, dtype=dtype)
    lengths, rotary = torch.tensor(LENGTHS), Rotary(*angles())
    before = k._version, v._version
    rotated = append(new, new, k, v, lengths, q=q, rotary=rotary, **options)
    assert (k._version, v._version) > before  # autograd knows that they changed
    arrays = {name: x.numpy() for name, x in options.items()}
    wanted = cupyflash.append(
        array_of(new), array_of(new), *mine, lengths.numpy(), q=array_of(q), rotary=rotary, **arrays
    )
    assert same(rotated, wanted)
    assert same(k, mine[0])
    assert same(v, mine[1])
    assert rotated.dtype is dtype
    out = attention_cached(rotated, k, v, lengths, mask=masks.causal(), **options)
    assert same(
        out, cupyflash.attention_cached(wanted, *mine, LENGTHS, mask=masks.causal(), **arrays)
    )
    assert append(new, new, k, v, LENGTHS, **options) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("as_bytes", [False, True])
def test_codes_and_their_scales(kind, as_bytes):
    """Codes are told by the tensor's type, or by kv_dtype as a name or as a type of PyTorch."""
    dtype = torch.uint8 if as_bytes or kind == "int4" else getattr(torch, kind)
    columns = 16 if kind == "int4" else 32
    k, v = (torch.zeros(2, 2, 16, columns, dtype=torch.uint8).view(dtype) for _ in "kv")
    k_scale, v_scale = torch.zeros(2, 2, 2, 16, 1)
    names = [None] if dtype is not torch.uint8 else [kind]
    if as_bytes and kind != "int4":
        names.append(getattr(torch, kind))
    new, q = draw(2, 2, 3, 32), draw(2, 4, 3, 32)
    codes, scales = cupyflash.quantize(new.numpy(), kind)
    for name in names:
        options = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": name}
        append(new, new, k, v, torch.tensor(LENGTHS), **options)
        for b, length in enumerate(LENGTHS):
            assert same(k[b, :, length - 3 : length], codes[b])
            assert np.array_equal(v_scale[b, :, length - 3 : length].numpy(), scales[b])
        out, lse = attention_cached(q, k, v, 7, return_lse=True, **options)
        wanted = cupyflash.attention_cached(
            q.numpy(), array_of(k), array_of(v), 7, return_lse=True, k_scale=k_scale.numpy(),
            v_scale=v_scale.numpy(), kv_dtype=kind,
        )  # fmt: skip
        assert same(out, wanted[0])
        assert same(lse, wanted[1])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = attention_cached(q, k, v, 7, **options)
        assert half.dtype is torch.bfloat16
        assert same(half, attention_cached(q.bfloat16(), k, v, 7, **options).view(torch.int16))
    assert k_scale.any()


def test_rows_are_rotated_with_a_gradient():
    x, places, rotary = draw(2, 3, 4, 8), torch.arange(8).reshape(2, 4), Rotary(*angles())
    rotated = rope(x, places, rotary)
    assert same(rotated, cupyflash.rope(x.numpy(), places.numpy(), rotary))
    torch.testing.assert_close(rope(rotated, places, rotary, inverse=True), x)
    with torch.no_grad():
        assert rope(x.requires_grad_(), places, rotary).grad_fn is None
    (gradient,) = torch.autograd.grad(rope(x, places, rotary), x, rotated.detach())
    torch.testing.assert_close(gradient, x.detach())  # a rotation's gradient rotates back
    double = x.detach().double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rope(x, places, rotary), double)
    assert torch.autograd.gradgradcheck(lambda x: rope(x, places, rotary), double)


def test_a_graph_is_told_that_a_cache_was_overwritten():
    k, v, new = draw(1, 2, 8, 4), draw(1, 2, 8, 4), draw(1, 2, 1, 4)
    weight = draw(1, 2, 8, 4).requires_grad_()
    read = (weight * k).sum()
    append(new, new, k, v, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        read.backward()
    with torch.inference_mode():
        append(new, new, k.clone(), v.clone(), 5)


CACHE = {"k_new": draw(1, 2, 1, 4), "v_new": draw(1, 2, 1, 4), "k": draw(1, 2, 8, 4)}
CACHE |= {"v": draw(1, 2, 8, 4), "lengths": 5}
REFUSED = {
    "a gradient": ({"k_new": draw(1, 2, 1, 4).requires_grad_()}, r"k_new: .*\.detach\(\)"),
    "an array": ({"k": np.zeros((1, 2, 8, 4), np.float32)}, r"k: got ndarray.*torch\.as_tensor"),
    "no room": ({"lengths": 9}, "lengths: .*9"),
    "integers": ({"v_new": torch.ones(1, 2, 1, 4).int()}, "v_new: got a tensor of torch.int32"),
    "another device": ({"k": draw(1, 2, 8, 4).to("meta")}, "k: .*device meta"),
    "an unknown option": ({"block_table": 1}, "block_table: .*as table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_appended_is_refused_with_the_remedy(name):
    change, words = REFUSED[name]
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        append(**(CACHE | change))


def test_codes_that_nobody_named_and_other_flags_are_refused():
    k, q = torch.zeros(1, 2, 8, 4, dtype=torch.uint8), draw(1, 2, 1, 4)
    with pytest.raises((ArgumentError, ArgumentTypeError), match="kv_dtype"):
        attention_cached(q, k, k, 5)
    with pytest.raises(ArgumentTypeError, match="inverse: got 1"):
        rope(q, [0], Rotary(*angles()), inverse=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_of_vllm_are_taken_as_they_are(dtype):
    """Pages with the heads behind the positions, and int32 for its metadata."""
    cache = torch.zeros(2, 8, 16, 2, 32, dtype=dtype)
    table = torch.tensor([[5, 2], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([20, 7], dtype=torch.int32)
    ends = torch.tensor([0, 20, 27], dtype=torch.int32)
    query, key, value = (draw(27, heads, 32, dtype=dtype, seed=heads) for heads in (8, 2, 3))
    value = value[:, :2]
    keys, values = cache.transpose(2, 3)
    rows = [x.transpose(0, 1) for x in (query, key, value)]
    append(*rows[1:], keys, values, lengths, table=table, offsets=ends)
    assert torch.equal(cache[0, 5], key[:16])
    assert torch.equal(cache[1, 2, :4], value[16:20])
    assert torch.equal(cache[0, 1, :7], key[20:])
    asked = torch.tensor([0, 3, 4], dtype=torch.int32)  # the last rows of each sequence
    q = rows[0][:, [17, 18, 19, 26]]
    options = {"table": table, "mask": masks.causal()}
    out = attention_cached(q, keys, values, lengths, offsets_q=asked, **options)
    for mine, (first, last) in ((slice(0, 3), (0, 20)), (slice(3, 4), (20, 27))):
        of_one = [array_of(x[:, first:last]) for x in rows[1:]]
        held = [x[None].copy() for x in of_one]
        wanted = cupyflash.attention_cached(
            array_of(q[:, mine].contiguous())[None], *held, last - first, mask=masks.causal()
        )
        assert same(out[:, mine].contiguous(), wanted[0])
