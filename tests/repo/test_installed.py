"""Tests stop if the installed package is not the checkout, whichever file differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import installed
import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_OF_EACH = [
    "__init__.py", "py.typed", "masks.py", "reference/cpu/forward.py",
    "reference/algorithms/README.md", "kernels_cu/__init__.py", "kernels_cu/README.md",
    "kernels_cu/common/softmax.cuh", "kernels_cu/simt/forward_simt.cu",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    package = tmp_path_factory.mktemp("site") / "cupyflash"
    for name, source in installed.files(ROOT).items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, package / name)
    return package


@pytest.fixture
def package(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "cupyflash"))


def test_a_copy_is_the_same(package):
    assert installed.difference(ROOT, package) == ""
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "masks.cpython-311.pyc").touch()
    assert installed.difference(ROOT, package) == ""


def test_all_kinds_of_files_are_compared():
    names = installed.files(ROOT)
    assert set(ONE_OF_EACH) <= set(names)
    assert any(name.startswith("data/") for name in names)
    for folder, prefix in (
        ("cupyflash", ""),
        ("reference", "reference"),
        ("kernels_cu", "kernels_cu"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh"}:
                assert (Path(prefix) / path.relative_to(ROOT / folder)).as_posix() in names


@pytest.mark.parametrize("name", [*ONE_OF_EACH, "data"])
def test_a_file_that_differs_or_is_missing(package, name):
    path = package / name
    if path.is_dir():
        path = next(path.iterdir())
    with path.open("ab") as file:
        file.write(b"\n#error\n")
    assert f"{path.name} differs" in installed.difference(ROOT, package)
    path.unlink()
    assert f"{path.name} is not installed" in installed.difference(ROOT, package)


@pytest.mark.parametrize("name", ["gone.py", "kernels_cu/sm90/gone.cuh", "reference/cpu/gone.py"])
def test_a_file_that_was_removed(package, name):
    (package / name).touch()
    assert installed.difference(ROOT, package) == f"{name} is installed, and not in the checkout"
