"""The CuPy that is nowhere, as a fixture."""

from __future__ import annotations

import sys

import pytest
from host_cupy import HostCupy

from cupyflash.arrays import cuda_device
from cupyflash.gpu import driver, tma
from cupyflash.gpu import jit as compiler
from cupyflash.problem import replay


@pytest.fixture
def cupy(monkeypatch):
    """A CuPy in host memory, of an H200, that writes down launches."""
    module = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(compiler, "_kernels", {})
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(driver, "_thread", driver._Thread())
    monkeypatch.setattr(driver, "library", lambda: module.library)
    monkeypatch.setattr(tma, "encode", lambda *_: bytes(128))
    for cached in (driver.queue, cuda_device.of):
        cached.cache_clear()
    yield module
    for cached in (driver.queue, cuda_device.of):
        cached.cache_clear()
