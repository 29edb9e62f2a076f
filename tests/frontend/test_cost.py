"""The model of cost chooses among kernels and tiles as measured times do."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY

from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu.kernels import sm80, sm90

H200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Row(NamedTuple):
    """A row, and times of the forward and the backward by the kernels of sm80 and sm90, in us.

    The tiles of forward_sm90 are those of long rows. Measured on an H200, in one run each: the time
    of sm80, and that of sm90 by both times' ratios to the same peer.
    """

    name: str
    heads: int
    len_q: int
    len_k: int
    d: int
    forward: tuple[float, float]
    backward: tuple[float, float]
    has_bias: bool = False


ROWS = [
    Row("ViT-B", 128 * 12, 197, 197, 64, (136, 104), (385, 315)),
    Row("ViT-H", 32 * 16, 257, 257, 80, (104, 72), (416, 238)),
    Row("SigLIP", 16 * 16, 729, 729, 72, (204, 139), (835, 414)),
    Row("SD1.5 cross", 64, 4096, 77, 40, (65, 37), (290, 180)),
    Row("SDXL cross", 80, 1024, 77, 64, (30, 19), (102, 66)),
    Row("SD1.5 mid", 64, 256, 256, 160, (22, 17), (81, 57)),
    Row("BERT", 768, 128, 128, 64, (38, 27), (117, 95)),
    Row("MiniLM", 3072, 64, 64, 32, (86, 65), (179, 190)),
    Row("Whisper cross", 160, 448, 1500, 64, (138, 82), (332, 231)),
    Row("tiny", 8, 128, 128, 64, (11, 10), (29, 23)),
    Row("Evoformer", 1024, 256, 256, 32, (179, 278), (1660, 1362), has_bias=True),
]
IDS = [row.name for row in ROWS]


def costs(row):
    """Return the costs of a head: of the forward by sm80 and sm90, and of the backward."""
    d, lengths = row.d, (row.len_q, row.len_k)
    usual = sm90.fit_forward(d, d, "scores" if row.has_bias else "plain, few keys")
    limit = H200.shared_memory
    older, gradient = (
        sm80.fit_forward(d, d, limit),
        sm80.fit_backward("backward_sm80_dkdv", d, d, limit),
    )
    forward = (
        sm80.forward_cost(older, d, d, row.has_bias, *lengths),
        sm90.forward_cost(usual, d, d, row.has_bias, *lengths),
    )
    backward = (
        sm80.dkdv_cost(gradient, d, d, *lengths),
        sm90.dkdv_cost(sm90.fit_dkdv(d, d), d, d, *lengths),
    )
    return forward, backward


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_the_faster_kernel_costs_less(row):
    for measured, expected in zip((row.forward, row.backward), costs(row), strict=True):
        faster = measured[1] < measured[0]
        assert (expected[1].time < expected[0].time) == faster


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_costs_are_near_measured_times(row):
    # A launch takes some 8 us; each SM computes as many work tiles, or one more than others.
    for measured, expected in zip(row.forward, costs(row)[0], strict=True):
        work_tiles = row.heads * expected.work_tiles
        share = max(work_tiles / 132, 1)
        assert 0.5 < (8 + share * expected.each / 1000) / measured < 1.5
