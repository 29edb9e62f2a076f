"""The model of cost chooses among kernels and tiles as measured times do."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cuda_specialisations import SHARED_MEMORY, target_of

from cupyflash import lookup, masks
from cupyflash.arrays.cuda_device import Target
from cupyflash.gpu.kernels import registry, sm80, sm90, sm90_dkdv
from cupyflash.gpu.kernels.spec import Request
from cupyflash.problem import validate
from cupyflash.problem.options import Options

H200 = Target(0, "NVIDIA H200", (9, 0), 132, SHARED_MEMORY["sm_90"])
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class Row(NamedTuple):
    """A row, and times of the forward and the backward by the kernels of sm80 and sm90, in us.

    The tiles of forward_sm90 are those of long rows. Measured on an H200, in one run.
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
    Row("ViT-B", 128 * 12, 197, 197, 64, (136, 104), (386, 312)),
    Row("ViT-H", 32 * 16, 257, 257, 80, (103, 70), (416, 236)),
    Row("SigLIP", 16 * 16, 729, 729, 72, (203, 135), (835, 414)),
    Row("SD1.5 cross", 64, 4096, 77, 40, (65, 35), (287, 176)),
    Row("SDXL cross", 80, 1024, 77, 64, (30, 19), (102, 65)),
    Row("SD1.5 mid", 64, 256, 256, 160, (21, 16), (81, 57)),
    Row("BERT", 768, 128, 128, 64, (39, 28), (117, 94)),
    Row("MiniLM", 3072, 64, 64, 32, (87, 67), (179, 192)),
    Row("Whisper cross", 160, 448, 1500, 64, (136, 81), (334, 231)),
    Row("D=32", 256, 1024, 1024, 32, (186, 135), (461, 403)),
    Row("D=16", 256, 1024, 1024, 16, (160, 129), (394, 371)),
    Row("D=136", 64, 1024, 1024, 136, (190, 95), (774, 358)),
    Row("tiny", 8, 128, 128, 64, (10, 9), (28, 21)),
    Row("Evoformer", 1024, 256, 256, 32, (178, 248), (1660, 1362), has_bias=True),
]
IDS = [row.name for row in ROWS]


def costs(row):
    """Return the costs of a head: of the forward by sm80 and sm90, and of the backward."""
    d, lengths = row.d, (row.len_q, row.len_k)
    usual = sm90.fit_forward(d, d, "bias" if row.has_bias else "plain, few keys")
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
        sm90.dkdv_cost(sm90_dkdv.fit_dkdv(d, d), d, d, *lengths),
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


class Tried(NamedTuple):
    """A row, and times of the forward by tiles: queries, keys, blocks that share an SM, and us."""

    name: str
    heads: int
    len_q: int
    len_k: int
    d: int
    registers: str
    times: tuple[tuple[int, int, int, float], ...]


