"""Calls of tensors on a CPU are computed by PyTorch's threads, and all others by our own."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from placement import same_bits
from test_threads import output_of
from torch_threads import threads_of_pytorch

import cupyflash.torch
from cupyflash.reference.cpu import openmp, threads

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="finds libraries as Linux lists them"
)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_tensors_give_the_bits_of_arrays():
    x, d_out = drawn(3, 8, 4, 200, 64), drawn(8, 4, 200, 64)
    wanted, vjp = cupyflash.attention_vjp(*x)
    q, k, v = (torch.from_numpy(each).requires_grad_() for each in x)
    with threads_of_pytorch(2) as calls:
        openmp._callers.clear()  # the adapter says so itself, and of its own calls alone
        cupyflash.attention(*x)
        assert not calls
        out = cupyflash.torch.attention(q, k, v)
        assert calls == [2]
        out.backward(torch.from_numpy(d_out))
    assert len(calls) > 1
    assert same_bits(out.detach().numpy(), wanted)
    for tensor, gradient in zip((q, k, v), vjp(d_out), strict=False):
        assert same_bits(tensor.grad.numpy(), gradient)


def test_who_computes_by_other_threads():
    done = []

    def asked() -> list[bool]:
        return [openmp.is_worth(workers) for workers in (1, 2)]

    with threads_of_pytorch(4):
        assert asked() == [False, True]  # for one, three would have nothing to do
        other = threading.Thread(target=lambda: done.append(asked()))
        other.start()
        other.join()
        assert done == [[False, False]]
        torch.set_num_threads(1)
        assert asked() == [False, False]
        torch.set_num_threads(4)
        inside = []
        threads.parallel(lambda first, last: inside.append(asked()), 8)
        assert len(inside) == 8
        assert not np.any(inside)
    assert asked() == [False, False]


def test_an_exception_of_a_helper_comes_out():
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=60)

    def run(first: int, last: int) -> None:
        if first < 2:
            both.wait()
        if threading.get_ident() != caller:
            raise MemoryError("of a helper")

    with threads_of_pytorch(2) as calls:
        with pytest.raises(MemoryError, match="of a helper"):
            threads.parallel(run, 100)
        assert calls == [2]
        assert caller not in openmp._jobs
        done = np.zeros(100, int)
        threads.parallel(lambda first, last: done[first:last].__iadd__(1), 100)
        assert (done == 1).all()
        assert calls == [2, 2]


def test_helpers_compute_in_the_usual_modes():
    """PyTorch's threads inherit that small numbers count as 0, from who starts them."""
    tiny, seen = np.float32(1e-40), {}
    both = threading.Barrier(2, timeout=60)

    def run(first: int, last: int) -> None:
        both.wait()
        seen[threading.get_ident()] = float(np.full(1, tiny)[0] * np.float32(0.5))

    torch.set_flush_denormal(True)
    try:
        with threads_of_pytorch(2):
            torch.ones(1 << 20).exp_()
            threads.parallel(run, 2)
    finally:
        torch.set_flush_denormal(False)
    del seen[threading.get_ident()]  # the caller's are its own
    assert list(seen.values()) == [float(tiny * np.float32(0.5))] != [0.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own(tmp_path):
    program = """
        import os, numpy as np, torch, cupyflash, cupyflash.torch
        from cupyflash.reference.cpu import openmp
        x = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 4, 200, 64), np.float32))
        torch.set_num_threads(2)
        seen = []
        share = openmp.share
        openmp.share = lambda *job: (seen.append(1), share(*job))
        wanted = cupyflash.torch.attention(x, x, x)
        assert seen == [1]
        cupyflash.torch.attention(x, x, x)  # recognised: machine code begins the region
        child = os.fork()
        if not child:
            same = np.array_equal(cupyflash.torch.attention(x, x, x).numpy(), wanted.numpy())
            os._exit(not same or len(seen) > 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "0"


def test_a_library_that_is_not_loaded(tmp_path):
    assert openmp.loaded(tmp_path) is None


@pytest.mark.parametrize(("method", "wanted"), [("fork", True), ("spawn", False)])
def test_a_process_of_multiprocessing(monkeypatch, method, wanted):
    folder = Path(torch.__file__).parent / "lib"
    assert openmp.loaded(folder) is not None
    monkeypatch.setattr(openmp.multiprocessing, "parent_process", object)
    monkeypatch.setattr(openmp.multiprocessing, "get_start_method", lambda allow_none: method)
    assert (openmp.loaded(folder) is None) == wanted
