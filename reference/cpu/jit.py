"""How the CPU kernels are compiled, announced and cached.

Kernels (functions that Python calls) are cached on disk per CPU, so that a second process starts in
milliseconds; helpers (functions that kernels call) are compiled into them. The cache is keyed by
the text of every file of this package: a change in a helper never leaves a stale kernel behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from numba.core import event
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.serialize import dumps

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
    try:
        return (Path(root) if root else Path("~/.cache").expanduser()) / "cupyflash"
    except RuntimeError:  # a user without a home, as in some containers: a folder that cannot be
        return Path(os.devnull) / "cupyflash"


def cache_is_writable() -> bool:
    """Whether kernels can be kept in `cache_folder`, which is made if it is not there."""
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _source_stamp() -> bytes:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.digest()


# Read when the package is imported: later its files may hold another text than what runs here.
_STAMP = _source_stamp()


class _KernelCache:
    """Where Numba looks for a kernel's machine code, and leaves it: one file per signature.

    A file's name hangs on all that its code hangs on, and it begins with a digest of the rest.
    Processes that fill a folder at once therefore cannot mix up signatures (those that share an
    index file, as in Numba's own cache, can), and a damaged file counts as none.
    """

    warned = False  # in this process

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        code = function.__code__  # a kernel may be defined outside this package
        constants = [repr(x) for x in code.co_consts if not isinstance(x, CodeType)]
        self._text = code.co_code, constants, code.co_names

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def _path(self, sig: Any, codegen: Any) -> Path:
        versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
        key = repr((versions, _STAMP, self._name, self._text, sig, codegen.magic_tuple()))
        return cache_folder() / f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        try:
            stored = self._path(sig, target_context.codegen()).read_bytes()
        except OSError:
            return None
        size = hashlib.sha256().digest_size
        if hashlib.sha256(stored[size:]).digest() != stored[:size]:
            return None
        return CompileResult._rebuild(target_context, *pickle.loads(stored[size:]))

    def save_overload(self, sig: Any, compiled: Any) -> None:
        if compiled.lifted or compiled.library.has_dynamic_globals:
            return  # the code holds addresses of this process
        code = dumps(compiled._reduce())
        path = self._path(sig, compiled.codegen)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f"{self._name}-", dir=path.parent)
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 (a handle, not a path)
                    file.write(hashlib.sha256(code).digest() + code)
                Path(temporary).replace(path)
            finally:
                Path(temporary).unlink(missing_ok=True)
        except OSError as error:
            self._warn(path.parent, error)

    def _warn(self, folder: Path, error: OSError) -> None:
        if not _KernelCache.warned:
            _KernelCache.warned = True
            warnings.warn(
                f"cupyflash cannot keep its compiled CPU kernels in {folder} "
                f"({error.strerror or error}): every process will compile them again. Set "
                "CUPYFLASH_CACHE_DIR to a folder of yours that is writable.",
                RuntimeWarning,
                stacklevel=2,
            )

    def flush(self) -> None:
        """Do nothing: a new compilation replaces the file of the old one."""


class _Announcer(event.Listener):  # type: ignore[misc]
    """Says on stderr, once in a process, that kernels are being compiled."""

    def __init__(self) -> None:
        self.announced = False

    def on_start(self, event: Any) -> None:
        # Hears of every function that Numba compiles in this process, other packages' too.
        module = getattr(event.data["dispatcher"], "__module__", None) or ""
        if self.announced or module.rpartition(".")[0] != __package__:
            return
        self.announced = True
        text = "cupyflash: compiling its CPU kernels, once for this machine (some seconds) ..."
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            print(text, file=sys.stderr, flush=True)

    def on_end(self, event: Any) -> None:
        pass


event.register("numba:compile", _Announcer())

if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads: it must not inherit a lock that one of them
    # holds while it compiles.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


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
