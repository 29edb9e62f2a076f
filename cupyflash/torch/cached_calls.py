"""Calls over a cache on tensors, computed by the kernels for arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import cache_update, dispatch, execute
from ..problem.arguments import Cached
from ..problem.codes import CacheCodes
from ..problem.options import Options
from ..problem.rotary import Rotary
from ..request import Request
from . import learned, recognised, recognised_cpu, tensors
from .operands import Operands, Settings
from .tensors import PLAIN, array_of

NO_GRADIENT = (
    "no gradient flows through a cache; pass its .detach(), or call under torch.no_grad(). "
    "cupyflash.torch.attention computes gradients."
)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets_q: torch.Tensor | Sequence[int] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
    mask: Any = None,
    score_mod: Any = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Check and compute `cupyflash.torch.attention_cached`."""
    if type(q) in PLAIN and q.is_cpu:
        others = table, offsets_q, k_scale, v_scale, kv_dtype, score_mod, bias, sink, scale
        unusual = any(each is not None for each in others) or return_lse is not False
        made = None
        if not unusual and type(shared) is int and not shared:
            made = recognised_cpu.cached_query(q, k, v, lengths, mask)
        if made is not None:
            return made
    x = Operands(q, k, v, bias, sink, mask if isinstance(mask, torch.Tensor) else None)
    settings = Settings(None if x.mask is not None else mask, score_mod, scale)
    given = {"lengths": lengths, "table": table, "offsets_q": offsets_q}
    given |= {"k_scale": k_scale, "v_scale": v_scale}
    for read in () if score_mod is None else learned.tables_of(settings):
        tensors.refuse_gradients({"score_mod": read.owner}, NO_GRADIENT)
    seen = _signature(settings, x, given, kv_dtype, shared, return_lse)
    made = None if seen is None else seen.launch(q)
    if made is not None:
        return (made[0], made[1]) if return_lse else made[0]
    floats = {"q": q, "bias": bias, "sink": sink}
    floats |= {name: y for name, y in (("k", k), ("v", v)) if not tensors.may_be_codes(y)}
    given |= {"mask": mask, "k": k, "v": v}
    named = floats | {name: y for name, y in given.items() if isinstance(y, torch.Tensor)}
    home = tensors.check(named, tuple(floats))
    tensors.refuse_meta(home)
    tensors.refuse_gradients(named, NO_GRADIENT)
    q, k, v = tensors.to_autocast(q, k, v)
    if "k" in floats and "v" in floats:
        tensors.same_dtype(q, k, v)
    names = names_of(kv_dtype)
    rows = Cached(array_of(lengths), array_of(table), array_of(offsets_q), shared)
    codes = CacheCodes.of(array_of(k_scale), array_of(v_scale), names)
    options = Options.of(
        mask=array_of(mask),
        score_mod=score_mod,
        bias=array_of(bias),
        sink=array_of(sink),
        scale=scale,
        dropout=0.0,
        seed=None,
        precision=None,
    )
    request = Request(array_of(q), array_of(k), array_of(v), rows, codes, options)
    if home.type == "cpu":
        return tensors.of_results(execute.forward(request, return_lse, None, None))
    with tensors.stream_of(home):
        call = request.call
        size = dispatch.backend_of(call.q).workspace_size_cached(call)
        scratch = q.new_empty(size, dtype=torch.uint8)
        names = names[-1] if type(names) is tuple else names
        columns = v.shape[-1] * (2 if names == "int4" else 1)  # of which two share a byte
        out = tensors.empty_in_order_of(q, (*q.shape[:-1], columns))
        lse = q.new_empty(q.shape[:-1], dtype=tensors.lse_dtype(q)) if return_lse is True else None
        targets = array_of(out), array_of(lse), array_of(scratch)
        execute.forward(request, return_lse, *targets)
        of_arrays = execute.forward_signature(request, lse is not None, *targets)
    written = {"out": out} if lse is None else {"out": out, "lse": lse}
    recognised.keep(seen, of_arrays, written, q.dtype)
    return (out, lse) if return_lse else out


