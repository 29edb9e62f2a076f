"""Attention and its gradients over several processes, each of which holds a part of a sequence.

Run it on two processes, or on two threads of one process ::

    pip install ".[mpi]"
    mpirun -n 2 python -m mpi4py examples/ring.py
    python examples/ring.py --threads 2

or with a GPU for each process ::

    pip install ".[cuda12,nccl,mpi]"
    mpirun -n 2 python -m mpi4py examples/ring.py --gpus

For each of four masks, it prints the layout that is chosen, what the heaviest rank computes and
receives, the time, and the largest difference from a call on one rank,
divided by the largest element.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from program import UnusableError, require

import cupyflash
from cupyflash import distributed, masks

MPI = 'pip install ".[mpi]" in the clone, or start it with --threads 2'
CUPY = 'pip install ".[cuda12,nccl]" or ".[cuda13,nccl13]" in the clone'
LARGEST = 1e-5  # difference that float32 explains, as a part of the largest element


def masks_of(length: int, arrays: Any) -> dict[str, Any]:
    """Return the masks that are tried: two that all ranks share, and two with few pairs."""
    documents = arrays.arange(length) * 8 // length
    return {
        "none": None,
        "causal": masks.causal(),
        "window": masks.window(length // 8, 0),
        "documents": masks.causal() & masks.segments(documents),
    }


def rotated(x: Any, positions: np.ndarray, arrays: Any) -> Any:
    """Return rows rotated by their positions (RoPE), which a rank knows from its layout."""
    angles = positions[:, None] / 10000 ** (np.arange(0, x.shape[-1], 2) / x.shape[-1])
    tables = (arrays.asarray(f(angles).astype(np.float32)) for f in (np.cos, np.sin))
    return cupyflash.rope(x[None], arrays.arange(len(positions)), cupyflash.Rotary(*tables))[0]


def in_host_memory(x: Any) -> np.ndarray:
    """Return an array of either memory in host memory."""
    return x if isinstance(x, np.ndarray) else x.get()


def try_mask(
    comm: distributed.Communicator, name: str, mask: Any, length: int, arrays: Any
) -> float:
    """Compute attention and its gradients over the ranks; print what it took, return the error.

    `arrays` is the module whose arrays the ranks have: NumPy or CuPy.
    """
    rng = np.random.default_rng(0)  # every rank draws the same
    q, k, v, do = (
        rng.standard_normal((heads, length, 64), dtype=np.float32) for heads in (8, 2, 2, 8)
    )
    layout = distributed.layout(comm, length, mask=mask)
    own_q, own_k, own_v, own_do = (arrays.asarray(layout.take(x)) for x in (q, k, v, do))
    begin = time.perf_counter()
    own_q, own_k = (rotated(x, layout.positions, arrays) for x in (own_q, own_k))
    out, vjp = distributed.attention_vjp(own_q, own_k, own_v, comm=comm, layout=layout, mask=mask)
    ours = [in_host_memory(x) for x in (out, *vjp(own_do)[:3])]
    seconds = time.perf_counter() - begin

    # The same on one rank. Real sequences are too long for that.
    every = np.arange(length)
    q, k, v, do = map(arrays.asarray, (q, k, v, do))
    whole, whole_vjp = cupyflash.attention_vjp(
        rotated(q, every, arrays), rotated(k, every, arrays), v, mask=mask
    )
    theirs = [in_host_memory(x) for x in (whole, *whole_vjp(do)[:3])]
    error = 0.0
    for x, y in zip(ours, theirs, strict=True):
        error = max(error, float(np.abs(x - layout.take(y)).max(initial=0) / np.abs(y).max()))
    price = layout.price
    if comm.rank == 0 and price is not None:
        print(
            f"{name:10} {layout.kind:11} {price.imbalance:9.2f} {price.received:8.0%} "
            f"{seconds:8.2f} {error:11.1e}",
            flush=True,
        )
    return error


def program(comm: distributed.Communicator, length: int, gpus: bool) -> float:
    """Try all masks, and return the largest error."""
    arrays: Any = np
    if gpus:
        arrays = require("cupy", CUPY)
        arrays.cuda.Device(comm.rank).use()
        comm = distributed.communicator(comm, device=comm.rank)
    if comm.rank == 0:
        print(f"{length} positions on {comm.size} ranks")
        print("mask       layout      imbalance received  seconds  difference")
    tried = masks_of(length, arrays)
    return max(try_mask(comm, name, mask, length, arrays) for name, mask in tried.items())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return 1 if results differ more than rounding explains."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=4096, help="positions of the sequence")
    parser.add_argument("--threads", type=int, help="ranks in this process, without MPI")
    parser.add_argument("--gpus", action="store_true", help="rank n has GPU n of this machine")
    given = parser.parse_args(arguments)
    try:
        if given.threads is not None:
            ranks = distributed.Threads(given.threads)
            error = max(ranks.run(lambda comm: program(comm, given.length, given.gpus)))
        else:
            world = require("mpi4py.MPI", MPI).COMM_WORLD
            error = program(distributed.communicator(world), given.length, given.gpus)
    except (UnusableError, cupyflash.ArgumentError) as fault:
        print(f"ring.py: {fault}", file=sys.stderr)
        return 1
    return int(error > LARGEST)


if __name__ == "__main__":
    raise SystemExit(main())
