"""The builtin of machine code that writes values and makes launches."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest

from cupyflash.gpu import launcher


def driver(function):
    """Return a function of C, and its address."""
    made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 4)(function)
    return made, ctypes.cast(made, ctypes.c_void_p).value


def launch(block, *values):
    return launcher.launch()(block.ctypes.data, *values)


def test_values_are_written_and_launches_made_in_order():
    words, seen = np.zeros(4, np.uint64), []

    def function(*arguments):
        seen.append((arguments, words.tolist()))
        return 0

    held, place = driver(function)
    begin = words.ctypes.data
    values = [(begin, 0, 0), (begin + 8, 1, 5), (begin + 24, 1, -1)]
    arguments = [(0, 3, 1, 1), (1, 1, 0, -2)]
    block = launcher.block([(place, 1, 2, 3), (place, 4, 5, 6, 7)], values, arguments)
    assert launch(block, 2**64 - 1, 100) == 0
    written = [2**64 - 1, 105, 0, 99]
    assert seen == [((1, 2, 3, 101), written), ((4, 2**64 - 3, 6, 7), written)]
    del held


def test_calls_are_of_functions_of_their_own():
    seen = []
    made = [driver(lambda a, *_, n=n: seen.append((n, a)) or 0) for n in range(2)]
    assert launch(launcher.block([(made[n][1], 10 + n) for n in (1, 0, 1)], [])) == 0
    assert seen == [(1, 11), (0, 10), (1, 11)]


@pytest.mark.parametrize("failing", range(3))
def test_nothing_is_launched_behind_what_failed(failing):
    seen = []

    def function(config, *_):
        seen.append(config)
        return 701 if config == failing else 0

    held, place = driver(function)
    block = launcher.block([(place, n) for n in range(3)], [])
    assert divmod(launch(block), 2**32) == (failing, 701)
    assert seen == list(range(failing + 1))
    del held


def test_without_launches_values_are_written():
    words = np.zeros(1, np.uint64)
    assert launch(launcher.block([], [(words.ctypes.data, 0, 1)]), np.int64(6)) == 0
    assert words[0] == 7


def test_other_threads_run_while_the_driver_is_asked():
    """It may wait until one of them goes on."""
    begun, may_end = threading.Event(), threading.Event()

    def function(*_):
        begun.set()
        return 0 if may_end.wait(10) else 1

    held, place = driver(function)

    def other():
        begun.wait(10)
        may_end.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert launch(launcher.block([(place,)], [])) == 0
    thread.join()
    del held


def test_an_argument_that_is_no_number_is_an_error():
    block = launcher.block([], [])
    with pytest.raises(TypeError, match="integer"):
        launch(block, "a word")
