"""How the CPU kernels are compiled, announced and cached.

Kernels (functions that Python calls) are cached on disk per CPU, so that a second process starts in
milliseconds; helpers (functions that kernels call) are compiled into them. The cache is keyed by
the text of every file of this package: a change in a helper never leaves a stale kernel behind.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, _CacheLocator

F = TypeVar("F", bound=Callable[..., Any])

# Products may be fused into additions; nothing else of IEEE arithmetic is given up: NaN and
# infinity keep their meaning and sums keep their order.
FASTMATH = {"contract"}
_OPTIONS: dict[str, Any] = {"nogil": True, "fastmath": FASTMATH, "error_model": "numpy"}


def cache_folder() -> Path:
    """Return the folder of the compiled kernels.

    ``CUPYFLASH_CACHE_DIR`` if set, else ``cupyflash`` in the user's cache folder. Its files are
    machine code: it belongs to one user and never lies in a shared temporary folder.
    """
    chosen = os.environ.get("CUPYFLASH_CACHE_DIR")
    if chosen:
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "cupyflash"


@functools.cache
def cache_is_writable() -> bool:
    """Whether `cache_folder` can be written; warns once where it cannot."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"cupyflash cannot keep its compiled CPU kernels in {folder} ({error}): every process "
            "will compile them again. Set CUPYFLASH_CACHE_DIR to a folder that you can write.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _source_stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Locator(_CacheLocator):  # type: ignore[misc]  # Numba has no type stubs
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func)

    def get_cache_path(self) -> str:
        return str(cache_folder())

    def get_source_stamp(self) -> str:
        return _source_stamp()

    def get_disambiguator(self) -> str:
        return _source_stamp()[:16]


class _KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Locator,)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _KernelCacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return super().load_overload(sig, target_context) if cache_is_writable() else None

    def save_overload(self, sig: Any, data: Any) -> None:
        if cache_is_writable():
            super().save_overload(sig, data)


class _Announcer(event.Listener):  # type: ignore[misc]
    """Says on stderr, once in a process, that kernels are being compiled."""

    def __init__(self) -> None:
        self.announced = False

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"].py_func
        if self.announced or function.__module__.rpartition(".")[0] != __package__:
            return
        self.announced = True
        print(
            "cupyflash: compiling its CPU kernels, once for this machine (some seconds) ...",
            file=sys.stderr,
            flush=True,
        )

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())


def helper(function: F) -> F:
    """Compile `function` into every kernel that calls it."""
    compiled: F = numba.njit(function, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)
    return compiled


def kernel(function: F) -> F:
    """Compile `function` at its first call, and keep the machine code on disk.

    The GIL is released while it runs. Argument types are meant to be few (contiguous arrays that
    cupyflash made, integers, floats), so that one accumulator type is one compilation.
    """
    compiled: Any = numba.njit(function, **_OPTIONS)
    compiled._cache = _KernelCache(function)
    result: F = compiled
    return result


def address(array: np.ndarray[Any, Any]) -> int:
    """Return the address of the array's first element."""
    return int(array.__array_interface__["data"][0])
