"""One string of CUDA C++ per kernel: a prelude, the kernel's file with its includes, expressions.

Each quoted include is replaced once by its file: so the compiler needs no include path, and the
disk cache, whose key is the text, sees every change.
"""

from __future__ import annotations

import functools
import posixpath
import re
from collections.abc import Callable
from importlib.resources import files

from .specialisation import FLAGS, Specialisation

_VOCABULARY = ("common/expression.cuh",)  # what generated code calls
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*\n', re.MULTILINE)
_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*\n", re.MULTILINE)


def prelude(special: Specialisation) -> str:
    """Return the compile-time values that a kernel's source begins with."""
    values = ((flag.name, flag.value(special)) for flag in FLAGS)
    lines = [
        f"constexpr {type(value).__name__} {name} = {str(value).lower()};" for name, value in values
    ]
    lines.append(f"#define KERNEL_NAME {special.name}")
    return "\n".join(lines) + "\n"


def source(special: Specialisation) -> str:
    """Return the whole text of a kernel, which includes nothing."""
    paths = (special.spec.source, *(_VOCABULARY if special.functions.source else ()))
    return prelude(special) + flatten(paths) + special.functions.source


def read(path: str) -> str:
    """Return a file of `kernels_cu`."""
    return files("cupyflash.kernels_cu").joinpath(path).read_text(encoding="utf-8")


@functools.cache
def flatten(paths: tuple[str, ...]) -> str:
    """Return files of `kernels_cu`, with every include replaced by that file, once each."""
    return flatten_with(paths, read)


def flatten_with(paths: tuple[str, ...], read: Callable[[str], str]) -> str:
    """Return what `flatten` does, of files that `read` returns."""
    seen: set[str] = set()

    def flat(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        folder = posixpath.dirname(path)

        def included(match: re.Match[str]) -> str:
            return flat(posixpath.normpath(posixpath.join(folder, match[1])))

        return f"// {path}\n" + _INCLUDE.sub(included, _ONCE.sub("", read(path))) + "\n"

    return "".join(flat(path) for path in paths)
