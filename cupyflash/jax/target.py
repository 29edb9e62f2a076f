"""The target of XLA's typed FFI by which programs call functions of NumPy or CuPy arrays.

A call is a primitive of JAX whose parameter is the function. Its lowering gives the function a
number, which is the attribute of the call in the program; XLA calls one handler, which finds the
function by its number. A function lives as long as the program. Arrays are made in XLA's memory, so
that nothing is copied; on a GPU, work goes to XLA's stream, and nothing waits for it.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..arrays import device_arrays
from ..arrays.cuda_device import current, has_cupy
from ..errors import ArgumentError, ArgumentTypeError
from ..gpu.relaunch import Relaunches
from ..hints.install import CUPY
from . import layouts
from .frame import EXECUTE, Frame, Handler

_NAME = "cupyflash"
# Numbers are drawn anew in each process: a program that one keeps on disk is not found by another.
_numbers = itertools.count(secrets.randbits(62))
DEVICE_BYTES = "float8_e4m3fn", "float8_e5m2"  # CuPy has no such arrays, so they come as bytes


class Rules(Protocol):
    """Derivatives of a function. `results` have shapes and dtypes; JAX's `Zero` is a zero."""

    def jvp(
        self, primals: Sequence[Any], tangents: Sequence[Any], results: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return results and their tangents, the latter by functions that can be transposed."""

    def transpose(self, cotangents: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
        """Return cotangents of operands of which the function is linear, and None for others."""


class Function(NamedTuple):
    """A function of arrays.

    Attributes
    ----------
    run : callable
        Takes the operands, arrays for the results in XLA's memory, unless nothing is traced, and
        the results' shapes. It returns the results: these arrays, or others, which are copied
        there.
    rules : Rules, optional
        Its derivatives. Without them, they are those of what calls it, by `jax.custom_jvp`, say.
    never : str
        Why nothing computes the function, which then stands for its transpose, or "".
    like : tuple of int or None
        For each result, which operand's memory order it has; None, or none: C order.
    """

    run: Callable[[Sequence[Any], tuple[Any, ...], Sequence[tuple[int, ...]]], Sequence[Any]]
    rules: Rules | None = None
    never: str = ""
    like: tuple[int | None, ...] = ()


class _Memory(NamedTuple):
    """What arrays in XLA's memory are made of: shape, dtype, strides and type of the bytes."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    bytes: Any

    @classmethod
    def of(cls, aval: Any, order: tuple[int, ...]) -> _Memory:
        """Return that of arrays of a shape and a dtype, with axes in an order of memory."""
        dtype = np.dtype(aval.dtype)
        strides, step = [0] * len(order), dtype.itemsize
        for axis in reversed(order):
            strides[axis] = step
            step *= max(aval.shape[axis], 1)
        held = ctypes.c_char * (math.prod(aval.shape) * dtype.itemsize)
        return cls(aval.shape, dtype, tuple(strides), held)

    def in_host(self, address: int) -> Any:
        """Return the array of NumPy at an address."""
        if not address:  # of no elements
            return np.empty(self.shape, self.dtype)
        memory = self.bytes.from_address(address)
        return np.ndarray(self.shape, self.dtype, memory, strides=self.strides)

    def on_device(self, address: int, device: int) -> Any:
        """Return the array of CuPy at an address; one of no elements has none."""
        dtype = np.dtype(np.uint8) if self.dtype.name in DEVICE_BYTES else self.dtype
        return device_arrays.borrowed(address, self.shape, dtype, self.strides, device, None)


class _Entry:
    """A call in a program: its function, and shapes and memory orders of the arrays it gets."""

    def __init__(self, function: Function, operands: Sequence[Any], results: Sequence[Any]) -> None:
        self._run = function.run
        self._operands = tuple(_Memory.of(*each) for each in operands)
        self._results = tuple(_Memory.of(*each) for each in results)
        self._shapes = tuple(x.shape for x in self._results)
        arrays = *self._operands, *self._results
        self._relaunches = Relaunches([ctypes.sizeof(x.bytes) for x in arrays])

    def on_cpu(self, frame: Frame) -> None:
        """Make a call on the CPU."""
        addresses = frame.operands(len(self._operands))
        operands = [x.in_host(a) for x, a in zip(self._operands, addresses, strict=True)]
        for x in operands:
            x.flags.writeable = False  # XLA may read it again
        addresses = frame.results(len(self._results))
        self._make(operands, [x.in_host(a) for x, a in zip(self._results, addresses, strict=True)])

    def on_gpu(self, frame: Frame) -> None:
        """Make a call on a GPU: on its device and stream, in XLA's memory."""
        count = len(self._operands)
        addresses = frame.operands(count) + frame.results(len(self._shapes))
        stream = frame.stream()
        if self._relaunches.launch(stream, addresses):
            return
        device = frame.device()
        with device_arrays.on_stream(stream, device):
            memory = zip((*self._operands, *self._results), addresses, strict=True)
            arrays = [x.on_device(a, device) for x, a in memory]
            tape = self._relaunches.tape(stream, addresses)
            if tape is None:
                self._make(arrays[:count], arrays[count:])
                return
            with tape.recording():
                all_written = self._make(arrays[:count], arrays[count:])
            if all_written:
                self._relaunches.keep(stream, tape, addresses)

    def _make(self, operands: list[Any], results: list[Any]) -> bool:
        """Make a call; return whether results were written where they belong, and none copied."""
        made = self._run(operands, tuple(results), self._shapes)
        copied = [(result, x) for result, x in zip(results, made, strict=True) if x is not result]
        for result, x in copied:
            result[...] = x
        return not copied


class _Held:
    """What a program keeps of a call. A call that runs while its program goes finds it, too."""

    def __init__(self, entry: _Entry) -> None:
        self._entry = entry

    def __del__(self) -> None:
        _leaving.append(self._entry)


_entries: weakref.WeakValueDictionary[int, _Entry] = weakref.WeakValueDictionary()
_leaving: deque[_Entry] = deque(maxlen=64)  # more than there are programs under way on a device


def _handler(method: str) -> Any:
    def handle(address: int) -> int:
        frame = Frame(address)
        try:
            if frame.is_question:
                frame.answer()
                return 0
            if frame.stage != EXECUTE:
                return 0
            entry = _entries.get(frame.number())
            if entry is None:
                raise ArgumentError(
                    "got a program of another process; expected one of this process, whose "
                    "functions it calls. Compile it here: jax.jit does, without jax.export."
                )
            getattr(entry, method)(frame)
        except BaseException as error:  # noqa: BLE001 (XLA's frames are not Python's)
            is_argument = isinstance(error, (ArgumentError, ArgumentTypeError))
            kind = "" if is_argument else f"{type(error).__name__}: "
            return frame.error(f"{kind}{error}", is_argument)
        return 0

    return Handler(handle)


_handlers = {"cpu": _handler("on_cpu"), "cuda": _handler("on_gpu")}
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}  # under which XLA looks for a platform's targets
_registered: set[str] = set()
_lock = threading.Lock()


