"""Windows and macOS, as far as Python shows a program what they lack.

`become` is called in a process of its own, before cupyflash is imported and after the packages that
were built for this system. From then on, `os`, `mmap`, `ctypes`, `sys.platform` and files below
/proc and /sys are those that cupyflash would see there. What differs in machine code is not
simulated, nor are paths with drives.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.abc
import io
import pathlib
import sys
import tempfile
from types import ModuleType
from typing import Any

# Names of `os` that Linux has: what Windows and macOS lack, and what Windows alone lacks.
_LINUX_ONLY = """
sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler
sched_setscheduler sched_rr_get_interval sched_param O_TMPFILE O_PATH O_DIRECT O_NOATIME O_LARGEFILE
memfd_create pidfd_open getrandom eventfd eventfd_read eventfd_write posix_fadvise posix_fallocate
copy_file_range splice getxattr setxattr listxattr removexattr fdatasync pipe2 unshare setns
""".split()
_POSIX_ONLY = """
fork forkpty register_at_fork geteuid getuid getgid getegid getgroups getpgid getpgrp getpriority
setpriority getresuid getresgid getsid setsid setuid setgid seteuid setegid setpgid killpg nice
getloadavg sysconf sysconf_names pathconf fpathconf confstr uname chown fchown lchown chroot fchdir
mkfifo mknod major minor makedev openpty ttyname tcgetpgrp tcsetpgrp ctermid pread pwrite preadv
pwritev readv writev sendfile lockf statvfs fstatvfs sync wait wait3 wait4 waitid WNOHANG
posix_spawn posix_spawnp sched_yield sched_get_priority_max sched_get_priority_min O_CLOEXEC
O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC O_NOCTTY O_ASYNC O_NDELAY O_ACCMODE RTLD_LAZY
RTLD_NOW RTLD_GLOBAL RTLD_LOCAL RTLD_NODELETE RTLD_NOLOAD fchmod get_blocking set_blocking
""".split()
_NO_MODULES = {
    "nt": {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "readline"},
    "darwin": set(),
}
# What chooses its code by the system when it is imported.
_OF_THIS_SYSTEM = """
ml_dtypes numpy asyncio subprocess multiprocessing.connection multiprocessing.popen_fork
multiprocessing.resource_tracker multiprocessing.util concurrent.futures.process shutil platform
importlib.metadata importlib.resources urllib.request webbrowser zipfile tracemalloc
""".split()
_WITH_FOLDERS = "open", "unlink", "remove", "stat", "rename", "replace", "mkdir", "rmdir", "link"


def become(system: str) -> None:
    """Make this process one on "nt", which is Windows, or on "darwin", which is macOS."""
    for name in _OF_THIS_SYSTEM:
        importlib.import_module(name)
    import numba

    numba.njit(lambda x: x + 1)(1)
    is_windows = system == "nt"
    sys.modules["os"] = _os(is_windows)
    sys.modules["mmap"] = _mmap(is_windows)
    sys.platform = "win32" if is_windows else "darwin"
    sys.meta_path.insert(0, _Missing(_NO_MODULES[system]))
    for name in _NO_MODULES[system]:
        sys.modules.pop(name, None)
    _without_linux_files()
    if is_windows:
        _without_the_process_as_a_library()


class _UnavailableError(RuntimeError):
    """What Python raises for an argument that a system does not have."""


def _os(is_windows: bool) -> ModuleType:
    import os

    made = ModuleType("os")
    vars(made).update(vars(os))
    for name in [*_LINUX_ONLY, *(_POSIX_ONLY if is_windows else ())]:
        vars(made).pop(name, None)
    if is_windows:
        made.name = "nt"
        made.O_BINARY = 0
        for name in _WITH_FOLDERS:
            setattr(made, name, _without_folders(getattr(os, name)))
        made.supports_dir_fd = set()
        made.open = _remembering(made.open)
        for name in ("unlink", "remove", "rename", "replace"):
            setattr(made, name, _not_of_open_files(getattr(made, name)))
    return made


def _without_folders(function: Any) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        for name in ("dir_fd", "src_dir_fd", "dst_dir_fd"):
            if keywords.pop(name, None) is not None:
                raise _UnavailableError(f"{name} is unavailable on this platform")
        return function(*args, **keywords)

    return call


_open_files: dict[int, tuple[int, int]] = {}  # descriptor -> which file it was opened for


def _remembering(function: Any) -> Any:
    import os

    def call(*args: Any, **keywords: Any) -> int:
        handle: int = function(*args, **keywords)
        _open_files[handle] = _which(os.fstat(handle))
        return handle

    return call


def _which(found: Any) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _not_of_open_files(function: Any) -> Any:
    """Refuse what would remove or replace a file that is still open."""
    import os

    def is_open(path: Any) -> bool:
        if not pathlib.Path(path).exists():
            return False
        file = _which(pathlib.Path(path).stat())
        for handle, opened in list(_open_files.items()):
            try:
                if opened == file == _which(os.fstat(handle)):
                    return True
            except OSError:  # it was closed
                del _open_files[handle]
        return False

    def call(*paths: Any, **keywords: Any) -> Any:
        for path in paths:
            if isinstance(path, (str, os.PathLike)) and is_open(path):
                raise PermissionError(13, "The process cannot access the file", str(path))
        return function(*paths, **keywords)

    return call


def _mmap(is_windows: bool) -> ModuleType:
    import mmap

    made = ModuleType("mmap")
    vars(made).update(vars(mmap))
    kept = () if is_windows else ("MADV_NORMAL", "MADV_WILLNEED", "MADV_DONTNEED", "MADV_FREE")
    for name in list(vars(made)):
        if name.startswith("MADV_") and name not in kept:
            delattr(made, name)
    return made


class _Missing(importlib.abc.MetaPathFinder):
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> None:
        if name in self._names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _without_linux_files() -> None:
    def is_linux(path: Any) -> bool:
        return str(path).startswith(("/proc", "/sys"))

    def refusing(function: Any) -> Any:
        def call(path: Any, *args: Any, **keywords: Any) -> Any:
            if is_linux(path):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return function(path, *args, **keywords)

        return call

    builtins.open = refusing(builtins.open)
    io.open = refusing(io.open)
    for name in ("read_text", "read_bytes", "write_text", "open"):
        setattr(pathlib.Path, name, refusing(getattr(pathlib.Path, name)))
    pathlib.Path.exists = lambda self, **how: not is_linux(self) and _exists(self, **how)
    tempfile.tempdir = tempfile.gettempdir()


_exists = pathlib.Path.exists


def _without_the_process_as_a_library() -> None:
    plain = ctypes.CDLL

    def library(name: Any, *args: Any, **keywords: Any) -> Any:
        if name is None:
            raise TypeError("expected str, bytes or os.PathLike object, not NoneType")
        return plain(name, *args, **keywords)

    ctypes.CDLL = library
