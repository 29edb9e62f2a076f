"""Both modes and second derivatives of tensors, through every function that has gradients."""

from __future__ import annotations

import functools

import pytest
from halves import mostly_thorough

from cupyflash import masks

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash import torch as ours  # noqa: E402 (after the skip)

pytestmark = [  # PyTorch's own, of its compiler
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default:.*torch.jit.script:FutureWarning"),
]
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
CAUSAL = masks.causal()


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def packed(q, k, v):
    return ours.attention_varlen(q, k, v, ENDS, ENDS, mask=CAUSAL, return_lse=True)


def sdpa(q, k, v, bias):
    return ours.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def flash_varlen(q, k, v):
    return ours.flash_attn_varlen_func(q, k, v, ENDS, ENDS, 3, 3, causal=True)


FUNCTIONS = {  # shapes of q, k and v, and of a bias
    "packed": (packed, [(2, 5, 2), (1, 5, 2), (1, 5, 2)]),
    "sdpa": (sdpa, [(1, 2, 3, 2), (1, 1, 4, 2), (1, 1, 4, 2), (3, 4)]),
    "flash_attn": (
        functools.partial(ours.flash_attn_func, causal=True),
        [(1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 2)],
    ),
    "flash_attn_varlen": (flash_varlen, [(5, 2, 2), (5, 1, 2), (5, 1, 2)]),
}
BY_FUNCTION = mostly_thorough(
    "name", list(FUNCTIONS), quick=["packed", "sdpa"], why="others call the same rules"
)


@BY_FUNCTION
def test_both_modes_agree_with_differences(name):
    function, shapes = FUNCTIONS[name]
    operands = [draw(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(function, operands, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, operands, check_fwd_over_rev=True)


def math(q, k, v):
    s = q @ k.mT / q.shape[-1] ** 0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax(s.masked_fill(hidden, -torch.inf), -1) @ v


def attend(q, k, v):
    return ours.attention(q, k, v, mask=CAUSAL)


def test_hessians_of_all_operands():
    x = [draw(1, 3, 2, seed=n) for n in range(3)]

    def energy(of):
        return lambda *x: of(*x).pow(3).sum()

    made, wanted = (torch.func.hessian(energy(f), (0, 1, 2))(*x) for f in (attend, math))
    for row, right in zip(made, wanted, strict=True):
        torch.testing.assert_close(row, right, rtol=0, atol=1e-12)


def test_products_with_hessians_of_each_example():
    """vmap of a forward mode over a reverse mode, where keys and values are shared."""
    q, along = draw(3, 2, 4, 2), draw(3, 2, 4, 2, seed=1)
    k, v = (draw(2, 4, 2, seed=n) for n in (2, 3))

    def product(of):
        def each(q, t):
            return torch.func.jvp(torch.func.grad(lambda x: of(x, k, v).pow(3).sum()), (q,), (t,))[
                1
            ]

        return torch.func.vmap(each)(q, along)

    torch.testing.assert_close(product(attend), product(math), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_types_have_second_derivatives_of_their_type(dtype):
    x = [draw(1, 2, 5, 4, seed=n).to(dtype).requires_grad_() for n in range(3)]
    gradients = torch.autograd.grad(attend(*x).float().square().sum(), x, create_graph=True)
    found = torch.autograd.grad(sum(g.float().square().sum() for g in gradients), x)
    wide = [t.detach().double().requires_grad_() for t in x]
    exact = torch.autograd.grad(math(*wide).square().sum(), wide, create_graph=True)
    wanted = torch.autograd.grad(sum(g.square().sum() for g in exact), wide)
    for made, right in zip(found, wanted, strict=True):
        assert made.dtype is dtype
        assert (made.double() - right).norm() < 0.05 * right.norm()
