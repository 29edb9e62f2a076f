"""What attention must satisfy whatever its arithmetic: bit by bit, or within the bounds."""

import math

import numpy as np
import pytest
from harness import assert_near, attend, attend_backward, bound_of
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits
from strategies import BFLOAT16, DTYPES, MASKS, Sizes, plain

from cupyflash import masks, scores

WIDE = (BFLOAT16, np.dtype(np.float32), np.dtype(np.float64))  # types of a wide exponent
HOW = st.sampled_from([None, "causal", "window"])


def options_of(how):
    return {"mask": {"causal": masks.causal(), "window": masks.window(6, 2)}[how]} if how else {}


def assert_same(a, b):
    assert same_bits(a.out, b.out)
    assert same_bits(a.lse, b.lse)


def exactly(*values):
    """Assert that values that a test made by arithmetic of the input type are what it meant."""
    for computed, meant in values:
        assert np.array_equal(computed.astype(np.float64), meant)


# Permutations


@given(plain())
def test_a_permutation_of_the_queries_permutes_the_rows(p):
    order = p.rng.permutation(p.q.shape[2])
    ours, moved = attend(p.q, p.k, p.v, p.tiles), attend(p.q[:, :, order], p.k, p.v, p.tiles)
    assert same_bits(ours.out[:, :, order], moved.out)
    assert same_bits(ours.lse[:, :, order], moved.lse)
    dq = attend_backward(p.do, p.q, p.k, p.v, p.tiles).dq
    dq_moved = attend_backward(p.do[:, :, order], p.q[:, :, order], p.k, p.v, p.tiles).dq
    assert same_bits(dq[:, :, order], dq_moved)


@given(plain())
def test_a_permutation_of_the_keys_changes_nothing(p):
    order = p.rng.permutation(p.k.shape[2])
    ours = attend(p.q, p.k, p.v, p.tiles)
    moved = attend(p.q, p.k[:, :, order], p.v[:, :, order], p.tiles)
    bound = bound_of(p.q, p.k, p.v, p.tiles)  # of any order
    assert_near(ours.out, moved.out, 2 * bound.out.bound)
    assert_near(ours.lse, moved.lse, 2 * bound.lse.bound)


# Weights sum to one


