"""The plain NumPy programs: attention by cupyflash and by NumPy's lines give the same."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from small_model import EXAMPLES, load

generation, training = map(load, ("numpy_generation", "numpy_training"))

SMALL = generation.Setting(width=24, layers=2, heads=3, hidden=40, vocabulary=50)
TINY = training.Setting(width=12, layers=2, heads=3, row=9, batch=2)
CHARACTERS = 17


def run(name, *arguments):
    """Run an example in a process of its own, and return what it printed."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- generation ---


def generated(attention, number=20):
    weights = generation.random_weights(SMALL, seed=3)
    return list(generation.generate(weights, SMALL, number, generation.ATTENTION[attention]))


def test_both_ways_generate_the_same():
    ours, theirs = generated("cupyflash"), generated("numpy")
    assert [token for token, _ in ours] == [token for token, _ in theirs]
    assert len({token for token, _ in ours}) > 3
    for (_, a), (_, b) in zip(ours, theirs, strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


def whole_text(tokens, weights, setting):
    """The logits after every token, of all at once and in float64."""
    w = {name: x.astype(float) for name, x in weights.items()}
    length, dim = len(tokens), setting.width // setting.heads
    angles = np.outer(np.arange(length), 10000.0 ** -np.arange(0, 1, 2 / dim))
    turn = np.exp(1j * angles)

    def norm(x, gain):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + generation.EPSILON) * gain

    def rope(x):  # of columns c and c + dim / 2, as a complex number
        y = (x[..., : dim // 2] + 1j * x[..., dim // 2 :]) * turn
        return np.concatenate([y.real, y.imag], axis=-1)

    x = w["embedding"][tokens]
    for n in range(setting.layers):
        qkv = norm(x, w[f"{n}.norm 1"]) @ w[f"{n}.qkv"]
        q, k, v = qkv.reshape(length, 3, setting.heads, dim).transpose(1, 2, 0, 3)
        s = rope(q) @ rope(k).swapaxes(1, 2) / np.sqrt(dim)
        s[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        p = np.exp(s - s.max(axis=2, keepdims=True))
        o = p / p.sum(axis=2, keepdims=True) @ v
        x = x + o.swapaxes(0, 1).reshape(length, -1) @ w[f"{n}.attention out"]
        y = norm(x, w[f"{n}.norm 2"])
        gate = y @ w[f"{n}.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{n}.up"])) @ w[f"{n}.down"]
    return norm(x, w["norm"]) @ w["logits"]


@pytest.mark.parametrize("attention", generation.ATTENTION)
def test_the_cache_gives_what_the_whole_text_gives(attention):
    found = generated(attention)
    tokens = [generation.FIRST, *(token for token, _ in found)][:-1]
    wanted = whole_text(tokens, generation.random_weights(SMALL, seed=3), SMALL)
    logits = np.array([x for _, x in found])
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_generation_as_a_user_runs_it():
    ours, theirs = (
        run("numpy_generation", "--tokens", "12", "--attention", name)
        for name in generation.ATTENTION
    )
    assert re.search(r"speed +[\d,]+ tokens/s, attention by cupyflash", ours)
    assert ours.splitlines()[:2] == theirs.splitlines()[:2]
    assert len(ours.splitlines()[1].split()) == 13


# --- training ---


def a_batch(seed=0):
    return np.random.default_rng(seed).integers(0, CHARACTERS, (TINY.batch, TINY.row + 1))


@pytest.mark.parametrize("attention", training.ATTENTION)
def test_gradients_are_central_differences(attention):
    weights, batch = training.random_weights(TINY, CHARACTERS, 1, "float64"), a_batch()
    rng = np.random.default_rng(2)
    for name in weights:  # larger ones, so that attention is not nearly uniform
        weights[name] = weights[name] + 0.3 * rng.standard_normal(weights[name].shape)
    attend = training.ATTENTION[attention]
    _, gradients = training.loss_and_gradients(batch, weights, TINY, attend)
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        direction, step = rng.standard_normal(gradient.shape), 1e-5
        losses = [
            training.loss_and_gradients(
                batch, weights | {name: weights[name] + sign * step * direction}, TINY, attend
            )[0]
            for sign in (1, -1)
        ]
        wanted = (losses[0] - losses[1]) / (2 * step)
        found = (gradient * direction).sum()
        # What the step cuts off, and the rounding of losses of about 5.
        assert abs(found - wanted) <= 1e-7 * np.linalg.norm(gradient) + 1e-9, name


def test_both_ways_train_the_same_and_the_loss_falls():
    losses = []
    for attention in training.ATTENTION.values():
        text, _ = training.numbered("the same words again and again, " * 20)
        weights = training.random_weights(TINY, CHARACTERS, 0, "float32")
        losses.append(list(training.train(text, weights, TINY, 40, attention)))
    assert losses[0][-1] < losses[0][0] - 0.3
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


def test_training_as_a_user_runs_it():
    printed = run("numpy_training", "--steps", "3")
    losses = re.findall(r"loss (\S+)", printed)
    assert len(losses) == 3
    assert float(losses[2]) < float(losses[0])
    assert re.search(r"speed +[\d,.]+ steps/s, attention by cupyflash", printed)
