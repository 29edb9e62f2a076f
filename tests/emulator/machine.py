"""Launch compiled kernels on the CPU; what goes wrong becomes a `Fault`."""

from __future__ import annotations

import _ctypes
import ctypes
import shutil
import subprocess
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cupyflash.gpu.specialisation import Specialisation
from cupyflash.problem.call import Array

from . import build


class Fault(Exception):
    """What a kernel must not do, and who did it.

    Attributes
    ----------
    kernel : str
        Its symbol.
    block, thread : int
        Which thread of which block.
    """

    def __init__(self, kernel: str, block: int, thread: int, text: str) -> None:
        super().__init__(f"{kernel}, block {block}, thread {thread}: {text}")
        self.kernel, self.block, self.thread = kernel, block, thread


class Schedule(NamedTuple):
    """In which order threads take turns, and blocks run: forward, reverse or by a seed."""

    order: str = "forward"
    seed: int = 0


FORWARD, REVERSE = Schedule(), Schedule("reverse")
_ORDERS = ("forward", "reverse", "random")


def randomly(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    return Schedule("random", seed)


class _Report(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_longlong),
        ("thread", ctypes.c_int),
        ("place", ctypes.c_longlong),
        ("text", ctypes.c_char * 1000),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("run", ctypes.c_void_p),
        ("threads", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("params_bytes", ctypes.c_uint),
        ("flush_subnormals", ctypes.c_bool),
    )


class Machine:
    """One compiled kernel."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._library = ctypes.CDLL(str(path))
        self._library.emulator_launch.restype = ctypes.c_bool
        weakref.finalize(self, _ctypes.dlclose, self._library._handle)
        self._params_bytes = _Kernel.in_dll(self._library, "emulated_kernel").params_bytes

    def write_late(self, array: Array, values: Array) -> None:
        """Let the grid ahead of the next launch write values when a thread waits for it."""
        given = np.ascontiguousarray(values, array.dtype)
        assert array.flags.c_contiguous
        assert given.shape == array.shape
        self._library.emulator_write_late(
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_void_p(given.ctypes.data),
            ctypes.c_ulonglong(given.nbytes),
        )

    def launch(self, blocks: int, packed: bytearray, schedule: Schedule = FORWARD) -> None:
        """Run every block, each thread with a copy of the parameters.

        Raises
        ------
        Fault
            At the first thing that a kernel must not do; the blocks after it do not run.
        """
        assert len(packed) == self._params_bytes, (len(packed), self._params_bytes)
        report = _Report()
        argument = (ctypes.c_char * len(packed)).from_buffer(packed)
        done = self._library.emulator_launch(
            ctypes.byref(argument),
            ctypes.c_longlong(blocks),
            ctypes.c_int(_ORDERS.index(schedule.order)),
            ctypes.c_ulonglong(schedule.seed),
            ctypes.byref(report),
        )
        if not done:
            text = report.text.decode()
            if report.place:
                text += f" ({self._line(report.place)})"
            raise Fault(self.name, report.block, report.thread, text)

    def _line(self, place: int) -> str:
        """Return the file and line of an instruction, where binutils are installed."""
        if shutil.which("addr2line") is None:
            return f"instruction {place:#x} of {self._path}"
        command = ["addr2line", "-i", "-s", "-e", str(self._path), hex(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        lines = done.stdout.split("\n")[:-1]
        return " < ".join(line.partition(" ")[0] for line in lines)


_machines: OrderedDict[tuple[str, str], Machine] = OrderedDict()
_MOST = 100  # libraries that are loaded at a time


def machine(
    special: Specialisation,
    flavour: str = "races",
    read: Callable[[str], str] = build.read,
) -> Machine:
    """Return the kernel of a specialisation, compiled if it is new."""
    key = build.text(special, read), flavour
    if key not in _machines:
        path = build.library(key[0], special.name, flavour)
        _machines[key] = Machine(special.name, path)
    _machines.move_to_end(key)
    if len(_machines) > _MOST:
        _machines.popitem(last=False)
    return _machines[key]
