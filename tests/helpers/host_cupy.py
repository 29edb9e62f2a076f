"""A CuPy whose device memory is the host's: a launch writes down what the kernel was told."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import sys
import threading
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
from fake_cupy import H200

from cupyflash.arrays import copies, cuda_device
from cupyflash.expr.nodes import LOOKUPS, rebuild


def in_host(x):
    """Return an array of a device, or None, as one of NumPy's."""
    return x if x is None or isinstance(x, np.ndarray) else x.host


def read_in_host(made):
    """Return a mask or score changes that read arrays of a device as arrays of NumPy's."""
    return None if made is None else type(made)(rebuild(made.expr, _looked_up_in_host))


def _looked_up_in_host(node):
    if node.op not in (*LOOKUPS, "aligned"):
        return None
    args = tuple(rebuild(arg, _looked_up_in_host) for arg in node.args)
    if node.op in LOOKUPS:
        array = in_host(node.value[0])
        return type(node)(node.op, args, node.type, (array, *node.value[1:]))
    value = dataclasses.replace(node.value, array=in_host(node.value.array))
    return type(node)(node.op, args, node.type, value)


class OutOfMemoryError(MemoryError):
    pass


class MemoryPointer:
    def __init__(self, held, offset=0, device_id=0):
        self.held, self.offset, self.device_id = held, offset, device_id
        self.ptr = held.ctypes.data + offset

    def __add__(self, offset):
        return MemoryPointer(self.held, self.offset + offset, self.device_id)


class PinnedMemory(np.ndarray):
    """Bytes of host memory with an address."""

    def __new__(cls, size):
        return np.zeros(size, np.uint8).view(cls)

    @property
    def ptr(self):
        return self.ctypes.data


class UnownedMemory(np.ndarray):
    """Bytes of another library at an address; whatever lies in them keeps their owner."""

    def __new__(cls, place, size, owner, device_id):
        memory = (ctypes.c_uint8 * size).from_address(place)
        memory.owner = owner
        made = np.frombuffer(memory, np.uint8).view(cls)
        made.device_id = device_id
        return made


class Launch(NamedTuple):
    """How a kernel was launched."""

    kernel: str
    by_driver: bool
    grid: int
    threads: int
    shared_memory: int
    stream: int
    words: np.ndarray  # its parameters
    early: bool = False  # whether it may begin while the one before ends


class Config(ctypes.Structure):
    """CUlaunchConfig of cuda.h."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "tx", "ty", "tz", "shared_memory")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute of cuda.h, with the only value that is set here."""

    _fields_ = [("id", ctypes.c_uint), ("_", ctypes.c_uint), ("allowed", ctypes.c_int)]


OVERLAPS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
RAISED = 999  # an exception was raised
# CUDA's errors, and their names behind CUDA_ERROR_
INVALID_VALUE, INVALID_CONTEXT, TOO_MANY_RESOURCES = 1, 201, 701
NAMES = {1: b"INVALID_VALUE", 201: b"INVALID_CONTEXT", 701: b"LAUNCH_OUT_OF_RESOURCES"}


