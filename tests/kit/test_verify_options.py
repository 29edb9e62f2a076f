"""What a kernel may say of itself, and what a report says: rows without keys, families, places."""

from itertools import product

import numpy as np
import pytest
from halves import mostly_thorough

from cupyflash import masks, testing
from cupyflash.testing import Precision, mask_array

MASKED = {"features": ["masks", "lengths", "lse"], "dtypes": ["float32"], "examples": 8}


def kernel(q, k, v, hidden=-np.inf, sums=None):
    """Attention as other libraries have it: rows without keys are what `hidden` makes of them."""

    def forward(q, k, v, *, mask=None, return_lse=True):
        s = q @ k.swapaxes(-1, -2) / np.sqrt(q.dtype.type(q.shape[-1]))
        if mask is not None:
            s = np.where(mask_array(mask, q, k), s, np.float32(hidden))
        m = s.max(axis=-1, keepdims=True)
        p = np.exp(s - m)
        row = p.sum(axis=-1, keepdims=True)
        return p @ v / row, (m + np.log(row))[..., 0]

    return forward


def zeros(q, k, v, *, mask=None, return_lse=True):
    out, lse = kernel(q, k, v, -np.inf)(q, k, v, mask=mask)
    empty = np.isnan(lse)
    return np.where(empty[..., None], np.float32(0), out), np.where(empty, np.float32(-np.inf), lse)


def mean(q, k, v, *, mask=None, return_lse=True):
    return kernel(q, k, v, -1e30)(q, k, v, mask=mask)


def nan(q, k, v, *, mask=None, return_lse=True):
    return kernel(q, k, v)(q, k, v, mask=mask)


ONLY = ["forward_within_bound", "rows_that_see_nothing", "mask_is_its_array"]


@mostly_thorough(
    ("gives", "said"), list(product((zeros, mean, nan), ("zero", "mean", "nan", "any"))),
    quick=[(zeros, "zero"), (mean, "mean"), (nan, "nan"), (mean, "zero"), (zeros, "nan"),
           (nan, "any")],
    why="the other pairs of what a kernel gives and what is said of it",
)  # fmt: skip
def test_rows_without_keys_are_what_the_kernel_says(gives, said):
    report = testing.verify(gives, only=ONLY, empty_rows=said, **MASKED)
    failed = {x.name for x in report.failures}
    name = {"zeros": "zero"}.get(gives.__name__, gives.__name__)
    if said in (name, "any"):
        assert not failed, str(report)
    else:
        assert "rows_that_see_nothing" in failed


def test_gradients_of_rows_without_keys_are_left_out():
    def backward(do, q, k, v, out, lse, *, mask=None, dlse=None):
        allowed = np.ones((1, 1), bool) if mask is None else mask_array(mask, q, k)
        scale = 1 / np.sqrt(np.float32(q.shape[-1]))
        s = np.where(allowed, q @ k.swapaxes(-1, -2) * scale, np.float32(-1e30))
        p = np.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        dp = do @ v.swapaxes(-1, -2)
        ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True)) * scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    some = MASKED | {"only": "gradients_within_bound"}
    assert testing.verify(mean, backward, empty_rows="mean", **some).passed

    def without(do, q, k, v, out, lse, *, mask=None, dlse=None):
        assert mask is None or mask_array(mask, q, k).any(axis=-1).all()
        return backward(do, q, k, v, out, lse, mask=mask, dlse=dlse)

    # Where nothing is said, problems with such rows are not tried.
    assert testing.verify(mean, without, empty_rows="any", **some).passed
    assert not testing.verify(mean, without, empty_rows="mean", **some).passed


def test_empty_rows_must_be_known():
    with pytest.raises(ValueError, match="empty_rows: got 'none'; expected one of zero, mean"):
        testing.verify(zeros, empty_rows="none")


def test_nothing_is_asked_of_logits_beyond_the_bound_but_what_is_said():
    def overflows(q, k, v, *, return_lse=True):
        bound = testing.forward_bound(q, k, v, precision=Precision.of("float32")).out.bound
        return np.where(np.isfinite(bound), zeros(q, k, v)[0], np.nan).astype(np.float32), None

    some = {"dtypes": ["float32"], "families": "huge logits", "examples": 20}
    failed = testing.verify(overflows, features=["finite"], only=ONLY[0], **some)
    assert not failed.passed
    report = testing.verify(overflows, features=["lengths"], only=ONLY[0], **some)
    assert report.passed, str(report)
    (worst,) = report.results[0].worst
    assert worst.bounded < 0.5
    assert "Weak" in str(report)
    assert f"forward_within_bound: {worst.bounded:.0%} of out, float32" in str(report)


