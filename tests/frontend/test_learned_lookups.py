"""Learned look-ups through public functions: a GPU that is nowhere, JAX, ranks."""

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, lookup, masks, scores, streamed

X = np.random.default_rng(0).standard_normal((4, 1, 4, 40, 16), dtype=np.float32)


def test_a_gpu_launches_their_kernel(cupy):
    q, k, v, do = map(cupy.asarray, X)
    for _ in range(3):
        table = lookup(cupy.asarray(np.ones(4, np.float32)), learned=True)
        out, vjp = cupyflash.attention_vjp(q, k, v, score_mod=scores.alibi(table))
        del cupy.launches[:]
        made = vjp(do).dlookups
        names = [each.kernel.partition("__")[0] for each in cupy.launches]
        assert names.count("backward_lookup") == 1
        assert list(made) == [table]
        assert isinstance(made[table], cupy.ndarray)
        assert made[table].shape == (4,)
    target = cupy.asarray(np.zeros(4, np.float32))
    given = cupyflash.Gradients(None, None, None, dlookups={table: target})
    lse = cupyflash.attention(q, k, v, return_lse=True, score_mod=scores.alibi(table))[1]
    how = {"score_mod": scores.alibi(table), "grads_out": given}
    assert cupyflash.attention_backward(do, q, k, v, out, lse, **how).dlookups[table] is target


def test_a_gpu_refuses_before_it_writes(cupy, monkeypatch):
    q, k, v, do = map(cupy.asarray, X)
    table = lookup(cupy.asarray(np.ones((4, 9), np.float32)), learned=True)
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=scores.relative_bias(table))
    del cupy.launches[:]
    with pytest.raises(ArgumentError, match=r"shape \(4, 9\) .*distances.*pass that as bias"):
        vjp(do)
    assert not cupy.launches
    slopes = lookup(cupy.asarray(np.ones(4, np.float32)), learned=True)
    how = {"score_mod": scores.alibi(slopes)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **how)
    monkeypatch.setattr("cupyflash.arrays.cuda_device.is_capturing", lambda: True)
    with pytest.raises(ArgumentError, match="while a CUDA graph is being captured"):
        cupyflash.attention_backward(do, q, k, v, out, lse, **how)


def test_arrays_of_jax_are_refused():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cupyflash.jax

    alibi = scores.alibi(lookup(np.ones(4, np.float32), learned=True))
    with pytest.raises(ArgumentTypeError, match="not computed for arrays of JAX"):
        cupyflash.jax.attention(*map(jax.numpy.asarray, X[:3]), score_mod=alibi)


def test_ranks_refuse_them():
    from cupyflash import distributed

    def work(comm):
        alibi = scores.alibi(lookup(np.ones(4, np.float32), learned=True))
        layout = distributed.layout(comm, 40)
        q = k = v = layout.take(X[0])
        out, vjp = distributed.attention_vjp(q, k, v, comm=comm, layout=layout, score_mod=alibi)
        with pytest.raises(distributed.DistributedError, match=r"over ranks.*pass that as bias"):
            vjp(np.ones_like(out))
        return True

    assert distributed.Threads(2).run(work) == [True, True]


def test_remedies_work():
    q, k, v, do = X
    with pytest.raises(ArgumentTypeError, match=r"learned=True; .*\.astype\(\)"):
        lookup(np.arange(4), learned=True)
    slopes = lookup(np.arange(4).astype(np.float32), learned=True)
    hides = masks.mask(lambda b, h, i, j: slopes[h] > j)
    with pytest.raises(ArgumentError, match="Make the look-up without learned=True"):
        cupyflash.attention(q, k, v, mask=hides)
    plain = lookup(slopes.array)
    cupyflash.attention(q, k, v, mask=masks.mask(lambda b, h, i, j: plain[h] > j))
    out, vjp = cupyflash.attention_vjp(q, k, v, score_mod=scores.alibi(slopes))
    learned = vjp(do).dlookups[slopes]
    # What a call that refuses them says: the scores as a bias, and sums of dbias.
    distance = np.abs(np.arange(40)[:, None] - np.arange(40)).astype(np.float32)
    with pytest.raises(ArgumentTypeError, match="pass that as bias, and sum dbias"):
        streamed.attention_vjp(q, k, v, score_mod=scores.alibi(slopes))[1](do)
    bias = -slopes.array[:, None, None] * distance
    same, vjp = streamed.attention_vjp(q, k, v, score_mod=scores.alibi(0 * plain.array), bias=bias)
    assert np.allclose(out, same, atol=1e-5)
    assert np.allclose(-(vjp(do).dbias * distance).sum((1, 2)), learned, rtol=1e-4, atol=1e-3)
    given = cupyflash.Gradients(None, None, None, dlookups={plain: np.zeros(4, np.float32)})
    lse = cupyflash.attention(q, k, v, return_lse=True, score_mod=scores.alibi(slopes))[1]
    how = {"score_mod": scores.alibi(slopes), "grads_out": given}
    with pytest.raises(ArgumentError, match=r"made by cupyflash\.lookup\(array, learned=True\)"):
        cupyflash.attention_backward(do, q, k, v, out, lse, **how)
