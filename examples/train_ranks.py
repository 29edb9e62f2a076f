"""Train the language model of ``train_lm.py`` with its sequences split over several processes.

Every process has some positions of each window, and their rows in every layer; only attention
needs the rows of others. Losses and gradients are sums over the processes, so that all of them
change their weights alike. Run it on two processes, or on two threads of one process ::

    pip install ".[mpi]"
    mpirun -n 2 python -m mpi4py examples/train_ranks.py
    mpirun -n 2 python -m mpi4py examples/train_ranks.py --check
    python examples/train_ranks.py --threads 2

With ``--check``, everything is float64, and each loss is compared with that of one process that
trains the same model.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from program import UnusableError, require, whole
from train_lm import rate, split_text, standard_text, train
from transformer import (
    ROUNDING,
    Array,
    Setting,
    Vjp,
    Weights,
    attend,
    cross_entropy,
    initial_weights,
    loss_vjp,
    model,
)

import cupyflash
from cupyflash import distributed, masks

MPI = 'pip install ".[mpi]" in the clone, or start it with --threads 2'
DEFAULT = Setting(width=64, layers=2, context=1024, batch=2, steps=20)
TIMEOUT = 300.0


def summed(comm: distributed.Communicator, arrays: Sequence[Array]) -> list[Array]:
    """Return the sums over all ranks, added in their order: every rank gets the same bits."""
    flat = np.concatenate([np.ravel(x) for x in arrays])
    told = [np.frombuffer(x, flat.dtype) for x in comm.tell(flat.tobytes(), TIMEOUT)]
    total = functools.reduce(np.add, told)
    ends = np.cumsum([np.size(x) for x in arrays])
    parts = np.split(total, ends[:-1])
    return [part.reshape(np.shape(x)) for part, x in zip(parts, arrays, strict=True)]


def loss_over_ranks(
    comm: distributed.Communicator, layout: distributed.Layout, windows: Array, weights: Weights,
    setting: Setting, xp: Any,
) -> tuple[Array, Callable[[], Weights]]:  # fmt: skip
    """Return what `loss_vjp` returns, of which each rank computes its positions."""
    windows = windows.astype(np.int64, copy=False)
    mine, following = layout.positions, layout.positions + 1
    over_ranks = functools.partial(distributed.attention_vjp, comm=comm, layout=layout)

    def attend_windows(_: int, qkv: Array) -> tuple[Array, Vjp]:
        return attend(qkv, len(windows), setting.heads, setting.attention, xp, over_ranks)

    tokens = windows[:, mine].ravel()
    logits, model_vjp = model(tokens, weights, setting.layers, attend_windows, xp)
    loss, entropy_vjp = cross_entropy(logits, windows[:, following].ravel(), xp)
    share = layout.count / layout.length  # of all bytes that are predicted
    (total,) = summed(comm, [loss * share])

    def vjp() -> Weights:
        gradients = model_vjp(entropy_vjp() * share)
        names = sorted(gradients)
        return dict(zip(names, summed(comm, [gradients[n] for n in names]), strict=True))

    return total, vjp


def program(comm: distributed.Communicator, setting: Setting, seed: int, check: bool) -> float:
    """Train, print losses, and return the largest difference as a share of what rounding gives."""
    dtype = np.dtype(setting.attention)
    text, _ = split_text(standard_text(large=False), setting.context)
    layout = distributed.layout(comm, setting.context, mask=masks.causal())
    if not all(held.count for held in layout.runs):
        least = 128 * comm.size
        raise UnusableError(
            f"--context: got {setting.context} for {comm.size} ranks; expected {least} or more, so "
            "that every rank has a block of positions"
        )
    ours = functools.partial(loss_over_ranks, comm, layout)
    runs = []
    for function in (ours, loss_vjp) if check else (ours,):
        rng = np.random.default_rng(seed)  # every rank draws the same
        weights = initial_weights(setting, rng, np, dtype)
        runs.append(train(text, weights, setting, rng, np, function))
    if comm.rank == 0:
        held = ", ".join(str(runs_of.count) for runs_of in layout.runs)
        print(f"{setting.context} positions on {comm.size} ranks, {layout.kind}: {held}")
        print("step  loss" + ("     one rank  difference" if check else ""), flush=True)
    worst = 0.0
    for step, losses in enumerate(zip(*runs, strict=True), 1):
        line = f"{step:4}  {float(losses[0]):.4f}"
        if check:
            difference = abs(float(losses[0]) - float(losses[1]))
            worst = max(worst, difference / (ROUNDING * step * float(losses[1])))
            line += f"   {float(losses[1]):.4f}  {difference:.1e}"
        if comm.rank == 0:
            print(line, flush=True)
    return worst


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    top = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = top.add_argument
    add("--threads", type=whole, help="ranks in this process, without MPI")
    add("--seed", type=whole, default=1, help="of the weights and batches (default: %(default)s)")
    add("--check", action="store_true", help="float64, and compare with one process")
    for field in dataclasses.fields(Setting):
        if field.name != "attention":
            default = getattr(DEFAULT, field.name)
            kind = rate if field.name == "rate" else whole
            words = "default: %(default)s"
            add(f"--{field.name}", type=kind, default=default, metavar="N", help=words)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if a loss differs more than rounding explains."""
    top = parser()
    given = top.parse_args(arguments)
    sizes = {x.name: getattr(given, x.name) for x in dataclasses.fields(Setting)[:-1]}
    setting = Setting(**sizes, attention="float64" if given.check else "float32")
    if setting.width % setting.heads:
        top.error(f"--width {setting.width} is not a multiple of --heads {setting.heads}")
    try:
        if given.threads is not None:
            ranks = distributed.Threads(given.threads)
            work = functools.partial(program, setting=setting, seed=given.seed, check=given.check)
            worst = max(ranks.run(work))
        else:
            world = require("mpi4py.MPI", MPI).COMM_WORLD
            comm = distributed.communicator(world)
            worst = program(comm, setting, given.seed, given.check)
    except (UnusableError, cupyflash.ArgumentError) as error:
        print(f"train_ranks.py: {error}", file=sys.stderr)
        return 1
    return int(not worst <= 1)


if __name__ == "__main__":
    raise SystemExit(main())