TRIED = [
    Tried(
        "ViT-B",
        1536,
        197,
        197,
        64,
        "plain, few keys",
        (
            (128, 208, 1, 80),
            (64, 208, 1, 108),
            (128, 112, 1, 82),
            (128, 80, 1, 86),
            (192, 128, 1, 104),
        ),
    ),
    Tried(
        "ViT-H",
        512,
        257,
        257,
        80,
        "plain, few keys",
        (
            (128, 144, 1, 56),
            (128, 176, 1, 65),
            (128, 112, 1, 64),
            (128, 64, 1, 71),
            (128, 128, 1, 70),
        ),
    ),
    Tried(
        "SigLIP",
        256,
        729,
        729,
        72,
        "plain, few keys",
        ((128, 128, 1, 135), (128, 112, 1, 135), (128, 144, 1, 143), (128, 176, 1, 145)),
    ),
    Tried(
        "SD1.5 cross",
        64,
        4096,
        77,
        40,
        "plain, few keys",
        (
            (64, 80, 1, 48),
            (64, 80, 2, 33),
            (64, 80, 3, 35),
            (128, 80, 1, 35),
            (192, 80, 1, 29),
            (192, 128, 1, 35),
        ),
    ),
    Tried(
        "SDXL cross",
        80,
        1024,
        77,
        64,
        "plain, few keys",
        (
            (64, 80, 1, 21),
            (64, 80, 2, 16.4),
            (64, 80, 3, 15.5),
            (128, 80, 1, 16.8),
            (192, 80, 1, 16.5),
            (192, 128, 1, 18.7),
        ),
    ),
    Tried(
        "BERT",
        768,
        128,
        128,
        64,
        "masks, smaller",
        ((64, 128, 1, 34), (64, 128, 2, 29), (128, 128, 1, 27), (128, 64, 1, 28)),
    ),
    Tried(
        "MiniLM",
        3072,
        64,
        64,
        32,
        "masks, smaller",
        ((64, 64, 1, 42), (64, 64, 2, 32), (64, 64, 3, 31), (128, 64, 1, 47), (128, 128, 1, 67)),
    ),
    Tried(
        "SD1.5 mid",
        64,
        256,
        256,
        160,
        "plain, few keys",
        ((128, 64, 1, 15.0), (128, 80, 1, 15.8), (128, 112, 1, 15.2)),
    ),
    Tried(
        "Whisper cross",
        160,
        448,
        1500,
        64,
        "plain, few keys",
        (
            (192, 128, 1, 81),
            (128, 128, 1, 83),
            (128, 112, 1, 88),
            (128, 144, 1, 84),
            (128, 176, 1, 82),
        ),
    ),
    Tried(
        "GQA",
        2048,
        128,
        128,
        128,
        "masks, smaller",
        ((128, 128, 1, 62.7), (64, 128, 1, 88), (128, 64, 1, 74)),
    ),
    Tried(
        "D=32",
        256,
        1024,
        1024,
        32,
        "plain, few keys",
        ((192, 128, 1, 135), (128, 128, 1, 152), (128, 176, 1, 159)),
    ),
    Tried(
        "ViT-L",
        512,
        577,
        577,
        64,
        "plain, few keys",
        ((192, 128, 1, 142), (128, 128, 1, 146), (128, 144, 1, 158), (128, 112, 1, 156)),
    ),
    Tried(
        "gpt2",
        96,
        1024,
        1024,
        64,
        "masks, smaller",
        ((128, 128, 1, 51), (128, 64, 1, 62), (128, 112, 1, 60)),
    ),
    Tried("square", 128, 1024, 1024, 64, "plain, few keys", ((192, 128, 1, 83), (128, 176, 1, 91))),
    Tried(
        "Evoformer",
        1024,
        256,
        256,
        32,
        "bias",
        (
            (128, 64, 1, 145),
            (128, 128, 1, 156),
            (64, 128, 2, 143),
            (64, 64, 2, 145),
            (64, 64, 3, 136),
            (192, 112, 1, 248),
        ),
    ),
    Tried(
        "Swin",
        8192,
        49,
        49,
        32,
        "bias",
        ((64, 64, 1, 116), (64, 64, 2, 78), (64, 64, 3, 73), (128, 64, 1, 116), (192, 112, 1, 256)),
    ),
    Tried(
        "T5",
        192,
        512,
        512,
        64,
        "bias",
        (
            (128, 128, 1, 102),
            (64, 128, 2, 103),
            (64, 64, 2, 111),
            (64, 64, 3, 113),
            (192, 112, 1, 148),
        ),
    ),
]


@pytest.mark.parametrize("row", TRIED, ids=[row.name for row in TRIED])
def test_tiles_that_are_chosen_were_nearly_the_fastest(row):
    lengths, sizes = (row.len_q, row.len_k), (row.d, row.d)
    tiles = sm90.choose_forward(*sizes, row.registers, row.registers == "bias", *lengths)
    found = {x[:3]: x[3] for x in row.times}
    chosen = tiles.block_q, tiles.block_kv, tiles.resident_blocks
    assert found[chosen] <= 1.07 * min(found.values())


class Biased(NamedTuple):
    """The same of tiles of a bias; whether there is a causal mask."""

    name: str
    heads: int
    length: int
    d: int
    masked: bool
    times: tuple[tuple[int, int, int, float], ...]


BIASED = [
    Biased(
        name, heads, length, d, masked, tuple((*x, us) for x, us in zip(tried, times, strict=True))
    )
    for tried in [((64, 64, 3), (64, 128, 2), (128, 128, 1), (192, 112, 1))]
    for name, heads, length, d, masked, times in [
        ("a row for all queries, 1024", 96, 1024, 64, False, (106.7, 100.7, 106.3, 119.0)),
        ("a row for all queries, 2048", 64, 2048, 64, False, (259.6, 246.2, 261.5, 251.6)),
        ("T5", 192, 512, 64, False, (60.0, 57.7, 61.5, 68.7)),
        ("T5, causal", 192, 512, 64, True, (45.9, 53.1, 48.5, 63.7)),
        ("a bias of each entry", 64, 2048, 64, False, (270.5, 255.4, 269.9, 266.0)),
        ("the same, causal", 32, 2048, 64, True, (86.4, 84.6, 84.8, 93.9)),
        ("Evoformer", 1024, 256, 32, False, (73.3, 74.6, 78.1, 122.0)),
        ("Evoformer, causal", 1024, 256, 32, True, (81.0, 78.6, 79.1, 104.4)),
    ]
]


