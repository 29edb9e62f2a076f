"""Read a prompt with a GPT-2 that is written in NumPy, and find the next token.

The model has the sizes of the smallest published GPT-2, 768 wide with 12 layers and 12 heads of 64,
and random weights. All tokens of the prompt go through it at once::

    python examples/numpy_gpt2.py --attention cupyflash
    python examples/numpy_gpt2.py --attention numpy

The first command attends with `cupyflash.attention`, the second with six lines of NumPy. Both print
the same token and their own speed. `cupyflash bench --suite programs` times the two in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

import numpy as np
from program import seconds_of, whole

import cupyflash
from cupyflash import masks

Weights = dict[str, np.ndarray]
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # of (H, L, D)
CAUSAL = masks.causal()
EPSILON = 1e-5  # of a norm


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257


@functools.cache
def hidden(length: int) -> np.ndarray:
    """Return -inf where a query would see a later key, and 0 elsewhere."""
    return np.triu(np.full((length, length), -np.inf, np.float32), 1)


def attention_in_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return causal attention."""
    p = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p += hidden(q.shape[-2])
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v


def attention_by_cupyflash(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return causal attention."""
    return cupyflash.attention(q, k, v, mask=CAUSAL)


ATTENTION = {"cupyflash": attention_by_cupyflash, "numpy": attention_in_numpy}


class Drawn:
    """Random weights of a model's parts, one after another."""

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._rng = width, np.random.default_rng(seed)

    def normal(self, *shape: int, size: float = 0.02) -> np.ndarray:
        """Return normal numbers of a standard deviation."""
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(size)

    def linear(self, name: str, rows: int, columns: int) -> Weights:
        """Return a matrix and what is added behind it."""
        size = rows**-0.5
        return {name: self.normal(rows, columns, size=size), f"{name} +": self.normal(columns)}

    def norm(self, name: str) -> Weights:
        """Return the gain and the shift of a norm."""
        return {name: 1 + self.normal(self._width), f"{name} +": self.normal(self._width)}


def random_weights(setting: Setting, seed: int) -> Weights:
    """Return weights that keep rows of about unit size."""
    c, drawn = setting.width, Drawn(setting.width, seed)
    normal, linear, norm = drawn.normal, drawn.linear, drawn.norm
    weights = {"tokens": normal(setting.vocabulary, c), "positions": normal(setting.context, c)}
    for n in range(setting.layers):
        weights |= norm(f"{n}.norm 1") | linear(f"{n}.qkv", c, 3 * c)
        weights |= linear(f"{n}.attention out", c, c) | norm(f"{n}.norm 2")
        weights |= linear(f"{n}.up", c, 4 * c) | linear(f"{n}.down", 4 * c, c)
    return weights | norm("norm")


def layer_norm(x: np.ndarray, gain: np.ndarray, shift: np.ndarray) -> np.ndarray:
    """Take the mean from each row, divide it by its deviation; a gain and a shift follow."""
    x = x - x.mean(axis=-1, keepdims=True)
    return x * ((x * x).mean(axis=-1, keepdims=True) + EPSILON) ** -0.5 * gain + shift


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x times the normal distribution's share below x, by a tanh as GPT-2 has it."""
    return 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * (x * x * x))))


def next_logits(
    tokens: np.ndarray, weights: Weights, setting: Setting, attention: Attention
) -> np.ndarray:
    """Return the logits of the token behind those of a prompt."""

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[name] + weights[f"{name} +"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, weights[name], weights[f"{name} +"])

    length, heads = len(tokens), setting.heads
    x = weights["tokens"][tokens] + weights["positions"][:length]
    for n in range(setting.layers):
        qkv = linear(norm(x, f"{n}.norm 1"), f"{n}.qkv")
        q, k, v = qkv.reshape(length, 3, heads, -1).transpose(1, 2, 0, 3)
        o = attention(q, k, v).swapaxes(0, 1).reshape(length, -1)
        x = x + linear(o, f"{n}.attention out")
        x = x + linear(gelu(linear(norm(x, f"{n}.norm 2"), f"{n}.up")), f"{n}.down")
    return weights["tokens"] @ norm(x[-1], "norm")


def random_prompt(length: int, setting: Setting, seed: int) -> np.ndarray:
    """Return tokens."""
    return np.random.default_rng(seed).integers(0, setting.vocabulary, length)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Read a prompt with a GPT-2 in NumPy.")
    add = top.add_argument
    add("--tokens", type=whole, default=50, help="of the prompt (default: %(default)s)")
    add("--layers", type=whole, default=Setting.layers, help="default: %(default)s")
    add("--runs", type=whole, default=10, help="to take the median of (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    options = top.parse_args(arguments)
    setting, attention = Setting(layers=options.layers), ATTENTION[options.attention]
    weights = random_weights(setting, seed=0)
    prompt = random_prompt(options.tokens, setting, seed=0)
    logits, seconds = seconds_of(
        lambda: next_logits(prompt, weights, setting, attention), options.runs
    )
    print(f"model    {sum(w.size for w in weights.values()):,} random weights")
    print(f"next     token {logits.argmax()}, logit {logits.max():.3f}")
    print(f"speed    {1e3 * seconds:.1f} ms a prompt, attention by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
