"""Arrays that change between the proof of an index and the kernel: no index leaves its array."""

import numpy as np
import pytest
from emulator.calls import Emulator
from harness import attend_backward

import cupyflash
from cupyflash import lookup, masks, scores
from cupyflash.expr import bind as binding
from cupyflash.expr import floor
from cupyflash.expr.bind import Dense, bind
from cupyflash.expr.nodes import walk
from cupyflash.problem import validate
from cupyflash.problem.options import Options

ROWS, KEYS = 9, 40
SMALLEST = -(2**63)


def surrounded(values, guard):
    """An array in the middle of a larger one, whose other elements nobody may read."""
    whole = np.full(tuple(3 * n for n in values.shape), guard, values.dtype)
    inside = whole[tuple(slice(n, 2 * n) for n in values.shape)]
    inside[...] = values
    return inside


@pytest.fixture
def changed(monkeypatch):
    """Change an array whenever the indices that depend on it have been proven."""

    def change(array, value, run="cpu"):
        prove, proven = binding.prove, array.copy()

        def prove_and_change(root, sizes, *numbers):
            array[...] = proven
            if run == "cpu":  # of arrays on a device, types are known and not elements
                prove(root, sizes, *numbers)
            if any(node.op == "lookup" and node.value[0] is array for node in walk(root)):
                array[...] = value

        monkeypatch.setattr(binding, "prove", prove_and_change)

    return change


def arrays(dtype=np.float32):
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, n, 8)).astype(dtype) for n in (ROWS, KEYS, KEYS)]


# Value of the inner array after the change -> the element that the outer one is read at.
CHANGES = [(10**6, -1), (-(10**6), 0), (2**62, -1), (SMALLEST, 0)]


def nested(inner):
    outer = surrounded(np.arange(5, dtype=np.float32), np.nan)
    table, places = lookup(outer), lookup(inner)
    score = scores.score(lambda s, b, h, i, j: s + table[places[j]] * (i - j) * 0.01)
    return score, outer


def by_emulator(q, k, v, **options):
    call = validate.call(q, k, v, Options.of(**options))
    out, lse = np.zeros_like(q), np.zeros(q.shape[:-1], np.float32)
    Emulator().forward(call, out, lse)
    return out


RUNS = {"cpu": cupyflash.attention, "cuda": by_emulator}


@pytest.mark.parametrize(("value", "element"), CHANGES)
@pytest.mark.parametrize("run", RUNS)
def test_an_index_of_a_score_stays_in_its_array(run, value, element, changed):
    q, k, v = arrays()
    inner = np.arange(KEYS, dtype=np.int64) % 5
    score, outer = nested(inner)
    changed(inner, value, run)
    ours = RUNS[run](q, k, v, score_mod=score)
    number = float(outer[element])
    same = scores.score(lambda s, b, h, i, j: s + number * (i - j) * 0.01)
    np.testing.assert_allclose(ours, cupyflash.attention(q, k, v, score_mod=same), rtol=2e-5)


@pytest.mark.parametrize(("value", "element"), CHANGES)
@pytest.mark.parametrize("run", RUNS)
def test_an_index_of_a_mask_and_of_its_tiles_stays_in_its_array(run, value, element, changed):
    q, k, v = arrays()
    inner = np.arange(KEYS, dtype=np.int64) % 5
    outer = surrounded(np.array([[7, 8, 39, 39, 39], [39] * 5]), 10**9)
    last, rows = lookup(outer), lookup(inner)
    mask = masks.mask(lambda b, h, i, j: j <= last[rows[j] % 2, rows[j]])
    changed(inner, value, run)
    ours = RUNS[run](q, k, v, mask=mask)
    number = int(outer[0, element])
    wanted = cupyflash.attention(q, k, v, mask=masks.mask(lambda b, h, i, j: j <= number))
    np.testing.assert_allclose(ours, wanted, rtol=2e-5)


@pytest.mark.parametrize("run", RUNS)
def test_the_smallest_integer_has_no_absolute_value(run, changed):
    """Compilers may take an absolute value to be no less than 0; here it is."""
    q, k, v = arrays()
    inner = np.arange(KEYS, dtype=np.int64) % 5
    outer = surrounded(np.full(5, 0.25, np.float32), np.nan)
    table, places = lookup(outer), lookup(inner)
    score = scores.score(lambda s, b, h, i, j: s + table[abs(places[j])] * j)
    changed(inner, SMALLEST, run)
    same = scores.score(lambda s, b, h, i, j: s + 0.25 * j)
    wanted = cupyflash.attention(q, k, v, score_mod=same)
    np.testing.assert_allclose(RUNS[run](q, k, v, score_mod=score), wanted, rtol=2e-5)


def test_gradients_are_held_too(changed):
    q, k, v = arrays()
    inner = np.arange(KEYS, dtype=np.int64) % 5
    score, outer = nested(inner)
    changed(inner, 10**6)
    number = float(outer[-1])
    same = scores.score(lambda s, b, h, i, j: s + number * (i - j) * 0.01)
    ours = attend_backward(q, q, k, v, score_mod=score)
    for a, b in zip(ours[:3], attend_backward(q, q, k, v, score_mod=same)[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_only_indices_that_hang_on_elements_are_held():
    table, places = lookup(np.zeros(50)), lookup(np.zeros(50, np.int32))
    sizes = Dense((1,), 1, 50, 50)

    def size(root):
        return len(walk(bind(root, sizes)))

    i, j = binding.symbol("i"), binding.symbol("j")
    assert size(table[i] + table[j]) == len(walk(table[i] + table[j]))
    assert size(table[places[j]]) == len(walk(table[places[j]])) + 4
    by_float = table[floor(table[i])]
    assert size(by_float) == len(walk(by_float)) + 4
    assert size(table[places[places[j]]]) == len(walk(table[places[places[j]]])) + 8


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_offsets_are_read_once(dtype):
    """A call keeps the offsets that were checked, whatever happens to the array."""
    q, k, v = arrays()
    offsets = np.array([0, 4, ROWS], dtype), np.array([0, 11, KEYS], dtype)
    wanted = [x.copy() for x in offsets]
    call = validate.varlen_call(q, k, v, *offsets, check=True)
    for x in offsets:
        x[...] = 10**6
    for ours, right in zip(call.rows.offsets.values(), wanted, strict=True):
        assert np.array_equal(ours, right)
    assert call.problem.len_q.tolist() == [4, 5]
