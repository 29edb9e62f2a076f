"""The plan, the explanation and the workspace of a call are those of the route that runs."""

from __future__ import annotations

import inspect
import re
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from host_cupy import HostCupy
from hypothesis import HealthCheck, given, settings
from route_calls import CAPABILITIES, KINDS, calls, properties

import cupyflash
from cupyflash import ArgumentError, Plan
from cupyflash.arrays import cuda_device
from cupyflash.backends import cpu_tiles, routes
from cupyflash.gpu import tma
from cupyflash.gpu.kernels import decode

# The module that is nowhere is the same for all examples; what it remembers depends on no array.
ANY = settings(
    suppress_health_check=[
        HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large,
    ]
)  # fmt: skip
BY_KIND = pytest.mark.parametrize("kind", KINDS)
SAME_KERNELS = pytest.mark.thorough("they have the kernels of 8.0, with other shared memory")
GPUS = [x if x < (8, 9) or x == (9, 0) else pytest.param(x, marks=SAME_KERNELS)
        for x in CAPABILITIES]  # fmt: skip


@pytest.fixture(params=GPUS, ids=lambda x: ".".join(map(str, x)))
def gpu(request, install, monkeypatch):
    """A GPU that is nowhere, whose launches are written down."""
    monkeypatch.setattr(tma, "encode", lambda *_: bytes(tma.BYTES))
    monkeypatch.setattr(decode, "FEWEST_SHARED_BYTES", 1)
    return install(HostCupy(properties=properties(request.param)))


def launched(cupy):
    """Return what was launched, and forget it."""
    found = [(x.kernel, x.grid, x.threads, x.shared_memory) for x in cupy.launches]
    cupy.launches.clear()
    return found


def launches_of(route):
    """Return what a route launches."""
    named = ((step.special.name, step.grid, step.special.tiles) for step in route.steps)
    return [(name, n, tiles.threads, tiles.shared_memory) for name, n, tiles in named if n]


def plan_of(step):
    return Plan(step.kernel, step.block_q, step.block_kv, step.reason)


def planned(call):
    """Return the plan of a call, or None if there is none: then, the call fails, too."""
    try:
        return call.plan()
    except ArgumentError as error:
        with pytest.raises(ArgumentError, match=re.escape(str(error))):
            call.run()
        return None


@BY_KIND
def test_a_gpu_runs_what_the_plan_says(gpu, kind):
    ran = []

    @ANY
    @given(calls([kind]))
    def check(drawn):
        call = drawn.on(gpu)
        plan = planned(call)
        if plan is None:
            return
        assert not launched(gpu)  # a plan computes nothing
        route = routes.route(call.validated(), cuda_device.of(0))
        assert plan == plan_of(route.main)
        call.run()
        first = launched(gpu)
        assert first == launches_of(route)
        if first:
            ran.append(call)
            assert any(
                name.startswith(f"{plan.kernel}__")
                and f"__q{plan.block_q}_kv{plan.block_kv}" in name
                and grid == route.main.grid
                for name, grid, *_ in first
            )
        call.run()  # recognised, or not
        assert launched(gpu) == first
        if kind == "cached":
            size = call.workspace_size()
            assert (size > 0) == (route.scratch > 0)
            assert route.scratch <= max(size - 256, 0) < route.scratch + 256
            call.run(workspace=gpu.asarray(np.zeros(size, np.uint8)))
            assert launched(gpu) == first

    check()
    assert ran  # not all that was drawn is refused or empty


