"""What `explain` compiles, and what it says of a compiler that refuses.

`.ci/run` runs this with the oldest NVRTC of each extra, too.
"""

from __future__ import annotations

import os

import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash.costs.explanation import registers

CALLS = [
    ("H200", "float16", {}),
    ("H200", "float32", {}),
    ("H200", "float64", {}),
    ("A100-80GB", "bfloat16", {"deterministic": True}),
    ("T4", "float16", {}),
]


@pytest.fixture(scope="module")
def compiler() -> None:
    """The compiler that `explain` uses, which needs fewer packages than the fixture `nvrtc`."""
    try:
        registers._log('extern "C" __global__ void nothing() {}', "sm_90")
    except registers.UnknownError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(f"NVRTC cannot be used ({error})")


@mostly_thorough(
    ("device", "dtype", "options"), CALLS, quick=[x for x in CALLS if "16" in x[1]],
    why="the same log of other kernels", ids=str,
)  # fmt: skip
def test_kernels_are_compiled(compiler, device, dtype, options):
    made = cupyflash.explain(
        (2, 16, 1024, 64), dtype=dtype, device=device, backward=True, **options
    )
    assert made.unknown == ()
    assert made.kernels
    assert all(kernel.registers.count > 0 for kernel in made.kernels if kernel.registers)
    assert any(kernel.registers for kernel in made.kernels)


def test_an_error_is_quoted_and_not_a_warning(compiler):
    """The log begins with a warning of 100 characters and more."""
    text = (
        "#warning " + "a text that is no error " * 6 + "\nvoid f() { int x; }\nint y = missing;\n"
    )
    with pytest.raises(registers.UnknownError) as caught:
        registers._log(text, "sm_90")
    said = str(caught.value)
    assert 'identifier "missing" is undefined' in said
    assert "no error" not in said
    assert said.startswith("registers: NVRTC ")


def test_a_log_without_an_error():
    assert registers._complaint("") == ""
    assert registers._complaint("\n something else\n") == "something else"
    log = "kernel.cu(1): warning: x\n\nkernel.cu(2): error: y\n1 error detected"
    assert registers._complaint(log) == "kernel.cu(2): error: y"
