"""The compiled kernels on disk: announced once, found again, never stale, never in the way.

A kernel that compiles in half a second stands for all: that of `combine`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash import attention_varlen_vjp, attention_vjp, lookup, masks, scores
from cupyflash.reference.cpu import jit, kernels

PACKAGE = Path(cupyflash.__file__).parent
REFERENCE = Path(jit.__file__).parent
ANNOUNCEMENT = re.compile(
    r"cupyflash: compiling CPU kernel 1 of 1, combine, once for this machine \.\.\.\n"
    r"cupyflash: compiled in \d+ s"
)
NOT_KEPT = "RuntimeWarning: cupyflash cannot keep its compiled CPU kernels in"

# Prints how many functions of the package were compiled, after a call whose result it checks.
CALL = """
import sys
import numpy as np
from numba.core import event
import cupyflash

class Count(event.Listener):
    compiled = 0

    def on_start(self, what):
        Count.compiled += what.data["dispatcher"].__module__.startswith("cupyflash")

    def on_end(self, what):
        pass

event.register("numba:compile", Count())

def call(dtype=np.float32):
    out, lse = np.ones((3, 2), dtype), np.zeros(3, dtype)
    out, lse = cupyflash.combine([(out, lse), (3 * out, lse)])
    assert out.dtype == lse.dtype == dtype
    assert np.allclose(out, 2) and np.allclose(lse, np.log(2))
"""
ONCE = CALL + "call()\nprint(Count.compiled)\n"


class Run(NamedTuple):
    said: str
    warned: str
    compiled: int

    @property
    def announced(self) -> int:
        return self.warned.count("cupyflash: compiling CPU kernel 1 of 1, combine, ")


def run(program: str, folder: Path, **environment: str | None) -> Run:
    """Run a program in a process of its own; None takes a variable out of its environment."""
    full = os.environ | environment
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env={name: value for name, value in full.items() if value is not None},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.strip()
    return Run(said, done.stderr.strip(), int(said.split()[-1]))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache folder with one kernel, and what was seen as it was made."""
    folder = tmp_path_factory.mktemp("cache") / "not" / "yet"
    first = run(ONCE, folder.parent.parent, CUPYFLASH_CACHE_DIR=str(folder))
    return folder, first


@pytest.fixture
def cache(filled, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(filled[0], tmp_path / "cache"))


def test_the_first_call_says_once_that_it_compiles(filled):
    folder, first = filled
    assert ANNOUNCEMENT.fullmatch(first.warned)
    assert first.compiled >= 1
    (kernel,) = files(folder)
    assert kernel.name.startswith("combine.combine-")
    if os.name == "posix":
        assert folder.stat().st_mode & 0o077 == 0  # machine code belongs to one user
        assert kernel.stat().st_mode & 0o077 == 0


def test_the_second_process_compiles_nothing_and_is_silent(filled):
    folder, _ = filled
    before = [(path, path.stat().st_mtime_ns) for path in files(folder)]
    again = run(ONCE, folder, CUPYFLASH_CACHE_DIR=str(folder))
    assert again.compiled == 0
    assert again.warned == ""
    assert [(path, path.stat().st_mtime_ns) for path in files(folder)] == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits addresses")
def test_a_kernel_is_read_into_no_more_memory_than_it_has(cache, tmp_path):
    program = CALL + (
        "import resource\nimport cupyflash.reference.cpu.launch\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))\n"
        "call()\nprint(Count.compiled)\n"
    )
    seen = run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(cache), CUPYFLASH_NUM_THREADS="1")
    assert (seen.compiled, seen.warned) == (0, "")


def test_importing_compiles_and_writes_nothing(tmp_path):
    program = """
        import sys
        import cupyflash, cupyflash.reference.cpu.launch
        found = [getattr(f, "dispatcher", f) for m in list(sys.modules.values())
                 if getattr(m, "__name__", "").startswith("cupyflash.")
                 for f in vars(m).values()]
        compiled = [f for f in found if hasattr(f, "py_func")]
        assert len(compiled) > 30
        print(sum(len(f.signatures) for f in compiled))
    """
    assert run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(tmp_path / "cache")).compiled == 0
    assert files(tmp_path) == []


@pytest.mark.thorough("what is announced when; that it is announced is quick")
def test_another_dtype_is_announced_too(cache, tmp_path):
    program = CALL + "call()\ncall(np.float64)\ncall()\ncall(np.float64)\nprint(Count.compiled)\n"
    mixed = run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert ANNOUNCEMENT.fullmatch(mixed.warned)
    assert len(files(cache)) == 2
    again = run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert (again.compiled, again.warned) == (0, "")


@pytest.mark.thorough("what is announced when; that it is announced is quick")
def test_other_packages_kernels_are_not_announced(tmp_path):
    program = """
        import cupyflash.reference.cpu.jit, numba
        numba.njit(lambda a: a + 1)(1)
        print(0)
    """
    assert run(program, tmp_path).warned == ""


