"""Small calls, whose time is mostly the host's: the suite `host`."""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import api, cached, closures, masks, varlen
from .contenders import Array
from .measure import Gpu, Meter, Work
from .tasks import OURS, SDPA, STANDARD, Maker, TaskSuite, Works, repeated, torch_of
from .torch_peers import to_torch

# Calls in a run: enough for a clock, and so few that most runs end before another process gets the
# core, and that the queue of a GPU has room for them.
REPEATS = 20
WINDOW = 64
SMALL = {"cpu": (1, 1, 16, 64), "gpu": (1, 8, 128, 64)}


def standard(xp: Any, q: Array, k: Array, v: Array, hidden: Any = None) -> Array:
    """Attention as a user of NumPy writes it."""
    return kept(xp, q, k, v, hidden)[0]


def kept(xp: Any, q: Array, k: Array, v: Array, hidden: Any = None) -> tuple[Array, Array]:
    """`standard`, and the probabilities that its gradients need."""
    p = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        p += hidden
    p -= p.max(axis=-1, keepdims=True)
    xp.exp(p, out=p)
    p /= p.sum(axis=-1, keepdims=True)
    return p @ v, p


def standard_gradients(
    q: Array, k: Array, v: Array, do: Array, o: Array, p: Array
) -> tuple[Array, Array, Array]:
    """The gradients of `standard` from the probabilities, as a user of NumPy writes them."""
    ds = do @ v.swapaxes(-1, -2)
    ds -= (do * o).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= q.shape[-1] ** -0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do


def works_of(meter: Meter, works: dict[str, Callable[[], Work]]) -> Works:
    """Return how contenders do a task of small calls, whose results are one or several arrays."""

    def arrays(found: Any) -> list[Array]:
        several = found if isinstance(found, tuple) else (found,)
        return [meter.xp.from_dlpack(x.detach()) if hasattr(x, "detach") else x for x in several]

    def many(make: Callable[[], Work]) -> Callable[[], Work]:
        return lambda: repeated(make(), REPEATS)

    return Works({name: many(make) for name, make in works.items()}, arrays, REPEATS, host=True)


def drawn(meter: Meter, dtype: str, *shape: int, number: int = 3) -> list[Array]:
    """Return arrays of normal numbers, always the same."""
    numbers = np.random.default_rng(0).standard_normal((number, *shape), dtype=np.float32)
    return [meter.xp.asarray(x.astype(dtype)) for x in numbers]


def small(meter: Meter) -> tuple[int, ...]:
    """Return the shape of small arrays."""
    return SMALL["gpu" if isinstance(meter, Gpu) else "cpu"]


def upper(meter: Meter, dtype: str, length: int) -> Array:
    """Return -inf where a query would see a later key, and 0 elsewhere."""
    return meter.xp.asarray(np.triu(np.full((length, length), -np.inf, dtype), 1))