def _register(platform: str) -> None:
    with _lock:
        if platform in _registered:
            return
        # A target that XLA refuses is an error here, and not of every program: the platform has
        # been looked for already.
        jax.local_devices(backend=platform)
        pointer = ctypes.cast(_handlers[platform], ctypes.c_void_p).value
        target = jax.ffi.pycapsule(pointer)
        jax.ffi.register_ffi_target(_NAME, target, platform=_XLA_NAMES[platform])
        _registered.add(platform)


_call = Primitive(_NAME)
_call.multiple_results = True


def bind(
    function: Function, results: Sequence[Any], method: str, operands: Sequence[Any]
) -> list[Any]:
    """Call a function in a program.

    Parameters
    ----------
    function : Function
        What is called.
    results : sequence of jax.ShapeDtypeStruct
        Shapes and dtypes of what it returns.
    method : "sequential" or "expand_dims"
        What vmap does: as in `jax.pure_callback`.
    operands : sequence of jax.Array
        What it takes.
    """
    shapes = tuple((tuple(x.shape), np.dtype(x.dtype)) for x in results)
    made: list[Any] = _call.bind(
        *varying_alike(operands), function=function, results=shapes, method=method
    )
    return made


def varying_alike(operands: Sequence[Any]) -> list[Any]:
    """Return arrays that all vary over the axes of a mesh over which some of them do."""
    over = [jax.typeof(x).manual_axis_type.varying for x in operands]
    axes = frozenset().union(*over)
    return [
        jax.lax.pcast(x, tuple(sorted(axes - mine)), to="varying") if axes - mine else x
        for x, mine in zip(operands, over, strict=True)
    ]


