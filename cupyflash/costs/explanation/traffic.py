"""What each kernel reads, writes and computes, from sizes and from the tiles that it visits.

Arrays that masks and scores look up are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...gpu.kernels import decode
from ...gpu.workspace import UNIT
from ...problem.call import Call
from ..figures.survey import Survey
from . import derivatives
from .results import Bytes


def made(reads: Mapping[str, int], writes: Mapping[str, int]) -> Bytes:
    """Return `Bytes` without what nothing moves."""
    return Bytes(
        {name: n for name, n in reads.items() if n}, {name: n for name, n in writes.items() if n}
    )


def total(parts: list[Bytes]) -> Bytes:
    """Return the sum over several kernels, array by array."""
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    for part in parts:
        for sums, own in ((reads, part.reads), (writes, part.writes)):
            for name, n in own.items():
                sums[name] = sums.get(name, 0) + n
    return Bytes(reads, writes)


SCALE = 4  # bytes


def of_codes(call: Call) -> dict[str, int]:
    """Return the bytes of operands that are codes, with their scales."""
    scales = call.encoding.scales
    return {
        name: math.prod(getattr(call, name).shape)
        + SCALE * math.prod(scales[f"{name}_scale"].shape)
        for name in call.encoding.operands
    }


class Sizes:
    """Bytes of a call's arrays, and of their rows."""

    def __init__(
        self,
        call: Call,
        lengths: Sequence[int] = (),
        coded: Call | None = None,
        shared: decode.Shared = decode.NOT_SHARED,
    ) -> None:
        """Take the sizes of a call, as its main kernel has it.

        Over a cache, `lengths` are those of its batch entries, and `shared` is what a kernel of
        its own computes. `coded` is the call on codes of float8 whose numbers this call has.
        """
        problem = call.problem
        self.shared, keys = shared, shared.nodes * decode.NODE
        self.sharers = sum(length > keys for length in lengths) if keys else 0
        self.shared_keys = problem.heads_kv * keys if self.sharers else 0
        self.problem = problem
        self.item, self.wide = problem.dtype.itemsize, problem.accumulator.itemsize
        self.queries = problem.batch * problem.heads * int(problem.len_q)
        encoding, rows = call.encoding, call.rows
        self.key_row, self.value_row = (
            encoding.row_bytes(name, x) for name, x in (("k", call.k), ("v", call.v))
        )
        if lengths and encoding.views_are_read_once and decode.values_in_keys(call):
            self.value_row = 0  # they are read as keys
        operands = {
            "q": math.prod(call.q.shape) * self.item,
            "k": rows.rows_in_use(call.k, lengths) * self.key_row,
            "v": rows.rows_in_use(call.v, lengths) * self.value_row,
        }
        self.q, self.k, self.v = (operands | of_codes(call)).values()
        self.table = rows.table_bytes(lengths)  # the part of a table of pages that is read
        entries: Sequence[int] = lengths or [int(problem.len_k)] * problem.batch
        self.codes = {} if coded is None else of_codes(coded)
        leaves = sum(max(-(-length // decode.LEAF), 1) for length in entries)
        self.rows_of_leaves = problem.heads * int(problem.len_q) * leaves
        self.o = self.queries * problem.d_v * self.item
        item = self.item if coded is None else coded.problem.dtype.itemsize
        self.results = self.queries * problem.d_v * item  # as the user gets them
        self.row = self.queries * self.wide  # lse, delta
        # Sums of dq in memory: in groups of columns for 16-bit types, otherwise dq itself.
        columns = -(-problem.d // UNIT) * UNIT if self.item < self.wide else problem.d
        self.sum_row = columns * self.wide
        self.piece_row = decode.row_bytes(problem.d_v, self.wide)  # o, m and l of some keys

    def seen(self, found: Survey) -> dict[str, int]:
        """Return the bytes of keys and values in visited tiles, each counted once.

        If a mask differs between query heads that share keys, they count as if they saw different
        keys.
        """
        group = 1 if found.by_head else self.problem.heads // self.problem.heads_kv
        rows = found.touched_keys // group
        k, v = rows * self.key_row, rows * self.value_row
        table = {"table": self.table} if self.table else {}
        return {"k": min(self.k, k), "v": min(self.v, v), **table}

    @property
    def _arrays(self) -> dict[str, int]:
        """The bytes of arrays of which tangents have the same."""
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o, "lse": self.row}

    def least(self, backward: bool, found: Survey, tangents: bool = False) -> Bytes:
        """Return what moves if every array of a call moves once, k and v as far as seen."""
        if tangents:
            return derivatives.least(self._arrays, self.seen(found), backward)
        inputs = self.codes or {"q": self.q} | self.seen(found)
        if not backward:
            return Bytes(inputs, {"o": self.results, "lse": self.row})
        more = {"o": self.o, "do": self.o, "lse": self.row}
        return Bytes(inputs | more, {"dq": self.q, "dk": self.k, "dv": self.v})

    def moved(
        self,
        part: str,
        adds_dq: bool,
        found: Survey | None,
        joins: bool = True,
        whole_dq: bool = False,
        parts: int = 0,
        lists: int = 0,
        own_delta: bool = False,
    ) -> tuple[Bytes, Bytes]:
        """Return what a kernel moves at least (everything once) and at most.

        Parameters
        ----------
        part : str
            What the kernel computes: the name of a part in the specs.
        adds_dq : bool
            Whether it adds its share of dq to memory, or writes zeros to which another one adds.
        found : Survey or None
            The tiles that it visits.
        joins : bool
            Whether another kernel joins its results, see `whole` of `Tiles`.
        whole_dq : bool
            Whether it stores dq beside dk and dv.
        parts : int
            Bytes of parts of dk and dv, which are summed at the end.
        lists : int
            Bytes of lists of tiles, which a kernel writes, and another one puts in order; what the
            others read of them is not counted.
        own_delta : bool
            Whether it computes delta itself, out of o and do.
        """
        sums = self.queries * self.sum_row
        if part == "sums":
            rows = made({"parts": parts}, {"dk": self.k, "dv": self.v})
            return rows, rows
        if part in ("lists", "order"):
            rows = made({}, {"lists": lists}) if part == "lists" else made({"lists": lists}, {})
            return rows, rows
        if part == "delta":
            zeros = sums if adds_dq else 0
            rows = made({"o": self.o, "do": self.o}, {"delta": self.row, "dq_accum": zeros})
            return rows, rows
        if part == "numbers":
            rows = made(self.codes, {"q": self.q, "k": self.k, "v": self.v})
            return rows, rows
        if part == "dq_rows":
            rows = made({"dq_accum": sums}, {"dq": self.q})
            return rows, rows
        d, d_v = self.problem.d, self.problem.d_v
        pieces = [{"pieces": n * self.piece_row} for n in (self.queries, self.rows_of_leaves)]
        shared = self.shared_keys * self.key_row, self.shared_keys * self.value_row
        rows_of_nodes = self.sharers * self.shared.nodes * self.queries // self.problem.batch
        if part == "shared":
            nodes = {"pieces": rows_of_nodes * self.piece_row}
            once, most = (
                {"q": self.q, "k": n * shared[0], "v": n * shared[1]}
                for n in (1, self.shared.teams)
            )
            return made(once, nodes), made(most, nodes)
        if part == "join":
            results = {"o": self.o, "lse": self.row}
            for each in pieces:
                each["pieces"] += rows_of_nodes * self.piece_row
            return made(pieces[0], results), made(pieces[1], results)
        if part == "tangent_delta":
            return derivatives.moved(part, self._arrays, {}, {}, {})
        assert found is not None
        keys, queries = found.visited_keys, found.visited_queries
        again = {"k": keys * self.key_row, "v": keys * self.value_row}
        if self.table:
            again["table"] = self.table * self.problem.heads_kv
        if part in derivatives.PRODUCTS:
            passing = queries * d * self.item, queries * d_v * self.item, queries * self.wide
            pass_by = dict(zip(("q", "o", "lse"), passing, strict=True))
            moved = derivatives.moved(part, self._arrays, self.seen(found), again, pass_by)
            if not adds_dq:
                return moved
            # As of dq below.
            cleared = self.queries * self.sum_row
            least, largest = (
                Bytes({**x.reads, "tdq": n}, {**x.writes, "tdq": n + cleared})
                for x, n in zip(moved, (cleared, queries * self.sum_row), strict=True)
            )
            return least, largest
        statistics = {"lse": self.row} | ({"o": self.o} if own_delta else {"delta": self.row})
        if part == "dkdv":
            mine = {"k": self.k, "v": self.v}
            pass_by = {
                "q": queries * d * self.item,
                "do": queries * d_v * self.item,
                "o": queries * d_v * self.item,
                "lse": queries * self.wide,
                "delta": queries * self.wide,
            }
            once = {"q": self.q, "do": self.o} | statistics
            pass_by = {name: pass_by[name] for name in once}
            once = {name: min(n, pass_by[name]) for name, n in once.items()}
            name = "dq_accum" if self.item < self.wide else "dq"
            results = {"parts": parts} if parts else {"dk": self.k, "dv": self.v}
            if whole_dq:
                results["dq"] = self.q
            # Each visit to a tile reads and writes its rows. Another kernel clears sums before; dq
            # itself is cleared by a fill, which counts here.
            added, summed = (n * self.sum_row if adds_dq else 0 for n in (queries, self.queries))
            zeroed = summed if name == "dq" else 0
            return (
                made(mine | once | {name: summed}, results | {name: summed + zeroed}),
                made(mine | pass_by | {name: added}, results | {name: added + zeroed}),
            )
        if part == "dq":
            mine = {"q": self.q, "do": self.o} | statistics
            results = {"dq": self.q}
        else:
            mine, results = {"q": self.q}, {"o": self.o, "lse": self.row}
        once = self.seen(found)
        if part == "decode":
            for name, n in zip("kv", shared, strict=True):
                once[name] = max(once[name] - n, 0)
                again[name] = max(again[name] - self.sharers * n, 0)
            if joins:
                return made(mine | once, pieces[0]), made(mine | again, pieces[1])
        return made(mine | once, results), made(mine | again, results)

    def passing(self, part: str, atomic_dq: bool) -> int:
        """Return the bytes of one head that all of its blocks read, one after the other."""
        d, d_v = self.problem.d, self.problem.d_v
        group = self.problem.heads // self.problem.heads_kv
        if part == "tangent_dkdv":
            row = 2 * (d + d_v) * self.item + 4 * self.wide + (self.sum_row if atomic_dq else 0)
            return row * int(self.problem.len_q) * group
        if part == "dkdv":
            row = (d + d_v) * self.item + 2 * self.wide + (self.sum_row if atomic_dq else 0)
            return row * int(self.problem.len_q) * group
        copies = 2 if part in derivatives.PRODUCTS else 1
        return copies * (self.key_row + self.value_row) * int(self.problem.len_k)


def flops(part: str, atomic_dq: bool, pairs: int, d: int, d_v: int) -> int:
    """Return the floating-point operations of a kernel's products over a number of pairs.

    A forward has two products, S and P v. A backward in one kernel has five: S, dP, dv, dk and dq.
    If there are two kernels, each computes S and dP. Of tangents, `derivatives` knows.
    """
    if part in derivatives.PRODUCTS:
        of_keys, of_values = derivatives.PRODUCTS[part]
        return derivatives.flops((of_keys + 2 * atomic_dq, of_values), pairs, d, d_v)
    if part == "dkdv":
        return 2 * pairs * ((3 if atomic_dq else 2) * d + 2 * d_v)
    if part == "dq":
        return 2 * pairs * (2 * d + d_v)
    if part in ("delta", "dq_rows", "join", "lists", "numbers", "order", "sums"):
        return 0
    return 2 * pairs * (d + d_v)
