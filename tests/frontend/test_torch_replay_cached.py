"""Recognised calls over a cache on tensors on a GPU, without a GPU: what kernels are told."""

from __future__ import annotations

import pytest
from recognised import told, unchecked

from cupyflash import ArgumentError, ArgumentTypeError, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import attention_cached, recognised  # noqa: E402 (after the skip)

SEEN = torch.ones(40, 40, dtype=torch.bool)


class Named(torch.Tensor):
    pass


def cache(size=40, dtype=torch.float32):
    """Return a query, keys and values, and how many keys each entry has."""
    k, v = (torch.zeros(2, 4, size, 16, dtype=dtype) for _ in range(2))
    return torch.zeros(2, 4, 1, 16, dtype=dtype), k, v, torch.tensor([3, 7])


def test_other_calls_over_a_cache_are_told_apart(cupy, gpu_tensors):
    q, k, v, lengths = cache()
    codes = k.to(torch.int8), v.to(torch.int8)
    scales = {name: torch.ones(2, 4, 40, 1) for name in ("k_scale", "v_scale")}
    table = torch.tensor([[1, 0], [0, 1]])
    offsets = torch.tensor([0, 1, 2])
    pages = k[:, :, :32].clone(), v[:, :, :32].clone()
    calls = [
        lambda: attention_cached(q, k, v, lengths),
        lambda: attention_cached(q, k, v, lengths, return_lse=True),
        lambda: attention_cached(q, k, v, lengths.int()),
        lambda: attention_cached(q, k, k, lengths),
        lambda: attention_cached(q, k, v, lengths, mask=masks.window(3, 0)),
        lambda: attention_cached(q, k, v, lengths, mask=SEEN[:1]),
        lambda: attention_cached(q, k, v, lengths, score_mod=scores.softcap(2.0)),
        lambda: attention_cached(q, k, v, lengths, bias=torch.zeros(1, 40)),
        lambda: attention_cached(q, k, v, lengths, sink=torch.zeros(4)),
        lambda: attention_cached(q, k, v, lengths, scale=2.0),
        lambda: attention_cached(q, *codes, lengths, **scales),
        lambda: attention_cached(q, *pages, lengths, table=table),
        lambda: attention_cached(q, *pages, lengths, table=table, shared=32),
        lambda: attention_cached(q[:, :, 0].transpose(0, 1), k, v, lengths, offsets_q=offsets),
    ]
    for call in calls:
        call()
    assert len(recognised._known) == len(calls)
    for call in calls:
        call()
    assert len(recognised._known) == len(calls)
    for _ in range(2):
        attention_cached(q, k, v, 7)
    assert len(recognised._known) == len(calls) + 1


def test_a_length_of_all_entries_is_told(cupy, gpu_tensors, monkeypatch):
    q, k, v, _ = cache()
    for length in (7, 8):
        attention_cached(q, k, v, length)
    unchecked(monkeypatch, "cached")
    attention_cached(q, k, v, 9)
    assert 9 in told(cupy.launches[-1:])
    for wrong in (41, -1, 9.0, True):
        with pytest.raises((ArgumentError, ArgumentTypeError, AssertionError)):
            attention_cached(q, k, v, wrong)


def test_what_is_refused_after_a_recognised_call_over_a_cache(cupy, gpu_tensors):
    q, k, v, lengths = cache()
    for _ in range(2):
        attention_cached(q, k, v, lengths)
    before = len(cupy.launches)
    for call in (
        lambda: attention_cached(q.clone().requires_grad_(), k, v, lengths),
        lambda: attention_cached(q, k, v.clone().requires_grad_(), lengths),
        lambda: attention_cached(q, k, v, lengths.float()),
        lambda: attention_cached(q, k, v, lengths, shared=True),
        lambda: attention_cached(q, k, v, lengths, return_lse=1),
        lambda: attention_cached(q, k.as_subclass(Named), v, lengths),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            call()
    assert len(cupy.launches) == before
