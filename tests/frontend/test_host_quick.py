"""Calls on NumPy arrays that are recognised before a request is made: when, and when not."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from forks import fork
from other_path import OtherPathError, only_again
from placement import same_bits

from cupyflash import ArgumentError, ArgumentTypeError, attention, attention_varlen, masks
from cupyflash.backends import host_quick, host_recent
from cupyflash.backends.cpu_tiles import FEWEST_KEYS
from cupyflash.problem import replay
from cupyflash.reference.cpu import repeat

pytestmark = pytest.mark.skipif(not repeat.IS_POSSIBLE, reason="this Python has other arrays")
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Nothing is known of calls before a test, which has one thread."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    monkeypatch.setattr(replay, "_entries", {})
    monkeypatch.setattr(host_recent, "_known", {})
    empty = {}
    monkeypatch.setattr(host_quick, "_known", empty)
    return empty


def drawn(q=(2, 4, 20, 16), keys=30, heads=2, dtype=F32, seed=0):
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal(q)]
    made += [rng.standard_normal((*q[:-3], *(heads,) * (len(q) > 2), keys, q[-1])) for _ in "kv"]
    return [x.astype(dtype) for x in made]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(4, 2)])
@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("form", ["dense", "matrices", "views"])
def test_the_same_bits_as_of_a_checked_call(form, dtype, mask):
    options = {} if mask is None else {"mask": mask}

    def call(seed):
        q, k, v = drawn((20, 16) if form == "matrices" else (2, 4, 20, 16), dtype=dtype, seed=seed)
        if form == "views":
            q, k = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k))
        return attention(q, k, v, **options)

    wanted = call(1)
    with only_again():
        call(2)
        made = call(1)
    assert same_bits(made, wanted)
    assert made.strides == wanted.strides


def test_a_new_mask_of_the_same_form_is_the_same_call():
    x = drawn()
    wanted = {n: attention(*x, mask=masks.window(n, 0), return_lse=True)[0] for n in (3, 5)}
    attention(*x, mask=masks.window(3, 0))
    with only_again():
        assert same_bits(attention(*x, mask=masks.window(3, 0)), wanted[3])
    for n in 5, 3, 3, 5:  # whose ranges of keys one call has in turns
        assert same_bits(attention(*x, mask=masks.window(n, 0)), wanted[n])


@pytest.mark.parametrize("heads", [1, 4])
def test_one_query_has_any_number_of_keys(heads):
    q, k, v = drawn((3, 4, 1, 16), 700, heads)
    pairs = [(k[:, :, :n], v[:, :, :n].copy()) for n in (5, 1, 64, 65, FEWEST_KEYS - 1)]
    wanted = [attention(q, *pair, return_lse=True)[0] for pair in pairs]
    attention(q, *pairs[0])
    with only_again():
        for pair, wants in zip(pairs, wanted, strict=True):
            assert same_bits(attention(q, *pair), wants)
        for wrong in (k, v), (k[:, :, :0], v[:, :, :0]), (k[:, :, :9], v[:, :, :8]):
            with pytest.raises(OtherPathError):
                attention(q, *wrong)
    # A call that is checked, or that wants an LSE, reads its own keys afterwards.
    for pair, wants in zip(pairs, wanted, strict=True):
        assert same_bits(attention(q, *pair, return_lse=True)[0], wants)
        assert same_bits(attention(q, *pair), wants)


def packed(seed, dtype=F32):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((heads, 20, 16)).astype(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(4, 2)])
@pytest.mark.parametrize("options", [{}, {"check": None}, {"check": False}], ids=str)
def test_packed_calls_have_the_same_bits(mask, options):
    offsets, keys = np.array([0, 5, 5, 19, 20], np.int32), np.array([0, 9, 10, 12, 20])
    options = options if mask is None else {**options, "mask": mask}
    wanted = attention_varlen(*packed(1), offsets, keys, **options)
    with only_again():
        attention_varlen(*packed(2), offsets, keys, **options)
        assert same_bits(attention_varlen(*packed(1), offsets.copy(), keys, **options), wanted)


def test_other_offsets_are_another_packed_call():
    x, offsets = packed(0), np.array([0, 5, 20])
    before = [attention_varlen(*x, offsets, offsets) for _ in range(2)][1]
    other = np.array([0, 9, 20])
    for pair in (other, offsets), (offsets, other), (offsets.astype(np.int32), offsets):
        with only_again(), pytest.raises(OtherPathError):
            attention_varlen(*x, *pair)
        kept = attention_varlen(*x, *pair)
        with only_again():
            assert same_bits(attention_varlen(*x, *pair), kept)
    for pair in (offsets.tolist(), offsets), (offsets, offsets.tolist()):
        with only_again(), pytest.raises(OtherPathError):
            attention_varlen(*x, *pair)
        assert same_bits(attention_varlen(*x, *pair), before)
    with only_again(), pytest.raises(OtherPathError):
        attention_varlen(*x, offsets, offsets, check=True)
    wrong = offsets.copy()
    wrong[:] = 0, 21, 20
    for _ in range(2):
        with pytest.raises(ArgumentError, match="offsets"):
            attention_varlen(*x, wrong, wrong)
    offsets[1] = 9  # in place
    assert not same_bits(attention_varlen(*x, offsets, offsets), before)
    assert same_bits(attention_varlen(*x, offsets, offsets), attention_varlen(*x, other, other))


def test_long_offsets_are_looked_at_by_their_signature(known):
    x, offsets = packed(0), np.concatenate([np.zeros(host_quick.MOST_CONTENTS, np.int32), [20]])
    wanted, made = (attention_varlen(*x, offsets, offsets) for _ in range(2))
    assert same_bits(made, wanted)
    assert not known


def unlike():
    q, k, v = drawn()
    memory = np.empty(q.nbytes + 1, np.uint8)
    crooked = memory[1:].view(F32).reshape(q.shape)
    crooked[...] = q
    yield "not aligned", crooked, k, v
    yield "another order of bytes", q.astype(">f4"), k, v
    yield "float64", *(x.astype(F64) for x in (q, k, v))
    yield "other strides", q.swapaxes(1, 2).copy().swapaxes(1, 2), k, v
    yield "other columns", q, k, np.repeat(v, 2, -1)[..., ::2]
    yield "one entry", q, k[:1], v[:1]
    yield "a subclass", q.view(np.memmap), k, v
    yield "no queries", q[:, :, :0], k, v


@pytest.mark.parametrize("case", [*unlike()], ids=lambda case: case[0])
def test_other_arrays_are_another_call(case):
    _, *arrays = case
    for _ in range(3):
        attention(*drawn())

    def call():
        try:
            return attention(*arrays)
        except (ArgumentError, ArgumentTypeError) as error:
            return np.frombuffer(str(error).encode(), np.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_quick, "_known", {})
        wanted = call()
    for _ in range(2):
        assert same_bits(call(), wanted)


def test_a_mask_that_looks_up_arrays_is_looked_at():
    x, lengths = drawn(), np.array([30, 3])
    wanted = [attention(*x, mask=masks.lengths(lengths)) for _ in range(2)]
    lengths[:] = 3, 30
    assert not same_bits(attention(*x, mask=masks.lengths(lengths)), wanted[0])


def test_threads_and_a_forked_child_make_the_same_call():
    x = drawn()
    wanted, _ = (attention(*x) for _ in range(2))
    wrong = []

    def make():
        wrong.extend(x for _ in range(50) if not same_bits(attention(*x), wanted))

    several = [threading.Thread(target=make) for _ in range(6)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert not wrong
    if hasattr(os, "fork"):
        child = fork()
        if not child:
            os._exit(not same_bits(attention(*x), wanted))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_kernel_that_fails_is_an_error(monkeypatch):
    x = drawn()
    for _ in range(2):
        attention(*x)
    ((quick, _),) = host_quick._known.values()
    (call,) = quick._entry().compiled.free
    call.quick = (lambda *_: 5 << 8, *call.quick[1:])
    with pytest.raises(RuntimeError, match="status 5"):
        attention(*x)


def test_an_interrupted_call_leaves_nothing_half_kept():
    x = drawn()
    wanted, _ = (attention(*x) for _ in range(2))
    ((quick, _),) = host_quick._known.values()
    (call,) = quick._entry().compiled.free

    def interrupt(*_):
        raise KeyboardInterrupt

    call.quick = (interrupt, *call.quick[1:])
    with pytest.raises(KeyboardInterrupt):
        attention(*x)
    del call
    for _ in range(3):
        assert same_bits(attention(*x), wanted)
    assert len(quick._entry().compiled.free) == 1


def test_scratch_counts_and_is_shared_by_calls_of_the_same_sizes():
    for heads in 2, 4:
        for _ in range(2):
            attention(*drawn((1, heads, 20, 16), heads=heads))
    entries = [*replay._entries.values()]
    first, second = (entry.nbytes for entry in entries)
    assert first > second > 0
    spares = [entry.compiled.free[0].quick[2] for entry in entries]
    assert spares[0] is spares[1]
    assert len(spares[0]) == 1


def test_what_is_kept_is_limited(known, monkeypatch):
    monkeypatch.setattr(host_quick, "MOST", 8)
    for n in range(2, 30):
        attention(*drawn((1, 1, n, 8), n, 1))
    assert len(known) <= 8
