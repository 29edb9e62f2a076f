"""Exceptions from signals while threads work: heard soon, and nobody writes to freed memory."""

from __future__ import annotations

import collections
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from halves import mostly_thorough
from test_threads import output_of, set_threads
from torch_threads import threads_of_pytorch

import cupyflash
from cupyflash import attention, streamed
from cupyflash.reference.cpu import calls, threads

__all__ = ["set_threads"]  # a fixture
CAN_SIGNAL = pytest.mark.skipif(os.name != "posix", reason="sends itself a signal, as Ctrl-C does")


@CAN_SIGNAL
@mostly_thorough(
    "error",
    ["KeyboardInterrupt", "TimeoutError", "GeneratorExit"],
    quick=["TimeoutError"],
    why="the others are handled in the same way",
)
def test_an_exception_from_a_signal_waits_for_the_helpers(tmp_path, error):
    """Three come: the later ones must not leave helpers behind that write to freed memory."""
    program = f"""
        import os, signal, threading, time
        from cupyflash.reference.cpu import threads

        def handler(number, frame):
            handled.append(time.monotonic())
            raise {error}

        signal.signal(signal.SIGUSR1, handler)
        main, ended, handled = threading.get_ident(), [], []
        both, pressed = threading.Barrier(3), threading.Event()

        def interrupt():
            both.wait()
            for _ in range(3):
                time.sleep(0.2)
                signal.pthread_kill(main, signal.SIGUSR1)
            pressed.set()

        def run(first, last):
            both.wait()
            if threading.get_ident() == main:
                time.sleep(60)
            pressed.wait()
            time.sleep(0.3)
            ended.append(first)

        threading.Thread(target=interrupt).start()
        try:
            threads.parallel(run, 1000)
        except {error}:
            print("ended", len(ended), len(handled) > 1)
    """
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "ended 1 True"


@pytest.mark.parametrize("team", ["own", "PyTorch"])
def test_an_exception_anywhere_leaves_nobody_at_work(set_threads, team):
    """Python runs signals' handlers where a function begins and where a call returns.

    This raises an exception at each of these places, one after the other.
    """
    set_threads(3)
    with threads_of_pytorch(3) if team == "PyTorch" else nullcontext():
        raise_an_exception_anywhere()


def raise_an_exception_anywhere():
    caller, last_place = threading.get_ident(), 0
    inside: list[int] = []
    begun, helped, interrupted = [], [], 0

    def run(first: int, last: int) -> None:
        begun.append(first)
        if threading.get_ident() != caller:
            inside.append(first)
            helped.append(last_place)
            time.sleep(0.003)
            inside.remove(first)
        else:
            time.sleep(0.001)

    class Late(Exception):
        pass

    def raising_at(place: int) -> Any:
        places = itertools.count()

        def profile(frame: Any, event: str, argument: object) -> None:
            if event in ("call", "c_return") and next(places) == place:
                raise Late

        return profile

    threads.parallel(run, 3)  # starts the threads
    while True:
        try:
            sys.setprofile(raising_at(last_place))
            threads.parallel(run, 5)
        except Late:
            assert not inside
            seen = len(begun)
            time.sleep(0.005)
            assert len(begun) == seen
            interrupted += 1
        else:
            break
        finally:
            sys.setprofile(None)
        last_place += 1
    assert interrupted == last_place > 30
    assert len(set(helped)) > 10
    for _ in range(3):  # and nothing is locked
        done = np.zeros(100, int)
        threads.parallel(lambda first, last, done=done: done[first:last].__iadd__(1), 100)
        assert (done == 1).all()