def by_sdpa(arrays: list[Array], work: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return what makes `work(sdpa, *tensors)` ready for arrays as tensors."""

    def make() -> Callable[..., Any]:
        torch = torch_of()
        tensors = [to_torch(torch, x) for x in arrays]
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return functools.partial(work, sdpa, *tensors)

    return make


def forward(meter: Meter, dtype: str, causal: bool, anew: bool = False) -> Works:
    """Compute attention; `anew` makes the mask at each call."""
    xp, arrays = meter.xp, drawn(meter, dtype, *small(meter))
    q, k, v = arrays
    hidden = upper(meter, dtype, arrays[0].shape[-2]) if causal else None
    mask = masks.causal() if causal else None

    def ours() -> Array:
        return api.attention(q, k, v, mask=masks.causal() if anew else mask)

    return works_of(
        meter,
        {
            OURS: lambda: ours,
            STANDARD: lambda: lambda: standard(xp, q, k, v, hidden),
            SDPA: by_sdpa(arrays, lambda f, *x: f(*x, is_causal=causal)),
        },
    )


def backward(meter: Meter, dtype: str, causal: bool) -> Works:
    """Compute gradients, the forward's results being there."""
    xp, (q, k, v, do) = meter.xp, drawn(meter, dtype, *small(meter), number=4)
    mask = masks.causal() if causal else None
    hidden = upper(meter, dtype, q.shape[-2]) if causal else None

    def ours() -> Work:
        o, lse = api.attention(q, k, v, mask=mask, return_lse=True)
        return lambda: api.attention_backward(do, q, k, v, o, lse, mask=mask)[:3]

    def theirs() -> Work:
        o, p = kept(xp, q, k, v, hidden)
        return lambda: standard_gradients(q, k, v, do, o, p)

    def by_torch() -> Work:
        torch = torch_of()
        leaves, tensor = _leaves(torch, (q, k, v)), to_torch(torch, do)
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
        return lambda: torch.autograd.grad(out, leaves, tensor, retain_graph=True)

    return works_of(meter, {OURS: ours, STANDARD: theirs, SDPA: by_torch})


def _leaves(torch: Any, arrays: tuple[Array, ...]) -> list[Any]:
    return [to_torch(torch, x).detach().requires_grad_(True) for x in arrays]


def both(meter: Meter, dtype: str, causal: bool) -> Works:
    """Compute attention and its gradients."""
    xp, (q, k, v, do) = meter.xp, drawn(meter, dtype, *small(meter), number=4)
    mask = masks.causal() if causal else None
    hidden = upper(meter, dtype, q.shape[-2]) if causal else None

    def ours() -> Any:
        _, vjp = closures.attention_vjp(q, k, v, mask=mask)
        return vjp(do)[:3]

    def theirs() -> Any:
        return standard_gradients(q, k, v, do, *kept(xp, q, k, v, hidden))

    def by_torch() -> Work:
        torch = torch_of()
        leaves, tensor = _leaves(torch, (q, k, v)), to_torch(torch, do)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        return lambda: torch.autograd.grad(sdpa(*leaves, is_causal=causal), leaves, tensor)

    return works_of(meter, {OURS: lambda: ours, STANDARD: lambda: theirs, SDPA: by_torch})


def adapter(meter: Meter, dtype: str, gradients: bool) -> Works:
    """Compute attention of tensors by `cupyflash.torch`, and by SDPA."""
    q, k, v, do = drawn(meter, dtype, *small(meter), number=4)

    def by(function: Callable[[Any], Callable[..., Any]]) -> Callable[[], Work]:
        def make() -> Work:
            torch = torch_of()
            attend = function(torch)
            if not gradients:
                tensors = [to_torch(torch, x) for x in (q, k, v)]
                return lambda: attend(*tensors)
            leaves, tensor = _leaves(torch, (q, k, v)), to_torch(torch, do)
            return lambda: torch.autograd.grad(attend(*leaves), leaves, tensor)

        return make

    def ours(_: Any) -> Any:
        return importlib.import_module("cupyflash.torch").attention

    def theirs(torch: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention

    return works_of(meter, {OURS: by(ours), SDPA: by(theirs)})


def windowed(meter: Meter, dtype: str) -> Works:
    """Compute attention of one query over a cache, which sees a window; lengths are an array."""
    heads, columns, room, length = small(meter)[1], small(meter)[3], 512, 400
    xp, (k, v) = meter.xp, drawn(meter, dtype, 1, heads, room, columns, number=2)
    (q,) = drawn(meter, dtype, 1, heads, 1, columns, number=1)
    lengths, mask = xp.asarray(np.array([length], np.int32)), masks.window(WINDOW, 0)
    seen = slice(length - 1 - WINDOW, length)
    return works_of(
        meter,
        {
            OURS: lambda: lambda: cached.attention_cached(q, k, v, lengths, mask=mask),
            STANDARD: lambda: lambda: standard(xp, q, k[:, :, seen], v[:, :, seen]),
            SDPA: by_sdpa([q, k, v], lambda f, q, k, v: f(q, k[:, :, seen], v[:, :, seen])),
        },
    )


def over_cache(meter: Meter, dtype: str, keys: int, array: bool = False) -> Works:
    """Compute attention of one query of 6 heads of 48 over a cache.

    The length is a number that grows from call to call, or an array.
    """
    xp, (k, v) = meter.xp, drawn(meter, dtype, 1, 6, max(512, 2 * keys), 48, number=2)
    (q,) = drawn(meter, dtype, 1, 6, 1, 48, number=1)

    def growing(call: Callable[[int], Any]) -> Callable[[], Work]:
        def make() -> Work:
            lengths = itertools.cycle([keys] if array else range(keys, keys + 8))
            return lambda: call(next(lengths))

        return make

    def by_torch() -> Work:
        attend = by_sdpa([q, k, v], lambda f, q, k, v, n: f(q, k[:, :, :n], v[:, :, :n]))()
        return growing(attend)()

    held = xp.asarray(np.array([keys], np.int32))
    return works_of(
        meter,
        {
            OURS: growing(lambda n: cached.attention_cached(q, k, v, held if array else n)),
            STANDARD: growing(lambda n: standard(xp, q, k[:, :, :n], v[:, :, :n])),
            SDPA: by_torch,
        },
    )


def one_query(meter: Meter, dtype: str, keys: int) -> Works:
    """Compute attention of one query of 6 heads of 48 over arrays of keys and values."""
    xp, (k, v) = meter.xp, drawn(meter, dtype, 1, 6, keys, 48, number=2)
    (q,) = drawn(meter, dtype, 1, 6, 1, 48, number=1)
    return works_of(
        meter,
        {
            OURS: lambda: lambda: api.attention(q, k, v),
            STANDARD: lambda: lambda: standard(xp, q, k, v),
            SDPA: by_sdpa([q, k, v], lambda f, *x: f(*x)),
        },
    )


def packed(meter: Meter, dtype: str, on_device: bool, check: bool | None = None) -> Works:
    """Compute attention within each of four packed sequences."""
    _, heads, length, columns = small(meter)
    xp, arrays = meter.xp, drawn(meter, dtype, heads, 4 * length, columns)
    ends = np.arange(5, dtype=np.int32) * length
    offsets = xp.asarray(ends) if on_device else ends

    q, k, v = arrays

    def ours() -> Array:
        return varlen.attention_varlen(q, k, v, offsets, offsets, check=check)

    def theirs() -> Array:
        parts = [slice(first, last) for first, last in itertools.pairwise(ends.tolist())]
        return xp.concatenate(
            [standard(xp, *(x[:, part] for x in arrays)) for part in parts], axis=1
        )

    return works_of(meter, {OURS: lambda: ours, STANDARD: lambda: theirs})


def _of_both() -> dict[str, Maker]:
    part = functools.partial
    return {
        "attention": part(forward, causal=False),
        "attention, causal": part(forward, causal=True),
        "attention, causal, a new mask at each call": part(forward, causal=True, anew=True),
        "attention_backward": part(backward, causal=False),
        "attention_backward, causal": part(backward, causal=True),
        "attention_vjp and its gradients": part(both, causal=False),
        "attention_vjp and its gradients, causal": part(both, causal=True),
        f"attention_cached, one query, a window of {WINDOW}": windowed,
        "attention_varlen, offsets on the host": part(packed, on_device=False),
    }


def _adapters() -> dict[str, Maker]:
    return {
        "cupyflash.torch": functools.partial(adapter, gradients=False),
        "cupyflash.torch and its gradients": functools.partial(adapter, gradients=True),
    }


def _on_cpu() -> dict[str, Maker]:
    made = _of_both()
    for keys in (50, 100, 250):
        name = f"attention_cached, one query, {keys} keys, 6 heads of 48"
        made[name] = functools.partial(over_cache, keys=keys)
    made["attention_cached, the same 250 keys, lengths as an array"] = functools.partial(
        over_cache, keys=250, array=True
    )
    for keys in (50, 250):
        name = f"attention, one query, {keys} keys, 6 heads of 48"
        made[name] = functools.partial(one_query, keys=keys)
    return made | _adapters()


def _on_gpu() -> dict[str, Maker]:
    made = _of_both()
    made["attention_cached, one query, 250 keys, 6 heads of 48"] = functools.partial(
        over_cache, keys=250, array=True
    )
    made["attention_varlen, offsets on the device"] = functools.partial(packed, on_device=True)
    made["attention_varlen, offsets on the device, check=False"] = functools.partial(
        packed, on_device=True, check=False
    )
    return made | _adapters()


_WHAT = "the host's time of small calls: {}, and others"

SUITES = {
    kind: TaskSuite(_WHAT.format(SMALL[kind]), "host", makers, dtype, {})
    for kind, makers, dtype in (("cpu", _on_cpu(), "float32"), ("gpu", _on_gpu(), "float16"))
}
