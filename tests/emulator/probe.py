"""Small kernels of a few lines, to see what the emulator does with them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from cupyflash.arrays.device_arrays import address
from cupyflash.gpu import source

from . import build
from .machine import FORWARD, Machine, Schedule

TEXT = """
constexpr int STORAGE = {storage}, THREADS = {threads}, SHARED_BYTES = {shared_bytes};
#define KERNEL_NAME probe
#define FLUSH_SUBNORMALS {flush}
#define WIDE_RESULT false
struct Arrays {{
  void* in;
  void* out;
}};
struct alignas(16) Words {{
  unsigned int x[4];
}};
{before}{headers}
extern "C" __global__ void __launch_bounds__(THREADS)
    KERNEL_NAME(const __grid_constant__ Arrays p{map}) {{
  extern __shared__ {kind} smem[];
  const int t = threadIdx.x;
#line 1 "probe.cu"
{body}
}}
"""

SIZES = {"char": 1, "short": 2, "int": 4, "float": 4, "double": 8, "Words": 16}


def text(
    body: str,
    kind: str = "int",
    elements: int = 64,
    threads: int = 64,
    headers: tuple[str, ...] = (),
    storage: int = 2,
    before: str = "",
    has_map: bool = False,
    read: Callable[[str], str] = build.read,
) -> str:
    """Return the CUDA text of a kernel `probe`, of which `body` is line 1 of probe.cu onwards.

    Its statements know `smem`, which is shared memory, `t`, the thread's number, and the arrays
    `p.in` and `p.out`.

    Parameters
    ----------
    body : str
        The statements.
    kind : str
        Type of an element of shared memory, one of SIZES.
    elements : int
        How many there are.
    threads : int
        Threads of a block.
    headers : tuple of str
        Files of `kernels_cu` that it uses.
    storage : int
        Number of the storage type; with float64 the emulator keeps subnormal numbers.
    before : str
        What stands before the headers and the kernel.
    has_map : bool
        Whether statements know `map`, a tensor map.
    read : callable
        Returns the files: with `cupyflash.source.read` the text is for a GPU.
    """
    return TEXT.format(
        body=body.strip("\n"),
        kind=kind,
        shared_bytes=elements * SIZES[kind],
        threads=threads,
        storage=storage,
        flush="false" if storage == 3 else "true",
        before=before,
        map=", const __grid_constant__ ptx::TensorMap map" if has_map else "",
        headers=source.flatten_with(headers, read),
    )


class Probe:
    """The kernel of a text, on the emulator; `flavour` is what is built, the rest is `text`'s."""

    def __init__(self, body: str, *given: Any, flavour: str = "races", **more: Any) -> None:
        complete = build.complete(text(body, *given, **more))
        self.machine = Machine("probe", build.library(complete, "probe", flavour))

    def run(
        self,
        out: Any = None,
        given: Any = None,
        blocks: int = 1,
        schedule: Schedule = FORWARD,
        maps: bytes = b"",
    ) -> Any:
        """Run it with the arrays `p.in` and `p.out`, and return the latter."""
        self.machine.launch(blocks, packed(given, out) + maps, schedule)
        return out


def packed(given: Any, out: Any) -> bytearray:
    """Return the parameters of a launch: where `p.in` and `p.out` lie, in whichever memory."""
    return bytearray(struct.pack("=QQ", *(0 if x is None else address(x) for x in (given, out))))
