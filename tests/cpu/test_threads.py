"""Threads and processes: the same bits from any thread, and nothing waits for ever."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from placement import same_bits

from cupyflash import attention_varlen_vjp, attention_vjp, masks, scores
from cupyflash.reference.cpu import threads

PATIENCE = 120  # seconds, after which something that should have ended has not
CAN_FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


@pytest.fixture
def set_threads(monkeypatch):
    return lambda number: monkeypatch.setenv("CUPYFLASH_NUM_THREADS", str(number))


def in_time(function: Any) -> Any:
    """Return what a function returns, or fail where it does not return."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert results, "it failed, or it has not returned"
    return results[0]


# Handing out work


@pytest.mark.parametrize("number", [1, 2, 3, 8])
@pytest.mark.parametrize("items", [0, 1, 2, 7, 100, 1000])
def test_every_item_is_computed_once(set_threads, number, items):
    set_threads(number)
    done, sizes = np.zeros(items, int), []

    def run(first: int, last: int) -> None:
        assert first < last
        sizes.append(last - first)
        done[first:last] += 1

    threads.parallel(run, items)
    assert (done == 1).all()
    if number > 1 and items > number:
        assert len(sizes) >= min(items, 16 * number)  # small chunks, so that all end together
        assert max(sizes) == max(1, items // (16 * number))


def test_the_caller_and_its_helpers_work_at_once(set_threads):
    set_threads(3)
    together = threading.Barrier(3, timeout=PATIENCE)
    workers = set()

    def run(first: int, last: int) -> None:
        if first < 3:
            together.wait()  # passes only if three threads are here
        workers.add(threading.get_ident())

    threads.parallel(run, 3)
    assert len(workers) == 3
    assert threading.get_ident() in workers


def occupy_the_pool(task: Callable[[], object]) -> Callable[[], None]:
    """Let every thread of the pool be busy with a task; return what waits for their ends."""
    pool = threads._pool
    pool.grow(1)
    jobs = [threads._Job(lambda first, last: task(), 1, 1, 1, None) for _ in range(pool.size)]
    gates = [threads._Gate() for _ in jobs]
    for each in zip(jobs, gates, strict=True):
        pool.jobs.put(each)

    def wait() -> None:
        for job, gate in zip(jobs, gates, strict=True):
            deadline = time.monotonic() + PATIENCE
            while not (gate in job.entered and threads._acquire(gate.lock, threads._TRY)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert job.error is None

    return wait


def test_a_busy_pool_keeps_nobody_waiting(set_threads):
    set_threads(2)
    release, busy = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        assert release.wait(PATIENCE)

    occupied = occupy_the_pool(occupy)
    assert busy.wait(PATIENCE)
    try:
        done: list[int] = []
        in_time(
            lambda: threads.parallel(lambda first, last: done.extend(range(first, last)), 40) or 1
        )
        assert sorted(done) == list(range(40))  # all by the caller
    finally:
        release.set()
        occupied()


def test_a_late_helper_finds_nothing_to_do(set_threads):
    """A kernel that ran after its caller has returned would write to memory that is not its own."""
    set_threads(2)
    release = threading.Event()
    occupied = occupy_the_pool(lambda: release.wait(PATIENCE))
    calls: list[str] = []

    def run(first: int, last: int) -> None:
        calls.append(threading.current_thread().name)
        raise ValueError("the first chunk fails, so that others are left")

    with pytest.raises(ValueError, match="the first chunk fails"):
        threads.parallel(run, 64)
    release.set()
    occupied()
    occupy_the_pool(int)()  # the helper was in the queue before this
    assert calls == [threading.current_thread().name]


def test_no_caller_opens_the_gate_of_another_one(set_threads, monkeypatch):
    """The gate of a call is open again, and in use by another one, before the call has returned."""
    set_threads(2)
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    pool, acquire = threads._pool, threads._acquire
    first, release, busy, inside, leave = (threading.Event() for _ in range(5))
    done, others = np.zeros(2, bool), list[threading.Thread]()
    gates: list[Any] = []

    def compute(begin: int, end: int) -> None:
        if threading.current_thread() is not others[0]:  # a helper
            inside.set()
            assert leave.wait(PATIENCE)
        else:
            assert inside.wait(PATIENCE)
        done[begin:end] = True

    def acquired(lock: int, how: int) -> int:
        """Let much happen in another thread once the first call has closed its gate."""
        result: int = acquire(lock, how)
        if how == threads._WAIT and not first.is_set():
            first.set()
            release.set()
            deadline = time.monotonic() + PATIENCE
            while not any(gate.lock == lock for gate in pool._gates):  # until it is open again
                assert time.monotonic() < deadline
                time.sleep(0.01)
            pool._gates[:] = [gate for gate in pool._gates if gate.lock == lock]
            gates.extend(pool._gates)
            others.append(threading.Thread(target=threads.parallel, args=(compute, 2)))
            others[0].start()
            assert inside.wait(PATIENCE)
        return result

    monkeypatch.setattr(threads, "_acquire", acquired)
    occupied = occupy_the_pool(lambda: busy.set() or release.wait(PATIENCE))
    assert busy.wait(PATIENCE)
    in_time(lambda: threads.parallel(lambda begin, end: None, 2) or 1)
    occupied()
    try:
        others[0].join(0.5)
        assert others[0].is_alive(), "it has returned, and a helper computes"
    finally:
        leave.set()
        others[0].join(PATIENCE)
    assert done.all()
    assert pool._gates == gates


def test_calls_within_calls(set_threads):
    set_threads(4)
    done = np.zeros((8, 8), int)

    def outer(first: int, last: int) -> None:
        for row in range(first, last):

            def inner(begin: int, end: int, row: int = row) -> None:
                done[row, begin:end] += 1

            threads.parallel(inner, 8)

    in_time(lambda: threads.parallel(outer, 8) or 1)
    assert (done == 1).all()


def test_without_new_threads_the_caller_does_the_work(set_threads, monkeypatch):
    set_threads(4)

    def start(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "_pool", threads._Pool())
    monkeypatch.setattr(threading.Thread, "start", start)
    done: list[int] = []
    threads.parallel(lambda first, last: done.extend(range(first, last)), 50)
    assert done == list(range(50))


def test_the_pool_grows(set_threads, monkeypatch):
    monkeypatch.setattr(threads, "_pool", threads._Pool())
    for number in (2, 5, 3):
        set_threads(number)
        together = threading.Barrier(number, timeout=PATIENCE)
        threads.parallel(lambda first, last, wait=together.wait: wait(), number)
    assert threads._pool.size == 4


# Exceptions


class Broken(Exception):
    pass


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_exception_comes_out_once_all_have_stopped(set_threads, number):
    set_threads(number)
    running, left, raised = itertools.count(), [], threading.Event()

    def run(first: int, last: int) -> None:
        n = next(running)
        if n == 0:
            raised.set()
            raise Broken("chunk 0")
        assert raised.wait(PATIENCE)
        time.sleep(0.2)  # until it has been noticed
        left.append(n)

    with pytest.raises(Broken, match="chunk 0"):
        threads.parallel(run, 10_000)
    begun = next(running)
    assert len(left) == begun - 1  # those that had begun have ended
    assert begun <= number  # and no other was begun
    time.sleep(0.05)
    assert next(running) == begun + 1


def test_an_exception_of_a_helper_comes_out(set_threads):
    set_threads(2)
    caller, failed = threading.get_ident(), threading.Event()

    def run(first: int, last: int) -> None:
        if threading.get_ident() != caller:
            failed.set()
            raise Broken("in a helper")
        assert failed.wait(PATIENCE)

    with pytest.raises(Broken, match="in a helper"):
        threads.parallel(run, 100)
    done: list[int] = []
    threads.parallel(lambda first, last: done.append(first), 4)  # the pool still works
    assert sorted(done) == [0, 1, 2, 3]


# The same bits


def calls() -> list[Any]:
    """Return calls, each a function that returns its results, different in shapes and dtypes."""

    def filled(*shape: int, dtype: Any) -> np.ndarray:
        return np.random.default_rng(shape).standard_normal(shape).astype(dtype)

    def dense(dtype: Any, len_q: int, len_k: int, **options: Any) -> Any:
        q, k = filled(2, 4, len_q, 24, dtype=dtype), filled(2, 2, len_k, 24, dtype=dtype)
        v = filled(1, 2, len_k, 17, dtype=dtype)

        def run() -> Any:
            out, lse, vjp = attention_vjp(q, k, v, return_lse=True, **options)
            return out, lse, *(x for x in vjp(out, lse) if x is not None)

        return run

    def packed(dtype: Any) -> Any:
        x, offsets = filled(3, 400, 8, dtype=dtype), [0, 5, 5, 300, 400]

        def run() -> Any:
            out, vjp = attention_varlen_vjp(x, x, x, offsets, offsets, mask=masks.causal())
            return out, *vjp(out)[:3]

        return run

    f16, b16, f32, f64 = np.float16, ml_dtypes.bfloat16, np.float32, np.float64
    window = masks.window(40, 3)
    return [
        dense(f32, 300, 290),
        dense(f64, 129, 257, mask=masks.causal()),
        dense(f16, 64, 400, dropout=0.3, seed=7, mask=window),
        dense(b16, 257, 65, score_mod=scores.softcap(3.0)),
        dense(f32, 200, 200, bias=filled(200, 200, dtype=f16), sink=filled(4, dtype=f64)),
        dense(f64, 1, 700, score_mod=scores.alibi(filled(4, dtype=f32))),
        packed(f32),
        packed(b16),
    ]


def equal(mine: Any, theirs: Any) -> bool:
    return len(mine) == len(theirs) and all(map(same_bits, mine, theirs))


@mostly_thorough("times", [1, 3], quick=[1], why="the same, tried more often")
def test_eight_threads_at_once(set_threads, times):
    set_threads(1)
    work = calls()
    serial = [run() for run in work]
    set_threads(3)
    barrier = threading.Barrier(8, timeout=PATIENCE)

    def thread(number: int) -> bool:
        barrier.wait()
        turns = [(number + turn) % len(work) for turn in range(len(work))]
        return all(equal(work[n](), serial[n]) for _ in range(times) for n in turns)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(thread, range(8), timeout=PATIENCE))


@mostly_thorough("number", [2, 3, 7, 16], quick=[3, 16], why="numbers between those")
def test_results_do_not_depend_on_the_threads(set_threads, number):
    for run in calls():
        set_threads(1)
        alone = run()
        set_threads(number)
        assert equal(run(), alone)


# Processes


def output_of(program: str, folder: Any, **environment: str) -> str:
    """Run a program from a file (as spawning needs it) and return what it prints."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=os.environ | environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


WORK = """
import multiprocessing, os, sys, threading
import numpy as np
import cupyflash
from cupyflash.reference.cpu import threads
x = np.random.default_rng(0).standard_normal((2, 3, 200, 16)).astype(np.float32)

def work(_=None):
    out, vjp = cupyflash.attention_vjp(x, x, x)
    return out.tobytes() + vjp(out).dq.tobytes()
"""


@CAN_FORK
def test_fork_after_use(tmp_path):
    program = WORK + textwrap.dedent("""
        expected = work()
        threads.parallel(lambda first, last: None, 99)
        assert threads._pool.size
        child = os.fork()
        if not child:
            # Its own threads do the work: the parent's are not here.
            fresh = not threads._pool.size
            threads.parallel(lambda first, last: None, 99)
            grandchild = os.fork() if work() == expected else -1
            if not grandchild:
                os._exit(0 if work() == expected and fresh else 3)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert work() == expected
        print("equal")
    """)
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "equal"


@CAN_FORK
@mostly_thorough("forks", [1, 8], quick=[1], why="the same, tried more often")
def test_fork_while_other_threads_call_and_compile(tmp_path, forks):
    """A child must not inherit a lock that a thread of its parent holds: it would wait for ever."""
    program = WORK + textwrap.dedent(f"""
        from numba import njit
        expected, stop = work(), threading.Event()

        def busy(task):
            while not stop.is_set():
                task()

        tasks = [work, work, lambda: njit(lambda a: a + 1)(1)]  # the last compiles every time
        others = [threading.Thread(target=busy, args=(task,)) for task in tasks]
        for thread in others:
            thread.start()
        codes = []
        for _ in range({forks}):
            child = os.fork()
            if not child:
                os._exit(0 if work() == expected and njit(lambda a: a + 2)(1) == 3 else 3)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        for thread in others:
            thread.join()
        print(codes)
    """)
    environment = {"CUPYFLASH_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    assert output_of(program, tmp_path, **environment) == str([0] * forks)


@CAN_FORK
def test_fork_while_another_thread_checks_a_call(tmp_path):
    """Its request is computed once, and no lock of that is inherited."""
    program = WORK + textwrap.dedent("""
        from cupyflash.problem import replay, validate
        expected, checked = work(), validate.call
        replay._entries.clear()
        entered, leave = threading.Event(), threading.Event()

        def slow(*arguments):
            if threading.get_ident() == other.ident:
                entered.set()
                leave.wait()
            return checked(*arguments)

        validate.call = slow
        other = threading.Thread(target=work)
        other.start()
        entered.wait()
        child = os.fork()
        if not child:
            os._exit(0 if work() == expected else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        leave.set()
        other.join()
    """)
    environment = {"CUPYFLASH_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    assert output_of(program, tmp_path, **environment) == "0"


@pytest.mark.thorough("a fork by hand is quick, and a fresh process in every test of commands")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing(tmp_path, method):
    if method != "spawn" and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    program = WORK + textwrap.dedent(f"""
        if __name__ == "__main__":
            expected = work()
            with multiprocessing.get_context("{method}").Pool(2) as pool:
                print(pool.map(work, range(4)) == [expected] * 4)
    """)
    environment = {"CUPYFLASH_NUM_THREADS": "2", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    assert output_of(program, tmp_path, **environment) == "True"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_threads_follow_the_affinity(tmp_path):
    program = WORK + textwrap.dedent("""
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        work()
        print(threads.num_threads(), threads._pool.size)
    """)
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="") == "1 0"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits addresses")
def test_too_little_memory_is_an_error_that_says_so(tmp_path):
    program = WORK + textwrap.dedent("""
        import resource
        expected = work()
        large = np.ones((8, 8, 8192, 64), np.float16)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, used + 2**25))
        try:
            cupyflash.attention(large, large, large)
        except MemoryError as error:
            print("Unable to allocate" in str(error), work() == expected)
    """)
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "True True"
