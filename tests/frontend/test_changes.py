"""Arrays that change between a call and its gradients: never a wrong number."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from placement import same_bits

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, changes, distributed, lookup, masks, scores
from cupyflash import streamed as by_chunks
from cupyflash.problem import cached as cached_calls

F32 = np.float32
SIZES = {"short": (2, 2, 9, 16), "long": (2, 2, 300, 16)}  # of which bytes or sums are kept


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=F32)


class Case:
    """A call with everything that a function of gradients can keep."""

    def __init__(self, kind: str, size: str) -> None:
        batch, heads, rows, columns = SIZES[size]
        self.kind, self.rows = kind, rows
        shape = (heads, rows, columns) if kind == "packed" else (batch, heads, rows, columns)
        self.arrays = {name: draw(*shape, seed=n) for n, name in enumerate("qkv")}
        self.arrays["bias"] = draw(heads, *(rows - 3,) * 2 if kind == "packed" else (rows, rows))
        self.arrays["sink"] = draw(heads)
        self.arrays["lengths"] = np.full(batch, rows - 2)
        self.arrays["slopes"] = draw(heads, seed=7)
        self.do, self.dlse = draw(*shape, seed=8), draw(*shape[:-1], seed=9)

    def call(self, **more: Any) -> Any:
        x = self.arrays
        options = {
            "mask": masks.lengths(x["lengths"]),
            "score_mod": scores.alibi(lookup(x["slopes"])) if self.kind == "alibi" else None,
            "bias": x["bias"],
            "sink": x["sink"],
        } | more
        qkv = x["q"], x["k"], x["v"]
        if self.kind == "packed":
            x.setdefault("offsets", np.array([0, 3, self.rows]))
            return cupyflash.attention_varlen_vjp(
                *qkv, x["offsets"], x["offsets"], return_lse=True, **options
            )
        if self.kind == "streamed":
            return by_chunks.attention_vjp(*qkv, chunk=self.rows // 2, return_lse=True, **options)
        return cupyflash.attention_vjp(*qkv, return_lse=True, **options)


KINDS = pytest.mark.parametrize("kind", ["dense", "packed", "streamed"])
LONG = pytest.mark.parametrize("size", SIZES)


@KINDS
@LONG
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "lengths"])
def test_a_changed_input_is_an_error(kind, size, name):
    case = Case(kind, size)
    *_, vjp = case.call()
    vjp(case.do)
    array = case.arrays[name]
    held = array.copy()
    array -= 1
    named = "array 0 of mask" if name == "lengths" else name
    with pytest.raises(ArgumentError, match=f"^vjp: got arrays .* forward call: {named};"):
        vjp(case.do)
    array[...] = held  # as it was
    vjp(case.do)
    assert case.call(check=False)[-1]._before is None


@KINDS
@LONG
@pytest.mark.parametrize("wants_lse", [False, True])
def test_what_happens_to_results_changes_no_gradient(kind, size, wants_lse):
    case = Case(kind, size)
    out, lse, vjp = case.call()
    held = out.copy(), lse.copy()
    dlse = case.dlse if wants_lse else None
    right = vjp(case.do, dlse)
    unchecked = case.call(check=False)[-1](case.do, dlse)
    for change in ("+=", "sign", "nan", "one", "lse"):
        if change == "+=":
            out += case.do
        elif change == "sign":
            np.negative(out, out=out)
        elif change == "one":
            out[...], lse[...] = held
            out[..., -1, 3] += 1
        elif change == "lse":
            lse -= 1
        else:
            out[...] = np.nan
        again = vjp(case.do, dlse)
        for a, b, c in zip(right, again, unchecked, strict=True):
            assert same_bits(a, b)
            assert same_bits(a, c)


def test_offsets_are_those_of_the_call():
    case = Case("packed", "short")
    _, _, vjp = case.call()
    right = vjp(case.do)
    case.arrays["offsets"][1] += 2  # a copy was checked, and is used
    assert all(same_bits(a, b) for a, b in zip(right, vjp(case.do), strict=True))


def test_a_look_up_of_a_score_is_watched():
    slopes, (q, k, v, do) = draw(2), draw(4, 1, 2, 9, 16)
    table = lookup(slopes)
    bend = scores.score(lambda s, b, h, i, j: s * table[h])
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=bend)
    slopes *= 2
    with pytest.raises(ArgumentError, match="forward call: array 0 of score_mod;"):
        vjp(do)


@pytest.mark.parametrize("change", ["q", "out", "nothing"])
@pytest.mark.parametrize("check", [True, False])
def test_a_change_on_one_rank_is_an_error_on_all(change, check):
    whole, do = draw(3, 1, 2, 300, 16), draw(1, 2, 300, 16, seed=1)
    found: list[Any] = []
    lock = threading.Lock()

    def work(comm: Any) -> None:
        layout = distributed.layout(comm, 300)
        q, k, v = (layout.take(x).copy() for x in whole)
        given = {"comm": comm, "layout": layout, "check": check}
        out, vjp = distributed.attention_vjp(q, k, v, **given)
        if comm.rank == 1 and change != "nothing":
            (q if change == "q" else out)[...] += 1
        own = layout.take(do).copy()
        try:
            vjp(own)
        except (ArgumentError, distributed.DistributedError) as error:
            with lock:
                found.append(str(error))

    distributed.Threads(2).run(work)
    if change == "nothing" or not check:
        assert not found
    else:
        assert len(found) == 2
        assert any(f"forward call: {change};" in text for text in found)


def test_arrays_that_repeat_elements_or_have_none_never_raise():
    q, k, v, do = draw(4, 2, 2, 300, 16)
    cases = [
        (q[:, :, ::-1], k[..., ::-1, :], np.broadcast_to(v[:1], v.shape)),
        (np.swapaxes(np.ascontiguousarray(q.swapaxes(1, 2)), 1, 2), k[:1], v[:1]),
        (q[:, :, :0], k, v),
        (q, k[:, :, :0], v[:, :, :0]),
        (np.full_like(q, np.nan), k * 0 - 0.0, v),
        (q[0, 0], k[0, 0], v[0, 0]),
    ]
    for each in cases:
        out, vjp = cupyflash.attention_vjp(*each)
        rows = np.ascontiguousarray(np.broadcast_to(do, out.shape) if out.size == do.size else out)
        one, two = vjp(rows), cupyflash.attention_vjp(*each, check=False)[1](rows)
        assert all(same_bits(a, b) for a, b in zip(one[:3], two[:3], strict=True))


def test_device_arrays_are_compared_where_that_is_asked_for(cupy, monkeypatch):
    from cupyflash.arrays import device_arrays

    q, k, v, do = (cupy.asarray(x) for x in draw(4, 1, 2, 9, 16))
    _, vjp = cupyflash.attention_vjp(q, k, v)
    assert vjp._before is None  # nothing is read back
    monkeypatch.setattr(cached_calls, "CHECKS_ALL", True)
    monkeypatch.setattr(device_arrays, "read_back", lambda array: array.host.copy())
    _, vjp = cupyflash.attention_vjp(q, k, v)
    vjp(do)
    q.host[...] += 1
    with pytest.raises(ArgumentError, match="forward call: q;"):
        vjp(do)


@pytest.mark.parametrize("function", [cupyflash.attention_vjp, by_chunks.attention_vjp])
def test_check_is_a_truth_value(function):
    with pytest.raises(ArgumentTypeError, match="check: got 'no'"):
        function(*draw(3, 2, 5, 8), check="no")


def test_a_snapshot_tells_short_arrays_bit_by_bit():
    x = np.zeros((3, 4), F32)
    seen = changes.Snapshot({"x": x[:, ::2]})
    x[:, 1] = 5
    assert seen.changed() == []
    x[1, 2] = -0.0
    assert seen.changed() == ["x"]


# The shape of queries, and heads of keys.
SHAPES = {
    "heads": ((3, 4, 40, 32), 4),
    "groups": ((2, 4, 300, 16), 2),
    "one query": ((9, 2, 1, 512), 2),
}


def are_same(gradients, wanted) -> bool:
    return all(map(same_bits, gradients[:4], wanted[:4]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_backward_that_sums_its_inputs_finds_one_changed_bit(shape, dtype, name, monkeypatch):
    """It is made again, and looks at q, k, v and out itself."""
    (batch, heads, rows, columns), heads_kv = SHAPES[shape]
    sizes = {"q": (heads, rows), "k": (heads_kv, 300), "v": (heads_kv, 300)}
    arrays = {x: draw(batch, *sizes[x], columns, seed=n).astype(dtype) for n, x in enumerate("qkv")}
    bias, do = draw(heads, rows, 300), draw(batch, heads, rows, columns, seed=5).astype(dtype)
    looked, has = [], changes.Snapshot.has
    monkeypatch.setattr(
        changes.Snapshot, "has", lambda self, sums: looked.append(sums) or has(self, sums)
    )
    out, vjp = cupyflash.attention_vjp(*arrays.values(), bias=bias)
    wanted = vjp(do)
    for count in range(1, 4):
        assert are_same(vjp(do), wanted)
        assert len(looked) == count
    words = arrays[name].reshape(-1).view(f"u{dtype().itemsize}")
    for place in (0, words.size // 2 + 1, words.size - 1):
        words[place] ^= 1
        with pytest.raises(ArgumentError, match=f"forward call: {name};"):
            vjp(do)
        words[place] ^= 1
        assert are_same(vjp(do), wanted)
    out.reshape(-1)[-1] += 1  # as it was computed
    for _ in range(2):
        assert are_same(vjp(do), wanted)
    bias[0, 0, 7] += 1
    with pytest.raises(ArgumentError, match="forward call: bias;"):
        vjp(do)


def test_threads_that_share_a_function_of_gradients_see_no_changes():
    q, k, v, do = draw(4, 2, 4, 200, 16)
    bias = draw(4, 200, 200)
    _, vjp = cupyflash.attention_vjp(q, k, v, bias=bias)
    wanted = vjp(do)
    found: list[Any] = []

    def work() -> None:
        found.extend(are_same(vjp(do), wanted) for _ in range(20))

    several = [threading.Thread(target=work) for _ in range(4)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert found == [True] * 80


@pytest.mark.parametrize("shape", [(0, 2, 64, 16), (2, 0, 64, 16), (2, 2, 0, 16)])
def test_a_function_of_gradients_of_an_empty_call_is_called_again(shape):
    q = draw(*shape)
    _, vjp = cupyflash.attention_vjp(q, q.copy(), q.copy())
    for _ in range(3):
        assert [x.shape for x in vjp(q)[:3]] == [shape] * 3
