"""Shared memory of the portable kernels, by their tiles.

The formulas are those of kernels_cu/common/matmul.cuh; every kernel asserts that it agrees with
this module about the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

NARROW = 32  # the largest head of which fewer threads share a row, in float32, for a result


@dataclass(frozen=True)
class Shape:
    """What a kernel's memory depends on."""

    itemsize: int  # of the accumulator's type
    stored: int  # bytes of an element in global memory
    d: int
    d_v: int
    threads: int

    @property
    def vector(self) -> int:
        """Elements in 16 bytes of shared memory."""
        return 16 // self.itemsize

    @property
    def column_threads(self) -> int:
        """Threads that share a row of a tile."""
        largest = max(self.d, self.d_v)
        if self.d_v > 0 and largest <= NARROW and self.itemsize == 4:
            return 8
        return 32 if largest > 256 else 16

    @property
    def row_threads(self) -> int:
        """Rows of the thread grid."""
        return self.threads // self.column_threads

    def chunk_columns(self, width: int) -> int:
        """Columns of an operand that are in shared memory at a time."""
        stored_vector = 16 // self.stored
        whole = stored_vector if width % stored_vector == 0 else self.vector
        chunks = _ceil(width, 128 // self.itemsize)
        return round_up(_ceil(width, chunks), whole)

    @property
    def is_one_chunk(self) -> bool:
        """Whether rows of all operands are in shared memory as a whole."""
        return max(self.d, self.d_v) <= 128 // self.itemsize

    def whole_columns(self, width: int) -> int:
        """Columns of an operand that is in shared memory as a whole."""
        return _ceil(width, 128 // self.itemsize) * self.chunk_columns(width)

    def held_columns(self, width: int) -> int:
        """Columns of one that is also the right factor of a product."""
        return max(self.whole_columns(width), self.padded_columns(width))

    def odd_stride(self, columns: int) -> int:
        """Distance of rows: an odd number of vectors."""
        wide = round_up(columns, self.vector)
        return wide + (self.vector if wide // self.vector % 2 == 0 else 0)

    def padded_columns(self, width: int) -> int:
        """Columns of a result, with those that exist for the thread grid only."""
        best = run = self.vector
        while run > 0:
            padded = round_up(width, self.column_threads * run)
            if padded < round_up(width, self.column_threads * best):
                best = run
            run //= 2
        return round_up(width, self.column_threads * best)

    def stage(self, rows: int, width: int, wide: int) -> int:
        """Elements of the two buffers through which rows of global memory pass."""
        chunk = rows * self.odd_stride(self.chunk_columns(width))
        step = rows
        while (
            step > self.vector
            and step % (2 * self.vector) == 0
            and step * self.padded_columns(wide) > chunk
        ):
            step //= 2
        return 2 * max(chunk, step * self.padded_columns(wide))


HEAD_BYTES = 128  # of what backward_simt_dkdv.cu keeps of the head whose queries are streamed
TANGENT_HEAD_BYTES = 160  # of backward_simt_tangent_dkdv.cu, likewise
ROW_NUMBERS = 4  # that kernels of tangents of gradients keep of each query


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def round_up(x: int, step: int) -> int:
    """Return the least multiple of `step` that is not less than x."""
    return _ceil(x, step) * step


def _tile(shape: Shape, rows: int, columns: int) -> int:
    return rows * shape.odd_stride(columns)


def _whole(shape: Shape, rows: int, width: int) -> int:
    return rows * shape.odd_stride(shape.whole_columns(width))


def _keys(shape: Shape, rows: int) -> int:
    return _tile(shape, rows, shape.held_columns(shape.d)) + _whole(shape, rows, shape.d_v)


def _chunk(shape: Shape, rows: int) -> int:
    return rows * shape.odd_stride(shape.chunk_columns(shape.d))


def forward_simt(shape: Shape, block_q: int, block_kv: int, _: int) -> int:
    """Shared elements of forward_simt.cu: queries, weights, stage."""
    held = _whole(shape, block_q, shape.d) + _tile(shape, block_q, block_kv)
    return held + shape.stage(block_kv, shape.d, shape.d_v)


def forward_simt_tangent(shape: Shape, block_q: int, block_kv: int, _: int) -> int:
    """Shared elements of forward_simt_tangent.cu: queries, weights, tangents, stage, rows."""
    held = _whole(shape, block_q, shape.d) + _tile(shape, block_q, block_kv)
    return 2 * held + shape.stage(block_kv, shape.d, shape.d_v) + block_q


def backward_simt_dkdv(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_simt_dkdv.cu: keys, values, tiles, stage, lse, delta, head."""
    held = _keys(shape, block_kv) + (1 + spare) * _tile(shape, block_kv, block_q) + 2 * block_q
    stages = (shape.stage(block_q, width, width) for width in (shape.d, shape.d_v))
    return held + max(stages) + HEAD_BYTES // shape.itemsize


def backward_simt_dq(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_simt_dq.cu: queries, do, tiles, stage, lse and delta."""
    held = _whole(shape, block_q, shape.d) + _whole(shape, block_q, shape.d_v)
    held += (1 + spare) * _tile(shape, block_q, block_kv) + 2 * block_q
    stages = (shape.stage(block_kv, width, shape.d) for width in (shape.d, shape.d_v))
    return held + max(stages)


def backward_bias(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_bias.cu: chunks of both operands, tiles, lse and delta.

    Those of backward_lookup.cu are the same.
    """
    chunk = max(shape.odd_stride(shape.chunk_columns(width)) for width in (shape.d, shape.d_v))
    at_once = shape.is_one_chunk and spare == 0
    held = (block_q + block_kv) * chunk * (2 if at_once else 1)
    return held + (1 + spare) * _tile(shape, block_q, block_kv) + 2 * block_q


def backward_simt_tangent_dkdv(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_simt_tangent_dkdv.cu: k, v, tk, tv, tiles, stage, rows, head."""
    held = _keys(shape, block_kv)
    tiles = (4 + spare) * _tile(shape, block_kv, block_q) + ROW_NUMBERS * block_q
    stages = (shape.stage(block_q, width, width) for width in (shape.d, shape.d_v))
    return 2 * held + tiles + max(stages) + TANGENT_HEAD_BYTES // shape.itemsize


def lean_dkdv(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of the same, if tangents of keys and values are not resident."""
    elements = backward_simt_tangent_dkdv(shape, block_q, block_kv, spare)
    held = _keys(shape, block_kv)
    stage = max(shape.stage(block_q, width, width) for width in (shape.d, shape.d_v))
    return elements - held + max(0, _streamed(shape, block_kv) - stage)


def lean_dq(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_simt_tangent_dq.cu, if tq and tdo are not resident."""
    elements = backward_simt_tangent_dq(shape, block_q, block_kv, spare)
    held = _whole(shape, block_q, shape.d) + _whole(shape, block_q, shape.d_v)
    stage = max(shape.stage(block_kv, width, shape.d) for width in (shape.d, shape.d_v))
    return elements - held + max(0, _streamed(shape, block_q) - stage)


def _streamed(shape: Shape, rows: int) -> int:
    """Elements of two buffers of which each has a chunk of rows."""
    return 2 * rows * max(shape.odd_stride(shape.chunk_columns(x)) for x in (shape.d, shape.d_v))


def backward_simt_tangent_dq(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_simt_tangent_dq.cu: q, do, tq, tdo, tiles, stage, rows."""
    held = _whole(shape, block_q, shape.d) + _whole(shape, block_q, shape.d_v)
    tiles = (4 + spare) * _tile(shape, block_q, block_kv) + ROW_NUMBERS * block_q
    stages = (shape.stage(block_kv, width, shape.d) for width in (shape.d, shape.d_v))
    return 2 * held + tiles + max(stages)


def backward_tangent_bias(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of backward_tangent_bias.cu: chunks of both operands, tiles, rows."""
    chunk = max(shape.odd_stride(shape.chunk_columns(width)) for width in (shape.d, shape.d_v))
    held = (block_q + block_kv) * chunk + (3 + spare) * _tile(shape, block_q, block_kv)
    return held + ROW_NUMBERS * block_q


def reduce_keys(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of reduce_keys.cu: queries, tiles, stage."""
    tiles = (1 + spare) * _tile(shape, block_q, block_kv)
    return _whole(shape, block_q, shape.d) + tiles + 2 * _chunk(shape, block_kv)


def reduce_blocks(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of reduce_blocks.cu: keys, tiles, stage, lse twice, what keys have."""
    held = _whole(shape, block_kv, shape.d) + (1 + spare) * _tile(shape, block_kv, block_q)
    return held + 2 * _chunk(shape, block_q) + 2 * block_q + block_kv


def reduce_distance(shape: Shape, block_q: int, block_kv: int, spare: int) -> int:
    """Shared elements of reduce_distance.cu: chunks of both operands, tiles, lse."""
    tiles = (1 + spare) * _tile(shape, block_q, block_kv)
    return _chunk(shape, block_q + block_kv) + tiles + block_q


# Kernels whose two operands are both streamed: they have no stages.
BOTH_STREAMED = backward_bias, backward_tangent_bias, reduce_distance
