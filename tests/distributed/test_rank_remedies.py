"""The code that errors of ranks tell users to write works: each case fails, and does as it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mpi_processes
import numpy as np
import pytest

from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks

LENGTH = 48
X = np.random.default_rng(0).standard_normal((2, LENGTH, 8)).astype(np.float32)


def on_ranks(work: Callable[[Any], Any], size: int = 2, nodes: int = 1) -> list[Any]:
    return distributed.Threads(size, nodes).run(work)


def refused(work: Callable[[Any], Any], found: str, size: int = 2, nodes: int = 1) -> str:
    """Return the code in the message with which ranks refuse work."""
    with pytest.raises((ArgumentError, ArgumentTypeError, distributed.DistributedError)) as failure:
        on_ranks(work, size, nodes)
    code = re.search(found, str(failure.value))
    assert code, f"the message does not say {found}: {failure.value}"
    return code[0]


def run(code: str, **names: Any) -> Any:
    return eval(code, {"np": np, "distributed": distributed, "masks": masks, **names})


def call(comm: Any, x: Any = X, **options: Any) -> Any:
    layout = distributed.layout(comm, LENGTH)
    own = layout.take(x)
    return distributed.attention(own, own, own, comm=comm, layout=layout, **options)


@pytest.mark.parametrize(
    ("scheme", "size", "nodes"), [("nodes", 3, 3), ("heads", 3, 1), ("heads x rounds", 3, 1)]
)
def test_another_scheme(scheme, size, nodes):
    code = refused(lambda comm: call(comm, scheme=scheme), 'scheme="rounds"', size, nodes)
    assert on_ranks(lambda comm: call(comm, **run(f"dict({code})")), size, nodes)


def test_another_axis():
    x = X.swapaxes(-3, -2)  # positions first
    code = refused(lambda comm: distributed.layout(comm, LENGTH).take(x), r"axis=")
    parts = on_ranks(lambda comm: run(f"layout.take(x, {code}0)", x=x,
                                      layout=distributed.layout(comm, LENGTH)))  # fmt: skip
    assert sum(len(part) for part in parts) == LENGTH


def test_rows_of_the_rank():
    def work(take):
        def work(comm):
            layout = distributed.layout(comm, LENGTH)
            own = take(layout)
            return distributed.attention(own, own, own, comm=comm, layout=layout)

        return work

    code = refused(work(lambda layout: X), r"layout\.take\(whole array\)").replace(" ", "_")
    assert on_ranks(work(lambda layout: run(code, layout=layout, whole_array=X)))


def test_a_sharded_array():
    ids = np.arange(LENGTH) // 10

    def work(take):
        def work(comm):
            layout = distributed.layout(comm, LENGTH)
            mask = masks.segments(distributed.sharded(take(layout)))
            own = layout.take(X)
            return distributed.attention(own, own, own, comm=comm, layout=layout, mask=mask)

        return work

    code = refused(work(lambda layout: ids), r"layout\.take\(whole array, axis=-1\)")
    code = code.replace("whole array", "ids")
    assert on_ranks(work(lambda layout: run(code, layout=layout, ids=ids)))


def test_a_layout():
    mask = masks.causal()

    def work(layout):
        def work(comm):
            made = layout(comm)
            own = distributed.layout(comm, LENGTH, mask=mask).take(X)
            return distributed.attention(own, own, own, comm=comm, layout=made, mask=mask)

        return work

    code = refused(work(lambda comm: LENGTH), r"layout\(comm, length, mask=mask\)")
    names = {"length": LENGTH, "mask": mask, "layout": distributed.layout}
    assert on_ranks(work(lambda comm: run(code, comm=comm, **names)))


def test_a_communicator_of_mpi(tmp_path):
    code = refused(
        lambda comm: distributed.attention(
            X, X, X, comm=3, layout=distributed.layout(comm, LENGTH)
        ),
        r"communicator\(MPI\.COMM_WORLD\)",
    )
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "from cupyflash import distributed\n"
        "from cupyflash.distributed import communicator\n"
        f"comm = {code}\n"
        f"layout = distributed.layout(comm, {LENGTH})\n"
        f"own = layout.take(np.ones((2, {LENGTH}, 8), np.float32))\n"
        "out = distributed.attention(own, own, own, comm=comm, layout=layout)\n"
        "assert (out == 1).all() and comm.size == 2\n"
        "print('done')\n"
    )
    assert "done" in mpi_processes.run(program)
