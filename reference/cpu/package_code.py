"""A digest of a package's code, wherever it lies: in files, in a zip file, in a frozen program."""

from __future__ import annotations

import hashlib
import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType
from typing import Any


def package_stamp(package: str) -> bytes:
    """Return a digest of the code of all modules of a package; empty if they cannot be found.

    A module counts by its file, its source or else its compiled code. So the digest changes with
    the code, and in files also with comments.
    """
    digest, found = hashlib.sha256(), False
    path = getattr(sys.modules.get(package), "__path__", ())
    for finder, name, _ in sorted(pkgutil.iter_modules(path), key=lambda each: each[1]):
        code = _code_of(finder, f"{package}.{name}")
        if not code:
            return b""
        found = True
        for part in (name.encode(), code):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest() if found else b""


def _code_of(finder: Any, module: str) -> bytes:
    """Return what a module's code is made of; empty if its loader does not tell."""
    for ask in _file, _source, _compiled:
        try:
            spec = finder.find_spec(module)
            found = ask(spec.loader, module)
        except (ImportError, OSError, AttributeError, SyntaxError):
            continue
        if found:
            return found
    return b""


def _file(loader: Any, module: str) -> bytes:
    name = loader.get_filename(module)
    # A file of compiled code tells when and where it was made, too.
    return b"" if name.endswith(".pyc") else bytes(loader.get_data(name))


def _source(loader: Any, module: str) -> bytes:
    return (loader.get_source(module) or "").encode()


def _compiled(loader: Any, module: str) -> bytes:
    code = loader.get_code(module)
    return b"" if code is None else "\n".join(_words(code)).encode()


def _words(constant: object) -> Iterator[str]:
    """Yield what a constant consists of, the same in every process: sets have no order."""
    if isinstance(constant, CodeType):
        yield f"{constant.co_name} {constant.co_flags} {constant.co_code.hex()}"
        yield repr((constant.co_argcount, constant.co_kwonlyargcount, constant.co_posonlyargcount))
        yield repr((constant.co_names, constant.co_varnames))
        yield repr((constant.co_freevars, constant.co_cellvars))
        yield from _words(constant.co_consts)
    elif isinstance(constant, tuple):
        yield f"({len(constant)}"
        for each in constant:
            yield from _words(each)
    elif isinstance(constant, frozenset):
        yield repr(sorted(map(repr, constant)))
    else:
        yield f"{type(constant).__name__} {constant!r}"
