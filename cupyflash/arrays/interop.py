"""Arrays as users pass them, from NumPy or by DLPack from others, and the memory they share."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Protocol

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..hints.install import CUPY, ML_DTYPES
from .device_arrays import address, device_of, from_dlpack, is_device_array
from .dtypes import FLOATS, WORDS

Array = np.ndarray[Any, Any]


class DLPackArray(Protocol):
    """An array of NumPy, CuPy or another library that exports DLPack.

    Libraries that export it have `__dlpack__`, too. It is no part of this type: by NumPy's own
    annotations, arrays of Booleans do not have it.
    """

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the kind and the number of the device where it lives."""


def array(value: Any, name: str) -> Array:
    """Return an argument as a NumPy or CuPy array that shares its memory.

    Raises
    ------
    ArgumentTypeError
        If it is not an array, or is on a device for which there are no kernels.
    """
    if type(value) is not np.ndarray:
        _check_kind(value, name)
    if isinstance(value, np.ndarray):
        if value.ndim > MOST_AXES:
            raise too_many_axes(value.ndim, name)
        return value
    if is_device_array(value):
        return _of_device(value, name)
    if not hasattr(value, "__dlpack__"):
        came = type(value).__name__
        if isinstance(value, np.generic):
            came = f"a scalar of {came}"
        raise ArgumentTypeError(
            f"{name}: got {came}; expected a NumPy array, or an array that exports DLPack. "
            f"{_conversion(value)}"
        )
    if hasattr(value, "__torch_function__") and _full_name(value) not in _PLAIN_TENSORS:
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}, a subclass of tensors; expected a plain "
            "torch.Tensor. If its memory holds its values, pass its .as_subclass(torch.Tensor)."
        )
    if getattr(value, "requires_grad", False) is True:
        raise ArgumentTypeError(
            f"{name}: got a tensor that requires a gradient, but none flows through here; pass "
            "its .detach(). Gradients flow through q, k, v, bias, sink and, in score_mod, "
            "cupyflash.lookup(tensor, learned=True) of cupyflash.torch.attention."
        )
    if not hasattr(value, "__dlpack_device__"):  # a tracer of JAX
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}, a traced array, whose elements are not known "
            "yet; expected a constant. Make it with NumPy, or outside of the function that is "
            "traced."
        )
    try:
        kind = int(value.__dlpack_device__()[0])
    except _DLPACK_FAILURES as error:
        raise _refused(value, name, error) from None
    if kind in _DLPACK_DEVICE:
        return _of_device(_device_from_dlpack(value, name), name)
    if kind not in (1, 3):  # kDLCPU, kDLCUDAHost
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__} in device memory (DLPack device type {kind}); "
            "expected an array in host memory or on an NVIDIA GPU. Copy it to the CPU first."
        )
    try:
        return np.from_dlpack(value)
    except _DLPACK_FAILURES:
        return _of_ml_dtypes(value, name)


def _check_kind(value: Any, name: str) -> None:
    """Refuse arrays that mean more than their numbers: a mask, a unit, another product."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            f"{name}: got a masked array; expected a plain array. Pass its .data, and say by "
            "mask= what to attend to (True = attend)."
        )
    if isinstance(value, np.matrix):
        raise ArgumentTypeError(
            f"{name}: got a numpy.matrix; expected a NumPy array. Convert it with np.asarray."
        )
    _check_no_unit(value, name)


def _check_no_unit(value: Any, name: str) -> None:
    if hasattr(value, "units") or hasattr(value, "unit"):
        numbers = "magnitude" if hasattr(value, "magnitude") else "value"
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}, whose numbers have a unit; expected plain "
            f"numbers, because the result would lose the unit. Pass its .{numbers}."
        )


MOST_AXES = 32  # that NumPy can broadcast at once, with several arrays


def too_many_axes(came: int, name: str) -> ArgumentError:
    """Return the error about an array of more than `MOST_AXES` axes."""
    return ArgumentError(
        f"{name}: got {came} axes; expected at most {MOST_AXES}. Join leading axes: "
        "x.reshape(-1, *x.shape[-3:])."
    )


def _conversion(value: Any) -> str:
    """Return in words how something becomes a NumPy array."""
    if hasattr(value, "toarray"):  # SciPy's sparse matrices, of which np.asarray makes an object
        return "Convert it with .toarray()."
    if type(value).__module__.partition(".")[0] in ("h5py", "zarr"):  # arrays in files
        return (
            "Read it into memory with np.asarray; or, for a streamed call, copy it once into a "
            "file that NumPy maps: "
            'y = np.lib.format.open_memmap("x.npy", "w+", x.dtype, x.shape), and write y[n] = x[n] '
            "for every n."
        )
    return "Convert it with np.asarray."


_DLPACK_DEVICE = (2, 13)  # kDLCUDA, kDLCUDAManaged
_PLAIN_TENSORS = "torch.Tensor", "torch.nn.parameter.Parameter"


def _full_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def of_device(**named: Any) -> list[Any]:
    """Return arrays of other libraries in device memory as CuPy's, and anything else as it is."""
    values = list(named.values())
    if isinstance(values[0], np.ndarray) or is_device_array(values[0]):
        return values  # then the others must be such arrays, too
    for n, (name, value) in enumerate(named.items()):
        device = getattr(value, "__dlpack_device__", None)
        if device is not None and not isinstance(value, np.ndarray):
            try:
                if int(device()[0]) in _DLPACK_DEVICE:
                    values[n] = array(value, name)
            except _DLPACK_FAILURES:
                pass  # it is refused where it is read
    return values


