"""Formats of other libraries, converted: each bit by bit against the library, where it is there."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, attention_cached, foreign, rope
from cupyflash.problem import formats

KINDS = {"Q8_0": 34, "Q4_0": 18, "MXFP4": 17}
# Blocks of gguf 0.19.0, of the numbers below, and what it reads from them: in hexadecimal.
RNG = np.random.default_rng(0)
NUMBERS = RNG.standard_normal((2, 64)).astype(np.float32)


def angles(rows=7, pairs=4):
    made = np.outer(np.arange(rows), 100.0 ** -np.arange(0, 1, 1 / pairs)).astype(np.float32)
    return np.cos(made), np.sin(made)


def blocks_of(kind, rng):
    """Blocks with any codes, and finite scales."""
    made = rng.integers(0, 256, (3, 2, KINDS[kind]), dtype=np.uint8)
    if kind == "MXFP4":
        made[..., 0] = rng.integers(100, 150, made.shape[:-1])
    else:
        scale = rng.standard_normal((*made.shape[:-1], 1)).astype(np.float16)
        made[..., :2] = scale.view(np.uint8)
    return made.reshape(3, -1)


def numbers_by_hand(blocks, kind):
    """What the blocks mean, number by number, as the formats are specified."""
    size = KINDS[kind]
    rows = []
    for row in blocks:
        numbers = []
        for block in row.reshape(-1, size):
            if kind == "MXFP4":
                scale, codes = 2.0 ** (int(block[0]) - 127), block[1:]
                small = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
                means = [*small, *(-x for x in small)]
            else:
                scale, codes = float(block[:2].copy().view(np.float16)[0]), block[2:]
                means = [n - 8 for n in range(16)]
            if kind == "Q8_0":
                numbers += [scale * int(code) for code in codes.view(np.int8)]
            else:
                numbers += [scale * means[code & 15] for code in codes]
                numbers += [scale * means[code >> 4] for code in codes]
        rows.append(numbers)
    return np.array(rows, np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_blocks(kind):
    blocks = blocks_of(kind, np.random.default_rng(1))
    assert np.array_equal(foreign.gguf_numbers(blocks, kind), numbers_by_hand(blocks, kind))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_blocks_are_those_of_gguf(kind):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: blocks by hand are tried")
    blocks = blocks_of(kind, np.random.default_rng(2))
    wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(foreign.gguf_numbers(blocks, kind), wanted)
    if kind == "MXFP4":  # the least scales are subnormal
        blocks[:, 0] = [0, 1, 2]
        wanted = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
        assert np.array_equal(foreign.gguf_numbers(blocks, kind), wanted)


def test_q4_0_becomes_int4():
    blocks = blocks_of("Q4_0", np.random.default_rng(3))
    codes, scale = foreign.gguf(blocks, "Q4_0")
    assert codes.shape == (3, 32)
    assert scale.shape == (3, 2)
    wanted = foreign.gguf_numbers(blocks, "Q4_0")
    numbers = formats.numbers(codes, formats.FORMATS["int4"]) * np.repeat(scale, 32, axis=-1)
    assert np.array_equal(numbers, wanted)
    q = np.random.default_rng(0).standard_normal((1, 1, 1, 64)).astype(np.float32)
    options = {"kv_dtype": "int4", "k_scale": scale[None, None], "v_scale": scale[None, None]}
    found = attention_cached(q, codes[None, None], codes[None, None], 3, **options)
    np.testing.assert_allclose(found, attention_cached(q, *2 * [wanted[None, None]], 3), rtol=1e-4)


def test_q8_0_becomes_int8_where_a_row_has_one_block():
    blocks = blocks_of("Q8_0", np.random.default_rng(4))
    codes, scale = foreign.gguf(blocks[:, :34], "Q8_0")
    assert codes.dtype == np.int8
    assert np.array_equal(codes * scale, foreign.gguf_numbers(blocks[:, :34], "Q8_0"))
    with pytest.raises(ArgumentError, match="64 columns of Q8_0, which has a scale for every 32"):
        foreign.gguf(blocks, "Q8_0")


def test_what_has_no_codes_here_is_named():
    with pytest.raises(ArgumentError, match=r"kind: got MXFP4, .*e2m1"):
        foreign.gguf(blocks_of("MXFP4", RNG), "MXFP4")
    with pytest.raises(ArgumentError, match="kind: got 'Q4_1'; expected one of Q8_0"):
        foreign.gguf_numbers(np.zeros(20, np.uint8), "Q4_1")
    with pytest.raises(
        ArgumentError, match="rows of 20 bytes of Q4_0; expected whole blocks of 18"
    ):
        foreign.gguf(np.zeros(20, np.uint8), "Q4_0")
    with pytest.raises(ArgumentTypeError, match="blocks: got dtype int8"):
        foreign.gguf(np.zeros(18, np.int8), "Q4_0")


@pytest.mark.parametrize("order", ["low", "high", "halves"])
@pytest.mark.parametrize("offset", [0, 8])
def test_orders_of_codes_in_a_byte(order, offset):
    numbers = np.random.default_rng(5).integers(-8, 8, (3, 64))
    stored = (numbers + offset).astype(np.uint8) & 15
    first, second = (
        np.split(stored, 2, axis=-1) if order == "halves" else (stored[:, ::2], stored[:, 1::2])
    )
    if order == "high":
        first, second = second, first
    made = foreign.int4(first | second << 4, order=order, offset=offset)
    assert np.array_equal(formats.numbers(made, formats.FORMATS["int4"]), numbers)


def test_an_order_must_be_known():
    with pytest.raises(ArgumentError, match="order: got 'big'"):
        foreign.int4(np.zeros(4, np.uint8), order="big")
    with pytest.raises(ArgumentError, match="offset: got 4"):
        foreign.int4(np.zeros(4, np.uint8), order="low", offset=4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_with_each_angle_twice(interleaved):
    cos, sin = angles()
    twice = (lambda x: np.repeat(x, 2, 1)) if interleaved else (lambda x: np.tile(x, 2))
    made = foreign.rotary(twice(cos)[None], twice(sin)[None])
    assert made.interleaved is interleaved
    assert np.array_equal(made.cos, cos)
    assert np.array_equal(made.sin, sin)
    with pytest.raises(ArgumentError, match="in neither way"):
        foreign.rotary(np.concatenate([cos, -cos], 1), twice(sin))
    with pytest.raises(ArgumentError, match="in both ways"):
        foreign.rotary(np.ones((3, 8), np.float32), np.zeros((3, 8), np.float32))
    with pytest.raises(ArgumentError, match=r"cos: got shape \(2, 7, 8\)"):
        foreign.rotary(np.stack(2 * [twice(cos)]), twice(sin))


def test_columns_move_between_the_conventions():
    cos, sin = angles()
    x = np.random.default_rng(6).standard_normal((1, 2, 7, 10)).astype(np.float32)
    positions = np.arange(7)[None]
    moved = foreign.interleave(x, pairs=4)
    assert np.array_equal(foreign.interleave(moved, pairs=4, inverse=True), x)
    halves = rope(x, positions, Rotary(cos, sin))
    neighbours = rope(moved, positions, Rotary(cos, sin, interleaved=True))
    assert np.array_equal(foreign.interleave(halves, pairs=4), neighbours)
    assert foreign.interleave(np.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    with pytest.raises(ArgumentError, match="pairs: got 6"):
        foreign.interleave(x, pairs=6)


def all_halves():
    return np.arange(65536, dtype=np.uint16).view(np.float16)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_by_both_rules(dtype):
    x = all_halves().astype(np.float32)
    limits = ml_dtypes.finfo(dtype)
    saturated, other = (foreign.float8(x, dtype, overflow=rule) for rule in ("saturate", "nan"))
    assert saturated.dtype == other.dtype == np.dtype(getattr(ml_dtypes, dtype))
    wide = saturated.astype(np.float32)
    assert np.array_equal(np.isnan(wide), np.isnan(x))
    largest = float(limits.max)
    beyond = np.abs(x) > largest
    assert (np.abs(wide[beyond]) == largest).all()
    assert np.array_equal(saturated[~beyond].view(np.uint8), other[~beyond].view(np.uint8))
    rest = other.astype(np.float32)[np.abs(x) > 1.1 * largest]
    assert not np.isfinite(rest).any()
    with pytest.raises(ArgumentError, match="overflow: got 'wrap'"):
        foreign.float8(x, dtype, overflow="wrap")
    with pytest.raises(ArgumentError, match="dtype: got 'float8_e4m3fnuz'"):
        foreign.float8(x, "float8_e4m3fnuz")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_that_of_pytorch(dtype):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    x = all_halves().astype(np.float32)
    theirs = torch.from_numpy(x).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    version = tuple(int(n) for n in torch.__version__.split(".")[:2])
    rule = "saturate" if version >= (2, 13) and dtype == "float8_e4m3fn" else "nan"
    ours = foreign.float8(x, dtype, overflow=rule)
    is_nan = np.isnan(x) | np.isnan(ours.astype(np.float32))
    assert np.array_equal(ours.view(np.uint8)[~is_nan], theirs[~is_nan])
    back = torch.from_numpy(theirs).view(getattr(torch, dtype)).float().numpy()
    assert np.isnan(back[is_nan]).all()


def test_tables_and_columns_are_those_of_transformers():
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    llama, cohere = transformers.models.llama.modeling_llama, transformers.models.cohere
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16)
    x, positions = torch.randn(1, 2, 7, 16), torch.arange(7)[None]
    cos, sin = llama.LlamaRotaryEmbedding(config)(x, positions)
    theirs = llama.apply_rotary_pos_emb(x, x, cos, sin)[0].numpy()
    made = foreign.rotary(cos.numpy(), sin.numpy())
    assert not made.interleaved
    np.testing.assert_allclose(rope(x.numpy(), positions.numpy(), made), theirs, 1e-5, 1e-6)
    code = cohere.modeling_cohere
    config = transformers.CohereConfig(hidden_size=32, num_attention_heads=2)
    cos, sin = code.CohereRotaryEmbedding(config)(x, positions)
    theirs = code.apply_rotary_pos_emb(x, x, cos, sin)[0].numpy()
    made = foreign.rotary(cos.numpy(), sin.numpy())
    assert made.interleaved
    np.testing.assert_allclose(rope(x.numpy(), positions.numpy(), made), theirs, 1e-5, 1e-6)


def test_public_names():
    assert cupyflash.foreign is foreign
    assert sorted(foreign.__all__) == foreign.__all__
