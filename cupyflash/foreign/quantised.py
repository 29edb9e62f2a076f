"""Quantised tensors of torchao, as codes with scales."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError, ArgumentTypeError
from .blocks import int4

Array = np.ndarray[Any, Any]
_GROUP = 32  # columns of int4 with a scale
_NUMBERS = "Take quantize of its .dequantize()."


class Codes(NamedTuple):
    """Codes as a cache has them.

    Attributes
    ----------
    codes : array of int8, or of uint8, shape (..., D), or (..., D / 2) for int4
        The `k` or `v` of `attention_cached`.
    scale : array of float32, shape (..., 1), or (..., D / 32) for int4
        The `k_scale` or `v_scale`.
    kv_dtype : str
        The type of the codes.
    """

    codes: Array
    scale: Array
    kv_dtype: str


def torchao(tensor: Any) -> Codes:
    """Return the codes and scales of a quantised tensor of torchao.

    Parameters
    ----------
    tensor : Int8Tensor, Float8Tensor or IntxUnpackedToInt8Tensor, shape (..., D)
        On a CPU. int8 and float8 have a scale for a row, or for the whole tensor; int4 may have one
        for each multiple of 32 columns. Scales of all of them multiply.

    Returns
    -------
    Codes
        They mean the same numbers, bit by bit, if those are float32. torchao rounds the numbers of
        tensors of 16 bits once more.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The tensor has zero points, scales for other blocks, or codes that are none here, such as
        those of AMD's float8, of MXTensor, or of Int4Tensor, whose packing belongs to its kernels.
    """
    name = type(tensor).__name__
    if name not in ("Int8Tensor", "Float8Tensor", "IntxUnpackedToInt8Tensor"):
        raise ArgumentTypeError(
            f"tensor: got {name}; expected an Int8Tensor, a Float8Tensor or an "
            f"IntxUnpackedToInt8Tensor of torchao, whose codes and scales lie apart. {_NUMBERS}"
        )
    kind = _kind(tensor, name)
    zero = getattr(tensor, "zero_point", None)
    if zero is not None and zero.any():
        raise ArgumentError(
            f"tensor: this {name} has zero points (asymmetric); codes here mean scale * code. "
            f"{_NUMBERS}"
        )
    shape = tuple(tensor.qdata.shape)
    # An empty list says that one scale is for all.
    block = tuple(tensor.block_size) or shape
    columns, whole = shape[-1], block == shape
    fits = block[-1] % _GROUP == 0 if kind == "int4" else block[-1] == columns
    if not fits or (set(block[:-1]) - {1} and not whole):
        wanted = "1 row and a multiple of 32 columns" if kind == "int4" else "a row, or of all"
        raise ArgumentError(
            f"tensor: this {name} has a scale for blocks of {block}; {kind} here has them for "
            f"blocks of {wanted}. {_NUMBERS}"
        )
    scale = np.asarray(array(tensor.scale.detach().float(), "scale"), np.float32)
    scale = scale.reshape(*(n // size for n, size in zip(shape, block, strict=True)))
    raw = tensor.qdata.detach().contiguous()
    if kind != "int4":
        return Codes(array(raw, "qdata"), np.broadcast_to(scale, (*shape[:-1], 1)).copy(), kind)
    both = array(raw, "qdata").view(np.uint8) & np.uint8(15)
    packed = int4(both[..., ::2] | both[..., 1::2] << np.uint8(4), order="low")
    groups = (*shape[:-1], columns // _GROUP)
    if not whole:
        scale = np.repeat(scale, block[-1] // _GROUP, axis=-1)
    return Codes(packed, np.broadcast_to(scale, groups).copy(), kind)


def _kind(tensor: Any, name: str) -> str:
    kind = str(getattr(tensor, "target_dtype", tensor.qdata.dtype)).removeprefix("torch.")
    if kind not in ("int8", "int4", "float8_e4m3fn", "float8_e5m2"):
        remedy = "cupyflash.foreign.fnuz converts these codes." if "fnuz" in kind else _NUMBERS
        raise ArgumentError(
            f"tensor: this {name} has codes of {kind}; expected int8, int4, float8_e4m3fn or "
            f"float8_e5m2. {remedy}"
        )
    return kind