def filled(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def entries() -> dict[str, Callable[[], object]]:
    """Calls that write by threads, of some hundredths of a second each."""
    x, few, ends = filled(2, 4, 400, 64), filled(8, 4, 2, 64), [0, 400]
    out, lse = attention(x, x, x, return_lse=True)
    k, v = filled(2, 8, 4, 1500, 64)
    (codes, k_scale), (v_codes, v_scale) = (cupyflash.quantize(each, "int8") for each in (k, v))
    coded = {"k_scale": k_scale, "v_scale": v_scale}
    wide = filled(8, 4, 1500, 64), np.zeros((8, 4, 1500), np.float32)
    new, held = filled(2, 8, 4, 700, 64), np.full(8, 700)
    return {
        "attention": lambda: attention(x, x, x, out=out),
        "attention_backward": lambda: cupyflash.attention_backward(x, x, x, x, out, lse),
        "attention_varlen": lambda: cupyflash.attention_varlen(x[0], x[0], x[0], ends, ends),
        "attention_cached": lambda: cupyflash.attention_cached(few, k, v, 1500),
        "codes": lambda: cupyflash.attention_cached(few, codes, v_codes, 1500, **coded),
        "append": lambda: cupyflash.append(*new, codes, v_codes, held, **coded),
        "combine": lambda: cupyflash.combine([wide, wide]),
        "quantize": lambda: cupyflash.quantize(k, "int8"),
        "hadamard": lambda: cupyflash.hadamard(k, 3),
        "streamed": lambda: streamed.attention(x, x, x, chunk=200),
    }


@CAN_SIGNAL
@mostly_thorough(
    "times", [8, 200], quick=[8], why="the same places, tried more often", ids=["few", "many"]
)
def test_no_call_leaves_a_thread_at_work(set_threads, monkeypatch, no_collector, times):
    """At any moment of a call; a thread that still works is seen while it is in a kernel."""
    set_threads(3)
    caller, at_work = threading.get_ident(), []
    compute = calls.Bound.__call__

    def counted(self: Any, first: int, last: int) -> None:
        if threading.get_ident() == caller:
            return compute(self, first, last)
        at_work.append(self)
        try:
            compute(self, first, last)
            time.sleep(0.003)  # a thread that is slower than the caller
            compute(self, first, last)
        finally:
            at_work.remove(self)
        return None

    class Late(Exception):
        pass

    def late(*_: object) -> None:
        raise Late

    monkeypatch.setattr(calls.Bound, "__call__", counted)
    rng, before = np.random.default_rng(1), signal.signal(signal.SIGALRM, late)
    caught: collections.Counter[str] = collections.Counter()
    try:
        for name, call in entries().items():
            spent = []
            for _ in range(5):  # what is compiled is compiled, and what is recognised is short
                begin = time.perf_counter()
                call()
                spent.append(time.perf_counter() - begin)
            seconds = min(spent)
            for _ in range(times):
                try:
                    signal.setitimer(signal.ITIMER_REAL, max(1e-6, seconds * rng.random()))
                    call()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Late:
                    caught[name] += 1
                    assert not at_work, name
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(caught[name] for name in entries()), caught


def test_nothing_else_starts_threads_for_arrays():
    """Only `threads.parallel` waits for its threads whatever happens."""
    package = Path(cupyflash.__file__).parent
    reference = Path(threads.__file__).parents[1]
    users = {
        path.name
        for folder in (package, reference)
        for path in folder.rglob("*.py")
        if re.search(r"concurrent|multiprocessing|threading\.Thread\(", path.read_text())
    }
    # nccl.py watches messages of ranks; openmp.py has threads of another library work in between;
    # those of peers/run.py wait for processes.
    # team.py's compute for `threads.parallel` in one call of C.
    assert users == {"threads.py", "team.py", "nccl.py", "openmp.py", "run.py"}


@CAN_SIGNAL
@mostly_thorough("number", ["1", "2"], quick=["2"], why="without helpers it is simpler")
def test_ctrl_c_is_heard_within_half_a_second(tmp_path, number):
    """Of a call of many seconds; the next call is right."""
    program = """
        import os, signal, threading, time
        import numpy as np
        import cupyflash
        signal.signal(signal.SIGINT, signal.default_int_handler)
        x = np.random.default_rng(0).standard_normal((1, 2, 256, 64), dtype=np.float32)
        wanted = cupyflash.attention(x, x, x)
        long = np.ones((8, 8, 16384, 64), np.float32)
        main, pressed = threading.get_ident(), []

        def interrupt():
            time.sleep(1.5)
            pressed.append(time.process_time())
            signal.pthread_kill(main, signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            cupyflash.attention(long, long, long)
            print("it was over before")
        except KeyboardInterrupt:
            seconds = time.process_time() - pressed[0]
            right = (cupyflash.attention(x, x, x) == wanted).all()
            print("heard", seconds < LIMIT and right or seconds)
    """
    # Half a second, of two threads on a machine without other work. What other processes take does
    # not count, but they slow down cores that are shared.
    program = program.replace("LIMIT", "1.0")
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS=number) == "heard True"
