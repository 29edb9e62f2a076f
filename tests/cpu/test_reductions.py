"""Statistics of weights: results against the specification, and what they promise."""

import copy
import tracemalloc

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given
from placement import same_bits
from reductions_of import EVERY, OTHERS, SUMS, gradient_ratios, ratios, run
from strategies import BFLOAT16, DTYPES, problems

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, TraceError, masks, reductions, scores
from cupyflash.reference.spec import naive, naive_reductions
from cupyflash.testing import Precision, reduction_bound, rho

CAUSAL = masks.causal()


def drawn(rng, dtype=np.float64, len_q=60, len_k=70):
    q = rng.standard_normal((2, 6, len_q, 24)).astype(dtype)
    k = rng.standard_normal((2, 3, len_k, 24)).astype(dtype)
    options = {
        "mask": masks.window(30, 5), "score_mod": scores.softcap(3.0),
        "bias": rng.standard_normal((6, 1, len_k)).astype(dtype),
        "sink": rng.standard_normal(6).astype(dtype),
    }  # fmt: skip
    return q, k, options


# The bound, and the specification


@mostly_thorough(
    "dtype",
    DTYPES,
    quick=[BFLOAT16],
    why="the same kernels for other types",
    ids=str,
)
def test_results_are_within_the_bound(dtype):
    @given(problems(dtype, packed=False))
    def check(problem):
        found = run(problem, cupyflash.reduce, EVERY)
        worst = ratios(problem, found, EVERY)
        assert max(worst.values()) <= 1, worst

    check()


@mostly_thorough(
    "dtype",
    DTYPES,
    quick=[np.dtype(np.float32)],
    why="the same kernels for other types",
    ids=str,
)
def test_gradients_are_within_the_bound(dtype):
    @given(problems(dtype, packed=False))
    def check(problem):
        worst = gradient_ratios(problem)
        assert max(worst.values()) <= 1, worst

    check()


def test_gradients_of_the_specification_are_its_derivatives():
    rng = np.random.default_rng(0)
    q, k, options = drawn(rng, len_q=9, len_k=11)
    lead, f = naive.forward_dense(q, k, k[..., :1], **options)
    terms = [
        (x, rng.standard_normal(naive_reductions.reduced(f, x)[0].shape)) for x in SUMS.values()
    ]
    shapes = q.shape, k.shape, options["bias"].shape
    made = naive_reductions.reduced_gradients(f, lead, terms, shapes)
    along = [rng.standard_normal(x.shape) for x in (q, k, options["bias"], options["sink"])]

    def loss(step):
        moved = [
            np.longdouble(x) + step * d
            for x, d in zip((q, k, options["bias"], options["sink"]), along, strict=True)
        ]
        more = options | {"bias": moved[2], "sink": moved[3]}
        f = naive.forward_dense(moved[0], moved[1], k[..., :1], dtype=np.longdouble, **more)[1]
        return sum((naive_reductions.reduced(f, x)[0] * c).sum() for x, c in terms)

    step = np.longdouble(1e-6)
    difference = (loss(step) - loss(-step)) / (2 * step)
    ours = sum((x * d).sum() for x, d in zip(made[:4], along, strict=True))
    assert abs(difference - ours) < 1e-8 * abs(ours)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "argmax"])
def test_missing_keys_exceed_the_bound(name):
    q, k, options = drawn(np.random.default_rng(1), np.float32)
    bound = reduction_bound(q, k, EVERY[name], precision=Precision.of("float32"), **options)
    fewer = options | {"mask": options["mask"] & masks.mask(lambda b, h, i, j: j % 2 == 0)}
    found = cupyflash.reduce(q, k, {name: EVERY[name]}, **fewer)[name]
    values = found.values if name == "top" else found
    assert rho(values, *bound).value > 1


# What reductions are


def test_an_entropy_is_that_of_the_weights_and_the_sink():
    q, k, _ = drawn(np.random.default_rng(2))
    sink = np.arange(6.0)
    found = cupyflash.reduce(q, k, {"h": reductions.entropy()}, sink=sink)["h"]
    probs = naive.attention(q, k, k, sink=sink, return_probs=True).probs
    every = np.concatenate([probs, 1 - probs.sum(axis=-1, keepdims=True)], axis=-1)
    assert np.allclose(found, -(every * np.log(every)).sum(axis=-1), rtol=1e-12)
    alike = cupyflash.reduce(0 * q, k, {"h": reductions.entropy()})["h"]
    assert np.allclose(alike, np.log(70), rtol=1e-14)


