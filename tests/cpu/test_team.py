"""Short calls are shared by threads that run no Python, and wait awake for a while."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from own_team import PATIENCE, another_call_has_the_team, counted, word
from placement import same_bits

import cupyflash
from cupyflash.backends import host_quick, host_recent
from cupyflash.problem import replay
from cupyflash.reference.cpu import calls, decode_launch, team, threads

pytestmark = pytest.mark.skipif(not team.IS_POSSIBLE, reason="this system has no team")
SERVE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch):
    """Nothing is known of calls before a test."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(host_recent, "_known", {})
    monkeypatch.setattr(host_quick, "_known", {})


def region(serve, workers: int) -> None:
    """Compute by the team, as a call does that has it; the region gives it back."""
    made = team.of_process()
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(made.region)
    callback = SERVE(serve)
    word(team.AT.taken).value = 1
    run(made.block, ctypes.cast(callback, ctypes.c_void_p).value, 7, workers)
    assert not word(team.AT.taken).value


@pytest.mark.parametrize("pause", [0.0, 3e-9 * team.AWAKE], ids=["awake", "asleep"])
def test_helpers_come(pause):
    team.grow(2)
    for _ in range(3):
        time.sleep(pause)
        deadline = time.monotonic() + PATIENCE
        while pause and word(team.AT.asleep).value < word(team.AT.helpers).value:
            assert time.monotonic() < deadline
            time.sleep(pause)
        together, came = threading.Barrier(3, timeout=PATIENCE), []

        def serve(data, together=together, came=came):
            came.append((threading.get_ident(), data))
            together.wait()

        region(serve, 3)
        assert len({thread for thread, _ in came}) == 3
        assert {data for _, data in came} == {7}


def test_the_caller_waits_for_those_that_came_and_for_no_others():
    team.grow(1)
    caller, inside, left = threading.get_ident(), threading.Event(), []

    def serve(_):
        if threading.get_ident() == caller:
            assert inside.wait(PATIENCE)
        elif not inside.is_set():
            inside.set()
            time.sleep(0.2)
            left.append(1)

    region(serve, 99)  # most of whom do not exist
    assert left == [1]
    came = []
    region(came.append, 1)
    assert came == [7]


def problem(dtype=np.float32, queries=64):
    keys = 600 if queries > 1 else 4000
    x = np.random.default_rng(0).standard_normal((3, 2, 8, keys, 64), np.float32).astype(dtype)
    return x[0][:, :, :queries], x[1], x[2]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("queries", [1, 64])
def test_the_same_bits_as_by_one_thread(dtype, queries, monkeypatch):
    x = problem(dtype, queries)
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    wanted, vjp = cupyflash.attention_vjp(*x)
    gradients = vjp(wanted)[:3]
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "2")
    for _ in range(4):  # checked, then replayed, then recognised
        with counted() as seen:
            assert same_bits(cupyflash.attention(*x), wanted)
        assert seen == [1]
        out, vjp = cupyflash.attention_vjp(*x)
        with counted() as seen:
            for mine, theirs in zip(vjp(out)[:3], gradients, strict=True):
                assert same_bits(mine, theirs)
        assert seen[0] > 0


@pytest.mark.parametrize("queries", [1, 64])
def test_while_another_call_has_the_team_others_compute(queries):
    x = problem(queries=queries)
    wanted, *_ = (cupyflash.attention(*x) for _ in range(3))
    with another_call_has_the_team(), counted() as seen:
        for _ in range(3):
            assert same_bits(cupyflash.attention(*x), wanted)
    assert seen == [0]
    with counted() as seen:
        assert same_bits(cupyflash.attention(*x), wanted)
    assert seen == [1]


@pytest.mark.parametrize("queries", [1, 64])
def test_another_number_of_threads_is_followed(queries, monkeypatch):
    x = problem(queries=queries)
    wanted, *_ = (cupyflash.attention(*x) for _ in range(3))
    for number, regions in (("1", 0), ("2", 1), ("3", 1), ("1", 0)):
        monkeypatch.setenv("CUPYFLASH_NUM_THREADS", number)
        for _ in range(3):
            with counted() as seen:
                assert same_bits(cupyflash.attention(*x), wanted)
            assert seen == [regions]


