"""A plugin of pytest: one file of the package has another text in this process.

Tests that pass with the files as they are run with a mutant so, whatever they import or compile.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

GIVEN = "CUPYFLASH_MUTANT"  # the environment variable with a file and what replaces what


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles a module's changed text."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the changed text; no file of it is kept."""
        code: CodeType = compile(self._text, self.path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the changed module where the others find it as it is."""

    def __init__(self, file: str, before: str, after: str) -> None:
        inside = file.removeprefix("cupyflash/").removesuffix(".py")  # or in reference/
        self._name = "cupyflash." + inside.replace("/", ".")
        self._before, self._after = before, after

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """Return the changed module's spec."""
        if name != self._name:
            return None
        others = [x for x in sys.meta_path if x is not self]
        found = next(filter(None, (x.find_spec(name, path, target) for x in others)))
        text = changed(Path(found.origin).read_text(encoding="utf-8"), self._before, self._after)
        loader = _Loader(name, found.origin, text)
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


def changed(text: str, before: str, after: str) -> str:
    """Return a text with one place changed, which must be there once."""
    if text.count(before) != 1:
        raise ValueError(f"got {text.count(before)} occurrences of {before!r}; expected one")
    return text.replace(before, after)


def _change_kernel(file: str, before: str, after: str) -> None:
    """Let whoever reads a CUDA file get the changed text."""
    from cupyflash.gpu import source

    read = source.read

    def read_changed(path: str) -> str:
        text: str = read(path)
        return changed(text, before, after) if path == file else text

    source.read = read_changed


if GIVEN in os.environ:
    _file, _before, _after = json.loads(os.environ[GIVEN])
    if _file.startswith("kernels_cu/"):
        _change_kernel(_file.removeprefix("kernels_cu/"), _before, _after)
    else:
        sys.meta_path.insert(0, _Finder(_file, _before, _after))
