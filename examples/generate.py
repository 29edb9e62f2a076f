"""Continue texts with a model that ``train_lm.py --save`` wrote, byte by byte from a paged cache.

Run it as ::

    python examples/train_lm.py --save model.safetensors
    python examples/generate.py model.safetensors --prompt "The import statement" "A class"

The prompts are read in one call. Then every step reads one byte of each text: `cupyflash.append`
writes its keys and values to the cache, and `cupyflash.attention_cached` attends to everything in
the cache. Pages of the cache are allocated as texts grow, and freed when no later byte sees them.
``--kv-dtype int8`` keeps codes of 8 bits, or of 4, with a scale for each row; ``fewer_bits.py``
measures what this loses. ``--no-cache`` reads all texts again at each step instead. It writes the
same bytes as a cache of numbers, more slowly.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from model_file import load
from program import UnusableError, array_module, readable, require, whole
from transformer import (
    Array,
    Setting,
    Vjp,
    Weights,
    join_heads,
    model,
    penalty,
    split_heads,
)

import cupyflash
from cupyflash import masks

PAGE = 16  # positions
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")  # of codes
GROUP = 32  # columns of int4 that share a scale, in heads that have such groups
PROMPTS = ("The import statement", "A class definition is", "If no expression is given, ")


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Choose a byte by its probability. The temperature 0 takes the most probable one.

    Every text has its own random numbers, so that its bytes do not depend on the other texts.
    """

    rngs: Sequence[np.random.Generator]
    temperature: float
    top_k: int

    @classmethod
    def of(cls, texts: int, seed: int, temperature: float, top_k: int) -> Sampler:
        """Return a sampler for a number of texts."""
        rngs = [np.random.default_rng([seed, b]) for b in range(texts)]
        return cls(rngs, temperature, top_k)

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """Return a byte for each row of logits, shape (B, 256)."""
        order = np.argsort(-logits, axis=-1, kind="stable")[:, : self.top_k]  # the best first
        if not self.temperature:
            return order[:, 0]
        best = np.take_along_axis(logits, order, axis=-1).astype(np.float64)
        p = np.exp((best - best[:, :1]) / self.temperature)
        below = np.cumsum(p / p.sum(axis=-1, keepdims=True), axis=-1)[:, :-1]
        drawn = [rng.random() for rng in self.rngs]
        places = (below <= np.array(drawn)[:, None]).sum(axis=-1)
        return np.take_along_axis(order, places[:, None], axis=-1)[:, 0]


class Reader:
    """Reads all texts again for every byte, which a cache makes unnecessary."""

    def __init__(self, texts: int, setting: Setting, dtype: str, xp: Any) -> None:
        self.setting, self.dtype, self.xp = setting, dtype, xp
        # The model was trained on windows of this length, so no byte sees farther back.
        self.options = {
            "mask": masks.window(setting.context - 1, 0),
            "score_mod": penalty(setting.heads, xp),
        }
        self.texts = [np.empty(0, np.int64)] * texts

    def read(self, new: Sequence[np.ndarray], weights: Weights) -> Array:
        """Read more bytes of each text; return the logits of the next, shape (B, 256)."""
        return self.logits(new, weights)[self.xp.asarray(self.offsets[1:] - 1)]

    def logits(self, new: Sequence[np.ndarray], weights: Weights) -> Array:
        """Read more bytes of each text; return the logits after all bytes that were read."""
        self.texts = [np.concatenate(pair) for pair in zip(self.texts, new, strict=True)]
        return self._packed_logits(self.texts, weights)

    def _packed_logits(self, texts: Sequence[np.ndarray], weights: Weights) -> Array:
        self.offsets = np.cumsum([0, *map(len, texts)])
        tokens = self.xp.asarray(np.concatenate(texts))
        logits, _ = model(tokens, weights, self.setting.layers, self._attend, self.xp)
        return logits

    def _attend(self, n: int, qkv: Array) -> tuple[Array, Vjp]:
        packed = split_heads(qkv.astype(self.dtype, copy=False), 1, self.setting.heads)
        o = self._attention(n, *(x[0] for x in packed))
        return join_heads(o[None]).astype(qkv.dtype, copy=False), _no_gradient

    def _attention(self, n: int, q: Array, k: Array, v: Array) -> Array:
        """Return attention of layer n over the bytes that are read, shape (H, T, D)."""
        del n
        return cupyflash.attention_varlen(q, k, v, self.offsets, self.offsets, **self.options)


