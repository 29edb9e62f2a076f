"""Calls while a program ends: after its main thread, and while Python is taken down."""

from __future__ import annotations

import textwrap

import pytest
from halves import mostly_thorough
from test_threads import WORK, output_of


@pytest.mark.thorough("a call while the interpreter ends is quick")
def test_daemon_threads_while_the_interpreter_ends(tmp_path):
    program = WORK + textwrap.dedent("""
        def for_ever():
            while True:
                work()

        work()
        for _ in range(4):
            threading.Thread(target=for_ever, daemon=True).start()
        threading.Event().wait(0.3)
        print("end")
    """)
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="3") == "end"


def test_a_call_while_the_interpreter_ends(tmp_path):
    program = WORK + textwrap.dedent("""
        import atexit
        expected = work()
        atexit.register(lambda: print(work() == expected))
    """)
    assert output_of(program, tmp_path, CUPYFLASH_NUM_THREADS="2") == "True"


@mostly_thorough(
    "name",
    ["attention", "vjp", "cached", "combine", "quantize", "streamed", "append", "threads"],
    quick=["attention", "streamed"],
    why="all of them use the same threads",
)
def test_a_first_call_after_the_main_thread_has_ended(tmp_path, name):
    """Python takes no more handlers for its end then, and starts threads all the same."""
    program = """
        import threading, time
        import numpy as np
        import cupyflash
        from cupyflash import streamed
        from cupyflash.distributed import Threads

        x = np.ones((1, 4, 300, 16), np.float32)

        def vjp():
            out, pull = cupyflash.attention_vjp(x, x, x)
            return pull(out).dq

        CALLS = {
            "attention": lambda: cupyflash.attention(x, x, x),
            "vjp": vjp,
            "cached": lambda: cupyflash.attention_cached(x[:, :, :1], x, x, 300),
            "combine": lambda: cupyflash.combine([(x, x[..., 0])] * 2)[0],
            "quantize": lambda: cupyflash.quantize(x, "int8")[0],
            "streamed": lambda: streamed.attention(x, x, x, chunk=100),
            "append": lambda: cupyflash.append(x, x, x.copy(), x.copy(), 300) or x,
            "threads": lambda: Threads(2).run(lambda comm: cupyflash.attention(x, x, x))[0],
        }

        def work():
            threading.main_thread().join()
            time.sleep(0.2)
            print(CALLS["NAME"]().shape[-2] in (1, 300), flush=True)

        threading.Thread(target=work).start()
    """
    assert output_of(program.replace("NAME", name), tmp_path, CUPYFLASH_NUM_THREADS="2") == "True"
