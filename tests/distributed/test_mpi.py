"""Real ranks of MPI, in processes of their own, and the example that runs on them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cupyflash.distributed import mpi

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


@pytest.mark.thorough("processes of MPI; the same ranks are threads in quick tests")
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_mpi_give_the_bits_of_threads_and_end_when_one_fails(ranks, tmp_path):
    printed = run("tests/tools/mpi_ranks.py", ranks=ranks, cwd=tmp_path)
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} is right\n" in printed


@pytest.mark.parametrize("highest", [32767, 2**28 - 1, 2**31 - 1])
def test_messages_of_another_size_or_exchange_have_another_tag(highest):
    """They are never received, for Open MPI writes beyond the memory of one that is too short."""
    tags = mpi._Tags(highest)
    sizes = [0, 1, *(2**n for n in range(4, 50, 3)), *(3 * 2**n for n in range(4, 50, 3))]
    made = {(n, size): tags.tag(n, size) for n in range(1, 9) for size in sizes}
    assert all(mpi._DATA <= tag <= highest for tag in made.values())
    for (n, size), tag in made.items():
        assert tags.is_of(tag, n)
        assert not tags.is_of(tag, n + 1)
        assert tag != tags.tag(n + 1, size)
        assert tag != tags.tag(n, 2 * size) or not size
        assert tag != tags.tag(n, size + 8)
    assert not tags.is_of(mpi._NOTE, 0)


def check_table(printed):
    """Every mask has a row, and no difference is larger than rounding explains."""
    lines = printed.splitlines()
    assert lines[0] == "1024 positions on 2 ranks"
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == ["none", "causal", "window", "documents"]
    assert all(float(row[-1]) < 1e-5 for row in rows)


@pytest.mark.thorough("processes of MPI; the same program runs on threads in a quick test")
def test_the_example_on_two_processes(tmp_path):
    check_table(run("examples/ring.py", "--length", "1024", cwd=tmp_path))


@pytest.fixture
def ring():
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield importlib.import_module("ring")
    finally:
        sys.path.remove(str(ROOT / "examples"))


def test_the_example_on_two_threads(ring, capsys):
    assert ring.main(["--threads", "2", "--length", "1024"]) == 0
    check_table(capsys.readouterr().out)


def test_the_example_says_what_is_missing_or_wrong(ring, capsys, monkeypatch):
    assert ring.main(["--threads", "0"]) == 1
    assert "Threads: got 0 ranks; expected 1 or more" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert ring.main([]) == 1
    assert 'pip install ".[mpi]"' in capsys.readouterr().err
    monkeypatch.setattr(ring, "LARGEST", -1.0)
    assert ring.main(["--threads", "1", "--length", "128"]) == 1
