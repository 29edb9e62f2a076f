"""Real ranks of MPI, in processes of their own, and the example that runs on them."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import mpi_processes
import pytest
from mpi_processes import ROOT, run

from cupyflash.distributed.transport import mpi


def test_mpi_is_found_where_its_wheel_lies(tmp_path, monkeypatch):
    """In another environment than Python's own, of which mpi4py knows nothing."""
    place = tmp_path / "lib" / "python3" / "site-packages"
    about = place / "mpich-5.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mpich\nVersion: 5\n")
    (about / "RECORD").write_text("../../../bin/mpiexec,,\n../../libmpi.so.12,,\n")
    for path in (tmp_path / "bin" / "mpiexec", tmp_path / "lib" / "libmpi.so.12"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.syspath_prepend(place)
    assert mpi_processes.installed() == (tmp_path / "bin" / "mpiexec", tmp_path / "lib")


@pytest.mark.parametrize(
    ("setting", "outcome"), [("", pytest.skip.Exception), ("1", AssertionError)]
)
def test_an_mpi_that_cannot_be_loaded_is_said(setting, outcome, monkeypatch):
    pytest.importorskip("mpi4py")
    monkeypatch.setenv("CI", setting)
    why = "RuntimeError: cannot load MPI library\nlibmpi.so: file too short"
    found = SimpleNamespace(returncode=1, stdout="", stderr=why)
    monkeypatch.setattr(mpi_processes, "installed", lambda: ("mpiexec", None))
    monkeypatch.setattr(mpi_processes.subprocess, "run", lambda *_, **__: found)
    with pytest.raises(outcome, match="file too short"):
        run("program.py")


@pytest.mark.thorough("processes of MPI; the same ranks are threads in quick tests")
@pytest.mark.parametrize("ranks", [2, 3, 4])
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


def check_training(printed, steps):
    """Losses fall from that of a guess, and those of one process are the same."""
    rows = [line.split() for line in printed.splitlines()[2:]]
    assert [int(row[0]) for row in rows] == list(range(1, steps + 1))
    losses = [float(row[1]) for row in rows]
    assert losses[0] == 5.5452  # ln 256
    assert losses[-1] < losses[0] - 0.02
    assert all(row[2] == row[1] for row in rows)
    assert all(float(row[3]) < 1e-11 for row in rows)


@pytest.mark.thorough("processes of MPI; the same program runs on threads in a quick test")
def test_a_model_is_trained_on_two_processes(tmp_path):
    printed = run("examples/train_ranks.py", "--check", "--steps", "4", cwd=tmp_path)
    assert printed.startswith("1024 positions on 2 ranks, zigzag: 512, 512\n")
    check_training(printed, 4)


TINY = "--context 384 --width 16 --heads 2 --layers 1 --steps 3 --batch 1".split()


@pytest.mark.parametrize("threads", [2, 3])
def test_a_model_is_trained_on_threads(threads, train_ranks, capsys):
    assert train_ranks.main([*TINY, "--check", "--threads", str(threads)]) == 0
    check_training(capsys.readouterr().out, 3)


def test_a_training_whose_ranks_do_not_add_gradients_is_found(train_ranks, capsys, monkeypatch):
    summed = train_ranks.summed
    monkeypatch.setattr(
        train_ranks, "summed", lambda comm, x: list(x) if len(x) > 1 else summed(comm, x)
    )
    assert train_ranks.main([*TINY, "--check", "--threads", "2"]) == 1
    assert capsys.readouterr().out


def test_the_training_says_what_is_wrong(train_ranks, capsys, monkeypatch):
    assert train_ranks.main([*TINY, "--threads", "4"]) == 1
    assert "--context: got 384 for 4 ranks; expected 512 or more" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert train_ranks.main([]) == 1
    assert 'pip install ".[mpi]"' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_ranks.main(["--width", "65"])
    assert "--width 65 is not a multiple of --heads 4" in capsys.readouterr().err


def program(name):
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "examples"))


@pytest.fixture
def ring():
    yield from program("ring")


@pytest.fixture
def train_ranks():
    yield from program("train_ranks")


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
