"""Calls whose queries, keys and values are all codes of float8: what they mean, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..arrays.interop import array
from ..errors import ArgumentError, ArgumentTypeError
from . import codes
from .call import Array
from .encoding import Fp8Encoding
from .formats import FORMATS, Format, format_of

FORMS = tuple(name for name in FORMATS if name.startswith("float8"))
RESULTS = "float16", "bfloat16", "float32"  # types of outputs
DEFAULT_RESULT = "bfloat16"
_NAMES = "q", "k", "v"


@dataclass(frozen=True)
class Fp8:
    """What codes of float8 in q, k and v are, as users pass it."""

    q_scale: Any = None
    k_scale: Any = None
    v_scale: Any = None
    qkv_dtype: Any = None
    out_dtype: Any = None

    @property
    def kind(self) -> str:
        """The types that it names, in words by which calls are recognised."""
        return f" {self.qkv_dtype} to {self.out_dtype}"

    @staticmethod
    def of(*named: Any) -> Fp8 | codes.NoCodes:
        """Return what codes are, from the fields, of which all are None if there are none."""
        for value in named:
            if value is not None:
                return Fp8(*named)
        return codes.NONE

    def with_arrays(self, q: Array) -> Fp8:
        """Return the same with arrays in the memory of `q` in place of numbers."""
        made = {name: codes.scales_at(scale, name, q) for name, scale in self.scales.items()}
        return replace(self, **made)

    @property
    def scales(self) -> dict[str, Any]:
        """The scales, by name."""
        return {f"{name}_scale": getattr(self, f"{name}_scale") for name in _NAMES}

    def operands(
        self, q: Any, k: Any, v: Any
    ) -> tuple[dict[str, Array], np.dtype[Any], Fp8Encoding]:
        """Return codes, the type of the output, and what the codes mean."""
        held = {name: array(x, name) for name, x in zip(_NAMES, (q, k, v), strict=True)}
        form = _format_of(held, self)
        scales = {}
        for (name, scale), x in zip(self.scales.items(), held.values(), strict=True):
            if scale is None:
                raise ArgumentError(
                    f"{name}: got None with {name[0]} of {form.name}; expected the scales of its "
                    "codes. Pass what quantize returns: float32, one for each row, of shape "
                    "(..., 1); or one number for all, which is 1.0 for codes that are numbers "
                    "themselves."
                )
            checked = codes.scale_of(scale, name, x, form, name[0])
            scales[name] = checked[(None,) * (max(x.ndim, 3) - checked.ndim)]
        return held, _result(self.out_dtype), Fp8Encoding(form, form, **scales)


def _format_of(held: dict[str, Array], given: Fp8) -> Format:
    """Return the one format of q, k and v, which their types or `qkv_dtype` say."""
    said = None
    if given.qkv_dtype is not None:
        said = format_of(given.qkv_dtype, "qkv_dtype")
        if said.name not in FORMS:
            raise ArgumentError(
                f"qkv_dtype: got {said.name}; expected {' or '.join(FORMS)}. attention_cached "
                "takes keys and values of the other types, with queries of 16 bits."
            )
    found = {}
    for name, x in held.items():
        came = x.dtype.name
        if came in FORMS and said is not None and said.name != came:
            raise ArgumentTypeError(
                f"qkv_dtype: got {said.name} with {name} of {came}; expected {came}, or an array "
                f"of uint8. Leave qkv_dtype out, or pass {name}.view(np.uint8)."
            )
        if came == "uint8" and said is None:
            raise ArgumentError(
                f"qkv_dtype: got None with {name} of uint8, whose bytes may be any codes; "
                f"expected what they are: {' or '.join(FORMS)}. Say qkv_dtype='{FORMS[0]}', for "
                "example."
            )
        if came != "uint8" and came not in FORMS:
            raise ArgumentTypeError(
                f"{name}: got {came} in a call with {_said(given)}; expected codes of "
                f"{' or '.join(FORMS)} in q, k and v, which quantize makes. Without codes, leave "
                f"{_said(given)} out; with codes in k and v alone, call attention_cached."
            )
        found[name] = said or FORMATS[came]
    forms = list(found.values())
    if any(form != forms[0] for form in forms):
        came = ", ".join(f"{name} {form.name}" for name, form in found.items())
        raise ArgumentTypeError(f"got {came}; expected codes of one type. quantize makes them.")
    return forms[0]


def _said(given: Fp8) -> str:
    """Return the arguments that a call has only because of codes."""
    return ", ".join(name for name, value in vars(given).items() if value is not None)


def _result(value: Any) -> np.dtype[Any]:
    """Return the type of the output."""
    name = DEFAULT_RESULT if value is None else value
    if not isinstance(name, str):
        try:
            name = np.dtype(name).name
        except TypeError:
            name = repr(name)
    if name not in RESULTS:
        raise ArgumentTypeError(
            f"out_dtype: got {name}; expected {', '.join(RESULTS[:-1])} or {RESULTS[-1]}, by name "
            "or as the type of NumPy or ml_dtypes."
        )
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise ArgumentError(
            f"out_dtype: got {value}, which is bfloat16, and ml_dtypes is not installed; expected "
            "ml_dtypes, or another type. Say out_dtype='float16', or pip install ml_dtypes."
        ) from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found
