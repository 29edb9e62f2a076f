"""In CI, tests that should run there do not skip in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from allowed_skips import WITHOUT, forbidden
from emulator import build

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("reason", "without", "fine"),
    [
        ("CuPy is not installed", "", True),
        ("this CPU has no AMX for bfloat16", "", True),
        ('needs PyTorch: pip install ".[torch]"', "", False),
        ('needs PyTorch: pip install ".[torch]"', "torch", True),
        ('needs JAX: pip install ".[jax]"', "", False),
        ('needs JAX: pip install ".[jax]"', "jax", True),
        ('needs JAX: pip install ".[jax]"', "torch", False),
        ("this page has code for jax, which is not installed", "jax", True),
        ("g++ is not installed, and this test compiles CUDA C++ with it", "jax torch", False),
        ("NVRTC cannot be used (ImportError: no module)", "jax torch", False),
        ('pip install ".[bench]"', "", False),
        ("mpi4py or mpiexec is not there: pip install mpi4py mpich", "", False),
    ],
)
def test_reasons(reason, without, fine):
    assert forbidden([reason, reason], without) == ([] if fine else [reason])


PROGRAMS = {
    "emulator": ("tests/cuda/test_emulator_matrix.py", "PATH", "g++ is not installed"),
    "nvrtc": ("tests/cuda/test_nvrtc.py", None, "cuda-bindings is not installed"),
    "torch": ("tests/frontend/test_torch_names.py", None, "PyTorch"),
    "jax": ("tests/frontend/test_jax.py", None, "JAX"),
}


def run(folder: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run tests where something is missing: a module that cannot be imported, or all programs."""
    file, variable, _ = PROGRAMS[name]
    module = {"nvrtc": "cuda", "emulator": "no_module"}.get(name, name)
    (folder / "sitecustomize.py").write_text(f"import sys; sys.modules[{module!r}] = None\n")
    environment = os.environ | {"PYTHONPATH": str(folder)} | more
    environment |= {variable: str(folder)} if variable else {}
    for unset in ("CUPYFLASH_TEST_SHARE", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(unset, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ROOT / file)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_missing_in_ci_is_a_failure(tmp_path, name):
    done = run(tmp_path, name, CI="true", **{WITHOUT: ""})
    assert done.returncode == 1, done.stdout + done.stderr
    assert PROGRAMS[name][2] in done.stdout
    assert " passed" not in done.stdout or name == "nvrtc"  # of which one needs no compiler


def test_elsewhere_it_is_a_skip(tmp_path):
    environment = {"CI": "", WITHOUT: ""}
    assert run(tmp_path, "torch", **environment).returncode in {0, 5}
    if build.missing() is None:
        done = run(tmp_path, "torch", CI="true", **{WITHOUT: "torch"})
        assert done.returncode in {0, 5}, done.stdout
