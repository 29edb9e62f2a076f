"""torch.func.vmap over any of the tensors of a call: the results and gradients of a loop."""

from __future__ import annotations

import itertools

import pytest
from halves import mostly_thorough

from cupyflash import masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from torch.nn.functional import scaled_dot_product_attention as pytorch  # noqa: E402 (after the skip)

import cupyflash.torch  # noqa: E402 (after the skip)
from cupyflash.torch import (  # noqa: E402 (after the skip)
    attention,
    attention_cached,
    flash_attn_func,
    flash_attn_varlen_func,
    scaled_dot_product_attention,
)

NAMES = ("q", "k", "v", "bias", "mask", "sink")
SHAPES = {  # of one call
    "four axes": [(2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 4), (4, 5, 6), (2, 1, 5, 6), (4,)],
    "several ranks": [(4, 5, 8), (2, 2, 6, 8), (2, 6, 4), (2, 4, 5, 6), (5, 6), (4,)],
    "matrices": [(5, 8), (6, 8), (6, 4), (5, 6), (5, 6), (1,)],
    "matrices and heads": [(5, 8), (1, 6, 8), (6, 4), (5, 6), (6,), (1,)],
    "five axes": [(3, 1, 4, 5, 8), (2, 2, 6, 8), (2, 6, 4), (3, 2, 4, 5, 6), (5, 6), (4,)],
}
COUNT = 3  # entries of a mapped axis
close = torch.testing.assert_close


def draw(*shape, boolean=False):
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    made = torch.randn(shape, dtype=torch.float64, generator=generator)
    return made < 0.5 if boolean else made


def subsets(names):
    return itertools.chain.from_iterable(
        itertools.combinations(names, count) for count in range(1, len(names) + 1)
    )


def compare(shapes, names, mapped):
    """Compare a call of which `mapped` have one more axis, at varying places, with a loop."""
    tensors, places = [], []
    for n, name in enumerate(names):
        shape, place = shapes[name], None
        if name in mapped:
            place = n % (len(shape) + 1)
            shape = (*shape[:place], COUNT, *shape[place:])
        tensors.append(draw(*shape, boolean=name == "mask"))
        places.append(place)

    def call(*args):
        options = {"mask": masks.causal()} | dict(zip(names, args, strict=True))
        return attention(**options, return_lse=True)

    def loss(*args):
        out, lse = call(*args)
        return out.square().sum() + lse.where(lse.isfinite(), 0).sum()

    entries = [
        [
            x if place is None else x.select(place, n)
            for x, place in zip(tensors, places, strict=True)
        ]
        for n in range(COUNT)
    ]
    wanted = zip(*(call(*entry) for entry in entries), strict=True)
    for found, parts in zip(torch.vmap(call, tuple(places))(*tensors), wanted, strict=True):
        close(found, torch.stack(parts))
    floats = tuple(n for n, name in enumerate(names) if name != "mask")
    gradient = torch.func.grad(loss, floats)
    wanted = [torch.stack(x) for x in zip(*(gradient(*entry) for entry in entries), strict=True)]
    inside = torch.vmap(gradient, tuple(places))(*tensors)
    outside = torch.func.grad(lambda *x: torch.vmap(loss, tuple(places))(*x).sum(), floats)(
        *tensors
    )
    for n, each, found, total in zip(floats, wanted, inside, outside, strict=True):
        close(found, each)
        close(total, each.sum(0) if places[n] is None else each.movedim(0, places[n]))


@mostly_thorough(
    "kind", SHAPES, quick=["several ranks"], why="the same table for tensors of other ranks"
)
def test_every_subset_of_the_tensors_is_a_loop(kind):
    shapes = dict(zip(NAMES, SHAPES[kind], strict=True))
    for mapped in subsets(NAMES):
        compare(shapes, NAMES, mapped)


@pytest.mark.thorough("some tensors are absent; all of them are quick")
@pytest.mark.parametrize("kind", SHAPES)
def test_every_subset_of_fewer_tensors_is_a_loop(kind):
    shapes = dict(zip(NAMES, SHAPES[kind], strict=True))
    for absent in subsets(NAMES[3:]):
        names = tuple(name for name in NAMES if name not in absent)
        for mapped in subsets(names):
            compare(shapes, names, mapped)


@pytest.mark.parametrize("mapped", ["bias", "mask", "seed"])
def test_what_is_mapped_alone_is_one_call(mapped, monkeypatch):
    calls = []
    own = cupyflash.execute.forward
    monkeypatch.setattr(cupyflash.execute, "forward", lambda *a: calls.append(a) or own(*a))
    q, k = draw(2, 4, 5, 8), draw(2, 4, 6, 8)
    each = {"bias": draw(3, 5, 6), "mask": draw(3, 5, 6, boolean=True), "seed": torch.arange(3)}
    found = torch.vmap(lambda x: attention(q, k, k, **{mapped: x}))(each[mapped])
    assert len(calls) == 1
    close(found, torch.stack([attention(q, k, k, **{mapped: x}) for x in each[mapped]]))


