"""Calls of every kind are recognised, without a GPU: one table.

A call is made as one that was made before if it looks alike. Its kernels are those of the first
call, with the same grids and the same words but addresses; these are of its own arrays.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from recognised import fields

import cupyflash
from cupyflash import cache_update, lookup, masks, quantization, scores
from cupyflash.arrays import device_arrays
from cupyflash.backends.gpu import Gpu
from cupyflash.gpu import launch as gpu_launch
from cupyflash.gpu import params, tma
from cupyflash.pieces.parts import call_of, part
from cupyflash.pieces.schedule import Piece
from cupyflash.problem import cached, validate
from cupyflash.problem.call import Gradients
from cupyflash.problem.options import Options

F16, F32, I32, I64, BYTES = np.float16, np.float32, np.int32, np.int64, np.uint8
ATTENTION, LENGTHS, ENDS = params.params(0, 0, 0), [7, 9], [0, 11, 40]
SCALES = {"lead": [0] * 4, "head": 1, "row": 0}
FP8 = {"qkv_dtype": "float8_e4m3fn"}
RESULTS = "out", "lse", "dq", "dk", "dv"


def full(cupy, shape, dtype=F32, values=0):
    return cupy.asarray(np.broadcast_to(np.asarray(values, dtype), shape).copy())


def dense(shape=(2, 4, 40, 16), dtype=F32, scale=None, do=False, **options):
    """Return what makes q, k and v, with scales for codes, and the options of a call."""

    def make(cupy):
        arrays = {name: full(cupy, shape, dtype) for name in "qkv"}
        if do:
            arrays["do"] = full(cupy, shape, dtype)
        if scale is not None:
            arrays |= {f"{name}_scale": full(cupy, scale) for name in "qkv"}
        return arrays, options

    return make


def attention(q, k, v, **options):
    return {"out": cupyflash.attention(q, k, v, **options)}


def with_lse(q, k, v, **options):
    return dict(
        zip(RESULTS, cupyflash.attention(q, k, v, return_lse=True, **options), strict=False)
    )


def gradients(q, k, v, do, **options):
    out, vjp = cupyflash.attention_vjp(q, k, v, **options)
    return {"out": out} | dict(zip(RESULTS[2:], vjp(do)[:3], strict=True))


def learned(cupy):
    """Arrays that scores read, which have gradients: the later change reads one first."""
    arrays, _ = dense(do=True)(cupy)
    more = {"cap": full(cupy, (), values=3), "slopes": full(cupy, (2, 4)), "gate": full(cupy, 40)}
    return arrays | more, {}


def learned_gradients(q, k, v, do, cap, slopes, gate, grads_out=None):
    cap, slopes, gate = tables = [lookup(x, learned=True) for x in (cap, slopes, gate)]
    gated = scores.score(lambda s, b, h, i, j: gate[i] * s + slopes[b, h] * j)
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    how = {"score_mod": [scores.softcap(cap), gated]}
    if grads_out is not None:
        grads_out = Gradients(None, None, None, dlookups={slopes: grads_out})
    made = cupyflash.attention_backward(do, q, k, v, out, lse, grads_out=grads_out, **how)
    names = dict(zip(("dcap", "dslopes", "dgate"), tables, strict=True))
    assert made.dlookups.keys() == set(tables)
    assert grads_out is None or made.dlookups[slopes] is grads_out.dlookups[slopes]
    found = {name: made.dlookups[table] for name, table in names.items()}
    return {"out": out, "lse": lse} | found | dict(zip(RESULTS[2:], made[:3], strict=True))


def learned_given(cupy):
    """The same, of which one gradient has its array."""
    arrays, _ = learned(cupy)
    return arrays | {"grads_out": full(cupy, (2, 4))}, {}


def test_look_ups_that_scores_drop_are_checked_every_time(cupy):
    arrays, _ = dense(do=True)(cupy)
    cap, slopes = (lookup(full(cupy, n, values=1), learned=True) for n in ((), 4))
    only = scores.score(lambda s, b, h, i, j: slopes[h] * j)  # whatever the score was
    how = {"score_mod": [scores.softcap(cap), only]}
    for _ in range(3):
        cupy.launches.clear()
        made = cupyflash.attention_backward(*_rows(arrays), **how)
        assert set(made.dlookups) == {slopes}
        assert "backward_lookup" in cupy.launches[-1].kernel


def _rows(arrays):
    do, q, k, v = (arrays[name] for name in ("do", "q", "k", "v"))
    return do, q, k, v, *cupyflash.attention(q, k, v, return_lse=True)


def directions(cupy):
    """Arrays and a direction, with a bias and a sink."""
    arrays, _ = dense()(cupy)
    arrays |= {f"t{name}": full(cupy, (2, 4, 40, 16)) for name in "qkv"}
    arrays |= {name: full(cupy, (40, 40)) for name in ("bias", "tbias")}
    return arrays | {name: full(cupy, 4) for name in ("sink", "tsink")}, {}


def tangents(q, k, v, **options):
    made = cupyflash.attention_jvp(q, k, v, return_lse=True, **options)
    return dict(zip(("out", "tout", "lse", "tlse"), made, strict=True))


def second_directions(cupy):
    arrays, options = directions(cupy)
    arrays |= {name: full(cupy, (2, 4, 40, 16)) for name in ("do", "out", "tdo")}
    return arrays | {name: full(cupy, (2, 4, 40)) for name in ("lse", "dlse", "tdlse")}, options


def second(q, k, v, do, out, lse, **options):
    made = cupyflash.attention_backward_jvp(do, q, k, v, out, lse, **options)
    gradients = {f"t{name}": x for name, x in made.gradients._asdict().items()}
    return gradients | {"tout": made.tout, "tlse": made.tlse}


def packed(kind):
    """The same with offsets, of the host or of a type in device memory."""

    def make(cupy):
        arrays, _ = dense((4, 40, 16))(cupy)
        if kind == "host":
            return arrays, {"offsets_q": ENDS}
        return arrays | {"offsets_q": full(cupy, 3, kind, ENDS)}, {}

    return make


def varlen(q, k, v, offsets_q):
    return {"out": cupyflash.attention_varlen(q, k, v, offsets_q, offsets_q)}


def over_cache(page, given=False):
    """A step over pages, in new memory or in memory that is given."""

    def make(cupy):
        arrays = {"q": full(cupy, (2, 4, 1, 16))}
        arrays |= {name: full(cupy, (6, 2, page, 16)) for name in "kv"}
        arrays |= {"lengths": full(cupy, 2, I32, LENGTHS), "table": full(cupy, (2, 3), I32)}
        if given:
            q, k, v, _, table = arrays.values()
            size = cupyflash.workspace_size_cached(q, k, v, table=table)
            assert size > 0
            arrays |= {"workspace": full(cupy, size, BYTES), "out": full(cupy, q.shape)}
        return arrays, {}

    return make


def step(q, k, v, lengths, **options):
    return {"out": cupyflash.attention_cached(q, k, v, lengths, **options)}


def rows_of_cache(**options):
    def make(cupy):
        arrays = {name: full(cupy, (2, 3, 1, 8)) for name in ("k_new", "v_new")}
        arrays |= {name: full(cupy, (6, 3, 4, 8)) for name in "kv"}
        arrays |= {"lengths": full(cupy, 2, I64, [1, 2]), "q": full(cupy, (2, 6, 1, 8))}
        arrays |= {"table": full(cupy, (2, 3), I32)}
        return arrays | {name: full(cupy, (40, 2)) for name in ("cos", "sin")}, options

    return make


def append(k_new, v_new, k, v, lengths, q, table, cos, sin, **options):
    rotary = cupyflash.Rotary(cos, sin, **options)
    out = cupyflash.append(k_new, v_new, k, v, lengths, table=table, q=q, rotary=rotary)
    return {"out": out}


def rows(**options):
    def make(cupy):
        arrays = {"x": full(cupy, (2, 4, 5, 16)), "positions": full(cupy, 5, I32, 3)}
        return arrays | {name: full(cupy, (9, 8)) for name in ("cos", "sin")}, options

    return make


def rope(x, positions, cos, sin, **options):
    return {"out": cupyflash.rope(x, positions, cupyflash.Rotary(cos, sin), **options)}


def hadamard(x, **options):
    return {"out": cupyflash.hadamard(x, 3, **options)}


def of_piece(**more):
    """The first queries and keys of a call, and what they are added to."""
    shape = (1, 2, 256, 64)

    def make(cupy):
        arrays = {name: cupy.ndarray(shape, F16) for name in more.get("arrays", "qkv")}
        return arrays | {
            name: cupy.ndarray((*shape[:2], 128, *[64] * (name != "lse")), more.get(name, F32))
            for name in more.get("results", ("out", "lse"))
        }, {}

    return make


def piece(q, k, v):
    half = range(128)
    arrays = (part(x, half) for x in (q, k, v))
    call = validate.call(q, k, v, Options(mask=masks.causal()))
    return call_of(call, Piece(half, half, True, True), *arrays, None)


def forward_piece(q, k, v, out, lse):
    Gpu().forward_piece(piece(q, k, v), (out, lse), True)
    return {}


def backward_piece(q, k, v, do, out, lse, dq, dk, dv):
    targets = Gradients(dq, dk, dv, None, None)
    do = part(do, range(128))
    Gpu().backward_piece(piece(q, k, v), do, out, lse, None, targets, False)
    return {}


DENSE, CACHED = (validate, "call"), (cached, "call")
PACKED = validate, "varlen_call"
GRADIENTS = {"arrays": ("q", "k", "v", "do"), "results": RESULTS, "out": F16}
APPEND, ROPE = (cache_update, "checked_append"), (cache_update, "rotation")
HADAMARD = quantization, "transform"

# What makes arrays and options, the call, its check, and what its last kernel is told beside
# addresses; how many words may be addresses of memory that the call asks for itself.
KINDS = {
    "dense": (dense(), attention, DENSE, {}, 0),
    "dense, lse": (dense(), with_lse, DENSE, {}, 0),
    "dense, causal": (dense(mask=masks.causal()), with_lse, DENSE, {}, 0),
    "gradients": (dense(dtype=F16, do=True), gradients, DENSE, {}, 8),
    "learned": (learned, learned_gradients, DENSE, {}, 12),
    "learned, given": (learned_given, learned_gradients, DENSE, {}, 12),
    "tangents": (directions, tangents, DENSE, {}, 0),
    "second": (second_directions, second, DENSE, {}, 12),
    "packed, host": (packed("host"), varlen, PACKED, {}, 0),
    "packed, int64": (packed(I64), varlen, PACKED, {}, 0),
    "packed, int32": (packed(I32), varlen, PACKED, {}, 3),
    "cache": (over_cache(176), step, CACHED, {}, 2),
    "cache, memory given": (over_cache(176, given=True), step, CACHED, {}, 0),
    "cache, small": (over_cache(16), step, CACHED, {}, 0),
    "codes": (
        dense((2, 4, 600, 64), BYTES, (4, 1, 1), **FP8), attention, DENSE,
        {"q_scale": SCALES, "k_scale": SCALES, "v_scale": SCALES}, 0,
    ),
    # Numbers of codes are in new memory, and their tensor maps have its addresses, too.
    "codes, widened": (dense((2, 4, 40, 24), BYTES, (4, 1, 1), **FP8), attention, DENSE, {}, 9),
    "append": (rows_of_cache(), append, APPEND, {"interleaved": 0}, 0),
    "append, interleaved": (
        rows_of_cache(interleaved=True), append, APPEND, {"interleaved": 1}, 0
    ),
    "rope": (rows(), rope, ROPE, {"inverse": 0}, 0),
    "rope, inverse": (rows(inverse=True), rope, ROPE, {"inverse": 1}, 0),
    "hadamard": (lambda cupy: ({"x": full(cupy, (2, 5, 96))}, {}), hadamard, HADAMARD, {}, 0),
    "piece": (of_piece(), forward_piece, (gpu_launch, "forward"), {}, 0),
    "gradients of a piece": (
        of_piece(**GRADIENTS), backward_piece, (gpu_launch, "backward"), {}, 4
    ),
}  # fmt: skip


def tensors(count=3, dtype="float32", shape=(2, 4, 40, 16), **options):
    """Return what makes q, k and v, and perhaps do."""

    def make(torch):
        names = ("q", "k", "v", "do")[:count]
        return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name in names}, options

    return make


def tensors_of_cache(torch):
    arrays, _ = tensors()(torch)
    return arrays | {"q": torch.zeros(2, 4, 1, 16), "lengths": torch.tensor([3, 7])}, {}


def packed_tensors(torch):
    arrays, _ = tensors(shape=(4, 40, 16))(torch)
    return arrays | {"offsets_q": torch.tensor(ENDS)}, {}


def tensors_with_lse(q, k, v, **options):
    from cupyflash.torch import attention

    return dict(zip(RESULTS, attention(q, k, v, return_lse=True, **options), strict=False))


def gradients_of_tensors(q, k, v, do, **options):
    """The gradients of a call without PyTorch's engine, as an operator of PyTorch makes them."""
    from cupyflash.torch import autograd, compute

    settings, x = autograd.Settings(**options), autograd.Operands(q, k, v)
    results = compute.forward(settings, x)
    made = compute.backward(settings, x, results, do, None, False)
    return dict(zip(RESULTS[2:], made[:3], strict=True))


