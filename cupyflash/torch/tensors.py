"""PyTorch tensors as NumPy or CuPy arrays in the same memory, and refusals of other tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..arrays import device_arrays
from ..arrays.dtypes import FLOATS, WORDS
from ..arrays.interop import TRANSFORMED, is_transformed
from ..backends import cpu
from ..errors import ArgumentError, ArgumentTypeError
from ..hints.install import ML_DTYPES

_FLOATS = tuple(getattr(torch, name) for name in FLOATS)
PLAIN = torch.Tensor, torch.nn.Parameter
SEEDS = torch.int64, torch.uint64


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    name = name_of(dtype)
    if dtype not in _OF_BYTES:
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentTypeError(
            f"got {name}, which needs the package ml_dtypes: {ML_DTYPES}."
        ) from None
    return np.dtype(getattr(ml_dtypes, name))


# Types that NumPy does not know, and integers of their size, as which their memory is shared.
_OF_BYTES = {
    torch.bfloat16: torch.int16, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8,
}  # fmt: skip
_CODES = torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, which is also NumPy's."""
    return str(dtype).removeprefix("torch.")


def may_be_codes(x: Any) -> bool:
    """Whether a tensor holds codes of 8 or 4 bits, or bytes that may be some."""
    return isinstance(x, torch.Tensor) and x.dtype in _CODES


def check(named: Mapping[str, torch.Tensor | None], floats: tuple[str, ...] = ()) -> torch.device:
    """Return the device of all tensors of a call, of which those in `floats` must be floats.

    Raises
    ------
    ArgumentTypeError
        If something is not a tensor with strides, is of a subclass whose memory may not hold its
        values, or is on another device than the first.
    """
    first = ""
    home = None
    for name, x in named.items():
        if x is None:
            continue
        if type(x) is not torch.Tensor:
            refuse_unlike(name, x)
        if x.layout is not torch.strided or x.is_nested:
            raise ArgumentTypeError(f"{name}: {_layout(x)}")
        if name in floats and x.dtype not in _FLOATS:
            raise ArgumentTypeError(
                f"{name}: got a tensor of {x.dtype}; expected {WORDS}. Convert it with .to(dtype)."
            )
        if home is None:
            first, home = name, x.device
            if not (x.is_cpu or x.is_cuda or x.is_meta):
                raise ArgumentTypeError(
                    f"{name}: got a tensor on device {home}; expected one on the CPU or on an "
                    'NVIDIA GPU. Copy it with .to("cpu").'
                )
        elif x.device != home:
            raise ArgumentTypeError(
                f"{name}: got a tensor on device {x.device}, but {first} is on {home}; expected "
                f'all tensors of a call on one device. Copy it with .to("{home}").'
            )
    assert home is not None
    return home


def has_traced(named: Iterable[torch.Tensor | None]) -> bool:
    """Return whether PyTorch traces operators with one of a call's tensors, which were checked."""
    return any(x is not None and type(x) not in PLAIN for x in named)


def has_no_elements(x: Any) -> bool:
    """Return whether PyTorch asks for shapes alone: a tensor is fake, or on the meta device."""
    kind = type(x)
    is_fake = kind is not torch.Tensor and isinstance(x, _traced())
    return is_fake or bool(getattr(x, "is_meta", False))


@functools.cache
def _traced() -> tuple[type, ...]:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return FakeTensor, FunctionalTensor


def refuse_unlike(name: str, x: Any) -> None:
    """Refuse what is not a tensor, and a subclass of tensors whose memory may not be its values."""
    kind = type(x)
    if kind in PLAIN:
        return
    got = f"{name}: got {kind.__name__}"
    if not isinstance(x, torch.Tensor):
        remedy = _OF_OTHERS.get(kind.__name__, "Convert it with torch.as_tensor.")
        raise ArgumentTypeError(f"{got}; expected a tensor. {remedy}")
    if x.is_nested:
        raise ArgumentTypeError(f"{name}: {_layout(x)}")
    if not isinstance(x, _traced()):
        remedy = _OF_SUBCLASSES.get(
            kind.__name__, "If its memory holds its values, pass its .as_subclass(torch.Tensor)."
        )
        raise ArgumentTypeError(f"{got}, a subclass; expected a plain torch.Tensor. {remedy}")


_OF_OTHERS = {
    "BlockMask": "Make one with torch.nn.attention.flex_attention.create_mask(x.mask_mod, None, "
    "None, *x.seq_lengths, device=q.device).",
}
_OF_SUBCLASSES = {
    "CausalBias": "Pass it as attn_mask to cupyflash.torch.scaled_dot_product_attention, or pass "
    "mask=masks.causal(), which is causal_lower_right, or mask=masks.causal(0), which is "
    "causal_upper_left.",
    "MaskedTensor": "Pass its .get_data(), and say by a mask what to attend to (True = attend).",
    "DTensor": "Pass its .to_local(), or its .full_tensor().",
    "AsyncCollectiveTensor": "Pass its .wait().",
    "UninitializedParameter": "Materialise it first.",
}


def _layout(x: torch.Tensor) -> str:
    if x.is_nested:
        return (
            "got a nested tensor; expected one with strides. Pass its .values(), whose shape is "
            "(total, H, D), as x.swapaxes(0, 1) to attention_varlen, with its .offsets()."
        )
    return f"got a tensor of layout {x.layout}; expected a dense one. Convert it with .to_dense()."


