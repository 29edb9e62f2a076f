"""Forward mode and second derivatives beside what they differentiate: the suite `derivatives`.

PyTorch has both by the matrix products of its math back end alone. A double backward begins where
the forward and its gradients are there; its memory includes theirs.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import api, forward_mode, masks, second_order
from .host import drawn
from .measure import Meter, Work
from .tasks import OURS, Maker, Memory, TaskSuite, Works, calls, repeated, torch_of
from .torch_peers import from_torch, on_its_stream, on_stream, peak_memory, to_torch

MATH = "torch-math"
SHAPES = {"cpu": (1, 4, 64), "gpu": (2, 16, 128)}  # batch, heads, columns
TOKENS = {"cpu": (512, 2048), "gpu": (1024, 4096)}
DTYPES = {"cpu": ("float32",), "gpu": ("bfloat16", "float32")}
# What is timed -> its products, where a forward has two.
PASSES = {"forward": 2, "backward": 5, "forward mode": 6, "double backward": 15}


def of_pass(
    meter: Meter, dtype: str, shape: tuple[int, int, int, int], name: str, causal: bool
) -> Works:
    """Compute a pass."""
    arrays = drawn(meter, dtype, *shape, number=7)
    q, k, v, do, *along = arrays
    mask = masks.causal() if causal else None
    batch, heads, length, d = shape
    count = calls(meter, 2.0 * PASSES[name] * batch * heads * length**2 * d / (1 + causal))

    def results() -> tuple[Any, Any]:
        out, lse = api.attention(q, k, v, mask=mask, return_lse=True)
        return out, lse

    def ours(out: Any, lse: Any) -> Any:
        if name == "forward":
            return (results()[0],)
        if name == "forward mode":
            return forward_mode.attention_jvp(q, k, v, *along, mask=mask)
        if name == "backward":
            return api.attention_backward(do, q, k, v, out, lse, mask=mask)[:3]
        made = second_order.attention_backward_jvp(do, q, k, v, out, lse, *along, mask=mask)
        return *made.gradients[:3], made.tout

    def all_of_ours() -> Any:
        if name.startswith("forward"):
            return ours(None, None)
        out, lse = results()
        kept = api.attention_backward(do, q, k, v, out, lse, mask=mask)
        return kept, ours(out, lse)

    def arrays_of(found: Any) -> list[Any]:
        is_tensor = hasattr(found[0], "detach")
        return [from_torch(meter.xp, x, dtype) if is_tensor else x for x in found]

    def make_ours() -> Work:
        given = (None, None) if name.startswith("forward") else results()
        return repeated(functools.partial(ours, *given), count)

    memory = {
        OURS: lambda: Memory(all_of_ours, meter.peak_memory),
        MATH: lambda: _memory_of_math(meter, arrays, name, causal),
    }
    works = {
        OURS: make_ours,
        MATH: lambda: repeated(_math(meter, arrays, name, causal)[0], count),
    }
    return Works(works, arrays_of, count, memory=memory)


def _math(meter: Meter, arrays: list[Any], name: str, causal: bool) -> tuple[Work, Work]:
    """Return a pass by PyTorch's math back end, and the same with all that it needs before."""
    torch = torch_of()
    q, k, v, do, *along = (to_torch(torch, x) for x in arrays)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    do = do.detach().requires_grad_()
    here = functools.partial(on_its_stream, torch, meter, q)

    def attend(*operands: Any) -> Any:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return torch.nn.functional.scaled_dot_product_attention(*operands, is_causal=causal)

    def forward() -> Any:
        with torch.no_grad():
            return (attend(q, k, v),)

    def first(out: Any, keeps: bool = False) -> Any:
        return torch.autograd.grad(out, leaves, do, create_graph=keeps, retain_graph=True)

    def second(gradients: Any) -> Any:
        return torch.autograd.grad(gradients, (*leaves, do), along, retain_graph=True)

    def moved() -> Any:
        return torch.func.jvp(attend, (q, k, v), tuple(along))

    if name.startswith("forward"):
        work = here(forward if name == "forward" else moved)
        return work, work
    with on_stream(torch, meter, q):
        out = attend(*leaves)
        if name == "backward":
            return here(lambda: first(out)), here(lambda: first(attend(*leaves)))
        gradients = first(out, keeps=True)
    return here(lambda: second(gradients)), here(lambda: second(first(attend(*leaves), True)))


def _memory_of_math(meter: Meter, arrays: list[Any], name: str, causal: bool) -> Memory:
    whole = _math(meter, arrays, name, causal)[1]
    return Memory(whole, functools.partial(peak_memory, torch_of(), meter))


def _suite(kind: str) -> TaskSuite:
    batch, heads, d = SHAPES[kind]
    makers: dict[str, Maker] = {}
    dtypes: dict[str, str] = {}
    for dtype in DTYPES[kind]:
        for causal in (False, True):
            for tokens in TOKENS[kind]:
                for name in PASSES:
                    words = f"{dtype}, {'causal' if causal else 'full'}, {tokens} tokens, {name}"
                    shape = batch, heads, tokens, d
                    makers[words] = functools.partial(
                        of_pass, shape=shape, name=name, causal=causal
                    )
                    dtypes[words] = dtype
    return TaskSuite(
        f"forward mode and double backward beside forward and backward, at ({batch}, {heads}, L, "
        f"{d})",
        "derivatives", makers, DTYPES[kind][0], {}, (OURS, MATH), dtypes,
    )  # fmt: skip


SUITES = {kind: _suite(kind) for kind in SHAPES}