def test_a_statement_that_claims_little_is_called_weak():
    def forgetful(q, k, v, *, return_lse=True):
        s = q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)
        p = np.exp(s / np.sqrt(np.float32(q.shape[-1])))
        p[..., 64:65] = 0
        return (p @ v.astype(np.float32) / p.sum(axis=-1, keepdims=True)).astype(q.dtype), None

    report = testing.verify(
        forgetful, only="convex_rows", dtypes=["bfloat16"], features=[], examples=5
    )
    assert "Weak" not in str(report)
    report = testing.verify(
        forgetful, only="forward_within_bound", dtypes=["bfloat16"], features=[], examples=5,
        families="normal", precision=Precision.stated("bfloat16", p="bfloat16"), tiles=(64, 64),
    )  # fmt: skip
    assert "of out, bfloat16" in str(report)


def test_families_are_chosen_and_told_apart():
    report = testing.verify(zeros, only=ONLY[0], families=["normal", "tiny"], **MASKED)
    assert set(report.results[0].families) == {"normal", "tiny"}
    with pytest.raises(ValueError, match=r"families: got \['large'\]; expected some of normal"):
        testing.verify(zeros, families="large")
    report = testing.verify(zeros, only="logits_of_any_size", families="tiny",
                            features=["finite"], dtypes=["float32"])  # fmt: skip
    assert report.results[0].reason == "it is about the families huge logits"


def test_all_problems_are_tried_with_keep_going():
    def wrong(q, k, v, *, mask=None, return_lse=True):
        out, lse = zeros(q, k, v, mask=mask)
        return out * np.float32(1.5), lse

    families = ["normal", "offset", "tiny"]
    some = MASKED | {"only": ONLY[0], "families": families, "examples": 20}
    (result,) = testing.verify(wrong, keep_going=True, **some).results
    assert [x.family for x in result.failures] != []
    assert {x.family for x in result.failures} == {*families}
    assert result.examples > 100
    (result,) = testing.verify(wrong, **some).results
    assert len(result.failures) == 1


def test_an_exception_of_the_kernel_has_its_place_once():
    def broken(q, k, v, *, return_lse=True):
        return np.zeros(len(q))[q.shape[-2] + 9], None

    report = testing.verify(
        broken,
        only=["queries_permuted", "convex_rows"],
        features=[],
        dtypes=["float32"],
        examples=2,
    )
    text = str(report)
    assert text.count("return np.zeros(len(q))[q.shape[-2] + 9], None") == 1
    assert text.count("IndexError: index") >= 2
    assert "(raised where convex_rows met it)" in text or "(raised where queries_" in text


def test_a_zero_may_have_either_sign():
    def signed(q, k, v, *, return_lse=True):
        out, lse = zeros(q, k, v)
        return np.where(q[..., :1] > 0, np.float32(-0.0), np.float32(0)) * out, lse

    some = {"features": ["bitwise"], "dtypes": ["float32"], "examples": 5}
    assert testing.verify(signed, only="both_signs_turned", **some).passed
    other = testing.verify(lambda q, k, v, **_: (zeros(q, k, v)[0] + q[..., :1], None),
                           only="both_signs_turned", **some)  # fmt: skip
    assert not other.passed


def test_sums_that_stop_growing_are_found():
    def halves(q, k, v, *, return_lse=True):
        out = np.zeros((*q.shape[:-1], v.shape[-1]), np.float16)
        for j in range(min(k.shape[-2], 5000)):
            out += v[..., j : j + 1, :]
        row = np.float16(min(k.shape[-2], 2048))  # 1 + 1 + ... in float16
        return out / row, None

    some = {"features": ["lengths"], "dtypes": ["float16"]}
    assert not testing.verify(halves, only="exact_mean", examples=40, **some).passed

    def backward(do, q, k, v, out, lse):
        return 0 * q, 0 * k, np.minimum(do.sum(axis=-2, keepdims=True), np.float32(65536))

    some = {"features": ["lengths"], "dtypes": ["float32"], "only": "exact_sum_over_queries"}
    found = testing.verify(lambda q, k, v, **_: (v + 0 * q, None), backward, examples=40, **some)
    assert "dV is not the sum of" in found.failures[0].failures[0].message


