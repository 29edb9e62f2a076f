"""Copies of blocks of several arrays by one launch, which takes less time than one for each."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import elementwise, tape

Pair = tuple[Any, Any]

MOST = 32  # of a launch
UNIT = 16  # bytes that a thread loads and stores at once
THREADS, UNITS = 256, 4  # of a block of the grid, and of a thread
_LONGEST = 2**32 - THREADS * UNITS  # units of a launch

SOURCE = f"""
struct Blocks {{
  const uint4* from;
  uint4* to;
  long long pitch_from, pitch_to;  // between two blocks, in units
  unsigned width, end;  // units of a block, and of all up to the last one of these
}};
struct Table {{
  Blocks of[{MOST}];  // what is not used ends where the last one does
}};

extern "C" __global__ void __launch_bounds__({THREADS}) cupyflash_copy_blocks(const Table table) {{
  uint4 unit[{UNITS}];
  uint4* to[{UNITS}];
  unsigned begin = 0;
  int n = 0;
#pragma unroll
  for (int c = 0; c < {UNITS}; ++c) {{
    const unsigned at = (blockIdx.x * {UNITS} + c) * {THREADS} + threadIdx.x;
    while (n < {MOST} && at >= table.of[n].end) begin = table.of[n++].end;
    to[c] = nullptr;
    if (n < {MOST}) {{
      const Blocks& blocks = table.of[n];
      const unsigned row = (at - begin) / blocks.width, column = (at - begin) % blocks.width;
      unit[c] = blocks.from[row * blocks.pitch_from + column];
      to[c] = blocks.to + row * blocks.pitch_to + column;
    }}
  }}
#pragma unroll
  for (int c = 0; c < {UNITS}; ++c) {{
    if (to[c] != nullptr) *to[c] = unit[c];
  }}
}}
"""
_ROW = np.dtype([("from", "u8"), ("to", "u8"), ("pitch_from", "i8"), ("pitch_to", "i8"),
                 ("width", "u4"), ("end", "u4")])  # fmt: skip


class _Blocks(NamedTuple):
    """Blocks of an array, and where they are copied to: so many of a width, in units."""

    source: Any
    to: Any
    number: int
    width: int
    pitch_from: int
    pitch_to: int


def copy_all(pairs: Sequence[Pair]) -> None:
    """Write the first array of each pair to the second one, rounded, on the current device."""
    found: list[_Blocks] = []
    for source, to in pairs:
        blocks = _blocks(source, to)
        if blocks is None:
            elementwise.copy(source, to)
        else:
            found += blocks
    while found:
        units = itertools.accumulate(x.number * x.width for x in found[:MOST])
        some = sum(end <= _LONGEST for end in units)
        _launch(found[:some])
        del found[:some]


def _blocks(source: Any, to: Any) -> list[_Blocks] | None:
    """Return the blocks of a pair; None if they are not such as the kernel copies."""
    if source.shape != to.shape or source.dtype != to.dtype:
        return None
    if not source.size:
        return []
    *sizes, rows, columns = source.shape
    item = source.itemsize
    width = rows * columns * item
    for x in (source, to):
        in_rows = columns == 1 or x.strides[-1] == item
        if not in_rows or (rows > 1 and x.strides[-2] != columns * item):
            return None
        if any(n % UNIT for n in (width, x.data.ptr, *x.strides[:-2])):
            return None
    count = sizes[-1] if sizes else 1
    if count * width // UNIT > _LONGEST:
        return None
    pitches = [x.strides[-3] // UNIT if sizes else 0 for x in (source, to)]
    outer = itertools.product(*map(range, sizes[:-1]))
    return [_Blocks(source[i], to[i], count, width // UNIT, *pitches) for i in outer]


def _launch(blocks: Sequence[_Blocks]) -> None:
    table = np.zeros(MOST, _ROW)
    ends = list(itertools.accumulate(x.number * x.width for x in blocks))
    for row, x, end in zip(table, blocks, ends, strict=False):
        row["pitch_from"], row["pitch_to"] = x.pitch_from, x.pitch_to
        row["width"], row["end"] = x.width, end
    number = len(blocks)  # `copy` may be kept, and must not keep the arrays
    table["end"][number:] = ends[-1]
    table["width"][number:] = 1
    grid = math.ceil(ends[-1] / (THREADS * UNITS))
    device = int(blocks[0].to.device.id)

    def copy(addresses: list[int]) -> None:
        told = table.copy()
        told["from"][:number] = addresses[::2]
        told["to"][:number] = addresses[1::2]
        _kernel(device)((grid,), (THREADS,), (told.view(f"V{told.nbytes}"),), shared_mem=0)

    arrays = [array for x in blocks for array in (x.source, x.to)]
    if (written := tape.current()) is not None:
        written.addressed(copy, *arrays)
    copy([int(x.data.ptr) for x in arrays])


@functools.cache
def _kernel(device: int) -> Any:  # noqa: ARG001, CuPy compiles for the current one
    """Return the kernel for a device, the current one."""
    import cupy

    return cupy.RawModule(code=SOURCE).get_function("cupyflash_copy_blocks")
