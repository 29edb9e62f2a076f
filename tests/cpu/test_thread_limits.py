"""How many threads a call uses, and what decides."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from test_threads import output_of, set_threads

from cupyflash import attention
from cupyflash.reference.cpu import thread_limits

__all__ = ["set_threads"]  # a fixture
AFFINITY = "the CPUs that this process may use"


@pytest.fixture
def nobody_else(monkeypatch) -> Iterator[None]:
    """Nothing else limits threads; what is read once is read anew."""
    for name in ("CUPYFLASH_NUM_THREADS", *thread_limits.OTHERS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(thread_limits, "cpu_quota", lambda: None)
    monkeypatch.setattr(thread_limits, "_numba_mask", lambda: None)
    thread_limits._kept_limit.cache_clear()
    yield
    thread_limits._kept_limit.cache_clear()


@pytest.mark.parametrize("text", ["3", " 3 ", "03"])
def test_the_number_of_threads(set_threads, text):
    set_threads(text)
    assert thread_limits.num_threads() == 3


@pytest.mark.parametrize("text", ["", "  "])
def test_by_default_one_per_cpu(set_threads, nobody_else, monkeypatch, text):
    set_threads(text)
    expected = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert thread_limits.num_threads() == expected
    monkeypatch.delenv("CUPYFLASH_NUM_THREADS")
    assert thread_limits.num_threads() == expected
    assert thread_limits.deciding() == (expected, "the CPUs that this process may use")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1e1", "²", "0x2"])
def test_a_wrong_number_of_threads(set_threads, text):
    set_threads(text)
    x = np.ones((1, 3, 4), np.float32)
    out = np.full_like(x, 5)
    with pytest.raises(ValueError, match="CUPYFLASH_NUM_THREADS is ") as caught:
        attention(x, x, x, out=out)
    assert repr(text) in str(caught.value)
    assert "1 or more" in str(caught.value)
    assert "unset" in str(caught.value)
    assert (out == 5).all()


# What others set


@pytest.fixture
def sixteen(nobody_else, monkeypatch) -> None:
    monkeypatch.setattr(thread_limits, "_affinity", lambda: 16)


@pytest.mark.parametrize("name", thread_limits.OTHERS)
@pytest.mark.parametrize(
    ("text", "number"),
    [("3", 3), (" 3 ", 3), ("3,2", 3), ("99", 16), ("", 16), ("0", 16), ("many", 16), ("-1", 16)],
)
def test_variables_of_others(sixteen, monkeypatch, name, text, number):
    """One that is no number is not for this package to refuse."""
    monkeypatch.setenv(name, text)
    assert thread_limits.num_threads() == number
    why = f"{name}={text}" if number == 3 else AFFINITY
    assert thread_limits.deciding() == (number, why)


def test_variables_of_blas_alone_do_not_count(sixteen, monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    assert thread_limits.num_threads() == 16


def test_the_least_decides_and_the_own_variable_overrides(sixteen, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setenv("NUMBA_NUM_THREADS", "5")
    monkeypatch.setattr(thread_limits, "cpu_quota", lambda: 3.2)
    assert thread_limits.deciding() == (4, "a quota of 3.2 CPUs (cgroup)")
    monkeypatch.setattr(thread_limits, "_numba_mask", lambda: 2)
    assert thread_limits.num_threads() == 2
    assert thread_limits.deciding() == (2, "numba.set_num_threads")
    monkeypatch.setattr(thread_limits, "_affinity", lambda: 1)
    assert thread_limits.deciding() == (1, AFFINITY)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "9")
    assert thread_limits.num_threads() == 9
    assert thread_limits.deciding() == (9, "CUPYFLASH_NUM_THREADS=9")


def test_numbas_own_number_is_followed_and_its_threads_are_not_started(tmp_path):
    program = """
        import numba
        from numba.np.ufunc import parallel
        from cupyflash.reference.cpu import thread_limits
        before = thread_limits.num_threads()
        started = parallel._is_initialized
        numba.set_num_threads(1)
        print(started, thread_limits.deciding(), before > 1 or before)
    """
    said = output_of(
        program, tmp_path, CUPYFLASH_NUM_THREADS="", OMP_NUM_THREADS="", NUMBA_NUM_THREADS="2"
    )
    one = len(os.sched_getaffinity(0)) == 1 if hasattr(os, "sched_getaffinity") else False
    assert said.startswith("False Limit(number=1, why='numba.set_num_threads')") or one


GROUPS = {
    "none": ({}, "0::/\n", None),
    "no limit": ({"a/cpu.max": "max 100000"}, "0::/a\n", None),
    "half": ({"a/b/cpu.max": "50000 100000"}, "0::/a/b\n", 0.5),
    "above": ({"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000"}, "0::/a/b\n", 2.5),
    "a container's own root": ({"cpu.max": "150000 100000"}, "0::/not/to/be/seen\n", 1.5),
    "version 1": (
        {"cpu,cpuacct/x/cpu.cfs_quota_us": "300000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
        "5:memory:/x\n4:cpu,cpuacct:/x\n",
        3.0,
    ),
    "version 1 in a container": (
        {"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "10000"},
        "4:cpu,cpuacct:/docker/0123\n",
        2.0,
    ),
    "version 1 without a limit": (
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None,
    ),
    "cpuset is no quota": ({"cpuset/cpu.max": "1 2"}, "4:cpuset:/\n", None),
    "nonsense": ({"cpu.max": "many \xb2"}, "what\n0::/\n", None),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_quotas(tmp_path: Path, name):
    written, told, expected = GROUPS[name]
    for path, text in written.items():
        (tmp_path / "fs" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / path).write_text(text + "\n", encoding="utf-8")
    (tmp_path / "own").write_text(told)
    assert thread_limits.cpu_quota(tmp_path / "fs", tmp_path / "own") == expected
    assert thread_limits.cpu_quota(tmp_path / "fs", tmp_path / "missing") is None


def test_the_number_takes_no_time(sixteen):
    thread_limits.num_threads()
    begin = time.perf_counter()
    for _ in range(1000):
        thread_limits.num_threads()
    assert time.perf_counter() - begin < 0.05  # some 2 microseconds each
