"""How the CPU kernels are compiled, announced and cached.

Kernels are cached on disk per CPU, so that a second process starts in milliseconds. Python and
other kernels call them by their addresses; helpers are compiled into every kernel that calls them.
A call compiles only the kernels that it uses. The cache is keyed by the code of every module of
this package: a change in a helper never leaves a stale kernel behind.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import pickle
import secrets
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import llvmlite
import numba
import numpy as np
from numba import types
from numba.core import cgutils, errors
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import CPUDispatcher
from numba.core.serialize import dumps
from numba.extending import intrinsic

from .package_code import package_stamp

F = TypeVar("F", bound=Callable[..., Any])

# Products may be fused with additions; otherwise this is IEEE arithmetic: NaN and infinity keep
# their meaning, and sums keep their order.
FASTMATH = {"contract"}
# Kernels allocate nothing and count no references: their memory belongs to the caller. There are no
# wrappers through which Python could call them with Python objects.
_OPTIONS: dict[str, Any] = {
    "nogil": True, "fastmath": FASTMATH, "error_model": "numpy", "_nrt": False,
    "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "nopython": True,
}  # fmt: skip


def cache_folder() -> Path:
    """Return the folder of the compiled kernels.

    ``CUPYFLASH_CACHE_DIR`` if set, else ``cupyflash`` in the user's cache folder. Its files are
    machine code: it belongs to one user and never lies in a shared temporary folder. A leading
    ``~`` is the user's home. A relative name is that of a folder in the working directory of the
    first call.
    """
    root = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    name = os.environ.get("CUPYFLASH_CACHE_DIR") or os.path.join(root, "cupyflash")  # noqa: PTH118
    try:
        folder = Path(name).expanduser()
        return folder if folder.is_absolute() else _absolute(folder)
    except (RuntimeError, OSError):
        # A user without a home or a working directory, as in some containers: an impossible folder.
        return Path(os.devnull) / "cupyflash"


@functools.cache
def _absolute(folder: Path) -> Path:
    """Return a folder's place, the same one if the working directory changes."""
    return folder.absolute()


def cache_obstacle() -> str:
    """Return in words why kernels cannot be kept in `cache_folder`; empty if they can.

    The folder is created if necessary.
    """
    try:
        with _opened_folder(make=True) as folder:
            probe = _temporary("probe")
            os.close(_new_file(folder, probe))
            os.unlink(_in_folder(folder, probe), dir_fd=folder)
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _UntrustedError(PermissionError):
    """A folder or file that somebody else could have written, so that its code is not run."""

    def __init__(self, what: str, found: os.stat_result) -> None:
        whose = "belongs to another user" if found.st_uid != os.geteuid() else "is open to others"
        remedy = "use chmod go-w" if found.st_uid == os.geteuid() else "choose another one"
        super().__init__(
            errno.EPERM, f"the {what} {whose}, who could put code there that is run; {remedy}"
        )


_POSIX = os.name == "posix"
_MOST_BYTES = 2**28  # of a file with one kernel
_TEMPORARY, _OLD = ".tmp", 24 * 3600  # ending of files that are being written; seconds


@contextlib.contextmanager
def _opened_folder(make: bool = False) -> Iterator[int | None]:
    """Open `cache_folder`, which must belong to the user and be writable by nobody else.

    Yields its descriptor: even if its path changes afterwards, files are looked for in the folder
    that was checked. On Windows, which has no such descriptors, yields None.
    """
    path = cache_folder()
    if make:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _POSIX:
        yield None
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise _UntrustedError("folder", found)
        yield folder
    finally:
        os.close(folder)


def _in_folder(folder: int | None, name: str) -> str:
    return name if folder is not None else str(cache_folder() / name)


