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
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

GIVEN = "CUPYFLASH_MUTANT"  # the environment variable: a file, where its text is, and tests


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

    def __init__(self, file: str, text: str) -> None:
        inside = file.removeprefix("cupyflash/").removesuffix(".py")  # or in reference/
        self._name, self._text = "cupyflash." + inside.replace("/", "."), text

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        """Return the changed module's spec."""
        if name != self._name:
            return None
        others = [x for x in sys.meta_path if x is not self]
        found = next(filter(None, (x.find_spec(name, path, target) for x in others)))
        loader = _Loader(name, found.origin, self._text)
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


def _change_kernel(file: str, text: str) -> None:
    """Let whoever reads a CUDA file get the changed text."""
    from cupyflash.gpu import source

    read = source.read
    source.read = lambda path: text if path == file else read(path)


def has_words(item: str, tests: Iterable[tuple[str, str, list[str]]]) -> bool:
    """Whether the name of a test, as pytest has it, is one of those that are wanted."""
    file, _, name = item.partition("::")
    function, _, case = name.lower().partition("[")
    return any(
        file.endswith(wanted) and function == of and all(word in case for word in words)
        for wanted, of, words in tests
    )


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that are wanted."""
    items[:] = [x for x in items if GIVEN not in os.environ or has_words(x.nodeid, _tests)]


if GIVEN in os.environ:
    _file, _changed, _tests = json.loads(os.environ[GIVEN])
    _new = Path(_changed).read_text(encoding="utf-8")
    if _file.endswith(".py"):
        sys.meta_path.insert(0, _Finder(_file, _new))
    else:
        _change_kernel(_file, _new)
