"""Train a transformer language model without a framework, with attention by cupyflash.

The layers and their gradients are in ``transformer.py``. This file has the text, the optimiser and
the command line. ``generate.py`` continues texts with a saved model. Run it as ::

    pip install ".[examples]"
    python examples/train_lm.py --plot loss.svg --save model.safetensors
    python examples/train_lm.py --check

The model reads bytes and predicts the next one. On the CPU, it learns from the Python language
reference that ``pydoc`` shows (``pydoc_data/topics.py``, 0.4 MB of prose). On a GPU, it also learns
from the top modules of the standard library (5 MB in all). ``--text`` names other files. The loss
is the mean of -ln p(next byte), in nats per byte. Every twentieth piece of the text is held out,
and the validation loss is the loss on these pieces.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import model_file
import numpy as np
from generate import CachedReader, Sampler, written
from program import UnusableError, array_module, readable, require, whole
from transformer import (
    BYTES,
    STEP,
    Array,
    Setting,
    Weights,
    check_gradients,
    initial_weights,
    loss_vjp,
)

import cupyflash

CPU = Setting()
GPU = Setting(
    width=384, layers=6, heads=6, context=512, batch=32, steps=1000, rate=1e-3, attention="bfloat16"
)
# For --check: a last tile that is not full, and heads whose size is no power of two.
TINY = Setting(width=18, layers=2, heads=3, context=140, batch=2, attention="float64")
PIECE = 8  # contexts in a piece of text
HOLD_OUT = 20  # every twentieth piece
BETA1, BETA2, ADAM_EPSILON, DECAY, CLIP = 0.9, 0.98, 1e-8, 0.1, 1.0
REPORTS = 10  # of the validation loss
SHOWN = 300  # bytes that the model writes at the end


def standard_text(large: bool) -> bytes:
    """Return the language reference and, if `large`, the top modules of the standard library.

    Some chapters of the reference contain others, so each paragraph is taken once.
    """
    topics = importlib.import_module("pydoc_data.topics").topics
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) if large else []
    return b"\n".join([text, *(path.read_bytes() for path in modules)])


def split_text(text: bytes, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes to train on and, from pieces all over the text, bytes to validate on."""
    size = PIECE * context
    number = len(text) // size
    if number < HOLD_OUT:
        raise UnusableError(
            f"--text: got {len(text):,} bytes; expected {HOLD_OUT * size:,} or more for a context "
            f"of {context}. Add text by --text, or lower --context."
        )
    pieces = np.frombuffer(text, np.uint8, number * size).reshape(number, size)
    held_out = np.arange(number) % HOLD_OUT == HOLD_OUT - 1
    return pieces[~held_out].ravel(), pieces[held_out].ravel()


def validate(text: np.ndarray, weights: Weights, setting: Setting, xp: Any) -> float:
    """Return the mean loss of a text that is cut into windows without overlap."""
    starts = np.arange(0, len(text) - setting.context, setting.context)
    total = 0.0
    for some in np.split(starts, range(setting.batch, len(starts), setting.batch)):
        windows = xp.asarray(text[some[:, None] + np.arange(setting.context + 1)])
        total += float(loss_vjp(windows, weights, setting, xp)[0]) * len(some)
    return total / len(starts)


