"""Times models of transformers on a GPU, by "sdpa" and by cupyflash, and writes them down, as JSON.

    python tests/tools/gpu_transformers.py                    all rows, a record in tests/data/gpu
    python tests/tools/gpu_transformers.py --only gpt2 bert   these rows alone

Models have random weights in bfloat16. A row is of inference and of a training step (a forward with
a loss, and its backward), or of greedy generation. Ways are timed in turns, in one order and in the
reverse one; times are medians, in milliseconds, of the host, until the GPU has nothing left to do.
"speed" is the median of the ratios within a turn: the time of sdpa, divided by that of the way. The
record is written again after each row, so that a run that is cut keeps those that it has. A row
that fails has its error in the record, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_machine
import torch
import transformers

from cupyflash.torch import transformers as adapter

DEVICE = "cuda"
SDPA, OURS, IMPLEMENTATION = "sdpa", "cupyflash", "cupy_attention"
GROWING, STATIC = "cupyflash, growing cache", "cupyflash, static cache"
# Ways to generate: which attention, and the cache.
GENERATE = {
    SDPA: (SDPA, "its own"),
    OURS: (IMPLEMENTATION, "its own"),
    GROWING: (IMPLEMENTATION, "growing"),
    "sdpa, static cache": (SDPA, "static"),
    STATIC: (IMPLEMENTATION, "static of cupyflash"),
}
NEW = 64  # tokens that are generated
FEWEST, SECONDS = 3, 8.0  # turns of each way, and when no more begin after as many
# The name of the argument of `generate` that takes a cache.
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"

NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
GPT2 = {
    "vocab_size": 8192, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "vocab_size": 8192, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 8192,
}  # fmt: skip
BERT = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip
VIT = {
    "image_size": 224, "patch_size": 16, "hidden_size": 768, "intermediate_size": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12,
}  # fmt: skip
WHISPER = {
    "vocab_size": 2000, "d_model": 768, "encoder_layers": 6, "decoder_layers": 6,
    "encoder_attention_heads": 12, "decoder_attention_heads": 12, "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072, "max_source_positions": 1500, "max_target_positions": 448,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


class Row(NamedTuple):
    """What a row is of: a model, and the batch and length of its tokens (of a ViT, its images)."""

    title: str
    model: str  # the name of its classes
    head: str  # what it ends in, as the library's AutoModelFor... has it
    config: dict[str, Any]
    shape: tuple[int, int]
    new: int = 0  # tokens that are generated; without any, inference and training are timed


_GPT2 = functools.partial(Row, "GPT-2", "GPT2", "CausalLM", GPT2 | NO_DROPOUT)
_LLAMA = functools.partial(Row, "Llama, 8 layers, heads 16/4", "Llama", "CausalLM", LLAMA)
ROWS = {
    "gpt2": _GPT2((8, 1024)),
    "gpt2-dropout": Row("GPT-2, dropout 0.1", "GPT2", "CausalLM", GPT2, (8, 1024)),
    "llama": _LLAMA((2, 4096)),
    "bert": Row("BERT, padded", "Bert", "MaskedLM", BERT, (32, 128)),
    "vit": Row("ViT", "ViT", "ImageClassification", VIT, (64, 197)),
    "whisper": Row("Whisper", "Whisper", "SpeechSeq2Seq", WHISPER, (4, 448)),
    "gpt2-generate-8": _GPT2((8, 900), NEW),
    "gpt2-generate-1": _GPT2((1, 64), NEW),
    "llama-generate-8": _LLAMA((8, 2000), NEW),
    "llama-generate-1": _LLAMA((1, 64), NEW),
}


def model_of(row: Row) -> Any:
    """Return a row's model, with random weights in bfloat16."""
    config = getattr(transformers, f"{row.model}Config")(**row.config)
    made = getattr(transformers, f"AutoModelFor{row.head}")
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return made.from_config(config, dtype=torch.bfloat16)


