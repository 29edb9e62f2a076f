"""Learned look-ups of tensors: gradients by autograd, and errors where there are none."""

import copy

import numpy as np
import pytest
from placement import same_bits

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, lookup, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash import torch as ours  # noqa: E402 (after the skip)

pytestmark = [  # PyTorch's own, of its compiler
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.filterwarnings("default:.*torch.jit.script:FutureWarning"),
]


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()


def qkv(dtype=torch.float64):
    shapes = (2, 4, 7, 3), (2, 2, 9, 3), (2, 2, 9, 3)
    return [draw(*shape, seed=n, dtype=dtype) for n, shape in enumerate(shapes)]


def tables(dtype=torch.float64):
    cap = torch.tensor(2.0, dtype=dtype, requires_grad=True)
    return [cap, draw(4, seed=3, dtype=dtype), draw(4, 5, seed=4, dtype=dtype)]


def changes_of(cap, slopes, distances):
    cap, slopes, distances = (lookup(x, learned=True) for x in (cap, slopes, distances))
    return [scores.softcap(cap), scores.alibi(slopes), scores.relative_bias(distances)]


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_gradients_agree_with_differences(kind):
    operands, learned = qkv(), tables()
    changes = changes_of(*learned)
    how = {"score_mod": changes, "mask": masks.causal(), "return_lse": True, "dropout": 0.2}
    bias, sink = draw(4, 7, 9, seed=5), draw(4, seed=6)

    def dense(q, k, v, bias, sink, *_):
        return ours.attention(q, k, v, bias=bias, sink=sink, seed=3, **how)

    ends = torch.tensor([0, 2, 7])

    def packed(q, k, v, bias, sink, *_):
        rows = q[0], k[0, :, :7], v[0, :, :7]
        return ours.attention_varlen(*rows, ends, ends, sink=sink, seed=3, **how)

    function = dense if kind == "dense" else packed
    assert torch.autograd.gradcheck(function, (*operands, bias, sink, *learned))
    if kind == "dense":
        out, lse = function(*operands, bias, sink)
        (out.sum() + lse.square().sum()).backward()
        assert all((x.grad != 0).any() for x in (*operands, bias, sink, *learned))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_arrays(dtype):
    operands, learned = qkv(dtype), tables(dtype)
    for _ in range(3):  # the second one is recognised
        out = ours.attention(*operands, score_mod=changes_of(*learned))
        made = torch.autograd.grad(out, [*operands, *learned], torch.ones_like(out))
    arrays = [ours.tensors.array_of(x) for x in operands]
    held = [lookup(ours.tensors.array_of(x), learned=True) for x in learned]
    changes = [
        scores.softcap(held[0]), scores.alibi(held[1]), scores.relative_bias(held[2]),
    ]  # fmt: skip
    same, vjp = cupyflash.attention_vjp(*arrays, score_mod=changes)
    gradients = vjp(np.ones_like(same))
    expected = [*gradients[:3], *(gradients.dlookups[table] for table in held)]
    for ours_, theirs in zip(made, expected, strict=True):
        assert ours_.dtype == dtype
        assert same_bits(ours.tensors.array_of(ours_), theirs)


def test_a_step_of_an_optimiser_is_seen():
    operands, (cap, slopes, distances) = qkv(), tables()
    changes = changes_of(cap, slopes, distances)
    optimiser = torch.optim.SGD([slopes, distances], lr=0.01)
    losses = []
    for _ in range(5):
        loss = ours.attention(*operands, score_mod=changes).square().sum()
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    with torch.no_grad():
        fresh = ours.attention(*operands, score_mod=changes_of(cap, slopes, distances))
        assert torch.equal(ours.attention(*operands, score_mod=changes), fresh)


def test_only_what_wants_a_gradient_has_one():
    operands, (cap, slopes, distances) = qkv(), tables()
    q, k, v = (x.detach() for x in operands)
    cap.requires_grad_(False)
    out = ours.attention(q, k, v, score_mod=changes_of(cap, slopes, distances))
    assert out.requires_grad
    out.sum().backward()
    assert slopes.grad is not None
    assert cap.grad is None is q.grad
    slopes.requires_grad_(False)
    distances.requires_grad_(False)
    frozen = changes_of(cap, slopes, distances)
    assert not ours.attention(q, k, v, score_mod=frozen).requires_grad
    (dq,) = torch.autograd.grad(ours.attention(*operands, score_mod=frozen).sum(), operands[:1])
    plain = [scores.softcap(2.0), scores.alibi(slopes), scores.relative_bias(distances)]
    (expected,) = torch.autograd.grad(
        ours.attention(*operands, score_mod=plain).sum(), operands[:1]
    )
    assert torch.allclose(dq, expected, rtol=1e-12)