def step_of_tensors(q, k, v, lengths):
    from cupyflash.torch import attention_cached

    return dict(zip(RESULTS, attention_cached(q, k, v, lengths, return_lse=True), strict=False))


def varlen_of_tensors(q, k, v, offsets_q):
    from cupyflash.torch import attention_varlen

    return {"out": attention_varlen(q, k, v, offsets_q, offsets_q)}


BACKWARD = {"count": 4, "dtype": "float16", "mask": masks.causal()}
TENSORS = {
    "dense": (tensors(), tensors_with_lse, DENSE, 0),
    "dense, causal": (tensors(mask=masks.causal()), tensors_with_lse, DENSE, 0),
    "gradients": (tensors(**BACKWARD), gradients_of_tensors, DENSE, 10),
    "gradients, deterministic": (
        tensors(**BACKWARD, deterministic=True), gradients_of_tensors, DENSE, 10
    ),
    "cache": (tensors_of_cache, step_of_tensors, CACHED, 2),
    "packed": (packed_tensors, varlen_of_tensors, PACKED, 0),
}  # fmt: skip


def refuse(*_, **__):
    raise AssertionError("the call was checked again")


def span(array):
    """Return where an array's memory begins and ends."""
    if hasattr(array, "data_ptr"):
        return array.data_ptr(), array.data_ptr() + array.nbytes
    return array.data.ptr, array.data.ptr + array.size * array.dtype.itemsize


