"""Kernels are kept under the code that they were made from, in whatever form a package comes."""

from __future__ import annotations

import compileall
import shutil
import zipfile
from pathlib import Path

import pytest
from halves import mostly_thorough
from test_cache import ONCE, PACKAGE, REFERENCE, cache, files, filled, run

from cupyflash.reference.cpu.package_code import package_stamp

__all__ = ["cache", "filled"]  # fixtures

# Prints what a package of kernels computes, and how many it compiled.
TWINS = """
import sys
{before}
import numpy as np
from twins import jit, rows_launch
out, lse = np.ones((3, 2)), np.zeros(3)
rows_launch.combine([(out, lse)], out, lse)
print(out[0, 0], len(rows_launch.combine_kernel.dispatcher.stats.cache_misses))
"""


def copied(folder: Path, old: str = "", new: str = "") -> Path:
    """Copy the package of kernels as `twins`; `combine.py` gets another text."""
    to = folder / "twins"
    shutil.copytree(REFERENCE, to, ignore=shutil.ignore_patterns("__pycache__"))
    text = (to / "combine.py").read_text()
    assert old in text
    (to / "combine.py").write_text(text.replace(old, new, 1) if old else text)
    return to


def zipped(twins: Path) -> Path:
    archive = twins.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(twins.rglob("*")):
            file.write(path, f"twins/{path.relative_to(twins)}")
    return archive


def without_sources(twins: Path) -> Path:
    """Leave compiled modules only."""
    compileall.compile_dir(twins, quiet=2, legacy=True)
    for path in twins.rglob("*.py"):
        path.unlink()
    return twins.parent


# A finder as frozen programs have it: there are no files, only code, and it can list its modules.
FROZEN = """
import importlib.util, marshal, os, pkgutil
folder = sys.path.pop(0)
codes = {}
for name in sorted(os.listdir(os.path.join(folder, "twins"))):
    if name.endswith(".py"):
        text = open(os.path.join(folder, "twins", name)).read()
        codes["twins." + name[:-3]] = compile(text, name, "exec")
codes["twins"] = codes.pop("twins.__init__")

class Frozen:
    def find_spec(self, name, path=None, target=None):
        if name not in codes:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=name == "twins")
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(codes[module.__name__], module.__dict__)
    def get_code(self, name):
        return codes[name]
    def get_filename(self, name):
        return "/nowhere/" + name
    def get_data(self, path):
        raise OSError(path)
    def iter_modules(self, prefix=""):
        return [(prefix + name[6:], False) for name in codes if name != "twins"] if LISTS else []

frozen = Frozen()
sys.meta_path.insert(0, frozen)
def hook(path):
    if path != "/nowhere/twins":
        raise ImportError
    return frozen
sys.path_hooks.insert(0, hook)
original = importlib.util.spec_from_loader
def spec(name, loader, is_package):
    made = original(name, loader, is_package=is_package)
    if is_package:
        made.submodule_search_locations.append("/nowhere/twins")
    return made
importlib.util.spec_from_loader = spec
"""
# A line of the kernel, and what one release has instead.
LINE = "out[row, d] = math.copysign(most[d], out[row, d])"


@mostly_thorough(
    "form", ["zip", "pyc", "frozen"], quick=["pyc", "frozen"],
    why="the loader of a zip file has texts, as that of a folder; these have code alone",
)  # fmt: skip
def test_another_releases_kernels_are_not_run(tmp_path, form):
    """Two releases without source files in folders, and one folder of kernels."""
    found, before = [], ""
    for number, factor in enumerate(("1", "2", "1")):
        site = tmp_path / str(number)
        twins = copied(
            site,
            f"if abs(out[row, d]) > most[d]:\n                {LINE}",
            f"out[row, d] = {factor}",
        )
        if form == "zip":
            site = zipped(twins)
        elif form == "pyc":
            site = without_sources(twins)
        else:
            before = FROZEN.replace("LISTS", "True")
        program = TWINS.format(before=f"sys.path.insert(0, {str(site)!r})\n" + before)
        found.append(run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(tmp_path / "cache")))
    assert [each.said for each in found] == ["1.0 1", "2.0 1", "1.0 0"]
    assert not any("Warning" in each.warned for each in found)


