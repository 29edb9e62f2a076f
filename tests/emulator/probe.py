"""Small kernels of a few lines, to see what the emulator does with them."""

from __future__ import annotations

import struct
from typing import Any

from cupyflash import source

from . import build
from .machine import FORWARD, Machine, Schedule

TEXT = """
constexpr int STORAGE = {storage}, THREADS = {threads}, SHARED_BYTES = {shared_bytes};
#define KERNEL_NAME probe
#define FLUSH_SUBNORMALS {flush}
struct Arrays {{
  void* in;
  void* out;
}};
{before}{headers}
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Arrays p) {{
  extern __shared__ {kind} smem[];
  const int t = threadIdx.x;
#line 1 "probe.cu"
{body}
}}
"""


class Probe:
    """A kernel with this body, in which `smem` is shared memory and `t` the thread's number.

    Parameters
    ----------
    body : str
        Its statements; the first one stands in line 1 of probe.cu.
    kind : str
        Type of an element of shared memory.
    elements : int
        How many there are.
    threads : int
        Threads of a block.
    headers : tuple of str
        Files of `kernels_cu` that it uses.
    storage : int
        Number of the storage type; float64 keeps subnormal numbers.
    flavour : str
        What is built.
    before : str
        What stands before the headers and the kernel.
    """

    def __init__(
        self,
        body: str,
        kind: str = "int",
        elements: int = 64,
        threads: int = 64,
        headers: tuple[str, ...] = (),
        storage: int = 2,
        flavour: str = "races",
        before: str = "",
    ) -> None:
        size = {"char": 1, "short": 2, "int": 4, "float": 4, "double": 8}[kind]
        text = TEXT.format(
            body=body.strip("\n"),
            kind=kind,
            shared_bytes=elements * size,
            threads=threads,
            storage=storage,
            flush="false" if storage == 3 else "true",
            before=before,
            headers=source.flatten_with(headers, build.read),
        )
        self._machine = Machine("probe", build.library(build.complete(text), "probe", flavour))

    def run(
        self, out: Any = None, given: Any = None, blocks: int = 1, schedule: Schedule = FORWARD
    ) -> Any:
        """Run it with the arrays `p.in` and `p.out`, and return the latter."""
        places = [0 if x is None else x.ctypes.data for x in (given, out)]
        self._machine.launch(blocks, bytearray(struct.pack("=QQ", *places)), schedule)
        return out