class HostCupy(ModuleType):
    """The module.

    Attributes
    ----------
    launches : list of Launch
        In order.
    during_launch : callable
        Runs while the driver is asked; what it returns is the driver's error, if it is not None.
    during_replace : callable
        Runs when a tensor map has got its address, and returns the driver's error or 0.
    library : namespace
        The driver's functions.
    """

    def __init__(self, version="14.2.0", devices=1, properties=H200):
        super().__init__("cupy")
        self.__version__ = version
        self.launches = []
        self.during_launch, self.during_replace = lambda: None, lambda: 0
        self.device = 0
        self.driver_version = 12020  # one whose launches never overlap
        self._stream = threading.local()
        self._kernels = {}
        module = self

        class Array:
            base = None

            def __init__(self, shape, dtype=float, memptr=None, strides=None):
                dtype = np.dtype(dtype)
                memptr = memptr or module.alloc(math.prod(shape) * dtype.itemsize)
                self.host = np.ndarray(shape, dtype, memptr.held.data, memptr.offset, strides)
                self.data = memptr
                self.device = module.Device(memptr.device_id)

            def __getattr__(self, name):
                if name not in "shape strides dtype size ndim itemsize nbytes flags".split():
                    raise AttributeError(name)
                return getattr(self.host, name)

            def _like(self, host):
                made = object.__new__(Array)
                made.host, made.device = host, self.device
                begin = host.ctypes.data - self.data.ptr if host.size else 0
                made.data = self.data + begin
                return made

            def __getitem__(self, places):
                return self._like(self.host[places])

            def __setitem__(self, places, value):
                self.host[places] = value.host if isinstance(value, Array) else value

            def transpose(self, *axes):
                return self._like(self.host.transpose(*axes))

            def reshape(self, *shape):
                return self._like(self.host.reshape(*shape))

            def view(self, dtype):
                return self._like(self.host.view(dtype))

            def copy(self):
                return module.asarray(self.host)

            def get(self):
                return self.host.copy()

            def fill(self, value):
                self.host.fill(value)

        self.ndarray = Array

        class Kernel:
            def __init__(self, name):
                self.name = name
                self.max_dynamic_shared_size_bytes = 0
                self.kernel = SimpleNamespace(ptr=1000 + len(module._kernels))
                module._kernels[self.kernel.ptr] = self

            def __call__(self, grid, block, args, shared_mem):
                if self.name == "cupyflash_copy_blocks":
                    module.copy_blocks(grid[0] * block[0], args[0])
                    return
                words, *maps = (argument.view(np.uint64) for argument in args)
                space = np.zeros(-words.size % 8 if maps else 0, np.uint64)  # see `driver.Buffer`
                words = np.concatenate([words, space, *maps])
                stream = module.current_stream().ptr
                how = self.name, False, grid[0], block[0], shared_mem, stream, words
                module.launches.append(Launch(*how))

        def launch_kernel(config, f, pointers, extra):
            told = Config.from_address(config)
            kernel = module._kernels[f]
            assert (told.y, told.z, told.ty, told.tz, extra) == (1, 1, 1, 1, None)
            early = told.count > 0
            if early:
                attribute = Attribute.from_address(told.attributes)
                assert (told.count, attribute.id, attribute.allowed) == (1, OVERLAPS, 1)
            place = ctypes.c_uint64.from_address(pointers).value
            size = (pointers - place) // 8  # `driver.Buffer` lays them so
            words_of = ctypes.c_uint64 * size
            words = np.array(words_of.from_address(place))
            error = module.during_launch()
            again = np.array(words_of.from_address(place))
            assert (words == again).all(), "another launch wrote to these parameters"
            if error is not None:
                return error
            how = kernel.name, True, told.x, told.tx, told.shared_memory, told.stream or 0, words
            module.launches.append(Launch(*how, early))
            return 0

        def clear(place, value, count, stream):
            ctypes.memset(place, value, 4 * count)
            return 0

        def replace(place, address):
            if place % 64 or address % 16:  # as cuda.h wants them
                return INVALID_VALUE
            ctypes.c_uint64.from_address(place).value = address
            return self.during_replace()

        def launched(*arguments):
            """Launch for machine code, which takes an error's number and no exception."""
            try:
                return launch_kernel(*arguments)
            except BaseException as error:  # noqa: BLE001, it is raised by `error_name`
                module.raised = error
                return RAISED

        def error_name(error, place):
            if error == RAISED:
                raise module.raised
            place._obj.value = b"CUDA_ERROR_" + NAMES[error]

        self.library = SimpleNamespace(
            cuLaunchKernelEx=ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(launched),
            cuMemsetD32Async=ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.c_uint64, ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
            )(clear),
            cuTensorMapReplaceAddress=ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 2)(
                replace
            ),
            cuGetErrorName=error_name,
        )

        class Event:
            done = True

            def __init__(self, disable_timing=False):
                pass

            def record(self, stream):
                pass

            def synchronize(self):
                pass

        class Stream:
            def __init__(self, non_blocking=False, priority=0):
                self.ptr = 9000

            def wait_event(self, event):
                pass

            def __enter__(self):
                self.before = getattr(module._stream, "pointer", 0)
                module._stream.pointer = self.ptr

            def __exit__(self, *_):
                module._stream.pointer = self.before

        def convert(*arrays):
            *summands, to = arrays
            to.host[...] = functools.reduce(np.add, [x.host for x in summands])

        def compare(x, y, differs):
            assert x.dtype.kind == "u"  # bits: NaN differs from itself
            differs.host[0] |= (x.host != y.host).any()

        def kernel(inputs, output, body, name):
            if name == "cupyflash_compare":
                return compare
            return convert_rows if "rows" in name else convert

        def take(array, indices, axis, to):
            np.take(array.host, indices.host, axis, to.host)

        self.take = take

        self.ElementwiseKernel = kernel
        self.RawModule = lambda **_: SimpleNamespace(get_function=Kernel)
        self.cuda = SimpleNamespace(
            alloc=self.alloc,
            alloc_pinned_memory=PinnedMemory,
            UnownedMemory=UnownedMemory,
            MemoryPointer=lambda held, offset: MemoryPointer(held, offset, held.device_id),
            get_current_stream=self.current_stream,
            Device=self.Device,
            Event=Event,
            Stream=Stream,
            nvrtc=SimpleNamespace(getVersion=lambda: (13, 0)),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            runtime=SimpleNamespace(
                getDevice=lambda: self.device,
                getDeviceCount=lambda: devices,
                getDeviceProperties=lambda _: properties,
                driverGetVersion=lambda: self.driver_version,
                memcpy2DAsync=lambda *x: copy_rows(*x[:6]),
            ),
        )

    def alloc(self, size):
        return MemoryPointer(_aligned(size), device_id=self.device)

    def copy_blocks(self, threads, told):
        """Copy what the kernel of `cupyflash.arrays.copies` copies."""
        table = told.view(copies._ROW)
        begin, unit = 0, copies.UNIT
        assert threads * copies.UNITS >= table["end"][-1]
        for row in table:
            to, source, width = (int(row[name]) for name in ("to", "from", "width"))
            assert not to % unit
            assert not source % unit
            pitches = unit * int(row["pitch_to"]), unit * int(row["pitch_from"])
            count, rest = divmod(int(row["end"]) - begin, width)
            assert not rest
            for n in range(count):
                ctypes.memmove(to + n * pitches[0], source + n * pitches[1], unit * width)
            begin = int(row["end"])

    def current_stream(self):
        pointer = getattr(self._stream, "pointer", 0)
        made = SimpleNamespace(ptr=pointer, wait_event=lambda event: None)
        made.is_capturing, made.synchronize = (lambda: False), (lambda: None)
        return made

    @contextmanager
    def stream(self, pointer):
        """Make another stream the current one of this thread."""
        self._stream.pointer = pointer
        yield
        self._stream.pointer = 0

    def ascontiguousarray(self, x, dtype=None):
        return self.asarray(np.ascontiguousarray(in_host(x), dtype))

    def asarray(self, host):
        if isinstance(host, self.ndarray):
            return host
        made = self.ndarray(host.shape, host.dtype)
        made.host[...] = host
        return made

    @property
    def Device(self):
        module = self

        class Device:
            def __init__(self, number):
                self.id = number

            def __enter__(self):
                self.before, module.device = module.device, self.id

            def __exit__(self, *_):
                module.device = self.before

        return Device


