"""Calls that are computed by PyTorch's own threads, those of GNU's OpenMP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cupyflash.reference.cpu import openmp


@contextmanager
def threads_of_pytorch(number: int) -> Iterator[list[int]]:
    """Let this thread's calls be computed by so many of PyTorch's threads.

    The list has the number of threads that each call asked for.
    """
    torch = pytest.importorskip("torch")
    library = openmp.loaded(Path(torch.__file__).parent / "lib")
    if library is None:
        pytest.skip("PyTorch's threads are not those of GNU's OpenMP")
    before, calls, share = torch.get_num_threads(), [], openmp.share

    def counted(job: openmp.Job, workers: int) -> None:
        calls.append(workers)
        share(job, workers)

    torch.set_num_threads(number)
    openmp.share = counted
    try:
        with openmp.ThreadsOf(library):
            yield calls
    finally:
        openmp.share = share
        torch.set_num_threads(before)
