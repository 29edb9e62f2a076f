"""The two back ends: one choice by the type of arrays, and the same methods."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest
from host_cupy import HostCupy

from cupyflash import dispatch
from cupyflash.backends.backend import Backend
from cupyflash.gpu import jit

METHODS = [name for name in vars(Backend) if not name.startswith("_")]


def test_the_type_of_arrays_chooses(monkeypatch):
    assert dispatch.backend_of(np.ones(3)) is dispatch.CPU
    cupy = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert dispatch.backend_of(cupy.asarray(np.ones(3))) is dispatch.GPU


@pytest.mark.parametrize("backend", [dispatch.CPU, dispatch.GPU], ids=["cpu", "gpu"])
def test_methods_are_those_of_the_protocol(backend):
    assert [name for name in dir(backend) if not name.startswith("_")] == sorted(METHODS)
    for name in METHODS:
        ours, wanted = (inspect.signature(getattr(of, name)) for of in (type(backend), Backend))
        assert ours == wanted


@pytest.mark.parametrize("beside", [False, True])
def test_a_kernel_beside_others_asks_for_all_shared_memory(cupy, beside):
    made = jit._compiled("one", "", 50_000, beside=beside)
    assert made.max_dynamic_shared_size_bytes == 50_000
    assert getattr(made, "preferred_shared_memory_carveout", None) == (100 if beside else None)
