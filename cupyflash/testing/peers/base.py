"""What an adapter of another library says of it, and the arrays on the way there and back."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cupyflash.gpu.driver import library

from ..options import mask_array
from ..precision import Precision, Rounding

if TYPE_CHECKING:
    from ..subject import Call

Array = np.ndarray[Any, Any]


class Functions(NamedTuple):
    """The functions of a library, with the signatures of `cupyflash.testing.verify`.

    Attributes
    ----------
    forward, backward : callable
        The latter is None where there are no gradients.
    """

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Documented:
    """What a library's own pages say, for whoever compares.

    Attributes
    ----------
    layout : str
        The order of the axes of q, k and v.
    alignment : str
        Which keys the first query sees under its own causal option if there are other numbers of
        keys than of queries.
    empty_rows : str
        What a row without keys gives; "unsaid" if no page says.
    lse : str
        Whether the log-sum-exp is returned, in which base and type.
    """

    layout: str = "(B, H, L, D)"
    alignment: str = "unsaid"
    empty_rows: str = "unsaid"
    lse: str = "not returned"


@dataclass(frozen=True)
class Peer:
    """An attention function of another library.

    Attributes
    ----------
    name : str
        Its name here: the library's, and the function's or the back end's.
    package : str
        The distribution that has it, whose version is shown.
    module : str
        What is imported to see whether it is there.
    install : str
        A command that installs it.
    make : callable
        It imports the library and returns `Functions`.
    dtypes, features : tuple of str
        What it takes, by the names of `cupyflash.testing.FEATURES`.
    says : mapping
        Other arguments of `verify`: precision, empty_rows, serves, shapes.
    documented : Documented
        What its pages say.
    instead : mapping of str to str
        By property: what the library does instead, in words.
    gpu : bool
        Whether it needs an NVIDIA GPU; arrays are copied there and back.
    """

    name: str
    package: str
    module: str
    install: str
    make: Callable[[], Functions]
    dtypes: tuple[str, ...] = ("float32",)
    features: tuple[str, ...] = ()
    says: Mapping[str, Any] = field(default_factory=dict)
    documented: Documented = Documented()
    instead: Mapping[str, str] = field(default_factory=dict)
    gpu: bool = False

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            found = importlib.util.find_spec(self.module) is not None
            return importlib.metadata.version(self.package) if found else None
        except (ImportError, importlib.metadata.PackageNotFoundError):
            return None

    @property
    def missing(self) -> str:
        """What it lacks here, with the command that installs it; nothing if it can be judged."""
        if self.version is None:
            return self.install + (", and an NVIDIA GPU" if self.gpu else "")
        return "an NVIDIA GPU" if self.gpu and not has_gpu() else ""


@functools.cache
def has_gpu() -> bool:
    """Return whether NVIDIA's driver finds a GPU."""
    try:
        driver = library()
        count = ctypes.c_int(0)
        found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except OSError:
        return False
    return found and count.value > 0


def rounded_weights(dtype: Any) -> Precision:
    """Return the usual arithmetic: sums in float32, and weights in the type of the inputs."""
    narrow = np.dtype(dtype).itemsize == 2
    held = "float64" if np.dtype(dtype) == np.float64 else "float32"
    return Precision.stated(held, p=dtype if narrow else None, output=dtype)


def all_rounded(dtype: Any) -> Precision:
    """Return the arithmetic of plain code: scores, scale and weights in the type of the inputs."""
    if np.dtype(dtype).itemsize != 2:
        return rounded_weights(dtype)
    return Precision.stated("float32", p=dtype, scores=dtype, scale=dtype, output=dtype)


def scale_of_float32(dtype: Any) -> Precision:
    """Return the usual arithmetic with a scale that is an attribute of type float32."""
    made = rounded_weights(dtype)
    return replace(made, scale=Rounding.to("float32"))


def positive_scale(call: Call) -> bool:
    """Serve calls without a scale, or with one above 0."""
    scale = call.options.get("scale")
    return scale is None or scale > 0


def small(call: Call) -> bool:
    """Serve calls of few products, for libraries that are interpreted."""
    return bool(math.prod(call.q.shape) * call.k.shape[-2] < 1000)


def mask_or_bias(call: Call) -> bool:
    """Serve calls with at most one of mask and bias."""
    return not ("mask" in call.options and "bias" in call.options)


def no_gradient_of_more(call: Call) -> bool:
    """Serve gradients of q, k and v alone."""
    return not (call.gradients and ("bias" in call.options or "sink" in call.options))


def scale_of(q: Array, scale: float | None) -> float:
    """Return the scale of a call."""
    return float(1 / np.sqrt(q.shape[-1])) if scale is None else float(scale)


def additive(mask: Any, bias: Array | None, q: Array, k: Array) -> Array | None:
    """Return mask and bias as one array that is added to scores, as most libraries take them."""
    allowed = mask_array(mask, q, k)
    if allowed is None:
        return bias
    value = np.float32(0) if bias is None else bias
    return np.asarray(np.where(allowed, value, np.float32(-np.inf)))
