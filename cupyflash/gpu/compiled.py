"""Launches whose kernels are compiled, ready to be made again and again.

With ``CUPYFLASH_DEBUG=1`` they wait for every kernel, so that an error names it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence

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
    """

    def __init__(self, launches: Sequence[Launch], device: int) -> None:
        queue = self._queue = driver.queue(device)
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
        self._order = tuple(dict.fromkeys(name for _, name in words))
        self.names = frozenset([*self._order, *(name for _, name, _ in maps)])
        values = self.values({name: (n, 0) for n, name in enumerate(self._order)})
        self._buffers = self.buffers(values, values)

    def start(self, addresses: Mapping[str, int], stream: int | None) -> None:
        """Launch on the current device's current stream.

        `stream` is what `driver.Queue.pointer` returns.
        """
        buffer = self._buffers.take()
        for places, name, encoded in self.maps:
            buffer.words[places] = encoded.words(addresses[name])
        told = map(addresses.__getitem__, self._order)
        if stream is None or WAIT_AFTER_LAUNCH:
            self._start_slowly(buffer, stream, told)
        elif failed := self._queue.launch(buffer.block, stream, *told):
            raise self.error(failed)
        self._buffers.unused.append(buffer)  # a launch that has returned has copied parameters

    @property
    def waits(self) -> bool:
        """Whether `start` waits for every kernel."""
        return WAIT_AFTER_LAUNCH

    def values(self, numbers: Mapping[str, tuple[int, int]]) -> list[driver.Value]:
        """Return where words are written, but those whose names are not among some.

        `numbers` has for each name the number of a value behind the stream, and what is added.
        """
        return [
            driver.Value(place, 1 + numbers[name][0], numbers[name][1])
            for place, name in self.words
            if name in numbers
        ]

    def buffers(
        self, values: Sequence[driver.Value], early: Sequence[driver.Value] = ()
    ) -> driver.Buffers:
        """Return buffers of these launches that take values in another way."""
        return driver.Buffers(self._kernels, self._queue.function, values, early)

    def _start_slowly(self, buffer: driver.Buffer, stream: int | None, told: Iterable[int]) -> None:
        """Launch by CuPy if there is no stream, and wait if that is wanted."""
        launch = self._queue.launch
        launch(buffer.early, stream or 0, *told)
        for n in range(len(self._kernels)):
            if stream is not None and (failed := launch(buffer.one(n))):
                raise self.error(failed, n)
            try:
                if stream is None:
                    buffer.launch_by_cupy(n)
                if WAIT_AFTER_LAUNCH:
                    cuda_device.synchronize()
            except Exception as raised:
                raised.add_note(self._note(n))
                raise

    def error(self, failed: int, first: int = 0) -> RuntimeError:
        """Return what to raise for what `driver.Queue.launch` returned, which was not 0.

        `first` is the first of the launches that were to be made.
        """
        n, number = divmod(failed, driver.ERRORS)
        made = driver.error(number, driver.LAUNCH)
        made.add_note(self._note(first + n))
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
