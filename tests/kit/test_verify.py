"""`verify` and what it is made of: reports, adapters, lines that repeat a failure, and options."""

from __future__ import annotations

import doctest
import importlib
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from faults import KNOWN, Attention
from halves import mostly_thorough
from hypothesis import given
from hypothesis import strategies as st
from numpydoc.validate import validate
from test_public_api import PARAMETERS, SUMMARY

import cupyflash
from cupyflash import masks, testing
from cupyflash.testing import calibrate, verification
from cupyflash.testing.copies import Copies, HostMemory
from cupyflash.testing.options import MASKS, SCORES, float_type


def mine(q, k, v, causal):
    """A kernel that knows only q, k, v and causal."""
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.dtype.type(q.shape[-1]))
    if causal:
        s = np.where(np.tri(*s.shape[-2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return p @ v / p.sum(axis=-1, keepdims=True)


def adapter(q, k, v, *, mask=None, return_lse=True):
    return mine(q, k, v, causal=mask is not None), None


SIMPLE = {"features": ["causal"], "dtypes": ["float32", "float64"], "examples": 5}


def test_a_kernel_of_few_features_passes_through_an_adapter():
    report = testing.verify(adapter, **SIMPLE)
    assert report.passed, str(report)
    run = {x.name for x in report.results if x.status == "passed"}
    assert run >= {"forward_within_bound", "exact_mean", "prefix_sees_nothing_behind"}
    reasons = {x.name: x.reason for x in report.results}
    assert reasons["gradients_within_bound"] == "no backward_fn was given"
    assert reasons["shared_heads_are_repeated"] == "the kernel lacks gqa"
    assert reasons["unbiased_rounding"] == "it is about float16, bfloat16"
    assert "no option" in reasons["other streams"]
    assert f"all {len(run)} properties passed" in str(report)


def test_a_failure_is_said_by_a_line_that_repeats_it():
    def wrong(q, k, v, *, mask=None, return_lse=True):
        out, _ = adapter(q, k, v, mask=mask)
        out[:, :, 8:] *= 1.01  # rows from 8 on
        return out, None

    report = testing.verify(wrong, only="forward_within_bound", **SIMPLE)
    assert not report.passed
    (result,) = report.failures
    (failure,) = result.failures
    assert "times the bound" in failure.message
    assert result.worst[0].ratio > 1
    assert result.worst[0].output == "out"
    rows = int(re.search(r"q=\(\d+, \d+, (\d+),", failure.problem)[1])
    assert 9 <= rows <= 15, "the smallest lengths that reach it are 9 or 15"
    line = failure.problem
    assert line in str(report)
    assert f"check('{result.name}', problem, attention_fn, backward_fn)" in str(report)
    problem = eval(line, {"cupyflash": cupyflash})
    with pytest.raises(testing.PropertyError, match="times the bound"):
        testing.check(result.name, problem, wrong, features=["causal"])
    testing.check(result.name, eval(line), adapter, features=["causal"])
    content = json.loads(report.to_json())
    assert content["passed"] is False
    assert content["results"][0]["failures"][0]["problem"] == line


def test_the_seed_decides_what_is_drawn():
    def lines(seed, examples=8):
        seen = []

        def spy(q, k, v, **options):
            seen.append((q.shape, q.tobytes()))
            return cupyflash.attention(q, k, v, **options)

        testing.verify(spy, only="keys_permuted", seed=seed, examples=examples)
        return seen

    assert lines(1) == lines(1)
    assert lines(1) != lines(2)


@mostly_thorough(
    ("float8", "examples"),
    [("float32", 6), ("codes", 6), ("codes", 2)],
    quick=[("float32", 6), ("codes", 2)],
    why="a large problem more",
)
def test_codes_of_float8_have_sizes_that_are_multiplied_as_they_are(float8, examples):
    seen = []

    def spy(q, k, v, **options):
        seen.append((*q.shape[2:], *k.shape[2:], *v.shape[2:]))
        return cupyflash.attention(q, k, v, **options)

    only = {"only": "float8_within_bound", "examples": examples, "dtypes": ["float32"]}
    assert testing.verify(spy, float8=float8, **only).passed
    is_for_hopper = [min(x[::2]) >= 512 and not any(n % 16 for n in x[1::2]) for x in seen]
    assert len(seen) >= examples
    assert all(is_for_hopper) == any(is_for_hopper) == (float8 == "codes")


def test_errors_of_a_kernel_are_failures():
    def raises(q, k, v, **options):
        raise KeyError("no such tile")

    report = testing.verify(raises, only=["exact_mean", "rotated"], **SIMPLE)
    assert [x.status for x in report.results] == ["FAILED", "FAILED"]
    assert report.results[0].failures[0].message == "KeyError: 'no such tile'"
    stopped = testing.verify(raises, only=["exact_mean", "rotated"], stop=True, **SIMPLE)
    assert len(stopped.results) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, lse: (out[..., None], lse), "shape"),
        (lambda out, lse: (out.astype(np.float64), lse), "dtype"),
        (lambda out, lse: out, "out, lse"),
    ],
)
def test_results_of_another_kind_are_failures(change, message):
    def other(q, k, v, **options):
        return change(*cupyflash.attention(q, k, v, **options))

    options = {"dtypes": ["float32"], "only": "exact_mean", "examples": 2}
    report = testing.verify(other, **options)
    assert message in report.failures[0].failures[0].message


