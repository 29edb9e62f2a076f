"""A bias that batch entries share: its turned tiles are kept, and no bit depends on that."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest

from cupyflash import attention, attention_backward, attention_varlen, lookup, masks, scores
from cupyflash.reference.cpu import amx, arguments, backward_call, forward_call

BF16 = ml_dtypes.bfloat16
UNITS = [
    (np.float32, amx.NONE), (np.float64, amx.NONE), (BF16, amx.NONE), (np.float16, amx.NONE),
    (BF16, amx.EMULATED), (np.float16, amx.EMULATED),
]  # fmt: skip
LENGTHS = [(49, 49), (128, 100), (7, 300), (65, 9)]


@pytest.fixture
def kept(monkeypatch):
    """Return how many tiles of a bias calls keep."""
    found, sizes = [], arguments.tile_sizes

    def watched(*given):
        made = sizes(*given)
        found.append(made.score.kept)
        return made

    for module in (forward_call, backward_call):
        monkeypatch.setattr(module, "tile_sizes", watched)
    return found


def draw(number, entries, queries, keys, heads=3):
    rng = np.random.default_rng(queries)
    shapes = [(entries, heads, rows, 24) for rows in (queries, keys, keys, queries)]
    q, k, v, do = (rng.standard_normal(shape).astype(number) for shape in shapes)
    bias = rng.standard_normal((1, heads, queries, keys))
    bias[0, -1, :, keys // 2] = -np.inf
    bias[0, 0, 0] = -np.inf  # an empty row
    return q, k, v, do, bias.astype(number)


def results(q, k, v, do, bias, **options):
    out, lse = attention(q, k, v, bias=bias, return_lse=True, **options)
    made = attention_backward(do, q, k, v, out, lse, bias=bias, bias_gradient=False, **options)
    return out, lse, made.dq, made.dk, made.dv


def equal(found, wanted):
    return all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("number", "unit"), UNITS, ids=str)
def test_kept_tiles_change_no_bit(number, unit, lengths, kept, monkeypatch):
    monkeypatch.setenv(amx.VARIABLE, unit)
    q, k, v, do, bias = draw(number, 9, *lengths)
    ends = np.random.default_rng(1).integers(1, lengths[1] + 1, 9)  # entries see other keys
    for mask in (None, masks.causal(), masks.lengths(ends), masks.window(5, 3)):
        options = {"mask": mask}
        found = results(q, k, v, do, bias, **options)
        assert all(kept)
        kept.clear()
        whole = np.ascontiguousarray(np.broadcast_to(bias, (9, *bias.shape[1:])))
        assert equal(results(q, k, v, do, whole, **options), found)
        assert not any(kept)
        kept.clear()


@pytest.mark.parametrize("threads", [2, 16])  # with more threads than heads, dq has a pass alone
@pytest.mark.parametrize("unit", [amx.NONE, amx.EMULATED])
def test_a_bias_may_change_between_calls(unit, threads, kept, monkeypatch):
    monkeypatch.setenv(amx.VARIABLE, unit)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", str(threads))
    number = np.float32 if unit == amx.NONE else BF16
    q, k, v, do, bias = draw(number, 9, 60, 500, heads=1)
    for n in range(4):
        bias[0, :, n:] += number(1.5 * n)  # in place: the address is the same
        found = results(q, k, v, do, bias)
        assert equal(found, results(q, k, v, do, np.repeat(bias, 9, 0)))
    assert any(kept)


def test_learned_lookups_beside_a_bias_that_changes():
    q, k, v, do, bias = draw(np.float32, 9, 49, 49)
    found = []
    for n in range(3):
        bias[0, :, n:] += 1.5 * n
        for given in (bias, np.repeat(bias, 9, 0)):
            slopes = lookup(np.ones(3, np.float32), learned=True)
            options = {"bias": given, "score_mod": scores.alibi(slopes)}
            out, lse = attention(q, k, v, return_lse=True, **options)
            made = attention_backward(do, q, k, v, out, lse, bias_gradient=False, **options)
            found.append(made.dlookups[slopes])
        assert np.array_equal(found[-1], found[-2])


def test_a_bias_that_heads_share_and_one_of_16_bits(kept):
    q, k, v, do, bias = draw(np.float32, 9, 49, 49)
    for each in (bias[:, :1], bias[:, 1], bias.astype(BF16), bias.astype(np.float16)):
        shared = each.reshape(1, -1, 49, 49)
        found = results(q, k, v, do, shared)
        assert all(kept)
        assert equal(found, results(q, k, v, do, np.repeat(shared, 9, 0)))
        kept.clear()


def test_what_is_not_finite_stays_so(kept):
    q, k, v, _, bias = draw(np.float32, 9, 49, 49)
    bias[0, 1, 5, 7], k[4, 2, 24] = np.nan, np.nan  # the second one is hidden by the bias
    found = attention(q, k, v, bias=bias)
    assert all(kept)
    assert np.array_equal(found, attention(q, k, v, bias=np.repeat(bias, 9, 0)), equal_nan=True)
    assert np.isnan(found[:, 1, 5]).all()
    assert np.isfinite(np.delete(found, 1, 1)).all()


def test_packed_sequences_of_several_lengths(kept):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, 24)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    q, k, v = (rng.standard_normal((2, ends[-1], 16)).astype(np.float32) for _ in "qkv")
    bias = rng.standard_normal((1, 2, max(lengths), max(lengths))).astype(np.float32)
    found = attention_varlen(q, k, v, ends, ends, bias=bias)
    for first, last in itertools.pairwise(ends):
        rows, n = slice(first, last), last - first
        alone = attention(q[:, rows], k[:, rows], v[:, rows], bias=bias[0, :, :n, :n])
        assert np.array_equal(found[:, rows], alone)
    assert any(kept)


@pytest.mark.parametrize(
    ("shape", "entries"), [((1, 3, 49, 49), 7), ((9, 3, 49, 49), 9), ((1, 3, 700, 900), 9)]
)
def test_tiles_that_are_used_seldom_or_are_many_are_not_kept(shape, entries, kept):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((entries, 3, rows, 8)).astype(np.float32) for rows in shape[2:])
    attention(q, k, k, bias=rng.standard_normal(shape).astype(np.float32))
    assert not any(kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_programs_that_read_arrays_have_a_row_for_addresses_beside_kept_tiles(dtype):
    """The addresses of a look-up lie in a row of their own, not among the tags of tiles."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((3, h, 70, 8)).astype(dtype) for h in (4, 2, 2))
    bias, table = rng.standard_normal((2, 70, 70)).astype(dtype)
    ids = np.arange(70) % 3
    change = scores.score(lambda s, b, h, i, j: s + lookup(table)[i, j])
    of_ids = lookup(ids)
    mask = masks.mask(lambda b, h, i, j: of_ids[i] != of_ids[j])
    out = attention(q, k, v, bias=bias, score_mod=change, mask=mask)
    shown = np.where(ids[:, None] != ids, bias + table, -np.inf)
    assert np.allclose(out, attention(q, k, v, bias=shown), rtol=1e-4, atol=1e-5)