def _new_file(folder: int | None, name: str) -> int:
    """Create a file that only the user can read and write, and return its descriptor."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_BINARY", 0)
    return os.open(_in_folder(folder, name), flags, 0o600, dir_fd=folder)


def _temporary(name: str) -> str:
    return f"{name}-{os.getpid()}-{secrets.token_hex(8)}{_TEMPORARY}"


def _read_file(folder: int | None, name: str) -> bytes:
    """Return a regular file's bytes; raises OSError for anything else."""
    flags = os.O_RDONLY
    if _POSIX:  # do not wait for a FIFO
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    else:
        flags |= getattr(os, "O_BINARY", 0)
    handle = os.open(_in_folder(folder, name), flags, dir_fd=folder)
    with open(handle, "rb") as file:  # noqa: PTH123 (a handle, not a path)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
            raise OSError(errno.EINVAL, "it is not a file with a kernel")
        if _POSIX and (found.st_uid != os.geteuid() or found.st_mode & 0o022):
            raise _UntrustedError("file", found)
        return file.read(found.st_size)  # reads no more than that


def _write_file(folder: int | None, name: str, content: bytes) -> None:
    """Write a file beside its place, and put it there when it is whole."""
    temporary = _temporary(name)
    handle = _new_file(folder, temporary)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123
            file.write(content)
        os.replace(
            _in_folder(folder, temporary),
            _in_folder(folder, name),
            src_dir_fd=folder,
            dst_dir_fd=folder,
        )
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(_in_folder(folder, temporary), dir_fd=folder)
        # On Windows, nobody can replace a file that another process reads. It is the same kernel.
        kept = isinstance(error, PermissionError) and not _POSIX
        if not (kept and Path(_in_folder(folder, name)).exists()):
            raise


def _sweep(folder: int | None) -> None:
    """Remove what processes left behind that were killed while they wrote."""
    for name in os.listdir(cache_folder() if folder is None else folder):  # noqa: PTH208
        if name.endswith(_TEMPORARY):
            path = _in_folder(folder, name)
            with contextlib.suppress(OSError):
                if time.time() - os.stat(path, dir_fd=folder).st_mtime > _OLD:
                    os.unlink(path, dir_fd=folder)


# Read when the package is imported: later, its files may differ from the code that runs here.
_STAMP = package_stamp(__package__ or "")


# What changes Numba's code, besides its arguments and the CPU.
_CODE_FLAGS = (
    "OPT", "BOUNDSCHECK", "DEBUGINFO_DEFAULT", "DISABLE_INTEL_SVML", "ENABLE_AVX",
    "LLVM_REFPRUNE_FLAGS", "LLVM_REFPRUNE_PASS", "LOOP_VECTORIZE", "SLP_VECTORIZE",
)  # fmt: skip


# Without the code, nobody could tell a later version's kernels from these.
_NO_CODE = OSError(
    errno.ENOENT, "the package's code cannot be read; use files or a zip file instead of this form"
)


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + code).digest()


