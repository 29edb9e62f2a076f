"""What programs with type annotations write. It is checked by mypy and by pyright, and run.

A line that must be an error has `type: ignore`, which is itself an error where it ignores nothing.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import cupyflash
from cupyflash import Gradients, distributed, masks, reductions, scores, streamed

Floats = NDArray[np.floating[Any]]
Grads32 = Gradients[NDArray[np.float32], Floats | None]

rng = np.random.default_rng(0)
q = rng.standard_normal((2, 4, 40, 16), dtype=np.float32)
k = rng.standard_normal((2, 4, 40, 16), dtype=np.float32)
v = rng.standard_normal((2, 4, 40, 16), dtype=np.float32)
wide = q.astype(np.float64)
keep = rng.random((40, 40)) < 0.5
flag = bool(keep[0, 0])


def results_have_the_type_of_the_queries() -> None:
    out = cupyflash.attention(q, k, v)
    assert_type(out, NDArray[np.float32])
    assert_type(cupyflash.attention(wide, wide, wide), NDArray[np.float64])
    both = cupyflash.attention(q, k, v, return_lse=True)
    assert_type(both, tuple[NDArray[np.float32], Floats])
    assert_type(cupyflash.combine([both, both])[1], Floats)
    either = cupyflash.attention(q, k, v, return_lse=flag)
    print((either[0] if isinstance(either, tuple) else either).shape)
    grads = cupyflash.attention_backward(out, q, k, v, *both)
    assert_type(grads, Grads32)
    assert_type(grads.dq, NDArray[np.float32])
    assert_type(grads.dbias, Floats | None)
    codes, scale = cupyflash.quantize(k, "int8")
    cached = cupyflash.attention_cached(q, codes, codes, 20, k_scale=scale, v_scale=scale)
    assert_type(cached, NDArray[np.float32])
    converted: NDArray[np.float32] = cupyflash.convert(out, like=q)
    assert_type(cupyflash.convert(both, like=converted)[0], NDArray[np.float32])


def functions_of_gradients() -> None:
    out, vjp = cupyflash.attention_vjp(q, k, v, mask=masks.causal(), deterministic=True)
    assert_type(vjp(out), Grads32)
    _, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True)
    assert_type(vjp(out, lse).dv, NDArray[np.float32])
    streamed_out, vjp = streamed.attention_vjp(q, k, v, chunk=16)
    assert_type(streamed_out, NDArray[np.float32])
    assert_type(vjp(out), Grads32)
    assert_type(streamed.attention(wide, wide, wide, chunk=(16, 16)), NDArray[np.float64])


def packed_sequences() -> None:
    rows: NDArray[np.float32] = q[0]
    offsets = np.array([0, 10, 40])
    out = cupyflash.attention_varlen(rows, rows, rows, offsets, [0, 10, 40])
    assert_type(out, NDArray[np.float32])
    out, vjp = cupyflash.attention_varlen_vjp(rows, rows, rows, offsets, offsets)
    assert_type(vjp(out), Grads32)


def arrays_and_numbers_of_numpy() -> None:
    cupyflash.attention(q, k, v, mask=keep)
    cupyflash.attention(q, k, v, mask=q[0, 0] @ q[0, 0].T > 0, scale=np.float32(0.5))
    cupyflash.attention(q, k, v, scale=np.float64(1), dropout=np.float32(0.1), seed=np.int64(3))
    cupyflash.attention(q, k, v, score_mod=[scores.softcap(5.0)], sink=np.zeros(4, np.float32))
    lengths = masks.lengths(np.array([3, 40]))
    assert_type(masks.window(np.int64(5), 0) & lengths, masks.Mask)
    masks.causal(offset=np.array([0, 1]))
    joined = masks.segments([0] * 40) | masks.dense(keep) | masks.prefix(np.int32(4))
    cupyflash.attention(q, k, v, mask=joined)
    assert_type(masks.causal().to_array(1, 1, 4, 4), NDArray[np.bool_])
    print(cupyflash.plan(q, k, v, mask=keep, scale=np.float32(0.5)))


def statistics() -> None:
    wanted = {"mass": reductions.mass(), "top": reductions.top_keys(4)}
    print(cupyflash.reduce(q, k, wanted, mask=masks.causal())["top"].indices)
    _, vjp = cupyflash.reduce_vjp(q, k, {"h": reductions.entropy()}, mask=keep, scale=0.5)
    print(vjp({"h": q[..., 0]}).dq.shape)


def ranks(comm: distributed.Communicator) -> NDArray[np.float32]:
    layout = distributed.layout(comm, 40)
    own: NDArray[np.float32] = layout.take(q)
    out = distributed.attention(own, own, own, comm=comm, layout=layout, mask=masks.causal())
    assert_type(out, NDArray[np.float32])
    return out


def errors() -> None:
    cupyflash.attention(q, k, v, msak=keep)  # type: ignore[call-overload]
    cupyflash.attention(q, k, v, mask=True)  # type: ignore[call-overload]
    cupyflash.attention(q, k, v, scale="1")  # type: ignore[call-overload]
    cupyflash.attention(q, k, [[0.0]])  # type: ignore[call-overload]
    cupyflash.attention(q, k, v, bias=np.float32(3))  # type: ignore[call-overload]
    print(cupyflash.attention(q, k, v).no_such_attribute)  # type: ignore[attr-defined]
    masks.window(0.5, 0)  # type: ignore[arg-type]
    distributed.attention(q, k, v)  # type: ignore[call-overload]


if __name__ == "__main__":
    results_have_the_type_of_the_queries()
    functions_of_gradients()
    packed_sequences()
    arrays_and_numbers_of_numpy()
    statistics()
    distributed.Threads(2).run(ranks)
