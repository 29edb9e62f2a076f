"""A CuPy without a GPU: it answers what it is told to, and computes with NumPy."""

from __future__ import annotations

import time
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np

H200 = {
    "name": b"NVIDIA H200", "major": 9, "minor": 0, "totalGlobalMem": 140 * 2**30,
    "multiProcessorCount": 132, "sharedMemPerBlockOptin": 227 * 1024,
}  # fmt: skip
T4 = {
    "name": b"Tesla T4", "major": 7, "minor": 5, "totalGlobalMem": 15 * 2**30,
    "multiProcessorCount": 40, "sharedMemPerBlockOptin": 64 * 1024,
}  # fmt: skip
V100 = {
    "name": b"Tesla V100", "major": 7, "minor": 0, "totalGlobalMem": 16 * 2**30,
    "multiProcessorCount": 80, "sharedMemPerBlockOptin": 96 * 1024,
}  # fmt: skip


def fails(words):
    def call(*_):
        raise RuntimeError(words + "\nand more lines\nof it")

    return call


class Event:
    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        assert self.at


class Stream:
    """A stream that writes down what is done with it; `current` ends with the current one."""

    current: ClassVar[list] = []

    def __init__(self, ptr=1, non_blocking=False):
        self.ptr, self.non_blocking, self.did = ptr, non_blocking, []

    def __enter__(self):
        self.current.append(self)
        return self

    def __exit__(self, *_):
        self.current.pop()

    def synchronize(self):
        self.did.append("synchronize")

    def begin_capture(self):
        self.did.append("begin")

    def end_capture(self):
        self.did.append("end")
        return SimpleNamespace(launch=lambda stream: stream.did.append("launch"))


Stream.current = [Stream(0)]


class MemoryHook:
    """Sees one array of a million bytes come and go, and nothing of NumPy's."""

    def __enter__(self):
        self.malloc_postprocess(device_id=0, size=999_999, mem_size=10**6, mem_ptr=1, pmem_id=1)
        self.free_postprocess(device_id=0, mem_size=10**6, mem_ptr=1, pmem_id=1)
        return self

    def __exit__(self, *_):
        pass


def fake_cupy(
    devices=(H200,), driver=13010, runtime=13000, nvrtc=(13, 0), product=None, free=2**30
):
    """A CuPy that sees these devices; None for what it cannot find out.

    Its arrays and functions are NumPy's.
    """

    def answer(value, words):
        return fails(words) if value is None else lambda *_: value

    def properties(number):
        if devices[number] is None:
            raise RuntimeError("device is lost")
        return devices[number]

    module = ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.is_available = lambda: bool(devices)
    module.ones = product or np.ones
    module.__getattr__ = lambda name: getattr(np, name)
    module.ndarray = type("ndarray", (), {})  # NumPy's arrays are not of this type
    module.get_default_memory_pool = lambda: SimpleNamespace(
        free_bytes=lambda: 0, free_all_blocks=lambda: None
    )
    module.cuda = SimpleNamespace(
        runtime=SimpleNamespace(
            driverGetVersion=answer(driver, "no answer of the driver"),
            runtimeGetVersion=answer(runtime, "no answer of the runtime"),
            getDeviceCount=(lambda: len(devices)) if devices else fails("cudaErrorNoDevice: none"),
            getDeviceProperties=properties,
            getDevice=lambda: 0,
            memGetInfo=lambda: (free, free),
        ),
        Event=Event,
        get_elapsed_time=lambda start, end: 1e3 * (end.at - start.at),
        MemoryHook=MemoryHook,
        Device=lambda: SimpleNamespace(synchronize=lambda: None),
        Stream=Stream,
        get_current_stream=lambda: Stream.current[-1],
        nvrtc=SimpleNamespace(getVersion=answer(nvrtc, "Failure finding libnvrtc.so")),
    )
    return module