@_call.def_impl
def _(*operands: Any, function: Function, results: Any, **_: Any) -> list[Any]:
    """Call a function at once where nothing is traced: XLA would compile a program for each."""
    if function.never:
        raise ArgumentError(function.never)
    device = _device_of(operands)
    if device.platform != "cpu":
        return _at_once_on_gpu(operands, function, results, device)
    shapes = [shape for shape, _ in results]
    made = function.run(list(map(np.asarray, operands)), (), shapes)
    with jax.default_device(device):
        return list(map(jax.numpy.asarray, made))


def _device_of(operands: Sequence[Any]) -> Any:
    """Return the device of a call at once, to which arrays go that nobody has put elsewhere.

    Arrays on several devices are gathered on the first one.
    """
    arrays = [x for x in operands if isinstance(x, jax.Array)]
    put = [x for x in arrays if x.committed] or arrays[:1]
    devices = sorted({at for x in put for at in x.devices()}, key=lambda at: at.id)
    if len({at.platform for at in devices}) > 1:
        raise ArgumentTypeError(
            f"got arrays on {' and '.join(map(str, devices))}; expected arrays on one device. Put "
            "them there: jax.device_put(x, jax.devices()[0])."
        )
    return devices[0]


def _check_gpu(came: str) -> None:
    """Refuse arrays on a GPU without CuPy."""
    if not has_cupy():
        raise ArgumentTypeError(
            f"{came}; expected arrays on the CPU, because CuPy is not installed, which the kernels "
            f"for GPUs need. Install it ({CUPY}), or put the arrays there: "
            "jax.device_put(x, jax.devices('cpu')[0])."
        )


def _at_once_on_gpu(
    operands: Sequence[Any], function: Function, results: Any, device: Any
) -> list[Any]:
    """Call a function on CuPy's current stream; DLPack lets streams wait for each other."""
    _check_gpu("got arrays on a GPU")
    operands = [
        x if isinstance(x, jax.Array) and x.devices() == {device} else jax.device_put(x, device)
        for x in operands
    ]
    with current(device.local_hardware_id):
        arrays = [
            device_arrays.from_dlpack(
                jax.lax.bitcast_convert_type(x, np.uint8) if x.dtype.name in DEVICE_BYTES else x
            )
            for x in operands
        ]
        made = map(
            jax.dlpack.from_dlpack, function.run(arrays, (), [shape for shape, _ in results])
        )
        return [
            jax.lax.bitcast_convert_type(x, dtype) if dtype.name in DEVICE_BYTES else x
            for x, (_, dtype) in zip(made, results, strict=True)
        ]


@_call.def_abstract_eval
def _(*operands: Any, results: Any, **_: Any) -> list[Any]:
    mesh = jax.sharding.get_abstract_mesh()
    how: list[dict[str, Any]] = [{} for _ in results]
    if not mesh.empty:
        specs = [jax.P(*(None,) * len(shape)) for shape, _ in results]
        how = [{"sharding": jax.sharding.NamedSharding(mesh, spec)} for spec in specs]
        how = [{**each, "manual_axis_type": operands[0].manual_axis_type} for each in how]
    return [jax.core.ShapedArray(*each, **more) for each, more in zip(results, how, strict=True)]


