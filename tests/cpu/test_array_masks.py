"""Boolean arrays hide pairs by vectors, with the bits of a program, and are made again."""

from __future__ import annotations

import numpy as np
import pytest
from placement import same_bits
from strategies import DTYPES

import cupyflash
from cupyflash import lookup, masks, scores
from cupyflash.backends import cpu_programs
from cupyflash.backends.host_replay import HostSignature
from cupyflash.expr import lower, where
from cupyflash.expr.functions import POSITIONS
from cupyflash.expr.strided import strided_condition
from cupyflash.expr.structure import structure
from cupyflash.problem import replay, validate
from cupyflash.problem.options import Options
from cupyflash.reference.cpu.array_mask import mask_by_array
from cupyflash.reference.cpu.kernels import called_kernels
from cupyflash.reference.cpu.tile import (
    classify_by_both,
    classify_by_program,
    mask_by_program,
    mask_by_ranges,
)

_B, _H, _I, _J = POSITIONS


def calls(q, k, v, do, **options):
    """The forward's and the backward's arrays."""
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **options)
    return out, lse, *cupyflash.attention_backward(do, q, k, v, out, lse, **options)


def packed_calls(q, k, v, do, offsets, **options):
    out, lse = cupyflash.attention_varlen(q, k, v, *offsets, return_lse=True, **options)
    gradients = cupyflash.attention_varlen_backward(do, q, k, v, out, lse, *offsets, **options)
    return out, lse, *gradients


def same(ours, others):
    return all(x is y is None or same_bits(x, y) for x, y in zip(ours, others, strict=True))


def assert_bits_of_the_program(run):
    """`run` takes the vectors, and has the same bits without them."""
    recognised = []

    def refuse(root):
        recognised.append(strided_condition(root))

    replay._entries.clear()
    with pytest.MonkeyPatch.context() as patch:
        for module in (lower, cpu_programs):
            patch.setattr(module, "strided_condition", refuse)
        by_program = run()
    assert any(recognised)
    replay._entries.clear()
    assert same(run(), by_program)


