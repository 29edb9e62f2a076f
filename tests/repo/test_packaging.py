"""What is in the wheel and in the sdist, and that the wheel's content works by itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from cupyflash.hints import install

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MAPPING = {
    "cupyflash": "cupyflash",
    "reference": "cupyflash/reference",
    "kernels_cu": "cupyflash/kernels_cu",
}
BESIDE = ".ci", ".github", "backend", "docs", "examples", "tests"  # of the sdist alone


def copied(folder: Path) -> Path:
    """Copy what a build reads."""
    sources = folder / "sources"
    sources.mkdir()
    left_out = shutil.ignore_patterns("__pycache__", "*.nb?", "*.egg-info", "*_cache")
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":  # which is a file in a worktree
            shutil.copy(path, sources / path.name)
    for name in (*MAPPING, *BESIDE):
        shutil.copytree(ROOT / name, sources / name, ignore=left_out)
    return sources


def run_build(sources: Path, folder: Path, *options: str) -> None:
    """Build offline."""
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        *options,
        "--outdir",
        str(folder),
        ".",
    ]
    done = subprocess.run(
        command,
        cwd=sources,
        env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def build(folder: Path, time: float) -> Path:
    """Build a wheel and an sdist offline from a copy of the sources whose files have this time."""
    sources = copied(folder)
    for path in sources.rglob("*"):
        os.utime(path, (time, time))
    # Without --wheel and --sdist the wheel is built from the sdist: so the sdist is complete.
    run_build(sources, folder)
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    return build(tmp_path_factory.mktemp("build"), 1.6e9)


@pytest.fixture(scope="module")
def wheel(built: Path) -> set[str]:
    (path,) = built.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


@pytest.fixture(scope="module")
def sdist(built: Path) -> set[str]:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def shipped() -> dict[str, str]:
    """Every file that the package needs: its place in the checkout -> its place in the wheel."""
    found = {}
    for folder, package in MAPPING.items():
        for path in (ROOT / folder).rglob("*"):
            data = (
                path.suffix in {".py", ".cu", ".cuh"}
                or path.name == "py.typed"
                or path.parent == ROOT / "cupyflash" / "data"
            )
            if path.is_file() and data and "__pycache__" not in path.parts:
                inside = path.relative_to(ROOT / folder).as_posix()
                found[f"{folder}/{inside}"] = f"{package}/{inside}"
    return found


def test_every_file_is_in_the_wheel(wheel):
    assert set(shipped().values()) - wheel == set()


def test_the_data_and_the_cuda_sources_are_in_the_wheel(wheel):
    assert "cupyflash/py.typed" in wheel
    assert "cupyflash/data/demo.npz" in wheel
    assert "cupyflash/kernels_cu/common/philox.cuh" in wheel
    assert "cupyflash/kernels_cu/README.md" in wheel
    assert "cupyflash/reference/algorithms/README.md" in wheel


def test_every_file_is_in_the_sdist(sdist):
    """So its tests run, also those that read the repository, and its site can be built."""
    beside = {
        path.relative_to(ROOT).as_posix()
        for folder in (*BESIDE, "kernels_cu")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and not {"__pycache__", ".hypothesis"} & set(path.parts)
    }
    top = {path.name for path in ROOT.iterdir() if path.is_file() and path.name != ".git"}
    assert {*shipped(), *beside, *top} - sdist == set()
    assert not [name for name in sdist if name.endswith((".pyc", ".nbi", ".nbc"))]


@pytest.mark.thorough("a second build; what the first one holds is quick")
def test_a_build_can_be_repeated(built, tmp_path):
    """Of the same sources at another time comes the same wheel and sdist, byte by byte."""
    again = build(tmp_path, 1.7e9)
    for pattern in ("*.whl", "*.tar.gz"):
        (first,), (second,) = built.glob(pattern), again.glob(pattern)
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes(), first.name


def test_nothing_of_an_earlier_build_is_in_the_wheel(tmp_path):
    """`pip install .` from a clone builds there, beside what it built before."""
    sources = copied(tmp_path)
    for name in ("lib", "lib.linux-x86_64-cpython-311", "docs"):
        (sources / "build" / name / "cupyflash").mkdir(parents=True)
        (sources / "build" / name / "cupyflash" / "removed.py").touch()
    run_build(sources, tmp_path, "--wheel")
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
    assert "cupyflash/api.py" in names
    assert not [name for name in names if name.endswith("removed.py")]
    assert (
        sources / "build" / "docs" / "cupyflash" / "removed.py"
    ).exists()  # is not ours to clear


def test_only_cupyflash_is_at_the_top_of_the_wheel(wheel):
    tops = {name.partition("/")[0] for name in wheel}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert len(info) == 1
    assert tops - info == {"cupyflash"}


def test_no_tests_and_no_caches_are_shipped(wheel):
    for name in wheel:
        assert "__pycache__" not in name
        assert not name.startswith(("tests/", "cupyflash/tests/"))


def test_the_metadata(built, wheel):
    (path,) = built.glob("*.whl")
    (name,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    metadata = zipfile.ZipFile(path).read(name).decode()
    header = metadata.partition("\n\n")[0].splitlines()
    import cupyflash

    assert f"Version: {cupyflash.__version__}" in header
    assert "Requires-Python: >=3.11" in header
    assert "License-Expression: Apache-2.0" in header
    assert "Description-Content-Type: text/markdown" in header
    hard = [
        line.partition(": ")[2]
        for line in header
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert sorted(line.partition("<")[0].partition(">")[0] for line in hard) == ["numba", "numpy"]


def works_away_from_the_checkout(site: Path) -> None:
    """Use the package that lies in the folder `site`, from there."""
    program = f"""
