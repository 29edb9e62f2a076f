"""Codes of 4 and 8 bits as others store them: two in a byte, and blocks of gguf."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError, ArgumentTypeError

Array = np.ndarray[Any, Any]


class _Block(NamedTuple):
    """Columns of a block of gguf, and its bytes: those of the scale, and all."""

    columns: int
    of_scale: int
    size: int


_BLOCKS = {"Q8_0": _Block(32, 2, 34), "Q4_0": _Block(32, 2, 18), "MXFP4": _Block(32, 1, 17)}
# What the codes of MXFP4 mean, doubled; the scale is halved.
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def int4(
    codes: Any, *, order: Literal["low", "high", "halves"], offset: Literal[0, 8] = 0
) -> Array:
    """Make bytes of int4 as cupyflash has them of bytes whose codes lie otherwise.

    Parameters
    ----------
    codes : array of uint8, shape (..., D / 2)
        Two codes in a byte.
    order : str
        Which codes share a byte: "low", columns 2 m and 2 m + 1, the first one in the lower half,
        as here; "high", the same with the first one in the upper half; "halves", column m in the
        lower half and m + D / 2 in the upper one, as in each block of gguf.
    offset : int
        What a code has above the number that it means: 0 for two's complement, as here; 8 for
        codes from 0 to 15, as in gguf's Q4_0.

    Returns
    -------
    array of uint8, shape (..., D / 2)
        For ``kv_dtype="int4"``.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The codes are no bytes, or the order or the offset is none of these.
    """
    codes = _bytes(codes, "codes")
    if order not in ("low", "high", "halves"):
        raise ArgumentError(f"order: got {order!r}; expected 'low', 'high' or 'halves'.")
    if offset not in (0, 8):
        raise ArgumentError(f"offset: got {offset!r}; expected 0 or 8.")
    first, second = codes & np.uint8(15), codes >> np.uint8(4)
    if order == "high":
        first, second = second, first
    if order == "halves":
        rows = np.concatenate([first, second], axis=-1)
        first, second = rows[..., ::2], rows[..., 1::2]
    made: Array = (first | (second << np.uint8(4))) ^ np.uint8(0x88 if offset else 0)
    return made


def gguf(blocks: Any, kind: str) -> tuple[Array, Array]:
    """Make codes and scales of blocks of gguf, for a cache or for `attention_cached`.

    Parameters
    ----------
    blocks : array of uint8, shape (..., bytes)
        Whole blocks of 32 columns each, in rows, as gguf stores tensors.
    kind : str
        "Q4_0" becomes int4 with a scale for every 32 columns. "Q8_0" becomes int8, which has one
        scale for a row, so that rows must have 32 columns.

    Returns
    -------
    codes : array of uint8, shape (..., D / 2), or of int8, shape (..., 32)
        They mean the same numbers as the blocks, bit by bit.
    scale : array of float32, shape (..., D / 32) or (..., 1)
        The scales of the blocks, which multiply.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such kind, or no codes here have its scales or its numbers.
    """
    if kind == "MXFP4":
        raise ArgumentError(
            "kind: got MXFP4, whose codes are numbers of 4 bits (e2m1) with powers of two as "
            "scales; no codes here are such numbers. Take gguf_numbers(blocks, 'MXFP4')."
        )
    scale, codes = _split(blocks, kind)
    if kind == "Q8_0" and scale.shape[-2] != 1:
        raise ArgumentError(
            f"blocks: got rows of {32 * scale.shape[-2]} columns of Q8_0, which has a scale for "
            "every 32 of them; expected 32, because int8 has one scale for a row here. Take "
            "gguf_numbers(blocks, 'Q8_0'), and quantize."
        )
    scale = np.ascontiguousarray(scale).view(np.float16).astype(np.float32)[..., 0]
    if kind == "Q8_0":
        return codes[..., 0, :].view(np.int8), scale
    packed = int4(codes, order="halves", offset=8)
    return packed.reshape(*packed.shape[:-2], -1), scale


def gguf_numbers(blocks: Any, kind: str) -> Array:
    """Return the numbers that blocks of gguf mean.

    Parameters
    ----------
    blocks : array of uint8, shape (..., bytes)
        As in `gguf`.
    kind : str
        "Q4_0", "Q8_0" or "MXFP4".

    Returns
    -------
    array of float32, shape (..., D)
        The numbers, as gguf's own package computes them.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        There is no such kind, or the bytes are no whole blocks.
    """
    scale, codes = _split(blocks, kind)
    if kind == "MXFP4":  # 2**(e - 128): half of what the scale means
        factor = np.ldexp(np.float32(1), scale.astype(np.int32) - 128)
    else:
        factor = np.ascontiguousarray(scale).view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        halves = np.concatenate([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        numbers = _E2M1[halves] if kind == "MXFP4" else halves.astype(np.float32) - np.float32(8)
    made: Array = (factor * numbers).reshape(*codes.shape[:-2], -1)
    return made


def _bytes(value: Any, name: str) -> Array:
    """Return an argument that is an array of bytes with an axis."""
    x = array(value, name)
    if x.dtype != np.uint8 or not x.ndim:
        raise ArgumentTypeError(
            f"{name}: got dtype {x.dtype}, shape {x.shape}; expected bytes, uint8 of shape "
            "(..., bytes). Take .view(np.uint8) of other types of 8 bits."
        )
    return x


def _split(blocks: Any, kind: str) -> tuple[Array, Array]:
    """Return the bytes of scales and of codes, both (..., blocks, bytes)."""
    if kind not in _BLOCKS:
        raise ArgumentError(f"kind: got {kind!r}; expected one of {', '.join(_BLOCKS)}.")
    x, block = _bytes(blocks, "blocks"), _BLOCKS[kind]
    if x.shape[-1] % block.size:
        raise ArgumentError(
            f"blocks: got rows of {x.shape[-1]} bytes of {kind}; expected whole blocks of "
            f"{block.size} bytes, of {block.columns} columns each."
        )
    x = x.reshape(*x.shape[:-1], -1, block.size)
    return x[..., : block.of_scale], np.ascontiguousarray(x[..., block.of_scale :])
