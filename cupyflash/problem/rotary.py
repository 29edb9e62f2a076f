"""Rotary embeddings: the record of their angles, and the checks of calls that rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.interop import DLPackArray, array, floats, one_home, outputs
from ..errors import ArgumentError, ArgumentTypeError
from .cached import MAX_HEAD_SIZE, readable
from .call import Array


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of rotary position embeddings.

    Row n holds the angles of position n. The first R columns of a row of q or k are rotated in
    pairs, and the others stay as they are: pair m becomes (x cos - y sin, y cos + x sin) with the
    angle in column m. Base and scaling are up to you: any scheme is a way to fill two arrays.

    Parameters
    ----------
    cos : array of float32 or float64, shape (S, R / 2)
        Cosines of S positions, on the device of q, with any strides. R is at most the head size.
        float64 is for rows of float64; these may have angles of float32, too.
    sin : array of the dtype of cos, shape (S, R / 2)
        Sines of the same angles.
    interleaved : bool
        Whether pair m is columns 2 m and 2 m + 1 (GPT-J); otherwise it is m and m + R / 2 (Llama,
        GPT-NeoX).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If the arrays are not such a pair.

    References
    ----------
    J. Su and others, "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> from cupyflash import Rotary
    >>> angles = np.outer(np.arange(1000), 10000.0 ** -np.arange(0, 1, 2 / 64)).astype(np.float32)
    >>> Rotary(np.cos(angles), np.sin(angles)).cos.shape
    (1000, 32)
    """

    cos: DLPackArray
    sin: DLPackArray
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            angles = array(getattr(self, name), name)
            if angles.ndim != 2:
                raise ArgumentTypeError(
                    f"{name}: got shape {angles.shape}; expected (S, R / 2), with one row of "
                    "angles for each position."
                )
            if angles.dtype not in (np.float32, np.float64) or not angles.dtype.isnative:
                raise ArgumentTypeError(
                    f"{name}: got dtype {angles.dtype}; expected float32, or float64 for rows of "
                    "float64. Convert it with .astype(np.float32)."
                )
            if not angles.size:
                raise ArgumentError(
                    f"{name}: got shape {angles.shape}; expected at least one position and "
                    "one pair."
                )
            object.__setattr__(self, name, angles)
        if self.arrays["sin"].shape != self.arrays["cos"].shape:
            raise ArgumentError(
                f"sin: got shape {self.arrays['sin'].shape} with cos of shape "
                f"{self.arrays['cos'].shape}; expected equal shapes."
            )
        if self.arrays["sin"].dtype != self.arrays["cos"].dtype:
            raise ArgumentTypeError(
                f"sin: got dtype {self.arrays['sin'].dtype} with cos of "
                f"{self.arrays['cos'].dtype}; expected equal dtypes. Convert with .astype(...)."
            )
        if not isinstance(self.interleaved, (bool, np.bool_)):
            raise ArgumentTypeError(
                f"interleaved: got {self.interleaved!r}; expected True (pairs of neighbours) or "
                "False (pairs that are half of the rotated columns apart)."
            )
        object.__setattr__(self, "interleaved", bool(self.interleaved))
        one_home(self.arrays)

    @property
    def arrays(self) -> dict[str, Array]:
        """Both arrays, by name."""
        return {"cos": self.cos, "sin": self.sin}  # type: ignore[dict-item]

    @property
    def pairs(self) -> int:
        """How many pairs of columns are rotated."""
        return int(self.arrays["cos"].shape[1])

    @property
    def rows(self) -> int:
        """How many positions have angles."""
        return int(self.arrays["cos"].shape[0])


@dataclass(frozen=True, eq=False)
class Rotation:
    """A checked call of `rope`.

    Attributes
    ----------
    x : array
        (B, H, L, D); packed rows are one entry.
    positions : array
        (B, L) of int32 or int64.
    rotary : Rotary
        The angles.
    inverse : bool
        Whether rows are rotated back.
    out : array or None
        Where to write the result, or None for a new array.
    device : int or None
        The device of the arrays.
    """

    x: Array
    positions: Array
    rotary: Rotary
    inverse: bool
    out: Array | None
    device: int | None


def rotation(x: Any, positions: Any, rotary: Any, inverse: Any, out: Any) -> Rotation:
    """Validate a call of `rope`. Packed rows become one entry."""
    x = floats(x, "x")
    if x.ndim not in (3, 4):
        raise ArgumentError(
            f"x: got shape {x.shape}; expected (B, H, L, D), or packed (H, total, D)."
        )
    check_rotary(rotary, "x", x)
    if not isinstance(inverse, (bool, np.bool_)):
        raise ArgumentTypeError(f"inverse: got {inverse!r}; expected True or False.")
    shapes = [x.shape[-2:-1]] if x.ndim == 3 else [(x.shape[0], x.shape[2]), x.shape[-2:-1]]
    at = position_array(positions, shapes, rotary)
    device = one_home({"x": x, "positions": at} | rotary.arrays)
    if out is not None:
        read = {"x": x, "positions": at} | rotary.arrays
        outputs({"out": (out, x.shape, x.dtype)}, read)
    return Rotation(x, at, rotary, bool(inverse), out, device)


def check_rotary(rotary: Any, name: str, x: Array) -> None:
    """Check that rows of `x`, which users know by `name`, can be rotated."""
    if not isinstance(rotary, Rotary):
        raise ArgumentTypeError(
            f"rotary: got {type(rotary).__name__}; expected cupyflash.Rotary(cos, sin)."
        )
    if rotary.arrays["cos"].dtype == np.float64 != x.dtype:
        raise ArgumentTypeError(
            f"rotary: got cos and sin of float64 with {name} of {x.dtype}; expected angles of "
            "float32. Convert cos and sin with .astype(np.float32)."
        )
    if not 1 <= x.shape[-1] <= MAX_HEAD_SIZE:
        raise ArgumentError(
            f"{name}: its last axis (the head size) has length {x.shape[-1]}; expected 1 to "
            f"{MAX_HEAD_SIZE}."
        )
    if 2 * rotary.pairs > x.shape[-1]:
        raise ArgumentError(
            f"rotary: got {rotary.pairs} pairs of columns with {name} of shape {x.shape}, whose "
            f"rows have {x.shape[-1]} columns; expected cos and sin of at most {x.shape[-1] // 2} "
            "columns."
        )


def position_array(value: Any, shapes: list[tuple[int, ...]], rotary: Rotary) -> Array:
    """Return positions of one of these shapes, checked where they can be read."""
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError:
            value = np.asarray(value, object)
    positions = array(value, "positions")
    if positions.shape not in shapes or positions.dtype not in (np.int32, np.int64):
        raise ArgumentTypeError(
            f"positions: got shape {positions.shape}, dtype {positions.dtype}; expected "
            f"{' or '.join(map(str, shapes))} of int32 or int64, one position for each row."
        )
    read = readable(positions)
    if read is not None:
        check_positions(read, rotary, "positions")
    return positions


def check_positions(positions: Array, rotary: Rotary, name: str) -> None:
    """Check that there are angles for positions that `name` tells."""
    bad = positions[(positions < 0) | (positions >= rotary.rows)]
    if bad.size:
        raise ArgumentError(
            f"{name}: got a row at position {int(bad.flat[0])}, but rotary has angles for 0 to "
            f"{rotary.rows - 1}; expected positions in this range. Make cos and sin with more "
            "rows."
        )
