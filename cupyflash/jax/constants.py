"""Constants of programs that hold arrays: masks, score changes and the angles of `Rotary`.

Their arrays are wherever a user made them. Kernels read arrays in the memory of the device that
runs a call. So each device gets copies, when a program first runs there, and keeps them as long as
the program lives. Copies are made and freed in the order of the stream of the call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..arrays import device_arrays, tape
from ..arrays.cuda_device import current, current_stream
from ..arrays.per_stream import PerStream
from ..expr.bind import with_arrays
from ..expr.structure import Structured
from ..gpu.relaunch import LaunchTape
from ..problem.rotary import Rotary
from . import arguments


def alike(value: Any) -> Any:
    """Return a constant for a check: zeros in host memory stand for arrays on a GPU."""
    return _placed(value, lambda x: arguments.like(x) if device_arrays.is_device_array(x) else x)


class Constants:
    """The constants of a program, by name.

    Parameters
    ----------
    values : mapping of str to object
        As users pass them: those that hold no arrays may be of any kind.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        devices: set[int | None] = set()

        def seen(array: Any) -> Any:
            devices.add(device_arrays.device_of(array))
            return array

        for value in values.values():
            _placed(value, seen)
        self._values, self._has_arrays = values, bool(devices)
        # What is behind the arrays that are on a GPU already, on the streams that wrote them.
        self._written = []
        for device in devices:
            if device is not None:
                with current(device):
                    self._written.append(device_arrays.mark())
        self._in_host: Mapping[str, Any] | None = None
        self._on_device: dict[int, PerStream[_Placed]] = defaultdict(PerStream)

    def beside(self, array: Any) -> Mapping[str, Any]:
        """Return them with their arrays in the memory of another array.

        If that is on a GPU, its device and the stream of the call are the current ones.
        """
        if not self._has_arrays:
            return self._values
        device = device_arrays.device_of(array)
        if device is not None:
            placed = self._on_device[device].of(current_stream(), lambda: self._on(device))
            if isinstance(written := tape.current(), LaunchTape):
                written.kept += placed.arrays
            return placed.values
        if self._in_host is None:
            self._in_host = self._copied(
                lambda x: device_arrays.read_back(x) if device_arrays.is_device_array(x) else x
            )
        return self._in_host

    def _on(self, device: int) -> _Placed:
        for mark in self._written:
            device_arrays.wait_for(mark)
        arrays = []

        def copy(array: Any) -> Any:
            is_there = device_arrays.device_of(array) == device
            arrays.append(array if is_there else device_arrays.to_device(array, array.dtype))
            return arrays[-1]

        return _Placed(self._copied(copy), arrays)

    def _copied(self, copy: Callable[[Any], Any]) -> Mapping[str, Any]:
        return {name: _placed(value, copy) for name, value in self._values.items()}


class _Placed(NamedTuple):
    """The constants, and the arrays in them, which are on one device."""

    values: Mapping[str, Any]
    arrays: list[Any]


def _placed(value: Any, place: Callable[[Any], Any]) -> Any:
    """Return a constant with the arrays that `place` returns; itself, if these are its own."""
    if isinstance(value, (list, tuple)):
        made = [_placed(each, place) for each in value]
        same = all(new is old for new, old in zip(made, value, strict=True))
        return value if same else made
    if isinstance(value, Rotary):
        cos, sin = place(value.cos), place(value.sin)
        same = cos is value.cos and sin is value.sin
        return value if same else Rotary(cos, sin, value.interleaved)
    if not isinstance(value, Structured):
        return value
    tree = with_arrays(value.expr, place)
    return value if tree is value.expr else type(value).unwatched(tree)