def _lowering(platform: str) -> Callable[..., Any]:
    lowered = jax.ffi.ffi_lowering(_NAME)

    def lower(ctx: Any, *operands: Any, function: Function, **_: Any) -> Any:
        if platform == "cuda":
            _check_gpu("got arrays of a program for a GPU")
        if function.never:
            raise ArgumentError(function.never)
        _register(platform)
        orders = list(map(layouts.order_of, operands, ctx.avals_in))
        of_results = [
            layouts.like(orders[n], len(aval.shape)) if n is not None else layouts.in_c(aval)
            for aval, n in itertools.zip_longest(ctx.avals_out, function.like)
        ]
        entry = _Entry(
            function,
            list(zip(ctx.avals_in, orders, strict=True)),
            list(zip(ctx.avals_out, of_results, strict=True)),
        )
        number = next(_numbers)
        _entries[number] = entry
        ctx.module_context.add_keepalive(_Held(entry))
        given = [
            layouts.transposed(ctx, *each)
            for each in zip(operands, ctx.avals_in, orders, strict=True)
        ]
        avals_out = [
            aval.update(shape=tuple(aval.shape[axis] for axis in order))
            for aval, order in zip(ctx.avals_out, of_results, strict=True)
        ]
        of_call = ctx.replace(avals_in=[aval for _, aval in given], avals_out=avals_out)
        made = lowered(of_call, *(value for value, _ in given), number=np.int64(number))
        back = zip(made, avals_out, map(layouts.inverse, of_results), strict=True)
        return [layouts.transposed(ctx, *each)[0] for each in back]

    return lower


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ArgumentTypeError(
        "got arrays of a program for a TPU or another machine; expected one for the CPU. Put the "
        "arrays there: jax.device_put(x, jax.devices('cpu')[0])."
    )


mlir.register_lowering(_call, _refuse, cacheable=False)
for _platform in _handlers:
    mlir.register_lowering(_call, _lowering(_platform), platform=_platform, cacheable=False)


def _map(
    operands: Sequence[Any], axes: Sequence[int | None], *, method: str, results: Any, **how: Any
) -> tuple[list[Any], list[int]]:
    """Call a function under vmap."""
    is_mapped = [axis is not None for axis in axes]
    first = [
        x if axis is None else jax.numpy.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    ]
    pairs = list(zip(first, is_mapped, strict=True))
    if method == "expand_dims":
        length = next(x.shape[0] for x, mapped in pairs if mapped)
        first = [x if mapped else x[None] for x, mapped in pairs]
        results = tuple(((length, *shape), dtype) for shape, dtype in results)
        made = _call.bind(*first, method=method, results=results, **how)
        return made, [0] * len(made)

    def one(_: Any, mapped: Sequence[Any]) -> tuple[Any, list[Any]]:
        of_one = iter(mapped)
        args = [next(of_one) if is_one else x for x, is_one in pairs]
        return (), _call.bind(*args, method=method, results=results, **how)

    _, made = jax.lax.scan(one, (), [x for x, mapped in pairs if mapped])
    return made, [0] * len(made)


batching.primitive_batchers[_call] = _map


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, function: Function, results: Any, **_: Any
) -> tuple[list[Any], list[Any]]:
    if function.rules is None:
        raise ArgumentError(
            "got a request for a derivative of a function of cupyflash.jax that has none in "
            "forward mode; expected one in reverse mode: use jax.grad or jax.vjp."
        )
    structs = [jax.ShapeDtypeStruct(*each) for each in results]
    return function.rules.jvp(primals, tangents, structs)


def _transpose(cotangents: Sequence[Any], *operands: Any, function: Function, **_: Any) -> Any:
    assert function.rules is not None  # only what `jvp` calls is transposed
    return function.rules.transpose(cotangents, operands)


ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