def _signature(
    settings: Settings,
    x: Operands,
    read: dict[str, Any],
    kv_dtype: Any,
    shared: Any,
    return_lse: Any,
) -> recognised.Signature | None:
    """Return the signature of a call on a GPU, or None if it must be checked every time.

    Nothing has to be checked before.
    """
    if not (type(x.q) in PLAIN and x.q.is_cuda and type(x.k) in PLAIN and type(x.v) in PLAIN):
        return None
    length, table = read["lengths"], read["table"]
    told = {}
    if type(length) is int:
        if table is not None and (type(table) not in PLAIN or table.ndim != 2):
            return None
        room = x.k.shape[-2] * (1 if table is None else table.shape[1]) if x.k.ndim == 4 else -1
        if not 0 <= length <= room:
            return None  # the check says why
        read = read | {"lengths": None}
        told = {"len_k": length}
    elif type(length) not in PLAIN:
        return None
    if type(shared) is not int:
        return None
    if type(return_lse) is not bool or not _is_name(kv_dtype):
        return None
    if tensors.is_transforming() or torch.is_autocast_enabled():
        return None
    if torch.is_grad_enabled():
        for each in (*x, *read.values()):
            if each is not None and getattr(each, "requires_grad", True):
                return None
    # A kernel may rely on values that are part of the keys.
    kind = "cached", return_lse, kv_dtype, shared, x.k.data_ptr() == x.v.data_ptr()
    seen = recognised.signature(kind, settings, x, read)
    if seen is not None:
        seen.addresses.update(told)
    return seen


def _is_name(kv_dtype: Any) -> bool:
    if type(kv_dtype) is tuple:
        return all(map(_is_name, kv_dtype))
    return kv_dtype is None or type(kv_dtype) in (str, torch.dtype)


def append(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: int | torch.Tensor | Sequence[int],
    *,
    table: torch.Tensor | None = None,
    offsets: torch.Tensor | Sequence[int] | None = None,
    q: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    positions: torch.Tensor | Sequence[Any] | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kv_dtype: Any = None,
    shared: int = 0,
) -> torch.Tensor | None:
    """Check and compute `cupyflash.torch.append`."""
    floats = {"k_new": k_new, "v_new": v_new, "q": q}
    held = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
    given = {"lengths": lengths, "table": table, "offsets": offsets, "positions": positions}
    named = floats | held | {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    home = tensors.check(named, tuple(floats))
    tensors.refuse_meta(home)
    tensors.refuse_gradients(named, NO_GRADIENT)
    queries = None if q is None else torch.empty_like(q)
    options: dict[str, Any] = {
        "table": array_of(table),
        "offsets": array_of(offsets),
        "positions": array_of(positions),
        "q": array_of(q),
        "rotary": rotary,
        "k_scale": array_of(k_scale),
        "v_scale": array_of(v_scale),
        "kv_dtype": names_of(kv_dtype),
        "out": array_of(queries),
        "shared": shared,
    }
    write(k_new, v_new, k, v, lengths, **options)
    for x in (k_scale, v_scale):
        _changed(x)
    return queries


def write(k_new: Any, v_new: Any, k: Any, v: Any, lengths: Any, **options: Any) -> None:
    """Write rows of tensors that were checked, with options of which tensors are arrays."""
    with tensors.stream_of(k.device):
        cache_update.append(*map(array_of, (k_new, v_new, k, v, lengths)), **options)
    _changed(k)
    _changed(v)


def _changed(x: Any) -> None:
    """Let autograd know that a tensor was written in place."""
    if isinstance(x, torch.Tensor) and not x.is_inference():
        torch.autograd.graph.increment_version(x)


def rotated(x: torch.Tensor, positions: Any, rotary: Rotary, inverse: bool) -> torch.Tensor:
    """Rotate rows of a tensor that was checked, without a gradient."""
    made = torch.empty_like(x)
    with tensors.stream_of(x.device):
        cache_update.rope(
            array_of(x), array_of(positions), rotary, inverse=inverse, out=array_of(made)
        )
    return made


def names_of(kv_dtype: Any) -> Any:
    """Return the names of codes, of which PyTorch's dtypes are some."""
    if isinstance(kv_dtype, tuple):
        return tuple(map(names_of, kv_dtype))
    return tensors.name_of(kv_dtype) if isinstance(kv_dtype, torch.dtype) else kv_dtype