def test_writing_beside_an_array_and_changing_an_input_are_failures():
    def beside(q, k, v, **options):
        out, lse = cupyflash.attention(q, k, v, **options)
        past = np.lib.stride_tricks.as_strided(q, (q.size + 4,), q.strides[-1:])
        past[-1] = 0
        return out, lse

    def changes(q, k, v, **options):
        k[..., 0] = 3
        return cupyflash.attention(q, k, v, **options)

    options = {"only": "exact_mean", "examples": 2, "dtypes": ["float32"], "features": ["lse"]}
    for kernel in (beside, changes):
        report = testing.verify(kernel, **options)
        assert "wrote outside it" in report.failures[0].failures[0].message


def test_the_precision_stated_is_the_one_that_judges():
    rounding = np.dtype("float16").type

    def low(q, k, v, **options):
        kernel = Attention("")
        out, lse = kernel.forward(*(x.astype(np.float64) for x in (q, k, v)), **options)
        return (out * (1 + 2.0**-12)).astype(q.dtype), lse.astype(np.float32)

    options = {
        "dtypes": ["float32"], "only": "forward_within_bound", "examples": 3,
        "features": [x for x in KNOWN if x not in ("bias", "sink", "dropout")],
    }  # fmt: skip
    assert not testing.verify(low, **options).passed
    stated = testing.Precision.stated("float32", p="float16", truncates=True)
    assert stated.product.unit == np.finfo(rounding).eps / 2
    assert testing.verify(low, precision=stated, **options).passed
    assert testing.verify(low, precision=lambda dtype: stated, **options).passed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": ["causl"]}, "features: got causl; expected some of causal"),
        ({"only": "keys_permutd"}, "did you mean keys_permuted"),
        (
            {"only": "lse_shift"},
            "did you mean lse_between_its_limits or one_more_key_raises_lse or",
        ),
        ({"only": "xyzzy"}, "there are forward_within_bound, gradients_within_bound"),
        ({"device": "tpu"}, "got 'tpu'; expected 'cpu' or 'gpu'"),
        ({"dtypes": ["int32"]}, "int32"),
        ({"dtypes": []}, "expected some of float16"),
        ({"examples": 0}, "a whole number of 1 or more"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        testing.verify(adapter, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": "round"}, "causal"),
        ({"scores": ["cap"]}, "softcap"),
        ({"family": "odd"}, "one-hot keys"),
        ({"layouts": "loose"}, "rows"),
    ],
)
def test_a_problem_of_unknown_names(options, message):
    with pytest.raises(ValueError, match=message):
        testing.problem("float32", (1, 1, 4, 4), **options)


@given(st.data())
def test_a_line_makes_the_problem_again(data):
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32", "float64"]))
    packed = data.draw(st.booleans())
    drawn = data.draw(testing.problems(float_type(dtype), packed=packed))
    again = eval(drawn.line, {"cupyflash": cupyflash})
    for name in ("q", "k", "v", "do", "dlse"):
        a, b = getattr(drawn, name), getattr(again, name)
        assert a is b is None or testing.same_bits(a, b)
        assert a is None or a.strides == b.strides
    assert again.line == drawn.line
    assert repr(again.options).split(" at 0x")[0] == repr(drawn.options).split(" at 0x")[0]
    for name in ("bias", "sink"):
        if name in drawn.options:
            assert testing.same_bits(drawn.options[name], again.options[name])


