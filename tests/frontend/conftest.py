"""The CuPy that is nowhere, as fixtures."""

from __future__ import annotations

import sys

import pytest
from host_cupy import HostCupy

from cupyflash.arrays import copies, cuda_device, device_arrays, reports
from cupyflash.gpu import driver
from cupyflash.gpu import jit as compiler
from cupyflash.problem import replay

REMEMBERED = (
    driver.queue,
    cuda_device.of,
    copies._kernel,
    device_arrays._converter,
    device_arrays._converter_of_rows,
)


@pytest.fixture
def install(monkeypatch):
    """Make a module the CuPy of this process, with nothing remembered of another one."""

    def install(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(compiler, "_kernels", {})
        monkeypatch.setattr(replay, "_entries", {})
        monkeypatch.setattr(reports, "_reports", {})
        monkeypatch.setattr(driver, "_thread", driver._Thread())
        monkeypatch.setattr(device_arrays, "_sides", device_arrays._Sides())
        for cached in REMEMBERED:
            cached.cache_clear()
        return cupy

    yield install
    for cached in REMEMBERED:
        cached.cache_clear()


@pytest.fixture
def cupy(install):
    return install(HostCupy())
