"""Ctrl-C while the CPU's threads work: it is heard soon, and nobody writes to freed memory."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
from halves import mostly_thorough
from test_threads import PATIENCE, output_of, set_threads

from cupyflash.reference.cpu import threads

__all__ = ["set_threads"]  # a fixture


@pytest.mark.skipif(os.name != "posix", reason="sends itself a signal, as Ctrl-C does")
def test_ctrl_c_waits_for_the_helpers(tmp_path):
    """Pressed twice: the second must not leave helpers behind that write to freed memory."""
    program = """
        import os, signal, threading, time
        from cupyflash.reference.cpu import threads
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
        main, ended = threading.get_ident(), []
        both, pressed = threading.Barrier(3), threading.Event()

        def interrupt():
            both.wait()
            for _ in range(2):
                time.sleep(0.3)
                signal.pthread_kill(main, signal.SIGINT)
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
        except KeyboardInterrupt:
            print("ended", len(ended))
    """
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "ended 1"


@pytest.mark.skipif(os.name != "posix", reason="sends itself a signal, as Ctrl-C does")
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


@pytest.mark.skipif(os.name != "posix", reason="sends itself a signal, as Ctrl-C does")
def test_arrays_live_as_long_as_a_helper_works(set_threads, monkeypatch):
    """Ctrl-C as the caller begins to wait: it leaves, and a helper still writes to its arrays."""
    set_threads(2)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    class Memory:
        pass

    memory = Memory()
    alive = weakref.ref(memory)

    def run(first: int, last: int) -> None:
        if threading.get_ident() == caller:
            assert begun.wait(PATIENCE)
        elif not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE)
            ended.set()

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threads._Job, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        threads.parallel(run, 1000, memory)
    del memory
    gc.collect()
    assert alive() is not None  # the helper has its address
    go_on.set()
    assert ended.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert alive() is None  # and nobody holds it for ever
