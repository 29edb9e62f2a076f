"""Adapters of libraries for GPUs, on stand-ins that take the same arguments in host memory."""

from __future__ import annotations

import math
import sys
import types

import numpy as np
import pytest

from cupyflash import masks, testing
from cupyflash.testing.peers import PEERS, with_cuda
from cupyflash.testing.peers.base import has_gpu

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
OF_GPUS = [name for name, peer in PEERS.items() if peer.gpu]


def softmax(q, k, v, scale, allowed=None, added=None):
    """Attention of (B, H, L, D) and its natural log-sum-exp; rows without keys are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    s = (q.float() @ k.float().transpose(2, 3)) * scale
    s = s if added is None else s + added.float()
    s = s if allowed is None else s.masked_fill(~allowed, -torch.inf)
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.clamp(min=-1e30)[..., None])
    return (p @ v.float()).to(q.dtype), lse


def last(rows, keys):
    return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)


def flash_attn_func(q, k, v, *, softmax_scale, causal, return_attn_probs=False, return_lse=False):
    assert q.shape[-1] % 8 == 0
    allowed = last(q.shape[1], k.shape[1]) if causal else None
    out, lse = softmax(*(x.transpose(1, 2) for x in (q, k, v)), softmax_scale, allowed)
    return out.transpose(1, 2), lse, *([None] if return_attn_probs else [])


def varlen_attn(
    q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa
):
    assert return_aux.lse
    assert window_size in ((-1, 0), (-1, -1))
    assert enable_gqa == (q.shape[1] != k.shape[1])
    made = []
    for b in range(len(cu_seq_q) - 1):
        one = (
            x[int(starts[b]) : int(starts[b + 1])].transpose(0, 1)[None]
            for x, starts in zip((q, k, v), (cu_seq_q, cu_seq_k, cu_seq_k), strict=True)
        )
        made.append(softmax(*one, scale, last(max_q, max_k) if window_size == (-1, 0) else None))
    out, lse = (torch.cat(x, 2)[0] for x in zip(*made, strict=True))
    return out.transpose(0, 1), lse


def single_prefill_with_kv_cache(q, k, v, *, custom_mask, kv_layout, sm_scale, return_lse):
    assert kv_layout == "NHD"
    assert return_lse
    assert q.shape[-1] in (64, 128, 256)
    out, lse = softmax(*(x.transpose(0, 1)[None] for x in (q, k, v)), sm_scale, custom_mask)
    return out[0].transpose(0, 1), lse[0].T / math.log(2)


def memory_efficient_attention(q, k, v, *, attn_bias, scale):
    assert attn_bias is None or attn_bias.stride(-2) % 8 == 0
    added = None if attn_bias is None else attn_bias
    return softmax(*(x.transpose(1, 2) for x in (q, k, v)), scale, None, added)[0].transpose(1, 2)


STANDS = {
    "flash_attn": {"flash_attn_func": flash_attn_func},
    "flash_attn.cute": {},
    "flash_attn.cute.interface": {"flash_attn_func": flash_attn_func},
    "flashinfer": {
        "prefill": types.SimpleNamespace(single_prefill_with_kv_cache=single_prefill_with_kv_cache)
    },
    "xformers": {},
    "xformers.ops": {"memory_efficient_attention": memory_efficient_attention},
}


@pytest.fixture
def stand_ins(monkeypatch):
    for name, content in STANDS.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="PyTorch has no varlen_attn")
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    kernels = types.SimpleNamespace(efficient_attention_forward_cutlass=None)
    monkeypatch.setattr(torch.ops, "xformers", kernels, raising=False)
    monkeypatch.setattr(with_cuda, "DEVICE", "cpu")


@pytest.mark.parametrize(
    "name", [x for x in OF_GPUS if x not in ("torch-cudnn", "torch-efficient", "jax-cudnn")]
)
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
@pytest.mark.parametrize("scale", [None, -0.7])
def test_adapters_say_what_their_libraries_take(stand_ins, name, mask, scale):
    peer = PEERS[name]
    dtype = np.dtype(np.float16)
    rng = np.random.default_rng(0)
    shared = 2 if "gqa" in peer.features else 4
    q = rng.standard_normal((2, 4, 5, 12)).astype(dtype)
    k, v = rng.standard_normal((2, 2, shared, 9, 12)).astype(dtype)
    options = {"mask": mask, "scale": scale}
    options = {key: x for key, x in options.items() if x is not None}
    functions = peer.make()
    out, lse = functions.forward(q, k, v, **options, return_lse=True)
    precision = peer.says["precision"](dtype)
    right = testing.forward_bound(q, k, v, precision=precision, **options)
    assert testing.rho(out, *right.out).value <= 1
    assert (lse is None) == ("lse" not in peer.features)
    if lse is not None:
        assert testing.rho(lse, *right.lse).value <= 1
    if functions.backward is not None:
        do = rng.standard_normal(out.shape).astype(dtype)
        found = functions.backward(do, q, k, v, out, lse, **options)
        wanted = testing.backward_bound(do, q, k, v, precision=precision, **options)
        for x, bound in zip(found, (wanted.dq, wanted.dk, wanted.dv), strict=True):
            assert testing.rho(x, *bound).value <= 1


def test_xformers_without_its_kernels_cannot_be_judged(monkeypatch):
    for name in ("xformers", "xformers.ops"):
        module = types.ModuleType(name)
        vars(module).update(STANDS[name])
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ImportError, match=r"kernels do not load.*python -m xformers\.info"):
        PEERS["xformers"].make()


def test_calls_that_they_serve():
    q = np.zeros((1, 1, 4, 8), np.float16)
    call = types.SimpleNamespace(q=q, k=q, v=q, options={}, gradients=False)
    assert with_cuda.causal_or_none(call)
    call.options = {"mask": masks.causal()}
    assert with_cuda.causal_or_none(call)
    call.options = {"mask": masks.window(2, 0)}
    assert not with_cuda.causal_or_none(call)
    call.options = {}
    for name, columns in {"flash-attn-4": 128, "torch-varlen": 256, "torch-cudnn": 256}.items():
        for width in (columns, columns + 1):
            call.q = call.k = call.v = np.zeros((1, 1, 4, width), np.float16)
            assert PEERS[name].says["serves"](call) == (width == columns)


@pytest.mark.parametrize("name", OF_GPUS)
def test_what_they_lack_is_said(name, monkeypatch):
    peer = PEERS[name]
    if peer.version is None:
        assert peer.missing == f"{peer.install}, and an NVIDIA GPU"
        monkeypatch.setattr(type(peer), "version", "1.0")
    assert peer.missing == ("" if has_gpu() else "an NVIDIA GPU")


def test_nothing_is_imported_before_it_is_used(tmp_path):
    """Names of adapters are read wherever the kit is."""
    import subprocess

    libraries = ("torch", "jax", "onnx", "keras", "mlx", "paddle", "flash_attn", "xformers")
    code = f"import sys, cupyflash.testing.peers; assert not set({libraries}) & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, cwd=tmp_path)