_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def _is_recorded() -> bool:
    """Return whether `make_fx` records operators on tensors that have elements."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def is_traced() -> bool:
    """Return whether calls become nodes of a graph, by `torch.compile` or by `make_fx`."""
    return torch.compiler.is_compiling() or (_modes() > 0 and _is_recorded())


def array_of(x: Any) -> Any:
    """Return a tensor as an array in the same memory, and anything else unchanged.

    A graph that `make_fx` records would lack what is computed with the array.
    """
    if _modes() and isinstance(x, torch.Tensor) and _is_recorded():
        raise ArgumentTypeError(
            "got a tensor while make_fx records operators; expected none, because this function is "
            "no operator of PyTorch, and the graph would lack it. Call it outside of the graph."
        )
    if type(x) is not torch.Tensor:
        if not isinstance(x, torch.Tensor):
            return x
        if type(x) not in PLAIN:
            refuse_unlike("x", x)  # with a better name where arguments are checked
            raise ArgumentTypeError(
                f"got {type(x).__name__}, which has no elements; expected a tensor with elements."
            )
    if x.is_cuda:
        dtype = _numpy_dtype(x.dtype)
        strides = tuple([step * dtype.itemsize for step in x.stride()])
        return device_arrays.borrowed(
            x.data_ptr(), tuple(x.shape), dtype, strides, x.device.index, x
        )
    if (integers := _OF_BYTES.get(x.dtype)) is not None:
        return x.view(integers).numpy(force=True).view(_numpy_dtype(x.dtype))
    return x.numpy(force=True)  # faster than .detach().numpy()


def tensor_of(array: Any) -> torch.Tensor:
    """Return an array in host memory as a tensor in the same memory."""
    if array.dtype.kind == "V":  # NumPy's kind of bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def empty_in_order_of(q: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return an uninitialised tensor, whose axes have the order in memory of those of `q`.

    `shape` may have more leading axes than `q`. These have the largest strides, and so have axes
    along which `q` is broadcast.
    """
    if len(shape) == q.ndim and q.is_contiguous():
        return q.new_empty(shape)
    steps = [2**62] * (len(shape) - q.ndim) + [step or 2**62 for step in q.stride()]
    order = sorted(range(len(shape)), key=lambda axis: (-steps[axis], shape[axis] == 1))
    made = q.new_empty([shape[axis] for axis in order])
    return made.permute([order.index(axis) for axis in range(len(shape))])


def lse_dtype(q: torch.Tensor) -> torch.dtype:
    """Return the dtype of the log-sum-exp for queries."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def to_autocast(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v, converted as PyTorch's attention does if torch.autocast is on."""
    kind = "cuda" if q.is_cuda else "cpu"
    if q.is_meta or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    kept = torch.float64, *_CODES
    q, k, v = (x if x.dtype in kept else x.to(dtype) for x in (q, k, v))
    return q, k, v


def stream_of(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which PyTorch's current stream and its device are also CuPy's.

    Calls on CPUs are computed by PyTorch's threads (GNU's OpenMP): they spin for a while after
    PyTorch's own functions, and others would share the cores with them.
    """
    if device.type != "cuda":
        return cpu.threads_of(_LIBRARIES)
    return device_arrays.on_stream(raw_stream(device.index), device.index)


_LIBRARIES = Path(torch.__file__).parent / "lib"


def _stream_of_object(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The pointer of PyTorch's current stream on a device. The public way makes an object first.
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of_object)


# Whether PyTorch's current stream records a graph. The public function is one in Python.
is_capturing = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def records_graph(stream: int) -> bool:
    """Return whether PyTorch's current stream, at this address, records a graph.

    The driver is not asked for the legacy default stream, which cannot.
    """
    return stream != 0 and bool(is_capturing())


def same_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse q, k and v of different dtypes, with the remedy for tensors."""
    if not q.dtype == k.dtype == v.dtype:
        raise ArgumentTypeError(
            f"got q {q.dtype}, k {k.dtype}, v {v.dtype}; expected one dtype. Convert with "
            f".to({q.dtype})."
        )


def refuse_gradients(named: Mapping[str, Any], remedy: str) -> None:
    """Refuse tensors of transforms, and those that require a gradient, where neither is known."""
    refuse_transforms(named)
    if not torch.is_grad_enabled():
        return
    for name, x in named.items():
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise ArgumentError(f"{name}: got a tensor that requires a gradient, but {remedy}")


def refuse_transforms(named: Mapping[str, Any]) -> None:
    """Refuse tensors of transforms of torch.func, in a function that has no rule for them."""
    if is_transforming():
        for name, x in named.items():
            if is_transformed(x):
                raise ArgumentTypeError(f"{name}: {TRANSFORMED}")


# Whether a transform of torch.func is active.
is_transforming = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


def refuse_meta(home: torch.device) -> None:
    """Refuse meta tensors, in a function that is not an operator of PyTorch."""
    if home.type == "meta":
        raise ArgumentTypeError(
            "q: got a meta tensor, which has no elements; expected one on the CPU or on a GPU."
        )


def of_results(results: Any) -> Any:
    """Return an array in host memory, or a tuple of them, as tensors."""
    return tuple(map(tensor_of, results)) if isinstance(results, tuple) else tensor_of(results)
