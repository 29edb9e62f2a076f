"""The kit has teeth: `verify` finds each of a catalogue of faults, and none where there is none."""

import pytest
from faults import FAULTS, GRADIENT_FAULTS, KNOWN, TILES, Attention
from halves import mostly_thorough

from cupyflash.testing import PROPERTIES, verify

OF_GRADIENTS = [name for name, each in PROPERTIES.items() if "backward" in each.needs]


def judge(fault):
    kernel, only = Attention(fault), OF_GRADIENTS if fault in GRADIENT_FAULTS else None
    return verify(
        kernel.forward, kernel.backward, features=KNOWN, tiles=TILES, only=only, stop=True
    )


@pytest.mark.thorough("every property of a slow kernel; test_properties.py tries each")
def test_nothing_is_found_where_nothing_is_wrong():
    report = judge("")
    assert report.passed, str(report)
    of_others = {
        name for name, x in PROPERTIES.items()
        if x.needs & {"cached", "append", "rope", "jvp", "backward_jvp"}
    }  # fmt: skip
    # Two functions, no codes, and neither bits by position nor out=: all else was tried.
    idle = {x.name for x in report.results if x.status == "not applicable" and x.formula}
    assert idle == {
        "packed_within_bound", "packed_gradients_within_bound", "sequences_apart",
        "neighbours_change_nothing", "combined_parts", "combined_parts_of_any_size",
        "given_outputs_are_written", "float8_within_bound",
    } | of_others  # fmt: skip


@mostly_thorough(
    "fault", FAULTS, quick=list(FAULTS)[::12], why="the catalogue; that faults are found is quick"
)
def test_each_fault_is_found(fault):
    report = judge(fault)
    assert report.failures, f"{fault} ({FAULTS[fault]}) was not found"


def test_there_are_enough():
    assert len(FAULTS) >= 30
