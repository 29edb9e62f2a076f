"""CuPy's folder of compiled kernels: one warning where somebody else could write to it."""

import os
import sys
import warnings

import pytest
from host_cupy import HostCupy

from cupyflash.gpu import disk_cache
from cupyflash.gpu import jit as compiler

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """CuPy's folder, in a process that has neither compiled nor warned."""
    made = tmp_path / "kernels"
    made.mkdir(mode=0o700)
    monkeypatch.setitem(sys.modules, "cupy", HostCupy())
    monkeypatch.setattr(disk_cache, "_warned", False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(made))
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY", raising=False)
    return made


def warned():
    """Compile two kernels, and return what was warned."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for name in ("one", "two"):
            compiler._compiled(name, "", 0)
    return [str(x.message) for x in found]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to(folder, mode):
    folder.chmod(mode)
    (message,) = warned()
    for words in (str(folder), "others may write to it", "chmod go-w", "CUPY_CACHE_DIR"):
        assert words in message
    assert warned() == []  # once in a process


def test_a_folder_of_another_user(folder, monkeypatch):
    somebody_else = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody_else)
    (message,) = warned()
    assert "belongs to another user" in message


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_of_ones_own(folder, mode):
    folder.chmod(mode)
    assert warned() == []


def test_a_folder_that_is_not_there_and_one_in_memory(folder, monkeypatch):
    folder.chmod(0o777)
    monkeypatch.setenv("CUPY_CACHE_IN_MEMORY", "1")
    assert warned() == []
    monkeypatch.delenv("CUPY_CACHE_IN_MEMORY")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(folder / "new"))
    assert warned() == []
    monkeypatch.delenv("CUPY_CACHE_DIR")
    monkeypatch.setenv("HOME", str(folder))
    there = folder / ".cupy" / "kernel_cache"
    there.mkdir(parents=True)
    there.chmod(0o777)
    (message,) = warned()
    assert str(there) in message