@pytest.mark.parametrize("kind", ["dense", "packed"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gpu_runs_the_route_of_gradients(gpu, kind, deterministic):
    ran = []

    @ANY
    @given(calls([kind]))
    def check(drawn):
        call = drawn.on(gpu)
        arrays, options = call.arrays, call.options
        if planned(call) is None:
            return
        given_out = call.run(return_lse=True)
        launched(gpu)
        names = {"packed": cupyflash.attention_varlen_backward}
        function = names.get(kind, cupyflash.attention_backward)
        route = routes.route(call.validated(), cuda_device.of(0), True, deterministic)
        size = call.workspace_size()
        for more in ({}, {"workspace": gpu.asarray(np.zeros(size, np.uint8))}):
            function(
                given_out[0], *arrays[:3], *given_out, *arrays[3:], deterministic=deterministic,
                **options, **more,
            )  # fmt: skip
            found = launched(gpu)
            assert found == launches_of(route)
            ran.extend(found)
        assert route.scratch <= size
        # Packed sequences of other lengths may need sums of dq. Parts begin at multiples of 256
        # bytes; dsink may be one.
        stores_dq = kind == "packed" and any(x.special.whole_dq for x in route.steps)
        if not deterministic and not stores_dq:
            assert size <= route.scratch + 256 * 8

    check()
    assert ran


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_a_gpu_runs_the_route_of_tangents(gpu, kind):
    functions = {"packed": cupyflash.attention_varlen_jvp}
    function = functions.get(kind, cupyflash.attention_jvp)
    ran = []

    @ANY
    @given(calls([kind]))
    def check(drawn):
        call = drawn.on(gpu)
        (q, k, v, *offsets), options = call.arrays, call.options
        options = {name: x for name, x in options.items() if name != "precision"}
        named = dict(zip(("offsets_q", "offsets_k"), offsets, strict=False))
        sink = options.get("sink")
        tsink = None if sink is None else gpu.asarray(np.zeros(sink.shape, np.float32))
        try:
            plan = cupyflash.plan(q, k, v, tangents=True, **named, **options)
        except ArgumentError as error:
            with pytest.raises(ArgumentError, match=re.escape(str(error))):
                function(q, k, v, *offsets, q, k, v, tsink=tsink, **options)
            return
        assert not launched(gpu)
        for _ in range(2):  # checked, and recognised
            function(q, k, v, *offsets, q, k, v, tsink=tsink, **options)
            made = launched(gpu)
            if made:
                ran.append(call)
                name, *_ = made[-1]
                assert name.startswith(f"{plan.kernel}__")
                assert f"__q{plan.block_q}_kv{plan.block_kv}" in name

    check()
    assert ran


@contextmanager
def recorded():
    """Note the kernels that calls on NumPy arrays run, with their tiles; they compute nothing."""
    from cupyflash.reference.cpu import decode_launch, decode_tasks, launch

    found = []
    nothing = SimpleNamespace(visited=0, nbytes=float("inf"), dense=None, grown=None)

    def tiled(*args):
        found.append(("reference.forward", *args[-3:-1]))
        return nothing

    def few(*_, **__):
        found.append(("reference.decode", decode_tasks.MOST_ROWS, decode_tasks.LEAF))
        return nothing

    of_backward = inspect.signature(launch.backward)

    def backward(*args):
        given = of_backward.bind(*args).arguments
        found.append(("reference.backward_dkdv", given["block_q"], given["block_kv"]))
        return nothing

    with (
        mock.patch.multiple(launch, forward=tiled, backward=backward),
        mock.patch.object(decode_launch, "decode", few),
    ):
        yield found


@BY_KIND
def test_the_cpu_runs_what_the_plan_says(kind):
    ran = []

    @given(calls([kind]))
    def check(call):
        with recorded() as found:
            plan = planned(call)
            if plan is None:
                return
            assert not found
            route = routes.route(call.validated(), None)
            assert plan == plan_of(route.main)
            call.run()
        assert found == [(plan.kernel, plan.block_q, plan.block_kv)]
        before = [(step.kernel, step.part) for step in route.steps if step is not route.main]
        assert before == ([("numpy", "numbers")] if kind == "codes" else [])
        ran.append(call)

    check()
    assert ran


@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_the_cpu_runs_the_route_of_gradients(kind):
    functions = {"packed": cupyflash.attention_varlen_backward}
    function = functions.get(kind, cupyflash.attention_backward)

    @given(calls([kind]))
    def check(call):
        arrays, options = call.arrays, call.options
        with recorded() as found:
            out, lse = call.run(return_lse=True)
            del found[:]
            function(out, *arrays[:3], out, lse, *arrays[3:], **options)
        main = routes.route(call.validated(), None, backward=True).main
        assert found == [(main.kernel, main.block_q, main.block_kv)]

    check()


def test_gradients_of_few_queries_are_explained_as_they_run():
    shapes = (2, 8, 1, 64), (2, 2, 4096, 64)
    forward, backward = (
        cupyflash.explain(*shapes, dtype="float32", device="cpu", backward=each)
        for each in (False, True)
    )
    assert (forward.main.block_q, forward.main.block_kv) == (cpu_tiles.MOST_ROWS, cpu_tiles.LEAF)
    assert "few queries" in forward.reason
    assert (backward.main.block_q, backward.main.block_kv) == cpu_tiles.TILES[0][1]
    assert "tiled" in backward.reason
