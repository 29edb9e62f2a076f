"""Whether the installed package is the checkout: every file that pyproject.toml puts into it."""

from __future__ import annotations

import tomllib
from pathlib import Path


def files(root: Path) -> dict[str, Path]:
    """The files of the package, by their place in it, from the checkout."""
    table = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = table["package-dir"]
    made: dict[str, Path] = {}
    for package in table["packages"]:
        top = next(
            name
            for name in sorted(folders, key=len, reverse=True)
            if package == name or package.startswith(f"{name}.")
        )
        inner = package.removeprefix(top).strip(".").replace(".", "/")
        place = package.removeprefix("cupyflash").strip(".").replace(".", "/")
        for pattern in ("*.py", *table["package-data"].get(package, ())):
            for path in (root / folders[top] / inner).glob(pattern):
                if path.is_file():
                    name = path.relative_to(root / folders[top] / inner)
                    made[(Path(place) / name).as_posix()] = path
    return made


def difference(root: Path, package: Path) -> str:
    """Say which file of the installed package is missing, differs or is too many; "" for none."""
    wanted = files(root)
    for name, source in wanted.items():
        copy = package / name
        if not copy.is_file():
            return f"{source.relative_to(root)} is not installed"
        if copy.read_bytes() != source.read_bytes():
            return f"{source.relative_to(root)} differs"
    for copy in package.rglob("*"):
        name = copy.relative_to(package).as_posix()
        if copy.is_file() and "__pycache__" not in copy.parts and name not in wanted:
            return f"{name} is installed, and not in the checkout"
    return ""
