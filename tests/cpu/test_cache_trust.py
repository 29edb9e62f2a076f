"""The compiled kernels on disk are code: whose files are run, and what else lies in the folder."""

from __future__ import annotations

import hashlib
import os
import pickle
import textwrap
import time
from pathlib import Path

import pytest
from halves import mostly_thorough
from test_cache import ANNOUNCEMENT, NOT_KEPT, ONCE, cache, files, filled, run

__all__ = ["cache", "filled"]  # fixtures

POSIX = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


class Evil:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def poison(kernel: Path, mark: Path) -> None:
    """Put a file in a kernel's place whose digest is right, and which does something when read."""
    payload = pickle.dumps(Evil(mark))
    kernel.write_bytes(hashlib.sha256(payload).digest() + payload)
    kernel.chmod(0o600)


def refused(cache: Path, tmp_path: Path, program: str = "") -> str:
    """Run with a poisoned cache that nobody may trust; return what was warned."""
    (kernel,) = files(cache)
    mark = tmp_path / "mark"
    seen = run(textwrap.dedent(program) + ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert not mark.exists(), "another user's code was run"
    assert seen.compiled >= 1
    assert seen.warned.count(NOT_KEPT) == 1
    assert kernel.exists()
    return seen.warned


@POSIX
@mostly_thorough("mode", [0o777, 0o770, 0o702], quick=[0o702], why="more bits of the same mode")
def test_a_folder_that_others_may_write_to(cache, tmp_path, mode):
    (kernel,) = files(cache)
    poison(kernel, tmp_path / "mark")
    cache.chmod(mode)
    warned = refused(cache, tmp_path)
    assert "is open to others" in warned
    assert "chmod go-w" in warned


@POSIX
@mostly_thorough("mode", [0o666, 0o620], quick=[0o620], why="more bits of the same mode")
def test_a_file_that_others_may_write_to(cache, tmp_path, mode):
    (kernel,) = files(cache)
    poison(kernel, tmp_path / "mark")
    kernel.chmod(mode)
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert not (tmp_path / "mark").exists()
    assert seen.compiled >= 1
    assert "is open to others" in seen.warned


@POSIX
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_a_folder_of_another_user(cache, tmp_path):
    """As with sudo, where the home is still the user's."""
    (kernel,) = files(cache)
    poison(kernel, tmp_path / "mark")
    program = "import os\nreal = os.geteuid()\nos.geteuid = lambda: real + 1\n"
    assert "belongs to another user" in refused(cache, tmp_path, program)


@POSIX
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_a_link_in_the_place_of_a_file(cache, tmp_path):
    (kernel,) = files(cache)
    elsewhere = tmp_path / "elsewhere"
    kernel.rename(elsewhere)
    poison(elsewhere, tmp_path / "mark")
    kernel.symlink_to(elsewhere)
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert not (tmp_path / "mark").exists()
    assert seen.compiled >= 1
    assert ANNOUNCEMENT.fullmatch(seen.warned)
    assert not kernel.is_symlink()  # a kernel took its place
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache)).compiled == 0


@POSIX
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_a_folder_by_a_link_is_the_folder(cache, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(cache)
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(link)).compiled == 0


@POSIX
@pytest.mark.parametrize("what", ["fifo", "huge", "payload", "nothing to rebuild"])
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_what_is_no_kernel_counts_as_none(cache, tmp_path, what):
    (kernel,) = files(cache)
    kernel.unlink()
    if what == "fifo":
        os.mkfifo(kernel, 0o600)
    elif what == "huge":
        with kernel.open("wb") as file:
            file.truncate(2**40)
    else:
        payload = b"no pickle" if what == "payload" else pickle.dumps((1, 2, 3))
        kernel.write_bytes(hashlib.sha256(payload).digest() + payload)
    if what != "fifo":
        kernel.chmod(0o600)
    seen = run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert seen.compiled >= 1
    assert ANNOUNCEMENT.fullmatch(seen.warned)
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache)).compiled == 0


@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_what_killed_processes_left_is_removed_some_day(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    old, young = cache / "a-1-00.tmp", cache / "b-2-00.tmp"
    for file in (old, young):
        file.write_bytes(b"half a kernel")
    os.utime(old, (time.time() - 3 * 24 * 3600,) * 2)
    run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("flag", [{"NUMBA_OPT": "1"}, {"NUMBA_BOUNDSCHECK": "1"}])
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_flags_that_change_the_code_have_kernels_of_their_own(cache, tmp_path, flag):
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache), **flag).compiled >= 1
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache), **flag).compiled == 0
    assert run(ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache)).compiled == 0
    assert len(files(cache)) == 2


@POSIX
@pytest.mark.thorough("processes for each; what others may write to is quick")
def test_files_are_private_whatever_the_umask(tmp_path):
    cache = tmp_path / "cache"
    run("import os\nos.umask(0)\n" + ONCE, tmp_path, CUPYFLASH_CACHE_DIR=str(cache))
    (kernel,) = files(cache)
    assert kernel.stat().st_mode & 0o077 == 0
    assert cache.stat().st_mode & 0o077 == 0