class _KernelCache:
    """Where Numba looks for a kernel's machine code and stores it: one file per signature.

    A file's name depends on everything that its code depends on, and its content begins with a
    digest of its name and the rest. So processes that fill a folder at the same time cannot mix up
    signatures (as they can with an index file, which Numba's own cache has), and a file that is
    damaged or has another one's name is ignored. A file is code: it is read only if it and its
    folder belong to the user and nobody else may write to them.
    """

    warned = False  # in this process

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        code = function.__code__  # a kernel may be defined outside this package
        constants = [repr(x) for x in code.co_consts if not isinstance(x, CodeType)]
        self._text = code.co_code, constants, code.co_names
        self._found: dict[Any, Any] = {}

    @property
    def cache_path(self) -> str:
        return str(cache_folder())

    def _file(self, sig: Any, codegen: Any) -> str:
        versions = (numba.__version__, llvmlite.__version__, sys.implementation.cache_tag)
        flags = [(name, getattr(numba.config, name, None)) for name in _CODE_FLAGS]
        key = repr((versions, flags, _STAMP, self._name, self._text, sig, codegen.magic_tuple()))
        return f"{self._name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.bin"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return self._found.pop(sig, None) or self._load(sig, target_context)

    def _load(self, sig: Any, target_context: Any) -> Any:
        name = self._file(sig, target_context.codegen())
        try:
            if not _STAMP:
                raise _NO_CODE
            with _opened_folder() as folder:
                stored = _read_file(folder, name)
        except OSError as error:
            if isinstance(error, _UntrustedError) or error is _NO_CODE:
                self._warn(error)
            return None
        size = len(_digest("", b""))
        if _digest(name, stored[size:]) != stored[:size]:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(stored[size:]))
        except Exception:  # noqa: BLE001 (whatever it holds, it is no kernel: compile it anew)
            return None

    def find(self, sig: Any, target_context: Any) -> bool:
        """Load a signature for the next `load_overload`, and return whether there is one."""
        self._found[sig] = self._load(sig, target_context)
        return self._found[sig] is not None

    def save_overload(self, sig: Any, compiled: Any) -> None:
        if compiled.lifted or compiled.library.has_dynamic_globals:
            return  # the code holds addresses of this process
        if not _STAMP:
            return
        name, code = self._file(sig, compiled.codegen), dumps(compiled._reduce())
        try:
            with _opened_folder(make=True) as folder:
                _sweep(folder)
                _write_file(folder, name, _digest(name, code) + code)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not _KernelCache.warned:
            _KernelCache.warned = True
            warnings.warn(
                f"cupyflash cannot keep its compiled CPU kernels in {cache_folder()} "
                f"({error.strerror or error}): every process will compile them again. Set "
                "CUPYFLASH_CACHE_DIR to a folder of yours that is writable.",
                RuntimeWarning,
                stacklevel=2,
            )

    def flush(self) -> None:
        """Do nothing: a new compilation replaces the file of the old one."""


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads, so it must not inherit a lock that one of
    # them holds while it compiles.
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=global_compiler_lock.release,
    )


def _dispatcher(function: Callable[..., Any]) -> Any:
    """Return Numba's object that compiles a function, also where `numba.njit` returns it as it is.

    ``NUMBA_DISABLE_JIT`` is meant for functions of a user, who wants to see their lines run.
    """
    return CPUDispatcher(function, targetoptions=dict(_OPTIONS))


@contextlib.contextmanager
def _jit_enabled() -> Iterator[None]:
    """Let Numba compile its own functions, of which kernels use some."""
    disabled = numba.config.DISABLE_JIT
    numba.config.DISABLE_JIT = 0
    try:
        yield
    finally:
        numba.config.DISABLE_JIT = disabled


def helper(function: F) -> F:
    """Compile `function` into every kernel that calls it."""
    compiled: F = _dispatcher(function)
    return compiled


class Kernel:
    """A function that is compiled once for each accumulator and called by its address.

    Attributes
    ----------
    dispatcher : numba.core.dispatcher.Dispatcher
        Numba's object that compiles it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__, self.__module__ = function.__name__, function.__module__
        self.dispatcher: Any = _dispatcher(function)
        self.dispatcher._cache = _KernelCache(function)


def kernel(function: Callable[..., Any]) -> Kernel:
    """Make a kernel, whose machine code is kept on disk. `takes` says what types it takes."""
    return Kernel(function)


# The types that kernels take; `number` stands for the accumulator's.
INT = types.int64
INTS = types.Array(types.int64, 1, "C")
TABLE = types.Array(types.int64, 2, "C")


def vector(number: types.Type) -> types.Array:
    """Return the type of a contiguous array with one axis."""
    return types.Array(number, 1, "C")


def whole_rows(number: types.Type) -> types.Array:
    """Return the type of a contiguous array with two axes."""
    return types.Array(number, 2, "C")


Types = Callable[[types.Type], tuple[types.Type, ...]]
_types: dict[Kernel, Types] = {}


def takes(types_of: Types) -> Callable[[Kernel], Kernel]:
    """Declare what a kernel takes, given the accumulator's type; nothing else compiles it."""

    def declare(compiled: Kernel) -> Kernel:
        _types[compiled] = types_of
        return compiled

    return declare


