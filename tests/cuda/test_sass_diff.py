"""tests/tools/sass_diff.py says which kernels' machine code differs, and no others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))

import sass_diff
from cuda_table import CannotCompile, nvrtc_version

TEXT = """
// A kernel.
constexpr int FACTOR = 3, UNUSED = 7;
namespace scale { __device__ __forceinline__ float by(float x) { return FACTOR * x; } }
extern "C" __global__ void KERNEL(float* x) { x[threadIdx.x] = scale::by(x[threadIdx.x]); }
"""


def kernel(*changes: tuple[str, str], name: str = "first") -> sass_diff.Kernel:
    text = TEXT.replace("KERNEL", name)
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return sass_diff.Kernel(name, text, "sm_90")


@pytest.fixture(scope="module")
def base() -> sass_diff.Compiled:
    try:
        nvrtc_version()
    except CannotCompile as error:
        pytest.skip(f"NVRTC cannot be used: {error}")
    return sass_diff.compiled(kernel())


@pytest.mark.parametrize(
    "changes",
    [
        [("// A kernel.", "/* Another\n   comment. */\n")],
        [("UNUSED = 7", "UNUSED = 7, MORE = 8")],
        [("scale", "product"), ("by(", "times(")],
    ],
    ids=["a comment", "a constant", "names"],
)
def test_what_changes_no_code_is_equal(base, changes):
    changed = kernel(*changes)
    assert sass_diff.compared(changed, base) is base
    assert sass_diff.differences(sass_diff.compiled(changed), base) == []


def test_a_kernel_of_another_name_is_equal(base):
    changed = kernel(name="second_kernel")
    assert sass_diff.compared(changed, base) is base
    assert sass_diff.compiled(changed).code == base.code


def test_another_constant_differs(base):
    now = sass_diff.compared(kernel(("FACTOR = 3", "FACTOR = 5")), base)
    assert sass_diff.differences(now, base) == ["other instructions, as many"]


def test_more_instructions_and_registers_are_counted(base):
    longer = "for (int n = 0; n < 8; ++n) x[32 * n] += x[n]; x[threadIdx.x] ="
    now = sass_diff.compared(kernel(("x[threadIdx.x] =", longer)), base)
    changed = sass_diff.differences(now, base)
    assert f"registers {base.registers} -> {now.registers}" in changed
    assert f"code bytes {base.code_bytes} -> {now.code_bytes}" in changed


def test_another_value_of_a_table_differs(base):
    table = ("FACTOR = 3, UNUSED = 7", "FACTOR = 3, UNUSED[4] = {1, 2, 3, 4}")
    use = ("FACTOR * x", "UNUSED[threadIdx.x % 4] * x")
    first = sass_diff.compiled(kernel(table, use))
    now = sass_diff.compared(kernel(table, use, ("3, 4}", "3, 5}")), first)
    assert now.ptx != first.ptx
    assert now.source != first.source


def test_a_covering_set_has_one_kernel_for_each_case():
    found = sass_diff.kernels(sass_diff.ROOT, "rope", ["sm_90"])
    assert [each.name.split("__")[0] for each in found.values()] == ["rope"] * 4
    assert {each.arch for each in found.values()} == {"sm_90"}