@pytest.mark.thorough("what is announced when; that it is announced is quick")
def test_a_closed_stderr_is_no_obstacle(tmp_path):
    program = CALL + "import os\nsys.stderr.close()\ncall()\nprint(Count.compiled)\n"
    assert run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(tmp_path)).compiled >= 1


def test_one_compilation_serves_every_problem_of_a_dtype():
    """Batch, strides, masks, scores and dropout are values: a new one must not compile anything."""

    def call(x: np.ndarray, **options: Any) -> None:
        out, vjp = attention_vjp(x, x, x, **options)
        vjp(out)

    x = np.ones((2, 7, 8), np.float32)
    known = kernels.KERNELS
    assert len(known) >= 7
    call(x, bias=np.zeros((1, 7), np.float32), mask=masks.causal())
    x = np.ones((3, 4, 9, 10), np.float32)
    for array in (x, x[:0], x[:1], x[:, :, ::2], x.astype(np.float16), x[0, 0]):
        call(array)
    table = np.arange(4, dtype=np.int8)
    table.flags.writeable = False
    read = lookup(table)
    call(x, mask=masks.lengths(np.array([1, 2, 3])) | masks.window(2, 2), dropout=0.5, seed=3)
    call(x, mask=masks.mask(lambda b, h, i, j: read[h] == i), sink=np.ones(4))
    call(x, score_mod=[scores.alibi(np.ones(4)), scores.softcap(2.0)], bias=np.ones((9, 1)))
    out, vjp = attention_varlen_vjp(x[0], x[0], x[0], [0, 2, 9], [0, 9, 9])
    vjp(out)
    for kernel in known:
        declared = {jit.signature(kernel, np.dtype(x)) for x in "fd"}
        assert set(kernel.dispatcher.signatures) <= declared


# Where the folder is


def test_the_folder(monkeypatch, tmp_path):
    for name in ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if os.name == "posix":
        for home in (tmp_path / "another", tmp_path):  # a home is read anew
            monkeypatch.setenv("HOME", str(home))
            assert jit.cache_folder() == home / ".cache" / "cupyflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert jit.cache_folder() == tmp_path / "xdg" / "cupyflash"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(tmp_path / "own"))
    assert jit.cache_folder() == tmp_path / "own"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "")
    assert jit.cache_folder() == tmp_path / "xdg" / "cupyflash"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "~/c")  # as in a file that no shell reads
    if os.name == "posix":
        assert jit.cache_folder() == tmp_path / "c"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", "here")
    jit._absolute.cache_clear()
    assert jit.cache_folder() == tmp_path / "here"
    monkeypatch.chdir(tmp_path.parent)
    assert jit.cache_folder() == tmp_path / "here"  # one folder, even if the program moves


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_xdg_cache_home_is_honoured(filled, tmp_path):
    shutil.copytree(filled[0], tmp_path / "xdg" / "cupyflash")
    found = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=None, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert (found.compiled, found.warned) == (0, "")


# Where nothing can be written: below a regular file (a mode would not stop the administrator)

TWICE = CALL + "call()\ncall(np.float64)\ncall()\nprint(Count.compiled)\n"


def check_unwritable(seen: Run, folder: str, compiled: int = 2) -> None:
    assert seen.compiled >= compiled  # both dtypes
    assert seen.announced == compiled
    assert seen.warned.count(NOT_KEPT) == 1
    assert seen.warned.count("Warning") == 1
    assert folder in seen.warned
    assert "CUPYFLASH_CACHE_DIR" in seen.warned


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    folder = str(tmp_path / "file" / "cache")
    check_unwritable(run(TWICE, tmp_path, CUPYFLASH_CACHE_DIR=folder), folder)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.skipif(os.name != "posix", reason="HOME names the home of POSIX systems")
@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    variables = {"CUPYFLASH_CACHE_DIR": None, "XDG_CACHE_HOME": None, "LOCALAPPDATA": None}
    home = str(tmp_path / "file")
    check_unwritable(run(TWICE, tmp_path, HOME=home, **variables), home)


@pytest.mark.skipif(os.name != "posix", reason="users without a home are POSIX's")
@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_user_without_a_home(tmp_path):
    variables = ("CUPYFLASH_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME")
    program = """
        import pwd

        def nobody(uid):
            raise KeyError(uid)

        pwd.getpwuid = nobody
    """
    seen = run(textwrap.dedent(program) + TWICE, tmp_path, **dict.fromkeys(variables))
    check_unwritable(seen, os.devnull)
    assert files(tmp_path) == []


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_full_disk(tmp_path):
    program = """
        import errno, os

        def full(*arguments, **keywords):
            raise OSError(errno.ENOSPC, "No space left on device")

        os.replace = full
    """
    folder = tmp_path / "cache"
    seen = run(textwrap.dedent(program) + TWICE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    check_unwritable(seen, "No space left on device")
    assert files(folder) == []  # nothing half written is left


@pytest.mark.skipif(os.name != "posix", reason="limits of processes are POSIX's")
@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_disk_that_takes_only_so_much(tmp_path):
    program = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    folder = tmp_path / "cache"
    seen = run(
        program + TWICE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder), PYTHONDONTWRITEBYTECODE="1"
    )
    check_unwritable(seen, "File too large")
    assert files(folder) == []


