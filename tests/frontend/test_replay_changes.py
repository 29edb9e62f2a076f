"""Changes of arrays in device memory, without a GPU: what is launched, and who is told."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import gpu_changes
import numpy as np
import pytest
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.gpu import checksum_launches, params
from cupyflash.problem import validate
from cupyflash.problem.options import Options


def names(cupy):
    return [x.kernel.partition("__")[0] for x in cupy.launches]


def told(launch):
    return fields(launch, params.rowwise("checksum"))


def places(launch):
    """Return the addresses of the arrays that a launch sums."""
    arrays = told(launch)["arrays"]
    return [int(x["data"]) for x in arrays if x["end"]]


def spoiled(launch):
    """Return the addresses and sizes of what a launch may write NaN to."""
    it = told(launch)
    pairs = zip(it["gradients"].tolist(), it["gradient_bytes"].tolist(), strict=True)
    return [pair for pair in pairs if pair != (0, 0)]


def sums(cupy):
    return [x for x in cupy.launches if x.kernel.startswith("checksum")]


def inputs(cupy):
    bias, sink = draw(cupy, (4, 40, 40), count=1)[0], draw(cupy, (4,), count=1)[0]
    slopes = draw(cupy, (4,), count=1)[0]
    lengths = cupy.asarray(np.array([40, 33]))
    options = {
        "bias": bias,
        "sink": sink,
        "mask": masks.lengths(lengths),
        "score_mod": scores.alibi(lookup(slopes)),
    }
    return options, [bias, sink, lengths, slopes]


def test_arrays_are_summed_behind_the_forward_and_behind_the_backward(cupy):
    options, others = inputs(cupy)
    q, k, v = draw(cupy)
    for _ in range(2):  # checked first, then recognised
        cupy.launches.clear()
        out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
        assert names(cupy)[-1] == "checksum"
        assert names(cupy).count("checksum") == 1
        first = cupy.launches[-1]
        wanted = {x.data.ptr for x in (q, k, v, out, lse, *others)}
        assert set(places(first)) == wanted
        assert len(places(first)) == len(wanted)
        assert not told(first)["report"]
        assert spoiled(first) == []
        cupy.launches.clear()
        gradients = vjp(q)
        found = names(cupy)
        assert (found[-1], found.count("checksum")) == ("checksum", 1)
        last = cupy.launches[-1]
        assert places(last) == places(first)
        assert spoiled(last) == [(x.data.ptr, x.nbytes) for x in gradients]
        it = told(last)
        assert it["report"]
        assert it["turn"] == 1
        assert it["kept"] == told(first)["kept"]
        assert last.grid == first.grid == told(first)["arrays"]["end"].max()
        cupy.launches.clear()
        vjp(q)
        assert told(cupy.launches[-1])["turn"] == 2


def test_calls_that_are_there_together_keep_sums_of_their_own(cupy):
    q, k, v = draw(cupy)
    made = [cupyflash.attention_vjp(q, k, v)[1] for _ in range(5)]
    first = [int(told(x)["kept"]) for x in sums(cupy)]
    (size,) = {8 * (1 + checksum_launches.WARPS * x.grid) for x in sums(cupy)}
    assert (np.diff(sorted(first)) >= size).all()
    cupy.launches.clear()
    for vjp in reversed(made):
        vjp(q)
    assert [int(told(x)["kept"]) for x in sums(cupy)] == first[::-1]


def test_many_arrays_take_several_launches_and_words_of_their_own(cupy):
    tables = draw(cupy, (40,), count=15)
    mask = masks.mask(lambda b, h, i, j: sum(lookup(t)[j] for t in tables) >= 0)
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v, mask=mask)[1]
    forward = sums(cupy)
    cupy.launches.clear()
    vjp(q)
    for group in (forward, sums(cupy)):
        assert sum(len(places(x)) for x in group) == 20
        assert len({int(told(x)["kept"]) for x in group}) == 1
        assert [int(told(x)["first_block"]) for x in group] == [0, group[0].grid]


def test_of_short_calls_the_first_ones_are_checked_and_then_some(cupy):
    q, k, v = draw(cupy)

    def is_checked(**options):
        cupy.launches.clear()
        vjp = cupyflash.attention_vjp(q, k, v, **options)[1]
        checked = len(sums(cupy))
        vjp(q)
        assert len(sums(cupy)) == 2 * checked
        return bool(checked)

    found = [is_checked() for _ in range(400)]
    first = checksum_launches.FIRST
    assert all(found[:first])
    later = [n for n, checked in enumerate(found) if checked and n >= first]
    every = later[0]
    assert first < every < 200
    assert later == list(range(every, 400, every))
    assert all(is_checked(check=True) for _ in range(2 * every))
    cupyflash.attention_vjp(*draw(cupy, (1, 2, 7, 16)))  # unlike these
    assert sums(cupy)


def test_long_calls_are_checked_always(cupy):
    def every(rows, columns=128, heads=32, **options):
        shape = 1, heads, rows, columns
        q = np.broadcast_to(np.float16(0), shape)
        call = validate.call(q, q, q, Options.of(**options))
        nbytes = 4 * q.nbytes
        return checksum_launches.calls_between(call, nbytes, 132)

    assert every(1 << 17) == every(1 << 17, mask=masks.causal()) == 1
    assert every(1 << 13) == 2
    assert every(1 << 13, mask=masks.causal()) == 4
    assert 12 * every(1 << 13) < every(1 << 13, mask=masks.window(255, 0)) < 48 * every(1 << 13)
    assert every(1 << 13, mask=masks.segments(np.arange(1 << 13) // 256)) > 3 * every(1 << 13)
    assert 4 <= every(1 << 11) <= 16
    assert every(64) < 200


def test_sequences_that_nobody_has_looked_at_count_as_equally_long(cupy):
    x = np.broadcast_to(np.float16(0), (32, 1 << 14, 128))
    ends = np.arange(0, (1 << 14) + 1, 128)

    def every(offsets, check):
        call = validate.varlen_call(x, x, x, offsets, offsets, check)
        return checksum_launches.calls_between(call, 4 * x.nbytes, 132)

    read = every(ends, True)
    assert read > 30
    x = draw(cupy, x.shape, np.float16, 1)[0]
    assert every(cupy.asarray(ends), None) == read


def test_a_recognised_call_is_not_checked_again(cupy, monkeypatch):
    options, _ = inputs(cupy)
    q, k, v = draw(cupy)
    cupyflash.attention_vjp(q, k, v, **options)[1](q)

    def refuse(*_, **__):
        raise AssertionError("the call was checked again")

    monkeypatch.setattr(validate, "call", refuse)
    others = draw(cupy)
    cupy.launches.clear()
    cupyflash.attention_vjp(*others, **options)[1](q)
    assert len(sums(cupy)) == 2
    assert {x.data.ptr for x in others} <= set(places(sums(cupy)[0]))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_summed_without_check(cupy, packed):
    q, k, v = draw(cupy, (4, 40, 16))
    offsets = [cupy.asarray(np.array([0, 11, 40]))] * 2 if packed else []
    of = cupyflash.attention_varlen_vjp if packed else cupyflash.attention_vjp
    of(q, k, v, *offsets, check=False)[1](q)
    assert "checksum" not in names(cupy)
    of(q, k, v, *offsets)[1](q)
    assert names(cupy).count("checksum") == 2


def test_a_report_is_an_error_of_the_next_call_and_names_arrays(cupy):
    options, (_, _, lengths, _) = inputs(cupy)
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v, **options)[1]
    vjp(q)
    it = told(cupy.launches[-1])
    summed = places(next(x for x in cupy.launches if x.kernel.startswith("checksum")))
    for array, name in ((k, "k"), (lengths, "array 0 of mask")):
        for again in (lambda: vjp(q), lambda: cupyflash.attention_vjp(q, k, v)):
            report = (ctypes.c_uint64 * params.REPORTS).from_address(int(it["report"]))
            word = int(it["arrays"]["name"][summed.index(array.data.ptr)])
            report[word] = report[params.REPORTS - 1] = 1  # as the kernel does
            with pytest.raises(ArgumentError, match=f": {name}; expected .* are NaN"):
                again()
            again()  # it is told once


def test_names_share_the_last_word_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr(checksum_launches, "_names", {})
    words = [checksum_launches.word_of(f"array {n}") for n in range(70)]
    assert words == [*range(63), *[63] * 7]
    report = [int(n in (5, 63)) for n in range(params.REPORTS)]
    assert checksum_launches.names_of(report) == ["array 5", "another array"]


def test_gradients_without_an_array_are_left_out(cupy):
    options, _ = inputs(cupy)
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v, bias_gradient=False, **options)[1]
    gradients = vjp(q)
    assert gradients.dbias is None
    written = [(x.data.ptr, x.nbytes) for x in gradients if x is not None]
    assert spoiled(cupy.launches[-1]) == written


def test_the_tool_that_measures_the_cost_takes_turns(cupy, monkeypatch):
    def random(shape, dtype):
        return cupy.asarray(np.zeros(shape, dtype))

    def timed(_, call, count):
        cupy.launches.clear()
        call()
        return 1e-3 if sums(cupy) else 1e-4, 0.0

    rng = SimpleNamespace(standard_normal=random)
    monkeypatch.setattr(cupy, "random", SimpleNamespace(default_rng=lambda _: rng), raising=False)
    monkeypatch.setattr(cupy.ndarray, "astype", lambda x, dtype: cupy.asarray(x.host.astype(dtype)),
                        raising=False)  # fmt: skip
    monkeypatch.setattr(gpu_changes, "timed", timed)
    monkeypatch.setattr(gpu_changes, "MOST", gpu_changes.FEWEST)
    row = gpu_changes.measure(cupy, (1, 2, 24, 16, "float16", True))
    same = ("without", "default", "without again")
    assert row["ms"] == dict.fromkeys(same, 0.1) | {"every call": 1.0}
    assert row["default_more"] == row["without_again_more"] == 0
    assert row["every_call_more"] > 0
    assert row["one_of"] > 1
    assert row["sums"]["GB/s"] >= 0
    assert set(row["host_us"]) == set(row["ms"])


def test_packed_arrays_without_a_sequence_are_summed(cupy):
    q, k, v = draw(cupy, (2, 0, 16))
    offsets = np.zeros(1, np.int64)
    vjp = cupyflash.attention_varlen_vjp(q, k, v, offsets, offsets, mask=masks.window(0, 0))[1]
    assert vjp(q).dq.shape == q.shape
