"""Attention on tensors in functions that torch.compile compiles, as one graph."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import ArgumentError, lookup, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import (  # noqa: E402 (after the skip)
    attention,
    attention_varlen,
    flash_attn_func,
    graph_inputs,
    operators,
    scaled_dot_product_attention,
)

# Dynamo says that it looks into functions with a cache, and inductor imports what is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.thorough("a compiler of C++; the graphs are the same")
    ),
]
BAND = masks.causal() & masks.window(2, 0)
CAP = scores.softcap(3.0)


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def agree(function, backend, *tensors):
    """Compare results and gradients, and return the compiled function."""
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for each in tensors:
        each.requires_grad_(each.is_floating_point())
    wanted = [x for x in tensors if x.requires_grad]
    ours, theirs = compiled(*tensors), function(*tensors)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    pair = [torch.autograd.grad(x.square().sum(), wanted) for x in (ours, theirs)]
    for a, b in zip(*pair, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    return compiled


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option_and_gradient(backend):
    def function(q, k, v, bias, sink, dense):
        options = {"bias": bias, "sink": sink, "dropout": 0.25, "seed": 2**64 - 5}
        x = attention(q * 2, k, v, mask=BAND, score_mod=[CAP], **options)
        y, lse = attention(q, k, v, mask=dense, return_lse=True)
        return x * y + lse[..., None]

    dense = torch.arange(30).reshape(5, 6) % 3 != 0
    shapes = [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), (4, 5, 6), (4,)]
    agree(function, backend, *(draw(*shape) for shape in shapes), dense)


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_lengths_that_change(backend):
    def function(x):
        q, k, v = (y.transpose(1, 2) for y in x.unbind(2))
        return attention(q, k, v, mask=BAND).transpose(1, 2).reshape(*x.shape[:2], -1)

    compiled = agree(function, backend, draw(2, 7, 3, 4, 8))
    for length in (9, 11):
        x = draw(2, length, 3, 4, 8)
        torch.testing.assert_close(compiled(x), function(x))


def test_constructors_may_stand_in_the_function():
    def function(x):
        y = attention(x, x, x, mask=masks.causal(), score_mod=scores.softcap(2.0))
        return y + attention(x, x, x, mask=masks.window(1, None))

    agree(function, "aot_eager", draw(4, 5, 8))


# Options made of a tensor of two integers.
READERS = {
    "lengths": lambda n: {"mask": masks.lengths(n)},
    "two lengths": lambda n: {"mask": masks.lengths(k_lengths=n, q_lengths=n)},
    "joined": lambda n: {"mask": masks.lengths(n) & masks.prefix(n + 1)},
    "joined with one that reads none": lambda n: {"mask": masks.lengths(n) & masks.causal()},
    "the other way round": lambda n: {"mask": masks.causal() & masks.lengths(n)},
    "one or the other": lambda n: {"mask": masks.window(1, 0) | ~masks.lengths(n)},
    "an offset": lambda n: {"mask": masks.causal(offset=n - 3)},
    "an array": lambda n: {"mask": masks.causal(offset=np.array([0, 2]))},
    "a window": lambda n: {"mask": masks.window(2, 0, n - 3)},
    "segments": lambda n: {"mask": masks.segments((torch.arange(8) >= n[:, None]).int())},
    "dense": lambda n: {"mask": masks.dense((torch.arange(8) < n[:, None])[:, None, None])},
    "a function": lambda n: {"mask": own(n)},
    "slopes": lambda n: {"score_mod": scores.alibi(n.float()[None, :1])},
    "slopes and a cap": lambda n: {
        "score_mod": scores.alibi(n.float()[None, :1]).then(scores.softcap(2.0))
    },
    "distances": lambda n: {"score_mod": scores.relative_bias(torch.cat([n, n, n])[1:].float())},
}


def own(n):
    table = lookup(n)
    return masks.mask(lambda b, h, i, j: j <= table[b])


@pytest.mark.parametrize("make", READERS.values(), ids=READERS)
def test_constructors_that_read_tensors_break_the_graph(make):
    """The results are those without compilation, of other lengths in each call, too."""

    def function(x, n):
        return 2 * attention(2 * x, x, x, **make(n))

    compiled = torch.compile(function, backend="aot_eager")
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    for n in (torch.tensor([2, 7]), torch.tensor([5, 3])):
        torch.testing.assert_close(compiled(x, n), function(x, n))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="make it outside of the compiled function"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(x, n)


def test_other_names():
    def function(x):
        y = scaled_dot_product_attention(x, x, x, is_causal=True)
        return y + flash_attn_func(x, x, x, causal=True, window_size=(2, 0), softcap=2.0)

    agree(function, "aot_eager", draw(2, 4, 4, 8))


@pytest.mark.thorough("compiles twice more; both are quick without torch.compile")
def test_packed_sequences_and_vmap():
    offsets = torch.tensor([0, 2, 5])
    agree(
        lambda x: attention_varlen(x, x, x, offsets, offsets, mask=BAND), "aot_eager", draw(4, 5, 8)
    )
    agree(
        lambda x: torch.vmap(lambda y: attention(y, y, y, mask=BAND))(x), "aot_eager", draw(4, 5, 8)
    )


def test_another_mask_is_another_graph():
    function = torch.compile(
        lambda x, mask: attention(x, x, x, mask=mask), fullgraph=True, backend="aot_eager"
    )
    x = draw(2, 5, 8)
    for mask in (BAND, masks.causal(2), None, BAND):
        torch.testing.assert_close(function(x, mask), attention(x, x, x, mask=mask))


def test_the_operators_are_sound():
    """PyTorch's own check of an operator: its schema, gradients, fake kernel and strides."""
    q = draw(2, 5, 4, 8).transpose(1, 2).requires_grad_()
    k, v = draw(2, 2, 6, 8).requires_grad_(), draw(2, 2, 6, 3).requires_grad_()
    bias = draw(4, 5, 6).requires_grad_()
    number = operators._number(None, None, False, True, id(BAND))
    rest = [], [number], 0.25, True, 3
    torch.library.opcheck(
        torch.ops.cupyflash.attention.default, (q, k, v, bias, *(None,) * 5, *rest)
    )
    parts = graph_inputs._parts(masks.lengths(np.array([3, 5])) & masks.causal(2))
    number = operators._number(None, None, False, True, parts.text)
    rest = [*parts.tables], [number, *parts.integers], 0.25, True, 3
    torch.library.opcheck(
        torch.ops.cupyflash.attention.default, (q, k, v, bias, *(None,) * 5, *rest)
    )


def test_a_graph_of_another_process_is_refused():
    x = draw(2, 5, 8)
    with pytest.raises(ArgumentError, match="another process"):
        torch.ops.cupyflash.attention(x, x, x, *(None,) * 6, [], [10**9], 0.0, False, 0)