@given(plain(), HOW)
def test_rows_are_convex_combinations(p, how):
    options = options_of(how)
    ours, bound = (
        attend(p.q, p.k, p.v, p.tiles, **options),
        bound_of(p.q, p.k, p.v, p.tiles, **options),
    )
    allowed = np.ones((1, 1, p.q.shape[2], p.k.shape[2]), bool)
    if how:
        allowed = options["mask"].to_array(1, 1, p.q.shape[2], p.k.shape[2])
    values = np.repeat(p.v, p.q.shape[1] // p.v.shape[1], axis=1).astype(np.float64)[:, :, None]
    seen = allowed[..., None]
    sees = allowed.any(axis=-1)[..., None]
    low = np.where(sees, np.where(seen, values, np.inf).min(axis=3), 0)
    high = np.where(sees, np.where(seen, values, -np.inf).max(axis=3), 0)
    assert (ours.out.astype(np.float64) >= low - bound.out.bound).all()
    assert (ours.out.astype(np.float64) <= high + bound.out.bound).all()


@given(plain(), st.sampled_from([1.0, -3.0, 0.375]))
def test_constant_values_stay_what_they_are(p, c):
    p.v[:] = c
    ours, bound = attend(p.q, p.k, p.v, p.tiles), bound_of(p.q, p.k, p.v, p.tiles)
    assert_near(ours.out, np.full(ours.out.shape, c), bound.out.bound)
    assert (bound.out.bound <= abs(c) * 0.01).all()


@given(plain(integers=True), st.sampled_from([0.5, -2.0]))
def test_a_vector_added_to_all_keys_moves_the_lse_alone(p, c):
    moved = p.k + p.dtype.type(c)
    exactly((moved, p.k.astype(np.float64) + c))
    ours, others = attend(p.q, p.k, p.v, p.tiles), attend(p.q, moved, p.v, p.tiles)
    bounds = [bound_of(p.q, k, p.v, p.tiles) for k in (p.k, moved)]
    shift = p.q.astype(np.longdouble).sum(axis=-1) * c / np.sqrt(np.longdouble(p.q.shape[-1]))
    assert_near(ours.out, others.out, *(b.out.bound for b in bounds))
    assert_near(ours.lse + shift, others.lse, *(b.lse.bound for b in bounds))


@given(plain())
def test_a_bias_of_a_whole_row_moves_the_lse_alone(p):
    bias = p.rng.integers(-3, 4, (p.q.shape[2], 1)).astype(np.float32)
    ours, moved = attend(p.q, p.k, p.v, p.tiles), attend(p.q, p.k, p.v, p.tiles, bias=bias)
    bounds = [bound_of(p.q, p.k, p.v, p.tiles), bound_of(p.q, p.k, p.v, p.tiles, bias=bias)]
    assert_near(ours.out, moved.out, *(b.out.bound for b in bounds))
    assert_near(ours.lse + bias[:, 0].astype(np.float64), moved.lse, *(b.lse.bound for b in bounds))


# Linear in v


@given(plain(integers=True))
def test_linear_in_v(p):
    other = (p.rng.integers(-12, 13, p.v.shape) / 8).astype(p.dtype)
    together = p.v + 2 * other
    exactly((together, p.v.astype(np.float64) + 2 * other.astype(np.float64)))
    outs = [attend(p.q, p.k, v, p.tiles).out.astype(np.float64) for v in (p.v, other, together)]
    bounds = [bound_of(p.q, p.k, v, p.tiles).out.bound for v in (p.v, other, together)]
    assert_near(outs[0] + 2 * outs[1], outs[2], bounds[0], 2 * bounds[1], bounds[2])


@given(plain(dtypes=WIDE), st.sampled_from([-20, -1, 1, 30]), HOW)
def test_powers_of_two_on_v(p, power, how):
    factor = p.dtype.type(2.0**power)
    ours = attend(p.q, p.k, p.v, p.tiles, **options_of(how))
    scaled = attend(p.q, p.k, p.v * factor, p.tiles, **options_of(how))
    assert same_bits(ours.out * factor, scaled.out)
    assert same_bits(ours.lse, scaled.lse)


@given(plain())
def test_columns_of_v_do_not_see_each_other(p):
    ours = attend(p.q, p.k, p.v, p.tiles)
    columns = int(p.rng.integers(1, p.v.shape[-1] + 1))
    fewer = attend(p.q, p.k, p.v[..., :columns], p.tiles)
    assert same_bits(ours.out[..., :columns], fewer.out)
    assert same_bits(ours.lse, fewer.lse)
    poisoned = p.v.copy()
    poisoned[..., -1] = np.nan
    after = attend(p.q, p.k, poisoned, p.tiles)
    assert same_bits(ours.out[..., :-1], after.out[..., :-1])
    assert np.isnan(after.out[..., -1]).all()


# q and k


@given(plain(dtypes=WIDE), st.sampled_from([-7, -1, 1, 9]), HOW)
def test_powers_of_two_between_q_and_scale(p, power, how):
    scale, factor = 0.3, 2.0**power
    ours = attend(p.q, p.k, p.v, p.tiles, scale=scale, **options_of(how))
    moved = attend(
        p.q * p.dtype.type(factor), p.k, p.v, p.tiles, scale=scale / factor, **options_of(how)
    )
    assert_same(ours, moved)
    q, k = p.q / p.dtype.type(factor), p.k * p.dtype.type(factor)
    between = attend(q, k, p.v, p.tiles, scale=scale, **options_of(how))
    assert_same(ours, between)


@given(plain(), HOW)
def test_both_signs_turned(p, how):
    ours = attend(p.q, p.k, p.v, p.tiles, **options_of(how))
    assert_same(ours, attend(-p.q, -p.k, p.v, p.tiles, **options_of(how)))
    assert_same(
        ours,
        attend(-p.q, p.k, p.v, p.tiles, scale=-1 / math.sqrt(p.q.shape[-1]), **options_of(how)),
    )


@given(plain())
def test_a_rotation_of_q_and_k_changes_nothing(p):
    d = p.q.shape[-1]
    order, signs = p.rng.permutation(d), p.rng.choice([-1, 1], d).astype(p.dtype)
    ours = attend(p.q, p.k, p.v, p.tiles)
    turned = attend(p.q[..., order] * signs, p.k[..., order] * signs, p.v, p.tiles)
    bound = bound_of(p.q, p.k, p.v, p.tiles)
    assert_near(ours.out, turned.out, 2 * bound.out.bound)
    assert_near(ours.lse, turned.lse, 2 * bound.lse.bound)


# Sets of keys


@given(plain())
def test_every_key_twice_adds_ln_2(p):
    ours = attend(p.q, p.k, p.v, p.tiles)
    twice = [np.concatenate([x, x], axis=2) for x in (p.k, p.v)]
    doubled = attend(p.q, *twice, p.tiles)
    bounds = [bound_of(p.q, p.k, p.v, p.tiles), bound_of(p.q, *twice, p.tiles)]
    assert_near(ours.out, doubled.out, *(b.out.bound for b in bounds))
    assert_near(ours.lse + np.log(np.longdouble(2)), doubled.lse, *(b.lse.bound for b in bounds))


@given(plain(), st.integers(1, 20))
def test_masked_keys_inserted_change_nothing(p, number):
    keys = p.k.shape[2]
    places = np.sort(p.rng.integers(0, keys + 1, number))
    junk = [
        p.rng.standard_normal((*x.shape[:2], number, x.shape[3])).astype(p.dtype)
        for x in (p.k, p.v)
    ]
    k, v = (np.insert(x, places, y, axis=2) for x, y in zip((p.k, p.v), junk, strict=True))
    seen = np.insert(np.ones(keys, bool), places, False)
    ours = attend(p.q, p.k, p.v, p.tiles)
    bound = bound_of(p.q, p.k, p.v, p.tiles)
    wider = bound_of(p.q, k, v, p.tiles, mask=seen)
    for options in ({"mask": seen}, {"bias": np.where(seen, 0, -np.inf)}):
        longer = attend(p.q, k, v, p.tiles, **options)
        assert_near(ours.out, longer.out, bound.out.bound, wider.out.bound)
        assert_near(ours.lse, longer.lse, bound.lse.bound, wider.lse.bound)
    # At the end they do not even move the others to other tiles.
    k, v = (np.concatenate(x, axis=2) for x in zip((p.k, p.v), junk, strict=True))
    assert_same(ours, attend(p.q, k, v, p.tiles, mask=masks.lengths(keys)))


@given(plain())
def test_the_lse_grows_with_the_keys_and_lies_above_the_largest_score(p):
    ours, bound = attend(p.q, p.k, p.v, p.tiles), bound_of(p.q, p.k, p.v, p.tiles)
    k = np.repeat(p.k, p.q.shape[1] // p.k.shape[1], axis=1).astype(np.longdouble)
    s = p.q.astype(np.longdouble) @ k.swapaxes(-1, -2) / np.sqrt(np.longdouble(p.q.shape[-1]))
    slack = bound.lse.bound + 1e-17
    assert (ours.lse >= s.max(axis=-1) - slack).all()
    assert (ours.lse <= s.max(axis=-1) + math.log(p.k.shape[2]) + slack).all()
    fewer = attend(p.q, p.k[:, :, :-1], p.v[:, :, :-1], p.tiles)
    limit = bound_of(p.q, p.k[:, :, :-1], p.v[:, :, :-1], p.tiles).lse.bound
    assert (ours.lse >= fewer.lse - bound.lse.bound - limit).all()


# Masks said in several ways


@given(st.sampled_from(list(MASKS)), st.sampled_from(list(MASKS)), plain(dtypes=WIDE))
def test_a_mask_is_its_array_bitwise(kind, other, p):
    len_q, len_k, heads = p.q.shape[2], p.k.shape[2], p.q.shape[1]
    sizes = Sizes((2,), heads, len_q, len_k, None, p.rng)
    mask = MASKS[kind](sizes)
    if p.rng.random() < 0.5:
        mask = mask & ~MASKS[other](sizes) if p.rng.random() < 0.5 else mask | MASKS[other](sizes)
    array = mask.to_array(2, heads, len_q, len_k)
    assert_same(
        attend(p.q, p.k, p.v, p.tiles, mask=mask), attend(p.q, p.k, p.v, p.tiles, mask=array)
    )
    ours = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=mask)
    others = attend_backward(p.do, p.q, p.k, p.v, p.tiles, mask=array)
    for a, b in zip(ours[:3], others[:3], strict=True):
        assert same_bits(a, b)


@given(plain())
def test_causal_is_a_window(p):
    ours = attend(p.q, p.k, p.v, p.tiles, mask=masks.causal())
    assert_same(ours, attend(p.q, p.k, p.v, p.tiles, mask=masks.window(None, 0)))
    offset = p.k.shape[2] - p.q.shape[2]
    assert_same(ours, attend(p.q, p.k, p.v, p.tiles, mask=masks.causal(offset)))
    assert_same(
        attend(p.q, p.k, p.v, p.tiles),
        attend(p.q, p.k, p.v, p.tiles, mask=masks.window(None, None)),
    )


@given(plain(square=True), st.data())
def test_a_prefix_does_not_see_what_follows(p, data):
    n = data.draw(st.integers(1, p.q.shape[2]))
    options = {"mask": masks.causal(), "score_mod": scores.alibi(np.full(p.q.shape[1], 0.1))}
    whole = attend(p.q, p.k, p.v, p.tiles, **options)
    first = attend(p.q[:, :, :n], p.k[:, :, :n], p.v[:, :, :n], p.tiles, **options)
    assert same_bits(whole.out[:, :, :n], first.out)
    assert same_bits(whole.lse[:, :, :n], first.lse)


@given(plain(square=True), st.data())
def test_prefill_in_chunks_and_decoding_are_one_shot(p, data):
    whole = attend(p.q, p.k, p.v, p.tiles, mask=masks.causal())
    length = p.q.shape[2]
    cut = data.draw(st.integers(0, length - 1))
    for first, last in ((0, cut), (cut, length), (length - 1, length)):
        # the last query of a chunk sees every key there is so far
        chunk = attend(p.q[:, :, first:last], p.k[:, :, :last], p.v[:, :, :last], p.tiles,
                       mask=masks.causal())  # fmt: skip
        bound = bound_of(p.q[:, :, first:last], p.k[:, :, :last], p.v[:, :, :last], p.tiles,
                         mask=masks.causal())  # fmt: skip
        assert_near(whole.out[:, :, first:last], chunk.out, 2 * bound.out.bound)
        assert_near(whole.lse[:, :, first:last], chunk.lse, 2 * bound.lse.bound)


@given(plain(group=3))
def test_shared_heads_are_repeated_heads(p):
    repeated = [np.repeat(x, 3, axis=1) for x in (p.k, p.v)]
    options = {"mask": masks.causal(), "score_mod": scores.alibi(np.linspace(0, 1, p.q.shape[1]))}
    ours = attend(p.q, p.k, p.v, p.tiles, **options)
    assert_same(ours, attend(p.q, *repeated, p.tiles, **options))


@given(plain())
def test_broadcast_axes_are_repeated_axes(p):
    shared = attend(p.q, p.k[0], p.v[:1], p.tiles)
    repeated = [np.stack([x[0], x[0]]) for x in (p.k, p.v)]
    assert_same(shared, attend(p.q, *repeated, p.tiles))


# Options that do nothing


@given(plain(), HOW)
def test_a_sink_of_minus_infinity_is_none(p, how):
    sink = np.full(p.q.shape[1], -np.inf, np.float32)
    ours = attend(p.q, p.k, p.v, p.tiles, sink=sink, **options_of(how))
    assert_same(ours, attend(p.q, p.k, p.v, p.tiles, **options_of(how)))
    gradients = attend_backward(p.do, p.q, p.k, p.v, p.tiles, sink=sink, **options_of(how))
    without = attend_backward(p.do, p.q, p.k, p.v, p.tiles, **options_of(how))
    for a, b in zip(gradients[:3], without[:3], strict=True):
        assert same_bits(a, b)
    assert not gradients.dsink.any()


@given(plain())
def test_a_sink_is_one_more_key_of_value_0(p):
    # a query that ends in 1, and a key of zeros that ends in the sink's logit
    sink = (p.rng.integers(-16, 17, p.q.shape[1]) / 8).astype(p.dtype)
    group = p.q.shape[1] // p.k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (p.k, p.v))
    one = np.ones((*p.q.shape[:3], 1), p.dtype)
    q = np.concatenate([p.q, one], axis=-1)
    key = np.zeros((2, p.q.shape[1], 1, q.shape[-1]), p.dtype)
    key[..., -1] = sink[:, None]
    k = np.concatenate([k, 0 * k[..., :1]], axis=-1)
    longer = [np.concatenate([k, key], axis=2), np.concatenate([v, 0 * v[:, :, :1]], axis=2)]
    ours = attend(p.q, p.k, p.v, p.tiles, scale=1.0, sink=sink)
    as_key = attend(q, *longer, p.tiles, scale=1.0)
    bounds = [
        bound_of(p.q, p.k, p.v, p.tiles, scale=1.0, sink=sink),
        bound_of(q, *longer, p.tiles, scale=1.0),
    ]
    assert_near(ours.out, as_key.out, *(b.out.bound for b in bounds))
    assert_near(ours.lse, as_key.lse, *(b.lse.bound for b in bounds))


@given(plain(), HOW)
def test_options_that_change_nothing_change_nothing(p, how):
    ours = attend(p.q, p.k, p.v, p.tiles, **options_of(how))
    for option in (
        {"bias": np.zeros((), np.float16)},
        {"score_mod": scores.score(lambda s, b, h, i, j: s)},
        {"score_mod": scores.alibi(np.zeros(p.q.shape[1]))},
        {"score_mod": []},
        {"dropout": 0.0, "seed": 4},
    ):
        assert_same(ours, attend(p.q, p.k, p.v, p.tiles, **option, **options_of(how)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_softcap_far_away_is_none(dtype):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 30, 8)).astype(dtype) for _ in "qkv")
    far = scores.softcap(2.0**30)  # |s|**3 / (3 c**2) < 1e-15
    ours, plainly = attend(q, k, v, score_mod=far), attend(q, k, v)
    bounds = [bound_of(q, k, v, score_mod=far), bound_of(q, k, v)]
    slack = 1e-15 if dtype == np.float64 else 0
    assert_near(ours.out, plainly.out, *(b.out.bound + slack for b in bounds))
    assert_near(ours.lse, plainly.lse, *(b.lse.bound + slack for b in bounds))


@given(plain())
def test_a_score_and_a_bias_of_the_same_numbers_agree(p):
    table = p.rng.standard_normal((p.q.shape[1], 2 * p.k.shape[2] + 1)).astype(np.float32)
    reach = p.k.shape[2]
    i, j = np.ogrid[: p.q.shape[2], : p.k.shape[2]]
    place = np.clip(j - i - (p.k.shape[2] - p.q.shape[2]), -reach, reach) + reach
    bias = table[:, place]
    by_score = attend(p.q, p.k, p.v, p.tiles, score_mod=scores.relative_bias(table))
    assert_same(by_score, attend(p.q, p.k, p.v, p.tiles, bias=bias))
