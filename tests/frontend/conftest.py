"""The CuPy that is nowhere, as fixtures."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest
from host_cupy import HostCupy

from cupyflash.arrays import copies, cuda_device, device_arrays, elementwise, reports
from cupyflash.gpu import driver, tma
from cupyflash.gpu import jit as compiler
from cupyflash.problem import replay

REMEMBERED = (
    driver.queue,
    cuda_device.of,
    copies._kernel,
    elementwise._converter,
    elementwise._converter_of_rows,
)


def encoded(made, address):
    """Return what stands for a map of tensors, which a driver would encode."""
    return bytes(tma.BYTES)


@pytest.fixture
def install(monkeypatch):
    """Make a module the CuPy of this process, with nothing remembered of another one."""

    def install(cupy):
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setattr(compiler, "_kernels", {})
        monkeypatch.setattr(replay, "_entries", {})
        monkeypatch.setattr(reports, "_reports", {})
        monkeypatch.setattr(driver, "_thread", driver._Thread())
        monkeypatch.setattr(driver, "library", lambda: cupy.library)
        monkeypatch.setattr(tma, "encode", encoded)
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


@pytest.fixture
def as_on_a_gpu(monkeypatch, cupy):
    """Make the calls of programs for the CPU as those of a GPU, and return what CuPy was told."""
    from cupyflash.jax import frame, target

    told = []

    def on_stream(stream, device):
        told.append((stream, device))
        return nullcontext()

    monkeypatch.setattr(target._Entry, "on_cpu", target._Entry.on_gpu)
    monkeypatch.setattr(frame.Frame, "stream", lambda _: 77)
    monkeypatch.setattr(frame.Frame, "device", lambda _: 0)
    monkeypatch.setattr(device_arrays, "on_stream", on_stream)
    return told


@pytest.fixture
def gpu_tensors(cupy, monkeypatch):
    """Make a function that makes tensors, with CuPy's module as `cupy`.

    Tensors in host memory say that they are on a GPU, whose memory is that of `host_cupy`.
    """
    import torch

    from cupyflash.torch import recognised, tensors

    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0, raising=False)
    monkeypatch.setattr(device_arrays, "on_stream", lambda *_: nullcontext())
    monkeypatch.setattr(tensors, "raw_stream", lambda device: 70 + device)
    monkeypatch.setattr(tensors, "is_capturing", lambda: False)
    for kept in ("_known", "_growing", "_last"):
        monkeypatch.setattr(recognised, kept, {})
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: Device()), raising=False)

    class Device:
        type, index = "cuda", 0

        def __eq__(self, other):
            return isinstance(other, Device)

        __hash__ = None

    return lambda count=3, dtype=torch.float32, size=40: [
        torch.zeros(2, 4, size, 16, dtype=dtype) for _ in range(count)
    ]
