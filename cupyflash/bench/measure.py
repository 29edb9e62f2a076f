"""How long work takes and how much memory it holds, on the CPU or on CuPy's current GPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import statistics
import time
import tracemalloc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Work = Callable[[], Any]
SMALLEST_FLUSH, LARGEST_FLUSH = 2**26, 2**30  # bytes
QUIET, LONGEST_SPIN, WAKING = 0.005, 0.5, 0.02  # seconds


class Meter(ABC):
    """Measure on one kind of device.

    Attributes
    ----------
    xp : module
        The array module of that device: ``numpy`` or ``cupy``.
    """

    xp: Any

    @abstractmethod
    def seconds(self, work: Work) -> float:
        """Return the seconds that one call takes, until its results are there."""

    def host_seconds(self, work: Work) -> float:
        """Return the seconds until the host may go on, which on a GPU is before the results."""
        return self.seconds(work)

    @abstractmethod
    def peak_memory(self, work: Work) -> int:
        """Return the bytes that one call holds at its peak, its results included.

        Memory that was held before the call does not count.
        """

    @abstractmethod
    def free_memory(self) -> int | None:
        """Return the bytes that could still be had; None where nobody tells."""

    @abstractmethod
    def settle(self) -> None:
        """Undo what one call does to the time of another one; called before a call is timed."""

    @abstractmethod
    def release(self) -> None:
        """Give back memory that is kept for later use."""

    def medians(
        self, work: Sequence[Work], most_runs: int, seconds: float
    ) -> tuple[list[float], int]:
        """Time functions in turn, so that a change of the machine's speed affects all of them.

        Parameters
        ----------
        work : sequence of callable
            What to time; each should have run once before.
        most_runs : int
            Rounds at most.
        seconds : float
            No round begins after this time; at least one round runs.

        Returns
        -------
        medians : list of float
            Seconds, one per function.
        runs : int
            Rounds that were run.
        """
        times: list[list[float]] = [[] for _ in work]
        begin = time.perf_counter()
        runs = 0
        while runs == 0 or (runs < most_runs and time.perf_counter() - begin < seconds):
            for function, list_of_times in zip(work, times, strict=True):
                list_of_times.append(self.seconds(function))
            runs += 1
        return [statistics.median(list_of_times) for list_of_times in times], runs


class Cpu(Meter):
    """Measures NumPy code by the wall clock and by the process's memory."""

    xp = np

    def seconds(self, work: Work) -> float:
        """Return the seconds that one call takes, after calls that wake its threads.

        The first calls after a pause are slower: threads wake up, on virtual machines for a while
        all of them on one core.
        """
        end = time.perf_counter() + WAKING
        work()
        while time.perf_counter() < end:
            work()
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def peak_memory(self, work: Work) -> int:
        """Return the bytes that one call holds at its peak, its results included.

        This is the larger of two measurements, because each may miss something: `tracemalloc` sees
        the arrays that NumPy makes, but not memory that compiled code allocates itself. The peak of
        the process's resident memory (Linux) sees both, but misses pages that an earlier call left
        behind.
        """
        self.release()
        before = None
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
            before = _resident("VmRSS")
        except OSError:
            pass
        tracing = tracemalloc.is_tracing()
        if not tracing:
            tracemalloc.start()
        tracemalloc.reset_peak()
        start = tracemalloc.get_traced_memory()[0]
        result = work()
        peak = tracemalloc.get_traced_memory()[1] - start
        if not tracing:
            tracemalloc.stop()
        if before is not None:
            peak = max(peak, (_resident("VmHWM") or 0) - before)
        del result
        return peak

    def free_memory(self) -> int | None:
        """Return the bytes that processes can still get without swapping (Linux)."""
        try:
            text = Path("/proc/meminfo").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        found = re.search(r"^MemAvailable: *(\d+) kB", text, re.MULTILINE)
        return 1024 * int(found[1]) if found else None

    def settle(self) -> None:
        """Wait until threads of other libraries, which spin after their work, have gone to sleep.

        They would run on the cores of the next call: OpenMP's spin for up to 20 ms on some CPUs.
        """
        end = time.perf_counter() + LONGEST_SPIN
        while time.perf_counter() < end:
            before = time.process_time()
            time.sleep(QUIET)
            if time.process_time() - before < QUIET / 5:
                return

    def release(self) -> None:
        """Give back what is no longer used, and what glibc keeps of that."""
        gc.collect()
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int | None:
    """Bytes of ``VmRSS`` (resident now) or ``VmHWM`` (its peak); None where Linux is not."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    return None


class Gpu(Meter):
    """Measures CuPy code by CUDA events and by what it takes from CuPy's memory pool."""

    def __init__(self) -> None:
        import cupy

        self.xp = cupy
        self._buffer: Any = None

    def seconds(self, work: Work) -> float:
        """Return the seconds from the call's first to its last instruction on the GPU."""
        cuda = self.xp.cuda
        start, end = cuda.Event(), cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(start, end)) / 1e3

    def host_seconds(self, work: Work) -> float:
        """Return the seconds that one call takes on the host, the device being idle before it."""
        self.xp.cuda.Device().synchronize()
        start = time.perf_counter()
        result = work()
        taken = time.perf_counter() - start
        self.xp.cuda.Device().synchronize()
        del result
        return taken

    def peak_memory(self, work: Work) -> int:
        """Return the bytes of CuPy's memory pool that one call holds at its peak.

        Memory that libraries take directly from the driver is not included.
        """
        hook = _peak_hook(self.xp.cuda.MemoryHook)
        with hook:
            result = work()
            del result
        return int(hook.peak)

    def number(self) -> int:
        """Return the number of the current device."""
        return int(self.xp.cuda.runtime.getDevice())

    def name(self) -> str:
        """Return the name of the current device."""
        return str(self.xp.cuda.runtime.getDeviceProperties(self.number())["name"].decode())

    def free_memory(self) -> int:
        """Return the bytes that the current device could still give."""
        pool = self.xp.get_default_memory_pool()
        return int(self.xp.cuda.runtime.memGetInfo()[0]) + int(pool.free_bytes())

    def settle(self) -> None:
        """Write a buffer that is larger than the L2 cache, on the current stream.

        While the device does this, the host runs ahead; so the time to start a call is not measured
        unless it is longer.
        """
        if self._buffer is None:
            facts = self.xp.cuda.runtime.getDeviceProperties(self.number())
            largest = max(4 * int(facts.get("l2CacheSize", 0)), SMALLEST_FLUSH)
            size = max(largest, min(LARGEST_FLUSH, self.free_memory() // 8))
            self._buffer = self.xp.empty(size, np.uint8)
        self._buffer.fill(0)

    def release(self) -> None:
        """Give the blocks that CuPy's memory pool keeps back to the driver."""
        gc.collect()
        self.xp.cuda.Device().synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()

    def captured(self, work: Work) -> Work:
        """Return a function that replays a call as a CUDA graph on the current stream.

        Its results, scratch memory and inputs must outlive the call.
        """
        cuda = self.xp.cuda
        cuda.Device().synchronize()
        with cuda.Stream(non_blocking=True) as stream:
            work()  # everything that is made at the first use is made now
            stream.synchronize()
            stream.begin_capture()
            try:
                work()
            finally:
                graph = stream.end_capture()

        def replay(_: Work = work) -> None:  # which holds what the graph reads and writes
            graph.launch(cuda.get_current_stream())

        return replay


def _peak_hook(base: Any) -> Any:
    """Return a hook of CuPy's memory pool that keeps the largest number of bytes held."""

    class Peak(base):  # type: ignore[misc]
        name = "Peak"
        held = 0
        peak = 0

        def malloc_postprocess(self, *, mem_size: int, **_: Any) -> None:
            self.held += mem_size
            self.peak = max(self.peak, self.held)

        def free_postprocess(self, *, mem_size: int, **_: Any) -> None:
            self.held -= mem_size

    return Peak()
