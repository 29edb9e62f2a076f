"""Caches of 8- and 4-bit codes: which they are, and their scales, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..arrays.device_arrays import constant, is_device_array
from ..arrays.interop import array, floats
from ..errors import ArgumentError, ArgumentTypeError
from .call import Array
from .encoding import NUMBERS, QUERIES, CacheEncoding, Encoding
from .formats import FORMATS, INT4_GROUP, Format, format_of, name_of, of_amd

__all__ = ["QUERIES", "CacheCodes"]
_TYPES = (*(name for name, form in FORMATS.items() if form.packed == 1), "uint8")  # of arrays
_HOW = (
    "Pass the scales that append fills or quantize returns: float32, one for each row, of shape "
    "(..., 1)"
)
Forms = tuple[Format | None, Format | None]  # of keys and of values; None of numbers


class CacheCodes(NamedTuple):
    """What the codes of a cache are, as users pass it."""

    k_scale: Any = None
    v_scale: Any = None
    kv_dtype: Any = None

    @staticmethod
    def of(k_scale: Any, v_scale: Any, kv_dtype: Any) -> CacheCodes | NoCodes:
        """Return what codes are, from the fields, of which all are None if nothing is said."""
        if k_scale is v_scale is kv_dtype is None:
            return NONE
        return CacheCodes(k_scale, v_scale, kv_dtype)

    @property
    def kind(self) -> str:
        """The types that it names, in words by which calls are recognised."""
        return "" if self.kv_dtype is None else f" {self.kv_dtype}"

    @property
    def scales(self) -> dict[str, Any]:
        """The scales, by name."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def with_arrays(self, q: Array) -> CacheCodes:
        """Return the same with arrays in the memory of `q` in place of numbers."""
        if self.k_scale is None and self.v_scale is None:
            return self
        k_scale, v_scale = (
            scales_at(self.k_scale, "k_scale", q),
            scales_at(self.v_scale, "v_scale", q),
        )
        return CacheCodes(k_scale, v_scale, self.kv_dtype)


class NoCodes:
    """Nothing is said of codes: arrays are numbers, or those of a cache say what they are."""

    kind: ClassVar[str] = ""
    scales: ClassVar[Mapping[str, Any]] = {}
    k_scale: ClassVar[None] = None
    v_scale: ClassVar[None] = None
    kv_dtype: ClassVar[None] = None

    def with_arrays(self, q: Array) -> NoCodes:
        """Return the same: there are no scales."""
        del q
        return self

    def operands(self, q: Any, k: Any, v: Any) -> tuple[dict[str, Array], np.dtype[Any], Encoding]:
        """Return numbers, their type, which is that of the output, and what they mean."""
        held = {name: floats(x, name) for name, x in (("q", q), ("k", k), ("v", v))}
        return held, same_dtype(held), NUMBERS


NONE = NoCodes()


def same_dtype(arrays: dict[str, Array]) -> np.dtype[Any]:
    """Return the dtype that all arrays have."""
    if len({x.dtype for x in arrays.values()}) > 1:
        came = ", ".join(f"{name} {x.dtype}" for name, x in arrays.items())
        raise ArgumentTypeError(f"got {came}; expected one dtype. Convert with .astype(...).")
    common: np.dtype[Any] = next(iter(arrays.values())).dtype
    return common


class Shaped(NamedTuple):
    """The shape of keys or values, in columns instead of bytes, for checks of shapes."""

    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)


def codes_of(
    k: Any, v: Any, given: CacheCodes | NoCodes, rows: Any = None
) -> tuple[Array, Array, Encoding]:
    """Return keys, values and what they mean if they are codes, or one of them is.

    Lengths of axes other than the last are not compared yet. `rows` are queries or new keys, whose
    columns say how many codes a byte has.
    """
    held = {"k": array(k, "k"), "v": array(v, "v")}
    k_form, v_form = _formats_of(held, given.kv_dtype, rows)
    scales = {
        "k_scale": _scales_of(given.k_scale, held["k"], "k", k_form),
        "v_scale": _scales_of(given.v_scale, held["v"], "v", v_form),
    }
    if k_form is None and v_form is None:
        return held["k"], held["v"], NUMBERS
    return held["k"], held["v"], CacheEncoding(k_form, v_form, **scales)


def numbers_of(k: Array, v: Array, encoding: Encoding) -> dict[str, Array]:
    """Return those of keys and values that are numbers, by name."""
    forms = encoding.k_form, encoding.v_form
    return {
        name: floats(x, name)
        for name, x, form in zip("kv", (k, v), forms, strict=True)
        if form is None
    }