class CachedReader(Reader):
    """Reads each byte once, and keeps its keys and values in pages.

    Page p of layer n is ``k[n, p]`` and ``v[n, p]``. Row b of the table has the page numbers of
    text b. Only its elements from `dropped[b]` to `held[b]` are in use; the pages that the others
    name are free or belong to other texts. With `kv_dtype`, the type of keys and of values, pages
    hold bytes of codes, and `k_scale` and `v_scale` are the scales of their rows.
    """

    def __init__(
        self,
        prompts: Sequence[int],
        number: int,
        setting: Setting,
        dtype: str,
        xp: Any,
        kv_dtype: tuple[str, str] | None = None,
    ) -> None:
        super().__init__(len(prompts), setting, dtype, xp)
        ends = [pages(n + number) for n in prompts]
        # A text needs at most the pages of its prompt, or those that a byte sees.
        window = pages(setting.context - 1) + 1
        most = [min(end, max(pages(n), window)) for end, n in zip(ends, prompts, strict=True)]
        self.free = list(range(sum(most)))[::-1]
        self.table = np.zeros((len(prompts), max(ends)), np.int32)
        self.lengths = np.zeros(len(prompts), np.int32)
        self.held, self.dropped = np.zeros((2, len(prompts)), int)
        dim = setting.width // setting.heads
        rows = (setting.layers, sum(most), setting.heads, PAGE)
        self.kv_dtype = kv_dtype
        if kv_dtype is None:
            self.k, self.v = (xp.empty((*rows, dim), dtype) for _ in "kv")
        else:
            sizes = [bytes_and_scales(dim, kind) for kind in kv_dtype]
            self.k, self.v = (xp.empty((*rows, n), np.uint8) for n, _ in sizes)
            self.k_scale, self.v_scale = (xp.empty((*rows, n), np.float32) for _, n in sizes)
        self.on_device: dict[str, Any] = {}

    def logits(self, new: Sequence[np.ndarray], weights: Weights) -> Array:
        """Read more bytes of each text; return the logits after each of them."""
        self._grow(np.array([len(x) for x in new], np.int32))
        return self._packed_logits(new, weights)

    def _grow(self, counts: np.ndarray) -> None:
        """Count the new bytes, free the pages that they do not see, and allocate new ones."""
        seen_from = np.maximum(self.lengths - (self.setting.context - 1), 0)
        self.lengths = self.lengths + counts
        for b, length in enumerate(self.lengths):
            first, last = seen_from[b] // PAGE, pages(length)
            # The numbers of freed pages may stay in the table, which is not read there.
            self.free.extend(self.table[b, self.dropped[b] : first].tolist())
            for n in range(self.held[b], last):
                self.table[b, n] = self.free.pop()
            self.dropped[b], self.held[b] = first, last
        asarray = self.xp.asarray
        self.on_device = {"lengths": asarray(self.lengths), "table": asarray(self.table)}

    def _attention(self, n: int, q: Array, k: Array, v: Array) -> Array:
        """Write the new keys and values of layer n, and attend to all in its cache."""
        cache, where = (self.k[n], self.v[n]), dict(self.on_device)
        if self.kv_dtype is not None:
            scales = {"k_scale": self.k_scale[n], "v_scale": self.v_scale[n]}
            where |= scales | {"kv_dtype": self.kv_dtype}
        cupyflash.append(k, v, *cache, offsets=self.offsets, **where)
        return cupyflash.attention_cached(
            q, *cache, offsets_q=self.offsets, **where, **self.options
        )


def pages(positions: int) -> int:
    """Return how many pages a number of positions needs."""
    return -(-positions // PAGE)


def bytes_and_scales(dim: int, kv_dtype: str) -> tuple[int, int]:
    """Return how many bytes and how many scales a row of `dim` codes has."""
    if kv_dtype != "int4":
        return dim, 1
    if dim % 2:
        raise UnusableError(
            f"--kv-dtype int4: got a model whose heads have {dim} columns; expected an even "
            "number, because two codes share a byte. Choose --kv-dtype int8."
        )
    return dim // 2, dim // GROUP if dim % GROUP == 0 else 1


def two_types(text: str) -> tuple[str, str]:
    """Read the types of keys and of values, or one for both."""
    found = text.split(",")
    if len(found) > 2 or not set(found) <= set(FORMATS):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected one of {', '.join(FORMATS)}, or two of them, as in int8,int4"
        )
    return found[0], found[-1]


def in_words(kv_dtype: tuple[str, str]) -> str:
    """Return the types of keys and of values, or of both, as `two_types` reads them."""
    return ",".join(dict.fromkeys(kv_dtype))