def train(
    text: np.ndarray,
    weights: Weights,
    setting: Setting,
    rng: np.random.Generator,
    xp: Any,
    loss_vjp: Callable[..., Any] = loss_vjp,
) -> Iterator[Array]:
    """Change the weights in place by AdamW, and yield the loss of each step's windows."""
    mean = {name: xp.zeros_like(w) for name, w in weights.items()}
    square = {name: xp.zeros_like(w) for name, w in weights.items()}
    warm_up = max(setting.steps // 20, 1)
    for step in range(1, setting.steps + 1):
        starts = rng.integers(0, len(text) - setting.context, setting.batch)
        windows = xp.asarray(text[starts[:, None] + np.arange(setting.context + 1)])
        loss, vjp = loss_vjp(windows, weights, setting, xp)
        gradients = vjp()

        # Up in a line, down in half a cosine to a tenth. The clip stays on the device: no waiting.
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / setting.steps)
        rate = setting.rate * min(step / warm_up, cosine)
        norm = xp.sqrt(sum((g * g).sum() for g in gradients.values()))
        clip = CLIP / xp.maximum(norm, CLIP)
        for name, w in weights.items():
            g, m, v = gradients[name] * clip, mean[name], square[name]
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            change = m / (1 - BETA1**step) / (xp.sqrt(v / (1 - BETA2**step)) + ADAM_EPSILON)
            if w.ndim == 2 and name != "embedding":
                change += DECAY * w
            weights[name] -= rate * change
        yield loss


def read_text(files: Sequence[Path] | None, large: bool) -> bytes:
    """Return the joined text of the given files, or without any, of the standard library."""
    try:
        if files:
            return b"\n".join(path.read_bytes() for path in files)
        return standard_text(large)
    except (OSError, ImportError) as error:
        raise UnusableError(f"--text: cannot read it ({error}). Name files that exist.") from error


def writable_picture(path: Path) -> Path:
    """Return the path if a picture can be written there. This is checked before the training."""
    figure = require("matplotlib.figure").Figure()
    known = sorted(figure.canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise UnusableError(f"--plot {path}: got this ending; expected one of {', '.join(known)}")
    if not path.parent.is_dir():
        raise UnusableError(f"--plot {path}: there is no folder {path.parent}; make it first")
    return path


def plot(
    path: Path, losses: Sequence[float], validation: dict[int, float], frequencies: float, what: str
) -> None:
    """Draw the loss of each step, the validation losses, and the loss of single frequencies."""
    figure = require("matplotlib.figure").Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, lw=0.7, alpha=0.6, label="each step's windows")
    axes.plot(list(validation), list(validation.values()), "o-", ms=4, label="validation")
    axes.axhline(frequencies, color="grey", ls=":", label="frequencies of single bytes alone")
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=what, ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path)


def run(
    setting: Setting,
    text: bytes,
    seed: int,
    device: str,
    xp: Any,
    picture: Path | None,
    model: Path | None,
) -> None:
    """Train, show how the loss falls, draw the curve, and show what the model writes."""
    rich, progress = require("rich.console"), require("rich.progress")
    console = rich.Console(highlight=False, markup=False)
    training, held_out = split_text(text, setting.context)
    rng = np.random.default_rng(seed)
    weights = initial_weights(setting, rng, xp, np.float32)
    size = sum(w.size for w in weights.values())
    share = np.bincount(training, minlength=BYTES) / len(training)
    frequencies = -float(np.log(share, where=share > 0, out=np.zeros(BYTES)) @ share)
    print(f"text    {len(training):,} bytes to train on, {len(held_out):,} to validate on")
    print(f"model   {size:,} weights, {setting}")
    print(f"device  {device}; attention in {setting.attention}\n")

    start = time.perf_counter()
    validation = {0: validate(held_out, weights, setting, xp)}
    columns = ["{task.description}", progress.BarColumn(), progress.MofNCompleteColumn()]
    columns += [progress.TimeRemainingColumn()]
    losses: list[Array] = []
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("loss 5.55", total=setting.steps)
        for loss in train(training, weights, setting, rng, xp):
            losses.append(loss)
            step = len(losses)
            if step % 10 == 0:  # reading a loss waits for the GPU
                bar.update(task, completed=step, description=f"loss {float(loss):.2f}")
            if step * REPORTS // setting.steps > (step - 1) * REPORTS // setting.steps:
                validation[step] = validate(held_out, weights, setting, xp)
                if not math.isfinite(validation[step]):
                    raise UnusableError(f"the loss is not finite at step {step}: lower --rate")
                seconds = time.perf_counter() - start
                console.print(
                    f"step {step:>5}   loss {float(loss):.3f}   "
                    f"validation {validation[step]:.3f}   {seconds:.0f} s"
                )
    seconds = time.perf_counter() - start
    first, last = validation[0], validation[setting.steps]
    print(f"\nvalidation loss {first:.3f} -> {last:.3f} nats per byte in {seconds:.0f} s")
    print(f"(the frequencies of single bytes alone give {frequencies:.3f})")
    if picture:
        what = f"{size:,} weights, {setting.steps:,} steps, {seconds:.0f} s on the {device[:3]}"
        plot(picture, [float(loss) for loss in losses], validation, frequencies, what)
        print(f"the curve is in {picture}")
    if model:
        model_file.save(model, weights, setting, xp)
        print(f"the model is in {model}")

    prompt = held_out[: min(60, setting.context)].tobytes()
    reader = CachedReader([len(prompt)], SHOWN, setting, "float32", xp)
    sampler = Sampler.of(1, seed, temperature=0.8, top_k=BYTES)
    chosen = np.ravel(list(written([prompt], SHOWN, reader, weights, sampler)))
    text = bytes(chosen.tolist())
    print(f"\n--- given\n{readable(prompt)}\n--- written\n{readable(text)}")


