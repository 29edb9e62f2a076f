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

_NO_VALUES = driver.Told()
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
    words, maps : tuple of (int, str)
        Where addresses belong in a buffer, by their names: as words, and in tensor maps.
    """

    def __init__(self, launches: Sequence[Launch], device: int) -> None:
        queue = self._queue = driver.queue(device)
        words: list[tuple[int, str]] = []
        maps: list[tuple[int, str]] = []
        kernels = []
        begin = 0
        for launch in launches:
            kernel = _kernel(launch, queue)
            words += [(begin + offset // 8, name) for offset, name in launch.slots]
            first = begin + kernel.parameter_words
            maps += [(first + n * driver.MAP_WORDS, x.name) for n, x in enumerate(launch.maps)]
            begin += kernel.words
            kernels.append(kernel)
        self._kernels, self.words, self.maps = tuple(kernels), tuple(words), tuple(maps)
        self._functions = driver.functions(queue, kernels)
        self._order = tuple(dict.fromkeys(name for _, name in (*words, *maps)))
        self.names = frozenset(self._order)
        told = self.told({name: (n, 0) for n, name in enumerate(self._order)})
        self._buffers = self.buffers(told, told)

    def start(self, addresses: Mapping[str, int], stream: int | None) -> None:
        """Launch on the current device's current stream.

        `stream` is what `driver.Queue.pointer` returns.
        """
        buffer = self._buffers.take()
        told = map(addresses.__getitem__, self._order)
        if stream is None or WAIT_AFTER_LAUNCH:
            self._start_slowly(buffer, stream, told)
        elif failed := self._queue.launch(buffer.block, stream, *told):
            raise buffer.error(failed)
        self._buffers.unused.append(buffer)  # a launch that has returned has copied parameters

    @property
    def waits(self) -> bool:
        """Whether `start` waits for every kernel."""
        return WAIT_AFTER_LAUNCH

    def told(self, numbers: Mapping[str, tuple[int, int]]) -> driver.Told:
        """Return what is told of addresses, but of those whose names are not among some.

        `numbers` has for each name the number of a value behind the stream, and what is added.
        """
        words, maps = (
            [driver.Value(x, 1 + numbers[y][0], numbers[y][1]) for x, y in all_of if y in numbers]
            for all_of in (self.words, self.maps)
        )
        return driver.Told(words, maps)

    def buffers(self, told: driver.Told, early: driver.Told = _NO_VALUES) -> driver.Buffers:
        """Return buffers of these launches that take values in another way."""
        return driver.Buffers(self._kernels, self._functions, told, early)

    def _start_slowly(self, buffer: driver.Buffer, stream: int | None, told: Iterable[int]) -> None:
        """Launch by CuPy if there is no stream, and wait if that is wanted."""
        launch = self._queue.launch
        if failed := launch(buffer.early, stream or 0, *told):
            raise driver.error(failed % driver.ERRORS, driver.REPLACE)
        for n in range(len(self._kernels)):
            if stream is not None and (failed := launch(buffer.one(n))):
                raise buffer.error(failed, n)
            try:
                if stream is None:
                    buffer.launch_by_cupy(n)
                if WAIT_AFTER_LAUNCH:
                    cuda_device.synchronize()
            except Exception as raised:
                raised.add_note(buffer.note(n))
                raise


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
        tuple(tma.encode(made, tma.ANYWHERE) for made in launch.maps),
        queue.overlaps and special.spec.overlaps,
    )