def test_masses_distances_and_blocks_are_the_same_weights():
    q, k, options = drawn(np.random.default_rng(3))
    options.pop("sink")
    seen = CAUSAL.to_array(1, 1, 60, 70)[0, 0].any(axis=-1).sum()
    for name in ("mass", "distance", "blocks"):
        found = cupyflash.reduce(q, k, {name: SUMS[name]}, mask=CAUSAL)[name]
        assert np.allclose(found.reshape(2, 6, -1).sum(axis=-1), seen, rtol=1e-12), name


def test_weights_and_queries_of_a_mass():
    q, k, options = drawn(np.random.default_rng(4))
    weights = np.random.default_rng(5).standard_normal((6, 60))
    named = {
        "weighted": reductions.mass(weights),
        "last": reductions.mass(queries=slice(-8, None)),
        "none": reductions.mass(queries=slice(9, 3)),
    }
    found = cupyflash.reduce(q, k, named, **options)
    probs = naive.attention(q, k, k, return_probs=True, **options).probs
    assert np.allclose(found["weighted"], (weights[..., None] * probs).sum(axis=-2), atol=1e-13)
    assert np.allclose(found["last"], probs[..., -8:, :].sum(axis=-2), atol=1e-13)
    assert not found["none"].any()


def test_the_largest_keys_come_in_order_and_equal_ones_by_position():
    q = np.ones((1, 3, 1))
    k = np.array([[[1.0], [3.0], [2.0], [3.0]]])
    top = cupyflash.reduce(q, k, {"top": reductions.top_keys(6)}, mask=CAUSAL, scale=1)["top"]
    assert top.indices[0].tolist() == [
        [1, 0, -1, -1, -1, -1], [1, 2, 0, -1, -1, -1], [1, 3, 2, 0, -1, -1],
    ]  # fmt: skip
    assert top.values[0, 0].tolist() == [3.0, 1.0, *[-np.inf] * 4]


def test_the_largest_keys_are_what_chosen_takes():
    q, k, _ = drawn(np.random.default_rng(6))
    v = np.random.default_rng(7).standard_normal(k.shape)
    top = cupyflash.reduce(q, k, {"top": reductions.top_keys(5)}, mask=CAUSAL)["top"]
    some = masks.chosen(top.indices, block=(1, 1))
    seen = some.to_array(2, 6, 60, 70)
    every = CAUSAL.to_array(1, 1, 60, 70)[0, 0].sum(axis=-1)
    assert (seen.sum(axis=-1) == np.minimum(every, 5)).all()
    out = cupyflash.attention(q, k, v, mask=some & CAUSAL)
    assert np.allclose(out, naive.attention(q, k, v, mask=seen).out, atol=1e-13)


def test_the_heaviest_blocks_are_what_chosen_takes():
    q, k, _ = drawn(np.random.default_rng(8))
    found = cupyflash.reduce(q, k, {"b": reductions.blocks((20, 10))}, mask=CAUSAL)["b"]
    best = np.argsort(-found, axis=-1)[..., :3]
    seen = masks.chosen(best, block=(20, 10)).to_array(2, 6, 60, 70)
    probs = naive.attention(q, k, k, mask=CAUSAL, return_probs=True).probs
    kept = (probs * seen).sum(axis=(-1, -2))
    most = np.sort(found, axis=-1)[..., -3:].sum(axis=(-1, -2))
    assert np.allclose(kept, most, rtol=1e-12)


def test_matrices_are_one_head():
    q, k, _ = drawn(np.random.default_rng(9))
    one = cupyflash.reduce(q[0, 0], k[0, 0], EVERY)
    several = cupyflash.reduce(q[0, :1], k[0, :1], EVERY)
    for name, found in one.items():
        ours, other = (x.indices if name == "top" else x for x in (found, several[name]))
        assert same_bits(ours, other[0]), name
    gradients = cupyflash.reduce_vjp(q[0, 0], k[0, 0], {"m": reductions.mass()})[1]
    assert gradients({"m": np.ones(70)}).dk.shape == k[0, 0].shape


