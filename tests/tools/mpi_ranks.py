"""What tests/distributed/test_mpi.py runs on every rank: MPI gives the bits of threads, and ends.

mpiexec -n 2 python -m mpi4py tests/tools/mpi_ranks.py
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from cupyflash import ArgumentTypeError, distributed, masks
from cupyflash.distributed import DistributedError

MASKS = {"none": None, "causal": masks.causal(), "window": masks.window(300, 0)}
LENGTH = 1280
TIMEOUT = 60.0  # seconds


def gradients_of(comm: Any, mask: Any, scheme: str, check: bool) -> list[Any]:
    """Return results and gradients on one rank, with every option that makes ranks send."""
    rng = np.random.default_rng(0)
    q, k, v, do = (
        rng.standard_normal((heads, LENGTH, 64), dtype=np.float32) for heads in (6, 3, 3, 6)
    )
    layout = distributed.layout(comm, LENGTH, mask=mask)
    own = [layout.take(x) for x in (q, k, v)]
    out, lse, vjp = distributed.attention_vjp(
        *own, comm=comm, layout=layout, mask=mask, scheme=scheme, check=check, timeout=TIMEOUT,
        bias=rng.standard_normal((6, 1, LENGTH), dtype=np.float32), sink=np.ones(6, np.float32),
        dropout=0.2, seed=5, return_lse=True,
    )  # fmt: skip
    return [out, lse, *vjp(layout.take(do))]


def same_bits_as_threads(comm: Any) -> None:
    """Compare with as many threads."""
    by_heads = "heads" if comm.size <= 3 else "heads x rounds"  # there are three key-value heads
    for mask in MASKS.values():
        for scheme, check in (
            ("rounds", True), ("gather", True), ("rounds", False), (by_heads, True),
        ):  # fmt: skip
            ours = gradients_of(comm, mask, scheme, check)
            threads = distributed.Threads(comm.size)
            work = [mask, scheme, check]
            theirs = threads.run(lambda rank, work=work: gradients_of(rank, *work))[comm.rank]
            for x, y in zip(ours, theirs, strict=True):
                assert np.array_equal(x.view(np.uint32), y.view(np.uint32))


def relays_as_threads_do() -> None:
    """Compare ranks of two nodes, which pass on what comes from the other one, with threads."""
    comm = distributed.communicator(MPI.COMM_WORLD)
    comm.nodes = [rank * 2 // comm.size for rank in range(comm.size)]
    for mask in MASKS.values():
        ours = gradients_of(comm, mask, "nodes", True)
        threads = distributed.Threads(comm.size, 2)
        work = [mask, "nodes", True]
        theirs = threads.run(lambda rank, work=work: gradients_of(rank, *work))[comm.rank]
        for x, y in zip(ours, theirs, strict=True):
            assert np.array_equal(x.view(np.uint32), y.view(np.uint32))


def call(comm: Any, heads: int = 1, **options: Any) -> Any:
    """Make a small call."""
    layout = distributed.layout(comm, LENGTH)
    x = np.ones((heads, layout.count, 16), np.float32)
    options = {"timeout": TIMEOUT, **options}
    return distributed.attention(x, x, x, comm=comm, layout=layout, **options)


def fault(words: str, comm: Any, **options: Any) -> None:
    """Make a call that must fail, soon and with these words, on every rank."""
    begin = time.monotonic()
    with pytest.raises(DistributedError, match=re.escape(words)):
        call(comm, **options)
    assert time.monotonic() - begin < 5


def faults() -> None:
    """Let one rank fail in each way; a communicator that has ended is made anew."""
    comm = distributed.communicator(MPI.COMM_WORLD)
    last = comm.size - 1
    is_last = comm.rank == last
    fault("the ranks do not make the same call", comm, scale=1.0 + is_last)
    fault(f"rank {last} raised ArgumentTypeError: mask", comm, mask="causal" if is_last else None)
    call(comm)
    fault("bytes from rank", comm, heads=2 if is_last else 1, check=False)
    fault("The communicator is ended", comm)
    comm = distributed.communicator(MPI.COMM_WORLD)
    if is_last:
        MPI.COMM_WORLD.Barrier()  # it comes when the time of all others is up
    fault(f"waiting for rank {last}", comm, timeout=2)
    if not is_last:
        MPI.COMM_WORLD.Barrier()
    comm = distributed.communicator(MPI.COMM_WORLD)
    fault(f"rank {last} raised", comm, check=False, mask="causal" if is_last else None)
    MPI.COMM_WORLD.Barrier()


def main() -> None:
    comm = distributed.communicator(MPI.COMM_WORLD)
    assert (comm.rank, comm.size) == (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    assert list(comm.nodes) == [0] * comm.size
    with pytest.raises(ArgumentTypeError, match="expected an intracommunicator of mpi4py"):
        distributed.communicator(MPI.COMM_NULL)
    same_bits_as_threads(comm)
    if comm.size == 4:
        relays_as_threads_do()
    faults()
    os.write(1, f"rank {comm.rank} of {comm.size} is right\n".encode())  # not mixed with others


if __name__ == "__main__":
    main()