def widened(x: Array, form: Format | None) -> Array | Shaped:
    """Return an array, or the shape that it has in columns."""
    if form is None or form.packed == 1:
        return x
    return Shaped((*x.shape[:-1], x.shape[-1] * form.packed))


def shapes_of(k: Array, v: Array, encoding: Encoding) -> tuple[Array | Shaped, Array | Shaped]:
    """Return what `widened` does of keys and of values."""
    return widened(k, encoding.k_form), widened(v, encoding.v_form)


def check_columns(x: Array, name: str, form: Format | None, cache: Array, cache_name: str) -> None:
    """Refuse rows whose columns are not those of a cache with two codes in a byte."""
    if form is None or form.packed == 1:
        return
    if x.shape[-1] != form.packed * cache.shape[-1]:
        raise ArgumentError(
            f"{cache_name}: got shape {cache.shape} of {form.name}, two codes in a byte, "
            f"with {name} of shape {x.shape}; expected a last axis of {x.shape[-1]} / 2 bytes."
        )


def check_written(scale: Any, name: str, cache: Array) -> None:
    """Refuse scales that new rows would share, or into which nothing can be written."""
    is_number = _is_number(scale)
    columns = 1 if is_number or not scale.ndim else scale.shape[-1]
    expected = (*cache.shape[:-1], columns)
    if is_number or scale.shape != expected:
        came = repr(scale) if is_number else f"shape {scale.shape}"
        module = "cupy" if is_device_array(cache) else "np"
        raise ArgumentError(
            f"{name}: got {came} with {name[0]} of shape {cache.shape}; expected an array of shape "
            f"{expected}, because append computes a scale for every row of every head and writes "
            f"it there. Pass {module}.empty({expected}, {module}.float32), and keep it beside "
            f"{name[0]}."
        )


def _scales_of(scale: Any, x: Array, name: str, form: Format | None) -> Array | None:
    """Return the scales of keys or values, or None if these are numbers."""
    if form is not None:
        if scale is not None:
            return scale_of(scale, f"{name}_scale", x, form, name)
        raise ArgumentError(
            f"{name}_scale: got None with {name} of {form.name}; expected the scales of its codes. "
            f"{_HOW}{' or (..., D / 32)' if form.packed > 1 else ''}; or one number for all."
        )
    if scale is not None:
        if x.dtype.name == "int4":
            raise ArgumentError(
                f"{name}: got int4 of ml_dtypes, which has a byte for each code; expected two in "
                f"a byte. Make them with quantize, or pack these: "
                f"({name}[..., ::2].astype(np.uint8) & 15) | ({name}[..., 1::2].astype(np.uint8) "
                f"<< 4), with kv_dtype='int4'."
            )
        raise ArgumentError(
            f"{name}_scale: got scales with {name} of {x.dtype}, which has none; expected codes of "
            f"{', '.join(FORMATS)}."
            + (of_amd(x.dtype.name) or f" Leave {name}_scale out, or make codes with quantize.")
        )
    return None


def _formats_of(held: dict[str, Array], kv_dtype: Any, rows: Any) -> Forms:
    """Return the formats of keys and values, which their types or `kv_dtype` say."""
    # NumPy's names take longer to make than sizes.
    if kv_dtype is None and all(x.dtype.itemsize > 1 for x in held.values()):
        return None, None
    pairs = zip(held.items(), types_said(kv_dtype), strict=True)
    k_form, v_form = (_format_of(name, x, said, held, kv_dtype, rows) for (name, x), said in pairs)
    return k_form, v_form


def types_said(kv_dtype: Any) -> tuple[Any, Any]:
    """Return the types of keys and of values that one argument says, None where it says none."""
    if not isinstance(kv_dtype, (tuple, list)):
        return kv_dtype, kv_dtype
    if len(kv_dtype) != 2:
        raise ArgumentError(
            f"kv_dtype: got {kv_dtype!r}; expected one type, or two: of keys and of values, as in "
            "('int8', 'int4')."
        )
    return kv_dtype[0], kv_dtype[1]


def _format_of(
    name: str, x: Array, said: Any, held: dict[str, Array], kv_dtype: Any, rows: Any
) -> Format | None:
    """Return the format of keys or values, of which `kv_dtype` says `said`."""
    came = x.dtype.name
    if said is None:
        if came == "uint8":
            raise ArgumentError(
                f"kv_dtype: got {kv_dtype!r} with {name} of uint8, whose bytes may be any codes; "
                f"expected what they are: one of {', '.join(FORMATS)}. Say "
                f"kv_dtype={_kv_dtype_of(held, kv_dtype, rows)}, for example."
            )
        return FORMATS[came] if came in _TYPES else None
    if came == "uint8":
        return format_of(said, "kv_dtype")
    word = name_of(said)
    if word == came:
        return FORMATS.get(came)
    remedy = f"Say kv_dtype={_kv_dtype_of(held, kv_dtype, rows)}"
    if all(each.dtype != np.uint8 for each in held.values()):
        remedy = "Leave kv_dtype out"
    if came not in _TYPES:
        raise ArgumentError(
            f"kv_dtype: got {kv_dtype!r} with {name} of {came}, which says its type itself; "
            f"expected None for {name}. {remedy}, or make codes with quantize."
        )
    word = format_of(said, "kv_dtype").name
    raise ArgumentTypeError(
        f"kv_dtype: got {word} with {name} of {came}; expected {came}, or an array of uint8. "
        f"{remedy}, or pass {name}.view(np.uint8) if its bytes are codes of {word}."
    )


