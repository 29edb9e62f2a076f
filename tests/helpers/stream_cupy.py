"""A CuPy whose streams are queues: what is asked of a device happens late, and in any order.

Work is done only when the host waits for an event or for a stream, and then the streams take turns
at random, as far as events let them. Memory that nothing holds any more is given out again at once,
full of NaN, as CuPy's pool does for work in the order of one stream. So a missing event, or memory
that is let go too early, changes results.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
from host_cupy import HostCupy, MemoryPointer, convert_rows, copy_rows


class Pinned(np.ndarray):
    """Memory of the host that a device copies from and to."""

    @property
    def ptr(self):
        return self.ctypes.data


class Owned(MemoryPointer):
    """Memory of the pool, which gets it back when no pointer into it is left."""

    def __init__(self, held, offset, device_id, owner):
        super().__init__(held, offset, device_id)
        self.owner = owner

    def __add__(self, offset):
        return Owned(self.held, self.offset + offset, self.device_id, self.owner)


class Owner:
    """What pointers into one piece of memory have in common."""


class StreamCupy(HostCupy):
    """The module.

    Attributes
    ----------
    copies : list of (int, int)
        Kind and size of every copy.
    pinned : bool
        Whether arrays of the host count as pinned.
    """

    def __init__(self, seed=0, pinned=False):
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.queues = {0: deque()}
        self.turn = threading.RLock()  # of the threads that ask the device for something
        self.copies, self.pinned = [], pinned
        self._free = {}  # of each stream, as CuPy's pool has it
        self.burst = 1  # steps for which some streams are ahead of others
        self.current = 0
        module = self

        class Event:
            def __init__(self, disable_timing=False):
                self.marker = SimpleNamespace(done=True)

            def record(self, stream):
                self.marker = marker = SimpleNamespace(done=False)
                module.enqueue(lambda: setattr(marker, "done", True), stream.ptr)

            @property
            def done(self):
                return self.marker.done

            def synchronize(self):
                module.run_until(lambda: self.marker.done)

        class Stream:
            def __init__(self, ptr=None, non_blocking=False, priority=0):
                with module.turn:
                    self.ptr = len(module.queues) if ptr is None else ptr
                    module.queues.setdefault(self.ptr, deque())

            def wait_event(self, event):
                module.queues[self.ptr].append(event.marker)

            def synchronize(self):
                module.run_until(lambda: not module.queues[self.ptr])

            @property
            def done(self):
                return not module.queues[self.ptr]

            @staticmethod
            def is_capturing():
                return False

            def __enter__(self):
                self.before, module.current = module.current, self.ptr

            def __exit__(self, *_):
                module.current = self.before

        def copy(to, source, size, kind, stream):
            module.copies.append((kind, size))
            module.enqueue(lambda: ctypes.memmove(to, source, size), stream)

        self.cuda.Stream, self.cuda.Event = Stream, Event
        self.cuda.get_current_stream = lambda: Stream(module.current)
        self.cuda.alloc_pinned_memory = lambda size: np.zeros(size, np.uint8).view(Pinned)
        self.cuda.runtime.memcpyAsync = copy
        self.cuda.runtime.memcpy2DAsync = self._copy_rows
        place = SimpleNamespace(devicePointer=int(pinned), hostPointer=int(pinned))
        self.cuda.runtime.pointerGetAttributes = lambda _: place
        self.ElementwiseKernel = self._kernel
        self.ndarray.fill = lambda array, value: self._later(_fill, array.host, value)

    def enqueue(self, work, stream=None):
        """Let work be done on a stream, the current one if none is given."""
        self.queues[self.current if stream is None else stream].append(work)

    def _later(self, work, *hosts):
        self.enqueue(lambda: work(*hosts))

    def _kernel(self, inputs, output, body, name):
        return self._convert_rows if "rows" in name else self._convert

    def _convert_rows(self, *arguments, size):
        self._later(lambda: convert_rows(*arguments, size=size))

    def _convert(self, *arrays):
        *summands, to = (x.host for x in arrays)
        self._later(lambda: _write(to, functools.reduce(np.add, summands)))

    def copy_blocks(self, threads, told):
        copied = told.copy()  # as the driver does
        self._later(super().copy_blocks, threads, copied)

    def _copy_rows(self, *x):
        *where, kind, stream = x
        assert kind == 3
        self.enqueue(lambda: copy_rows(*where), stream)

    def asarray(self, host):
        made = self.ndarray(host.shape, host.dtype)
        self._later(_write, made.host, np.array(host))
        return made

    def ascontiguousarray(self, array, dtype):
        assert array.dtype == dtype
        return array

    def alloc(self, size):
        free = self._free.setdefault(self.current, [])
        fits = [held for held in free if held.size >= size]
        held = fits[-1] if fits else np.zeros(max(size, 1), np.uint8)
        free[:] = [each for each in free if each is not held]
        held_part = held[:size]
        self._later(_fill_bytes, held_part)
        owner = Owner()
        weakref.finalize(owner, free.append, held)
        return Owned(held_part, 0, self.device, owner)

    def run_until(self, reached):
        """Let streams take turns until the host waits no longer."""
        with self.turn:
            ahead, steps = {}, 0
            while not reached():
                if steps % self.burst == 0:
                    ahead = {stream: self.rng.random() for stream in self.queues}
                steps += 1
                ready = [
                    stream
                    for stream, queue in self.queues.items()
                    if queue and getattr(queue[0], "done", True)
                ]
                assert ready, "the host waits for what never happens"
                work = self.queues[min(ready, key=lambda x: ahead.get(x, 1))].popleft()
                if callable(work):
                    work()

    def run_all(self):
        self.run_until(lambda: not any(self.queues.values()))


def _write(to, array):
    with np.errstate(all="ignore"):
        to[...] = array


def _fill(array, value):
    array.fill(value)


def _fill_bytes(held):
    held.fill(0xFF)
