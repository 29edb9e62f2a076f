"""Train a small character model that is written in NumPy, with its gradients.

A batch has 12 rows of 64 characters, as in well-known small programs of this kind. Attention is one
function, which returns its output and the function that computes the gradients::

    python examples/numpy_training.py --steps 200
    python examples/numpy_training.py --steps 200 --attention numpy

The first command attends with `cupyflash.attention_vjp`, the second with NumPy alone. Both print
the same losses, up to rounding, and their own speed. `cupyflash bench --suite programs` times the
two in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from program import whole

import cupyflash
from cupyflash import masks

Weights = dict[str, np.ndarray]
Vjp = Callable[[np.ndarray], Any]  # the gradient of a value to those of what it was made from
# Queries, keys and values (B, H, L, D) to the output and its gradients.
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, Vjp]]
EPSILON = 1e-5  # of a norm
RATE, BETA1, BETA2, ADAM_EPSILON = 1e-3, 0.9, 0.99, 1e-8
REPORTS = 5


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model and of a batch."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    row: int = 64
    batch: int = 12


@functools.cache
def hidden(length: int) -> np.ndarray:
    """Return -inf where a query would see a later key, and 0 elsewhere."""
    return np.triu(np.full((length, length), -np.inf, np.float32), 1)


def attention_in_numpy(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, Vjp]:
    """Return causal attention and its gradients."""
    scale = q.shape[-1] ** -0.5
    p = q @ k.swapaxes(-1, -2) * scale
    p += hidden(q.shape[-2])
    p -= p.max(axis=-1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    o = p @ v

    def vjp(do: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ds = do @ v.swapaxes(-1, -2)
        ds -= (do * o).sum(axis=-1, keepdims=True)
        ds *= p
        ds *= scale
        return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do

    return o, vjp


def attention_by_cupyflash(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, Vjp]:
    """Return causal attention and its gradients."""
    o, vjp = cupyflash.attention_vjp(q, k, v, mask=masks.causal())
    return o, lambda do: vjp(do)[:3]


ATTENTION = {"cupyflash": attention_by_cupyflash, "numpy": attention_in_numpy}


def standard_text() -> str:
    """Return the language reference that ``pydoc`` shows."""
    return "\n".join(importlib.import_module("pydoc_data.topics").topics.values())


def random_weights(setting: Setting, characters: int, seed: int, dtype: str) -> Weights:
    """Return the weights before the training."""
    rng = np.random.default_rng(seed)
    c = setting.width

    def normal(*shape: int, size: float = 0.02) -> np.ndarray:
        return (size * rng.standard_normal(shape)).astype(dtype)

    weights = {"characters": normal(characters, c), "positions": normal(setting.row, c)}
    for n in range(setting.layers):
        weights |= {f"{n}.qkv": normal(c, 3 * c), f"{n}.attention out": normal(c, c)}
        weights |= {f"{n}.up": normal(c, 4 * c), f"{n}.down": normal(4 * c, c)}
        weights |= {f"{n}.norm {m}": np.ones(c, dtype) for m in (1, 2)}
    return weights | {"norm": np.ones(c, dtype), "logits": normal(c, characters)}


def layer_norm(x: np.ndarray, gain: np.ndarray) -> tuple[np.ndarray, Vjp]:
    """Take the mean from each row, divide it by its deviation, and multiply it by a gain."""
    centred = x - x.mean(axis=-1, keepdims=True)
    inverse = ((centred * centred).mean(axis=-1, keepdims=True) + EPSILON) ** -0.5
    unit = centred * inverse

    def vjp(dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        du = dy * gain
        along = (du * unit).mean(axis=-1, keepdims=True)
        dx = (du - du.mean(axis=-1, keepdims=True) - unit * along) * inverse
        return dx, (dy * unit).sum(axis=0)

    return unit * gain, vjp


def self_attention(
    qkv: np.ndarray, setting: Setting, attention: Attention
) -> tuple[np.ndarray, Vjp]:
    """Attend within each row of characters: (B L, 3 C) to (B L, C)."""
    heads, dim = setting.heads, setting.width // setting.heads
    split = qkv.reshape(-1, setting.row, 3, heads, dim).transpose(2, 0, 3, 1, 4)
    o, attention_vjp = attention(*split)

    def vjp(dy: np.ndarray) -> np.ndarray:
        do = dy.reshape(-1, setting.row, heads, dim).swapaxes(1, 2)
        return np.stack(attention_vjp(do)).transpose(1, 3, 0, 2, 4).reshape(qkv.shape)

    return o.swapaxes(1, 2).reshape(len(qkv), -1), vjp


def loss_and_gradients(
    text: np.ndarray, weights: Weights, setting: Setting, attention: Attention
) -> tuple[float, Weights]:
    """Return the mean of -ln p(next character) of rows (B, L + 1), and its gradients."""
    before, after = text[:, :-1].ravel(), text[:, 1:].ravel()
    undo: list[Callable[[np.ndarray], np.ndarray]] = []  # dx after a part to dx before it
    gradients: Weights = {}

    def residual(x: np.ndarray, n: int, norm: int, names: tuple[str, str], middle: Any) -> Any:
        """Return x + second(middle(first(norm(x)))), and note how its gradient is undone."""
        y, norm_vjp = layer_norm(x, weights[f"{n}.norm {norm}"])
        first, second = (weights[f"{n}.{name}"] for name in names)
        z, middle_vjp = middle(y @ first)

        def back(dx: np.ndarray) -> np.ndarray:
            gradients[f"{n}.{names[1]}"] = z.T @ dx
            dh = middle_vjp(dx @ second.T)
            gradients[f"{n}.{names[0]}"] = y.T @ dh
            dnorm, gradients[f"{n}.norm {norm}"] = norm_vjp(dh @ first.T)
            return dx + dnorm

        undo.append(back)
        return x + z @ second

    def relu(h: np.ndarray) -> tuple[np.ndarray, Vjp]:
        return np.maximum(h, 0), lambda dz: dz * (h > 0)

    x = weights["characters"][before] + np.tile(weights["positions"], (len(text), 1))
    for n in range(setting.layers):
        attend = functools.partial(self_attention, setting=setting, attention=attention)
        x = residual(x, n, 1, ("qkv", "attention out"), attend)
        x = residual(x, n, 2, ("up", "down"), relu)
    y, norm_vjp = layer_norm(x, weights["norm"])
    logits = y @ weights["logits"]
    logits -= logits.max(axis=-1, keepdims=True)
    p = np.exp(logits)
    sums = p.sum(axis=-1, keepdims=True)
    rows = np.arange(len(after))
    loss = (np.log(sums[:, 0]) - logits[rows, after]).mean()

    dlogits = p / sums
    dlogits[rows, after] -= 1
    dlogits /= len(after)
    gradients["logits"] = y.T @ dlogits
    dx, gradients["norm"] = norm_vjp(dlogits @ weights["logits"].T)
    for back in reversed(undo):
        dx = back(dx)
    gradients["positions"] = dx.reshape(len(text), -1, dx.shape[-1]).sum(axis=0)
    gradients["characters"] = np.zeros_like(weights["characters"])
    np.add.at(gradients["characters"], before, dx)
    return float(loss), gradients


def train(
    text: np.ndarray, weights: Weights, setting: Setting, steps: int, attention: Attention
) -> Iterator[float]:
    """Change the weights in place by Adam, and yield the loss of each step."""
    rng = np.random.default_rng(1)
    mean, square = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    for step in range(1, steps + 1):
        starts = rng.integers(0, len(text) - setting.row, setting.batch)
        rows = text[starts[:, None] + np.arange(setting.row + 1)]
        loss, gradients = loss_and_gradients(rows, weights, setting, attention)
        rate = RATE * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
        for name, g in gradients.items():
            mean[name] += (1 - BETA1) * (g - mean[name])
            square[name] += (1 - BETA2) * (g * g - square[name])
            weights[name] -= rate * mean[name] / (np.sqrt(square[name]) + ADAM_EPSILON)
        yield loss


def numbered(text: str) -> tuple[np.ndarray, int]:
    """Return a text as numbers of characters, and how many different ones there are."""
    characters, numbers = np.unique(np.array(list(text)), return_inverse=True)
    return numbers, len(characters)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Train a small character model in NumPy.")
    add = top.add_argument
    add("--steps", type=whole, default=200, help="default: %(default)s")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = top.parse_args(arguments)
    setting, attention = Setting(), ATTENTION[options.attention]
    text, characters = numbered(standard_text())
    weights = random_weights(setting, characters, options.seed, "float32")
    print(f"text     {len(text):,} characters, {characters} different ones")
    print(f"model    {sum(w.size for w in weights.values()):,} weights")
    often = max(1, options.steps // REPORTS)
    begin, done = time.perf_counter(), 0
    for step, loss in enumerate(train(text, weights, setting, options.steps, attention), 1):
        if step == 1:  # which compiles
            begin, done = time.perf_counter(), 1
        if step == 1 or step % often == 0 or step == options.steps:
            print(f"step {step:5}   loss {loss:.3f}")
    if options.steps > done:
        rate = (options.steps - done) / (time.perf_counter() - begin)
        print(f"speed    {rate:,.1f} steps/s, attention by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