def test_copies_are_the_same_reductions():
    q, k, options = drawn(np.random.default_rng(22))
    other = {name: copy.deepcopy(x) for name, x in SUMS.items()}
    ours, theirs = (cupyflash.reduce_vjp(q, k, x, **options) for x in (SUMS, other))
    assert all(same_bits(ours[0][name], theirs[0][name]) for name in SUMS)
    assert all(same_bits(x, y) for x, y in zip(ours[1](ours[0]), theirs[1](ours[0]), strict=True))


def test_the_log_sum_exp_may_be_given():
    q, k, options = drawn(np.random.default_rng(10))
    lse = cupyflash.attention(q, k, k, return_lse=True, **options)[1]
    ours, other = (cupyflash.reduce(q, k, SUMS, lse=x, **options) for x in (lse, None))
    assert all(np.allclose(ours[name], other[name], rtol=1e-13, atol=1e-13) for name in SUMS)


def test_attention_returns_them_beside_its_output():
    q, k, options = drawn(np.random.default_rng(30), np.float32)
    v = np.random.default_rng(31).standard_normal((2, 3, 70, 16)).astype(np.float32)
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    wanted = cupyflash.reduce(q, k, SUMS, lse=lse, **options)
    # Weights are those before dropout.
    more = options | {"dropout": 0.3, "seed": 5}
    dropped = cupyflash.attention(q, k, v, **more)
    room = np.empty_like(out), np.empty_like(lse)
    shown, found = cupyflash.attention(q, k, v, reductions=SUMS, **options)
    other, lse_of, again = cupyflash.attention(
        q, k, v, reductions=SUMS, return_lse=True, out=room[0], lse_out=room[1], **more
    )
    assert same_bits(shown, out)
    assert same_bits(other, dropped)
    assert same_bits(lse_of, lse)
    assert other is room[0]
    assert lse_of is room[1]
    for name, x in wanted.items():
        assert same_bits(found[name], x), name
        assert same_bits(again[name], x), name
    out, found = cupyflash.attention(q[0, 0], k[0, 0], k[0, 0], reductions=SUMS)
    assert out.shape == q[0, 0].shape
    assert found["mass"].shape == (70,)


def test_entries_are_those_of_all_three_arrays():
    rng = np.random.default_rng(32)
    q, k = rng.standard_normal((2, 2, 20, 8))
    v = rng.standard_normal((3, 2, 20, 8))
    by_entry = masks.mask(lambda b, h, i, j: j % 3 == b)
    named = {"mass": reductions.mass(), "top": reductions.max_logit()}
    found = cupyflash.attention(q, k, v, reductions=named, mask=by_entry)[1]
    assert found["mass"].shape == (3, 2, 20)
    alone = cupyflash.reduce(np.broadcast_to(q, (3, 2, 20, 8)), k, named, mask=by_entry)
    assert all(same_bits(found[name], alone[name]) for name in named)


# What is promised


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float32)], ids=str)
def test_bits_are_those_of_any_batch_and_any_number_of_threads(dtype, monkeypatch):
    q, k, options = drawn(np.random.default_rng(11), dtype, len_q=400, len_k=350)
    every = cupyflash.reduce(q, k, EVERY, **options)
    one = cupyflash.reduce(q[1:], k[1:], EVERY, **options)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    alone = cupyflash.reduce(q, k, EVERY, **options)
    for name in EVERY:
        for made, ours in ((one, every[name]), (alone, every[name])):
            pairs = zip(made[name], ours, strict=True) if name == "top" else [(made[name], ours)]
            for x, y in pairs:
                assert same_bits(x, y[1:] if made is one else y), name