def _no_gradient(_: Array) -> Any:
    raise AssertionError("the gradient of a text that is read is never needed")


def written(
    prompts: Sequence[bytes], number: int, reader: Reader, weights: Weights, sampler: Sampler
) -> Iterator[np.ndarray]:
    """Yield the next byte of each text, `number` times."""
    new = [np.frombuffer(prompt, np.uint8).astype(np.int64) for prompt in prompts]
    for _ in range(number):
        logits = reader.read(new, weights)
        chosen = sampler(logits if reader.xp is np else logits.get())
        yield chosen
        new = list(chosen[:, None])


def run(options: argparse.Namespace, device: str, xp: Any) -> None:
    """Continue the texts, and show the speed."""
    rich, progress = require("rich.console"), require("rich.progress")
    if options.attention == "bfloat16":
        require("ml_dtypes", "pip install ml_dtypes")
    weights, setting = load(options.model, xp)
    prompts = [text.encode() for text in options.prompt]
    if not all(prompts):
        raise UnusableError("--prompt: got an empty text; expected one byte or more in each")
    lengths, number = [len(prompt) for prompt in prompts], options.tokens
    size = sum(w.size for w in weights.values())
    print(f"model   {size:,} weights, {setting.layers} layers, each byte sees {setting.context}")
    print(f"texts   {len(prompts)} of {sum(lengths)} bytes, and {number} more of each")
    print(f"device  {device}; attention in {options.attention}")
    if options.no_cache:
        reader = Reader(len(prompts), setting, options.attention, xp)
    else:
        kind = options.kv_dtype
        cache = CachedReader(lengths, number, setting, options.attention, xp, kind)
        pages_of = f"cache   {len(cache.free)} pages of {PAGE} positions in each layer"
        print(f"{pages_of}, in {in_words(kind) if kind else options.attention}")
        reader = cache

    sampler = Sampler.of(len(prompts), options.seed, options.temperature, options.top_k)
    columns = ["{task.description}", progress.BarColumn(), progress.MofNCompleteColumn()]
    columns += [progress.TimeRemainingColumn()]
    console = rich.Console(highlight=False, markup=False)
    chosen, times = [], [time.perf_counter()]
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=number)
        for some in written(prompts, number, reader, weights, sampler):
            chosen.append(some)
            times.append(time.perf_counter())
            rate = len(prompts) * len(times[2:]) / max(times[-1] - times[1], 1e-9)
            bar.update(task, advance=1, description=f"{rate:,.0f} bytes/s")
    print(f"\nprompts read at {sum(lengths) / (times[1] - times[0]):,.0f} bytes/s")
    if number > 1:
        print(f"written at {rate:,.0f} bytes/s, {rate / len(prompts):,.0f} of each text")
    for prompt, line in zip(prompts, np.transpose(chosen), strict=True):
        print(f"\n--- given\n{readable(prompt)}\n--- written\n{readable(bytes(line.tolist()))}")


def temperature(text: str) -> float:
    """Read a temperature."""
    number = float(text)
    if not 0 <= number < np.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a finite number of 0 or more")
    return number


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(description="Continue texts with a model that train_lm.py saved.")
    add = top.add_argument
    add("model", type=Path, metavar="FILE", help="the file that train_lm.py --save wrote")
    add("--prompt", nargs="+", default=PROMPTS, metavar="TEXT", help="texts to continue")
    add("--tokens", type=whole, default=200, help="bytes to write (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: %(default)s")
    add("--seed", type=whole, default=1, help="of the random numbers (default: %(default)s)")
    add("--temperature", type=temperature, default=0.8, help="0 is greedy (default: %(default)s)")
    add("--top-k", type=whole, default=256, help="draw from so many best bytes (default: all)")
    codes = f"keep keys and values as codes of fewer bits: {', '.join(FORMATS)}, or two of them"
    add("--kv-dtype", type=two_types, metavar="TYPE[,TYPE]", help=codes)
    add("--no-cache", action="store_true", help="read all texts again for each byte")
    kinds = ("float32", "bfloat16")
    add("--attention", choices=kinds, default="float32", help="default: %(default)s")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = parser()
    options = top.parse_args(arguments)
    if options.no_cache and options.kv_dtype:
        top.error("--kv-dtype is of a cache, and --no-cache has none: leave one of them out")
    try:
        xp, device = array_module(options.device)
        run(options, device, xp)
    except (UnusableError, cupyflash.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
