"""Writing to a cache, and rotating rows, on NumPy arrays: against plain loops, in any layout."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from placement import Placed, random_layout, same_bits
from rows import DTYPES, Step, appended, draw_rotary, draw_step, rotated

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, append, rope

F32 = np.float32


def run(step: Step, **changed: Any) -> np.ndarray | None:
    return append(step.k_new, step.v_new, step.k, step.v, step.lengths, **step.keywords() | changed)


# -- what is written, and where -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_a_step_is_what_loops_write(dtype, seed, packed, paged):
    step = draw_step(np.random.default_rng(seed), dtype, paged, packed)
    wanted = appended(step)
    out = run(step)
    for name in ("k", "v"):
        wanted[name].check(getattr(step, name))
    for placed in step.placed:
        placed.check()
    assert (out is None) == (step.q is None)
    if out is not None:
        wanted["q"].check(out)


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("seed", range(3))
def test_pages_hold_what_one_array_holds(page_size, seed):
    rng = np.random.default_rng(seed)
    step = draw_step(rng, F32, True, False, page_size=page_size)
    held = step.capacity
    k, v = (
        np.full((step.batch, x.shape[1], held, x.shape[-1]), np.nan, F32) for x in (step.k, step.v)
    )
    run(step)
    append(step.k_new, step.v_new, k, v, step.lengths, **step.keywords() | {"table": None})
    n = step.k_new.shape[-2]
    for b, length in enumerate(step.lengths):
        for position in range(length - n, length):
            page, row = step.table[b, position // page_size], position % page_size
            assert same_bits(step.k[page, :, row], k[b, :, position])
            assert same_bits(step.v[page, :, row], v[b, :, position])


def test_a_step_of_several_rows_is_several_steps_of_one():
    step = draw_step(np.random.default_rng(1), F32, True, False)
    n = step.k_new.shape[-2]
    assert n > 1
    k, v = step.k.copy(), step.v.copy()
    keywords = step.keywords() | {"q": None, "positions": None}
    append(step.k_new, step.v_new, step.k, step.v, step.lengths, **keywords)
    for i in range(n):
        rows = step.k_new[:, :, i : i + 1], step.v_new[:, :, i : i + 1]
        append(*rows, k, v, step.lengths - n + i + 1, **keywords)
    assert same_bits(k, step.k)
    assert same_bits(v, step.v)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("packed", [False, True])
def test_integers_of_either_size_give_the_same(kind, packed):
    step = draw_step(np.random.default_rng(2), F32, True, packed, positions=True)
    k, v = step.k.copy(), step.v.copy()
    out = run(step)
    keywords = step.keywords()
    for name in ("table", "positions"):
        keywords[name] = keywords[name].astype(kind)
    again = append(step.k_new, step.v_new, k, v, step.lengths.astype(kind), **keywords)
    assert same_bits(k, step.k)
    assert same_bits(v, step.v)
    assert same_bits(again, out)


def test_one_length_is_that_of_all_entries():
    k_new = np.ones((2, 1, 3, 4), F32)
    k, v = np.zeros((2, 2, 1, 8, 4), F32)
    assert append(k_new, k_new, k, v, 5) is None
    assert (k.any(axis=(0, 1, 3)) == [False, False, True, True, True, False, False, False]).all()
    assert same_bits(k, v)


def test_nothing_to_write_writes_nothing():
    k, v = np.full((2, 0, 1, 8, 4), np.nan, F32)
    append(k[:, :, :1], k[:, :, :1], k, v, np.zeros(0, np.int64))
    k, v = np.full((2, 2, 1, 8, 4), np.nan, F32)
    append(k[:, :, :0].copy(), k[:, :, :0].copy(), k, v, [0, 8])
    assert np.isnan(k).all()
    assert np.isnan(v).all()


def test_values_may_be_columns_of_the_keys():
    rng = np.random.default_rng(0)
    k = np.full((1, 1, 6, 12), np.nan, F32)
    k_new = rng.standard_normal((1, 1, 2, 12)).astype(F32)
    append(k_new, k_new[..., :8], k, k[..., :8], 4)
    assert same_bits(k[:, :, 2:4], k_new)
    assert np.isnan(k[:, :, [0, 1, 4, 5]]).all()


def test_the_cache_is_that_of_attention():
    rng = np.random.default_rng(5)
    heads, tokens, d = 2, 9, 8
    q, k_all, v_all = rng.standard_normal((3, 1, heads, tokens, d)).astype(F32)
    k, v = np.full((2, 1, heads, 16, d), np.nan, F32)
    for n in range(tokens):
        append(k_all[:, :, n : n + 1], v_all[:, :, n : n + 1], k, v, n + 1)
        step = cupyflash.attention(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1])
        row = cupyflash.attention(q[:, :, n : n + 1], k_all[:, :, : n + 1], v_all[:, :, : n + 1])
        assert same_bits(step, row)


# -- rotation -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (3, 7, 6)], ids=["dense", "packed"])
def test_rows_are_rotated_within_the_bound(dtype, interleaved, inverse, shape):
    rng = np.random.default_rng(3)
    for pairs in (1, shape[-1] // 2):
        layout = random_layout(rng, len(shape), np.dtype(dtype).itemsize, repeats=True)
        x = Placed(shape, dtype, layout, rng.standard_normal(shape)).view
        rotary = draw_rotary(rng, 11, pairs, interleaved, dtype)
        positions = rng.integers(0, 11, (*shape[:-3], shape[-2]))
        out = Placed(shape, dtype, random_layout(rng, len(shape), np.dtype(dtype).itemsize))
        result = rope(x, positions, rotary, inverse=inverse, out=out.view)
        assert result is out.view
        out.check()
        rotated(x, positions, rotary, inverse).check(result)
        assert same_bits(rope(x, positions, rotary, inverse=inverse), result)


def test_one_list_of_positions_is_that_of_all_entries():
    rng = np.random.default_rng(4)
    x, rotary = rng.standard_normal((3, 2, 4, 8)), draw_rotary(rng, 9, 4, False)
    positions = np.array([8, 0, 3, 3], np.int32)
    every = rope(x, np.broadcast_to(positions, (3, 4)), rotary)
    assert same_bits(rope(x, positions, rotary), every)
    assert same_bits(rope(x, positions.tolist(), rotary), every)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_keeps_norms_and_products_know_the_distance_alone(interleaved):
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((2, 1, 1, 12))
    angles = np.outer(np.arange(80), 3.0 ** -np.arange(6))
    rotary = Rotary(np.cos(angles), np.sin(angles), interleaved)

    def at(x, position):
        return rope(x, [position], rotary)[0, 0]

    unit = 12 * 2.0**-48
    for i, j, far in ((3, 1, 40), (17, 17, 9), (2, 30, 49)):
        assert abs(np.linalg.norm(at(q, i)) - np.linalg.norm(q)) < unit
        assert abs(at(q, i) @ at(k, j) - at(q, i + far) @ at(k, j + far)) < unit
    assert abs(at(q, 3) @ at(k, 1) - at(q, 4) @ at(k, 1)) > 1e-3


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_inverse_undoes_and_is_the_gradient(interleaved):
    rng = np.random.default_rng(7)
    x, dout = rng.standard_normal((2, 2, 3, 5, 10))
    rotary, positions = draw_rotary(rng, 30, 4, interleaved), rng.integers(0, 30, (2, 5))
    back = rope(rope(x, positions, rotary), positions, rotary, inverse=True)
    np.testing.assert_allclose(back, x, atol=1e-6)
    np.testing.assert_allclose(
        (rope(x, positions, rotary) * dout).sum(),
        (x * rope(dout, positions, rotary, inverse=True)).sum(),
    )


def test_neighbours_are_halves_in_another_order():
    rng = np.random.default_rng(8)
    x, halves = rng.standard_normal((2, 3, 5, 10)), draw_rotary(rng, 30, 4, False)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]  # firsts, seconds, what is not rotated
    positions = rng.integers(0, 30, (2, 5))
    neighbours = rope(x, positions, Rotary(halves.cos, halves.sin, True))
    assert same_bits(neighbours[..., order], rope(x[..., order], positions, halves))


def test_a_record_of_angles_is_frozen():
    rotary = draw_rotary(np.random.default_rng(0), 3, 2, False)
    with pytest.raises(AttributeError):
        rotary.interleaved = True
    assert Rotary(rotary.cos, rotary.sin).interleaved is False


# -- errors ---------------------------------------------------------------------------------------

COS = np.ones((40, 2), F32)
ANGLES = Rotary(COS, COS)


def call(**changed: Any) -> Any:
    made: dict[str, Any] = {
        "k_new": np.ones((2, 2, 3, 8), F32),
        "v_new": np.ones((2, 2, 3, 4), F32),
        "k": np.zeros((2, 2, 10, 8), F32),
        "v": np.zeros((2, 2, 10, 4), F32),
        "lengths": np.array([3, 10]),
    }
    made |= changed
    return append(**made)


def pages(**changed: Any) -> Any:
    made = {
        "k": np.zeros((4, 2, 5, 8), F32),
        "v": np.zeros((4, 2, 5, 4), F32),
        "table": np.array([[0, -1], [2, 1]]),
    }
    return call(**made | changed)


def rows(**changed: Any) -> Any:
    made = {
        "k_new": np.ones((2, 6, 8), F32),
        "v_new": np.ones((2, 6, 4), F32),
        "offsets": np.array([0, 2, 6]),
    }
    return call(**made | changed)


def rotate(**changed: Any) -> Any:
    made: dict[str, Any] = {"x": np.ones((2, 2, 3, 8), F32), "positions": [0, 1, 2]}
    return rope(**{**made, "rotary": ANGLES, **changed})


def ones(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.ones(shape, dtype)


def read_only() -> np.ndarray:
    made = np.zeros((2, 2, 10, 8), F32)
    made.flags.writeable = False
    return made


A, T = ArgumentError, ArgumentTypeError
SHARED = np.zeros((2, 2, 10, 16), F32)
REFUSED = {
    "dtypes": (call, {"v_new": ones(2, 2, 3, 4, dtype=np.float64)}, T,
               ("k_new float32, v_new float64", "one dtype", "astype")),
    "no floats": (call, {"k": np.zeros((2, 2, 10, 8), np.int16)}, T,
                  ("k: got dtype int16", "float")),
    "axes of k_new": (call, {"k_new": ones(2, 3, 8)}, A,
                      ("k_new: got shape (2, 3, 8)", "(B, Hkv, n, D)")),
    "axes of k": (call, {"k": ones(2, 10, 8)}, A, ("k: got shape (2, 10, 8)", "(B, Hkv, S, D)")),
    "axes of packed rows": (rows, {"v_new": ones(1, 2, 6, 4)}, A,
                            ("v_new: got shape (1, 2, 6, 4)", "(Hkv, total, Dv)", "offsets")),
    "heads of k_new": (call, {"k_new": ones(2, 4, 3, 8)}, A,
                       ("k_new: got shape (2, 4, 3, 8)", "2 heads of 8 columns", "swapaxes")),
    "columns of v_new": (call, {"v_new": ones(2, 2, 3, 8)}, A,
                         ("v_new: got shape (2, 2, 3, 8)", "2 heads of 4 columns")),
    "rows of v_new": (call, {"v_new": ones(2, 2, 2, 4)}, A,
                      ("v_new: got shape (2, 2, 2, 4) with k_new", "as many batch entries")),
    "entries of k": (call, {"k": ones(1, 2, 10, 8), "v": ones(1, 2, 10, 4)}, A,
                     ("k: got shape (1, 2, 10, 8) with 2 batch entries", "table")),
    "room of v": (call, {"v": ones(2, 2, 9, 4)}, A, ("v: got shape (2, 2, 9, 4)", "9 is not 10")),
    "a read-only cache": (call, {"k": read_only()}, A, ("k: got a read-only array", "written")),
    "keys that are values": (call, {"k": SHARED[..., :8], "v": SHARED[..., 6:10]}, A,
                             ("v and k share memory", "overlaps")),
    "rows that are the cache": (call, {"k": SHARED[..., :8], "k_new": SHARED[:, :, :3, :8]}, A,
                                ("k and k_new share memory",)),
    "lengths too short": (call, {"lengths": np.array([3, 2])}, A,
                          ("lengths: entry 1 is 2 with 3 new rows", "after this step", "Add")),
    "lengths of packed rows": (rows, {"lengths": np.array([1, 5])}, A,
                               ("lengths: entry 0 is 1 with 2 new rows",)),
    "lengths beyond the capacity": (call, {"lengths": 11}, A,
                                    ("lengths: entry 0 is 11", "0 to 10", "longer")),
    "lengths of another shape": (call, {"lengths": np.array([3])}, T,
                                 ("lengths: got shape (1,)", "(2,) of int32 or int64")),
    "lengths of another type": (call, {"lengths": np.array([3.0, 4.0])}, T,
                                ("lengths: got shape (2,), dtype float64",)),
    "a table of another shape": (pages, {"table": np.array([0, 1])}, T,
                                 ("table: got shape (2,), dtype int64", "(B, N) of int32")),
    "a table of more entries": (pages, {"table": np.zeros((3, 2), np.int32)}, A,
                                ("table: got shape (3, 2) with 2 batch entries",)),
    "a page that is not there": (pages, {"table": np.array([[0, -1], [2, 4]])}, A,
                                 ("table: entry (1, 1) is 4", "4 pages")),
    "an unused page": (pages, {"lengths": np.array([6, 10])}, A, ("table: entry (0, 1) is -1",)),
    "offsets": (rows, {"offsets": np.array([0, 2, 5])}, A,
                ("offsets: runs from 0 to 5", "0 to 6")),
    "offsets of floats": (rows, {"offsets": np.array([0.0, 6.0])}, T, ("offsets: got shape (2,)",)),
    "q without rotary": (call, {"q": ones(2, 4, 3, 8)}, A,
                         ("q: got queries without rotary", "leave q out")),
    "positions without rotary": (call, {"positions": np.zeros((2, 3), int)}, A,
                                 ("positions: got ndarray without rotary", "Leave positions out")),
    "out without q": (call, {"out": ones(2, 4, 3, 8), "rotary": ANGLES}, A,
                      ("out: got ndarray without q", "Leave out out")),
    "heads of q": (call, {"q": ones(2, 3, 3, 8), "rotary": ANGLES}, A,
                   ("q: got shape (2, 3, 3, 8)", "3 query heads for 2")),
    "rows of q": (call, {"q": ones(2, 4, 1, 8), "rotary": ANGLES}, A,
                  ("q: got shape (2, 4, 1, 8) with k_new", "as many batch entries and rows")),
    "columns of q": (call, {"q": ones(2, 4, 3, 4), "rotary": ANGLES}, A,
                     ("q: got shape (2, 4, 3, 4)", "4 is not 8")),
    "shape of out": (call, {"q": ones(2, 4, 3, 8), "rotary": ANGLES, "out": ones(2, 4, 3, 4)}, A,
                     ("out: got shape (2, 4, 3, 4)", "(2, 4, 3, 8)")),
    "a pair of arrays": (call, {"rotary": (COS, COS)}, T, ("rotary: got tuple", "Rotary(cos")),
    "angles of float64": (call, {"rotary": Rotary(*ones(2, 40, 2, dtype=np.float64))}, T,
                          ("rotary: got cos and sin of float64 with k_new of float32", "astype")),
    "too many pairs": (call, {"rotary": Rotary(ones(40, 5), ones(40, 5))}, A,
                       ("rotary: got 5 pairs of columns with k_new", "at most 4 columns")),
    "lengths without angles": (call, {"rotary": Rotary(ones(9, 2), ones(9, 2))}, A,
                               ("lengths: got a row at position 9", "0 to 8", "more rows")),
    "positions without angles": (call, {"rotary": ANGLES, "positions": np.full((2, 3), 40)}, A,
                                 ("positions: got a row at position 40", "0 to 39")),
    "positions of another shape": (call, {"rotary": ANGLES, "positions": np.zeros(3, int)}, T,
                                   ("positions: got shape (3,), dtype int64", "(2, 3) of int32")),
    "values of keys of their own": (call, {"k": SHARED, "v": SHARED[..., :4],
                                           "k_new": ones(2, 2, 3, 16)}, A,
                                    ("v_new: got a separate array", "k_new[..., :4]")),
    "others' names": (call, {"k_descale": 1}, T, ("k_descale: this", "take k_scale")),
    "x": (rotate, {"x": ones(3, 8)}, A, ("x: got shape (3, 8)", "(B, H, L, D)")),
    "positions of x": (rotate, {"positions": [[0, 1, 2]]}, T,
                       ("positions: got shape (1, 3)", "(2, 3) or (3,)")),
    "positions of floats": (rotate, {"positions": [0.0, 1.0, 2.0]}, T, ("dtype float64",)),
    "ragged positions": (rotate, {"positions": [[0], [1, 2]]}, T, ("positions: ", "int32")),
    "a negative position": (rotate, {"positions": [0, -1, 2]}, A,
                            ("positions: got a row at position -1", "0 to 39")),
    "inverse": (rotate, {"inverse": 1}, T, ("inverse: got 1", "True or False")),
    "pairs of x": (rotate, {"x": ones(2, 2, 3, 3)}, A, ("rotary: got 2 pairs", "at most 1 col")),
    "out of x": (rotate, {"out": ones(2, 2, 3, 8, dtype=np.float64)}, A, ("out: got shape",)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_with_the_remedy(name):
    function, changed, error, words = REFUSED[name]
    function()  # is right without the change
    with pytest.raises(error) as caught:
        function(**changed)
    for word in words:
        assert word in str(caught.value), word


def test_a_cache_that_repeats_itself_is_refused():
    v = np.broadcast_to(np.zeros((1, 2, 10, 4), F32), (2, 2, 10, 4))
    v.flags.writeable = True
    with pytest.raises(ArgumentError, match="v: got an array with several elements at one address"):
        call(v=v)


def test_rotated_values_that_are_keys_are_refused():
    k, k_new = np.zeros((2, 2, 10, 8), F32), ones(2, 2, 3, 8)
    with pytest.raises(ArgumentError, match=re.escape("rotary: got one with a v that is")):
        append(k_new, k_new[..., :4], k, k[..., :4], 3, rotary=ANGLES)


def test_nothing_is_written_by_a_call_that_is_refused():
    k, v = np.zeros((2, 2, 10, 8), F32), np.zeros((2, 2, 10, 4), F32)
    with pytest.raises(ArgumentError):
        call(k=k, v=v, lengths=np.array([3, 11]))
    assert not k.any()
    assert not v.any()


@pytest.mark.parametrize(
    ("arrays", "error", "words"),
    [
        ((COS.astype(np.float16), COS), T, ("cos: got dtype float16", "astype(np.float32)")),
        ((COS.astype(np.float64), COS), T, ("sin: got dtype float32 with cos of float64",)),
        ((COS, COS.astype(ml_dtypes.bfloat16)), T, ("sin: ", "bfloat16", "float32")),
        ((COS[0], COS[0]), T, ("cos: got shape (2,)", "(S, R / 2)")),
        ((COS, COS[:, :1]), A, ("sin: got shape (40, 1) with cos of shape (40, 2)",)),
        ((COS[:0], COS[:0]), A, ("cos: got shape (0, 2)", "at least one position")),
        ((COS.tolist(), COS), T, ("cos: got list",)),
        ((COS, COS, 1), T, ("interleaved: got 1", "True")),
    ],
)
def test_angles_are_checked_when_they_are_made(arrays, error, words):
    with pytest.raises(error) as caught:
        Rotary(*arrays)
    for word in words:
        assert word in str(caught.value), word