def arrays(rng, dtype=np.float32, batch=2, queries=49, keys=61, d=17, nonfinite=False):
    q, do = (rng.standard_normal((batch, 6, queries, d)).astype(dtype) for _ in "12")
    k, v = (rng.standard_normal((batch, 3, keys, d)).astype(dtype) for _ in "12")
    if nonfinite:
        k[0, 1, keys // 2], v[-1, 0, -1, -1] = np.nan, np.inf
    return q, k, v, do


SHAPES = {
    "whole": (2, 6, 49, 61),
    "of queries and keys": (49, 61),
    "of keys": (2, 1, 1, 61),
    "of queries": (6, 49, 1),
    "number": (1,),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_of_any_axes(shape, dtype):
    rng = np.random.default_rng(0)
    mask = rng.random(SHAPES[shape]) < 0.7
    mask.flat[0] = False
    each = arrays(rng, dtype, nonfinite=shape == "whole")
    assert_bits_of_the_program(lambda: calls(*each, mask=mask))


STRIDES = {
    "keys first": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "every second": lambda x: np.repeat(x, 2, axis=-1)[..., ::2],
    "odd": lambda x: np.pad(x, [(0, 0), (2, 3), (3, 4), (1, 2)])[:, 2:-3, 3:-4, 1:-2],
    "reversed": lambda x: x[..., ::-1, ::-1],
    "queries repeated": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "keys repeated": lambda x: np.broadcast_to(x[..., :1], x.shape),
    "of bytes": lambda x: (x * np.arange(2, 2 + x.shape[-1], dtype=np.uint8)).view(bool),
}


@pytest.mark.parametrize("strides", STRIDES)
def test_any_strides(strides):
    rng = np.random.default_rng(1)
    mask = STRIDES[strides](rng.random((2, 6, 49, 61)) < 0.7)
    each = arrays(rng, nonfinite=True)
    assert_bits_of_the_program(lambda: calls(*each, mask=mask))


BESIDE = {
    "causal": masks.causal(),
    "window": masks.window(9, 4),
    "no range": masks.mask(lambda b, h, i, j: (i + j + h) % 5 > 0),
    "segments": masks.segments(np.arange(49) // 20, np.arange(61) // 20),
    "another array": masks.dense(np.tri(49, 61, 8, dtype=bool)),
}


@pytest.mark.parametrize("beside", BESIDE)
def test_a_condition_beside_others(beside):
    """It is the array that says the same, bit for bit, whatever takes part."""
    rng = np.random.default_rng(2)
    array = rng.random((2, 1, 49, 61)) < 0.7
    mask = BESIDE[beside] & masks.dense(array)
    each = arrays(rng, nonfinite=True)
    bias = rng.standard_normal((6, 49, 61), np.float32)
    options = {"bias": bias, "score_mod": scores.softcap(3.0), "dropout": 0.1, "seed": 3}
    assert_bits_of_the_program(lambda: calls(*each, mask=mask))
    assert_bits_of_the_program(lambda: calls(*each, mask=mask, **options))
    whole = np.broadcast_to(mask.to_array(2, 6, 49, 61), (2, 6, 49, 61))
    assert same(calls(*each, mask=mask, **options), calls(*each, mask=whole, **options))


def test_tiles_beside_others():
    rng = np.random.default_rng(3)
    mask = rng.random((210, 270)) < 0.7
    mask[:64, :128], mask[64:128, 128:] = True, False  # whole tiles, and hidden ones
    each = arrays(rng, batch=1, queries=210, keys=270)
    assert_bits_of_the_program(lambda: calls(*each, mask=mask))
    assert_bits_of_the_program(lambda: calls(*each, mask=masks.causal(9) & masks.dense(mask)))


def test_packed_rows_and_few_queries():
    rng = np.random.default_rng(4)
    q, k, v, do = (x[0] for x in arrays(rng, queries=70, keys=70))
    offsets = [np.array([0, 30, 70])] * 2
    mask = rng.random((2, 1, 40, 40)) < 0.7
    assert_bits_of_the_program(lambda: packed_calls(q, k, v, do, offsets, mask=mask))
    q, k, v, _ = arrays(rng, queries=3, keys=900)
    mask = rng.random((2, 1, 3, 900)) < 0.7
    mask[1, :, :, 100:700] = False
    for each in (mask, masks.window(650, 0) & masks.dense(mask)):
        assert_bits_of_the_program(
            lambda m=each: cupyflash.attention(q, k, v, mask=m, return_lse=True)
        )


@pytest.mark.thorough("the same, of drawn sizes, strides and types")
def test_drawn_arrays():
    rng = np.random.default_rng(6)
    for _ in range(300):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        batch, queries, keys = rng.integers(1, 4), *rng.integers(1, 150, 2)
        whole = (batch, 6, queries, keys)
        shape = tuple(1 if rng.random() < 0.25 else size for size in whole)[rng.integers(0, 3) :]
        mask = rng.random(shape) < rng.choice([0.01, 0.6, 0.999])
        mask.flat[0] = False
        if len(shape) == 4:
            mask = [lambda x: x, *STRIDES.values()][rng.integers(len(STRIDES) + 1)](mask)
        if shape[-1] > 1 and rng.random() < 0.4:  # without keys, both are one range
            mask = masks.causal(int(rng.integers(-5, 50))) & masks.dense(mask)
        each = arrays(rng, dtype, batch, queries, keys, rng.integers(1, 40), rng.random() < 0.3)
        if isinstance(mask, np.ndarray) and mask.all():
            continue
        assert_bits_of_the_program(lambda e=each, m=mask: calls(*e, mask=m))


# Which kernels serve


def kernels_of(mask):
    q, k, v, _ = arrays(np.random.default_rng(0))
    call = validate.call(q, k, v, Options(mask=mask))
    called = called_kernels(call.problem, cpu_programs.programs(call), backward=True)
    return {name: called[name][0] for name in ("mask", "classify") if name in called}


def test_which_kernels_serve():
    array = np.tri(49, 61, dtype=bool)
    dense = masks.dense(array)
    by_array = {"mask": mask_by_array, "classify": classify_by_program}
    for mask in (dense, masks.dense(array[:, ::2].repeat(2, 1)[:, :61]), dense & dense):
        assert kernels_of(mask) == by_array
    assert kernels_of(BESIDE["no range"] & dense) == by_array
    assert kernels_of(masks.causal() & dense) == {**by_array, "classify": classify_by_both}
    assert kernels_of(masks.causal(100) & dense) == by_array  # it hides nothing
    full = masks.causal() & masks.dense(np.ones((49, 61), bool))
    assert kernels_of(full)["mask"] is mask_by_ranges
    assert kernels_of(BESIDE["no range"])["mask"] is mask_by_program
    assert kernels_of(masks.causal() | dense)["mask"] is mask_by_program


def test_what_is_recognised():
    read = lookup(np.zeros((300, 300), bool))
    one, other = read[_I, _J], _I < _J
    assert strided_condition(one)[0] is None
    assert strided_condition(other & one).other is other
    assert strided_condition(one & other & (_H > 0)).other is not None
    assert strided_condition(read[_J, 2 * _I])[3:] == (2, 300)
    for mask in (~one, one | other, read[_I // 2, _J], other, where(other, one, one)):
        assert strided_condition(mask) is None, mask
    many = one
    for _ in range(2000):
        many = many & many
    assert strided_condition(many).other is None


# Calls that are made again


def replayed(run):
    """What `run` computes, and whether all of its calls were made again."""
    made = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            own = getattr(HostSignature, name)

            def spy(self, *args, own=own, **named):
                result = own(self, *args, **named)
                made.append(result is not None)
                return result

            patch.setattr(HostSignature, name, spy)
        results = run()
    return results, len(made) == 2 and all(made)


# Proofs read small arrays that are not the whole mask.
MADE_AGAIN = [(30, None), (250, None), (250, masks.causal()), (250, BESIDE["no range"])]


@pytest.mark.parametrize(("length", "beside"), MADE_AGAIN)
def test_other_elements_are_made_again(length, beside):
    rng = np.random.default_rng(5)
    each = arrays(rng, queries=length, keys=length)

    def run(array):
        mask = array if beside is None else beside & masks.dense(array)
        return calls(*each, mask=mask)

    drawn = [rng.random((length, length)) < share for share in (0.3, 0.9)]
    replay._entries.clear()
    run(drawn[0])
    found, is_replayed = replayed(lambda: run(drawn[1]))
    assert is_replayed
    replay._entries.clear()
    assert same(found, run(drawn[1]))
    for every in (True, False):  # kernels leave these out, or know an array's extremes
        array = np.full((length, length), every)
        replay._entries.clear()
        run(drawn[0])
        found, is_replayed = replayed(lambda a=array: run(a))
        assert is_replayed == (length == 30 and not every)
        replay._entries.clear()
        assert same(found, run(array))


def test_elements_that_say_more_are_compared():
    """A range of keys whose end an array says is found by its elements."""
    rng = np.random.default_rng(6)
    each = arrays(rng, queries=5000, keys=5, batch=1)

    def run(picks):
        mask = masks.mask(lambda b, h, i, j: j <= where(lookup(picks)[i], 3, 1))
        return calls(*each, mask=mask)

    assert_read_again(run, rng.random(5000) < 0.5)


def test_a_condition_without_the_key_is_compared():
    """It and a range are one range, whose ends are computed once."""
    rng = np.random.default_rng(7)
    each = arrays(rng, queries=5000, keys=5, batch=1)
    mask = masks.causal(5000 - 7)
    assert_read_again(
        lambda x: calls(*each, mask=mask & masks.dense(x[:, None])), rng.random(5000) < 0.5
    )


def assert_read_again(run, array):
    run(array)
    run(array)
    found = run(~array)
    replay._entries.clear()
    assert same(found, run(~array))
    assert not same(found, run(array))


def test_which_arrays_only_hide_pairs():
    one, two, ends = np.zeros((9, 9), bool), np.zeros((9, 9), bool), np.zeros(9, int)

    def found(tree):
        made, read = structure(tree)
        return {id(read[place]) for place in made.conditions}

    a, b = lookup(one)[_I, _J], lookup(two)[_I, _J]
    assert found(a) == {id(one)}
    assert found((_I < _J) & a & b) == {id(one), id(two)}
    assert found(a & (b | (_I < _J))) == {id(one)}
    assert found(a & lookup(one)[_J, _I]) == {id(one)}
    assert found(a & ~lookup(one)[_J, _I]) == set()
    assert found(a & (where(a, _I, 0) < _J)) == set()
    assert found(a & (lookup(ends)[_I] < _J)) == {id(one)}