def check(seed: int, xp: Any) -> int:
    """Print each gradient's error against a central difference; 1 if one exceeds its bound."""
    print(f"error of each gradient against central differences of step {STEP:g}, float64, as a")
    print("share of the gradient's norm, and the bound that truncation and rounding give it\n")
    found = check_gradients(TINY, np.random.default_rng(seed), xp)
    for line in found:
        print(f"{line.name:<20}  {line.error:.1e}  {line.bound:.1e}")
    wrong = [line.name for line in found if not line.error <= line.bound]  # NaN is wrong, too
    largest = max(line.error for line in found)
    share = max(line.error / line.bound for line in found)
    print(f"\nworst relative error {largest:.1e}; at most {share:.2f} of a bound")
    if wrong:
        print(f"error: wrong gradients of {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


def rate(text: str) -> float:
    """Read a learning rate."""
    number = float(text)
    if not 0 < number < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number between 0 and 1")
    return number


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(description="Train a language model with cupyflash's attention.")
    add = top.add_argument
    add("--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: %(default)s")
    add("--text", type=Path, nargs="+", metavar="FILE", help="text to learn")
    add("--plot", type=Path, metavar="FILE", help="draw the loss to a .svg, .png or .pdf")
    add("--save", type=Path, metavar="FILE", help="write the model to a safetensors file")
    add("--seed", type=whole, default=1, help="of the weights and batches (default: %(default)s)")
    add("--check", action="store_true", help="check the gradients instead, in float64")
    kinds: dict[str, Any] = {"rate": rate, "attention": str}
    for field in dataclasses.fields(Setting):
        cpu, gpu = (getattr(setting, field.name) for setting in (CPU, GPU))
        kind = kinds.get(field.name, whole)
        choices = ("float32", "bfloat16") if field.name == "attention" else None
        words = f"default: {cpu}, on a GPU {gpu}"
        add(f"--{field.name}", type=kind, choices=choices, metavar="N", help=words)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    top = parser()
    options = top.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    try:
        xp, device = array_module(options.device)
        if options.check:
            return check(options.seed, xp)
        default = CPU if xp is np else GPU
        names = [field.name for field in dataclasses.fields(Setting)]
        setting = dataclasses.replace(default, **{n: given[n] for n in names if n in given})
        if setting.width % setting.heads:
            top.error(f"--width {setting.width} is not a multiple of --heads {setting.heads}")
        if setting.attention == "bfloat16":
            require("ml_dtypes", "pip install ml_dtypes")
        picture = options.plot and writable_picture(options.plot)
        model = options.save and model_file.writable(options.save)
        text = read_text(options.text, large=xp is not np)
        run(setting, text, options.seed, device, xp, picture, model)
    except (UnusableError, cupyflash.ArgumentError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
