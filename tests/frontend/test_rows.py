"""Kinds of rows and of encodings: each answers whatever layers may ask of any."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash.expr.nodes import symbol
from cupyflash.problem import cached, validate
from cupyflash.problem.cached_rows import CachedRows
from cupyflash.problem.encoding import CacheEncoding, Encoding, Fp8Encoding
from cupyflash.problem.formats import FORMATS
from cupyflash.problem.rows import UNKNOWN, DenseRows, PackedRows

# Members that only rows of pieces need: a call over a cache is never divided, and its queries,
# `of_queries`, have them.
OF_PIECES = {
    "layout", "of_entry", "part_of_bias", "piece", "refuse_sharded_lookup", "shares_pairs", "start",
    "symbols_within",
}  # fmt: skip
OWN = {"of", "len_q", "len_k", "start_q", "start_k", "offsets", "of_queries"}


def members(kind):
    fields = set(getattr(kind, "__dataclass_fields__", ()))
    return {name for name in {*vars(kind), *fields} if not name.startswith("_")}


def test_every_kind_of_rows_has_the_same_members():
    dense, packed, over_cache = map(members, (DenseRows, PackedRows, CachedRows))
    assert dense | OWN == packed | OWN
    assert dense - OF_PIECES | OWN == over_cache | OWN


@pytest.mark.parametrize("kind", [Fp8Encoding, CacheEncoding])
def test_an_encoding_of_codes_answers_nothing_that_numbers_do_not(kind):
    assert members(kind) <= members(Encoding)


def rows_of(kind):
    x = np.zeros((2, 3, 8, 4), np.float32)
    if kind == "dense":
        return validate.call(x, x, x).rows
    if kind == "packed":
        return validate.varlen_call(x[0], x[0], x[0], [0, 2, 8], [0, 5, 8], True).rows
    offsets = [0, 1, 8] if kind == "packed queries" else None
    return cached.call(x if offsets is None else x[0], x, x, [3, 8], None, offsets).rows


@pytest.mark.parametrize(
    ("kind", "lead", "known", "entries", "extent", "groups"),
    [
        ("dense", (2,), (8, 8), (2, 0), (8, 8), 3),
        ("packed", (), (UNKNOWN, UNKNOWN), (1, 2), (8, 24), 4),
        ("cache", (2,), (8, UNKNOWN), (2, 0), (8, 8), 3),
        ("packed queries", (), (UNKNOWN, UNKNOWN), (1, 2), (8, 24), 4),
    ],
)
def test_what_rows_answer(kind, lead, known, entries, extent, groups):
    rows = rows_of(kind)
    assert rows.array_lead((2,)) == lead
    assert (rows.known_q, rows.known_k) == known
    assert rows.entries(2) == entries
    assert rows.extent((8, 8), (8, 24)) == extent
    assert rows.row_groups(8, 3, 2) == groups


def test_only_rows_that_numbers_describe_have_a_key():
    assert rows_of("dense").key == (8, 8)
    assert rows_of("cache").key == ("cached", (8, 8), 8)
    assert rows_of("cache").sized(len_k=np.array([3, 7])).key is None
    assert all(rows_of(kind).key is None for kind in ("packed", "packed queries"))


def test_the_queries_of_packed_rows_are_numbered_within_their_sequences():
    entry, position = rows_of("packed").queries(2)
    np.testing.assert_array_equal(entry, [0, 0, 1, 1, 1, 1, 1, 1])
    np.testing.assert_array_equal(position, [0, 1, 0, 1, 2, 3, 4, 5])


def test_a_piece_of_one_sequence_is_dense_and_one_of_several_is_packed():
    whole = rows_of("packed")
    one = whole.piece(range(3, 6), range(5, 8), range(1, 2))
    assert (one["rows"].len_q, one["rows"].len_k, one["lead"]) == (3, 3, ())
    assert (one["origin_q"], one["origin_k"], one["origin_b"]) == (1, 0, 1)
    assert str(one["rows"].symbols_within(whole, 1)["start_k"]) == "5"
    both = whole.piece(range(8), range(8), range(2))
    np.testing.assert_array_equal(both["rows"].offsets["offsets_k"], [0, 5, 8])
    moved = both["rows"].symbols_within(whole, 0)
    assert str(moved["start_q"]) == str(symbol("start_q") + 0)


def test_codes_say_what_their_rows_take():
    codes, scale = np.zeros((2, 3, 8, 2), np.uint8), np.ones((2, 3, 8, 1), np.float32)
    held = CacheEncoding(FORMATS["int4"], None, scale)
    assert Encoding().row_bytes("k", codes) == 2
    assert held.row_bytes("k", codes) == 6
    assert held.words_of_rows == ["int4 keys with 1 scale for each row"]
    same = Fp8Encoding(*[FORMATS["float8_e4m3fn"]] * 2, scale, scale, scale)
    assert same.type_words(np.dtype(np.float16)) == (
        "float8_e4m3fn", "float8_e4m3fn, results in float16",
    )  # fmt: skip