def _kv_dtype_of(held: dict[str, Array], kv_dtype: Any, rows: Any) -> str:
    """Return a `kv_dtype` that says what bytes are, if need be as an example, and nothing else."""
    columns = getattr(rows, "shape", (0,))[-1:]
    of_bytes = next((x for x in held.values() if x.dtype == np.uint8), held["k"])
    example = "int4" if tuple(2 * n for n in of_bytes.shape[-1:]) == columns else "int8"
    words = [
        None if x.dtype != np.uint8 else example if each is None else name_of(each)
        for x, each in zip(held.values(), types_said(kv_dtype), strict=True)
    ]
    return repr(words[0] if words[0] == words[1] else tuple(words))


def _is_number(value: Any) -> bool:
    """Whether one scale came as a number."""
    return isinstance(value, (int, float, np.floating, np.integer)) and not isinstance(value, bool)


def _no_array(value: Any) -> bool:
    """Whether a value is neither a number nor an array of any library."""
    return (
        not _is_number(value)
        and not is_device_array(value)
        and not any(hasattr(value, name) for name in ("__array__", "__dlpack__"))
    )


def scales_at(value: Any, name: str, like: Array) -> Any:
    """Return scales that came as one number as an array beside another one, others as they are."""
    if value is None or is_device_array(value):
        return value
    of_array = type(value) is np.ndarray and not value.ndim and value.dtype.kind in "fiu"
    if not of_array and not _is_number(value):
        return value
    number = float(value)
    with np.errstate(over="ignore", under="ignore"):
        stored = np.full((1, 1), number, np.float32)
    if np.isfinite(number) and (np.isinf(stored[0, 0]) or (number != 0) != (stored[0, 0] != 0)):
        raise ArgumentError(
            f"{name}: got {value!r}, which float32 cannot hold; expected a number from 1.2e-38 to "
            "3.4e38. Make other codes with quantize, whose scales are float32."
        )
    return constant(stored, name, like) if is_device_array(like) else stored


def scale_of(value: Any, name: str, x: Array, form: Format, name_of_x: str) -> Array:
    """Return scales that broadcast to the rows of codes."""
    columns = x.shape[-1] * form.packed if x.ndim else 0
    lengths = {1}
    if form.packed > 1 and columns % INT4_GROUP == 0:
        lengths.add(columns // INT4_GROUP)
    rows = x.shape[:-1]

    def wanted() -> str:
        last = " or ".join(map(str, sorted(lengths)))
        return f"float32 that broadcasts to {rows} and a last axis of {last}"

    def converted() -> str:
        module = "cupy" if is_device_array(x) else "np"
        return f"Convert it with {module}.asarray({name}, {module}.float32)."

    value = scales_at(value, name, x)
    if isinstance(value, (bool, np.bool_, list, tuple)):
        raise ArgumentTypeError(
            f"{name}: got {type(value).__name__}; expected a number, or an array of {wanted()}. "
            f"{converted()}"
        )
    if isinstance(value, (str, bytes, complex, np.complexfloating)) or _no_array(value):
        raise ArgumentTypeError(
            f"{name}: got {value!r}; expected a number, or an array of {wanted()}. {_HOW}."
        )
    scale = array(value, name)
    if scale.dtype != np.float32 or not scale.dtype.isnative:
        raise ArgumentTypeError(
            f"{name}: got dtype {scale.dtype}; expected {wanted()}. {converted()}"
        )
    own = (1,) * (x.ndim - scale.ndim) + scale.shape
    fits = len(own) == x.ndim and own[-1:] and own[-1] in lengths
    if not fits or any(n not in (1, most) for n, most in zip(own[:-1], rows, strict=True)):
        raise ArgumentError(
            f"{name}: got shape {scale.shape} with {name_of_x} of shape {x.shape} in {form.name}; "
            f"expected {wanted()}: one scale for all, for each head, or for each row. Add axes, as "
            "in scale[:, None, None], where there is one for each head."
        )
    return scale
