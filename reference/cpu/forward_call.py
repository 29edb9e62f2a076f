"""A call of the forward: scratch, work items and the kernel, for any arrays of one kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .addresses import address
from .amx_forward import TileScratch, tile_scratch
from .arguments import tile_sizes
from .calls import Bound
from .forward import ForwardScratch, forward_scratch
from .forward import forward as forward_kernel
from .kernels import by_tiles, called_kernels, made_ready
from .layout import Array, Layout, Problem, Programs, Scratch
from .operands import Operand, Result
from .placed import OWN, Placed, Step, Value
from .prepared import PreparedCall, changes_of, packed_shape, seconds, sinks_of
from .thread_limits import num_threads
from .threads import parallel
from .widen import kind_of


class ForwardCall(PreparedCall):
    """A forward of one form: see `launch.forward` for its parameters.

    Parameters
    ----------
    problem : Problem
        Its sizes.
    programs : Programs
        What happens to its scores.
    q, k, v, sink, out, lse : array
        Arrays like those of the calls to come.
    block_q, block_kv : int
        Its tiles.
    resumes : bool
        Whether out and lse have the result over other keys.
    """

    def __init__(
        self, problem: Problem, programs: Programs, q: Array, k: Array, v: Array,
        sink: Array | None, out: Array, lse: Array, block_q: int, block_kv: int, resumes: bool,
    ) -> None:  # fmt: skip
        num_threads()  # a wrong number of threads is an error of the first call
        kind = kind_of(q.dtype)
        tiles = by_tiles(problem.accumulator, kind)
        self._tiles, self._called = tiles, tiles.forward if tiles else forward_kernel
        called = called_kernels(problem, programs, False, kind)
        self._pointers = pointers = made_ready(problem, programs, called, kind, self._called)
        layout, scratch = Layout(problem, block_q, block_kv), Scratch()
        super().__init__(layout, programs)
        self._q = Operand(layout, q, scratch, False, widened=True)
        self._k = Operand(layout, k, scratch, False, widened=True, keys=True)
        self._v = Operand(layout, v, scratch, False, widened=True, keys=True)
        self._out = Result(layout, out, scratch, narrow=pointers.narrow)
        self._lse = Result(layout, lse[..., None], scratch)
        assert not resumes or layout.readable(out, whole_vectors=False)
        self._is_told = False
        self._lse_shape, self._has_sink = lse.shape, sink is not None
        self._resumes, self._sinks = int(resumes), sinks_of(layout, sink)
        self.shape = packed_shape(layout)
        self._work = layout.blocks(block_q, last_first=True)
        self._visited = np.zeros(len(self._work) * problem.heads, np.int64)
        self._seconds = seconds(layout.shape, 2, layout.itemsize)
        self._kernel = self._bound()
        self.nbytes += scratch.nbytes

    def _bound(self) -> Bound:
        """Return the kernel with its arguments."""
        layout = self._layout
        changes = changes_of(
            layout,
            self._programs,
            self._pointers,
            self._ranges,
            bool(self._tiles),
            keeps_classes=True,
        )
        self._classes = changes.lists.classes
        self.nbytes += self._classes.nbytes
        sizes = tile_sizes(layout.shape, changes)
        tiles = self._tiles

        def scratch() -> tuple[TileScratch | ForwardScratch]:
            if tiles is None:
                return (forward_scratch(sizes, layout.number),)
            return (tile_scratch(sizes, layout.number, tiles.parts),)

        return Bound(
            self._called,
            layout.number,
            self._work,
            self.shape,
            changes,
            self._q.rows,
            self._k.rows,
            self._v.rows,
            self._sinks,
            self._resumes,
            self._out.rows,
            self._lse.rows,
            self._visited,
            scratch=scratch,
            sizes=sizes,
        )

    def placed(self, tables: Sequence[Value], wants_lse: bool, by_team: bool) -> Placed | None:
        """Return what makes the call again at addresses: of q, k, v, out and lse, and of tables."""
        if self._has_sink or not self._visited.size or self._classes.size:
            return None
        step = Step(self._kernel, self._visited.size, self._seconds)
        return self._placed([step], self._arrays(wants_lse), tables, by_team=by_team)

    def grow(self, lengths: Array, ends: tuple[Array, Array] | None) -> None:
        """Set how many keys entries have, and the first and last key of each query."""
        super().grow(lengths, ends)
        self._seconds = seconds(self._layout.shape, 2, self._layout.itemsize)

    def grown(
        self, q: Array, k: Array, v: Array, sink: Array | None, out: Array, lse: Array
    ) -> None:
        """Write out and lse of a call with any number of keys."""
        if self._is_told:  # where rows lie was written by others
            self._k.forget()
            self._v.forget()
        self._k.reach(k)
        self._v.reach(v)
        self(q, k, v, sink, out, lse)

    def placed_growing(self, most: int, wants_lse: bool) -> Placed | None:
        """Return what makes the call again at addresses with any number of keys, up to `most`.

        It is told that number as "len_k", and how far entries, heads and rows of keys are apart, in
        elements, as "k 0", "k 1" and "k 2"; and likewise those of values.
        """
        layout = self._layout
        lengths = layout.len_k
        ranges = self._programs.ranges
        if self._has_sink or not self._visited.size or self._classes.size or ranges is not None:
            return None
        if not lengths.all():  # its time says nothing of others'
            return None
        entries = range(layout.batch)
        values = [Value(address(lengths) + 8 * b, "len_k") for b in entries]
        offsets = np.zeros((2, layout.batch), np.int64)
        for name, operand, own in zip("kv", (self._k, self._v), offsets, strict=True):
            rows = operand.rows
            values += [
                Value(rows.place_of("batch"), OWN, address(own), 0),
                *[Value(address(own) + 8 * b, f"{name} 0", factor=b) for b in entries],
                Value(rows.place_of("head"), f"{name} 1"),
                Value(rows.place_of("row"), f"{name} 2"),
            ]
        step = Step(self._kernel, self._visited.size, self._seconds * most / int(lengths[0]))
        made = self._placed([step], self._arrays(wants_lse), values, held=offsets)
        if made is not None and made.threads:
            return None  # how many threads are worth it depends on the number of keys
        self._is_told = self._is_told or made is not None
        return made

    def _arrays(self, wants_lse: bool) -> dict[str, Operand | Result]:
        return {
            "q": self._q, "k": self._k, "v": self._v, "out": self._out,
            "lse" if wants_lse else OWN: self._lse,
        }  # fmt: skip

    def empty_lse(self) -> Array:
        """Return memory for lse."""
        return np.empty(self._lse_shape, self._layout.number)

    @property
    def visited(self) -> int:
        """How many tiles the last call visited: those that are not EMPTY."""
        return int(self._visited.sum())

    def __call__(
        self, q: Array, k: Array, v: Array, sink: Array | None, out: Array, lse: Array
    ) -> None:
        """Write out and lse."""
        self._q.load(q)
        self._k.load(k)
        self._v.load(v)
        self._out.place(out)
        self._lse.place(lse)
        if sink is not None:
            self._sinks[...] = sink
        self._classes.fill(0)
        parallel(self._kernel, self._visited.size, (q, k, v, out, lse, self), self._seconds)
        self._out.finish(out)
        self._lse.finish(lse[..., None])