def test_keys_that_nobody_sees_change_no_bit():
    q, k, options = drawn(np.random.default_rng(12))
    options["mask"] = masks.mask(lambda b, h, i, j: (j % 9 != 4) & (j < 66))
    before = cupyflash.reduce(q, k, EVERY, **options)
    found, vjp = cupyflash.reduce_vjp(q, k, SUMS, **options)
    gradients = vjp(found)
    hidden = np.arange(70) % 9 == 4
    hidden[66:] = True
    k[..., hidden, :] = np.nan
    after = cupyflash.reduce(q, k, EVERY, **options)
    for name in EVERY:
        ours, other = (x[name][0] if name == "top" else x[name] for x in (before, after))
        assert same_bits(ours, other), name
    others = cupyflash.reduce_vjp(q, k, SUMS, **options)[1](found)
    assert all(same_bits(x, y) for x, y in zip(gradients, others, strict=True))


def test_nan_stays_in_its_row():
    q, k, _ = drawn(np.random.default_rng(13))
    q[1, 2, 7] = np.nan
    named = {name: EVERY[name] for name in ("entropy", "max_logit", "own")}
    for name, found in cupyflash.reduce(q, k, named).items():
        bad = np.isnan(found)
        assert np.argwhere(bad).tolist() == [[1, 2, 7]], name
    top = cupyflash.reduce(q, k, {"top": reductions.top_keys(2)})["top"]
    assert np.isnan(top.values[1, 2, 7]).all()
    assert top.indices[1, 2, 7].tolist() == [0, 1]


def test_rows_without_keys_and_empty_axes():
    q, k, _ = drawn(np.random.default_rng(14))
    nobody = masks.mask(lambda b, h, i, j: (i != 3) & (j < 0))
    found = cupyflash.reduce(q, k, EVERY, mask=nobody)
    for name in SUMS:
        assert not found[name].any(), name
    assert all(np.isneginf(found[name]).all() for name in ("max_logit", "raw", "largest", "peak"))
    assert all((x == -1).all() for x in (found["argmax"], found["top"].indices))
    gradients = cupyflash.reduce_vjp(q, k, SUMS, mask=nobody)[1]
    assert not any(x.any() for x in gradients({n: found[n] + 1 for n in SUMS})[:2])
    for queries, keys in ((0, 5), (5, 0), (0, 0)):
        found = cupyflash.reduce(q[:, :, :queries], k[:, :, :keys], EVERY)
        assert same_bits(found["mass"], np.zeros((2, 6, keys)))
        assert found["entropy"].shape == (2, 6, queries)
        assert found["distance"].shape == (2, 6, max(queries + keys - 1, 0))


def test_memory_grows_with_the_length():
    q, k = np.random.default_rng(15).standard_normal((2, 1, 4096, 8)).astype(np.float32)
    named = {name: EVERY[name] for name in ("entropy", "mass", "distance", "top")}
    cupyflash.reduce(q[:, :64], k[:, :64], named)
    tracemalloc.start()
    try:
        cupyflash.reduce(q, k, named)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 4096 * 4096 * 4 / 8


# Errors


def test_errors_of_constructors():
    def wrong(error, match, make, *args, **named):
        with pytest.raises(error, match=match):
            make(*args, **named)

    wrong(ArgumentError, "n is 65; expected an integer from 1 to 64", reductions.top_keys, 65)
    wrong(ArgumentError, "expected a step of 1", reductions.mass, queries=slice(0, 9, 2))
    wrong(ArgumentTypeError, "expected a slice", reductions.mass, queries=-32)
    wrong(ArgumentTypeError, "expected floats", reductions.mass, np.arange(3))
    wrong(ArgumentError, "by is 'mean'", reductions.blocks, 64, by="mean")
    wrong(ArgumentError, "expected \\(block_q, block_k\\)", reductions.blocks, (1, 2, 3))
    wrong(ArgumentTypeError, "raw is 1", reductions.max_logit, raw=1)

    def weight(p, t, b, h, i, j):
        return p

    make = reductions.reduction
    wrong(ArgumentError, "along is 'rows'", make, weight, along="rows")
    wrong(ArgumentError, "by is 'top' with along='queries'", make, weight, "queries", "top", n=2)
    wrong(ArgumentError, "expected n= with by='top'", make, weight, by="top")
    wrong(ArgumentError, "expected block= with along='blocks'", make, weight, along="blocks")
    wrong(ArgumentTypeError, "must take \\(p, t, b, h, i, j\\)", make, lambda p: p)
    wrong(TraceError, "score of a score change", make, lambda *_: cupyflash.expr.functions.SCORE)