def caller(compiled: Kernel, result: Any = types.none) -> Any:
    """Make the function ``call(pointer, arguments)`` by which kernels call another kernel.

    `compiled` is a kernel that returns a `result`. It is not compiled into its callers; they get
    its address from `pointer_of`, so that a call compiles only what it uses.
    """

    @intrinsic
    def call(typingctx: Any, pointer: Any, arguments: Any) -> Any:
        came = tuple(types.unliteral(each) for each in arguments)
        if came not in [_types[compiled](number) for number in _NUMBERS]:
            raise errors.TypingError(f"{compiled.__name__} got {came}, which it does not take")
        signature = result(INT, types.Tuple(came))

        def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            kinds = tuple(sig.args[1])
            convention = context.call_conv
            kind = convention.get_function_type(sig.return_type, kinds)
            function = builder.inttoptr(args[0], kind.as_pointer())
            values = cgutils.unpack_tuple(builder, args[1])
            status, value = convention.call_function(
                builder, function, sig.return_type, kinds, values
            )
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return value

        return signature, codegen

    return call


_NUMBERS = types.float32, types.float64
Report = Callable[[str, int, int], None]  # a kernel's name, its number, how many there are
Wanted = tuple[Kernel, np.dtype[Any]]  # a kernel, and the accumulator that it computes in
_ready: dict[Wanted, int] = {}


def declared() -> list[Kernel]:
    """Return all kernels that say what they take."""
    return list(_types)


def signature(compiled: Kernel, number: np.dtype[Any]) -> tuple[types.Type, ...]:
    """Return the types that a kernel takes, given its accumulator."""
    return _types[compiled](numba.from_dtype(number))


def prepare(wanted: Iterable[Wanted], report: Report | None = None) -> None:
    """Load or compile kernels, before threads call them.

    Parameters
    ----------
    wanted : iterable of (kernel, dtype)
        The kernels, and the accumulator of each.
    report : callable, optional
        Called before each kernel is compiled, with its name, its number and how many there are. By
        default, this is printed to stderr.
    """
    missing = [each for each in dict.fromkeys(wanted) if each not in _ready]
    if not missing:
        return
    with global_compiler_lock:
        signatures = [signature(*each) for each in missing]
        known = [
            each.dispatcher._cache.find(wants, each.dispatcher.targetctx)
            for (each, _), wants in zip(missing, signatures, strict=True)
        ]
        announcer, told = _Announcer(), 0
        for each, wants, is_known in zip(missing, signatures, known, strict=True):
            name, dispatcher = each[0].__name__, each[0].dispatcher
            if not is_known:
                told += 1
                (report or announcer.begin)(name, told, known.count(False))
            with _jit_enabled():
                dispatcher.compile(wants)
            overload = dispatcher.overloads[wants]
            pointer = overload.library.get_pointer_to_function(overload.fndesc.llvm_func_name)
            _ready[each] = pointer
        if told and report is None:
            announcer.end()


class _Announcer:
    """Says on stderr which kernels are being compiled."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()

    def begin(self, name: str, number: int, count: int) -> None:
        so_far = f", {self._seconds()} so far" if number > 1 else ", once for this machine"
        self._say(f"compiling CPU kernel {number} of {count}, {name}{so_far} ...")

    def end(self) -> None:
        self._say(f"compiled in {self._seconds()}")

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._begin:.0f} s"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed stderr is no reason to fail
            print(f"cupyflash: {text}", file=sys.stderr, flush=True)


def pointer_of(compiled: Kernel, number: np.dtype[Any]) -> int:
    """Return the address of a kernel that `prepare` has made ready."""
    return _ready[compiled, number]