def _of_device(value: Any, name: str) -> Array:
    """Return a CuPy array whose elements kernels can read."""
    if value.ndim > MOST_AXES:
        raise too_many_axes(value.ndim, name)
    steps = [stride for stride, size in zip(value.strides, value.shape, strict=True) if size > 1]
    if value.size and any(x % value.itemsize for x in (address(value), *steps)):
        raise ArgumentError(
            f"{name}: got an array whose elements do not lie at multiples of their size (address "
            f"{address(value):#x}, strides {value.strides}); expected an aligned array, such as a "
            "copy of it."
        )
    result: Array = value
    return result


def _device_from_dlpack(value: Any, name: str) -> Any:
    try:
        return from_dlpack(value)
    except (ImportError, *_DLPACK_FAILURES) as error:
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__} in device memory (DLPack device type 2), which "
            f"CuPy could not take ({error}); expected a CuPy array, or an array in host memory. "
            f"Install CuPy ({CUPY}), or copy it to the CPU."
        ) from None


def one_home(named: dict[str, Any]) -> int | None:
    """Return the device of all arrays of a call; None for host memory.

    Raises
    ------
    ArgumentTypeError
        If they are in different places.
    """
    homes = {name: device_of(x) for name, x in named.items()}
    first = next(iter(homes))
    for name, home in homes.items():
        if home != homes[first]:
            remedy = "cupy.asarray" if home is None else "cupy.asnumpy"
            if home is not None and homes[first] is not None:
                remedy = f"cupy.asarray, with device {homes[first]} current,"
            raise ArgumentTypeError(
                f"{name}: got an array in {_place(home)}, but {first} is in "
                f"{_place(homes[first])}; expected all arrays of a call in one place. Move one of "
                f"them: {remedy} makes a copy."
            )
    return homes[first]


def _place(home: int | None) -> str:
    return "host memory" if home is None else f"the memory of GPU {home}"


_DLPACK_FAILURES = (BufferError, RuntimeError, TypeError, ValueError)


# What is said of a tensor that exists only while torch.func transforms a function.
TRANSFORMED = (
    "got a tensor of torch.vmap or of another transform of torch.func, whose elements cannot be "
    "read here; expected a plain tensor. Use it outside of the transform, or call the function in "
    "a loop instead of torch.vmap."
)


def is_transformed(value: Any) -> bool:
    """Whether a value is such a tensor."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return False
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def _refused(value: Any, name: str, reason: object) -> ArgumentTypeError:
    if is_transformed(value):
        return ArgumentTypeError(f"{name}: {TRANSFORMED}")
    return ArgumentTypeError(
        f"{name}: got {type(value).__name__}, which DLPack could not convert ({reason}); expected "
        f"{WORDS} in host memory. Convert it, or pass a NumPy array."
    )


class _Reexport:
    """A DLPack exporter of one capsule, for NumPy, which knows no types of ml_dtypes."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


