"""Ranks on a device whose streams are late, and the messages that others would send them."""

from __future__ import annotations

import ctypes
import dataclasses
from types import SimpleNamespace

import numpy as np
from host_cupy import in_host, read_in_host
from stream_cupy import StreamCupy

from cupyflash import dispatch, distributed, masks
from cupyflash.arrays import device_arrays
from cupyflash.arrays import tape as tapes
from cupyflash.backends.gpu import Gpu
from cupyflash.problem.call import Gradients

LENGTH = 96


class Late(Gpu):
    """A back end that computes on the CPU, when the stream comes to it; its work is on tapes.

    Kernels have memory of their own of some sizes.
    """

    def __init__(self, cupy, scratch=()):
        self.cupy, self.asked, self.scratch = cupy, cupy.asked, scratch

    def forward_piece(self, call, partial, first, results=None):
        def work(own, *made):
            dispatch.CPU.forward_piece(own, made[:2], first, made[2:] or None)

        self._later(work, call, [*partial, *(results or ())])

    def backward_piece(self, call, do, out, lse, dlse, gradients, deterministic):
        def work(own, *made):
            every = Gradients(*made[3:], None, None)
            dispatch.CPU.backward_piece(own, *made[:3], None, every, deterministic)

        assert dlse is None
        self._later(work, call, [do, out, lse, *gradients[:3]])

    def _later(self, function, call, arrays):
        read = {"mask": read_in_host(call.mask), "score_mod": read_in_host(call.score_mod)}

        def work(*given):
            hosts = list(map(in_host, given))
            own = dataclasses.replace(
                call, device=None, **read, **dict(zip("qkv", hosts[:3], strict=True))
            )
            self.cupy.enqueue(lambda: function(own, *hosts[3:]))
            self.asked.append("piece")
            self.cupy.shares.append(own.beside)

        call_arrays = call.q, call.k, call.v
        call = dataclasses.replace(call, q=None, k=None, v=None)  # so that it holds no memory
        if (written := tapes.current()) is not None:
            written.elementwise(work, *call_arrays, *arrays)
        with tapes.paused():
            scratch = [device_arrays.memory(size) for size in self.scratch]
        work(*call_arrays, *arrays)
        del scratch


class Device(StreamCupy):
    """It writes down in which order pieces, exchanges, copies and sums are asked for."""

    def __init__(self, seed):
        super().__init__(seed)
        self.asked = []
        self.shares = []  # whether each piece shares the device with messages

    def _convert(self, *arrays):
        self._asked_for(*arrays)
        super()._convert(*arrays)

    def _convert_rows(self, *arguments, size):
        self._asked_for(*(x for x in arguments if isinstance(x, self.ndarray)))
        self.asked.append("rows")
        super()._convert_rows(*arguments, size=size)

    def _asked_for(self, *arrays):
        *summands, to = arrays
        if self.current:
            self.asked.append("copy")
        elif len(summands) > 1:
            is_add = to.data.ptr == summands[0].data.ptr
            self.asked.append("add" if is_add else f"sum of {len(summands)}")

    def _copy_rows(self, *x):
        self.asked.append("copy")
        super()._copy_rows(*x)

    def copy_blocks(self, *x):
        self.asked.append("blocks")
        super().copy_blocks(*x)


class Spy:
    """A rank of NumPy arrays, whose messages are written down."""

    takes_device_arrays = True

    def __init__(self, comm):
        self._comm, self.messages = comm, []
        self.rank, self.size, self.nodes = comm.rank, comm.size, comm.nodes
        self.tell, self.check, self.abort = comm.tell, comm.check, comm.abort

    def exchange(self, sends, receives):
        sent = [(rank, x.copy()) for rank, x in sends]
        transfer, messages = self._comm.exchange(sends, receives), self.messages

        class Transfer:
            def wait(self, *how):
                transfer.wait(*how)
                messages.append((sent, [(rank, x.copy()) for rank, x in receives]))

        return Transfer()


