"""Least times are those of the instructions that kernels have, and not of others of the device."""

from __future__ import annotations

import pytest

from cupyflash import explain
from cupyflash.analysis import device
from cupyflash.costs.explanation import times

SMALL, LARGE = (2, 16, 256, 128), (2, 16, 4096, 128)


def of_kernels(shape: tuple[int, ...], name: str, dtype: str = "float16", **options: object):
    return explain(shape, dtype=dtype, device=name, compile=False, **options)


def test_mma_sync_does_not_reach_the_peak_of_hopper():
    """`forward_sm80` serves rows that TMA cannot load; `forward_sm90` has the fast instruction."""
    made = of_kernels((2, 64, 400, 100), "H200")
    assert made.main.name == "forward_sm80"
    whole = of_kernels((2, 64, 400, 100), "A100-80GB")
    peak = made.kernels_roofline.flops / made.kernels_roofline.compute_seconds
    assert peak <= 0.63 * device("H200").peak["float16"]
    assert whole.main.name == "forward_sm80"
    own = whole.kernels_roofline.flops / whole.kernels_roofline.compute_seconds
    assert own > 0.9 * device("A100-80GB").peak["float16"]
    fast = of_kernels(LARGE, "H200")
    assert fast.main.name == "forward_sm90"
    assert (
        fast.kernels_roofline.flops / fast.kernels_roofline.compute_seconds
        > 0.9 * (device("H200").peak["float16"])
    )


@pytest.mark.parametrize("backward", [False, True])
def test_blackwell_has_no_kernels_of_its_own(backward):
    made = of_kernels(LARGE, "B200", backward=backward)
    assert made.roofline is not None  # of the problem, which any kernel could reach
    assert made.kernels_roofline is None
    assert made.share is None
    (why,) = made.unknown
    assert "no kernel for 10.0 of its own" in why
    assert "B200" in why
    assert made.main.name in why or backward


def test_other_units_of_blackwell_are_known():
    """Float32 is multiplied by ordinary units there, too."""
    made = of_kernels(LARGE, "B200", "float32")
    assert made.kernels_roofline is not None
    assert made.unknown == ()


def test_double_precision_has_one_instruction():
    """Hopper has no other than mma.sync for float64."""
    assert times._of_mma_sync(device("H200"), "float64") == 1
    assert times._of_mma_sync(device("H200"), "bfloat16") == times.MMA_SYNC_ON_HOPPER
    assert times._of_mma_sync(device("T4"), "float16") == 1
    assert times._of_mma_sync(device("RTX 4090"), "float16") == 1