def test_other_memory_is_an_error():
    operands, (_, slopes, _) = qkv(), tables()
    alibi = scores.alibi(lookup(slopes, learned=True))
    out = ours.attention(*operands, score_mod=alibi)
    with torch.no_grad():
        slopes.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    slopes.data = slopes.data.clone()
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, pytest.raises(ArgumentError, match=r"other memory.*lookup\(tensor, learned=T"):
            ours.attention(*operands, score_mod=alibi)
    ours.attention(*operands, score_mod=scores.alibi(lookup(slopes, learned=True)))
    moved = copy.deepcopy(alibi)
    with pytest.raises(ArgumentError, match="other memory"):
        ours.attention(*operands, score_mod=moved)


def test_derivatives_that_there_are_not():
    operands, (_, slopes, _) = qkv(), tables()
    q, k, v = operands
    alibi = scores.alibi(lookup(slopes, learned=True))

    def call(q):
        return ours.attention(q, k, v, score_mod=alibi)

    (dq,) = torch.autograd.grad(call(q).sum(), [q], create_graph=True)
    with pytest.raises(ArgumentError, match=r"second derivative.*learned.*bias="):
        dq.sum().backward()
    with pytest.raises(ArgumentTypeError, match=r"transform of torch\.func.*bias="):
        torch.func.grad(lambda q: call(q).sum())(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ArgumentError, match=r"forward mode.*learned.*bias="):
            call(dual)
    # What a look-up adds to the scores, as a bias.
    far = (torch.arange(7)[:, None] + 2 - torch.arange(9)).abs()
    bias = -slopes[:, None, None] * far
    out = ours.attention(q, k, v, bias=bias)
    assert torch.allclose(out, call(q), rtol=1e-9)
    pair = [torch.autograd.grad(each.sum(), [slopes])[0] for each in (out, call(q))]
    assert torch.allclose(*pair, rtol=1e-9)


def test_what_has_no_gradient():
    operands = qkv()
    alibi = scores.alibi(lookup(np.ones(4), learned=True))
    with pytest.raises(ArgumentTypeError, match=r"arrays in calls on tensors.*lookup\(tensor, l"):
        ours.attention(*operands, score_mod=alibi).sum().backward()
    slopes = torch.ones(4, requires_grad=True)
    for make in (lookup, scores.alibi):
        with pytest.raises(ArgumentTypeError, match=r"lookup\(tensor, learned=True\)"):
            make(slopes)


@pytest.mark.filterwarnings("default:The .grad attribute:UserWarning")  # PyTorch's own
def test_compiled_functions_refuse_them():
    operands = qkv(torch.float32)
    slopes = draw(4, dtype=torch.float32)
    alibi = scores.alibi(lookup(slopes, learned=True))

    def call(q, k, v):
        return ours.attention(q, k, v, score_mod=alibi)

    with pytest.raises(Exception, match=r"torch\.compiler\.disable"):
        torch.compile(call, backend="eager", fullgraph=True)(*operands)
    disabled = torch.compiler.disable(call)  # as the error says
    outer = torch.compile(lambda q, k, v: 2 * disabled(q, k, v), backend="eager")
    outer(*operands).sum().backward()
    assert slopes.grad is not None


def test_calls_over_a_cache_refuse_them():
    q, k, v = (x.detach() for x in qkv())
    alibi = scores.alibi(lookup(tables()[1], learned=True))
    for _ in range(3):
        with torch.no_grad():
            ours.attention_cached(q[:, :, :1], k, v, 5, score_mod=alibi)
        with pytest.raises(
            ArgumentError, match=r"score_mod: got a tensor that requires a gradient"
        ):
            ours.attention_cached(q[:, :, :1], k, v, 5, score_mod=alibi)