@pytest.mark.skipif(os.name != "posix", reason="kills by a signal")
@pytest.mark.thorough("what is damaged is compiled again, which is quick")
def test_killed_while_it_fills_the_folder(tmp_path):
    """What it left is no kernel: the next process compiles, and the one after that finds it."""
    folder = tmp_path / "cache"
    program = f"""
import os, signal
real = os.replace
def kill(*arguments, **keywords):
    if any(x.name.endswith(".tmp") for x in os.scandir({str(folder)!r})):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **keywords)
os.replace = kill
"""
    killed = subprocess.run(
        [sys.executable, "-c", program + TWICE],
        env=os.environ | {"CUPYFLASH_CACHE_DIR": str(folder)},
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    (left,) = files(folder)
    assert left.suffix == ".tmp"
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert seen.compiled >= 1
    assert ANNOUNCEMENT.fullmatch(seen.warned)
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder)).compiled == 0


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_folder_that_vanishes(tmp_path):
    folder = tmp_path / "cache"
    program = CALL + (
        f"import shutil\ncall()\nshutil.rmtree({str(folder)!r})\ncall()\ncall(np.float64)\n"
        "print(Count.compiled)\n"
    )
    seen = run(program, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert seen.announced == 2
    assert "Warning" not in seen.warned
    assert len(files(folder)) == 1


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_the_warning_can_be_an_error_and_the_next_call_works(tmp_path):
    (tmp_path / "file").write_text("")
    program = CALL + (
        "import warnings\nwarnings.simplefilter('error')\n"
        "try:\n    call()\nexcept RuntimeWarning:\n    call()\n    print(Count.compiled)\n"
    )
    folder = str(tmp_path / "file" / "cache")
    assert run(program, tmp_path, CUPYFLASH_CACHE_DIR=folder).compiled >= 1


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_folder_that_can_only_be_read_is_read(cache, tmp_path):
    program = """
        import errno, os

        opened = os.open

        def read_only(path, flags, *arguments, **keywords):
            if flags & os.O_CREAT:
                raise OSError(errno.EROFS, "Read-only file system")
            return opened(path, flags, *arguments, **keywords)

        os.open = read_only
    """
    program = textwrap.dedent(program)
    seen = run(program + ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert (seen.compiled, seen.warned) == (0, "")
    check_unwritable(
        run(program + TWICE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache)), str(cache), compiled=1
    )


# Damage, and many processes


@mostly_thorough(
    "change",
    [
        lambda good: good[: len(good) // 2],
        lambda good: (
            good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
        ),
        lambda good: b"",
    ],
    quick=lambda change: len(change(b"good")) == len(b"good"),
    why="a file that is cut short is damaged, too",
    ids=["cut short", "another byte of the machine code", "empty"],
)
def test_a_damaged_file_is_compiled_again(filled, tmp_path, change):
    (kernel,) = files(filled[0])
    good = kernel.read_bytes()
    assert change(good) != good
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / kernel.name).write_bytes(change(good))
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert seen.compiled >= 1
    assert ANNOUNCEMENT.fullmatch(seen.warned)
    (mended,) = files(folder)
    assert mended.name == kernel.name
    assert len(mended.read_bytes()) == len(good)
    # What was compiled again is found again.
    again = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert (again.compiled, again.warned) == (0, "")


def test_files_that_have_each_others_names_are_compiled_again(cache, tmp_path):
    both = CALL + "call()\ncall(np.float64)\nprint(Count.compiled)\n"
    run(both, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    one, other = files(cache)
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    seen = run(both, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert seen.announced == 2
    again = run(both, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert (again.compiled, again.warned) == (0, "")


@pytest.mark.thorough("other obstacles; a folder that cannot be written is quick")
def test_a_folder_in_the_place_of_a_file(cache, tmp_path):
    (kernel,) = files(cache)
    kernel.unlink()
    kernel.mkdir()
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert seen.compiled >= 1
    assert seen.warned.count(NOT_KEPT) == 1


@pytest.mark.thorough("several processes; a change of the texts is quick")
def test_processes_that_fill_a_folder_at_once(tmp_path):
    """Two dtypes in two orders: no process may get the other dtype's machine code."""
    folder = tmp_path / "cache"
    both = CALL + "for dtype in {}: call(dtype)\nprint(Count.compiled)\n"
    orders = ["(np.float32, np.float64)", "(np.float64, np.float32)"]
    with ThreadPoolExecutor(2) as pool:
        seen = list(
            pool.map(
                lambda order: run(both.format(order), tmp_path, CUPYFLASH_CACHE_DIR=str(folder)),
                orders,
            )
        )
    assert all(re.fullmatch(f"({ANNOUNCEMENT.pattern}\n?)*", one.warned) for one in seen)
    assert len(files(folder)) == 2
    again = run(both.format(orders[0]), tmp_path, CUPYFLASH_CACHE_DIR=str(folder))
    assert (again.compiled, again.warned) == (0, "")
