"""Triangle attention of a protein model, written in NumPy: pairs of positions attend to pairs.

A pair (i, j) has 128 numbers. Around its starting node i, it attends to all pairs (i, k) by 4 heads
of 32, with a bias that the pair (j, k) gives to each head, and a gate scales the result. The bias
is one for all i. The weights are random::

    python examples/numpy_triangle.py --positions 64 --attention cupyflash
    python examples/numpy_triangle.py --positions 64 --attention numpy

The first command attends with `cupyflash.attention`, the second with six lines of NumPy. Both print
the same number and their own speed. `cupyflash bench --suite programs` times the two in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence

import numpy as np
from program import seconds_of, whole

import cupyflash

Weights = dict[str, np.ndarray]
# Queries, keys and values (I, H, L, D) and a bias (1, H, L, L) to (I, H, L, D).
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
EPSILON = 1e-5  # of a norm


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    head: int = 32


def attention_in_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Return attention whose scores have a bias."""
    p = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    p += bias
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v


def attention_by_cupyflash(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    """Return attention whose scores have a bias."""
    return cupyflash.attention(q, k, v, bias=bias)


ATTENTION = {"cupyflash": attention_by_cupyflash, "numpy": attention_in_numpy}


def random_weights(setting: Setting, seed: int) -> Weights:
    """Return weights that keep rows of about unit size."""
    rng, c, inner = np.random.default_rng(seed), setting.width, setting.heads * setting.head
    columns = {"q": inner, "k": inner, "v": inner, "bias": setting.heads, "gate": inner, "out": c}
    return {
        f"{n}.{name}": rng.standard_normal((inner if name == "out" else c, m), dtype=np.float32)
        * np.float32(c**-0.5)
        for n in range(setting.layers)
        for name, m in columns.items()
    }


def layer_norm(x: np.ndarray) -> np.ndarray:
    """Take the mean from each row, and divide it by its deviation."""
    x = x - x.mean(axis=-1, keepdims=True)
    x *= ((x * x).mean(axis=-1, keepdims=True) + EPSILON) ** -0.5
    return x


def changed_pairs(
    pairs: np.ndarray, weights: Weights, setting: Setting, attention: Attention
) -> np.ndarray:
    """Return what the layers make of pairs (L, L, C)."""
    for n in range(setting.layers):
        x = layer_norm(pairs)
        q, k, v = (
            (x @ weights[f"{n}.{name}"])
            .reshape(*x.shape[:2], setting.heads, setting.head)
            .swapaxes(1, 2)
            for name in "qkv"
        )
        bias = (x @ weights[f"{n}.bias"]).transpose(2, 0, 1)[None]
        o = attention(q, k, v, bias).swapaxes(1, 2).reshape(*x.shape[:2], -1)
        o = o / (1 + np.exp(-(x @ weights[f"{n}.gate"])))
        pairs = pairs + o @ weights[f"{n}.out"]
    return pairs


def random_pairs(positions: int, setting: Setting, seed: int) -> np.ndarray:
    """Return pairs of so many positions."""
    shape = positions, positions, setting.width
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Triangle attention of a protein model in NumPy.")
    add = top.add_argument
    add("--positions", type=whole, default=64, help="default: %(default)s")
    add("--runs", type=whole, default=10, help="to take the median of (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    options = top.parse_args(arguments)
    setting, attention = Setting(), ATTENTION[options.attention]
    weights = random_weights(setting, seed=0)
    pairs = random_pairs(options.positions, setting, seed=0)
    found, seconds = seconds_of(
        lambda: changed_pairs(pairs, weights, setting, attention), options.runs
    )
    print(f"pairs    {pairs.shape}, {setting.layers} layers, {setting.heads} heads")
    print(f"result   root mean square {(found * found).mean() ** 0.5:.4f}")
    print(f"speed    {1e3 * seconds / setting.layers:.2f} ms a layer, by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
