"""What a kernel says of dropout and of empty axes, and when a property ends early."""

from __future__ import annotations

import time

import hypothesis
import numpy as np
import pytest

from cupyflash import testing
from cupyflash.testing import PROPERTIES, verification
from cupyflash.testing.features import features_of
from cupyflash.testing.verification import LATE, strategy_of

SINGLE = {"dtypes": ["float32"], "examples": 4, "stop": True}
DROPOUT = ["dropped_pairs_are_scaled", "dropout_rate"]


def attend(q, k, v, keep=None, rate=0.0):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(np.float32(q.shape[-1]))
    p = np.exp(s - s.max(axis=-1, keepdims=True, initial=-np.inf))
    p /= p.sum(axis=-1, keepdims=True)
    if keep is not None:
        p = np.where(keep, p / np.float32(1 - rate), np.float32(0))
    return p @ v


def dropped(q, k, dropout, seed):
    """Drawn by NumPy's generator, which is not Philox4x32-10 of the positions."""
    return np.random.default_rng(seed).random((*q.shape[:-1], k.shape[-2])) >= dropout


def right(q, k, v, *, dropout=0.0, seed=0, return_lse=True):
    return attend(q, k, v, dropped(q, k, dropout, seed) if dropout else None, dropout), None


def not_scaled(q, k, v, *, dropout=0.0, seed=0, return_lse=True):
    return attend(q, k, v, dropped(q, k, dropout, seed) if dropout else None), None


def not_repeated(q, k, v, *, dropout=0.0, seed=0, return_lse=True):
    return right(q, k, v, dropout=dropout, seed=time.perf_counter_ns())


def another_rate(q, k, v, *, dropout=0.0, seed=0, return_lse=True):
    keep = dropped(q, k, dropout / 2, seed) if dropout else None
    return attend(q, k, v, keep, dropout), None


def failures(kernel, features, only=DROPOUT):
    report = testing.verify(kernel, features=features, only=only, **SINGLE)
    return [x.name for x in report.failures]


def test_dropout_of_another_generator_can_be_right():
    known = ["any_dropout", "lengths", "widths"]
    assert not failures(right, known)
    assert failures(not_scaled, known) == DROPOUT[:1]
    assert failures(not_repeated, known) == DROPOUT[:1]
    assert failures(another_rate, known, DROPOUT[1:]) == DROPOUT[1:]
    # Nothing is said of which pairs, as a kernel with the feature dropout does.
    assert "dropped_pairs" in failures(right, ["dropout", "lengths"], ["dropped_pairs"])


@pytest.mark.parametrize(
    ("features", "drawn"),
    [([], ""), (["empty_queries"], "q"), (["empty_keys"], "k"), (["empty"], "qk")],
)
def test_parts_of_empty(features, drawn):
    """A kernel may know of no queries, and not of no keys."""
    strategy = strategy_of(
        PROPERTIES["forward_within_bound"], [np.dtype("float32")],
        features_of(["lengths", *features]), None, families=["normal"],
    )  # fmt: skip
    seen = set()

    @hypothesis.seed(0)
    @hypothesis.settings(
        max_examples=400, database=None, deadline=None, phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def draw(problem):
        seen.update(name for name in "qk" if getattr(problem, name).shape[-2] == 0)

    draw()
    assert seen == set(drawn)


def test_what_is_never_served_ends_soon(monkeypatch):
    monkeypatch.setattr(verification, "REFUSALS", 5)
    asked = []

    def serves(call):
        asked.append(call)
        return False

    report = testing.verify(
        right, serves=serves, features=[], only="forward_within_bound", dtypes=["float32"],
        examples=100,
    )  # fmt: skip
    assert report.results[0].reason == "the kernel serves none of its calls"
    assert len(asked) <= 10


def test_no_problem_is_begun_when_the_time_is_over():
    def slow(q, k, v, *, return_lse=True):
        time.sleep(0.05)
        return right(q, k, v)

    some = {"features": [], "dtypes": ["float32"], "only": ["forward_within_bound", "convex_rows"]}
    report = testing.verify(slow, examples=100, seconds=0.4, **some)
    first, second = report.results
    assert 0 < first.examples < 30
    assert first.status == "passed"
    assert second.reason == LATE


@pytest.mark.parametrize("name", ["empty_keys", "any_dropout"])
def test_parts_are_features(name):
    assert name in testing.FEATURES
