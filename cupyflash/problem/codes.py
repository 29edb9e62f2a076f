"""Caches of codes of 8 and 4 bits: which they are, and their scales, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError, ArgumentTypeError
from .call import Array, Codes
from .formats import FORMATS, INT4_GROUP, Format, format_of

QUERIES = "float16", "bfloat16", "float32"
_TYPES = (*(name for name, form in FORMATS.items() if form.packed == 1), "uint8")  # of arrays
_HOW = (
    "Pass the scales that append fills or quantize returns: float32, one for each row, of shape "
    "(..., 1)"
)


class Given(NamedTuple):
    """What a call says of codes, as users pass it."""

    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: Any = None

    @property
    def kind(self) -> str:
        """The type that it names, in words by which calls are recognised."""
        return "" if self.kv_dtype is None else f" {self.kv_dtype}"


NONE = Given()


class Shaped(NamedTuple):
    """The shape of keys or values, in columns instead of bytes, for checks of shapes."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


def holds_codes(value: Array) -> bool:
    """Whether an array has the type of codes, or of bytes that may be some."""
    # NumPy's names take longer to make than sizes.
    return value.dtype.itemsize == 1 and value.dtype.name in _TYPES


def codes_of(k: Any, v: Any, given: Given) -> tuple[Array, Array, Codes | None]:
    """Return keys, values and what they mean if they are codes.

    Lengths of axes other than the last are not compared yet.
    """
    held = {"k": array(k, "k"), "v": array(v, "v")}
    scales = {"k_scale": given.k_scale, "v_scale": given.v_scale}
    plain = [name for name, x in held.items() if not holds_codes(x)]
    if plain:
        _refuse_codes(held, plain[0], scales, given.kv_dtype)
        return held["k"], held["v"], None
    form = _format_of_cache(held, given.kv_dtype)
    checked = []
    for (name, scale), (cache, x) in zip(scales.items(), held.items(), strict=True):
        if scale is None:
            raise ArgumentError(
                f"{name}: got None with {cache} of {form.name}; expected the scales of its codes. "
                f"{_HOW}{' or (..., D / 32)' if form.packed > 1 else ''}."
            )
        checked.append(scale_of(scale, name, x, form, cache))
    return held["k"], held["v"], Codes(form, *checked)


def widened(x: Array, codes: Codes | None) -> Array | Shaped:
    """Return an array, or the shape that it has in columns."""
    if codes is None or codes.form.packed == 1:
        return x
    return Shaped((*x.shape[:-1], x.shape[-1] * codes.form.packed))


def check_queries(dtype: np.dtype[Any], name: str, codes: Codes) -> np.dtype[Any]:
    """Return the dtype of the arrays that come with codes."""
    if dtype.name not in QUERIES:
        raise ArgumentTypeError(
            f"{name}: got {dtype} with a cache of {codes.form.name}; expected "
            f"{', '.join(QUERIES[:-1])} or {QUERIES[-1]}. Convert it with .astype(np.float32), or "
            "keep the cache in float64."
        )
    return dtype


def check_columns(x: Array, name: str, codes: Codes, cache: Array, cache_name: str) -> None:
    """Refuse rows whose columns are not those of a cache with two codes in a byte."""
    packed = codes.form.packed
    if packed > 1 and x.shape[-1] != packed * cache.shape[-1]:
        raise ArgumentError(
            f"{cache_name}: got shape {cache.shape} of {codes.form.name}, two codes in a byte, "
            f"with {name} of shape {x.shape}; expected a last axis of {x.shape[-1]} / 2 bytes."
        )


def check_written(scale: Array, name: str, cache: Array) -> None:
    """Refuse scales that new rows would share."""
    expected = (*cache.shape[:-1], scale.shape[-1] if scale.ndim else 1)
    if scale.shape != expected:
        raise ArgumentError(
            f"{name}: got shape {scale.shape} with {name[0]} of shape {cache.shape}; expected "
            f"{expected}, because append computes a scale for every row of every head."
        )


def _refuse_codes(held: dict[str, Array], plain: str, scales: dict[str, Any], kind: Any) -> None:
    """Refuse what belongs to codes where keys or values are numbers."""
    other = "v" if plain == "k" else "k"
    if holds_codes(held[other]):
        raise ArgumentTypeError(
            f"{plain}: got {held[plain].dtype} with {other} of {held[other].dtype}; expected codes "
            "of one type in both. quantize makes them."
        )
    for name, scale in scales.items():
        if scale is not None:
            raise ArgumentError(
                f"{name}: got scales with {name[0]} of {held[name[0]].dtype}, which has none; "
                f"expected codes of {', '.join(FORMATS)}. Leave {name} out, or make codes with "
                "quantize."
            )
    if kind is not None:
        raise ArgumentError(
            f"kv_dtype: got {kind!r} with k of {held['k'].dtype}, which says its type itself; "
            "expected None. Leave kv_dtype out, or make codes with quantize."
        )


def _format_of_cache(held: dict[str, Array], kv_dtype: Any) -> Format:
    """Return the format of keys and values, which their types or `kv_dtype` say."""
    said = None if kv_dtype is None else format_of(kv_dtype, "kv_dtype")
    names = {name: x.dtype.name for name, x in held.items()}
    for name, came in names.items():
        if came == "uint8" and said is None:
            raise ArgumentError(
                f"kv_dtype: got None with {name} of uint8, whose bytes may be any codes; expected "
                f"what they are: one of {', '.join(FORMATS)}. Say kv_dtype='int8', for example."
            )
        if came != "uint8" and said is not None and came != said.name:
            raise ArgumentTypeError(
                f"kv_dtype: got {said.name} with {name} of {came}; expected {came}, or an array of "
                f"uint8. Leave kv_dtype out, or pass {name}.view(np.uint8)."
            )
    forms = [said or FORMATS[came] for came in names.values()]
    if forms[0] != forms[1]:
        raise ArgumentTypeError(
            f"got k {names['k']}, v {names['v']}; expected codes of one type. quantize makes them."
        )
    return forms[0]


def scale_of(value: Any, name: str, x: Array, form: Format, name_of_x: str) -> Array:
    """Return scales that broadcast to the rows of codes."""
    scale = array(value, name)
    columns = x.shape[-1] * form.packed if x.ndim else 0
    lengths = {1}
    if form.packed > 1 and columns % INT4_GROUP == 0:
        lengths.add(columns // INT4_GROUP)
    rows = x.shape[:-1]
    last = " or ".join(map(str, sorted(lengths)))
    wanted = f"float32 that broadcasts to {rows} and a last axis of {last}"
    if scale.dtype != np.float32 or not scale.dtype.isnative:
        raise ArgumentTypeError(
            f"{name}: got dtype {scale.dtype}; expected {wanted}. Convert it with "
            ".astype(np.float32)."
        )
    own = (1,) * (x.ndim - scale.ndim) + scale.shape
    fits = len(own) == x.ndim and own[-1:] and own[-1] in lengths
    if not fits or any(n not in (1, most) for n, most in zip(own[:-1], rows, strict=True)):
        raise ArgumentError(
            f"{name}: got shape {scale.shape} with {name_of_x} of shape {x.shape} in {form.name}; "
            f"expected {wanted}: one scale for all, for each head, or for each row. Add axes, as "
            "in scale[:, None, None], where there is one for each head."
        )
    return scale