def compared(one, arrays, other, others):
    """Compare words of two launches; return the names of arrays and how many others differ."""
    names, unknown = set(), 0
    places = {x: span(array) for x, array in arrays.items()}
    for n in np.flatnonzero(one.words != other.words):
        word = int(one.words[n])
        known = {x: word - low for x, (low, high) in places.items() if low <= word < high}
        for name, offset in known.items():
            found = int(other.words[n]) - span(others[name])[0]
            # What lies in a workspace begins at the next multiple of so many bytes.
            assert found == offset or (name == "workspace" and abs(found - offset) < 512), name
        names |= known.keys()
        unknown += not known
    return names, unknown


def assert_alike(launches, held, unknown_words):
    """Later calls have the first one's launches, and words that are addresses of their own."""
    first, *later = launches
    for n, each in enumerate(later, 1):
        assert all(x.by_driver for x in each)
        assert [(x.kernel, x[2:5]) for x in each] == [(x.kernel, x[2:5]) for x in first]
        pairs = [
            compared(one, held[0], other, held[n]) for one, other in zip(first, each, strict=True)
        ]
        assert set().union(*(names for names, _ in pairs)) == held[0].keys()
        assert sum(unknown for _, unknown in pairs) <= unknown_words
        for name, result in held[n].items():
            like = held[0][name]
            assert (result.shape, result.dtype) == (like.shape, like.dtype)
            strides = ("stride" if hasattr(like, "stride") else "strides",) * 2
            ours, theirs = (getattr(x, y) for x, y in zip((result, like), strides, strict=True))
            assert (ours() if callable(ours) else ours) == (
                theirs() if callable(theirs) else theirs
            )


