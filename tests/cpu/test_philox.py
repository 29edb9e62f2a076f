"""Philox against the published vectors, and dropout's keep mask against stored ones."""

import itertools

import numpy as np
import pytest

from cupyflash.reference.cpu import philox

# The known-answer file of the Random123 distribution, lines "philox4x32 10".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# seed, p, b * Hq + h, first i, first j, keep mask of 4 rows by 24 keys. Written by a scalar
# generator in plain Python integers that shares no code with the package.
STORED_MASKS = [
    (0, 0.5, 0, 0, 0,
     ["011110100000101011110010", "010001100101110011001011",
      "001110110011110100011110", "110110001101101110111100"]),
    (1234567890123456789, 0.1, 7, 1000, 30,
     ["101111111111101010111111", "111011111110111111111110",
      "100110101011111111111101", "111011011111001111111111"]),
    (2**64 - 1, 0.9, 2**32 + 5, 2**20, 2**22 + 1,
     ["000000000000000000100000", "000010000000000010000000",
      "000000101000000000000000", "000000000000100001010001"]),
    (42, 0.25, 3, 0, 2,
     ["111010111101111001001011", "111111111011001111111110",
      "111111100111010101011110", "001111101111110011111011"]),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    result = philox.philox4x32(counter, key)
    assert tuple(int(w) for w in result) == words
    assert all(w.dtype == np.uint32 for w in result)


def test_known_answers_as_one_array():
    # The key is the same for a whole array, the counters are not: run all counters under each key.
    counters = np.array([c for c, _, _ in KNOWN_ANSWERS], dtype=np.uint64).T
    for n, (_, key, words) in enumerate(KNOWN_ANSWERS):
        result = philox.philox4x32(tuple(counters), key)
        assert tuple(int(w[n]) for w in result) == words


@pytest.mark.parametrize(("seed", "p", "head", "i", "j", "rows"), STORED_MASKS)
def test_stored_masks(seed, p, head, i, j, rows):
    mask = philox.keep(seed, p, head, i + np.arange(4)[:, None], j + np.arange(24))
    assert ["".join("1" if x else "0" for x in row) for row in mask] == rows


def test_a_mask_is_a_function_of_its_indices_alone():
    head, i, j = np.arange(5)[:, None, None], np.arange(37)[:, None], np.arange(53)
    whole = philox.keep(99, 0.3, head, i, j)
    assert np.array_equal(whole, philox.keep(99, 0.3, head, i, j))
    # any window of it, in any shape, order and integer type
    window = philox.keep(99, 0.3, head[3:4], i[11:20].astype(np.int32), j[7:50][::-1])
    assert np.array_equal(window, whole[3:4, 11:20, 7:50][..., ::-1])
    single = philox.keep(99, 0.3, 2, 36, 52)
    assert single.shape == ()
    assert single == whole[2, 36, 52]


def test_every_index_and_both_halves_of_seed_and_head_matter():
    i, j = np.arange(64)[:, None], np.arange(64)
    base = philox.keep(7, 0.5, 0, i, j)
    others = [
        philox.keep(8, 0.5, 0, i, j),
        philox.keep(7 + 2**32, 0.5, 0, i, j),
        philox.keep(7, 0.5, 1, i, j),
        philox.keep(7, 0.5, 2**32, i, j),
        philox.keep(7, 0.5, 0, i + 1, j),
        philox.keep(7, 0.5, 0, i, j + 4),
        base.T,
    ]
    for other in others:  # independent fair bits agree in half the places: 2048 of 4096, sigma 32
        assert abs(int((base == other).sum()) - 2048) < 6 * 32


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", [0, 2**63 + 12345])
def test_keep_rate_is_binomial(p, seed):
    count = 400 * 1000
    kept = philox.keep(seed, p, 3, np.arange(400)[:, None], np.arange(1000))
    sigma = np.sqrt(count * p * (1 - p))
    assert abs(kept.sum() - count * (1 - p)) < 5 * sigma


def test_masks_of_growing_dropout_are_nested():
    i, j = np.arange(50)[:, None], np.arange(50)
    masks = [philox.keep(5, p, 0, i, j) for p in (0.0, 0.2, 0.5, 0.8)]
    assert masks[0].all()
    for more, fewer in itertools.pairwise(masks):
        assert not (fewer & ~more).any()


def test_threshold_and_survivors_divisor():
    assert philox.threshold(0.0) == 0
    assert philox.threshold(0.5) == 2**31
    assert philox.threshold(0.1) == 429496730  # 0.1 * 2**32 = 429496729.6
    assert philox.threshold(np.nextafter(1.0, 0.0)) == 2**32
    assert philox.keep_probability(0.0) == 1.0
    assert philox.keep_probability(0.1) == 1 - 429496730 / 2**32
    assert not philox.keep(1, np.nextafter(1.0, 0.0), 0, 0, np.arange(100)).any()


def test_empty_and_zero_dimensional_arguments():
    assert philox.keep(1, 0.5, 0, np.arange(0)[:, None], np.arange(3)).shape == (0, 3)
    seed = np.array(1234567890123456789, dtype=np.uint64)
    assert np.array_equal(
        philox.keep(seed, 0.1, 7, 1000, np.arange(9)),
        philox.keep(1234567890123456789, 0.1, 7, 1000, np.arange(9)),
    )