class Replay:
    """A rank on the device, to which come the messages that a `Spy` saw."""

    takes_device_arrays = True

    def __init__(self, spy, cupy, copies=False):
        self.rank, self.size, self.nodes = spy.rank, spy.size, spy.nodes
        self.copies = copies
        self._spy, self._cupy, self._number = spy, cupy, 0
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self.sent = []  # what was there when it was sent, and what ought to be

    def exchange(self, sends, receives):
        cupy, stream = self._cupy, self._stream
        expected, comes = self._spy.messages[self._number % len(self._spy.messages)]
        self._number += 1
        stream.wait_event(self._event(cupy.cuda.get_current_stream()))
        assert [rank for rank, _ in sends] == [rank for rank, _ in expected]
        for (_, x), (_, like) in zip(sends, expected, strict=True):
            cupy.enqueue(self._sending(x.host, like), stream.ptr)
        for (_, x), (_, content) in zip(receives, comes, strict=True):
            cupy.enqueue(self._receiving(x.host, content), stream.ptr)
        arrived = self._event(stream)
        cupy.asked.append("exchange" if sends or receives else "nothing")

        class Transfer:
            def wait(self, timeout, what):
                cupy.cuda.get_current_stream().wait_event(arrived)

        return Transfer()

    def _event(self, stream):
        event = self._cupy.cuda.Event()
        event.record(stream)
        return event

    def _sending(self, host, like):
        return lambda: self.sent.append((host.copy().reshape(-1).view(np.uint8), like))

    def _receiving(self, host, content):
        def work():
            host[...] = content

        return work

    def tell(self, message, timeout):
        return [message] * self.size

    def check(self):
        pass

    def abort(self, reason):
        raise AssertionError(reason)


class ReplayOfSpans(Replay):
    """One that is told addresses by tapes."""

    def exchange_spans(self, sends, receives):
        """Start to send and to receive."""
        return self.exchange(*([(rank, self._at(*x)) for rank, *x in each]
                               for each in (sends, receives)))  # fmt: skip

    def _at(self, place, size):
        return SimpleNamespace(host=np.frombuffer((ctypes.c_char * size).from_address(place), "u1"))


class ReplayOfRows(ReplayOfSpans):
    """One to which messages of a rank are one row of bytes, whatever their parts are."""

    def exchange(self, sends, receives):
        """Start to send and to receive."""
        sent, comes = self._spy.messages[self._number % len(self._spy.messages)]
        sent, comes = _rows_of(sent), _rows_of(comes)
        self._spy.messages[self._number % len(self._spy.messages)] = sent, comes
        assert [rank for rank, _ in sent] == list(dict.fromkeys(rank for rank, _ in sends))
        return super().exchange(*(
            [(rank, _Parts([x.host for other, x in each if other == rank])) for rank, _ in row]
            for each, row in ((sends, sent), (receives, comes))
        ))  # fmt: skip


def _rows_of(messages):
    """Return the messages of each rank as one."""
    ranks = dict.fromkeys(rank for rank, _ in messages)
    return [
        (rank, np.concatenate([x.reshape(-1).view(np.uint8) for r, x in messages if r == rank]))
        for rank in ranks
    ]


class _Parts:
    """Arrays in a row, which are read and written when the device does so."""

    def __init__(self, parts):
        self.host, self._parts = self, parts

    def copy(self):
        return np.concatenate([np.ascontiguousarray(x).reshape(-1).view("u1") for x in self._parts])

    def __setitem__(self, _, content):
        begin = 0
        for x in self._parts:
            x[...] = content[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
            begin += x.nbytes
        assert begin == content.nbytes


def both(arrays, comm, layout, scheme, mask=None):
    q, k, v, do = arrays
    mask = masks.causal() if mask is None else mask
    options = {"comm": comm, "layout": layout, "scheme": scheme, "mask": mask}
    out, lse = distributed.attention(q, k, v, return_lse=True, **options)
    gradients = distributed.attention_backward(do, q, k, v, out, lse, **options)
    return out, lse, *gradients[:3]


def on_host(comms, kind, scheme, heads_kv=2, copies=False, mask=None):
    """Return of each rank what it says to others, its arrays, and its results without a device."""
    rng = np.random.default_rng(0)
    sizes = (2 * heads_kv, 8), (heads_kv, 8), (heads_kv, 12), (2 * heads_kv, 12)
    shapes = [(2, count, LENGTH, dim) for count, dim in sizes]
    whole = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]

    def of_rank(comm):
        spy, layout = Spy(comm), distributed.layout(comm, LENGTH, kind=kind)
        spy.copies = copies
        own = [np.ascontiguousarray(layout.take(x)) for x in whole]
        return spy, own, both(own, spy, layout, scheme, mask)

    return comms.run(of_rank)