import sys
sys.path.insert(0, {str(site)!r})
from pathlib import Path
import numpy as np
import cupyflash, cupyflash.kernels_cu, cupyflash.reference.spec.naive
for module in (cupyflash, cupyflash.kernels_cu, cupyflash.reference.spec.naive):
    assert Path(module.__file__).is_relative_to({str(site)!r}), module.__file__
q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
out = cupyflash.reference.spec.naive.attention(q, k, v).out
assert out.shape == q.shape
from cupyflash.reference.algorithms import flash_attention
assert np.allclose(flash_attention.forward(q[0], k[0], v[0]).o, out[0])
assert cupyflash.analysis.causal_tiles(1024, 1024, 32, 32).visited == 528
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=site, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_wheel_works(built, tmp_path):
    (path,) = built.glob("*.whl")
    zipfile.ZipFile(path).extractall(tmp_path)
    works_away_from_the_checkout(tmp_path)


@pytest.mark.thorough("a second build; what the sdist holds is quick")
def test_pip_installs_the_sdist(built, tmp_path):
    (path,) = built.glob("*.tar.gz")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "--target", str(tmp_path), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    works_away_from_the_checkout(tmp_path)


def test_the_citation_has_the_version_and_the_license():
    import cupyflash

    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {cupyflash.__version__}" in lines
    assert f"license: {PROJECT['project']['license']}" in lines


@pytest.mark.parametrize("name", ["tests", "release"])
def test_workflows_start_by_hand_alone(name):
    """A person lets them start otherwise, and what they run and install is there."""
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    started = text.partition("\non:\n")[2].partition("\n\n")[0].splitlines()
    events = [line.strip() for line in started if re.match(r" {2}\w", line)]
    assert events == ["workflow_dispatch:"]
    for folder in re.findall(r"\btests/\w+", text):
        assert (ROOT / folder).is_dir(), folder
    for extra in re.findall(r'"\.\[(\w+)\]"', text):
        assert extra in PROJECT["project"]["optional-dependencies"]


def test_the_extras_are_those_documented():
    extras = PROJECT["project"]["optional-dependencies"]
    assert set(extras) == {
        "cuda12", "cuda13", "bf16", "bench", "docs", "examples", "verify", "test", "dev",
        "jax", "mpi", "nccl", "nccl13", "torch",
    }  # fmt: skip
    page = (ROOT / "docs" / "install.md").read_text()
    for extra in extras:
        assert f"`{extra}`" in page, f"docs/install.md does not name the extra {extra}"


def test_remedies_install_from_the_clone():
    """The package is on no index, so that `pip install cupyflash[...]` would find nothing."""
    texts = {path: path.read_text() for path in (ROOT / "cupyflash").rglob("*.py")}
    assert not [path for path, text in texts.items() if "cupyflash[" in text]
    named = {name for text in texts.values() for name in re.findall(r'\bextra\("(\w+)"', text)}
    assert {"bench", "cuda12"} <= named <= PROJECT["project"]["optional-dependencies"].keys()
    assert install.CUPY == 'pip install ".[cuda12]" or ".[cuda13]" in the clone of cupyflash'
