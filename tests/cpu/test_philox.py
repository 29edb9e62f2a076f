"""Philox against the published vectors, and dropout's keep mask against stored ones."""

import itertools

import numpy as np
import pytest

from cupyflash.reference.cpu import philox

# The known-answer file of the Random123 distribution, lines "philox4x32 10"; below, "philox4x32 7".
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

ANSWERS_OF_SEVEN = [
    (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
    (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
]

# seed, p, b * Hq + h, first i, first j, keep mask of 4 rows by 24 keys. Written by a scalar
# generator in plain Python integers that shares no code with the package.
STORED_MASKS = [
    (0, 0.5, 0, 0, 0,
     ["011000010000101110010110", "001111000011001110101100",
      "100000011100101101000011", "100001101110000001111011"]),
    (1234567890123456789, 0.1, 7, 1000, 30,
     ["111011111011111111111111", "111111101111111111101111",
      "110111111111110001111111", "111111111111101111011111"]),
    (2**64 - 1, 0.9, 2**32 + 5, 2**20 + 6, 2**22 + 1,
     ["000000000010000000100000", "000000000000010000000000",
      "000001000000000000000000", "000000000000100000100000"]),
    (42, 0.25, 3, 0, 2,
     ["110110010011101011111101", "101111101111111111010001",
      "110101111111010101111110", "011111000111110111101110"]),
]  # fmt: skip


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    result = philox.philox4x32(counter, key)
    assert tuple(int(w) for w in result) == words
    assert all(w.dtype == np.uint32 for w in result)


def test_known_answers_of_seven_rounds():
    for (counter, key, _), words in zip(KNOWN_ANSWERS, ANSWERS_OF_SEVEN, strict=True):
        result = philox.philox4x32(counter, key, philox.DROPOUT_ROUNDS)
        assert tuple(int(w) for w in result) == words


def test_eight_pairs_share_a_draw():
    # Each number of a draw belongs to one pair: equal counters mean other words or halves.
    i, j = np.arange(32)[:, None], np.arange(32)
    numbers = set()
    for seed in range(40):
        kept = philox.keep(seed, 0.5, 1, i, j)
        numbers.add(kept.tobytes())
        assert 0.4 < kept.mean() < 0.6
        for x, y in (
            (8, 0),
            (0, 1),
            (0, 8),
            (8, 9),
            (1, 0),
            (16, 16),
        ):  # neighbours are independent
            agree = kept[: 32 - x, : 32 - y] == kept[x:, y:]
            assert abs(agree.mean() - 0.5) < 6 / 2 / np.sqrt(agree.size)
    assert len(numbers) == 40


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
    assert philox.threshold(0.5) == 2**14
    assert philox.threshold(0.1) == 3277  # 0.1 * 2**15 = 3276.8
    assert philox.threshold(np.nextafter(1.0, 0.0)) == 2**15
    assert philox.keep_probability(0.0) == 1.0
    assert philox.keep_probability(0.1) == 1 - 3277 / 2**15
    assert not philox.keep(1, np.nextafter(1.0, 0.0), 0, 0, np.arange(100)).any()


def test_empty_and_zero_dimensional_arguments():
    assert philox.keep(1, 0.5, 0, np.arange(0)[:, None], np.arange(3)).shape == (0, 3)
    seed = np.array(1234567890123456789, dtype=np.uint64)
    assert np.array_equal(
        philox.keep(seed, 0.1, 7, 1000, np.arange(9)),
        philox.keep(1234567890123456789, 0.1, 7, 1000, np.arange(9)),
    )