def test_a_kernel_that_fails_is_an_error(monkeypatch):
    """Its status comes from any thread; the next call is right."""
    x = problem()
    wanted = cupyflash.attention(*x)
    of_blocks = calls.Bound.blocks
    failing = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(lambda _: 5)

    def blocks(self, count):
        _, *rest = of_blocks(self, count)
        return ctypes.cast(failing, ctypes.c_void_p).value, *rest

    monkeypatch.setattr(calls.Bound, "blocks", blocks)
    with pytest.raises(RuntimeError, match="the CPU kernel forward stopped with status 5"):
        cupyflash.attention(*x, scale=0.3)
    monkeypatch.setattr(calls.Bound, "blocks", of_blocks)
    for _ in range(3):
        assert same_bits(cupyflash.attention(*x), wanted)


def test_a_call_that_takes_long_can_be_interrupted_between_its_chunks(monkeypatch):
    """So it is not one call of C: threads that run Python share it."""
    shares = []
    monkeypatch.setattr(team, "compute", lambda *told: shares.append(told) or False)
    x = problem()
    cupyflash.attention(*x)
    assert len(shares) == 1
    monkeypatch.setattr(threads, "AT_ONCE", 1e-9)
    cupyflash.attention(*x, scale=0.3)
    assert len(shares) == 1


def run(program: str, folder: Path) -> str:
    code = "import os, time, threading\nimport numpy as np\nimport cupyflash\n" + program
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PROBLEM = "x = np.random.default_rng(0).standard_normal((3, 2, 8, 200, 64), np.float32)\n"


@pytest.mark.parametrize("pause", ["", "time.sleep(0.05)"], ids=["awake", "asleep"])
def test_a_process_ends_while_helpers_wait(tmp_path, pause):
    program = f"print(sum(cupyflash.attention(*x).shape[0] for _ in range(3)))\n{pause}"
    assert run(PROBLEM + program, tmp_path) == "6\n"


def test_threads_that_come_at_once_make_one_team(tmp_path):
    program = """
from cupyflash.reference.cpu import team
barrier, made = threading.Barrier(4), []
def ask():
    barrier.wait()
    made.append(team.of_process())
several = [threading.Thread(target=ask) for _ in range(4)]
for each in several: each.start()
for each in several: each.join()
print(len(made), len(set(map(id, made))))
"""
    assert run(program, tmp_path) == "4 1\n"


def test_bytes_that_are_counted_do_not_grow_with_changes_of_threads(monkeypatch):
    x, counted_bytes = problem(), []
    for number in "2", "3", "2", "3", "2", "3":
        monkeypatch.setenv("CUPYFLASH_NUM_THREADS", number)
        for _ in range(3):
            cupyflash.attention(*x)
        (entry,) = replay._entries.values()
        counted_bytes.append(entry.nbytes)
    assert counted_bytes[2:4] == counted_bytes[4:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_helpers_of_its_own(tmp_path):
    program = """
from cupyflash.reference.cpu import team
import ctypes
at = lambda place: ctypes.c_int64.from_address(team.of_process().block + 8 * place).value
wanted = [cupyflash.attention(*x) for _ in range(3)][0]
assert at(team.AT.helpers) == 1
child = os.fork()
if not child:
    fresh = at(team.AT.helpers) == 0
    same = [np.array_equal(cupyflash.attention(*x), wanted) for _ in range(3)]
    os._exit(not (fresh and all(same) and at(team.AT.helpers) == 1 and at(team.AT.turn)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert np.array_equal(cupyflash.attention(*x), wanted)
"""
    assert run(PROBLEM + program, tmp_path) == "0\n"


def test_a_first_call_that_waited_makes_no_short_call_a_shared_one(monkeypatch):
    """It may have waited for memory and for code; only the fastest of several says how long."""
    cache = np.random.default_rng(0).standard_normal((2, 1, 6, 50, 48), np.float32)
    q, waits = cache[0, :, :, :1] + 1, iter([1.0])
    real = time.perf_counter
    begun: list[float] = []

    def clock():
        begun.append(real())
        return begun[-1] + (next(waits, 0.0) if len(begun) == 2 else 0.0)

    monkeypatch.setattr(decode_launch, "time", SimpleNamespace(perf_counter=clock))
    for _ in range(6):
        with counted() as seen:
            cupyflash.attention_cached(q, *cache, 40)
        assert seen == [0]
    assert len(begun) >= 4