@pytest.mark.parametrize("row", BIASED, ids=[row.name for row in BIASED])
def test_tiles_of_a_bias_that_are_chosen_were_nearly_the_fastest(row):
    sizes, lengths = (row.d, row.d), (row.length, row.length)
    tiles = sm90.choose_forward_bias(*sizes, "bias", 2, row.masked, *lengths)
    found = {x[:3]: x[3] for x in row.times}
    chosen = tiles.block_q, tiles.block_kv, tiles.resident_blocks
    assert found[chosen] <= 1.04 * min(found.values())
    for (block_q, block_kv, resident), measured in found.items():
        tiles = sm90.forward_bias_tiles(block_q, block_kv, *sizes, 2, resident)
        expected = sm90.forward_cost(tiles, *sizes, True, *lengths, row.masked)
        us = 8 + row.heads * expected.time / 132e3  # a launch, and all work on 132 SMs
        assert 0.8 < us / measured < 1.25


def test_a_bias_of_four_bytes_keeps_its_stages():
    """Of fewer and larger tiles it would have one."""
    for itemsize, keys in ((2, 128), (4, 64)):
        tiles = sm90.choose_forward_bias(64, 64, "bias", itemsize, False, 1024, 1024)
        assert (tiles.block_kv, tiles.bias_stages) == (keys, 2)


@pytest.mark.parametrize(("queries", "kernel"), [(16, "forward_sm80"), (17, "forward_sm90")])
def test_a_step_of_a_generation_keeps_its_launch(queries, kernel):
    """A map of tensors would have to be encoded anew for each number of keys."""
    q, k = (np.zeros((4, 8, n, 128), np.float16) for n in (queries, 100))
    request = Request.of(validate.call(q, k, k, Options()), target_of("sm_90"))
    choice = registry.select("forward", request)
    assert choice.spec.name == kernel
    reason = dict(choice.passed_over).get(sm90.FORWARD)
    assert (reason is None) == (queries > 16)
    assert reason is None or "at most 16 queries" in reason


def test_masks_of_narrow_ranges_have_smaller_tiles():
    q = np.zeros((1, 2048, 64), np.float16)

    def of(mask):
        return sm90.register_class(validate.call(q, q, q, Options(mask=mask)))

    for narrow in (
        masks.window(127, 0),
        masks.window(200, 300),
        masks.causal() & masks.window(9, 9),
    ):
        assert of(narrow) == "masks, smaller"
    # At query 0 alone, this one is narrow; and nobody reads the ends of that one.
    starts = lookup(np.zeros(2048, np.int32))
    for wide in (
        masks.window(511, 0),
        masks.mask(lambda b, h, i, j: (j >= 0) & (j <= i)),
        masks.mask(lambda b, h, i, j: (j >= starts[i]) & (j <= starts[i] + 3)),
    ):
        assert of(wide) == "masks"
    packed = np.array([0, 2048])
    call = validate.varlen_call(q, q, q, packed, packed, True, Options(mask=masks.window(127, 0)))
    assert sm90.register_class(call) == "masks, smaller"


def test_masks_whose_keys_are_no_range_have_smaller_tiles():
    """More of a large tile is beyond the edges of what few keys a query sees."""
    q = np.zeros((1, 2048, 64), np.float16)
    image = masks.mask(lambda b, h, i, j: abs(i % 64 - j % 64) <= 3)

    def of(mask):
        return sm90.register_class(validate.call(q, q, q, Options(mask=mask)))

    assert of(image) == of(masks.causal() & image) == "masks, smaller"
    assert of(masks.causal()) == of(masks.window(100, None)) == of(masks.window(None, 3)) == "masks"
    assert sm90.fit_forward(64, 64, of(image)).block_q == 128
    assert sm90.fit_forward(64, 64, of(masks.causal())).block_q == 192
