"""Masks and scores that are made anew in each step of a compiled function: arrays are inputs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
from halves import mostly_thorough

from cupyflash import lookup, masks, scores
from cupyflash.expr.structure import Structured, structure, tree

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import attention, flash_attn_func, graph_inputs  # noqa: E402 (after the skip)

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.compile itself
STEPS = 12  # more than the graphs that PyTorch makes of one function
LENGTH = 8


@pytest.fixture(autouse=True)
def watched():
    torch._dynamo.reset()
    graph_inputs.watch()
    yield
    Structured.watcher = None


def random(step):
    return np.random.default_rng(step)


def per_batch(step):
    return random(step).integers(2, LENGTH + 1, 2)


def documents(step):
    return np.sort(random(step).integers(0, 3, (2, LENGTH)))


def own(step):
    table = lookup(documents(step)[0])
    return masks.mask(lambda b, h, i, j: (table[i] == table[j]) | (j < 2 + step % 5))


def read_only(step):
    array = per_batch(step)
    array.flags.writeable = False
    return masks.lengths(array)


def penalty(step):
    table = lookup(random(step).standard_normal(4).astype(np.float32))
    return scores.score(lambda s, b, h, i, j: s * 0.5 + table[h] * (i - j + step))


MASKS = {
    "lengths": lambda n: masks.lengths(per_batch(n)),
    "lengths of tensors": lambda n: masks.lengths(torch.from_numpy(per_batch(n))),
    "arrays that are only read": read_only,
    "both lengths": lambda n: masks.lengths(per_batch(n), per_batch(n + 50)),
    "joined": lambda n: masks.lengths(per_batch(n)) & masks.causal() | masks.prefix(per_batch(n)),
    "offsets": lambda n: masks.causal(offset=per_batch(n) - 3) & masks.window(3, None),
    "segments": lambda n: masks.segments(documents(n)),
    "dense": lambda n: masks.dense(random(n).random((2, 1, LENGTH, LENGTH)) < 0.7),
    "a function": own,
    "integers": lambda n: masks.causal(offset=n - 2) ^ masks.window(n + 3, 0),
}
SCORES = {
    "slopes": lambda n: scores.alibi(random(n).random(4).astype(np.float32)),
    "distances": lambda n: scores.relative_bias(random(n).random((4, 5))),
    "a function": penalty,
    "a chain": lambda n: penalty(n).then(scores.softcap(3.0)),
}


def q_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2, 4, LENGTH, 8, generator=generator).requires_grad_()


def compiled(function, backend="aot_eager"):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    return torch.compile(function, backend=counted, fullgraph=True), graphs


def agree(function, options, backend="aot_eager"):
    """Compare a compiled function with itself, and return how many graphs there are."""
    fast, graphs = compiled(function, backend)
    gc.freeze()  # keeps a million objects of PyTorch out of the collections below
    for step in range(STEPS):
        q, given = q_of(step), options(step)
        wanted = function(q, given)
        (gradient,) = torch.autograd.grad(wanted.square().sum(), q)
        found = fast(q, given)
        del given  # the graph keeps what its backward reads
        gc.collect()
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), q)[0], gradient)
    return len(graphs)


@mostly_thorough(
    "name", MASKS, quick=["a function"], why="constructors, which are functions; one is quick"
)
def test_a_new_mask_in_each_step_compiles_no_new_graph(name):
    # The second graph is for integers that change, the others for integers that equal others.
    count = agree(lambda q, mask: attention(q, q, q, mask=mask), MASKS[name])
    assert count <= (2 if name not in ("a function", "integers") else 5)


@mostly_thorough("name", SCORES, quick=["a chain"], why="more constructors; one of them is quick")
def test_a_new_score_in_each_step_compiles_no_new_graph(name):
    def function(q, change):
        return attention(q, q, q, mask=masks.causal(), score_mod=[change, change])

    assert agree(function, SCORES[name]) <= 4


@pytest.mark.thorough("the C++ of inductor; the graphs are the same")
def test_inductor_takes_the_same_graphs():
    def function(q, mask):
        return attention(2 * q, q, q, mask=mask) + 1

    assert agree(function, MASKS["joined"], "inductor") <= 2


def test_several_masks_and_what_is_fixed():
    """Masks of several structures in one call, beside one that is made once."""
    fixed = masks.window(4, 0)

    def function(q, made):
        x = attention(q, q, q, mask=made[0], score_mod=[made[1], scores.softcap(2.0)])
        return x + attention(q, q, q, mask=fixed)

    assert agree(function, lambda n: (MASKS["segments"](n), SCORES["slopes"](n))) == 1


def test_maps_take_new_masks():
    def function(q, mask):
        return torch.vmap(lambda x: attention(x, q, q, mask=mask))(torch.stack([q, 2 * q]))

    assert agree(function, MASKS["segments"]) <= 2


def test_arrays_are_read_in_place_and_freed():
    lengths = np.array([3, 5])
    fast, graphs = compiled(lambda q, mask: attention(q, q, q, mask=mask))
    q, mask = q_of(0), masks.lengths(lengths)
    for n in (3, 4, 6):
        lengths[:] = n, 5
        torch.testing.assert_close(fast(q, mask), attention(q, q, q, mask=masks.lengths(lengths)))
    assert len(graphs) == 1
    table = torch.tensor([3, 5])
    gone = weakref.ref(table.untyped_storage())
    fast(q, masks.lengths(table))
    del table
    gc.collect()
    assert gone() is None


def test_the_first_compilation_begins_to_watch():
    """Masks made before are constants of their graphs; those made later are inputs."""
    Structured.watcher = None
    before = masks.lengths(np.array([3, 5]))
    fast, graphs = compiled(lambda q, mask: attention(q, q, q, mask=mask))
    for step in range(STEPS):
        mask, q = masks.lengths(per_batch(step)) if step % 3 else before, q_of(step)
        torch.testing.assert_close(fast(q, mask), attention(q, q, q, mask=mask))
    assert len(graphs) == 2


@pytest.mark.parametrize("make", [*MASKS.values(), *SCORES.values()])
def test_a_tree_is_made_of_its_structure_again(make):
    made = make(1)
    found, arrays = made.structure
    again = type(made)(tree(found.nodes, arrays))
    assert again.structure[0] == found
    assert all(a is b for a, b in zip(again.structure[1], arrays, strict=True))
    parts = made._compiled_as
    assert parts.text == make(2)._compiled_as.text  # other arrays and integers, the same graph
    blank = graph_inputs.blank(parts.text)
    if parts.tables:
        assert blank.filled(iter(parts.tables), iter(parts.integers)) is made
    others = [table.clone() for table in parts.tables]
    filled = blank.filled(iter(others), iter(parts.integers))
    assert filled is not made
    assert type(filled) is type(made)
    assert structure(filled.expr)[0] == found
    assert repr(filled) == repr(made)


def test_copies_have_parts_of_their_own():
    lengths = np.array([3, 5])
    mask = masks.lengths(lengths)
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        (array,) = copied.structure[1]
        array[:] = 7
        assert copied._compiled_as.tables[0].tolist() == [7, 7]
    assert lengths.tolist() == [3, 5]


def test_slopes_break_a_graph_and_compile_no_new_one():
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph.forward

    fast = torch.compile(
        lambda x, slopes: flash_attn_func(2 * x, x, x, alibi_slopes=slopes), backend=counted
    )
    for step in range(STEPS):
        x, slopes = q_of(step).detach(), torch.rand(LENGTH)
        found = fast(x, slopes)
        torch.testing.assert_close(found, flash_attn_func(2 * x, x, x, alibi_slopes=slopes))
    assert len(graphs) <= 2
