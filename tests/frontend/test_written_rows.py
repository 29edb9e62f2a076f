"""No row of a page is written for two positions, unless entries share the position and the row."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from placement import same_bits
from recognised import draw

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, append
from cupyflash.arrays import device_arrays
from cupyflash.problem import cached as cached_calls

F32 = np.float32


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


def pages(count: int, page: int = 4) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.full((2, count, 2, page, 8), np.nan, F32)
    return k, v


FORK = np.array([[0, 1], [0, 1]])  # the last page was not copied


def test_a_fork_whose_last_page_was_not_copied_is_refused():
    new, (k, v) = rows(2, 2, 1, 8), pages(6)
    words = "table: entry 0 position 6 and entry 1 position 6 are both row 2 of page 1; "
    with pytest.raises(ArgumentError, match=re.escape(words)):
        append(new, new, k, v, [7, 7], table=FORK)
    assert np.isnan(k).all()
    append(new, new, k, v, [7, 8], table=FORK)  # two rows of the page
    append(new, new, k, v, [7, 7], table=[[0, 1], [0, 2]] @ np.eye(2, dtype=int))


def test_a_ring_takes_the_last_rows_and_no_more():
    new, (k, v) = rows(1, 2, 20, 8), pages(3)
    ring = np.array([[0, 1, 2, 0, 1]])
    words = "entry 0 position 7 and entry 0 position 19 are both row 3 of page 1; "
    for n in (20, 13):
        with pytest.raises(ArgumentError, match=f"{words}.* 12 or fewer, with the same lengths"):
            append(new[..., -n:, :], new[..., -n:, :], k, v, [20], table=ring)
    append(new[..., -12:, :], new[..., -12:, :], k, v, [20], table=ring)
    for position in range(8, 20):
        assert same_bits(k[position // 4 % 3, :, position % 4], new[0, :, position])


def test_entries_write_the_same_rows_of_what_they_share():
    prompt, (k, v) = np.repeat(rows(1, 2, 6, 8), 2, 0), pages(6)
    with pytest.raises(ArgumentError, match="pass shared=6; otherwise"):
        append(prompt, prompt, k, v, [6, 6], table=FORK)
    append(prompt, prompt, k, v, [6, 6], table=FORK, shared=6)
    assert same_bits(k[1, :, 1], prompt[0, :, 5])
    with pytest.raises(ArgumentError, match="pass shared=6"):
        append(prompt, prompt, k, v, [6, 6], table=FORK, shared=5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["k_new", "v_new", "positions"])
def test_what_entries_share_is_the_same(packed, name):
    made = {"k_new": np.repeat(rows(1, 2, 6, 8), 2, 0), "positions": np.repeat([range(6)], 2, 0)}
    made["v_new"] = made["k_new"].copy()
    made["k_new"][:, 0, 0, 0], made["v_new"][:, 0, 0, 0] = np.nan, -0.0

    def call() -> None:
        k, v = pages(6)
        angles = rows(9, 4)
        given = {key: x.copy() for key, x in made.items()}
        if packed:
            for each in ("k_new", "v_new"):
                given[each] = np.concatenate(list(given[each]), axis=1)
            given |= {"positions": given["positions"].ravel(), "offsets": np.array([0, 6, 12])}
        rotary = cupyflash.Rotary(angles, angles)
        append(k=k, v=v, lengths=[6, 6], table=FORK, shared=6, rotary=rotary, **given)

    call()
    if name == "positions":
        made[name][1, 4] = 8
    else:
        made[name][1, 1, 4] *= -1
    with pytest.raises(ArgumentError, match=r"position 4 .* row 0 of page 1, with different new"):
        call()


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_codes_and_scales_are_written_once(form):
    new, (k, v) = rows(2, 2, 1, 32), np.zeros((2, 3, 2, 4, 32), F32)
    (k_codes, k_scale), (v_codes, v_scale) = (cupyflash.quantize(x, form) for x in (k, v))
    kept = k_codes.copy(), k_scale.copy()
    keywords: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": form}
    with pytest.raises(ArgumentError, match="both row 2 of page 1"):
        append(new, new, k_codes, v_codes, [7, 7], table=FORK, **keywords)
    assert same_bits(k_codes, kept[0])
    assert same_bits(k_scale, kept[1])


@given(st.data())
def test_it_refuses_what_a_loop_finds(data):
    page, entries, places = (data.draw(st.integers(1, 4)) for _ in range(3))
    shared = data.draw(st.integers(0, page * places))
    count = data.draw(st.integers(1, 2 * places))
    number = st.lists(st.integers(0, count - 1), min_size=places, max_size=places)
    table = np.array(data.draw(st.lists(number, min_size=entries, max_size=entries)))
    lengths = np.array([data.draw(st.integers(0, page * places)) for _ in range(entries)])
    counts = np.array([data.draw(st.integers(0, int(n))) for n in lengths])
    offsets = np.concatenate([[0], np.cumsum(counts)])
    word = data.draw(st.integers(0, 3))  # rows of some positions differ between entries
    written: dict[tuple[int, int], tuple[int, int]] = {}
    new, bad = np.zeros((1, int(offsets[-1]), 2), F32), False
    for b in range(entries):
        for n in range(counts[b]):
            j = lengths[b] - counts[b] + n
            value = j + (b if j == word else 0)
            new[0, offsets[b] + n] = value
            place = int(table[b, j // page]), int(j % page)
            before = written.setdefault(place, (j, value))
            bad |= before != (j, value) or (written[place] is not before)
    cells = [
        (int(table[b, j // page]), int(j % page))
        for b in range(entries)
        for j in range(lengths[b] - counts[b], lengths[b])
    ]
    held = [j for b in range(entries) for j in range(lengths[b] - counts[b], lengths[b])]
    bad |= any(cells.count(cell) > 1 and j >= shared for cell, j in zip(cells, held, strict=True))
    k, v = np.zeros((2, count, 1, page, 2), F32)
    call = lambda: append(new, new, k, v, lengths, table=table, offsets=offsets, shared=shared)  # noqa: E731
    if bad:
        with pytest.raises(ArgumentError, match="are both row"):
            call()
    else:
        call()


@pytest.mark.parametrize("value", [True, 1.0, "2"])
def test_shared_is_a_number_of_positions(value):
    new, (k, v) = rows(2, 2, 1, 8), pages(6)
    with pytest.raises(ArgumentTypeError, match=r"^shared: got"):
        append(new, new, k, v, [3, 7], table=FORK, shared=value)
    with pytest.raises(ArgumentError, match=r"^shared: got 9; expected 0 to 8"):
        append(new, new, k, v, [3, 7], table=FORK, shared=9)


def test_device_tables_are_checked_where_that_is_asked_for(cupy, monkeypatch):
    new, k, v = *draw(cupy, (2, 3, 1, 8), count=1), *draw(cupy, (5, 3, 4, 8), count=2)
    lengths, table = cupy.asarray(np.array([7, 7])), cupy.asarray(FORK)
    append(new, new, k, v, lengths, table=table)  # numbers in device memory are not read
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", True)
    monkeypatch.setattr(device_arrays, "read_back", lambda array: array.host.copy())
    with pytest.raises(ArgumentError, match="both row 2 of page 1"):
        append(new, new, k, v, lengths, table=table)


def test_a_wrapper_names_its_own_argument():
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    from cupyflash.torch import flash_attn_with_kvcache

    x, cache = torch.ones(2, 1, 2, 8), torch.zeros(3, 16, 2, 8)
    held = torch.tensor([5, 5], dtype=torch.int32)
    same = torch.tensor([1, 1], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^cache_batch_idx: entry 0 position 5 and entry 1"):
        flash_attn_with_kvcache(x, cache, cache, x, x, cache_seqlens=held, cache_batch_idx=same)
    table = torch.tensor([[0], [0]], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"^block_table: entry 0 position 5 and entry 1"):
        flash_attn_with_kvcache(
            x, cache, cache.clone(), x, x, cache_seqlens=held, block_table=table
        )
