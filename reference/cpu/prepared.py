"""What calls of several kernels have in common, once their sizes are known.

A call is an object: what only sizes, types and masks decide is done when it is made, and it
computes any number of times, for arrays like those that it was made for. One thread uses it at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from . import team
from .amx_memory import PANEL as TILE_PANEL
from .arguments import Changes, FunctionPointers, KeyRanges, Shape, shape_of
from .layout import Array, Layout, Programs
from .microkernel import PANEL, round_up
from .openmp import functions
from .operands import Operand, Result
from .placed import OWN, Placed, Step, Value
from .repeat import Repeat
from .structs import Packed, form_for
from .threads import AT_ONCE, workers_for
from .tile_lists import lists_of, no_lists

Ends = tuple[Array, Array]


class PreparedCall:
    """What every call has: its layout, its programs, and the keys that each query sees.

    Parameters
    ----------
    layout : Layout
        Its sizes.
    programs : Programs
        What happens to its scores.
    """

    repeats = False  # whether `repeat` may return something
    shape: Packed  # as kernels take it; a call over a cache drops no pair and has it elsewhere

    def __init__(self, layout: Layout, programs: Programs) -> None:
        self._layout, self._programs = layout, programs
        self._drops = layout.problem.dropout > 0
        self._ranges = layout.key_ranges(programs.ranges)
        self.nbytes = 0
        self._range_views: list[Array] = []
        if programs.ranges is not None:
            shape, ends = programs.ranges[0].shape, (self._ranges.low, self._ranges.high)
            self._range_views = [x.reshape(shape) for x in ends]
            self.nbytes += sum(x.nbytes for x in ends)

    def grow(self, lengths: Array, ends: tuple[Array, Array] | None) -> None:
        """Set how many keys entries have, and the first and last key of each query."""
        self._layout.len_k[...] = lengths
        if ends is not None:
            self.set_ends(ends)

    def set_ends(self, ends: tuple[Array, Array]) -> None:
        """Set the first and last key of each query."""
        for kept, end in zip(self._range_views, ends, strict=True):
            kept[...] = end

    def seed(self, seed: int) -> None:
        """Set the random generator's key, if pairs are dropped."""
        if self._drops:
            self.shape.change("seed", signed(seed))

    def repeat(
        self,
        q: Array,  # noqa: ARG002, of those that have something
        k: Array,  # noqa: ARG002
        v: Array,  # noqa: ARG002
        out: Array,  # noqa: ARG002
        capacity: int,  # noqa: ARG002
        grows: bool,  # noqa: ARG002
        ends: Callable[[Array], Ends] | None = None,  # noqa: ARG002
    ) -> Repeat | None:
        """Return what makes the last call again at once, if there is something."""
        return None

    def placed(
        self,
        tables: Sequence[Value],  # noqa: ARG002, of those that have something
        wants_lse: bool,  # noqa: ARG002
        by_team: bool,  # noqa: ARG002
    ) -> Placed | None:
        """Return what makes the call again at addresses, if something does.

        It is told those of its arrays by the kernels' names, without lse if that is not wanted, and
        those of `tables`. It is shared by the team, or else by threads of OpenMP.
        """
        return None

    def placed_growing(self, most: int, wants_lse: bool) -> Placed | None:  # noqa: ARG002
        """Return the same for any number of keys up to `most`, if something does."""
        return None

    def _placed(
        self,
        steps: Sequence[Step],
        arrays: Mapping[str, Operand | Result],
        tables: Sequence[Value],
        zeros: Sequence[Array] = (),
        held: object = None,
        by_team: bool = True,
    ) -> Placed | None:
        """Return the same, if kernels reach all arrays in place, and the call is a short one."""
        if sum(step.work for step in steps) > AT_ONCE:
            return None
        if not all(each.is_in_place for each in arrays.values()):
            return None
        has_threads = team.IS_POSSIBLE if by_team else functions() is not None
        if not has_threads and any(workers_for(x.items, x.work) > 1 for x in steps):
            return None
        values = [Value(each.rows.address, name) for name, each in arrays.items()]
        values += tables
        if self._drops:
            values.append(Value(self.shape.place_of("seed"), "seed"))
        names = dict.fromkeys(value.name for value in values if value.name != OWN)
        names |= dict.fromkeys(step.last for step in steps if step.last is not None)
        return Placed(steps, values, zeros, list(names), held, by_team)

    def release(self) -> None:
        """Let go of the arrays that programs read: a later call brings its own."""
        self._programs = replace(self._programs, tables=None)


# What a thread does in a second at least: multiplications and additions, and what a pair of a
# query and a key takes besides, as so many of them.
PRODUCTS_PER_SECOND, PAIR = 1e10, 24
BYTES_PER_SECOND = 1e10  # that it reads


def seconds(shape: Shape, products: int, itemsize: int) -> float:
    """Return about how long one thread takes for so many products of D and of Dv columns."""
    pairs = shape.heads * float(np.dot(shape.len_q, shape.len_k))
    each = products * (shape.d + shape.d_v) / 2 + PAIR
    return pairs * each * itemsize / 4 / PRODUCTS_PER_SECOND


def packed_shape(layout: Layout) -> Packed:
    """Return the sizes of a call as its kernels take them."""
    return Packed(form_for(shape_of, layout.number), layout.shape)


def signed(seed: int) -> int:
    """Return a number of 64 bits as kernels take it."""
    return int(np.uint64(seed).astype(np.int64))


def sinks_of(layout: Layout, sink: Array | None) -> Array:
    """Return a logit for each head, -inf without a sink."""
    heads = layout.problem.heads
    if sink is None:
        return np.full(heads, -np.inf, layout.number)
    return np.array(sink, layout.number)


def changes_of(
    layout: Layout, programs: Programs, pointers: FunctionPointers, ranges: KeyRanges,
    by_tiles: bool = False, keeps_classes: bool = False,
) -> Changes:  # fmt: skip
    """Return what happens to scores, for kernels at these addresses; some multiply by tiles.

    With `keeps_classes`, kernels visit tiles of the layout's blocks and no others, and each call
    begins with classes of 0.
    """
    # What works on whole rows of a tile costs least for long ones.
    whole_rows = layout.problem.dropout or any(
        len(program.code) > program.once_per_tile
        for program in (programs.score, programs.slope, programs.mask)
    )
    block = round_up(layout.block_q, layout.lanes)
    panel = block if whole_rows else min(block, TILE_PANEL if by_tiles else PANEL)
    lists = no_lists(programs.tile, ranges.head)
    if keeps_classes:
        lists = lists_of(
            programs.tile, ranges.head, layout.problem.heads, layout.len_q, layout.len_k,
            layout.block_q, layout.block_kv, panel,
        )  # fmt: skip
    return Changes(
        programs.score,
        programs.slope,
        programs.mask,
        programs.tile,
        ranges,
        pointers,
        int(programs.may_mask),
        panel,
        lists,
    )
