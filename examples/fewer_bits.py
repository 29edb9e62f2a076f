"""Measure what a model of ``train_lm.py`` loses with a cache of 16, 8 and 4 bits.

Run it as ::

    python examples/train_lm.py --save model.safetensors
    python examples/fewer_bits.py model.safetensors
    python examples/fewer_bits.py model.safetensors --outliers 16

The program reads the text that was held out from the training, 64 bytes at a time. As in
``generate.py``, keys and values go to a cache, and each byte's query attends to what the cache
holds up to this byte. The perplexity is exp(mean of -ln p(next byte)). It is measured for each type
of the cache, without `cupyflash.hadamard`, with it on queries and keys, and with it on values, too.
All are compared with a cache of float32 on the same text, so that the change is known better than
the perplexity itself.

``--outliers 16`` multiplies two columns of the keys of every head by 16, and divides these columns
of the queries by 16. This is the same model, whose scores have the same bits in float32. But now a
few columns of its keys are much larger than all others, as they are in large models.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from generate import FORMATS, CachedReader, in_words
from model_file import load
from program import UnusableError, array_module, require, whole
from train_lm import PIECE, read_text, split_text
from transformer import Array, Setting, Weights

import cupyflash

SEED = 1  # of the signs of hadamard
CHUNK = 64  # bytes
LARGE = 2  # columns of the keys of a head that --outliers makes large
SPREAD = {"as they are": "", "hadamard of q, k": "qk", "of q, k and v": "qkv"}


class SpreadReader(CachedReader):
    """Spreads queries, keys and values over their columns before they are read or kept."""

    spread = ""  # of which of q, k and v

    def _attention(self, n: int, q: Array, k: Array, v: Array) -> Array:
        def spread(x: Array, name: str) -> Array:
            return cupyflash.hadamard(x, SEED) if name in self.spread else x

        o = super()._attention(n, spread(q, "q"), spread(k, "k"), spread(v, "v"))
        return cupyflash.hadamard(o, SEED, inverse=True) if "v" in self.spread else o


class Kept(NamedTuple):
    """How keys and values are kept, and in which type queries are."""

    dtype: str
    kv_dtype: tuple[str, str] | None = None  # of keys and of values

    @property
    def name(self) -> str:
        """The type of the cache."""
        return in_words(self.kv_dtype) if self.kv_dtype else self.dtype


def losses(
    texts: np.ndarray, kept: Kept, spread: str, weights: Weights, setting: Setting, xp: Any
) -> np.ndarray:
    """Return the mean loss of each text, shape (B, L), all bytes of which are kept."""
    number, length = texts.shape
    reader = SpreadReader([length] * number, 0, setting, kept.dtype, xp, kept.kv_dtype)
    reader.spread = spread
    total = xp.zeros(number)
    for begin in range(0, length - 1, CHUNK):
        here = slice(begin, min(begin + CHUNK, length - 1))
        following = xp.asarray(texts[:, here.start + 1 : here.stop + 1].ravel())
        logits = reader.logits(list(texts[:, here]), weights).astype(np.float64)
        shifted = logits - logits.max(axis=-1, keepdims=True)
        chosen = shifted[xp.arange(len(following)), following]
        lost = xp.log(xp.exp(shifted).sum(axis=-1)) - chosen
        total += lost.reshape(number, -1).sum(axis=-1)
    mean = total / (length - 1)
    return np.asarray(mean if xp is np else mean.get())


def with_outliers(weights: Weights, setting: Setting, factor: int) -> Weights:
    """Return the same model, with some columns of its keys `factor` times as large."""
    made = dict(weights)
    for n in range(setting.layers):
        qkv = made[f"{n}.qkv"] = weights[f"{n}.qkv"].copy()
        columns = qkv.reshape(len(qkv), 3, setting.heads, -1)  # a view
        columns[:, 0, :, :LARGE] /= factor
        columns[:, 1, :, :LARGE] *= factor
    return made


def change(measured: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Return by how many percent the perplexity is larger, and the standard error of this."""
    more = measured - exact
    error = more.std(ddof=1) / np.sqrt(len(more)) if len(more) > 1 else np.nan
    return 100 * np.expm1(more.mean()), 100 * np.exp(more.mean()) * error


def run(options: argparse.Namespace, device: str, xp: Any) -> None:
    """Print the table."""
    weights, setting = load(options.model, xp)
    text = read_text(options.text, large=xp is not np)
    texts = split_text(text, setting.context)[1].reshape(-1, PIECE * setting.context)
    texts = texts[: options.texts, : options.bytes].astype(np.int64)
    print(f"model   {sum(w.size for w in weights.values()):,} weights, {setting}")
    print(f"text    {len(texts)} pieces of {texts.shape[1]:,} bytes that were held out")
    print(f"device  {device}; queries in {options.attention}")
    if options.outliers > 1:
        print(f"keys    {LARGE} columns of each head are {options.outliers} times as large")
        weights = with_outliers(weights, setting, options.outliers)

    exact = losses(texts, Kept("float32"), "", weights, setting, xp)
    print(f"\nperplexity {np.exp(exact.mean()):.4f} with a cache of float32, and its change:\n")
    print(f"| {'cache':<13} |" + "".join(f" {name:^18} |" for name in SPREAD))
    print(f"|{'-' * 15}|" + f"{'-' * 20}|" * len(SPREAD))
    kinds = [None, *((kind, kind) for kind in FORMATS), ("int8", "int4"), ("int4", "int8")]
    for kept in (Kept(options.attention, kind) for kind in kinds):
        print(f"| {kept.name:<13} |", end="", flush=True)
        for spread in SPREAD.values():
            more, error = change(losses(texts, kept, spread, weights, setting, xp), exact)
            print(f" {f'{more:+.3f} ± {error:.3f} %':>18} |", end="", flush=True)
        print()


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    text = "Measure what a model of train_lm.py loses with a cache of fewer bits."
    top = argparse.ArgumentParser(description=text)
    add = top.add_argument
    add("model", type=Path, metavar="FILE", help="the file that train_lm.py --save wrote")
    add("--outliers", type=whole, default=1, metavar="N", help="make two columns of keys larger")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: %(default)s")
    add("--text", type=Path, nargs="+", metavar="FILE", help="the text that the model learnt")
    add("--texts", type=whole, default=100, help="pieces to read (default: at most %(default)s)")
    add("--bytes", type=whole, default=1024, help="of each piece (default: at most %(default)s)")
    kinds = ("bfloat16", "float16")
    add("--attention", choices=kinds, default="bfloat16", help="default: %(default)s")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = parser()
    options = top.parse_args(arguments)
    if options.bytes < 2:
        top.error("--bytes 1: the first byte is given; expected 2 or more")
    if options.outliers & (options.outliers - 1):
        top.error(f"--outliers {options.outliers}: expected a power of 2, by which all is exact")
    try:
        xp, device = array_module(options.device)
        if options.attention == "bfloat16":
            require("ml_dtypes", "pip install ml_dtypes")
        run(options, device, xp)
    except (UnusableError, cupyflash.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