def test_conditions_say_where():
    def early(q, k, v, *, mask=None, return_lse=True):
        keep = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
        return kernel(q, k, v)(q, k, v, mask=None if mask is None else keep)[0], None

    report = testing.verify(
        early, only="causal_is_aligned_at_the_end", features=["causal", "lengths", "widths"],
        dtypes=["float32"], examples=20,
    )  # fmt: skip
    assert "first at [" in report.failures[0].failures[0].message

    def leaks(q, k, v, *, mask=None, return_lse=True):
        return kernel(q, k, v, -64)(q, k, v, mask=mask)[0], None

    report = testing.verify(
        leaks, only="causal_is_aligned_at_the_end", features=["causal"], dtypes=["float32"]
    )
    assert "a hidden key has the weight 1.6e-28; expected 0" in str(report)


def test_only_calls_that_the_kernel_serves_are_tried():
    def causal(q, k, v, *, mask=None, return_lse=True):
        return kernel(q, k, v)(q, k, v, mask=masks.causal())

    def serves(call):
        return call.options.get("mask") == masks.causal()

    some = {"features": ["causal", "lse"], "dtypes": ["float32"], "examples": 10}
    only = [ONLY[0], "prefix_sees_nothing_behind", "queries_permuted"]
    report = testing.verify(causal, only=only, serves=serves, **some)
    states = {x.name: x.status for x in report.results}
    assert states == {ONLY[0]: "passed", only[1]: "passed", only[2]: "not applicable"}
    assert report.results[-1].reason == "the kernel serves none of its calls"
    assert not testing.verify(causal, only=only, **some).passed


def test_gradients_may_be_served_less():
    asked = []

    def serves(call):
        asked.append(call.gradients)
        return not call.gradients or "bias" not in call.options

    def backward(do, q, k, v, out, lse, **options):
        assert "bias" not in options
        return 0 * q, 0 * k, 0 * v

    report = testing.verify(zeros, backward, features=["bias"], dtypes=["float32"], examples=5,
                            only="gradients_within_bound", serves=serves)  # fmt: skip
    assert set(asked) == {False, True}
    assert "AssertionError" not in str(report)


@pytest.mark.parametrize("only", ["forward_within_bound", "convex_rows"])
def test_shapes_may_be_few(only):
    seen = set()

    def seeing(q, k, v, *, return_lse=True):
        seen.add((q.shape, k.shape, v.shape))
        return zeros(q, k, v)

    some = {"features": ["lengths", "gqa", "broadcast", "widths"], "dtypes": ["float32"]}
    testing.verify(seeing, only=only, shapes=3, examples=40, **some)
    assert len(seen) <= 3
    seen.clear()
    testing.verify(seeing, only=only, examples=40, **some)
    assert len(seen) > 5


def test_scores_in_16_bits_are_a_precision():
    """matmul, softmax and matmul on arrays of float16, as most libraries' plain path does it."""

    def plain(q, k, v, *, return_lse=True, scores=np.float16):
        s = (q.astype(np.float32) @ k.swapaxes(-1, -2).astype(np.float32)).astype(scores)
        s = (s * scores(1 / np.sqrt(q.shape[-1]))).astype(scores).astype(np.float32)
        m = s.max(axis=-1, keepdims=True)
        p = np.exp(s - m)
        row = p.sum(axis=-1, keepdims=True)
        out = (p / row).astype(np.float16).astype(np.float32) @ v.astype(np.float32)
        return out.astype(np.float16), (m + np.log(row))[..., 0].astype(np.float16)

    some = {"features": ["lengths", "lse"], "dtypes": ["float16"], "examples": 10,
            "families": ["normal", "negative scores"]}  # fmt: skip
    said = {"p": "float16", "scores": "float16", "scale": "float16", "lse": "float16"}
    right = Precision.stated("float32", **said)
    assert testing.verify(plain, only=ONLY[0], precision=right, **some).passed
    assert testing.verify(plain, only="errors_are_typical", precision=right, **some).passed
    for name in ("scores", "lse"):
        less = Precision.stated("float32", **(said | {name: None}))
        assert not testing.verify(plain, only=ONLY[0], precision=less, **some).passed


def test_masks_become_arrays():
    q, k = np.zeros((2, 3, 4, 8)), np.zeros((2, 3, 5, 8))
    made = mask_array(masks.causal(), q, k)
    assert (made == np.tri(4, 5, 1, dtype=bool)).all()
    assert made.shape == (2, 3, 4, 5)
    assert mask_array(masks.causal(), q[0, 0], k[0, 0]).shape == (4, 5)
    assert mask_array(None, q, k) is None
    assert masks.causal() == masks.causal()
    assert masks.causal() != masks.window(2, 0)
