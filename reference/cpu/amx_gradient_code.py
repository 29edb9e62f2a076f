"""LLVM code for the backward by tiles: weights and gradients of scores become operands."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .amx_code import WORDS, TileEmitter
from .amx_memory import PARTS, ROW, SIDE, TILE
from .vectors import INT, emit_loop


@intrinsic
def pack_gradients(
    typingctx, p, ds, row_size, queries, across_p, across_ds, key_tile, along, lanes
):
    """Pack weights and gradients of 32 keys and 32 queries, of which the first `queries` count.

    They become rows of A, whose words hold queries n and n + 16: tiles of keys lie `key_tile` bytes
    apart. The gradients become columns of B, too, whose words hold keys n and n + 16: tiles of
    queries lie `lanes` bytes apart. Gradients that are infinity or NaN become 0: another number's
    part may be 0. Returns whether there were any.
    """

    def codegen(context, builder, sig, args):
        p, ds, row_size, queries, across_p, across_ds, key_tile, along, lanes = args
        emit = TileEmitter(builder)
        half = builder.mul(row_size, INT(SIDE))
        masks = [emit.first_lanes(builder.sub(queries, INT(t * SIDE))) for t in range(2)]

        def loaded(place: Any) -> list[Any]:
            return [
                builder.select(mask, emit.load(builder.add(place, INT(t * ROW))), emit.zero)
                for t, mask in enumerate(masks)
            ]

        def put(low: Any, high: Any, place: Any) -> None:
            for n, words in enumerate(emit.packed(low, high, PARTS, finite=True, rounds=True)):
                emit.store(words, builder.add(place, INT(n * TILE)))

        def row(j: Any, found: list[Any]) -> list[Any]:
            offset, cell = builder.mul(j, row_size), builder.mul(j, INT(ROW))
            gradients = []
            any_here = found[0]
            for u in range(2):
                at = builder.add(offset, half) if u else offset
                for source, target in ((p, across_p), (ds, across_ds)):
                    both = loaded(builder.add(source, at))
                    if source is ds:
                        for t, value in enumerate(both):
                            here = emit.is_nonfinite(builder.bitcast(value, WORDS))
                            any_here = builder.or_(any_here, here)
                            both[t] = builder.select(here, emit.zero, value)
                        gradients.append(both)
                    place = builder.add(target, cell)
                    put(both[0], both[1], builder.add(place, key_tile) if u else place)
            for t in range(2):
                place = builder.add(along, cell)
                low, high = gradients[0][t], gradients[1][t]
                put(low, high, builder.add(place, lanes) if t else place)
            return [any_here]

        none = ir.Constant(ir.VectorType(ir.IntType(1), SIDE), [0] * SIDE)
        return emit.lanes_of(*emit_loop(builder, INT(SIDE), [none], row))

    return types.int64(*[types.int64] * 9), codegen
