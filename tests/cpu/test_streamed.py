"""Streamed calls on the CPU: whatever the chunks, the results are those of one call."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from harness import small_tiles
from hypothesis import given, settings
from hypothesis import strategies as st
from placement import same_bits
from strategies import DTYPES, MASKS, problems

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, streamed
from cupyflash.expr.interval import EMPTY, FULL
from cupyflash.pieces import place, schedule
from cupyflash.problem import validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options
from cupyflash.testing import Subject, backward_bound, forward_bound, problem

GRADIENTS = Gradients._fields
BY_DTYPE = mostly_thorough(
    "dtype",
    DTYPES,
    quick=DTYPES[1:2],
    why="the same pieces; float32 is quick under each mask",
    ids=str,
)


@pytest.fixture(autouse=True, scope="module")
def small_parts():
    """Leave out queries that see no keys of a piece, however few there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "TILE", 1)
        yield


def subject_of(chunk, tiles):
    return Subject(
        partial(streamed.attention, chunk=chunk),
        partial(streamed.attention_backward, chunk=chunk),
        tiles=tiles,
    )


def judge(p, chunk):
    """Judge the forward and the backward of a problem, a term of the bound for each merge."""
    with small_tiles(p) as whole:
        subject = subject_of(chunk, whole.tiles)
        rows = subject.attend_problem(p)
        gradients = subject.gradients_problem(p, rows)
    keys = chunk if isinstance(chunk, int) else chunk[1]
    how = {"block_kv": min(whole.tiles[1], keys), "splits": max(1, -(-p.k.shape[-2] // keys))}
    how |= {"precision": subject.precision(p.dtype), **p.options}
    bound = forward_bound(p.q, p.k, p.v, **how)
    subject.judge("out", rows.out, *bound.out)
    subject.judge("lse", rows.lse, *bound.lse)
    bounds = backward_bound(p.do, p.q, p.k, p.v, dlse=p.dlse, **how)
    for name, gradient in zip(GRADIENTS, gradients, strict=True):
        if gradient is not None:
            subject.judge(name, gradient, *getattr(bounds, name))


@BY_DTYPE
def test_all_chunks_are_within_the_bound(dtype):
    @settings(max_examples=settings().max_examples // 2)
    @given(problems(dtype), st.data())
    def check(p, data):
        lengths = [max(x.shape[-2], 1) for x in (p.q, p.k)]
        sizes = [data.draw(st.integers(1, length + 1)) for length in lengths]
        sizes = [max(size, length // 12) for size, length in zip(sizes, lengths, strict=True)]
        judge(p, tuple(sizes))

    check()


@mostly_thorough(
    "mask", [*MASKS, *(f"~{name}" for name in MASKS)],
    quick=["causal with offset", "lengths of both", "segments", "blocks", "dense", "~prefix"],
    why="the same pieces under other masks",
)  # fmt: skip
def test_masks_see_the_positions_of_the_whole_call(mask):
    p = problem(
        "float32", (2, 4, 45, 8), (2, 2, 61, 8), mask=mask, scores=("alibi", "relative_bias"),
        bias="float32", sink="float32", dlse=True, tiles=(8, 8), seed=len(mask),
    )  # fmt: skip
    judge(p, (17, 23))


@pytest.mark.parametrize("chunk", [3, (7, 5), (50, 13)])
def test_the_same_pairs_are_dropped(chunk):
    rows, keys = 30, 41
    q, k, v = np.zeros((2, 3, rows, 4)), np.zeros((2, 1, keys, 4)), np.eye(keys)[None]
    options = {"dropout": 0.5, "seed": 9}
    whole, vjp = cupyflash.attention_vjp(q, k, v, **options)
    out, our_vjp = streamed.attention_vjp(q, k, v, chunk=chunk, **options)
    assert np.array_equal(out != 0, whole != 0)
    assert 0.4 < (out != 0).mean() < 0.6
    do = np.random.default_rng(0).standard_normal(out.shape)
    for ours, theirs in zip(our_vjp(do)[:3], vjp(do)[:3], strict=True):
        assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def draw(*shapes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


MASKS_WITH_EMPTY_PIECES = [masks.causal(), masks.window(5, 2), masks.lengths(np.array([20, 33]))]


@mostly_thorough(
    "mask",
    MASKS_WITH_EMPTY_PIECES,
    quick=MASKS_WITH_EMPTY_PIECES[1:2],
    why="a window has empty pieces on both sides",
    ids=["causal", "window", "lengths"],
)
def test_what_empty_pieces_hold_changes_no_bit(mask):
    rows, keys, chunk = 50, 60, (16, 8)
    q, k, v, do = draw((2, 2, rows, 8), (2, 2, keys, 8), (2, 2, keys, 8), (2, 2, rows, 8))
    options = {"mask": mask, "chunk": chunk, "bias": draw((rows, keys))[0]}
    out, lse = streamed.attention(q, k, v, return_lse=True, **options)
    gradients = streamed.attention_backward(do, q, k, v, out, lse, **options)
    made = schedule.schedule(validate.call(q, k, v, Options(mask=mask)), *chunk)
    assert (made.classes == EMPTY).sum() > made.classes.size // 6
    for n, own in enumerate(made.rows):
        poisoned = {name: x.copy() for name, x in (("k", k), ("v", v), ("b", options["bias"]))}
        for hidden in np.flatnonzero(made.classes[n] == EMPTY):
            places = slice(made.keys[hidden].start, made.keys[hidden].stop)
            poisoned["k"][..., places, :] = poisoned["v"][..., places, :] = np.nan
            poisoned["b"][:, places] = np.nan
        arrays, here = (q, poisoned["k"], poisoned["v"]), slice(own.start, own.stop)
        given_bias = options | {"bias": poisoned["b"]}
        ours, our_lse = streamed.attention(*arrays, return_lse=True, **given_bias)
        assert same_bits(ours[..., here, :], out[..., here, :])
        assert same_bits(our_lse[..., here], lse[..., here])
        dq = streamed.attention_backward(do, *arrays, out, lse, **given_bias).dq
        assert same_bits(dq[..., here, :], gradients.dq[..., here, :])


def test_files_are_read_and_written_in_place(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(place, "_read_ahead", lambda x: asked.append(type(x)))
    shapes = (2, 40, 8), (2, 90, 8), (2, 90, 8), (2, 40, 8)
    arrays = draw(*shapes, dtype=ml_dtypes.bfloat16)
    for n, x in enumerate(arrays):
        x.tofile(tmp_path / f"{n}")
    q, k, v, do = (
        np.memmap(tmp_path / f"{n}", x.dtype, "r", shape=x.shape) for n, x in enumerate(arrays)
    )
    options = {"mask": masks.causal(), "chunk": (16, 32)}
    out = np.memmap(tmp_path / "out", q.dtype, "w+", shape=do.shape)
    ours, lse = streamed.attention(q, k, v, out=out, return_lse=True, **options)
    assert ours is out
    targets = [
        np.memmap(tmp_path / f"d{n}", x.dtype, "w+", shape=x.shape) for n, x in enumerate("qkv")
        for x in [(q, k, v)[n]]
    ]  # fmt: skip
    streamed.attention_backward(do, q, k, v, out, lse, grads_out=targets, **options)
    assert np.memmap in asked
    expected, vjp = streamed.attention_vjp(*arrays[:3], **options)
    assert same_bits(out, expected)
    for target, gradient in zip(targets, vjp(arrays[3]), strict=False):
        assert same_bits(np.fromfile(target.filename, q.dtype).reshape(target.shape), gradient)


def test_the_next_part_of_a_file_is_asked_for(tmp_path):
    x = np.memmap(tmp_path / "x", np.float32, "w+", offset=64, shape=(2, 5000, 64))
    part = x[:, 1000:3000]
    place._read_ahead(part)  # the range that it asks for must lie in the file
    place._read_ahead(np.zeros((2, 3)))
    order = []

    def requests():
        for n in range(3):
            order.append(f"ask {n}")
            yield {"k": part}

    order.extend("compute" for _ in place.Host(None).feed(requests()))
    assert order == ["ask 0", "ask 1", "compute", "ask 2", "compute", "compute"]


@pytest.mark.parametrize("name", ["causal", "window", "segments", "lengths", "dense", "blocks"])
def test_pieces_are_those_that_the_mask_needs(name):
    p = problem("float32", (2, 2, 40, 4), (2, 2, 64, 4), mask=name, seed=3)
    call = validate.call(p.q, p.k, p.v, Options(**p.options))
    made = schedule.schedule(call, 7, 10)
    allowed = p.options["mask"].to_array(2, 2, 40, 64)
    for n, rows in enumerate(made.rows):
        for m, keys in enumerate(made.keys):
            pairs = allowed[..., rows.start : rows.stop, keys.start : keys.stop]
            if made.classes[n, m] == EMPTY:
                assert not pairs.any()
            if made.classes[n, m] == FULL:
                assert pairs.all()
    pieces = list(made.by_rows())
    assert sorted(pieces, key=str) == sorted(made.by_keys(), key=str)
    assert sum(piece.first for piece in pieces) == len(made.rows)
    assert any(made.classes.ravel() == EMPTY) or name not in ("causal", "window", "segments")


@pytest.mark.parametrize("name", ["causal", "window", "segments", "lengths", "dense", "blocks"])
def test_queries_at_the_ends_that_see_no_keys_are_left_out(name, monkeypatch):
    monkeypatch.setattr(schedule, "TILE", 3)
    monkeypatch.setattr(schedule, "MOST_PARTS", 4)
    p = problem("float32", (2, 2, 40, 4), (2, 2, 64, 4), mask=name, seed=3)
    call = validate.call(p.q, p.k, p.v, Options(**p.options))
    whole = schedule.schedule(call, 25, 10)
    made = whole.narrowed(call)
    allowed = p.options["mask"].to_array(2, 2, 40, 64).any(axis=(0, 1))
    everywhere = p.options["mask"].to_array(2, 2, 40, 64).all(axis=(0, 1))
    computed = np.zeros((40, 64), int)
    for n, rows in enumerate(whole.rows):
        first, *others = made.of_rows(n)
        assert first.rows == rows
        assert first.first
        assert not any(piece.first for piece in others)
        for piece in (first, *others):
            where = np.ix_(piece.rows, piece.keys)
            computed[where] += 1
            assert piece.masked or everywhere[where].all()
            assert set(piece.rows) <= set(rows)
    assert computed.max() == 1
    assert not allowed[computed == 0].any()
    count = sum(len(x.rows) * len(x.keys) for x in whole.by_rows())
    assert computed.sum() < count or name not in ("causal", "window")


@pytest.mark.parametrize(
    "mask",
    [masks.window(9, 4), masks.mask(lambda b, h, i, j: i + j < 60)],
    ids=["window", "turned"],
)
def test_queries_that_are_left_out_change_no_bit(mask, monkeypatch):
    q, k, v, do = draw((2, 2, 50, 16), (2, 1, 70, 16), (2, 1, 70, 16), (2, 2, 50, 16))
    found = []
    for size in (1, 16, 1000):
        monkeypatch.setattr(schedule, "TILE", size)
        options = {"mask": mask, "chunk": (30, 16), "dropout": 0.2, "seed": 1}
        out, lse, vjp = streamed.attention_vjp(q, k, v, return_lse=True, **options)
        found.append((out, lse, *vjp(do)[1:3]))
    for others in found[1:]:
        assert all(map(same_bits, found[0], others))


def test_heads_and_entries_share_proofs_where_there_are_many(monkeypatch):
    q, k, v = draw((3, 2, 40, 4), (3, 2, 64, 4), (3, 2, 64, 4))
    call = validate.call(q, k, v, Options(mask=masks.lengths(np.array([11, 7, 25]))))
    exact = schedule.schedule(call, 20, 8).classes
    monkeypatch.setattr(schedule, "MOST_CLASSES", 1)
    assert np.array_equal(schedule.schedule(call, 20, 8).classes, exact)
    assert exact[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_a_causal_call_computes_half_of_its_pieces():
    q, k, v = draw((1, 64, 4), (1, 64, 4), (1, 64, 4))
    made = schedule.schedule(validate.call(q, k, v, Options(mask=masks.causal())), 8, 8)
    pieces = list(made.by_rows())
    assert len(pieces) == 8 * 9 // 2
    assert sum(piece.masked for piece in pieces) == 8


def test_twice_is_bitwise_equal_and_independent_of_the_batch():
    q, k, v, do = draw((3, 2, 50, 16), (3, 1, 70, 16), (3, 1, 70, 16), (3, 2, 50, 16))
    lengths = np.array([70, 9, 40])
    options = {"chunk": (20, 16), "dropout": 0.2, "seed": 1}
    out, vjp = streamed.attention_vjp(q, k, v, mask=masks.lengths(lengths), **options)
    again, vjp_again = streamed.attention_vjp(q, k, v, mask=masks.lengths(lengths), **options)
    assert same_bits(out, again)
    for x, y in zip(vjp(do)[:3], vjp_again(do)[:3], strict=True):
        assert same_bits(x, y)
    first = streamed.attention(q[:1], k[:1], v[:1], mask=masks.lengths(lengths[:1]), **options)
    assert same_bits(first, out[:1])


def test_a_function_of_gradients_is_that_of_other_calls():
    (x,) = draw((1, 20, 4))
    out, lse, vjp = streamed.attention_vjp(x, x, x, chunk=6, return_lse=True)
    gradients = streamed.attention_backward(x, x, x, x, out, lse, chunk=6)
    for ours, theirs in zip(vjp(x)[:3], gradients[:3], strict=True):
        assert same_bits(ours, theirs)
    assert copy.deepcopy(vjp) is vjp
    with pytest.raises(ArgumentTypeError, match=r"call cupyflash\.streamed\.attention_backward"):
        pickle.dumps(vjp)


@pytest.mark.parametrize(
    ("chunk", "error", "message"),
    [
        (0, ArgumentError, r"chunk: got 0; expected one or two numbers, 1 or more"),
        ((4, 4, 4), ArgumentError, r"chunk: got \(4, 4, 4\); expected one or two numbers"),
        (2.5, ArgumentTypeError, r'chunk: got 2\.5; expected "auto", a number of queries'),
        ("all", ArgumentTypeError, r"chunk: got 'all'; expected \"auto\""),
        (True, ArgumentTypeError, r"chunk: got True; expected"),
    ],
)
def test_wrong_chunks_are_refused(chunk, error, message):
    (x,) = draw((1, 20, 4))
    with pytest.raises(error, match=message):
        streamed.attention(x, x, x, chunk=chunk)


def test_wrong_arrays_are_refused_as_elsewhere():
    x, y = draw((1, 20, 4), (1, 20, 3))
    with pytest.raises(ArgumentError, match="k: got shape"):
        streamed.attention(x, y, x)
    with pytest.raises(ArgumentError, match="out and q share memory"):
        streamed.attention(x, x.copy(), x.copy(), out=x)
    out, lse = streamed.attention(x, x, x, return_lse=True)
    with pytest.raises(ArgumentError, match="lse: got shape"):
        streamed.attention_backward(x, x, x, x, out, lse[:, :3])
    with pytest.raises(ArgumentError, match=r"grads_out\.dbias: got an array, but the call has no"):
        streamed.attention_backward(x, x, x, x, out, lse, grads_out=(None, None, None, x))
    with pytest.raises(ArgumentTypeError, match="causal: this function has no such argument"):
        streamed.attention(x, x, x, causal=True)
