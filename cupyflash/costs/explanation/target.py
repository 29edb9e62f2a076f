"""Where a call would run: the current device, one from the table, or the CPU."""

from __future__ import annotations

from dataclasses import dataclass

from ...arrays import cuda_device
from ...arrays.cuda_device import Target
from ...errors import ArgumentError, ArgumentTypeError
from ...hints.did_you_mean import did_you_mean
from .. import analysis
from ..analysis import DEVICES, Device
from .occupancy import LIMITS


@dataclass(frozen=True)
class Place:
    """A device as kernels see it, and what is known about its limits.

    Attributes
    ----------
    target : Target or None
        None is the CPU.
    device : Device or None
        None if no limits are known.
    words : str
        What it is, and where the facts come from.
    """

    target: Target | None
    device: Device | None
    words: str


def place(device: Device | str | None) -> Place:
    """Return where a call would run.

    Parameters
    ----------
    device : Device, str or None
        One of `DEVICES` or its name; "cpu"; "gpu" for the current GPU; None for the current GPU, or
        for the CPU if there is none.

    Raises
    ------
    ArgumentError
        If the device is not known, or there is none.
    """
    if isinstance(device, Device):
        return _of_table(device)
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(
            f"device: got {type(device).__name__}; expected a name, {_names()}."
        )
    name = None if device is None else device.lower()
    if name == "cpu":
        return Place(None, None, "CPU")
    if name in (None, "gpu"):
        try:
            return _at_hand(cuda_device.here())
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            if name is None:
                return Place(None, None, f"CPU, because no GPU is available ({why})")
            raise ArgumentError(
                f'device: got "gpu", but no GPU is available ({why}); expected {_names()}.'
            ) from error
    try:
        return _of_table(analysis.device(device))
    except ArgumentError:
        near = did_you_mean(str(device), ("cpu", "gpu", *DEVICES)) or "."
        raise ArgumentError(f"device: got {device!r}; expected {_names()}{near}") from None


def _names() -> str:
    return f'"cpu", "gpu" (the current one), or one of {", ".join(DEVICES)}'


def _of_table(device: Device) -> Place:
    has = LIMITS.get(device.capability)
    if has is None:
        raise ArgumentError(
            f"device: got {device.name} of compute capability {device.capability}; expected one "
            f"of {', '.join(map(str, LIMITS))}, the compute capabilities whose limits are known."
        )
    made = Target(
        device=0,
        name=device.name,
        capability=device.capability,
        multiprocessors=device.multiprocessors,
        shared_memory=has.shared_memory - has.reserved,
    )
    return Place(made, device, f"{_words(made)}, by its data sheet")


def _at_hand(here: Target) -> Place:
    known = next((x for x in DEVICES.values() if here.name.lower() in x.driver_names), None)
    return Place(here, known, f"{_words(here)}, the current GPU")


def _words(made: Target) -> str:
    major, minor = made.capability
    return (
        f"{made.name}, compute capability {major}.{minor}, {made.multiprocessors} multiprocessors"
    )