_UNSIGNED = 1  # DLDataTypeCode
# Types of ml_dtypes that NumPy neither exports nor takes, by their code and bits in DLPack.
_OF_ML_DTYPES = {
    (4, 16): "bfloat16", (10, 8): "float8_e4m3fn", (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2", (13, 8): "float8_e5m2fnuz",
}  # fmt: skip


def _type_of(capsule: Any) -> Any:
    """Return a view of the code and the bits of a capsule's element type."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLTensor: data pointer (8 bytes), device (8), ndim (4), then dtype: code, bits, lanes.
    return (ctypes.c_uint8 * 2).from_address(get_pointer(capsule, b"dltensor") + 20)


def _capsule_of_ml_dtypes(array: Array) -> Any:
    """Export an array of a type of ml_dtypes as integers, and then change the element type."""
    codes = {name: code for (code, _), name in _OF_ML_DTYPES.items()}
    capsule = array.view(f"u{array.itemsize}").__dlpack__()
    _type_of(capsule)[0] = codes[array.dtype.name]
    return capsule


def _of_ml_dtypes(value: Any, name: str) -> Array:
    """Take an array of such a type by telling NumPy that its elements are integers."""
    try:
        capsule = value.__dlpack__()
        code_and_bits = _type_of(capsule)
    except _DLPACK_FAILURES as error:
        raise _refused(value, name, error) from None
    code, bits = code_and_bits
    if (code, bits) not in _OF_ML_DTYPES:
        raise _refused(value, name, f"NumPy has no {bits}-bit elements of type code {code}")
    kind = _OF_ML_DTYPES[code, bits]
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            f"{name}: got {kind}, which needs the package ml_dtypes: {ML_DTYPES}."
        ) from None
    code_and_bits[0] = _UNSIGNED
    try:
        integers = np.from_dlpack(_Reexport(capsule))
    except _DLPACK_FAILURES as error:
        raise _refused(value, name, error) from None
    code_and_bits[0] = code  # in the exporter's struct, which exists as long as `integers`
    return integers.view(getattr(ml_dtypes, kind))


def to_library_of(value: Any, like: Any) -> Any:
    """Return a NumPy or CuPy array, or a tuple of them, as arrays of the library of `like`.

    Raises
    ------
    ArgumentTypeError
        If `like` is not an array, or its library does not take the arrays by DLPack.
    """
    if isinstance(value, tuple):
        made = [to_library_of(each, like) for each in value]
        result: Any = type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        if learned := getattr(value, "dlookups", None):
            result.dlookups = {key: to_library_of(each, like) for key, each in learned.items()}
        return result
    if value is None or (isinstance(like, np.ndarray) and isinstance(value, np.ndarray)):
        return value
    if is_device_array(like) and is_device_array(value):
        return value
    library = _namespace(like)
    exporter = value
    if isinstance(value, np.ndarray) and value.dtype.name in _OF_ML_DTYPES.values():
        exporter = _Reexport(_capsule_of_ml_dtypes(value))
    try:
        return library.from_dlpack(exporter)
    except (AttributeError, *_DLPACK_FAILURES) as error:
        raise ArgumentTypeError(
            f"like: got {type(like).__name__}, whose library does not take an array of "
            f"{value.dtype} in {_place(device_of(value))} ({error}); expected one of a library "
            "that takes such arrays by DLPack, on the same device."
        ) from None


def _namespace(like: Any) -> Any:
    """Return the module of an array's library, which has from_dlpack."""
    if isinstance(like, np.ndarray):
        return np
    if hasattr(like, "__array_namespace__"):
        return like.__array_namespace__()
    library = sys.modules.get(type(like).__module__.partition(".")[0])
    if not hasattr(like, "__dlpack__") or not hasattr(library, "from_dlpack"):
        raise ArgumentTypeError(
            f"like: got {type(like).__name__}; expected an array of a library with from_dlpack, "
            "such as NumPy, CuPy, PyTorch or JAX."
        )
    return library


def floats(value: Any, name: str) -> Array:
    """Return an argument as an array of one of the four float dtypes."""
    result = array(value, name)
    if result.dtype.name not in FLOATS or not result.dtype.isnative:
        # A tensor of PyTorch has no .astype.
        convert = ".astype" if hasattr(value, "astype") or not hasattr(value, "to") else ".to"
        of_codes = _remedy_of_codes(name, result.dtype.name)
        remedy = f"{of_codes}Convert {'numbers' if of_codes else 'it'} with {convert}(...)."
        if name == "bias" and result.dtype == np.bool_:  # .astype would add 1 and 0 to the scores
            remedy = "Pass it as mask= (True = attend)."
        raise ArgumentTypeError(
            f"{name}: got dtype {result.dtype}; expected {WORDS} (bfloat16 is the type of "
            f"ml_dtypes) in native byte order. {remedy}"
        )
    return result


def _remedy_of_codes(name: str, dtype: str) -> str:
    """Return what to do with q, k or v, or arrays like them, if they may be codes."""
    if dtype.startswith("float8"):
        said = "Codes of 8 bits are"
    elif name in ("q", "k", "v") and dtype == "uint8":
        said = "Bytes that are codes of float8, with qkv_dtype='float8_e4m3fn', are"
    elif name in ("k", "v") and dtype == "int8":
        return "Codes of int8 are for cupyflash.attention_cached, with their scales. "
    else:
        return ""
    said += " for cupyflash.attention and cupyflash.attention_varlen, with their scales; "
    return said + "keep copies of 16 bits for gradients. " * (name in ("q", "k", "v"))


def outputs(targets: dict[str, tuple[Any, tuple[int, ...], Any]], inputs: dict[str, Array]) -> None:
    """Check the arrays that a call writes: kind, shape, dtype, and that they share no element.

    `targets` maps a name to (array, expected shape, expected dtype).
    """
    for name, (target, shape, dtype) in targets.items():
        on_device = is_device_array(target)
        plain = isinstance(target, np.ndarray) and not isinstance(
            target, (np.ma.MaskedArray, np.matrix)
        )
        if not plain and not on_device:
            raise ArgumentTypeError(
                f"{name}: got {type(target).__name__}; expected a NumPy array to write to. For an "
                "array of another library, np.from_dlpack makes one that shares its memory."
            )
        if type(target) is not np.ndarray:
            _check_no_unit(target, name)
        if target.shape != shape or target.dtype != dtype:
            raise ArgumentError(
                f"{name}: got shape {target.shape}, dtype {target.dtype}; expected shape {shape}, "
                f"dtype {dtype}, for instance np.empty({shape}, {dtype.name})."
            )
        if on_device:
            _of_device(target, name)
        elif not target.flags.writeable:
            raise ArgumentError(
                f"{name}: got a read-only array; expected one that can be written to, such as "
                "a copy."
            )
        if repeats_an_address(target):
            raise ArgumentError(
                f"{name}: got an array with several elements at one address (strides "
                f"{target.strides}, perhaps a broadcast view); expected an address of its own for "
                "every element, as np.empty gives."
            )
    if targets:
        one_home(inputs | {name: held for name, (held, _, _) in targets.items()})
    named = inputs | {name: held for name, (held, _, _) in targets.items()}
    spans = {name: span(held) for name, held in named.items()}
    names = list(targets)
    for place, name in enumerate(names):
        low, high = spans[name]
        for other in (*names[:place], *inputs):
            if low >= spans[other][1] or high <= spans[other][0]:
                continue
            if share_memory(targets[name][0], named[other]):
                raise ArgumentError(
                    f"{name} and {other} share memory; expected an output that overlaps no input "
                    "and no other output. Pass a fresh array, or leave it out."
                )


def span(x: Any) -> tuple[int, int]:
    """Return the first address of an array, and that behind its last one."""
    low = high = address(x)
    if not x.size:
        return low, high
    if x.flags.c_contiguous:
        return low, high + int(x.nbytes)
    reaches = [stride * (size - 1) for size, stride in zip(x.shape, x.strides, strict=True)]
    low += sum(reach for reach in reaches if reach < 0)
    high += sum(reach for reach in reaches if reach > 0)
    return low, high + int(x.itemsize)


def share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays share an element. What cannot be decided soon counts as shared."""
    a, b = _shadow(a), _shadow(b)
    if not np.may_share_memory(a, b):
        return False
    try:
        # NumPy's stubs know two of the values that max_work may have.
        return bool(np.shares_memory(a, b, max_work=100_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Says where the elements of an array lie, without reading one."""

    def __init__(self, x: Any) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (address(x), True),
            "shape": x.shape,
            "strides": x.strides,
            "typestr": f"|V{x.itemsize}",
        }


def _shadow(x: Any) -> Array:
    """Return an array whose addresses are those of a CuPy array; its elements cannot be read."""
    if not is_device_array(x):
        result: Array = x
        return result
    return np.asarray(_Addresses(x)) if x.size else np.empty(x.shape, x.dtype)


def repeats_an_address(x: Array) -> bool:
    """Whether two elements of an array lie at one address (or cannot soon be told apart)."""
    if not x.size:
        return False
    reach = x.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if length == 1:
            continue
        if stride < reach:
            break
        reach += stride * (length - 1)
    else:
        return False
    if x.size > 100_000 or not all(x.strides[axis] for axis in range(x.ndim) if x.shape[axis] > 1):
        return True
    places = np.zeros(x.shape, np.int64)
    for axis, (stride, length) in enumerate(zip(x.strides, x.shape, strict=True)):
        places += (np.arange(length) * stride).reshape((-1,) + (1,) * (x.ndim - axis - 1))
    sorted_places = np.sort(places, axis=None)
    return bool((np.diff(sorted_places) < x.itemsize).any())
