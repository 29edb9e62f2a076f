"""Sequences that start, grow, fork, shrink and end over one paged cache, against lists of rows."""

from __future__ import annotations

import pytest
from cache_machine import CacheMachine
from halves import mostly_thorough
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

import cupyflash
from cupyflash.problem.written_rows import WrittenTwiceError


def test_a_paged_cache_is_lists_of_rows():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=25, stateful_step_count=15)
    )


@pytest.mark.thorough("the same machine, for longer lives")
def test_a_paged_cache_is_lists_of_rows_for_longer():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=100, stateful_step_count=50)
    )


def backwards(k_new, v_new, *arguments, **options):
    """Rows that are appended in another order."""
    cupyflash.append(k_new[..., ::-1, :], v_new[..., ::-1, :], *arguments, **options)


def to_shared_pages(machine):
    """A fork that writes to a page that others have, too."""

    class Sharing(machine):
        def make_room(self, slot, count):
            for n in range(self.pages_of(slot), -(-(self.length(slot) + count) // self.page)):
                self.table[slot, n] = self.take()

    return Sharing


def attend_to_less(q, k, v, lengths, **options):
    """Attention that does not see the last position."""
    if options.get("table") is not None:
        lengths = (lengths - 1).clip(0)
    return cupyflash.attention_cached(q, k, v, lengths, **options)


FAULTY = [
    type("Backwards", (CacheMachine,), {"append": staticmethod(backwards)}),
    type("Less", (CacheMachine,), {"attend": staticmethod(attend_to_less)}),
    to_shared_pages(CacheMachine),
]


@mostly_thorough(
    "machine",
    FAULTY,
    quick=FAULTY[:2],
    why="a fault that few lives show",
    ids=["rows in another order", "a row less", "no copy on write"],
)
def test_the_machine_finds_faults(machine):
    found = settings(
        max_examples=1000, stateful_step_count=20, phases=[Phase.generate], derandomize=True
    )
    # That rows are overwritten is seen by the machine, or is refused before.
    with pytest.raises((AssertionError, WrittenTwiceError)):
        run_state_machine_as_test(machine, settings=found)
