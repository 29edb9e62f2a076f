"""append and rope on the emulator: within the bounds, in poisoned memory, in any order."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from emulator import build
from emulator.calls import Emulator
from emulator.machine import randomly
from emulator.problems import HostMemory
from gpu_arrays import Copies
from halves import mostly_thorough
from placement import PLAIN, Placed, random_layout
from rows import DTYPES, Step, appended, draw_rotary, draw_step, rotated

from cupyflash import Rotary
from cupyflash.problem.append import append
from cupyflash.problem.rotary import rotation
from cupyflash.rowwise import APPEND, ROPE

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=str(build.missing()))


def copied(step: Step, copies: Copies) -> dict[str, Any]:
    """Return the arguments of a step's call in poisoned memory."""
    rotary = step.rotary
    if rotary is not None:
        rotary = Rotary(copies.array(rotary.cos), copies.array(rotary.sin), rotary.interleaved)
    names = "k_new", "v_new", "lengths", "table", "offsets", "q", "positions"
    made = {name: copies.array(getattr(step, name)) for name in names}
    made |= {name: copies.array(getattr(step, name), True) for name in ("k", "v")}
    return made | {"rotary": rotary}


def run(step: Step, seed: int = 0, **unchecked: Any) -> None:
    """Run a step, and hold what it writes to the loops.

    `unchecked` replaces lengths, table, offsets or positions behind the checks, as device memory
    does.
    """
    copies = Copies(HostMemory())
    out = None if step.q is None else np.empty(step.q.shape, step.q.dtype)
    checked = append(**copied(step, copies), out=None)
    for name, value in unchecked.items():
        held = copies.array(value)
        if name in ("lengths", "table"):
            checked = dataclasses.replace(
                checked, cache=dataclasses.replace(checked.cache, **{name: held})
            )
        else:
            checked = dataclasses.replace(checked, **{name: held})
    target = copies.array(out, True)
    Emulator(schedule=randomly(seed)).rowwise(APPEND, checked, out=target)
    copies.check()
    wanted = appended(dataclasses.replace(step, **unchecked))
    for name in ("k", "v"):
        wanted[name].check(copies.value(getattr(step, name)))
    if out is not None:
        wanted["q"].check(copies.value(out))


@mostly_thorough(
    "dtype", DTYPES, quick=DTYPES[1:3], why="rows are moved as whole bytes alike", ids=str
)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_is_what_loops_write(dtype, packed, paged):
    for seed in range(8):
        run(draw_step(np.random.default_rng(seed), dtype, paged, packed), seed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [(16, 16), (64, 40), (272, 512)])
def test_rows_of_whole_vectors(dtype, columns):
    for seed in range(4):
        rng = np.random.default_rng(seed)
        run(draw_step(rng, dtype, seed % 2 == 0, False, columns=columns, aligned=True), seed)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_integers_of_either_size(kind):
    step = draw_step(np.random.default_rng(0), np.dtype(np.float32), True, False, positions=True)
    for name in ("lengths", "table", "positions"):
        values = getattr(step, name)
        layout = random_layout(np.random.default_rng(3), values.ndim, np.dtype(kind).itemsize)
        layout = layout._replace(shift=0)
        setattr(step, name, Placed(values.shape, kind, layout, values).view)
    run(step)


@pytest.mark.parametrize("lengths", [[0, 2, 20], [21, 23, 40], [-1, -(2**63), 2**63 - 1]])
@pytest.mark.parametrize("paged", [False, True])
def test_nothing_is_written_where_the_cache_has_no_room(lengths, paged):
    for seed in range(20):
        step = draw_step(np.random.default_rng(seed), np.dtype(np.float32), paged, False)
        if step.batch == 3 and step.k_new.shape[-2] > 2:
            break
    unchecked: dict[str, Any] = {"lengths": np.array(lengths)}
    if paged:  # every page is there
        pages = np.arange(step.table.size, dtype=np.int32)
        unchecked["table"] = pages.reshape(step.table.shape)
    run(step, **unchecked)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_a_page_that_is_not_there_is_not_written(kind):
    step = draw_step(np.random.default_rng(5), np.dtype(np.float16), True, False, page_size=1)
    bad = step.table.astype(kind)
    n = step.k_new.shape[-2]
    wrong = [-1, len(step.k), np.iinfo(kind).max, np.iinfo(kind).min]
    for b, length in enumerate(step.lengths):
        bad[b, length - n] = wrong[b % 4]
        bad[b, length - 1] = wrong[(b + 1) % 4]
    run(step, table=bad)


