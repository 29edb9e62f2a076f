"""Calls on CuPy arrays that look like one before: recognised, right, and no array kept alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, execute, lookup, masks, scores
from cupyflash.backends import host_recent
from cupyflash.gpu import launch_cache
from cupyflash.problem import replay, validate
from cupyflash.reference.spec import naive

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy(gpu):
    import cupy

    return cupy


@pytest.fixture
def unchecked(monkeypatch):
    """Make every check an error: what runs now was recognised."""

    def forbid():
        def refuse(*_, **__):
            raise AssertionError("the call was checked again")

        monkeypatch.setattr(validate, "call", refuse)
        monkeypatch.setattr(validate, "varlen_call", refuse)

    return forbid


def draw(cupy, shape=(2, 4, 40, 16), count=3, seed=0):
    rng = np.random.default_rng(seed)
    return [cupy.asarray(rng.standard_normal(shape, dtype=np.float32)) for _ in range(count)]


def close(found, wanted, tolerance=2e-5):
    np.testing.assert_allclose(found.get(), wanted, rtol=tolerance, atol=tolerance)


def options_of(cupy, seed):
    """Every kind of option; of other seeds with other numbers in the arrays."""
    rng = np.random.default_rng(seed)
    slopes = cupy.asarray(rng.random(4, dtype=np.float32))
    segments = cupy.asarray(np.sort(rng.integers(0, 3, 40)))
    limit = lookup(cupy.asarray(rng.integers(5, 40, 2)))
    return {
        "mask": masks.causal() & masks.segments(segments)
        | masks.mask(lambda b, h, i, j: j < limit[b]),
        "score_mod": [scores.alibi(slopes), scores.softcap(3.0)],
        "bias": cupy.asarray(rng.standard_normal((4, 1, 40), dtype=np.float32)),
        "sink": cupy.asarray(rng.standard_normal(4, dtype=np.float32)),
        "scale": 0.5,
        "dropout": 0.25,
        "seed": seed,
    }


def on_host(options):
    """The same options with the arrays in host memory."""
    from cupyflash.expr.nodes import rebuild

    host = dict(options)
    for name in ("bias", "sink"):
        host[name] = options[name].get()

    def moved(node):
        if node.op == "lookup":
            return type(node)(node.op, node.args, node.type, (node.value[0].get(), node.value[1]))
        if node.op == "aligned":
            import dataclasses

            alignment = dataclasses.replace(node.value, array=node.value.array.get())
            return type(node)(node.op, node.args, node.type, alignment)
        return None

    host["mask"] = masks.Mask(rebuild(options["mask"].expr, moved))
    host["score_mod"] = [scores.Score(rebuild(x.expr, moved)) for x in options["score_mod"]]
    return host


def test_other_arrays_and_seeds_are_not_checked_again(cupy, unchecked):
    first = draw(cupy, seed=1)
    out, vjp = cupyflash.attention_vjp(*first, **options_of(cupy, 1))
    vjp(out)
    wanted = {}
    for seed in (2, 3):
        host = [x.get() for x in draw(cupy, seed=seed)]
        options = on_host(options_of(cupy, seed))
        wanted[seed] = (
            naive.attention(*host, **options),
            naive.attention_backward(np.ones_like(host[0]), *host, **options),
        )
    unchecked()
    for seed, (forward, backward) in wanted.items():
        arrays = draw(cupy, seed=seed)
        out, lse, vjp = cupyflash.attention_vjp(*arrays, return_lse=True, **options_of(cupy, seed))
        close(out, forward.out)
        close(lse, forward.lse)
        for found, expected in zip(vjp(cupy.ones_like(out)), backward, strict=False):
            close(found, expected, 1e-4)


def test_arrays_of_torch_are_recognised(cupy, unchecked):
    torch = pytest.importorskip("torch")
    q, k, v = (torch.as_tensor(x.get(), device="cuda") for x in draw(cupy))
    wanted = cupyflash.attention(q, k, v)
    unchecked()
    assert (cupyflash.attention(q, k, v) == wanted).all()


NUMBERS = [
    {"mask": masks.causal(), "scale": 0.5},
    {"mask": masks.causal(5), "scale": 0.5},
    {"mask": masks.causal(), "scale": 0.25},
    {"mask": masks.causal(), "scale": -0.5},
    {"mask": masks.causal(), "scale": 1},
    {"mask": masks.causal(), "scale": 0},
    {"mask": masks.causal(), "scale": np.float64(0.5)},
    {"mask": masks.window(3, 4), "scale": 0.5},
    {"score_mod": scores.softcap(1.0)},
    {"score_mod": scores.softcap(9.0)},
    {"dropout": 0.5, "seed": 1},
    {"dropout": 0.5, "seed": 2**64 - 1},
    {"dropout": 0.25, "seed": 1},
]


def test_numbers_are_told_apart(cupy):
    arrays = draw(cupy)
    host = [x.get() for x in arrays]
    for _ in range(2):
        for options in NUMBERS:
            close(cupyflash.attention(*arrays, **options), naive.attention(*host, **options).out)


def test_what_is_wrong_stays_wrong(cupy):
    q, k, v = draw(cupy)
    for _ in range(2):
        cupyflash.attention(q, k, v, scale=1.0)
        for error, wrong in (
            (ArgumentTypeError, {"scale": True}),
            (ArgumentError, {"scale": float("nan")}),
            (ArgumentError, {"out": q}),
            (ArgumentError, {"out": k[:1]}),
            (ArgumentTypeError, {"causal": True}),
            (ArgumentTypeError, {"return_lse": 1}),
            (ArgumentError, {"dropout": 0.5}),
            (ArgumentError, {"dropout": 0.5, "seed": 2**64}),
            (ArgumentTypeError, {"mask": k[0, 0] > 0}),
        ):
            with pytest.raises((error, ArgumentError)):
                cupyflash.attention(q, k, v, **wrong)


def test_overlapping_outputs_are_refused_after_others_were_taken(cupy):
    q, k, v = draw(cupy)
    memory = cupy.zeros(3 * q.size, np.float32)
    outs = [memory[n * 10 : n * 10 + q.size].reshape(q.shape) for n in range(3)]
    for out in outs:
        cupyflash.attention(q, k, v, out=out)
    inside = memory[q.size :][: q.size].reshape(q.shape)
    inside[...] = q
    cupyflash.attention(inside, k, v, out=memory[: q.size].reshape(q.shape))
    with pytest.raises(ArgumentError, match="share memory"):
        cupyflash.attention(inside, k, v, out=memory[4 : 4 + q.size].reshape(q.shape))
    # Interleaved views share no element, and are taken again and again.
    packed = cupy.zeros((*q.shape[:-1], 3, 16), np.float32)
    views = [packed[..., n, :] for n in range(3)]
    out, lse = cupyflash.attention(q, k, v, return_lse=True)
    alone = cupyflash.attention_backward(out, q, k, v, out, lse)
    for _ in range(2):
        packed[...] = 0
        made = cupyflash.Gradients(*views)
        cupyflash.attention_backward(out, q, k, v, out, lse, grads_out=made)
        for ours, wanted in zip(views, alone, strict=False):
            assert (ours == wanted).all()


def test_no_array_is_kept_alive(cupy):
    pool = cupy.get_default_memory_pool()
    q, k, v = draw(cupy)
    gc.collect()  # what earlier tests left in cycles would go meanwhile
    before = pool.used_bytes()
    out, vjp = cupyflash.attention_vjp(q, k, v, **options_of(cupy, 7))
    gradients = vjp(out)
    assert pool.used_bytes() > before
    del out, vjp, gradients
    assert pool.used_bytes() == before


def test_few_calls_are_kept(cupy, monkeypatch):
    monkeypatch.setattr(replay, "MOST", 20)
    q, k, v = draw(cupy, (1, 1, 4, 16))
    for n in range(60):
        cupyflash.attention(q, k, v, scale=1.0 + n)
    assert launch_cache.kept() <= 20


def test_results_have_the_same_memory_order(cupy):
    for shape, axes in (((2, 40, 4, 16), (0, 2, 1, 3)), ((1, 40, 1, 16), (0, 2, 1, 3))):
        arrays = [x.transpose(axes) for x in draw(cupy, shape)]
        first, again = (cupyflash.attention(*arrays) for _ in range(2))
        assert first.strides == arrays[0].strides
        assert again.strides == first.strides
        assert (first == again).all()
        out, vjp = cupyflash.attention_vjp(*arrays)
        for a, b in zip(vjp(out)[:3], vjp(out)[:3], strict=True):
            assert a.strides == b.strides


def of_arrays_alone(cupy, kind, seed):
    """Return a function, and operands of which it says nothing more; another seed has others."""
    rng = np.random.default_rng(seed)

    def numbers(*shape):
        return cupy.asarray(rng.standard_normal(shape).astype(np.float16))

    if kind == "dense":
        return cupyflash.attention, [numbers(2, 4, 96, 64) for _ in range(3)]
    if kind.startswith("packed"):
        ends = np.array([0, 20, 90 + seed, 200])
        operands = [numbers(4, 200, 64) for _ in range(3)]
        ends = ends if "host" in kind else cupy.asarray(ends.astype(kind.split()[-1]))
        return cupyflash.attention_varlen, [*operands, ends, ends]
    operands = [numbers(2, 8, 1, 64), *(numbers(2, 2, 700, 64) for _ in range(2))]
    lengths = 300 + seed if kind == "one length" else cupy.asarray(np.array([9, 600 + seed]))
    return cupyflash.attention_cached, [*operands, lengths]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(30, 0)])
@pytest.mark.parametrize(
    "kind", ["dense", "cached", "one length", "packed int32", "packed int64", "packed, host"]
)
def test_calls_of_arrays_alone_have_the_bits_of_requests(cupy, monkeypatch, kind, mask):
    options = {} if mask is None else {"mask": mask}
    streams = [cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)]
    wanted = []
    with monkeypatch.context() as patch:
        patch.setattr(host_recent, "again", lambda *_: None)
        for seed in range(2):
            function, operands = of_arrays_alone(cupy, kind, seed)
            wanted.append(function(*operands, **options).get())
    for seed in range(2):  # offsets on the host are another call each
        function, operands = of_arrays_alone(cupy, kind, seed)
        function(*operands, **options)
    cupy.cuda.Device().synchronize()
    monkeypatch.setattr(execute, "forward", None)
    for stream, seed in ((s, n) for s in streams for n in (0, 1, 0)):
        function, operands = of_arrays_alone(cupy, kind, seed)
        cupy.cuda.Device().synchronize()
        with stream:
            found = function(*operands, **options)
        stream.synchronize()
        assert np.array_equal(found.get().view(np.uint16), wanted[seed].view(np.uint16))


def test_a_graph_of_a_call_of_arrays_alone(cupy):
    """Replays read the arrays in place; the memory of its output is the graph's user's."""
    q, k, v = (x.astype(np.float16) for x in draw(cupy, (1, 2, 64, 64)))
    stream = cupy.cuda.Stream(non_blocking=True)
    wanted = [cupyflash.attention(x, k, v).get() for x in (q, -q)]
    cupy.cuda.Device().synchronize()
    with stream:
        cupyflash.attention(q, k, v)
        stream.begin_capture()
        out = cupyflash.attention(q, k, v)
        graph = stream.end_capture()
        for sign in wanted:
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(out.get(), sign)
            q *= -1


def learned_of(cupy, seed):
    """Learned look-ups, and the options of a call that reads them."""
    rng = np.random.default_rng(seed)
    sizes = {"cap": (), "slopes": (2, 4), "gate": (64,)}
    made = [lookup(cupy.asarray(rng.uniform(1, 2, x)), learned=True) for x in sizes.values()]
    cap, slopes, gate = made
    gated = scores.score(lambda s, b, h, i, j: gate[i] * s - slopes[b, h] * abs(i - j) / 64)
    return made, {"score_mod": [scores.softcap(cap), gated], "mask": masks.causal()}


@pytest.mark.parametrize("dtype", [np.float16, np.float32], ids=lambda x: x.__name__)
def test_learned_look_ups_are_recognised_and_captured(cupy, unchecked, dtype):
    shape = (2, 4, 64, 64)
    drawn = [[x.astype(dtype) for x in draw(cupy, shape, 4, seed)] for seed in range(3)]
    held = [learned_of(cupy, seed) for seed in range(3)]

    def gradients(seed, **more):
        (do, q, k, v), (tables, how) = drawn[seed], held[seed]
        out, lse = cupyflash.attention(q, k, v, return_lse=True, **how)
        of = do, q, k, v, out, lse
        made = cupyflash.attention_backward(*of, deterministic=True, **how, **more)
        return [*made[:3], *(made.dlookups[x] for x in tables)]

    replay._entries.clear()
    wanted = [[x.get() for x in gradients(seed)] for seed in range(3)]
    _, q, k, v = drawn[0]
    size = cupyflash.workspace_size(q, k, v, **held[0][1])
    workspace = cupy.empty(size, np.uint8)
    gradients(0, workspace=workspace)
    unchecked()
    for seed in (1, 2, 0):
        for ours, right in zip(gradients(seed), wanted[seed], strict=True):
            assert np.array_equal(ours.get(), right)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        gradients(0, workspace=workspace)
        stream.begin_capture()
        made = gradients(0, workspace=workspace)
        graph = stream.end_capture()
        for x in made:
            x.fill(0)
        graph.launch(stream)
    stream.synchronize()
    for ours, right in zip(made, wanted[0], strict=True):
        assert np.array_equal(ours.get(), right)
