"""Calls of tensors on a CPU that look like an earlier one: recognised by the tensors alone."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import types
import weakref

import numpy as np
import pytest
from forks import fork
from other_path import OtherPathError, only_again
from placement import same_bits

from cupyflash import ArgumentError, ArgumentTypeError, masks, scores
from cupyflash.backends.cpu_tiles import FEWEST_KEYS
from cupyflash.problem import replay

torch = pytest.importorskip("torch")
from cupyflash.torch import (  # noqa: E402
    attention,
    attention_cached,
    attention_varlen,
    recognised_cpu,
    transformers,
)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Nothing is known of calls before a test, which has one thread."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "1")
    monkeypatch.setattr(replay, "_entries", {})
    empty = {}
    monkeypatch.setattr(recognised_cpu, "_known", empty)
    return empty


@contextlib.contextmanager
def never_again():
    """Let every call be made otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recognised_cpu.Known, "launch", lambda *_: None)
        yield


def drawn(*shapes, dtype=torch.float32, seed=0):
    rng = np.random.default_rng(seed)
    made = [torch.from_numpy(rng.standard_normal(shape, np.float32)).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


QKV = (2, 4, 20, 16), (2, 2, 30, 16), (2, 2, 30, 24)
ROWS = torch.tensor([0, 7, 7, 20])
MASK = torch.from_numpy(np.random.default_rng(1).random((2, 1, 20, 30)) < 0.7)


def of(*shapes, dtype=torch.float32, function=attention, **options):
    """Return what makes a call of new tensors and its gradients; a fourth shape is a bias's."""

    def call(seed=0):
        q, k, v, *bias = tensors = drawn(*(shapes or QKV), dtype=dtype, seed=seed)
        named = {"bias": bias[0], **options} if bias else options
        out = function(q, k, v, **named)
        return out, *torch.autograd.grad(out, tensors, torch.ones_like(out).cumsum(-1))

    return call


def of_layer(is_contiguous=False, mask=None, dropout=0.0):
    """Return the same for a layer of transformers, whose output has rows before heads."""

    def call(seed=0):
        (x,) = drawn((3, 2, 20, 4, 16), seed=seed)
        torch.manual_seed(seed)
        q, *kv = x.transpose(2, 3)
        qkv = [q.contiguous() if is_contiguous else q, *(y.contiguous() for y in kv)]
        module = types.SimpleNamespace(is_causal=True)
        out = transformers.attention_forward(module, *qkv, mask, dropout=dropout)[0]
        assert (out.shape, out.is_contiguous()) == ((2, 20, 4, 16), True)
        call.nodes.append(out.grad_fn.name())
        return out, *torch.autograd.grad(out, x, torch.ones_like(out).cumsum(-1))

    call.nodes = []
    return call


def of_views(seed=0):
    (x,) = drawn((2, 20, 3, 4, 16), seed=seed)
    out = attention(*x.movedim(2, 0).transpose(-3, -2), mask=masks.causal())
    return out, *torch.autograd.grad(out, x, torch.ones_like(out))


KINDS = {
    "plain": of(),
    "causal": of(mask=masks.causal()),
    "window": of(mask=masks.window(5, 2)),
    "matrices": of((20, 16), (30, 16), (30, 16)),
    "float64": of(dtype=torch.float64),
    "float16": of(dtype=torch.float16, mask=masks.causal()),
    "bfloat16": of(dtype=torch.bfloat16),
    "views": of_views,
    "bias": of(*QKV, (4, 20, 30)),
    "bias of one head": of(*QKV, (1, 20, 30), mask=masks.causal()),
    "Booleans": of(mask=MASK),
    "bias and Booleans": of(*QKV, (2, 4, 20, 30), mask=MASK),
    "lengths": of(mask=masks.lengths(np.array([30, 11]))),
    "soft cap": of(score_mod=scores.softcap(3.0)),
    "scale": of(scale=-0.3),
    "dropout": of(dropout=0.3, seed=7),
    "layer": of_layer(),
    "layer of copies": of_layer(is_contiguous=True),
    "layer with a mask": of_layer(mask=MASK[..., :20]),
    "layer with dropout": of_layer(dropout=0.3),
    "many entries": of((70, 4, 9, 16), (70, 4, 9, 16), (70, 4, 9, 16)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_of_a_checked_call(kind):
    call = KINDS[kind]
    wanted = call(1)
    call(2)  # gradients are known from the first one on that a recognised call has asked for
    with only_again():
        for seed in 3, 1:
            results = call(seed)
    for wants, has in zip(wanted, results, strict=True):
        assert has.stride() == wants.stride() or has.ndim == 4
        assert same_bits(wants.detach().double().numpy(), has.detach().double().numpy())


@pytest.mark.parametrize(("is_contiguous", "node"), [(False, "_Replayed"), (True, "Clone")])
def test_no_view_is_recorded_of_a_layer(is_contiguous, node):
    """Of a recognised one: the output of copies of heads lies as they do, and is copied."""
    call = of_layer(is_contiguous)
    for seed in range(4):
        call(seed)
    assert call.nodes[-1].startswith(node)
    call = of_layer(is_contiguous)
    with never_again():
        has = call(3)
    for one, other in zip(call(3), has, strict=True):
        assert same_bits(one.detach().numpy(), other.detach().numpy())


def test_sequences_one_after_the_other():
    q, k, v = drawn((4, 20, 16), (2, 20, 16), (2, 20, 16))
    with torch.no_grad():
        wanted = attention_varlen(q, k, v, ROWS, ROWS)
        with only_again():
            assert same_bits(attention_varlen(q, k, v, ROWS, ROWS).numpy(), wanted.numpy())
            with pytest.raises(OtherPathError):
                attention_varlen(q, k, v, ROWS + torch.tensor([0, 1, 2, 0]), ROWS)


def test_a_log_sum_exp_has_its_gradient():
    def call():
        tensors = drawn(*QKV)
        out, lse = attention(*tensors, return_lse=True)
        return out, lse, *torch.autograd.grad(out.sum() + (lse * lse).sum(), tensors)

    wanted = call()
    for has, wants in zip(call(), wanted, strict=True):
        assert same_bits(has.detach().numpy(), wants.detach().numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
def test_one_query_has_any_number_of_keys(heads, dtype):
    q, k, v = drawn((3, 4, 1, 16), (3, heads, 700, 16), (3, heads, 700, 24), dtype=dtype)
    counts = 5, 1, 64, 65, FEWEST_KEYS - 1
    pairs = [(k[:, :, :n], v[:, :, :n].contiguous()) for n in counts]
    with torch.no_grad():
        with never_again():
            wanted = [attention(q, *pair) for pair in pairs]
        with only_again():
            for pair, wants in zip(pairs, wanted, strict=True):
                has = attention(q, *pair)
                assert same_bits(has.float().numpy(), wants.float().numpy())
            for wrong in (k, v), (k[:, :, :0], v[:, :, :0]), (k[:, :, :9], v[:, :, :8]):
                with pytest.raises(OtherPathError):
                    attention(q, *wrong)


def test_one_query_that_drops_pairs_has_one_number_of_keys():
    q, k, v = (x.detach() for x in drawn((3, 4, 1, 16), (3, 4, 70, 16), (3, 4, 70, 16)))
    for _ in range(2):
        for n in 70, 9:
            has = attention(q, k[:, :, :n], v[:, :, :n], dropout=0.4, seed=3)
            with never_again():
                wanted = attention(q, k[:, :, :n], v[:, :, :n], dropout=0.4, seed=3)
            assert same_bits(has.numpy(), wanted.numpy())


@pytest.mark.parametrize("lengths", [600, torch.tensor([600])])
def test_one_query_over_many_keys_and_over_a_cache(lengths):
    q, k, v = drawn((1, 4, 1, 16), (1, 4, 700, 16), (1, 4, 700, 16))
    grown = k[:, :, :600].contiguous(), v[:, :, :600].contiguous()
    with torch.no_grad():
        for _ in range(4):
            wanted = attention(q, *grown), attention_cached(q, k, v, lengths)
        with only_again():
            results = attention(q, *grown, scale=0.25), attention_cached(q, k, v, lengths)
        for has, wants in zip(results, wanted, strict=True):
            assert same_bits(has.numpy(), wants.numpy())
    with pytest.raises(ArgumentError, match="no gradient flows"):
        attention_cached(q, k, v, lengths)


def unlike():
    q, k, v = (x.detach() for x in drawn(*QKV))
    negative = torch._neg_view(-q)
    assert negative.is_neg()
    yield "a negative view", negative, k, v
    yield "another dtype", q.double(), k.double(), v.double()
    yield "another shape", q[:, :, :19], k, v
    yield "other strides", q.transpose(1, 2).contiguous().transpose(1, 2), k, v
    yield "a broadcast entry", q, k[:1], v[:1]


@pytest.mark.parametrize("case", [*unlike()], ids=lambda case: case[0])
def test_other_tensors_are_another_call(case):
    _, q, k, v = case
    like = [x.detach() for x in drawn(*QKV)]
    for _ in range(3):
        attention(*like)
    with never_again():
        wanted = attention(q, k, v)
    has = attention(q, k, v)
    assert same_bits(has.numpy(), wanted.numpy())


def test_what_is_refused_after_a_recognised_call():
    q, k, v = (x.detach() for x in drawn(*QKV))
    for _ in range(3):
        attention(q, k, v)
    refused = pytest.raises((ArgumentError, ArgumentTypeError))
    for wrong in k.to("meta"), k.half(), k[..., :8], k.numpy(), k.to_sparse():
        with refused:
            attention(q, wrong, v)
    half, pair = torch.zeros(20, 30).numpy(), np.array([0.1, 0.2])
    for options in {"bias": half}, {"dropout": pair}, {"scale": pair}, {"seed": pair}, {"mask": q}:
        with refused:
            attention(q, k, v, **options)
        with refused:
            attention(q[:, :, :1], k, v, **options)


def test_contents_of_a_mask_may_change():
    q, k, v = (x.detach() for x in drawn(*QKV))
    mask = MASK.clone()
    for _ in range(2):
        attention(q, k, v, mask=mask)
    for _ in range(3):
        for fill in True, False:
            mask[0] = fill
            mask[1] = MASK[1] if fill else fill
            with never_again():
                wanted = attention(q, k, v, mask=mask)
            assert same_bits(attention(q, k, v, mask=mask).numpy(), wanted.numpy())


def test_gradients_of_other_strides_and_of_hooks():
    tensors = drawn(*QKV)

    def call(do, pack=lambda x: x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention(*tensors)
        return torch.autograd.grad(out, tensors, do)

    do = torch.ones(2, 4, 20, 24).cumsum(-1)
    wanted = call(do)
    for _ in range(2):
        call(do)
    others = (do.transpose(1, 2).contiguous().transpose(1, 2), torch.clone), (do, torch.clone)
    for other, pack in (*others, (do.double().float(), lambda x: x)):
        for has, wants in zip(call(other, pack), wanted, strict=True):
            assert same_bits(has.numpy(), wants.numpy())


def test_second_derivatives_are_those_of_a_checked_call(monkeypatch):
    tensors = drawn(*QKV, dtype=torch.float64)

    def second():
        out = attention(*tensors, mask=masks.causal())
        first = torch.autograd.grad(out, tensors, out.detach(), create_graph=True)
        return torch.autograd.grad([(x * x).sum() for x in first], tensors)

    for _ in range(3):
        out = attention(*tensors, mask=masks.causal())
        torch.autograd.grad(out.sum(), tensors)
    made = second()

    def refuse(*_):
        raise recognised_cpu.UnlikeError

    monkeypatch.setattr(recognised_cpu, "Signature", refuse)
    for has, wants in zip(made, second(), strict=True):
        assert same_bits(has.numpy(), wants.numpy())


def test_what_is_forgotten_is_checked_again(known, monkeypatch):
    call = KINDS["plain"]
    wanted = call(), call(), call()
    replay._entries.clear()
    gc.collect()
    with only_again(), pytest.raises(OtherPathError):
        call()
    for has, wants in zip(call(), wanted[0], strict=True):
        assert same_bits(has.detach().numpy(), wants.detach().numpy())
    monkeypatch.setattr(recognised_cpu, "MOST", 8)
    for n in range(2, 40):
        attention(*(x.detach() for x in drawn((1, 1, n, 8), (1, 1, n, 8), (1, 1, n, 8))))
    assert len(known) <= 8


def test_no_tensor_is_kept_alive():
    tensors = drawn(*QKV)
    for _ in range(3):
        attention(*tensors).sum().backward()
    died = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert all(x() is None for x in died)


def test_many_threads_make_the_same_call():
    call = KINDS["bias"]
    wanted = call(), call(), call()
    wrong = []

    def make():
        for _ in range(20):
            for has, wants in zip(call(), wanted[0], strict=True):
                if not same_bits(has.detach().numpy(), wants.detach().numpy()):
                    wrong.append(has)

    several = [threading.Thread(target=make) for _ in range(6)]
    for each in several:
        each.start()
    for each in several:
        each.join()
    assert not wrong


def test_another_number_of_threads_is_heeded(monkeypatch):
    call = KINDS["many entries"]
    wanted = call(), call(), call()
    for number in "2", "1", "2":
        monkeypatch.setenv("CUPYFLASH_NUM_THREADS", number)
        for has, wants in zip(call(), wanted[0], strict=True):
            assert same_bits(has.detach().numpy(), wants.detach().numpy())
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", "none")
    with pytest.raises(ValueError, match="CUPYFLASH_NUM_THREADS"):
        call()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_makes_the_same_call():
    q, k, v = (x.detach() for x in drawn(*QKV))
    wanted, *_ = (attention(q, k, v) for _ in range(3))
    child = fork()
    if not child:
        os._exit(not same_bits(attention(q, k, v).numpy(), wanted.numpy()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