def inputs(row: Row, config: Any) -> dict[str, torch.Tensor]:
    """Return what a row's model is called with, labels included."""
    batch, length = row.shape
    draw = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    if row.model == "ViT":
        images = draw(batch, config.num_channels, config.image_size, config.image_size)
        return {
            "pixel_values": images,
            "labels": torch.randint(config.num_labels, (batch,), device=DEVICE),
        }
    tokens, labels = torch.randint(3, config.vocab_size, (2, batch, length), device=DEVICE)
    if row.model == "Whisper":
        frames = 2 * config.max_source_positions  # the encoder halves them
        return {"input_features": draw(batch, config.num_mel_bins, frames), "labels": labels}
    found = {"input_ids": tokens, "labels": labels}
    if row.model == "Bert":
        lengths = torch.randint(length // 4, length + 1, (batch, 1), device=DEVICE)
        found["attention_mask"] = (torch.arange(length, device=DEVICE) < lengths).long()
    return found


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of a call, and what it returns."""
    wait = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    found = work()
    wait()
    return (time.perf_counter() - begin) * 1e3, found


def turns(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """Return the medians of ways that are timed in turns, and their speeds, sdpa's being 1."""
    times: dict[str, list[float]] = {way: [] for way in works}
    end = time.perf_counter() + SECONDS
    for turn in range(rounds):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        for way in [*works][:: -1 if turn % 2 else 1]:
            times[way].append(timed(works[way])[0])
    found: dict[str, Any] = {
        "ms": {way: round(statistics.median(x), 3) for way, x in times.items()},
        "turns": len(times[next(iter(works))]),
    }
    if SDPA in times:
        found["speed"] = {
            way: round(statistics.median(a / b for a, b in zip(times[SDPA], x, strict=True)), 4)
            for way, x in times.items()
            if way != SDPA
        }
    return found


def steps(row: Row, rounds: int) -> dict[str, Any]:
    """Return the times of inference and of a training step, and by how much losses differ.

    These are the losses of inference, which has no dropout.
    """
    model = model_of(row)
    given = inputs(row, model.config)

    def step(implementation: str, train: bool) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        model.train(train)
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            loss = model(**given).loss
        if train:
            loss.backward()
        return loss.detach()

    ways = {SDPA: SDPA, OURS: IMPLEMENTATION}
    found: dict[str, Any] = {}
    for what, train in ("inference", False), ("training step", True):
        works = {
            way: functools.partial(step, implementation, train)
            for way, implementation in ways.items()
        }
        # The first call compiles.
        losses = {way: [float(work()), float(work())] for way, work in works.items()}
        found[what] = turns(works, rounds)
        if not train:
            ours, wanted = losses[OURS][-1], losses[SDPA][-1]
            found["loss_difference"] = float(f"{abs(ours - wanted) / abs(wanted):.2e}")
    return found


def generation(row: Row, rounds: int) -> dict[str, Any]:
    """Return the times of greedy generation, and which share of tokens are those of sdpa.

    "first_seconds" is how long the first call takes, which compiles. A way that fails is left out,
    and its error is in the result.
    """
    model = model_of(row).eval()
    torch.compiler.reset()  # each row compiles for its own sizes
    batch, length = row.shape
    prompt = torch.randint(3, model.config.vocab_size, (batch, length), device=DEVICE)
    mask = torch.ones_like(prompt)  # nothing is padding, whichever tokens were drawn
    room = adapter.static_cache(model.config, length + row.new)

    def options(cache: str) -> dict[str, Any]:
        if cache == "growing":
            return {CACHE: adapter.growing_cache(model.config)}
        if cache == "static":
            return {"cache_implementation": "static"}
        if cache == "static of cupyflash":
            room.reset()  # the same memory again, which a CUDA graph has recorded
            return {CACHE: room}
        return {}

    def generate(implementation: str, cache: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        tokens: torch.Tensor = model.generate(
            prompt, attention_mask=mask, max_new_tokens=row.new, min_new_tokens=row.new,
            do_sample=False, pad_token_id=0, **options(cache),
        )  # fmt: skip
        return tokens[:, length:]

    works, tokens, first, errors = {}, {}, {}, []
    for way, asked in GENERATE.items():
        work = functools.partial(generate, *asked)
        try:
            milliseconds, _ = timed(work)
            tokens[way] = work()
        except Exception as error:  # noqa: BLE001 (the library's own, of any kind)
            errors.append(f"{way}: {told(error)}")
        else:
            works[way], first[way] = work, round(milliseconds / 1e3, 2)
    found = {
        "generation": turns(works, rounds) if works else {},
        "first_seconds": first,
        "equal_tokens": {
            way: round(float((tokens[way] == tokens[SDPA]).float().mean()), 4)
            for way in works
            if SDPA in works
        },
    }
    return found | ({"error": "; ".join(errors)} if errors else {})


def told(error: Exception) -> str:
    """Return an error in one line that is not too long."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def measure(row: Row, rounds: int) -> dict[str, Any]:
    """Return a row of the record; if it fails, with its error."""
    begin = time.perf_counter()
    made: dict[str, Any] = {"model": row.title, "shape": [*row.shape]}
    if row.new:
        made["new_tokens"] = row.new
    try:
        made |= (generation if row.new else steps)(row, rounds)
    except Exception as error:  # noqa: BLE001 (the library's own, of any kind)
        made["error"] = told(error)
    return made | {"seconds": round(time.perf_counter() - begin, 1)}


def main(arguments: Iterable[str] | None = None) -> int:
    """Time the rows that are asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--commit", default="", help="where there is no git")
    parser.add_argument("--folder", type=Path, default=gpu_machine.RECORDS)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=[*ROWS], metavar="ROW",
                        help=f"of {', '.join(ROWS)}")  # fmt: skip
    asked = parser.parse_args(None if arguments is None else [*arguments])
    transformers.logging.set_verbosity_error()
    adapter.register(IMPLEMENTATION)
    rows: dict[str, Any] = {}
    record = gpu_machine.facts(asked.commit)
    record |= {"dtype": "bfloat16", "rounds": asked.rounds, "rows": rows}
    for name in asked.only:
        rows[name] = measure(ROWS[name], asked.rounds)
        print(name, rows[name], flush=True)
        gpu_machine.write(record, "transformers", asked.folder)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
    return int(any("error" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
