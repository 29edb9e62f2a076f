"""Arrays in masks, score changes and angles, which are constants: where programs read them.

No GPU is needed: calls of programs for the CPU are made as those of a GPU are, with a stand-in for
CuPy.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentTypeError, Rotary, lookup, masks, scores
from cupyflash.arrays import device_arrays

jax = pytest.importorskip("jax", reason='needs JAX: pip install ".[jax]"')

import jax.numpy as jnp  # noqa: E402 (after the skip)

from cupyflash.jax import attention, attention_cached, attention_varlen, rope  # noqa: E402
from cupyflash.jax.constants import Constants, alike  # noqa: E402

if jax.default_backend() != "cpu":
    pytest.skip("programs for the CPU are tried here", allow_module_level=True)

X = np.random.default_rng(0).standard_normal((2, 2, 9, 8)).astype(np.float32)
TURNS = np.outer(np.arange(9), [1.0, 0.1]).astype(np.float32)
COS, SIN = np.cos(TURNS), np.sin(TURNS)
SLOPES = np.array([0.5, 0.25], np.float32)
SHIFTS = np.array([3, 5])


def rotate(cos, sin):
    return lambda x: rope(x, jnp.arange(9), Rotary(cos, sin))


def attend(slopes, shifts):
    options = {"score_mod": [scores.alibi(slopes)], "mask": masks.causal(offset=shifts)}
    return jax.grad(lambda x: attention(x, X, X, **options).sum())


def attend_packed(slopes, shifts):
    options = {"score_mod": scores.alibi(slopes), "mask": masks.causal(offset=shifts)}
    return lambda x: attention_varlen(x[0], X[0], X[0], [0, 4, 9], [0, 4, 9], **options)


def attend_to_a_cache(slopes, shifts):
    options = {"score_mod": scores.alibi(slopes), "mask": masks.causal(offset=shifts)}
    return lambda x: attention_cached(x[:, :, :2], X, X, [9, 7], **options)


PROGRAMS = {
    "rope": (rotate, (COS, SIN)),
    "attention and its gradient": (attend, (SLOPES, SHIFTS)),
    "packed sequences": (attend_packed, (SLOPES, SHIFTS)),
    "a cache": (attend_to_a_cache, (SLOPES, SHIFTS)),
}


@pytest.fixture
def copies(monkeypatch):
    """Return a list of the arrays that are copied to the GPU, each with its copy."""
    made = []
    to_device = device_arrays.to_device

    def watched(array, dtype):
        made.append((array, to_device(array, dtype)))
        return made[-1][1]

    monkeypatch.setattr(device_arrays, "to_device", watched)
    return made


def told(cupy):
    return np.concatenate([launch.words for launch in cupy.launches])


def held_at(place, like):
    return np.ndarray(like.shape, like.dtype, (ctypes.c_char * like.nbytes).from_address(place))


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_in_host_memory_are_copied_once(as_on_a_gpu, cupy, copies, name):
    make, arrays = PROGRAMS[name]
    program = jax.jit(make(*arrays))
    for _ in range(3):  # the third call is recognised
        cupy.launches.clear()
        jax.block_until_ready(program(X))
        mine = [pair for pair in copies if any(pair[0] is x for x in arrays)]
        assert len(mine) == len(arrays)
        for array, made in mine:
            place = device_arrays.address(made)
            assert place in told(cupy)
            assert np.array_equal(held_at(place, array), array)


@pytest.mark.parametrize("name", PROGRAMS)
def test_arrays_on_the_gpu_are_read_where_they_are(as_on_a_gpu, cupy, copies, name):
    make, arrays = PROGRAMS[name]
    there = [cupy.asarray(x) for x in arrays]
    jax.block_until_ready(jax.jit(make(*there))(X))
    assert not any(array is x for array, _ in copies for x in there)
    for x in there:
        assert device_arrays.address(x) in told(cupy)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_the_cpu_read_copies_of_arrays_on_a_gpu(cupy, name, monkeypatch):
    make, arrays = PROGRAMS[name]
    read = []
    read_back = device_arrays.read_back
    monkeypatch.setattr(device_arrays, "read_back", lambda x: read.append(x) or read_back(x))
    wanted = make(*arrays)(X)
    program = jax.jit(make(*map(cupy.asarray, arrays)))
    for _ in range(2):
        assert np.array_equal(program(X), wanted)
        assert len(read) == len(arrays)


def test_each_stream_has_copies(cupy):
    held = Constants({"rotary": Rotary(COS, SIN), "scale": 1.0})
    x, found = cupy.asarray(X), {}
    for _ in range(2):
        for stream in (0, 71, 72):
            with cupy.stream(stream):
                made = held.beside(x)
            assert found.setdefault(stream, made) is made
            assert made["scale"] == 1.0
    places = {device_arrays.address(made["rotary"].cos) for made in found.values()}
    assert len(places) == 3


def test_streams_wait_for_what_writes_arrays_on_the_gpu(cupy, monkeypatch):
    marks, waits = [], []
    monkeypatch.setattr(device_arrays, "mark", lambda: marks.append(object()) or marks[-1])
    monkeypatch.setattr(device_arrays, "wait_for", waits.append)
    slopes = cupy.asarray(SLOPES)
    held = Constants({"score_mod": scores.alibi(slopes), "rotary": Rotary(COS, SIN)})
    assert len(marks) == 1
    for _ in range(2):
        held.beside(cupy.asarray(X))
    assert waits == marks


def test_constants_without_arrays_are_what_they_were(cupy):
    values = {"mask": masks.window(3, 0), "score_mod": [scores.softcap(3.0)], "scale": None}
    held = Constants(values)
    assert held.beside(X) is values
    assert held.beside(cupy.asarray(X)) is values


def test_arrays_in_host_memory_are_read_where_they_are():
    values = {"mask": masks.causal(offset=SHIFTS), "score_mod": (scores.alibi(SLOPES),)}
    made = Constants(values).beside(X)
    assert all(made[name] is values[name] for name in values)


def test_checks_do_not_read_arrays_on_a_gpu(cupy, monkeypatch):
    monkeypatch.setattr(device_arrays, "read_back", None)
    made = alike([scores.alibi(cupy.asarray(SLOPES)), scores.softcap(2.0)])
    (stands,) = made[0].structure[1]
    assert isinstance(stands, np.ndarray)
    assert stands.shape == SLOPES.shape
    assert not stands.any()


def test_learned_look_ups_are_refused_wherever_they_are(cupy):
    for array in (SLOPES, cupy.asarray(SLOPES)):
        learned = scores.alibi(lookup(array, learned=True))
        with pytest.raises(ArgumentTypeError, match="got a learned look-up"):
            attention(X, X, X, score_mod=learned)


def test_the_results_are_those_of_numpy():
    options = {"score_mod": scores.alibi(SLOPES), "mask": masks.causal(offset=SHIFTS)}
    found = jax.jit(lambda x: attention(x, x, x, **options))(X)
    assert np.array_equal(found, cupyflash.attention(X, X, X, **options))
