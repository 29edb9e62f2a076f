"""What every function of kernels_cu/ptx/ does, lane by lane: on the emulator, on a GPU, by NumPy.

A case is a kernel of a few lines, what its lanes read, and what NumPy says that they write.
tests/cuda/test_conformance.py runs it in both places. A function without a case fails a test
there; to add one, write an entry of CASES in tests/helpers/conformance_cases.py:

- its name, and with several cases of one function, what this one is about;
- statements that apply it. They know `in` and `out`, this lane's own numbers, `smem`, an array of
  SHARED `Words` of 16 bytes, `t`, the thread's number, and THREADS;
- what is given: an array with a row of numbers per lane; whole blocks are filled up by repetition;
- what NumPy wants of that: a row of numbers per lane.

Types are those of the two arrays. Results agree if their bits do, unless the case says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from emulator import probe
from emulator.machine import FORWARD, Schedule
from emulator.memory import encode

import cupyflash.kernels_cu
from cupyflash.arrays.cuda_device import OLDEST_CAPABILITY
from cupyflash.arrays.device_arrays import address
from cupyflash.arrays.dtypes import DTYPES
from cupyflash.gpu import jit as compiler
from cupyflash.gpu import source, tma
from cupyflash.gpu.tma import TensorMap
from cupyflash.testing.copies import Copies, HostMemory

Array = np.ndarray[Any, Any]

ARCH = Path(cupyflash.kernels_cu.__file__).parent / "ptx"
THREADS = 128  # of a block: four warps
SHARED = 2 * THREADS
TENSOR_CORES = (8, 0)  # the first GPUs with those of 16-bit types that kernels use
HOPPER = (9, 0)

_FUNCTION = re.compile(
    r"^(?:__device__ __forceinline__|inline)? ?(?!struct)(\w[\w ]*?) (\w+)\(", re.MULTILINE
)
C_TYPES = {
    np.dtype(kind): name
    for kind, name in (
        (np.uint16, "unsigned short"),
        (np.int32, "int"),
        (np.uint32, "unsigned int"),
        (np.int64, "long long"),
        (np.uint64, "unsigned long long"),
        (np.float32, "float"),
        (np.float64, "double"),
    )
}
_LANE = """
const long long lane = 1LL * THREADS * blockIdx.x + t;
const {given}* const in = static_cast<const {given}*>(p.in) + lane * {inputs};
{made}* const out = static_cast<{made}*>(p.out) + lane * {outputs};
"""


def functions(text: str) -> list[tuple[str, str]]:
    """Return types and names of the functions that a file of `ptx/`, or its twin, defines."""
    return sorted(_FUNCTION.findall(text))


def defined() -> list[tuple[str, str]]:
    """Return file and name of every function of `ptx/`."""
    return [
        (f"ptx/{path.name}", name)
        for path in sorted(ARCH.iterdir())
        for _, name in functions(path.read_text())
    ]


def bits(x: Array) -> Array:
    """Return the bits of numbers."""
    return x.view(f"u{x.itemsize}")


def equal(given: Array, one: Array, other: Array) -> Array:
    """Whether bits are the same."""
    return bits(one) == bits(other)


def equal_but_for_nan(kind: Any) -> Callable[[Array, Array, Array], Array]:
    """Return whether bits are the same, where any two NaN of a type are: which one is open."""

    def agree(given: Array, one: Array, other: Array) -> Array:
        both_nan = np.isnan(one.view(kind)) & np.isnan(other.view(kind))
        return both_nan | equal(given, one, other)

    return agree


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes
    ----------
    name : str
        The functions of `ptx/` that it is about; behind a colon, what of them.
    body : str
        Its statements.
    given : callable
        Returns what lanes read.
    wanted : callable
        Returns what NumPy says that they write.
    agree : callable
        Whether two results for what was given are both right: given, one, other -> per number.
    since : tuple of int
        Compute capability of the first GPU that has the instruction.
    only : tuple of int or None
        That of the only one, where later ones have not.
    shared : int
        `Words` of shared memory.
    map : TensorMap or None
        How the kernel's `map` describes what lanes read ("in") or write ("out").
    """

    name: str
    body: str
    given: Callable[[], Array]
    wanted: Callable[[Array], Array]
    agree: Callable[[Array, Array, Array], Array] = equal
    since: tuple[int, int] = OLDEST_CAPABILITY
    only: tuple[int, int] | None = None
    shared: int = SHARED
    map: TensorMap | None = None

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU has the instruction."""
        return capability >= self.since and self.only in (None, capability)

    @property
    def architecture(self) -> str | None:
        """What it is compiled for, where it is not the GPU at hand."""
        return None if self.only is None else "sm_{}{}a".format(*self.only)

    @property
    def functions(self) -> list[str]:
        """Names of the functions that it is about."""
        return self.name.partition(":")[0].split()

    @property
    def headers(self) -> tuple[str, ...]:
        """The files that define what it calls."""
        called = set(re.findall(r"ptx::(\w+)", self.body))
        return tuple(dict.fromkeys(file for file, name in defined() if name in called))

    def inputs(self) -> Array:
        """Return what lanes read, for whole blocks."""
        rows = self.given()
        blocks = -(-len(rows) // THREADS)
        return np.ascontiguousarray(np.resize(rows, (blocks * THREADS, rows.shape[1])))

    def kernel(self, given: Array, made: Array) -> dict[str, Any]:
        """Return what `probe.text` makes a kernel of."""
        lane = _LANE.format(
            given=C_TYPES[given.dtype],
            made=C_TYPES[made.dtype],
            inputs=given.shape[1],
            outputs=made.shape[1],
        )
        return {
            "body": lane + self.body,
            "kind": "Words",
            "elements": self.shared,
            "threads": THREADS,
            "headers": self.headers,
            "before": f"constexpr int SHARED = {self.shared};\n",
            "has_map": self.map is not None,
        }

    def cuda(self) -> str:
        """Return the kernel's text for a GPU."""
        given = self.inputs()
        return probe.text(**self.kernel(given, self.wanted(given)), read=source.read)

    def on_emulator(self, schedule: Schedule = FORWARD, subnormal: bool = False) -> Array:
        """Return what the lanes of the emulator write; `subnormal`: such numbers are kept."""

        def launch(given: Array, out: Array) -> None:
            storage = DTYPES["float64" if subnormal else "float32"].code
            machine = probe.Probe(**self.kernel(given, out), storage=storage)
            maps = b""
            if self.map is not None:
                maps = encode(self.map, address({"in": given, "out": out}[self.map.name]))
            machine.run(out, given, len(given) // THREADS, schedule, maps)

        return self._run(HostMemory(), launch)

    def on_gpu(self, memory: Any) -> Array:
        """Return what the lanes of a GPU write: compiled and launched as the package does it."""

        def launch(given: Any, out: Any) -> None:
            shared_memory = self.shared * probe.SIZES["Words"]
            kernel = compiler._compiled("probe", self.cuda(), shared_memory, self.architecture)
            arguments = [np.frombuffer(probe.packed(given, out), np.dtype("V16"))]
            if self.map is not None:
                place = address({"in": given, "out": out}[self.map.name])
                encoded = tma.encode(self.map, place)
                arguments.append(np.frombuffer(encoded, np.dtype("V128")))
            grid, block = (len(given) // THREADS,), (THREADS,)
            kernel(grid, block, arguments, shared_mem=shared_memory)

        return self._run(memory, launch)

    def _run(self, memory: Any, launch: Callable[[Any, Any], None]) -> Array:
        """Launch between guards, into poisoned memory, and read back."""
        given = self.inputs()
        out = np.empty_like(self.wanted(given))
        copies = Copies(memory)
        launch(copies.array(given), copies.array(out, True))
        copies.check()
        return copies.value(out)

    def check(self, one: str, found: Array, other: str, wanted: Array) -> None:
        """Raise AssertionError if results differ, and name the lanes and the bits."""
        given = self.inputs()
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        wrong = np.argwhere(~self.agree(given, found, wanted))
        if not len(wrong):
            return
        lines = [f"{self.name}: {len(wrong)} of {found.size} numbers differ"]
        for lane, n in wrong[:8]:
            thread = lane % THREADS
            lines.append(
                f"block {lane // THREADS}, thread {thread} (warp {thread // 32}, lane "
                f"{thread % 32}), out[{n}]: in {_hex(given[lane])}; {one} "
                f"{_hex(found[lane, n : n + 1])}, {other} {_hex(wanted[lane, n : n + 1])}"
            )
        raise AssertionError("\n".join(lines))


def blocks_of(words: int, blocks: int, kind: Any = np.uint32) -> Array:
    """Any bits, for some blocks."""
    size = words * np.dtype(kind).itemsize
    drawn = np.random.default_rng(0).integers(0, 256, (blocks * THREADS, size), np.uint8)
    return drawn.view(kind)


def _hex(x: Array) -> str:
    return " ".join(f"{int(each):#0{2 + 2 * x.itemsize}x}" for each in bits(x))
