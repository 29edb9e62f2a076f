"""Programs on real ranks of MPI, in processes of their own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REMEDY = 'pip install ".[test]" has mpi4py and an MPI'
SECONDS = 300


def run(program, *arguments, ranks=2, cwd=None):
    """Run a program on ranks of MPI."""
    beside = Path(sys.executable).parent / "mpiexec"  # of a wheel of MPI
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        assert not os.environ.get("CI"), REMEDY
        pytest.skip(f"mpi4py or mpiexec is not there: {REMEDY}")
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py", str(ROOT / program)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    root |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    done = subprocess.run(
        [*command, *arguments], cwd=cwd, env=os.environ | root, capture_output=True, text=True,
        check=False, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
