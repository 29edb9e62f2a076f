"""A PyTorch without a GPU or a library: tensors are NumPy's arrays, kernels are standard attention.

It holds its user to what a real one needs: one kernel chosen, CuPy's stream, graphs that replay.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
from fake_cupy import Stream

from cupyflash.bench.standard import standard_backward, standard_forward

BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


class Tensor:
    """Wraps an array; `made_of` is what the gradient needs."""

    def __init__(self, array, made_of=None):
        self.array, self.made_of = array, made_of
        self.device, self.requires_grad = "cuda:0", False

    def __getattr__(self, name):
        return getattr(self.array, name)

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def detach(self):
        return Tensor(self.array)

    def requires_grad_(self, wanted):
        self.requires_grad = wanted
        return self

    def to(self, *_, **__):
        return self

    def contiguous(self):
        return self


def fake_torch():
    """The module; what it saw is in `seen`: kernels, streams and options of each call."""
    torch = ModuleType("torch")
    torch.__version__ = "2.11.0+fake"
    torch.seen = []
    torch.from_dlpack = torch.from_numpy = Tensor
    now = SimpleNamespace(backend=None, stream=0, grad=True, graph=None)

    @contextmanager
    def during(name, value):
        before = getattr(now, name)
        setattr(now, name, value)
        yield
        setattr(now, name, before)

    def sdpa(q, k, v, attn_mask=None, is_causal=False):
        if now.backend == "FLASH_ATTENTION" and attn_mask is not None:
            import warnings

            warnings.warn("Flash Attention takes no mask (Triggered internally)", stacklevel=1)
            raise RuntimeError("No available kernel. Aborting execution.")
        assert now.graph or now.stream == Stream.current[-1].ptr, "not on CuPy's stream"
        torch.seen.append((now.backend, now.stream, is_causal, attn_mask is not None))

        def change(s):
            if attn_mask is not None:
                np.copyto(s, -np.inf, where=~attn_mask.array)

        arrays = [x.array for x in (q, k, v)]
        o, p = standard_forward(np, *arrays, is_causal, change)
        made = Tensor(o, (p, (q, k, v)) if now.grad and q.requires_grad else None)
        if now.graph:
            made.array = np.full_like(o, np.nan)
            now.graph.work.append(lambda: np.copyto(made.array, o))
        return made

    def grad(o, leaves, do, retain_graph=False):
        assert o.made_of is not None, "its graph is gone"
        p, made_of = o.made_of
        assert all(a is b for a, b in zip(made_of, leaves, strict=True))
        if not retain_graph:
            o.made_of = None
        inputs = (*(x.array for x in leaves), do.array)
        return tuple(Tensor(x) for x in standard_backward(np, inputs, o.array, p))

    class Graph:
        def __init__(self):
            self.work = []

        def replay(self):
            assert now.stream == Stream.current[-1].ptr
            for work in self.work:
                work()

    def external(ptr, device):
        return SimpleNamespace(cuda_stream=ptr)

    torch.set_grad_enabled = lambda wanted: during("grad", wanted)
    torch.compiler = SimpleNamespace(reset=lambda: torch.seen.append("reset"))
    torch.autograd = SimpleNamespace(grad=grad)
    attention = ModuleType("torch.nn.attention")
    attention.SDPBackend = SimpleNamespace(**{name: name for name in BACKENDS})
    attention.sdpa_kernel = lambda backend: during("backend", backend)
    functional = SimpleNamespace(scaled_dot_product_attention=sdpa)
    torch.nn = SimpleNamespace(attention=attention, functional=functional)
    torch.cuda = SimpleNamespace(
        is_available=lambda: True,
        set_device=lambda _: None,
        synchronize=lambda: None,
        empty_cache=lambda: torch.seen.append("emptied"),
        current_stream=lambda _: SimpleNamespace(cuda_stream=now.stream),
        ExternalStream=external,
        Stream=lambda: SimpleNamespace(cuda_stream=Stream.current[-1].ptr),
        stream=lambda stream: during("stream", stream.cuda_stream),
        CUDAGraph=Graph,
        graph=lambda graph: during("graph", graph),
        reset_peak_memory_stats=lambda: None,
        memory_allocated=lambda: 1000,
        max_memory_allocated=lambda: 5000,
    )
    return {"torch": torch, "torch.nn.attention": attention}
