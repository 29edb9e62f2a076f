"""`explain`: shows from shapes what a call of attention would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, SupportsIndex

import numpy as np

from ...arrays.integers import integer
from ...arrays.interop import DLPackArray, array, one_home
from ...arrays.typed import DType
from ...arrays.unallocated import unallocated
from ...backends import routes
from ...distributed.partition.model import LINKS
from ...distributed.partition.simulation import Simulation, simulate
from ...errors import ArgumentError, ArgumentTypeError
from ...execute import check_flag
from ...masks import Mask
from ...problem import coded, pack_gqa, validate
from ...problem.call import Call
from ...problem.formats import Format
from ...problem.keywords import explained
from ...problem.options import Options
from ...scores import Score
from ..analysis import Device
from . import traffic
from .arguments import dtype_of, form_of, in_host_memory, shape_of
from .assemble import Subject, assembled
from .results import Explanation
from .target import Place, place
from .times import machine


@explained
def explain(
    q: tuple[int, ...] | DLPackArray,
    k: tuple[int, ...] | DLPackArray | None = None,
    v: tuple[int, ...] | DLPackArray | None = None,
    *,
    dtype: DType = None,
    out_dtype: DType = None,
    mask: Mask | DLPackArray | None = None,
    score_mod: Score | Sequence[Score] | None = None,
    device: Device | str | None = None,
    backward: bool = False,
    deterministic: bool = False,
    precision: Literal["tf32x3"] | None = None,
    compile: bool = True,
    ranks: SupportsIndex | None = None,
    nodes: SupportsIndex = 1,
    tangents: bool = False,
) -> Explanation:
    """Say what a call of attention would run, and what that costs, without running it.

    Parameters
    ----------
    q : tuple of int, or array
        Shape of q: (..., Hq, Lq, D), or (Lq, D) for one head; or q itself, whose shape and dtype
        are read.
    k, v : tuple of int, or array, optional
        The same for k, (..., Hkv, Lk, D), and for v, (..., Hkv, Lk, Dv). By default, k is like q
        and v is like k. Arrays are assumed to be contiguous.
    dtype : dtype or str, optional
        float16, bfloat16, float32 or float64; or float8_e4m3fn or float8_e5m2 for codes with a
        scale for each row. Default: the dtype of the arrays, or float16 for shapes.
    out_dtype : dtype or str, optional
        The type of the output of codes, as in `attention`. Default: bfloat16.
    mask, score_mod : Mask, Score or list of Score, optional
        As in `attention`.
    device : Device or str, optional
        A name in `cupyflash.analysis.DEVICES` (you need not have this device), "cpu", or "gpu" for
        the current GPU. Default: where the arrays are; for shapes, the current GPU, or the CPU if
        there is none.
    backward : bool
        Explain the gradients instead of the forward.
    deterministic : bool
        As in `attention_backward`.
    precision : str, optional
        As in `attention`.
    compile : bool
        Whether to compile kernels, which takes a second each, to find out registers and occupancy.
        This needs NVRTC but no GPU.
    ranks : int, optional
        Also simulate `cupyflash.distributed.attention` over so many GPUs, each of which holds a
        part of the sequence.
    nodes : int
        How many machines have these GPUs, as many each.
    tangents : bool
        Explain `attention_jvp` with tangents of all arrays, or, together with `backward`,
        `attention_backward_jvp`.

    Returns
    -------
    Explanation
        Kernels, tiles by class, traffic, FLOPs, time by the roofline, and what standard attention
        would need. Tiles are counted exactly; the memory that this takes does not grow with their
        number. With `ranks`, the layout, the scheme, bytes, balance, memory and a model's times.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If a shape, mask or device is wrong.

    Examples
    --------
    >>> import cupyflash
    >>> from cupyflash import masks
    >>> made = cupyflash.explain((2, 16, 4096, 128), mask=masks.causal(), device="A100-80GB",
    ...                          compile=False)
    >>> made.main.computes, made.main.block_q, made.main.block_kv
    ('out and log-sum-exp', 128, 64)
    >>> made.main.tiles
    TileCount(empty=31744, partial=2048, full=31744)
    """
    operands = {"q": q, "k": k, "v": v}
    arrays = {name: array(x, name) for name, x in operands.items() if hasattr(x, "shape")}
    if device is None and arrays:
        device = "cpu" if one_home(arrays) is None else "gpu"
    where = place(device)
    form = form_of(dtype, arrays)
    check_flag(tangents, "tangents")
    if tangents and ranks is not None:
        raise ArgumentError(
            "tangents: got True with ranks; expected one of them, because ranks send no tangents. "
            "Leave ranks out."
        )
    if form is not None:
        _refuse_beside_codes(form, backward, ranks, tangents)
    elif out_dtype is not None:
        raise ArgumentError(
            f"out_dtype: got {out_dtype!r} without codes; expected None. It is for dtype="
            f"'{coded.FORMS[0]}'; results of numbers have their dtype."
        )
    call = _call(
        {**operands, **{name: x.shape for name, x in arrays.items()}},
        dtype_of(dtype, arrays) if form is None else np.dtype(np.uint8),
        Options(
            mask=in_host_memory(mask), score_mod=in_host_memory(score_mod), precision=precision
        ),
        form,
        out_dtype,
    )
    axes, shapes = call.axes, (call.q.shape, call.k.shape, call.v.shape)
    unknown: list[str] = []
    over_ranks = None
    if ranks is not None:
        over_ranks = _over_ranks(call, where, ranks, nodes, backward, unknown)
    route = routes.route(call, where.target, backward, deterministic, tangents)
    first = call if call.encoding is not route.call.encoding else None
    call = route.call
    if where.target is not None and route.main.part == "decode":
        call, _ = pack_gqa.joined(call)  # its tiles have the queries of all heads of a group
    subject = Subject(
        call, shapes, axes, where, backward, route, traffic.Sizes(call, coded=first), unknown,
        coded=first, tangents=tangents,
    )  # fmt: skip
    made = assembled(subject, compile)
    return replace(made, over_ranks=over_ranks)


def _over_ranks(
    call: Call, where: Place, ranks: Any, nodes: Any, backward: bool, unknown: list[str]
) -> Simulation:
    counts = []
    for name, value in (("ranks", ranks), ("nodes", nodes)):
        count = integer(value)
        if count is None:
            raise ArgumentTypeError(f"{name}: got {value!r}; expected an integer.")
        if count < 1:
            raise ArgumentError(f"{name}: got {value}; expected 1 or more.")
        counts.append(count)
    if counts[0] % counts[1]:
        raise ArgumentError(
            f"nodes: got {nodes} for {ranks} ranks; expected a divisor, so that every node has as "
            "many GPUs."
        )
    made = machine(where, call)
    if made is None:
        unknown.append(
            f"time over ranks: how fast {where.words.partition(',')[0]} computes, or sends to "
            f"others, is not known; it is for {' and '.join(LINKS)}"
        )
    return simulate(call, counts[0], counts[1], backward, made)


def _refuse_beside_codes(form: Format, backward: bool, ranks: Any, tangents: bool) -> None:
    """Refuse what calls on codes do not have."""
    for name, is_given, remedy in (
        (
            "backward",
            backward,
            "Codes have no gradients: keep numbers of 16 bits, and explain them",
        ),
        ("tangents", tangents, "Codes have no tangents: explain numbers of 16 bits"),
        ("ranks", ranks is not None, "Ranks send numbers: explain those"),
    ):
        if is_given:
            raise ArgumentError(
                f"{name}: got it with dtype {form.name}; expected a call on numbers. {remedy}."
            )


def _call(
    operands: Mapping[str, Any],
    dtype: np.dtype[Any],
    options: Options,
    form: Format | None,
    out_dtype: Any,
) -> Call:
    """Return a call of such shapes, whose arrays have no elements."""
    q = shape_of(operands["q"], "q")
    k = q if operands["k"] is None else shape_of(operands["k"], "k")
    v = k if operands["v"] is None else shape_of(operands["v"], "v")
    q_array, k_array, v_array = (unallocated(shape, dtype) for shape in (q, k, v))
    if form is None:
        return validate.call(q_array, k_array, v_array, options)
    scales = {
        f"{name}_scale": unallocated((*x[:-1], 1), np.dtype(np.float32))
        for name, x in (("q", q), ("k", k), ("v", v))
    }
    given = coded.Fp8(**scales, qkv_dtype=form.name, out_dtype=out_dtype)
    return validate.call(q_array, k_array, v_array, options, given=given)
