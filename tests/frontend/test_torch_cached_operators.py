"""Calls over a cache in functions that torch.compile compiles, as one graph."""

from __future__ import annotations

import numpy as np
import pytest

from cupyflash import Rotary, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from cupyflash.torch import append, attention_cached  # noqa: E402 (after the skip)

pytestmark = pytest.mark.filterwarnings("ignore")  # of Dynamo, and of what inductor imports
BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.thorough("a compiler of C++; the graphs are the same")
    ),
]
WINDOW, CAP = masks.causal() & masks.window(5, 0), scores.softcap(3.0)
LENGTHS = torch.tensor([9, 20], dtype=torch.int32)
TABLE = torch.tensor([[3, 0, 2], [1, 4, 5]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def compiled(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_option(backend):
    def function(q, k, v, pages, lengths, dense, sink, table):
        changed = {"mask": WINDOW, "score_mod": [CAP], "sink": sink, "scale": 0.3}
        found = [attention_cached(q + 1, k, v, lengths), attention_cached(q, k, v, 11)]
        found += attention_cached(q, k, v, lengths, return_lse=True, **changed)
        found.append(attention_cached(q, k, v, [7, 8], mask=dense))
        found.append(attention_cached(q, pages, pages, lengths, table=table))
        rows = q[0].expand(4, 3, 16)
        ends = torch.tensor([0, 1, 3], dtype=torch.int32)
        return [*found, attention_cached(rows, k, v, lengths, offsets_q=ends)]

    q, k, v, pages = draw(2, 4, 1, 16), draw(2, 2, 32, 16), draw(2, 2, 32, 16), draw(6, 2, 8, 16)
    dense = torch.arange(64).reshape(2, 1, 1, 32) % 3 != 0
    given = q, k, v, pages, LENGTHS, dense, draw(4), TABLE
    torch.testing.assert_close(compiled(function, backend)(*given), function(*given))
    with torch.no_grad():  # strides of results are those that the graph expects, too
        turned = (q.transpose(1, 2).contiguous().transpose(1, 2), *given[1:])
        torch.testing.assert_close(compiled(function, backend)(*turned), function(*turned))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("codes", ["", "int8", "int4"])
def test_rows_are_written_in_place(backend, codes):
    def step(new, k, v, k_scale, v_scale, lengths):
        options = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": codes} if codes else {}
        append(new * 2, new, k, v, lengths, **options)
        return attention_cached(new.repeat(1, 2, 1, 1), k, v, lengths, **options)

    kind = torch.uint8 if codes else torch.float32
    columns = 8 if codes == "int4" else 16
    rooms = [torch.zeros(2, 2, 32, columns, dtype=kind) for _ in "kv"]
    rooms += [torch.ones(2, 2, 32, 1) for _ in "kv"]
    others = [room.clone() for room in rooms]
    graph = compiled(step, backend)
    for n in range(3):
        new = draw(2, 2, 1, 16) + n
        out = graph(new, *rooms, LENGTHS + n)
        torch.testing.assert_close(out, step(new, *others, LENGTHS + n))
        torch.testing.assert_close(rooms, others)
    assert sum(int((room != 0).any(-1).sum()) for room in rooms[:2]) == 3 * 8


def test_operators_are_as_pytorch_wants_them():
    q, k, v = draw(2, 4, 1, 16), draw(2, 2, 32, 16), draw(2, 2, 32, 16)
    number = {}

    def seen(graph, given):
        for node in graph.graph.nodes:
            if "cupyflash" in str(node.target):
                number[str(node.target)] = node
        return graph.forward

    torch._dynamo.reset()
    torch.compile(
        lambda *x: attention_cached(*x, LENGTHS, mask=WINDOW), fullgraph=True, backend=seen
    )(q, k, v)
    (node,) = number.values()
    numbers = node.args[12]
    rest = (None, None, None, LENGTHS, *(None,) * 4, [], numbers, -1, "", 0)
    operator = torch.ops.cupyflash.attention_cached.default
    for has_lse in (False, True):
        torch.library.opcheck(operator, (q, k, v, *rest, has_lse))
    rows = draw(2, 2, 1, 16)
    written = (rows, rows, k, v, None, None, LENGTHS, None, None, -1, "", 0)
    torch.library.opcheck(torch.ops.cupyflash.append.default, written)


def test_fake_tensors_have_the_columns_of_codes():
    q, codes = (torch.ones(2, 4, 1, 16, device="meta"), torch.ones(2, 2, 32, 8, device="meta"))
    codes = codes.to(torch.uint8)
    scales = torch.ones(2, 2, 32, 1, device="meta")
    out = attention_cached(q, codes, codes, 3, k_scale=scales, v_scale=scales, kv_dtype="int4")
    assert out.shape == q.shape


def test_rows_that_are_rotated_break_the_graph():
    turns = Rotary(np.ones((32, 8), np.float32), np.full((32, 8), 0.5, np.float32))

    def step(new, k, v):
        turned = append(new * 2, new, k, v, LENGTHS, q=new, rotary=turns)
        return attention_cached(turned, k, v, LENGTHS)

    rooms = [torch.zeros(2, 2, 32, 16) for _ in "kv"]
    others = [torch.zeros(2, 2, 32, 16) for _ in "kv"]
    new = draw(2, 2, 1, 16)
    graph = torch.compile(step, backend="aot_eager")
    torch.testing.assert_close(graph(new, *rooms), step(new, *others))
    torch.testing.assert_close(rooms, others)


def test_autocast_converts_in_graphs_too():
    q, k, v = draw(2, 4, 1, 16), draw(2, 2, 32, 16), draw(2, 2, 32, 16)
    function = compiled(lambda q, k, v: attention_cached(q, k, v, LENGTHS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in ((q, k, v), (q, k, v.bfloat16())):
            found = function(*given)
            assert found.dtype is torch.bfloat16
            assert torch.equal(found, attention_cached(*given, LENGTHS))


@pytest.mark.parametrize("pair", [(None, "int8"), ("int8", None), ("int8", "int4")], ids=str)
def test_keys_and_values_have_codes_of_their_own(pair):
    q, rooms, scales = draw(2, 4, 1, 16), [], []
    for name in pair:
        columns = 8 if name == "int4" else 16
        codes = torch.arange(2 * 2 * 32 * columns).reshape(2, 2, 32, columns) * 7 % 256
        rooms.append(draw(2, 2, 32, 16) if name is None else codes.to(torch.uint8))
        scales.append(None if name is None else torch.full((2, 2, 32, 1), 0.02))

    def function(q, k, v, k_scale, v_scale):
        options = {"k_scale": k_scale, "v_scale": v_scale, "kv_dtype": pair}
        return attention_cached(q, k, v, LENGTHS, **options)

    found = compiled(function)(q, *rooms, *scales)
    torch.testing.assert_close(found, function(q, *rooms, *scales))


def test_arrays_and_tuples_are_numbers_of_the_graph():
    q, k, v, rows = draw(2, 4, 1, 16), draw(2, 2, 32, 16), draw(2, 2, 32, 16), draw(4, 3, 16)

    def function(q, rows, k, v):
        ends, seen = np.array([0, 1, 3]), np.ones((2, 1, 1, 32), bool)
        seen[..., :4] = False
        found = [attention_cached(rows, k, v, LENGTHS, offsets_q=ends, mask=seen)]
        found += [attention_cached(q, k, v, n) for n in ((7, 8), [9, 4], np.array([9, 4]))]
        pages = np.array([[0], [1]])
        return [*found, attention_cached(q, k, v, LENGTHS, table=pages)]

    found = compiled(function)(q, rows, k, v)
    torch.testing.assert_close(found, function(q, rows, k, v))


REFUSED = {
    "gradient": (
        lambda q, k: attention_cached(q, k, k, 3),
        "q: got a tensor that requires a gradient",
    ),
    "rotation": (
        lambda q, k: append(k[:, :, :1], k[:, :, :1], k, k.clone(), 3, rotary=TURNS),
        "rotations are not operators of torch.compile",
    ),
    "floats": (lambda q, k: attention_cached(q, k, k, [2.5, 3.5]), "lengths: .*float32"),
    "no numbers": (lambda q, k: attention_cached(q, k, k, "3"), "lengths: got str"),
    "offsets": (lambda q, k: attention_cached(q, k, k, 3, offsets_q=5), "offsets_q: got int"),
    "device": (lambda q, k: attention_cached(q, k.to("meta"), k, 3), "k: .*device meta"),
}
TURNS = Rotary(np.ones((32, 8)), np.zeros((32, 8)))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_cannot_have_is_refused_with_the_remedy(name):
    function, words = REFUSED[name]
    q = draw(2, 4, 1, 16).requires_grad_(name == "gradient")
    with pytest.raises(Exception, match=words):  # Dynamo raises its own, with these words
        compiled(function)(q, draw(2, 4, 32, 16))
