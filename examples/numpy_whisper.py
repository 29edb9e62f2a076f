"""Write a text down from a recording with a decoder that is written in NumPy: Whisper's.

The model has the sizes of the smallest published one, 384 wide with 4 layers and 6 heads of 64, and
random weights. Each token attends to the tokens before it, whose keys and values are in a cache,
and to the 1500 positions of the recording, which are random here::

    python examples/numpy_whisper.py --attention cupyflash
    python examples/numpy_whisper.py --attention numpy

The first command attends with `cupyflash.attention_cached` and `cupyflash.attention`, the second
with five lines of NumPy. Both print the same tokens and their own speed.
`cupyflash bench --suite programs` times the two in turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy_generation import attention_in_numpy
from numpy_gpt2 import Drawn, gelu, layer_norm
from program import seconds_of, whole

import cupyflash

Weights = dict[str, np.ndarray]
# One query of each head (1, H, 1, D), keys and values (1, H, L, D), and how many of these are in
# use, which is None if all are, to (1, H, 1, D).
Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, int | None], np.ndarray]
FIRST = 1  # the token that a text begins with
SHOWN = 16  # tokens


@dataclasses.dataclass(frozen=True)
class Setting:
    """Sizes of the model, and of a recording."""

    width: int = 384
    layers: int = 4
    heads: int = 6
    context: int = 448
    recording: int = 1500
    vocabulary: int = 51865


def attention_by_cupyflash(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, length: int | None = None
) -> np.ndarray:
    """Attend to keys, or to the first `length` of them."""
    if length is None:
        return cupyflash.attention(q, k, v)
    return cupyflash.attention_cached(q, k, v, length)


ATTENTION = {"cupyflash": attention_by_cupyflash, "numpy": attention_in_numpy}


def random_weights(setting: Setting, seed: int) -> Weights:
    """Return weights that keep rows of about unit size."""
    c, drawn = setting.width, Drawn(setting.width, seed)
    normal, linear, norm = drawn.normal, drawn.linear, drawn.norm
    weights = {"tokens": normal(setting.vocabulary, c), "positions": normal(setting.context, c)}
    for n in range(setting.layers):
        for part, columns in (("self", 3 * c), ("cross", c)):
            weights |= norm(f"{n}.{part} norm") | linear(f"{n}.{part}", c, columns)
            weights |= linear(f"{n}.{part} out", c, c)
        weights |= linear(f"{n}.recording", c, 2 * c) | norm(f"{n}.norm")
        weights |= linear(f"{n}.up", c, 4 * c) | linear(f"{n}.down", 4 * c, c)
    return weights | norm("norm")


def random_recording(setting: Setting, seed: int) -> np.ndarray:
    """Return what an encoder would make of a recording (positions, C)."""
    shape = setting.recording, setting.width
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def keys_of(recording: np.ndarray, weights: Weights, setting: Setting) -> list[np.ndarray]:
    """Return each layer's keys and values (2, 1, H, positions, D) of a recording."""
    made = []
    for n in range(setting.layers):
        kv = recording @ weights[f"{n}.recording"] + weights[f"{n}.recording +"]
        kv = kv.reshape(len(recording), 2, 1, setting.heads, -1).transpose(1, 2, 3, 0, 4)
        made.append(np.ascontiguousarray(kv))
    return made


def transcribe(
    recorded: list[np.ndarray],
    weights: Weights,
    setting: Setting,
    number: int,
    attention: Attention,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the most probable token after those before it, and the logits, `number` times."""

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[name] + weights[f"{name} +"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return layer_norm(x, weights[name], weights[f"{name} +"])

    heads, dim = setting.heads, setting.width // setting.heads
    cache = np.zeros((setting.layers, 2, 1, heads, setting.context, dim), np.float32)
    token = FIRST
    for position in range(number):
        x = weights["tokens"][token] + weights["positions"][position]
        for n in range(setting.layers):
            q, k, v = linear(norm(x, f"{n}.self norm"), f"{n}.self").reshape(3, heads, dim)
            keys, values = cache[n]
            keys[0, :, position], values[0, :, position] = k, v
            o = attention(q.reshape(1, heads, 1, dim), keys, values, position + 1)
            x = x + linear(o.reshape(-1), f"{n}.self out")
            q = linear(norm(x, f"{n}.cross norm"), f"{n}.cross")
            o = attention(q.reshape(1, heads, 1, dim), *recorded[n], None)
            x = x + linear(o.reshape(-1), f"{n}.cross out")
            x = x + linear(gelu(linear(norm(x, f"{n}.norm"), f"{n}.up")), f"{n}.down")
        logits = weights["tokens"] @ norm(x, "norm")
        token = int(logits.argmax())
        yield token, logits


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = argparse.ArgumentParser(description="Write a recording down with a decoder in NumPy.")
    add = top.add_argument
    add("--tokens", type=whole, default=50, help="how many (default: %(default)s)")
    add("--runs", type=whole, default=5, help="to take the median of (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="cupyflash", help="default: %(default)s")
    options = top.parse_args(arguments)
    setting, attention = Setting(), ATTENTION[options.attention]
    if options.tokens > setting.context:
        top.error(f"--tokens: got {options.tokens}; expected {setting.context} at most")
    weights = random_weights(setting, seed=0)
    recorded = keys_of(random_recording(setting, seed=0), weights, setting)
    steps, seconds = seconds_of(
        lambda: list(transcribe(recorded, weights, setting, options.tokens, attention)),
        options.runs,
    )
    tokens = [token for token, _ in steps]
    print(f"model    {sum(w.size for w in weights.values()):,} random weights")
    print(f"tokens   {' '.join(map(str, tokens[:SHOWN]))}{' ...' * (len(tokens) > SHOWN)}")
    print(f"speed    {len(tokens) / seconds:,.0f} tokens/s, attention by {options.attention}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
