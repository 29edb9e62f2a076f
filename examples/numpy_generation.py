"""Generate tokens with a small language model that is written in NumPy and keeps its own cache.

The model has random weights, and the sizes of a small published one: 288 wide, 6 layers, 6 heads of
48. Attention is one function, which takes the query of the newest token and the cache::

    python examples/numpy_generation.py --tokens 250
    python examples/numpy_generation.py --tokens 250 --attention numpy

The first command attends with `cupyflash.attention_cached`, the second with five lines of NumPy.
Both print the same tokens and their own speed. `cupyflash bench --suite programs` times the two in
turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from program import whole

import cupyflash

Weights = dict[str, np.ndarray]
# One query of each head (1, H, 1, D), the cache's keys and values (1, H, room, D), and how many of
# these are in use, to (1, H, 1, D).
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]
EPSILON = 1e-5  # of a norm
FIRST = 1  # the token that a text begins with
SHOWN = 16  # tokens


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model."""

    width: int = 288
    layers: int = 6
    heads: int = 6
    hidden: int = 768
    vocabulary: int = 4096


def attention_in_numpy(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int | None
) -> np.ndarray:
    """Attend to the first `length` positions of the cache, or to all."""
    s = q @ k[:, :, :length].swapaxes(2, 3) * q.shape[-1] ** -0.5
    s -= s.max(axis=-1, keepdims=True)
    p = np.exp(s)
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v[:, :, :length]


def attention_by_cupyflash(q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int) -> np.ndarray:
    """Attend to the first `length` positions of the cache."""
    return cupyflash.attention_cached(q, k, v, length)


ATTENTION = {"cupyflash": attention_by_cupyflash, "numpy": attention_in_numpy}


def random_weights(setting: Setting, seed: int) -> Weights:
    """Return weights that keep rows of about unit size."""
    rng = np.random.default_rng(seed)
    c, h = setting.width, setting.hidden

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(rows**-0.5)

    weights = {"embedding": rng.standard_normal((setting.vocabulary, c), dtype=np.float32)}
    for n in range(setting.layers):
        weights |= {f"{n}.qkv": matrix(c, 3 * c), f"{n}.attention out": matrix(c, c)}
        weights |= {f"{n}.gate": matrix(c, h), f"{n}.up": matrix(c, h), f"{n}.down": matrix(h, c)}
        weights |= {f"{n}.norm {m}": np.ones(c, np.float32) for m in (1, 2)}
    return weights | {"norm": np.ones(c, np.float32), "logits": matrix(c, setting.vocabulary)}


def rms_norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
    """Divide a vector by its root mean square, and multiply it by a gain."""
    return x * gain * (x @ x / len(x) + EPSILON) ** -0.5


def rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Rotate the pairs of columns of each head by the angles of a position."""
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def generate(
    weights: Weights, setting: Setting, number: int, attention: Attention
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the most probable token after those before it, and the logits, `number` times."""
    heads, dim = setting.heads, setting.width // setting.heads
    angles = np.outer(np.arange(number), 10000.0 ** -np.arange(0, 1, 2 / dim))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    cache = np.zeros((2, setting.layers, 1, heads, number, dim), np.float32)
    token = FIRST
    for position in range(number):
        x = weights["embedding"][token]
        for n in range(setting.layers):
            qkv = rms_norm(x, weights[f"{n}.norm 1"]) @ weights[f"{n}.qkv"]
            q, k, v = qkv.reshape(3, heads, dim)
            q, k = (rotated(y, cos[position], sin[position]) for y in (q, k))
            keys, values = cache[0, n], cache[1, n]
            keys[0, :, position], values[0, :, position] = k, v
            o = attention(q.reshape(1, heads, 1, dim), keys, values, position + 1)
            x = x + o.reshape(-1) @ weights[f"{n}.attention out"]
            y = rms_norm(x, weights[f"{n}.norm 2"])
            gate = y @ weights[f"{n}.gate"]
            hidden = gate / (1 + np.exp(-gate)) * (y @ weights[f"{n}.up"])
            x = x + hidden @ weights[f"{n}.down"]
        logits = rms_norm(x, weights["norm"]) @ weights["logits"]
        token = int(logits.argmax())
        yield token, logits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Generate tokens with a small model in NumPy.")
    add = top.add_argument
    add("--tokens", type=whole, default=250, help="how many (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = top.parse_args(arguments)
    setting = Setting()
    weights = random_weights(setting, options.seed)
    attention = ATTENTION[options.attention]
    list(generate(weights, setting, 1, attention))  # compiles, and reads the weights once
    begin = time.perf_counter()
    tokens = [token for token, _ in generate(weights, setting, options.tokens, attention)]
    seconds = time.perf_counter() - begin
    print(f"model    {sum(w.size for w in weights.values()):,} random weights")
    print(f"tokens   {' '.join(map(str, tokens[:SHOWN]))}{' ...' * (len(tokens) > SHOWN)}")
    print(f"speed    {len(tokens) / seconds:,.0f} tokens/s, attention by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
