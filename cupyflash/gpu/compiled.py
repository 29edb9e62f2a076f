"""Launches whose kernels are compiled, ready to be made again and again.

With ``CUPYFLASH_DEBUG=1`` they wait for every kernel, so that an error names it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..arrays import cuda_device
from . import driver, tma
from . import jit as compiler
from .writer import Launch

WAIT_AFTER_LAUNCH = os.environ.get("CUPYFLASH_DEBUG") == "1"


class CompiledLaunches:
    """Launches, in order, whose kernels are compiled; they lack addresses only.

    Any thread can make them.

    Parameters
    ----------
    launches : sequence of Launch
        The launches.
    device : int
        Where.

    Attributes
    ----------
    names : frozenset of str
        The names of the addresses that they take.
    words, maps : tuple
        Where these belong in a buffer: words, and the words of encoded tensor maps.
    unused : list of driver.Buffer
        One for each thread that has launched.
    """

    def __init__(self, launches: Sequence[Launch], device: int) -> None:
        queue = driver.queue(device)
        self._launch = queue.launch
        words: list[tuple[int, str]] = []
        maps: list[tuple[slice, str, tma.Encoded]] = []
        kernels = []
        begin, size = 0, driver.MAP_WORDS
        for launch in launches:
            kernel = _kernel(launch, queue)
            words += [(begin + offset // 8, name) for offset, name in launch.slots]
            first = begin + kernel.parameter_words
            for n, made in enumerate(launch.maps):
                places = slice(first + n * size, first + (n + 1) * size)
                maps.append((places, made.name, tma.Encoded(made)))
            begin += kernel.words
            kernels.append(kernel)
        self._kernels, self.words, self.maps = tuple(kernels), tuple(words), tuple(maps)
        self.names = frozenset([name for _, name in words] + [name for _, name, _ in maps])
        self.unused: list[driver.Buffer] = []

    def start(self, addresses: Mapping[str, int], stream: int | None) -> None:
        """Launch on the current device's current stream.

        `stream` is what `driver.Queue.pointer` returns.
        """
        buffer = self.buffer()
        words = buffer.words
        for place, name in self.words:
            words[place] = addresses[name]
        for places, name, encoded in self.maps:
            words[places] = encoded.words(addresses[name])
        if stream is None or WAIT_AFTER_LAUNCH:
            self._start_slowly(buffer, stream)
        else:
            if stream != buffer.stream:
                buffer.move(stream)
            launch = self._launch
            for call in buffer.calls:
                if error := launch(*call):
                    raise self.error(error, buffer, call)
        self.unused.append(buffer)  # when a launch returns, it has copied its parameters

    @property
    def waits(self) -> bool:
        """Whether `start` waits for every kernel."""
        return WAIT_AFTER_LAUNCH

    def buffer(self) -> driver.Buffer:
        """Return a buffer that nobody uses; it is `unused` again when launches have returned."""
        try:
            return self.unused.pop()
        except IndexError:
            return driver.Buffer(self._kernels)

    def _start_slowly(self, buffer: driver.Buffer, stream: int | None) -> None:
        """Launch by CuPy if there is no stream, and wait if that is wanted."""
        if stream is not None:
            buffer.move(stream)
        for n, call in enumerate(buffer.calls):
            if stream is not None and (error := self._launch(*call)):
                raise self.error(error, buffer, call)
            try:
                if stream is None:
                    buffer.launch_by_cupy(n)
                if WAIT_AFTER_LAUNCH:
                    cuda_device.synchronize()
            except Exception as raised:
                raised.add_note(self._note(n))
                raise

    def error(self, error: int, buffer: driver.Buffer, call: Any) -> RuntimeError:
        """Return what to raise if the driver returned an error for one of a buffer's calls."""
        made = driver.error(error, driver.LAUNCH)
        made.add_note(self._note(buffer.calls.index(call)))
        return made

    def _note(self, n: int) -> str:
        return f"while running the kernel {self._kernels[n].name}"


def _kernel(launch: Launch, queue: driver.Queue) -> driver.Kernel:
    special = launch.special
    tiles = special.tiles
    kernel = compiler.kernel(special, queue.device)
    return driver.Kernel(
        special.name,
        kernel,
        driver.function(kernel, queue.device),
        launch.grid,
        tiles.threads,
        tiles.shared_memory,
        launch.template,
        len(launch.maps),
        queue.overlaps and special.spec.overlaps,
    )