def assert_told(launch, wanted):
    """Assert what the fields of a launch are, or parts of them."""
    kernel = launch.kernel.partition("__")[0]
    layout = params.rowwise(kernel) if kernel in ("append", "rope", "hadamard") else ATTENTION
    for name, value in wanted.items():
        found = fields(launch, layout)[name]
        if isinstance(value, dict):
            found = {x: np.array(found[x]).tolist() for x in value}
        assert found == value, name


@pytest.mark.parametrize("kind", KINDS)
def test_later_calls_are_the_first_one_at_other_addresses(cupy, monkeypatch, kind):
    made, call, check, wanted, unknown_words = KINDS[kind]
    monkeypatch.setattr(tma, "encode", lambda *_: bytes(tma.BYTES))
    held, launches = [], []  # kept alive: no other array lies there
    for n in range(3):
        arrays, options = made(cupy)
        cupy.launches.clear()
        with mock.patch.object(*check, getattr(*check) if n == 0 else refuse):
            results = call(**arrays, **options)
        if "out" in arrays:
            assert results.get("out", arrays["out"]) is arrays["out"]
        held.append(arrays | results)
        launches.append(cupy.launches[:])
    assert not launches[0][0].by_driver
    assert_alike(launches, held, unknown_words)
    for each in launches:
        assert_told(each[-1], wanted)
    for made, other, _, wanted, _ in KINDS.values():  # which differ in their options
        if other is call:
            arrays, options = made(cupy)
            held.append((arrays, call(**arrays, **options)))
            assert_told(cupy.launches[-1], wanted)


@pytest.mark.parametrize("kind", TENSORS)
def test_so_are_calls_on_tensors(request, monkeypatch, kind):
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    request.getfixturevalue("gpu_tensors")
    cupy = request.getfixturevalue("cupy")
    made, call, check, unknown_words = TENSORS[kind]
    held, launches = [], []
    for n in range(4):
        arrays, options = made(torch)
        cupy.launches.clear()
        if n == 2:
            monkeypatch.setattr(*check, refuse)
            monkeypatch.setattr(device_arrays, "borrowed", refuse)
        held.append(arrays | call(**arrays, **options))
        launches.append(cupy.launches[:])
    assert not launches[0][0].by_driver
    assert {x.stream for each in launches[2:] for x in each} == {70}
    assert_alike(launches[1:], held[1:], unknown_words)