def test_positions_without_angles_are_clamped():
    step = draw_step(np.random.default_rng(7), np.dtype(np.float32), True, False, positions=True)
    for values in ([-1, 64, 63], [2**63 - 1, -(2**63), 0]):
        bad = np.resize(np.array(values), step.positions.shape)
        run(step, positions=bad)


@pytest.mark.parametrize("batch", [1, 2, 33, 70, 1100])
def test_a_packed_row_finds_its_entry(batch):
    rng = np.random.default_rng(batch)
    counts = rng.integers(0, 3, batch)
    total = int(counts.sum())
    rows = rng.standard_normal((1, total, 4)).astype(np.float32)
    k, v = (Placed((batch, 1, 4, 4), np.float32, PLAIN) for _ in range(2))
    lengths = counts + rng.integers(0, 2, batch)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    run(Step(rows, -rows, k.view, v.view, lengths, None, offsets, None, None, None, [k, v]))


@pytest.mark.parametrize("offsets", [[-5, 9, 2**62], [9, 3, -1], [-(2**63), 0, 2**63 - 1]])
def test_no_offset_leads_out_of_an_array(offsets):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1, 6, 4)).astype(np.float32)
    k, v = (Placed((2, 1, 8, 4), np.float32, PLAIN).view for _ in range(2))
    step = Step(rows, rows, k, v, np.array([8, 8]), None, np.array([0, 4, 6]), *[None] * 3, [])
    copies = Copies(HostMemory())
    checked = append(**copied(step, copies), out=None)
    Emulator().rowwise(APPEND, dataclasses.replace(checked, offsets=np.array(offsets)))
    copies.check()


def test_offsets_of_the_device_stay_within_the_rows():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1, 6, 4)).astype(np.float32)
    k, v = (Placed((2, 1, 8, 4), np.float32, PLAIN) for _ in range(2))
    offsets = np.array([0, 4, 6])
    step = Step(rows, rows, k.view, v.view, np.array([6, 7]), None, offsets, None, None, None, [])
    # Of rows that belong to no entry nothing is written; those of padding are the last ones.
    run(step, offsets=np.array([1, 2, 5]))
    run(step, offsets=np.array([6, 6, 6]))
    # The rows end where the array does.
    copies = Copies(HostMemory())
    checked = append(**copied(step, copies), out=None)
    Emulator().rowwise(APPEND, dataclasses.replace(checked, offsets=np.array([0, 4, 9])))
    copies.check()
    for name, wanted in appended(step).items():
        wanted.check(copies.value(getattr(step, name)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_rotated_within_the_bound(dtype, interleaved):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        shape = [(2, 3, 5, 16), (3, 7, 34), (1, 2, 3, 272), (2, 1, 4, 64)][seed % 4]
        itemsize = np.dtype(dtype).itemsize
        x, out = (
            Placed(shape, dtype, PLAIN if seed % 2 else aligned(rng, len(shape), itemsize), values)
            for values in (rng.standard_normal(shape), None)
        )
        pairs = int(rng.choice([1, shape[-1] // 4, shape[-1] // 2]))
        rotary = draw_rotary(rng, 40, pairs, interleaved, dtype)
        positions = rng.integers(0, 40, (*shape[:-3], shape[-2])).astype(rng.choice(["i4", "i8"]))
        inverse = bool(seed % 3 == 1)
        copies = Copies(HostMemory())
        held = Rotary(copies.array(rotary.cos), copies.array(rotary.sin), interleaved)
        checked = rotation(copies.array(x.view), copies.array(positions), held, inverse, None)
        target = copies.array(out.view, True)
        Emulator(schedule=randomly(seed)).rowwise(ROPE, checked, out=target)
        copies.check()
        rotated(x.view, positions, rotary, inverse).check(copies.value(out.view))


def test_one_list_of_positions_and_those_without_angles():
    rng = np.random.default_rng(1)
    x, rotary = rng.standard_normal((3, 2, 4, 8)).astype(np.float32), draw_rotary(rng, 9, 4, False)
    checked = rotation(x, [0, 1, 2, 3], rotary, False, None)
    out = np.empty_like(x)
    bad = np.array([8, -5, 9, 2**63 - 1])
    Emulator().rowwise(ROPE, dataclasses.replace(checked, positions=bad), out=out)
    clamped = np.broadcast_to(np.clip(bad, 0, 8), (3, 4))
    rotated(x, clamped, rotary, False).check(out)


def aligned(rng: np.random.Generator, ndim: int, itemsize: int) -> Any:
    """Return a layout whose elements lie at multiples of their size."""
    layout = random_layout(rng, ndim, itemsize)
    return layout._replace(shift=layout.shift // itemsize * itemsize)