def test_code_that_cannot_be_read_is_not_kept(tmp_path):
    copied(tmp_path)
    before = f"sys.path.insert(0, {str(tmp_path)!r})\n" + FROZEN.replace("LISTS", "False")
    seen = run(TWINS.format(before=before), tmp_path, CUPYFLASH_CACHE_DIR=str(tmp_path / "cache"))
    assert seen.said == "1.0 1"
    assert seen.warned.count("Warning") == 1
    assert "the package's code cannot be read" in seen.warned
    assert not (tmp_path / "cache").exists()


def test_the_digest_of_compiled_code_is_the_same_in_every_process(tmp_path):
    """Sets of constants have another order in each."""
    twins = copied(tmp_path)
    (twins / "one.py").write_text("def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e'}\n")
    program = (
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
        + FROZEN.replace("LISTS", "True")
        + "from twins import package_code\nprint(package_code.package_stamp('twins').hex(), 0)\n"
    )
    said = {run(program, tmp_path, PYTHONHASHSEED=str(seed)).said for seed in (1, 2, 3)}
    assert len(said) == 1
    assert len(said.pop()) == 64 + 2


def test_a_package_that_is_not_there_has_no_digest():
    assert package_stamp("cupyflash.nowhere") == b""


@pytest.mark.thorough("installs a copy of the package")
def test_any_change_of_the_kernels_texts_counts(filled, cache, tmp_path):
    """Also of a file that the cached kernel does not use: nobody has to know which does."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "cupyflash", ignore=shutil.ignore_patterns("__pycache__"))
    # In an editable install this part of the package lies elsewhere.
    copied = site / "cupyflash" / "reference"
    if not copied.exists():
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REFERENCE.parent, copied, ignore=ignore)
        shutil.copytree(REFERENCE.parents[1] / "kernels_cu", site / "cupyflash" / "kernels_cu")
    environment = {"CUPYFLASH_CACHE_DIR": str(cache), "PYTHONPATH": str(site)}
    where = "import cupyflash.reference.cpu.jit as jit\nprint(jit.__file__)\n"
    same = run(where + ONCE, tmp_path, **environment)
    assert str(site) in same.said
    assert same.compiled == 0  # the folder of the package does not count, its texts do
    changed = copied / "cpu" / "softmax.py"
    text = changed.read_text()
    changed.write_text(text + "# A comment.\n")
    assert run(ONCE, tmp_path, **environment).compiled >= 1
    assert run(ONCE, tmp_path, **environment).compiled == 0
    changed.write_text(text)
    assert run(ONCE, tmp_path, **environment).compiled == 0  # the first kernel is still there
    assert len(files(cache)) == 2


@pytest.mark.thorough("several processes; a change of the texts is quick")
def test_a_change_while_a_process_runs_leaves_no_stale_kernel(tmp_path):
    """Kernels are kept under the texts that were imported, not under those of a later moment."""
    site = tmp_path / "site"
    shutil.copytree(REFERENCE, site / "twins", ignore=shutil.ignore_patterns("__pycache__"))
    program = """
        import pathlib, sys
        import numpy as np
        from twins import jit, rows_launch
        text = pathlib.Path(jit.__file__).parent / "softmax.py"
        if sys.argv[1:] == [] and {change}:
            text.write_text(text.read_text() + "# A comment.\\n")
        out, lse = np.ones((3, 2)), np.zeros(3)
        rows_launch.combine([(out, lse)], out, lse)
        print(len(rows_launch.combine_kernel.dispatcher.stats.cache_misses))
    """
    environment = {"CUPYFLASH_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(site)}
    assert run(program.format(change=True), tmp_path, **environment).compiled == 1
    assert run(program.format(change=False), tmp_path, **environment).compiled == 1
    assert run(program.format(change=False), tmp_path, **environment).compiled == 0
