"""`plan_cached`, `explain_cached` and the command say what a call over a cache does."""

from __future__ import annotations

import json

import numpy as np
import pytest

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, masks, scores
from cupyflash.backends.cpu import Cpu
from cupyflash.commands.main import main
from cupyflash.problem import cached as cached_calls
from cupyflash.problem.options import Options

Q, K = (3, 8, 1, 64), (3, 2, 1000, 64)
LENGTHS = [1000, 65, 640]


def explain(q=Q, k=K, v=None, lengths=None, **options):
    options = {"device": "H200", "compile": False} | options
    return cupyflash.explain_cached(q, k, v, lengths, **options)


# What runs


def arrays_of(xp, q, k, v, dtype, page, kv_dtype):
    """Return arrays of the shapes that are explained, and the options of the call."""
    rows, more = k[:1] + k[1:3], {}
    if page is not None:
        pages = -(-k[2] // page)
        rows = k[0] * pages, k[1], page
        table = np.arange(k[0] * pages, dtype=np.int32).reshape(k[0], pages)
        more["table"] = xp.asarray(table)
    if kv_dtype is None:
        k, v = (xp.asarray(np.zeros((*rows, x[3]), dtype)) for x in (k, v))
    else:
        packed, group = (2, 32) if kv_dtype == "int4" else (1, None)
        for name, x in (("k", k), ("v", v)):
            groups = x[3] // group if group else 1
            more[f"{name}_scale"] = xp.asarray(np.ones((*rows, groups), np.float32))
        k, v = (xp.asarray(np.zeros((*rows, x[3] // packed), np.uint8)) for x in (k, v))
        more["kv_dtype"] = kv_dtype
    return xp.asarray(np.zeros(q, dtype)), k, v, more


@pytest.mark.parametrize(
    ("dtype", "queries", "page", "kv_dtype", "options"),
    [
        ("float16", 1, None, None, {}),
        ("float16", 1, 16, None, {"mask": masks.window(100, 0)}),
        ("float16", 16, 1, None, {"mask": masks.causal()}),
        ("float16", 17, 16, None, {"mask": masks.causal()}),  # more than 64 rows of a key head
        ("float32", 1, 3, None, {"score_mod": scores.softcap(20.0)}),
        ("float32", 40, None, None, {"mask": masks.causal()}),
        ("float16", 2, 16, "int8", {}),
        ("float32", 1, None, "int4", {}),
    ],
)
def test_the_launches_are_those_of_a_call(cupy, dtype, queries, page, kv_dtype, options):
    shapes = (3, 8, queries, 64), K, (3, 2, 1000, 32)
    q, k, v, more = arrays_of(cupy, *shapes, dtype, page, kv_dtype)
    lengths = cupy.asarray(np.array(LENGTHS, np.int32))
    plan = cupyflash.plan_cached(q, k, v, lengths, **more, **options)
    assert not cupy.launches
    made = explain(
        *shapes, LENGTHS, dtype=dtype, page=page, kv_dtype=kv_dtype, device="gpu", **options
    )
    assert (made.reason, made.main.name) == (plan.reason, plan.kernel)
    assert (made.main.block_q, made.main.block_kv) == (plan.block_q, plan.block_kv)
    cupyflash.attention_cached(q, k, v, lengths, **more, **options)
    told = [(x.kernel.partition("__")[0], *x[2:5]) for x in cupy.launches]
    assert told == [(x.name, x.blocks, 32 * x.warps, x.shared_memory) for x in made.kernels]
    assert plan.kernel.startswith("forward") == (queries == 17)


def test_a_plan_names_both_kernels_of_mixed_queries(cupy):
    q = cupy.asarray(np.zeros((8, 40, 64), np.float16))
    k, v = (cupy.asarray(np.zeros(K, np.float16)) for _ in range(2))
    offsets = cupy.asarray(np.array([0, 1, 2, 40]))
    plan = cupyflash.plan_cached(q, k, v, 1000, offsets_q=offsets)
    assert plan.kernel == "decode_sm80"
    assert (
        "sm90 serves entries whose heads that share keys have more than 64 queries" in plan.reason
    )
    assert "room for 1000 keys" in plan.axes
    plan = cupyflash.plan_cached(q, k, v, 1000, offsets_q=[0, 1, 20, 40])
    assert "serves entries" in plan.reason


def test_a_plan_says_why_it_is_not_the_fast_kernel(cupy):
    q, k, v, more = arrays_of(cupy, Q, K, K, "float16", 16, "int8")
    plan = cupyflash.plan_cached(q, k, v, 1000, **more)
    assert plan.kernel == "decode_sm80"
    assert "k and v: pages 189, heads 2, keys of a page 16, head size 64" in plan.axes
    wide_q, wide_k = (*Q[:-1], 300), (*K[:-1], 300)
    q, k, v, more = arrays_of(cupy, wide_q, wide_k, wide_k, "float16", 16, None)
    plan = cupyflash.plan_cached(q, k, v, 1000, **more)
    assert plan.kernel == "decode_simt"
    assert "not by decode_sm80, because" in plan.reason


@pytest.mark.parametrize("queries", [1, 3, 20])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(70, 0), masks.lengths(100)])
def test_the_cpu_visits_the_tiles_that_are_explained(queries, mask):
    q, k = (3, 6, queries, 16), (3, 2, 1000, 16)
    arrays = arrays_of(np, q, k, k, "float32", 7, None)
    plan = cupyflash.plan_cached(*arrays[:3], LENGTHS, **arrays[3], mask=mask)
    made = explain(q, k, None, LENGTHS, page=7, dtype="float32", mask=mask, device="cpu")
    assert (made.main.name, made.main.block_q, made.main.block_kv, made.reason) == (
        plan.kernel, plan.block_q, plan.block_kv, plan.reason,
    )  # fmt: skip
    call = cached_calls.call(
        *arrays[:3], np.array(LENGTHS), arrays[3]["table"], None, Options(mask=mask)
    )
    out, lse = np.empty(q, np.float32), np.empty(q[:3], np.float32)
    assert made.main.tiles.visited == Cpu().cached(call, out, lse, None).visited > 0


# What it costs


def brute(mask, queries, lengths, rows):
    """Return what attends: pairs, and leaves that a tile of `rows` rows of a key head visits."""
    pairs, visits, touched = 0, 0, 0
    for length in lengths:
        seen = np.ones((8, queries, length), bool)
        if mask is not None:
            seen = np.broadcast_to(mask.to_array(1, 8, queries, length)[0], seen.shape)
        pairs += int(seen.sum())
        for head in range(2):
            own = seen[4 * head : 4 * head + 4].swapaxes(0, 1).reshape(-1, length)
            leaves = [
                [own[i : i + rows, j : j + 64].any() for j in range(0, length, 64)]
                for i in range(0, len(own), rows)
            ]
            visits += int(np.sum(leaves))
            keys = np.minimum(64, length - 64 * np.arange(-(-length // 64)))
            touched += int(keys[np.any(leaves, axis=0)].sum())
    return pairs, visits, touched


@pytest.mark.parametrize("queries", [1, 7])
@pytest.mark.parametrize(
    "mask",
    [
        None,
        masks.causal(),
        masks.window(70, 0),
        masks.mask(lambda b, h, i, j: (h % 4 < 2) | (j > 500)),
    ],
    ids=["all", "causal", "window", "by head"],
)
def test_costs_are_those_of_what_attends(queries, mask):
    q, v = (3, 8, queries, 64), (3, 2, 1000, 40)
    made = explain(q, K, v, LENGTHS, mask=mask, page=16)
    pairs, visits, touched = brute(mask, queries, LENGTHS, 16)
    assert made.pairs == pairs
    assert made.flops == 2 * pairs * (64 + 40)
    assert made.main.tiles.visited == visits
    assert made.main.flops == 2 * visits * 16 * 64 * (64 + 40)
    pages = sum(-(-n // 16) for n in LENGTHS)
    rows = 3 * 8 * queries
    assert made.least.reads == {
        "q": rows * 64 * 2, "k": touched * 64 * 2, "v": touched * 40 * 2, "table": 4 * pages,
    }  # fmt: skip
    assert made.least.writes == {"o": rows * 40 * 2, "lse": rows * 4}
    assert made.standard.traffic.reads["k"] == 2 * sum(LENGTHS) * 64 * 2


def test_a_full_cache_costs_what_dense_arrays_do():
    made, dense = explain(), cupyflash.explain(Q, K, device="H200", compile=False)
    for name in ("pairs", "flops", "least", "roofline", "standard", "memory", "kernels", "reason"):
        assert getattr(made, name) == getattr(dense, name), name
    assert made.cache == "lengths 1,000, room for 1,000, contiguous"


@pytest.mark.parametrize(("kv_dtype", "row"), [("int8", 64 + 4), ("int4", 32 + 8)])
def test_codes_move_their_bytes_and_scales(kv_dtype, row):
    made = explain(lengths=LENGTHS, kv_dtype=kv_dtype)
    assert made.least.reads["k"] == 2 * sum(LENGTHS) * row
    assert kv_dtype in made.cache
    halves = explain(lengths=LENGTHS)
    assert made.roofline.seconds < 0.6 * halves.roofline.seconds
    assert made.main.name == "decode_sm80"


@pytest.mark.parametrize(
    ("kv_dtype", "k_row", "v_row", "words"),
    [
        (("int8", "int4"), 64 + 4, 32 + 8, "int8 keys and int4 values with 1 and 2 scales"),
        ((None, "int4"), 128, 32 + 8, "int4 values with 2 scales for each row"),
        (("int8", "float16"), 64 + 4, 128, "int8 keys with 1 scale for each row"),
    ],
)
def test_keys_and_values_of_different_types_move_their_own_bytes(kv_dtype, k_row, v_row, words):
    made = explain(lengths=LENGTHS, kv_dtype=kv_dtype, compile=False)
    assert made.least.reads["k"] == 2 * sum(LENGTHS) * k_row
    assert made.least.reads["v"] == 2 * sum(LENGTHS) * v_row
    assert words in made.cache
    assert made.main.name == "decode_sm80"


@pytest.mark.parametrize(
    ("keys", "more", "decode", "join"),
    [
        (4096, {}, (4, 3), 8),  # 512 leaves, of which 132 SMs may have 4 each
        (4096, {"page": 16}, (4, 3), 8),
        (4096, {"page": 1}, (4, 3), 8),
        (4224, {"page": 1}, (4, 3), 8),
        (4225, {}, (4, 3), 16),
        (4225, {"page": 16}, (4, 3), 16),
        (4096, {"device": "A100-80GB"}, (4, 3), 16),  # its grids do not overlap
    ],
)
def test_short_caches_have_small_blocks(keys, more, decode, join):
    q, k = (1, 32, 1, 128), (1, 8, keys, 128)
    found = explain(q, k, dtype="bfloat16", lengths=keys, **({"device": "H100"} | more))
    assert [x.name for x in found.kernels] == ["decode_sm80", "decode_combine"]
    assert (found.kernels[0].warps, found.kernels[0].stages) == decode
    assert found.kernels[1].warps == join


def test_a_small_cache_has_one_kernel_and_no_pieces():
    shapes = (1, 32, 1, 64), (1, 8, 512, 64)
    found = explain(*shapes, dtype="bfloat16", lengths=300, device="H100", compile=False)
    (kernel,) = found.kernels
    assert (kernel.name, kernel.blocks, kernel.warps) == ("decode_sm80", 8, 8)
    assert found.most.writes == {"o": 32 * 64 * 2, "lse": 32 * 4}
    assert found.memory == 32 * 64 * 2 + 32 * 4
    assert "a block has all keys of its rows" in found.reason


def test_the_join_of_compressed_keys_has_large_blocks():
    k, v = (1, 1, 4096, 576), (1, 1, 4096, 512)
    found = explain((1, 128, 1, 576), k, v, dtype="bfloat16", lengths=4096, device="H100")
    assert found.kernels[-1].name == "decode_combine"
    assert found.kernels[-1].warps == 16


@pytest.mark.parametrize("device", ["cpu", "H200"])
def test_shared_positions_are_in_memory_once(device):
    made = explain(lengths=LENGTHS, shared=700, device=device, dtype="float32")
    assert made.least.reads["k"] == 2 * 64 * 4 * (700 + 300)
    assert "first 700 positions" in made.reason
    assert made.cache == "lengths 65 to 1,000, room for 1,000, contiguous, the first 700 shared"
    alone = explain(lengths=LENGTHS, device=device, dtype="float32")
    assert (made.pairs, made.flops) == (alone.pairs, alone.flops)
    assert made.least.reads["k"] < alone.least.reads["k"] == 2 * 64 * 4 * sum(LENGTHS)
    with pytest.raises(ArgumentError, match="shared: got 1001; expected 0 to 1000"):
        explain(shared=1001)


def test_masks_that_read_arrays_by_entry():
    seen = np.arange(1000) < np.array([[100], [10], [700]])
    mask = masks.lengths(np.array([100, 10, 700]))
    made = explain(lengths=LENGTHS, mask=mask)
    assert made.pairs == 8 * (100 + 10 + 640)
    assert explain(lengths=LENGTHS, mask=seen[:, None, None]).pairs == made.pairs


def test_entries_without_keys():
    made = explain(lengths=[0, 0, 64])
    assert (made.pairs, made.main.tiles.visited) == (8 * 64, 2)
    with pytest.raises(ArgumentError, match="lengths: got 0 for every entry"):
        explain(lengths=0)


# Arguments and the command


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lengths": 1001}, ArgumentError, "lengths: entry 0 is 1001; expected 0 to 1000"),
        ({"lengths": [1, 2]}, ArgumentTypeError, r"lengths: got shape \(2,\)"),
        ({"q": (3, 8, 64)}, ArgumentTypeError, r"q: got \(3, 8, 64\); expected four integers"),
        ({"k": (3, 2, 0, 64)}, ArgumentError, r"k: got \(3, 2, 0, 64\); expected four"),
        ({"v": (3, 2, 999, 64)}, ArgumentError, "v: got .* as many entries and positions"),
        ({"k": (2, 2, 9, 64)}, ArgumentError, "k: got shape .* with 3 batch entries"),
        ({"page": 0}, ArgumentError, "page: got 0; expected 1 or more"),
        ({"page": 2.0}, ArgumentTypeError, "page: got 2.0; expected a number of positions"),
        ({"kv_dtype": "int7"}, ArgumentTypeError, "kv_dtype: got int7; expected int8"),
        ({"q": (3, 8, 1, 63), "k": (3, 2, 9, 63), "kv_dtype": "int4"}, ArgumentError, "k: got 63"),
        ({"cache_seqlens": 3}, ArgumentTypeError, "cache_seqlens: this function has no such"),
    ],
)
def test_errors(options, error, words):
    with pytest.raises(error, match=words):
        explain(**options)


def test_plan_refuses_what_a_call_refuses():
    q, k, v, more = arrays_of(np, Q, K, K, "float32", 16, None)
    with pytest.raises(ArgumentError, match="lengths: entry 0 is 2000"):
        cupyflash.plan_cached(q, k, v, 2000, **more)
    with pytest.raises(ArgumentTypeError, match=r"attention_cached.*plan_cached.*explain_cached"):
        cupyflash.plan(q, k, v, lengths=3)


def test_the_command(capsys, tmp_path):
    file = tmp_path / "explained.json"
    words = "8,32,1,128 --heads-kv 8 --keys 8192 --lengths 5000 --page 16 --device H20"
    assert main(["explain", *words.split(), "--no-compile", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "cache   lengths 5,000, room for 8,192, pages of 16" in out
    assert "decode_sm80" in out
    made = explain((8, 32, 1, 128), (8, 8, 8192, 128), None, 5000, page=16, device="H20")
    assert json.loads(file.read_text()) == json.loads(made.to_json())


def test_the_command_takes_a_length_of_each_entry(capsys):
    words = "3,8,1,64 --heads-kv 2 --keys 1000 --device T4 --no-compile".split()
    assert main(["explain", *words, "--lengths", "1000,65,640", "--kv-dtype", "int8"]) == 0
    out = capsys.readouterr().out
    assert "lengths 65 to 1,000, room for 1,000, contiguous, int8 with 1 scale" in out
    assert main(["explain", *words, "--kv-dtype", "int8,int4"]) == 0
    assert "int8 keys and int4 values with 1 and 2 scales" in capsys.readouterr().out
    assert main(["explain", *words, "--kv-dtype", "int8,int5"]) == 2
    assert "kv_dtype: got int5; expected int8" in capsys.readouterr().err
    assert main(["explain", *words, "--cache", "--shared", "500"]) == 0
    assert "room for 1,000, contiguous, the first 500 shared" in capsys.readouterr().out
    for more in (["--cache", "--backward"], ["--page", "4", "--ranks", "2"]):
        assert main(["explain", *words, *more]) == 2
        assert "leave one of them out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["explain", *words, "--lengths", "1,x"])
    assert "--lengths: got '1,x'; expected the positions in use" in capsys.readouterr().err


def test_values_that_are_columns_of_keys_are_read_once():
    shapes = (2, 128, 1, 576), (2, 1, 4096, 576), (2, 1, 4096, 512)
    made = explain(*shapes, device="H200")
    assert made.main.name == "decode_sm90"
    assert made.least.reads["k"] == 2 * 4096 * 576 * 2
    assert not made.least.reads.get("v")
    other = explain(*shapes, device="H200", dtype="float32")
    assert other.main.name == "decode_simt"
    few = explain((2, 15, 1, 576), *shapes[1:], device="H200")
    assert few.main.name == "decode_simt"
    assert "not by decode_sm90, because it is for 16 heads or more" in few.reason


def test_shared_positions_have_a_kernel_of_their_own():
    shapes, row = ((32, 32, 1, 128), (32, 8, 8448, 128)), 2 * 128
    given = {"device": "H100", "compile": False, "dtype": "bfloat16"}
    made = cupyflash.explain_cached(*shapes, shared=8192, **given)
    alone = cupyflash.explain_cached(*shapes, **given)
    names = [kernel.name for kernel in made.kernels]
    assert names == ["decode_sm80_shared", "decode_sm80", "decode_combine"]
    assert made.main.name == "decode_sm80"
    shared, own, join = made.kernels
    assert shared.once.reads["k"] == 8 * 8192 * row
    assert shared.most.reads["k"] == 2 * shared.once.reads["k"]  # of two teams
    assert own.once.reads["k"] == own.most.reads["k"] == 32 * 8 * 256 * row
    assert shared.once.writes["pieces"] == 32 * 32 * 16 * (4 * 128 + 16)
    assert join.once.reads["pieces"] == shared.once.writes["pieces"] + own.once.writes["pieces"]
    # Of four entries with four heads in a group, a warp has all rows.
    assert alone.main.flops == 4 * shared.flops + own.flops
    assert made.flops == alone.flops
    assert made.roofline.seconds < alone.roofline.seconds / 10
    twice = cupyflash.explain_cached(
        *(((64, *shape[1:])) for shape in shapes), shared=8192, **given
    )
    assert twice.kernels[0].most.reads["k"] == 4 * twice.kernels[0].once.reads["k"]
