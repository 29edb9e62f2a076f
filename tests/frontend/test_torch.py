"""Attention on PyTorch's tensors: the bits of arrays, gradients, transforms, and refusals."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import fields

import numpy as np
import numpydoc.validate
import pytest
from test_public_api import PARAMETERS, SUMMARY

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, Rotary, lookup, masks, scores
from cupyflash.problem.options import Options

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

import cupyflash.torch  # noqa: E402 (after the skip)
from cupyflash.torch import attention, attention_cached, attention_varlen, rope  # noqa: E402 (after the skip)
from cupyflash.torch.tensors import array_of, empty_in_order_of  # noqa: E402 (after the skip)

CAUSAL = masks.causal()


def draw(*shape, dtype=torch.float32, grad=False, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    made = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    return made.requires_grad_(grad)


def qkv(dtype=torch.float32, grad=False):
    return [
        draw(*shape, dtype=dtype, grad=grad, seed=n)
        for n, shape in enumerate([(2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 4)])
    ]


def same(a, b):
    return np.array_equal(array_of(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


# -- the bits of arrays ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_tensors_give_the_bits_of_arrays(dtype):
    tensors = [*qkv(dtype, True), draw(4, 5, 6, grad=True), draw(4, dtype=dtype, grad=True)]
    options = {"mask": CAUSAL, "score_mod": [scores.softcap(3.0)], "dropout": 0.25, "seed": 7}
    out, lse = attention(*tensors[:3], bias=tensors[3], sink=tensors[4], return_lse=True, **options)
    (out * 3 + lse[..., None]).sum().backward()
    arrays = [array_of(x) for x in tensors]
    options |= {"bias": arrays[3], "sink": arrays[4]}
    wanted, wanted_lse, vjp = cupyflash.attention_vjp(*arrays[:3], return_lse=True, **options)
    assert out.dtype is dtype
    assert same(out, wanted)
    assert same(lse, wanted_lse)
    do = np.full(wanted.shape, 3, wanted.dtype)
    gradients = vjp(do, np.full(wanted_lse.shape, 4, wanted_lse.dtype))
    for x, gradient in zip(tensors, gradients, strict=True):
        assert same(x.grad, gradient)


def test_a_mask_may_be_a_tensor_and_read_tensors():
    q, k, v = qkv()
    dense = torch.arange(30).reshape(5, 6) % 3 != 0
    document = torch.tensor([0, 0, 1, 1, 1, 1])
    table = lookup(document)
    reading = masks.mask(lambda b, h, i, j: table[i] == table[j])
    arrays = [array_of(x) for x in (q, k, v)]
    assert same(attention(q, k, v, mask=dense), cupyflash.attention(*arrays, mask=dense.numpy()))
    before = attention(q, k, v, mask=reading)
    assert same(before, cupyflash.attention(*arrays, mask=reading))
    document[:] = 0  # it is read in place
    assert not torch.equal(attention(q, k, v, mask=reading), before)


def test_a_seed_may_be_a_tensor():
    q, k, v = qkv()
    number = attention(q, k, v, dropout=0.5, seed=5)
    assert torch.equal(attention(q, k, v, dropout=0.5, seed=torch.tensor(5)), number)
    assert not torch.equal(attention(q, k, v, dropout=0.5, seed=torch.tensor(6)), number)
    largest = attention(q, k, v, dropout=0.5, seed=2**64 - 1)
    assert torch.equal(attention(q, k, v, dropout=0.5, seed=torch.tensor(-1)), largest)


def test_packed_sequences():
    packed = draw(4, 9, 8, grad=True)
    offsets = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    out, lse = attention_varlen(
        packed, packed, packed, offsets, offsets, mask=CAUSAL, return_lse=True
    )
    out.square().sum().backward()
    array, places = array_of(packed), offsets.numpy()
    wanted, vjp = cupyflash.attention_varlen_vjp(array, array, array, places, places, mask=CAUSAL)
    dq, dk, dv, *_ = vjp(2 * wanted)
    assert same(out, wanted)
    assert lse.shape == (4, 9)
    torch.testing.assert_close(packed.grad, torch.from_numpy(dq + dk + dv))


def test_a_cache():
    q, k, v = draw(2, 4, 3, 8), draw(2, 2, 20, 8), draw(2, 2, 20, 8, seed=1)
    lengths = torch.tensor([9, 20])
    out, lse = attention_cached(q, k, v, lengths, mask=CAUSAL, return_lse=True)
    arrays = [array_of(x) for x in (q, k, v, lengths)]
    wanted = cupyflash.attention_cached(*arrays, mask=CAUSAL, return_lse=True)
    assert same(out, wanted[0])
    assert same(lse, wanted[1])
    with pytest.raises(ArgumentError, match=r"k: .*requires a gradient.*torch\.no_grad\(\)"):
        attention_cached(q, k.requires_grad_(), v, lengths)
    with torch.no_grad():
        assert torch.equal(attention_cached(q, k, v, lengths, mask=CAUSAL), out)


def test_results_have_the_memory_order_of_q():
    q = draw(2, 5, 4, 8).transpose(1, 2)
    assert attention(q, q, q).transpose(1, 2).is_contiguous()
    wide = draw(1, 4, 3, 5).permute(0, 2, 3, 1)  # in memory: 1, 4 (D), 3 (H), 5 (L)
    assert empty_in_order_of(wide, (1, 3, 5, 6)).stride()[1:] == (5, 1, 15)
    assert empty_in_order_of(wide, (7, 1, 3, 5, 4)).stride()[2:] == (5, 1, 15)
    assert empty_in_order_of(wide, (7, 1, 3, 5, 4)).stride(0) == 60
    repeated = draw(1, 2, 3).expand(4, 2, 3)
    assert empty_in_order_of(repeated, (4, 2, 3)).is_contiguous()


def test_autocast_converts_as_pytorch_does():
    q, k, v = qkv(grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v)
        double = attention(*(x.double() for x in (q, k, v)))
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert double.dtype is torch.float64
    out.sum().backward()
    assert q.grad.dtype is torch.float32


# -- derivatives ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fast_mode",
    [
        True,
        pytest.param(False, marks=pytest.mark.thorough("element by element; a direction is quick")),
    ],
)
def test_gradcheck(fast_mode):
    tensors = [*qkv(torch.float64, True), draw(4, 5, 6, dtype=torch.float64, grad=True)]
    tensors.append(draw(4, dtype=torch.float64, grad=True))

    def function(q, k, v, bias, sink):
        options = {"mask": CAUSAL, "score_mod": scores.softcap(5.0), "dropout": 0.2, "seed": 3}
        return attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=fast_mode)


def test_a_bias_that_wants_no_gradient_changes_no_other(monkeypatch):
    computed = []
    own = cupyflash.execute.backward

    def seen(*args):
        computed.append(own(*args))
        return computed[-1]

    monkeypatch.setattr(cupyflash.execute, "backward", seen)
    q, k, v = qkv(torch.float64, True)
    bias = draw(4, 5, 6, dtype=torch.float64)
    bias[:, 2, 3:] = -torch.inf
    options = {"mask": CAUSAL, "score_mod": scores.softcap(2.0)}
    found = torch.autograd.grad(attention(q, k, v, bias=bias, **options).sum(), (q, k, v))
    bias.requires_grad_()
    wanted = torch.autograd.grad(attention(q, k, v, bias=bias, **options).sum(), (q, k, v, bias))
    for a, b in zip(found, wanted[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    assert [gradients.dbias is None for gradients in computed] == [True, False]


def test_gradients_that_nobody_asks_for_are_not_there():
    q, k, v = qkv()
    assert attention(q, k, v).grad_fn is None
    v.requires_grad_()
    attention(q, k, v).sum().backward()
    assert q.grad is None
    assert v.grad is not None
    with torch.no_grad():
        assert attention(q, k, v).grad_fn is None


def test_tensors_that_changed_since_are_noticed():
    q, k, v = qkv(grad=True)
    doubled = q * 2
    out = attention(doubled, k, v)
    doubled += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# -- second derivatives ---------------------------------------------------------------------------


def third(q):
    def energy(x):
        return attention(x, x, x).square().sum()

    return torch.func.grad(lambda x: torch.func.hessian(energy)(x).sum())(q)


def forward_twice(q):
    def derivative(x):
        return torch.func.jvp(lambda y: attention(y, y, y), (x,), (torch.ones_like(x),))[1]

    return torch.func.jvp(derivative, (q,), (torch.ones_like(q),))


@pytest.mark.filterwarnings("default::DeprecationWarning")  # PyTorch's own, of its compiler
@pytest.mark.filterwarnings("default:.*torch.jit.script:FutureWarning")  # and from 2.14 on
@pytest.mark.parametrize(
    ("derivative", "words"),
    [(third, "third derivative"), (forward_twice, "two derivatives in forward mode")],
)
def test_other_derivatives_are_errors_that_name_the_remedy(derivative, words):
    with pytest.raises(ArgumentError, match=rf"{words}.*SDPBackend\.MATH"):
        derivative(draw(1, 2, 3, 4))


def math_attention(x):
    return torch.softmax(x @ x.mT / x.shape[-1] ** 0.5, -1) @ x


@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.filterwarnings("default:.*torch.jit.script:FutureWarning")
def test_the_modes_of_second_derivatives_agree():
    x, direction = draw(4, 3, dtype=torch.float64), draw(4, 3, dtype=torch.float64, seed=1)

    def energy(of):
        return lambda x: of(x).square().sum()

    def ours(x):
        return attention(x, x, x)

    wanted = torch.func.hessian(energy(math_attention))(x)
    twice = torch.func.jacrev(torch.func.jacrev(energy(ours)))
    for made in (torch.func.hessian(energy(ours)), twice):
        torch.testing.assert_close(made(x), wanted, rtol=0, atol=1e-12)

    def moved(of):
        def square(x):
            return torch.func.jvp(of, (x,), (direction,))[1].square().sum()

        return torch.func.grad(square)(x)

    torch.testing.assert_close(moved(ours), moved(math_attention), rtol=0, atol=1e-12)


# -- forward mode ---------------------------------------------------------------------------------

MOVES = {
    "causal": ({"mask": CAUSAL}, False),
    "everything": (
        {"mask": masks.window(3, 2), "score_mod": scores.softcap(2.0), "dropout": 0.3, "seed": 5},
        True,
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_both_modes_agree_with_differences(name):
    options, has_more = MOVES[name]
    operands = [x[:1, :, :3].detach().requires_grad_() for x in qkv(torch.float64)]
    if has_more:
        operands += [draw(4, 3, 3, dtype=torch.float64, grad=True)]
        operands += [draw(4, dtype=torch.float64, grad=True)]

    def function(q, k, v, bias=None, sink=None):
        return attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)

    assert torch.autograd.gradcheck(function, operands, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, operands, check_fwd_over_rev=True)


def test_forward_mode_has_the_bits_of_arrays():
    q, k, v = qkv()
    tq = draw(2, 4, 5, 3, seed=9)
    expected = cupyflash.attention_jvp(*(x.numpy() for x in (q, k, v, tq)), mask=masks.causal())
    out, tout = torch.func.jvp(lambda x: attention(x, k, v, mask=CAUSAL), (q,), (tq,))
    assert same(out, cupyflash.attention(*(x.numpy() for x in (q, k, v)), mask=CAUSAL))
    assert same(tout, expected[1])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, tq)
        made = torch.autograd.forward_ad.unpack_dual(attention(dual, k, v, mask=CAUSAL))
    assert same(made.tangent, expected[1])


def test_forward_mode_of_packed_sequences():
    q, k, v = draw(2, 9, 3), draw(2, 9, 3, seed=1), draw(2, 9, 4, seed=2)
    ends = torch.tensor([0, 4, 9])
    _, tout = torch.func.jvp(
        lambda x: attention_varlen(x, k, v, ends, ends, mask=CAUSAL), (q,), (v[..., :3],)
    )
    arrays = [x.numpy() for x in (q, k, v)]
    made = cupyflash.attention_varlen_jvp(
        *arrays, ends.numpy(), ends.numpy(), v[..., :3].numpy(), mask=CAUSAL
    )
    assert same(tout, made[1])


def test_jacobians_of_both_modes_are_equal():
    x = draw(4, 3, dtype=torch.float64)

    def function(x):
        return attention(x, x, x)

    ours, theirs = torch.func.jacfwd(function)(x), torch.func.jacrev(function)(x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


# -- torch.func -----------------------------------------------------------------------------------

BATCHED = {  # options -> whether all entries can be one call
    "causal": ({"mask": CAUSAL}, True),
    "lengths": ({"mask": masks.lengths([3, 5])}, False),
    "b": ({"mask": masks.mask(lambda b, h, i, j: (j + b) % 2 == 0)}, False),
    "alibi": ({"score_mod": scores.alibi(np.array([0.5, 0.25, 0.1, 0.0], np.float32))}, True),
    "dropout": ({"dropout": 0.5, "seed": 3}, False),
    "sink": ({"sink": torch.tensor([0.5, 1.0, -1.0, 0.0])}, True),
    "bias": ({"bias": torch.arange(30.0).reshape(5, 6) / 30}, True),
}


@pytest.mark.parametrize("name", BATCHED)
def test_vmap_is_a_loop(name, monkeypatch):
    options, one_call = BATCHED[name]
    q, k, v = draw(3, 2, 4, 5, 8), draw(2, 3, 2, 6, 8), draw(2, 6, 8)

    def function(q, k, v):
        return attention(q, k, v, **options)

    def loss(q, k, v):
        return function(q, k, v).square().sum()

    where = 0, 1, None
    calls = []
    own = cupyflash.execute.forward
    monkeypatch.setattr(cupyflash.execute, "forward", lambda *a: calls.append(a) or own(*a))
    found = torch.vmap(function, where)(q, k, v)
    assert len(calls) == (1 if one_call else 3)
    wanted = torch.stack([function(q[n], k[:, n], v) for n in range(3)])
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    gradients = torch.vmap(torch.func.grad(loss, (0, 1, 2)), where)(q, k, v)
    each = [torch.func.grad(loss, (0, 1, 2))(q[n], k[:, n], v) for n in range(3)]
    for gradient, parts in zip(gradients, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(gradient, torch.stack(parts), rtol=1e-5, atol=1e-5)
    outside = torch.func.grad(lambda *x: torch.vmap(loss, where)(*x).sum(), (0, 1, 2))(q, k, v)
    torch.testing.assert_close(outside[2], sum(part[2] for part in each), rtol=1e-5, atol=1e-5)


def test_vmap_of_matrices_and_of_operands_of_a_mask():
    x = draw(5, 4, 3)
    found = torch.vmap(lambda x: attention(x, x, x))(x)
    torch.testing.assert_close(found, attention(*[x[:, None]] * 3)[:, 0], rtol=0, atol=0)
    mask = torch.arange(80).reshape(5, 4, 4) % 3 != 0
    sinks = torch.arange(5.0)[:, None]
    found = torch.vmap(lambda x, m, s: attention(x, x, x, mask=m, sink=s))(x, mask, sinks)
    wanted = [attention(y, y, y, mask=m, sink=s) for y, m, s in zip(x, mask, sinks, strict=True)]
    torch.testing.assert_close(found, torch.stack(wanted), rtol=0, atol=0)


def test_jacobian():
    x = draw(4, 3, dtype=torch.float64)
    jacobian = torch.func.jacrev(lambda x: attention(x, x, x))(x)
    rows = [torch.func.grad(lambda x, n=n: attention(x, x, x).flatten()[n])(x) for n in range(12)]
    torch.testing.assert_close(jacobian.reshape(12, 4, 3), torch.stack(rows))


# -- refusals -------------------------------------------------------------------------------------


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2, 3)] * 2, layout=layout)


REFUSED = {
    "another device": ({"k": torch.ones(2, 2, 6, 3, device="meta")}, r"k: .*device meta.*\.to\("),
    "sparse": ({"k": torch.ones(2, 2, 6, 3).to_sparse()}, r"k: .*sparse.*\.to_dense\(\)"),
    "nested": ({"k": lambda: nested(torch.jagged)}, r"k: got a nested tensor.*attention_varlen"),
    "strided nested": ({"k": lambda: nested(torch.strided)}, r"k: got a nested.*attention_varlen"),
    "an array": ({"k": np.ones((2, 2, 6, 3))}, r"k: got ndarray.*torch\.as_tensor"),
    "another dtype": ({"k": torch.ones(2, 2, 6, 3).double()}, r"float64.*\.to\(torch\.float32\)"),
    "integers": ({"q": torch.ones(2, 4, 5, 3).int()}, r"q: got a tensor of torch\.int32"),
    "another shape": ({"q": torch.ones(2, 4, 5, 2)}, r"k: .*3 is not 2"),
    "a mask of floats": ({"mask": torch.ones(6)}, r"mask: .*bias="),
    "dropout without a seed": ({"dropout": 0.1}, r"dropout: .*seed=number"),
    "a seed of floats": ({"dropout": 0.1, "seed": torch.tensor(1.0)}, r"seed: .*0-d"),
    "an unknown option": ({"attn_mask": 1}, r"attn_mask: .*mask=array"),
    "return_lse": ({"return_lse": 1}, "return_lse: got 1"),
}


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_remedy(name):
    change, words = REFUSED[name]
    arguments = dict(zip("qkv", qkv(), strict=True)) | change
    arguments = {key: value() if callable(value) else value for key, value in arguments.items()}
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        attention(**arguments)


@pytest.mark.parametrize(
    "make", [scores.alibi, scores.relative_bias, masks.lengths, lookup], ids=lambda f: f.__name__
)
def test_no_gradient_flows_through_what_masks_and_scores_read(make):
    with pytest.raises(ArgumentTypeError, match=r"requires a gradient.*its \.detach\(\)"):
        make(torch.ones(3, requires_grad=True))


def test_meta_tensors_have_shapes():
    q, k, v = (x.to("meta") for x in qkv())
    out, lse = attention(q, k, v, mask=CAUSAL, return_lse=True)
    assert out.device.type == "meta"
    assert (out.shape, lse.shape) == ((2, 4, 5, 4), (2, 4, 5))
    lengths = torch.ones(2, dtype=torch.int32, device="meta")
    out, lse = attention_cached(q, k, v, lengths, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 4, 5, 4), (2, 4, 5))
    turns = Rotary(np.ones((4, 4)), np.ones((4, 4)))
    with pytest.raises(ArgumentTypeError, match="meta tensor"):
        rope(q, torch.arange(5, device="meta"), turns)


@pytest.mark.thorough("another process imports PyTorch; that cupyflash does not is quick")
def test_other_libraries_are_not_imported(tmp_path):
    program = "import cupyflash.torch, sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded & {"cupy", "jax", "transformers", "numba"} == set()


@pytest.mark.parametrize("function", [attention, attention_varlen], ids=lambda f: f.__name__)
def test_the_options_are_those_of_arrays(function):
    names = {
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    array_names = inspect.signature(getattr(cupyflash, function.__name__)).parameters
    wanted = {field.name for field in fields(Options)} | {"return_lse", "deterministic"}
    assert names == wanted | ({"check"} & set(array_names))


@pytest.mark.parametrize("name", cupyflash.torch.__all__)
def test_docstrings(name):
    checks = SUMMARY | PARAMETERS
    errors = numpydoc.validate.validate(f"cupyflash.torch.{name}")["errors"]
    assert not [text for code, text in errors if code in checks]