@contextmanager
def for_records(monkeypatch):
    """Stand in for CuPy while a record says on which GPU it was made: one H200."""
    cupy = HostCupy()
    cupy.cuda.runtime.driverGetVersion = lambda: 13000
    cupy.cuda.runtime.getDeviceCount = lambda: 1
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cuda_device.of.cache_clear()
    yield
    cuda_device.of.cache_clear()


def copy_rows(to, pitch_to, source, pitch, width, count):
    """Copy what `cudaMemcpy2D` copies."""
    assert width <= min(pitch, pitch_to)
    for n in range(count):
        ctypes.memmove(to + n * pitch_to, source + n * pitch, width)


def convert_rows(*arguments, size):
    """Write sums of rows, four elements at a time, as a kernel that is told where rows begin."""
    arrays = [x for x in arguments if not isinstance(x, int)]
    *pitches, quads = (x for x in arguments if isinstance(x, int))
    count, rest = divmod(size, quads)
    assert not rest
    rows = []
    for array, pitch in zip(arrays, pitches, strict=True):
        assert array.data.ptr % min(16, 4 * array.itemsize) == 0
        nbytes = (pitch * (count - 1) + 4 * quads) * array.itemsize
        memory = np.frombuffer((ctypes.c_char * nbytes).from_address(array.data.ptr), array.dtype)
        steps = pitch * array.itemsize, array.itemsize
        rows.append(np.lib.stride_tricks.as_strided(memory, (count, 4 * quads), steps))
    *summands, to = rows
    to[...] = functools.reduce(np.add, summands)


def _aligned(size):
    """Return bytes that begin at a multiple of 512, as those of CuPy's pool do."""
    held = np.zeros(size + 512, np.uint8)
    return held[-held.ctypes.data % 512 :]
