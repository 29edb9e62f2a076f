"""Gradients without that of the bias: every form of a call, with equal bits and less work."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, distributed, masks, streamed

B, H, L, D = 2, 4, 24, 8
rng = np.random.default_rng(0)
Q, K, V, DO = rng.standard_normal((4, B, H, L, D)).astype(np.float32)
BIASES = {"whole": (H, L, L), "keys": (H, 1, L), "number": (1,)}
OFFSETS = [np.array([0, 9, L])] * 2


def over_ranks(scheme, vjp):
    def each(comm):
        layout = distributed.layout(comm, L, mask=masks.causal())
        q, k, v, do = (layout.take(x) for x in (Q, K, V, DO))

        def call(bias, **options):
            rows = layout.take(bias) if bias.ndim > 1 and bias.shape[-2] == L else bias
            options |= {"comm": comm, "layout": layout, "bias": rows, "scheme": scheme}
            if vjp:
                return distributed.attention_vjp(q, k, v, **options)[1](do)
            bias_gradient = options.pop("bias_gradient", True)
            out, lse = distributed.attention(q, k, v, return_lse=True, **options)
            return distributed.attention_backward(
                do, q, k, v, out, lse, bias_gradient=bias_gradient, **options
            )

        return call

    def run(bias, **options):
        found = distributed.Threads(2).run(
            lambda comm: each(comm)(bias, mask=masks.causal(), **options)
        )
        return SimpleNamespace(
            **{n: np.concatenate([getattr(x, n) for x in found], -2) for n in ("dq", "dk", "dv")},
            dbias=[x.dbias for x in found] if found[0].dbias is not None else None,
        )  # fmt: skip

    return run


def dense(bias, vjp=True, **options):
    if vjp:
        return cupyflash.attention_vjp(Q, K, V, bias=bias, **options)[1](DO)
    out, lse = cupyflash.attention(Q, K, V, bias=bias, return_lse=True)
    return cupyflash.attention_backward(DO, Q, K, V, out, lse, bias=bias, **options)


def packed(bias, vjp=True, **options):
    q, k, v, do = Q[0], K[0], V[0], DO[0]
    bias = bias[..., :15, :15] if bias.ndim > 1 and bias.shape[-2] == L else bias[..., :15]
    if vjp:
        return cupyflash.attention_varlen_vjp(q, k, v, *OFFSETS, bias=bias, **options)[1](do)
    out, lse = cupyflash.attention_varlen(q, k, v, *OFFSETS, bias=bias, return_lse=True)
    return cupyflash.attention_varlen_backward(
        do, q, k, v, out, lse, *OFFSETS, bias=bias, **options
    )


def in_chunks(bias, vjp=True, **options):
    if vjp:
        return streamed.attention_vjp(Q, K, V, chunk=7, bias=bias, **options)[1](DO)
    out, lse = streamed.attention(Q, K, V, chunk=7, bias=bias, return_lse=True)
    return streamed.attention_backward(DO, Q, K, V, out, lse, chunk=7, bias=bias, **options)


FORMS = {
    f"{name}{' vjp' if vjp else ''}": lambda bias, f=f, vjp=vjp, **o: f(bias, vjp, **o)
    for name, f in {"dense": dense, "packed": packed, "streamed": in_chunks}.items()
    for vjp in (False, True)
} | {
    f"ranks, {scheme}{' vjp' if vjp else ''}": over_ranks(scheme, vjp)
    for scheme in ("rounds", "heads")
    for vjp in (False, True)
}


@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("form", FORMS)
def test_the_other_gradients_have_the_same_bits(form, kind):
    bias = np.random.default_rng(1).standard_normal(BIASES[kind]).astype(np.float32)
    every, some = FORMS[form](bias), FORMS[form](bias, bias_gradient=False)
    assert every.dbias is not None
    assert some.dbias is None
    for name in ("dq", "dk", "dv"):
        np.testing.assert_array_equal(getattr(some, name), getattr(every, name), name)


def test_nothing_is_computed_for_it(monkeypatch):
    from cupyflash.reference.cpu import backward_call

    bias = np.zeros((H, L, L), np.float32)
    monkeypatch.setattr(backward_call, "BiasTotals", None)
    with pytest.raises(TypeError):
        dense(bias)
    dense(bias, bias_gradient=False)


def test_a_place_for_it_is_an_error():
    bias = np.zeros((H, L, L), np.float32)
    out, lse = cupyflash.attention(Q, K, V, bias=bias, return_lse=True)
    places = [np.empty_like(x) for x in (Q, K, V, bias)]
    arguments = DO, Q, K, V, out, lse
    with pytest.raises(ArgumentError, match=r"grads_out.dbias: got an array with bias_gradient=F"):
        cupyflash.attention_backward(*arguments, bias=bias, bias_gradient=False, grads_out=places)
    with pytest.raises(ArgumentTypeError, match="bias_gradient: got None; expected True or False"):
        cupyflash.attention_vjp(Q, K, V, bias=bias, bias_gradient=None)


def test_without_a_bias_it_says_nothing():
    _, vjp = cupyflash.attention_vjp(Q, K, V, bias_gradient=False)
    assert vjp(DO).dbias is None
