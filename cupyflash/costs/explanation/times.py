"""The least times that a device allows for a problem, its kernels and standard attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from ...arrays.dtypes import DTYPES
from ...distributed.partition.model import Machine, machine_of
from ...problem.call import Call
from ...problem.encoding import NUMBERS
from .. import analysis
from ..analysis import Device
from ..analysis.roofline import Roofline, limits
from ..analysis.traffic import Traffic
from . import derivatives
from .results import Bytes, KernelUse, Standard
from .target import Place
from .traffic import total


def flops_of(pairs: int, d: int, d_v: int, backward: bool, tangents: bool = False) -> int:
    """Return the operations of attention's products for so many pairs, as `analysis.flops` does."""
    if tangents:
        return derivatives.flops(derivatives.LEAST[backward], pairs, d, d_v)
    return 2 * pairs * ((3 * d + 2 * d_v) if backward else (d + d_v))


# "mma.sync": tensor cores by the instruction that all of them have. "tensor cores": by the fastest.
Units = Literal["no tensor cores", "mma.sync", "tensor cores", "float8"]
# Of the peak, which Hopper reaches by its own instruction wgmma alone, what mma.sync reaches there.
MMA_SYNC_ON_HOPPER = 0.62


def _peak(device: Device, dtype: str, units: Units, precision: str | None) -> float | None:
    """Return FLOP per second of the units that multiply a type; None where they are not known."""
    if units == "no tensor cores":
        return device.peak[DTYPES[dtype].accumulator]
    if units == "float8":
        return device.matrix_peak.get("float8")
    if units == "mma.sync":
        share, peak = _of_mma_sync(device, dtype), _peak(device, dtype, "tensor cores", precision)
        return None if share is None or peak is None else share * peak
    mma = DTYPES[dtype].mma
    if mma == "tf32":
        tf32 = device.matrix_peak.get(mma)
        return None if tf32 is None or precision is None else tf32 / 3  # three products each
    return device.matrix_peak.get(mma) if mma == "float64" else device.peak.get(mma)


def _of_mma_sync(device: Device, dtype: str) -> float | None:
    """Return the share of a device's peak that mma.sync can reach; None where it is not known."""
    major = device.capability[0]
    if major == 10:  # whose tensor cores have an instruction of their own, too
        return None
    return MMA_SYNC_ON_HOPPER if major == 9 and DTYPES[dtype].mma != "float64" else 1.0


def _best_peak(device: Device, call: Call) -> float:
    """Return FLOP per second of a device's fastest units for a call's type."""
    dtype, precision = call.problem.dtype.name, call.problem.precision
    known: list[Units] = ["no tensor cores", "tensor cores"]
    known += call.encoding.units
    own = (_peak(device, dtype, units, precision) for units in known)
    return max(peak for peak in own if peak is not None)


def machine(where: Place, call: Call) -> Machine | None:
    """Return what many such devices can do together; None if that is not known."""
    device = where.device
    if device is None:
        return None
    return machine_of(device.name, _best_peak(device, call), device.bandwidth)


def rooflines(
    where: Place,
    call: Call,
    kernels: tuple[KernelUse, ...],
    units: list[Units],
    flops: int,
    least: Bytes,
    unknown: list[str],
) -> tuple[Roofline | None, Roofline | None]:
    """Return the rooflines of the problem and of its kernels, and why one is not known.

    `units` are those by which the kernels multiply.
    """
    device, dtype = where.device, call.problem.dtype.name
    if device is None:
        words = where.words.partition(",")[0]
        known = ", ".join(analysis.DEVICES)
        unknown.append(
            f"time: the limits of {words} are not known (known are {known}); `cupyflash demo` "
            "measures the machine at hand"
        )
        return None, None
    best = limits(flops, least.total, _best_peak(device, call), device.bandwidth)
    each = []
    for kernel, own in zip(kernels, units, strict=True):
        peak = _peak(device, dtype, own, call.problem.precision)
        if peak is None and own == "mma.sync" and _of_mma_sync(device, dtype) is None:
            number = ".".join(map(str, device.capability))
            unknown.append(
                f"time: {kernel.name} multiplies by mma.sync, the instruction of compute "
                f"capability 8.0, as there is no kernel for {number} of its own; how fast "
                f"{device.name} runs that is not known"
            )
            return best, None
        if peak is None:
            unknown.append(f"time: no peak of {device.name} for {dtype} on tensor cores is known")
            return best, None
        busy = min(1.0, kernel.blocks / device.multiprocessors)
        each.append(limits(kernel.flops, kernel.once.total, peak * busy, device.bandwidth))
    compute, memory = (
        sum(getattr(x, name) for x in each) for name in ("compute_seconds", "memory_seconds")
    )
    work, moved = sum(x.flops for x in each), sum(x.bytes for x in each)
    theirs = Roofline(
        seconds=sum(x.seconds for x in each),
        bound="compute" if compute >= memory else "memory",
        compute_seconds=compute,
        memory_seconds=memory,
        flops=work,
        bytes=moved,
        intensity=work / moved,
        ridge=max(x.ridge for x in each),
    )
    return best, theirs


def standard(
    call: Call,
    where: Place,
    backward: bool,
    results: int,
    lengths: Sequence[tuple[int, int]] = (),
    tangents: bool = False,
) -> Standard:
    """Return what standard attention would need, by `analysis`.

    `lengths` say how many batch entries have how many keys, if these are not the call's.
    """
    problem, item = call.problem, call.problem.dtype.itemsize
    n_q, d, d_v = int(problem.len_q), problem.d, problem.d_v
    of_head = analysis.standard_attention_backward if backward else analysis.standard_attention
    parts, pairs = [], 0
    for entries, n_k in lengths or [(problem.batch, int(problem.len_k))]:
        heads = entries * problem.heads
        made: Bytes | Traffic = of_head(n_q, n_k, d, d_v)
        if tangents:
            made = derivatives.standard_moved(n_q, n_k, d, d_v, backward)
        pairs += heads * n_q * n_k
        parts.append(
            Bytes(
                {name: heads * item * n for name, n in made.reads.items()},
                {name: heads * item * n for name, n in made.writes.items()},
            )
        )
    moved = total(parts)
    matrices = 3 if backward else 2
    # P exists before its gradients are computed: four products instead of five.
    flops = 2 * pairs * ((2 * d + 2 * d_v) if backward else (d + d_v))
    if tangents:
        matrices = derivatives.MATRICES[backward]
        flops = derivatives.flops(derivatives.OF_STANDARD[backward], pairs, d, d_v)
    roofline = None
    if where.device is not None:
        peak = _best_peak(where.device, replace(call, encoding=NUMBERS))  # of numbers
        roofline = limits(flops, moved.total, peak, where.device.bandwidth)
    return Standard(matrices, results + matrices * pairs * item, moved, roofline)