def test_errors_of_calls():
    q, k, options = drawn(np.random.default_rng(16))

    def wrong(match, named, error=ArgumentError, function=cupyflash.reduce, **more):
        with pytest.raises(error, match=match):
            function(q, k, named, **more)

    one = {"mass": reductions.mass()}
    wrong("expected a mapping of names", [reductions.mass()], ArgumentTypeError)
    wrong("Call the function", {"mass": reductions.mass}, ArgumentTypeError)
    wrong("got none", {})
    wrong("lse: got shape", one, lse=np.zeros(3))
    wrong("no such argument; say mask=masks.causal", one, ArgumentTypeError, causal=True)
    wrong("broadcasts to", {"m": reductions.mass(np.ones(61))})
    beside = {
        "function": lambda q, k, named, **x: cupyflash.attention(q, k, k, reductions=named, **x)
    }
    wrong("got none", {}, **beside)
    wrong("return_lse: got 1", one, ArgumentTypeError, return_lse=1, **beside)
    room = np.full(q.shape, 3.0)
    with pytest.raises(ArgumentError, match="broadcasts to"):
        cupyflash.attention(q, k, k, reductions={"m": reductions.mass(np.ones(61))}, out=room)
    assert (room == 3).all()
    codes = {"qkv_dtype": "float8_e4m3fn", "q_scale": 1.0, "k_scale": 1.0, "v_scale": 1.0}
    x = np.zeros((2, 4, 8), np.uint8)
    with pytest.raises(ArgumentError, match="'mass' beside codes"):
        cupyflash.attention(x, x, x, reductions=one, **codes)
    for reduction in OTHERS.values():
        wrong("which has no gradient", {"x": reduction}, function=cupyflash.reduce_vjp)
    vjp = cupyflash.reduce_vjp(q, k, one, **options)[1]
    for wrong_one, match in (({"m": q}, "expected names among 'mass'"), ({"mass": q}, "got shape")):
        with pytest.raises(ArgumentError, match=match):
            vjp(wrong_one)
    with pytest.raises(ArgumentTypeError, match="bias_gradient: got 1"):
        vjp({"mass": np.ones((2, 6, 70))}, bias_gradient=1)


@pytest.mark.parametrize("by", ["sum", "max"])
def test_distances_of_long_heads_are_divided_and_joined(by):
    q, k = np.random.default_rng(20).standard_normal((2, 1, 700, 4))
    own = reductions.reduction(lambda p, t, b, h, i, j: p, "distance", by)
    probs = naive.attention(q, k, k, mask=CAUSAL, return_probs=True).probs[0]
    found = cupyflash.reduce(q, k, {"d": own}, mask=CAUSAL)["d"][0]
    take = np.sum if by == "sum" else np.max
    wanted = [take(np.diagonal(probs, -n)) for n in range(700)]
    assert np.allclose(found[699:], wanted, rtol=1e-12)
    assert (found[:699] == (0 if by == "sum" else -np.inf)).all()


def test_tensors_of_other_libraries_are_read_in_place():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    q, k, options = drawn(np.random.default_rng(21))
    ours = cupyflash.reduce(q, k, SUMS, **options)
    other = cupyflash.reduce(torch.from_numpy(q), torch.from_numpy(k), SUMS, **options)
    assert all(same_bits(ours[name], other[name]) for name in SUMS)


def test_a_bias_that_heads_share_has_a_remedy():
    q, k, _ = drawn(np.random.default_rng(17))
    bias = np.random.default_rng(18).standard_normal((60, 70))
    named, given = {"h": reductions.entropy()}, {"h": np.ones((2, 6, 60))}
    vjp = cupyflash.reduce_vjp(q, k, named, bias=bias)[1]
    with pytest.raises(ArgumentError, match=r"np.broadcast_to\(bias, \(2, 6, 60, 70\)\)"):
        vjp(given)
    assert vjp(given, bias_gradient=False).dbias is None
    wide = np.broadcast_to(bias, (2, 6, 60, 70))
    assert cupyflash.reduce_vjp(q, k, named, bias=wide)[1](given).dbias.shape == wide.shape
