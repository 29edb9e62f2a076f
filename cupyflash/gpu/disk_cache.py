"""CuPy's folder of compiled kernels: native code, which nobody but the user should write."""

from __future__ import annotations

import os
import warnings

_warned = False


def in_memory() -> bool:
    """Whether CuPy keeps compiled kernels in memory only."""
    return os.environ.get("CUPY_CACHE_IN_MEMORY", "0") not in ("", "0")


def folder() -> str:
    """Return the folder in which CuPy keeps compiled kernels, whether it is there or not."""
    usual = os.path.expanduser("~/.cupy/kernel_cache")  # noqa: PTH111 (no error without a home)
    return os.environ.get("CUPY_CACHE_DIR") or usual


def distrust() -> str:
    """Return in words why code in the folder could be somebody else's; empty if the folder is safe.

    It is also empty if there is no folder, or if the system has no owners and modes.
    """
    if os.name != "posix" or in_memory():
        return ""
    try:
        found = os.stat(folder())  # noqa: PTH116 (a name as CuPy has it)
    except OSError:
        return ""
    if found.st_uid != os.geteuid():
        return (
            "it belongs to another user, who could put code there that is run; choose another one"
        )
    if found.st_mode & 0o022:
        return "others may write to it, and could put code there that is run; use chmod go-w"
    return ""


def warn_once() -> None:
    """Warn of a folder that cannot be trusted, once in a process."""
    global _warned
    if _warned:
        return
    why = distrust()
    if why:
        _warned = True
        warnings.warn(
            f"CuPy keeps compiled kernels in {folder()}: {why}. CUPY_CACHE_DIR names another.",
            RuntimeWarning,
            stacklevel=2,
        )