def test_every_named_option_can_be_made():
    for name in MASKS:
        p = testing.problem("float32", (2, 2, 20, 4), mask=name, seed=3)
        assert isinstance(p.options["mask"], masks.Mask)
    for name in SCORES:
        p = testing.problem("float32", (2, 2, 20, 4), scores=[name], seed=3)
        cupyflash.attention(p.q, p.k, p.v, **p.options)


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.9])
def test_results_near_overflow_are_numbers(dropout):
    for seed in range(20):
        p = testing.problem(
            "float16", (2, 1, 1), family="near overflow", dropout=dropout, seed=seed
        )
        assert np.isfinite(cupyflash.attention(p.q, p.k, p.v, **p.options)).all()


def test_the_strategies_keep_to_the_features():
    @given(testing.problems(np.dtype(np.float32), features=["causal"], tiles=(16, 16)))
    def check(p):
        assert set(p.options) <= {"mask"}
        assert p.q.ndim == p.k.ndim == p.v.ndim == 4
        assert p.q.shape == p.k.shape == p.v.shape
        assert p.q.size
        assert p.dlse is None
        assert all(x.flags.c_contiguous for x in (p.q, p.k, p.v))

    check()


@given(*(testing.mask_names(x) for x in ([], ["causal"], ["masks"])))
def test_names_of_masks_keep_to_the_features(none, causal, any_mask):
    assert none is None
    assert causal in (None, "causal")
    if any_mask is not None:
        p = testing.problem("float32", (2, 2, 20, 4), mask=any_mask)
        assert isinstance(p.options["mask"], masks.Mask | np.ndarray)


def test_copies_in_host_memory_keep_strides_and_find_writes():
    rng = np.random.default_rng(0)
    for n in range(20):
        layout = testing.random_layout(rng, 3, 4, repeats=n % 2 == 0)
        values = rng.standard_normal((3, 4, 5))
        held = testing.Placed((3, 4, 5), np.float32, layout, values).view
        copies = Copies(HostMemory())
        copy = copies.array(held)
        assert testing.same_bits(held, copy)
        assert copy.strides == held.strides
        assert not np.shares_memory(copy, held)
        assert copy.ctypes.data % 64 == held.ctypes.data % 64
        copies.check()
        copy[1, 2, 3] += 1
        with pytest.raises(AssertionError, match="changed an input"):
            copies.check()


def test_the_unnamed_features_are_all_of_them():
    subject = testing.Subject(cupyflash.attention)
    assert subject.features == set(testing.FEATURES)
    assert "backward" not in subject.knows
    assert "causal" in testing.Subject(adapter, features=["masks"]).features


def test_what_was_thought_of_and_is_not_run_is_said():
    text = importlib.import_module("cupyflash.testing.properties").__doc__
    for name, reason in verification.NOT_APPLICABLE.items():
        assert name in text
        assert reason in text


# Without hypothesis


def test_without_hypothesis_the_rest_works_and_the_error_says_what_to_install(tmp_path):
    program = """
import sys
sys.modules["hypothesis"] = None
import cupyflash
from cupyflash import testing
p = testing.problem("float32", (1, 2, 9, 4), mask="causal", seed=1)
testing.check("keys_permuted", p, cupyflash.attention)
assert testing.rho([1.0], [1.0], [0.0]).value == 0
for use in (lambda: testing.problems, lambda: testing.verify(cupyflash.attention)):
    try:
        use()
    except ImportError as error:
        assert "pip install hypothesis" in str(error), error
    else:
        raise SystemExit("no error")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_the_kit_does_not_import_hypothesis(tmp_path):
    program = "import cupyflash.testing, sys; sys.exit('hypothesis' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False).returncode == 0
    )


# Documentation


@pytest.mark.parametrize(
    "name", [x for x in testing.__all__ if x not in ("FAMILIES", "FEATURES", "PROPERTIES")]
)
def test_docstrings(name):
    checks = SUMMARY if isinstance(getattr(testing, name), type) else SUMMARY | PARAMETERS
    faults = [
        f"{code}: {text}"
        for code, text in validate(f"cupyflash.testing.{name}")["errors"]
        if code in checks
    ]
    assert not faults, f"{name}:\n" + "\n".join(faults)


@pytest.mark.parametrize("module", ["verification", "cases", "precision", "__init__"])
def test_examples_in_docstrings(module):
    name = "cupyflash.testing" + ("" if module == "__init__" else f".{module}")
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried
    assert not failed


def test_calibration_counts_problems_and_ratios(capsys):
    found = calibrate.calibrate(["float32"], 30, seed=1)["float32"]
    assert found["alarms"] == []
    assert found["problems"] >= 20
    assert 0 < max(found["worst"].values()) <= 1
    assert set(found["worst"]) == set(calibrate.OUTPUTS)
    assert "float32: " in capsys.readouterr().err