def test_a_mapped_seed_drops_other_pairs_in_each_entry():
    q, seeds = draw(2, 4, 5, 8), torch.tensor([3, 4, 3])
    found = torch.vmap(lambda seed: attention(q, q, q, dropout=0.5, seed=seed))(seeds)
    close(found, torch.stack([attention(q, q, q, dropout=0.5, seed=int(n)) for n in seeds]))
    assert not torch.equal(found[0], found[1])


Q, K = draw(2, 4, 9, 8), draw(2, 4, 11, 8)
BIAS = draw(3, 4, 9, 11)
KEEP = draw(3, 1, 9, 11, boolean=True)


def squares(function):
    return torch.func.grad(lambda x: function(Q, K, K, attn_mask=x).square().sum())


TRANSFORMS = {
    "a bias": lambda f: torch.vmap(lambda x: f(Q, K, K, attn_mask=x))(BIAS),
    "a mask": lambda f: torch.vmap(lambda x: f(Q, K, K, attn_mask=x))(KEEP),
    "in chunks": lambda f: torch.vmap(lambda x: f(Q, K, K, attn_mask=x), chunk_size=2)(BIAS),
    "the gradient": lambda f: torch.vmap(squares(f))(BIAS),
    "a Jacobian": lambda f: torch.func.jacrev(lambda x: f(Q, K, K, attn_mask=x).sum(-1))(BIAS[0]),
    "Jacobians": lambda f: torch.vmap(
        torch.func.jacrev(lambda x: f(Q, K, K, attn_mask=x)[..., 0].square().sum((0, 2)))
    )(BIAS),
    "a map in a map": lambda f: torch.vmap(
        torch.vmap(lambda x, y: f(Q, K, K, attn_mask=x.where(y, -10.0)), (None, 0)), (0, None)
    )(BIAS, KEEP),
    "a query outside": lambda f: torch.vmap(
        torch.vmap(lambda q, x: f(q, K[0], K[0], attn_mask=x), (None, 0)), (0, None)
    )(Q, BIAS),
}


@pytest.mark.filterwarnings("default:There is a performance drop")  # of PyTorch's own function
@pytest.mark.parametrize("name", TRANSFORMS)
def test_compositions_are_those_of_pytorch(name):
    close(*(TRANSFORMS[name](f) for f in (scaled_dot_product_attention, pytorch)))


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize("tensor", [BIAS, KEEP], ids=["bias", "mask"])
def test_a_compiled_function_maps_a_bias_or_a_mask(tensor):
    results = []
    for function in (scaled_dot_product_attention, pytorch):
        torch._dynamo.reset()

        def mapped(q, x, function=function):
            return torch.vmap(lambda x: function(q, K, K, attn_mask=x))(x)

        compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
        wanted = [Q.clone().requires_grad_(), tensor.clone()]
        if tensor is BIAS:
            wanted[1].requires_grad_()
        out = compiled(*wanted)
        leaves = [x for x in wanted if x.requires_grad]
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    close(*results)


def test_packed_sequences_map_their_offsets():
    x = draw(9, 4, 8)
    places = torch.tensor([[0, 4, 9], [0, 2, 9]], dtype=torch.int32)

    def call(offsets):
        return flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9)

    close(torch.vmap(call)(places), torch.stack([call(offsets) for offsets in places]))


ROWS = Q.transpose(1, 2)
REFUSED = {
    "slopes": (lambda x: flash_attn_func(ROWS, ROWS, ROWS, alibi_slopes=x), draw(3, 4)),
    "an array of a score": (lambda x: attention(Q, K, K, score_mod=scores.alibi(x)), draw(3, 4)),
    "an array of a mask": (
        lambda x: attention(Q, K, K, mask=masks.lengths(x)), torch.ones(3, 2, dtype=torch.int32),
    ),
    "queries over a cache": (lambda x: attention_cached(x, K, K, 11), draw(3, 2, 4, 1, 8)),
    "lengths of a cache": (
        lambda x: attention_cached(Q, K, K, x), torch.full((3, 2), 9, dtype=torch.int32),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_refused_by_name(name):
    function, x = REFUSED[name]
    with pytest.raises(cupyflash.ArgumentTypeError, match=r"torch\.vmap.*loop"):
        torch.vmap(function)(x)
    torch.stack([function(each) for each in x])  # which is the remedy
