"""Changes of arrays in device memory, without a GPU: what is launched, and who is told."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from recognised import draw, fields

import cupyflash
from cupyflash import ArgumentError, lookup, masks, scores
from cupyflash.gpu import checksum_launches, params
from cupyflash.problem import validate


def names(cupy):
    return [x.kernel.partition("__")[0] for x in cupy.launches]


def told(launch):
    return fields(launch, params.rowwise("checksum"))


def places(launch):
    """Return the addresses of the arrays that a launch sums or writes."""
    it = told(launch)
    return it["arrays"]["data"][: it["count"]].tolist()


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


def test_arrays_are_summed_behind_the_forward_and_around_the_backward(cupy):
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
        assert not told(first)["before"]
        cupy.launches.clear()
        gradients = vjp(q)
        found = names(cupy)
        assert (found[0], found[-1], found.count("checksum")) == ("checksum", "checksum", 2)
        second, last = cupy.launches[0], cupy.launches[-1]
        assert places(second) == places(first)
        assert places(last) == [x.data.ptr for x in gradients]
        it = told(last)
        assert it["before"] == told(first)["sums"]
        assert it["sums"] == told(second)["sums"] != told(first)["sums"]
        assert it["words"] == len(wanted)
        assert it["arrays"]["size"][: it["count"]].tolist() == [x.nbytes for x in gradients]


def test_words_are_zero_before_sums_and_nobody_shares_them(cupy):
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v)[1]
    cupy.launches.clear()
    for _ in range(3):
        vjp(q)
    summed = [told(x) for x in cupy.launches if x.kernel.startswith("checksum")]
    words = [int(x["sums"]) for x in summed if not x["before"]]
    before = {int(x["before"]) for x in summed} - {0}
    assert len(set(words[:1]) | before) == 2
    assert words[0] not in before
    assert len(words) == 3


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
    sums = [x for x in cupy.launches if x.kernel.startswith("checksum")]
    assert len(sums) == 3
    assert {x.data.ptr for x in others} <= set(places(sums[0]))


@pytest.mark.parametrize("packed", [False, True])
def test_nothing_is_summed_without_check(cupy, packed):
    q, k, v = draw(cupy, (4, 40, 16))
    offsets = [cupy.asarray(np.array([0, 11, 40]))] * 2 if packed else []
    of = cupyflash.attention_varlen_vjp if packed else cupyflash.attention_vjp
    of(q, k, v, *offsets, check=False)[1](q)
    assert "checksum" not in names(cupy)
    of(q, k, v, *offsets)[1](q)
    assert names(cupy).count("checksum") == 3


def test_a_report_is_an_error_of_the_next_call_and_names_arrays(cupy):
    options, (_, _, lengths, _) = inputs(cupy)
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v, **options)[1]
    vjp(q)
    it = told(cupy.launches[-1])
    summed = places(next(x for x in cupy.launches if x.kernel.startswith("checksum")))
    for array, name in ((k, "k"), (lengths, "array 0 of mask")):
        for again in (lambda: vjp(q), lambda: cupyflash.attention_vjp(q, k, v)):
            report = ctypes.c_uint64.from_address(int(it["report"]))
            report.value = int(it["bits"][summed.index(array.data.ptr)])  # as the kernel does
            with pytest.raises(ArgumentError, match=f": {name}; expected .* are NaN"):
                again()
            again()  # it is told once


def test_names_share_the_last_bit_if_there_are_too_many(monkeypatch):
    monkeypatch.setattr(checksum_launches, "_names", {})
    bits = [checksum_launches.bit_of(f"array {n}") for n in range(70)]
    assert bits == [*range(63), *[63] * 7]
    assert checksum_launches.names_of(1 << 63 | 1 << 5) == ["array 5", "another array"]


def test_gradients_without_an_array_are_left_out(cupy):
    options, _ = inputs(cupy)
    q, k, v = draw(cupy)
    vjp = cupyflash.attention_vjp(q, k, v, bias_gradient=False, **options)[1]
    gradients = vjp(q)
    assert gradients.dbias is None
    written = [x.data.ptr for x in gradients if x is not None]
    assert places(cupy.launches[-1]) == written
