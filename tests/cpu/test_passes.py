"""However the backward is divided, and however wide panels are, every bit is the same."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough
from harness import attend, attend_backward
from placement import same_bits

from cupyflash import masks, scores
from cupyflash.problem import replay
from cupyflash.reference.cpu import amx, amx_memory, backward_call, backward_work, prepared
from cupyflash.reference.cpu.packing import lanes_of_pair

TILES = 48, 40  # panels of 32 and 16 queries
LENGTHS = 131, 117
HEADS, HEADS_KV, D, D_V = 4, 2, 33, 24


def draw(rng: np.random.Generator, *shape: int, dtype: type = np.float32) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


@pytest.fixture(autouse=True)
def _tiles_of_bfloat16(monkeypatch):
    monkeypatch.setenv(amx.VARIABLE, amx.EMULATED)


def problem(kind: str) -> tuple[list[np.ndarray], dict]:
    """Return do, q, k, v and the options of a case."""
    rng = np.random.default_rng(0)
    kind, *suffix = kind.split(",")
    stored = {TILED: ml_dtypes.bfloat16, OF_HALVES: np.float16}.get(",".join(["", *suffix]))
    dtype = {"float16": np.float16, "float64": np.float64}.get(kind, np.float32)
    batch = () if kind == "packed" else (2,)
    heads = (*batch, HEADS), (*batch, HEADS_KV)
    shapes = [(*heads[0], LENGTHS[0], D_V), (*heads[0], LENGTHS[0], D)]
    shapes += [(*heads[1], LENGTHS[1], D), (*heads[1], LENGTHS[1], D_V)]
    arrays = [draw(rng, *shape, dtype=dtype) for shape in shapes]
    options = {
        "causal": {"mask": masks.causal()},
        "window": {"mask": masks.window(17, 3), "sink": draw(rng, HEADS)},
        "pairs": {"mask": masks.mask(lambda b, h, i, j: (i + j) % 3 != 0)},
        "score": {"score_mod": scores.softcap(3.0), "bias": draw(rng, HEADS, 1, LENGTHS[1])},
        "dropout": {"mask": masks.causal(), "dropout": 0.3, "seed": 5},
        "not finite": {"mask": masks.causal()},
        "one block": {"mask": masks.window(17, 3)},  # of keys, which the first queries do not see
        "packed": {
            "offsets": (np.array([0, 0, 50, 131]), np.array([0, 9, 41, 117])),
            "mask": masks.window(30, 30),
        },
    }
    if kind == "not finite":
        arrays[2][..., -3, :] = np.nan
        arrays[3][..., -5, 1] = np.inf
    if kind == "one block":
        arrays[2:] = [x[..., :37, :] for x in arrays[2:]]
    if kind == "shared keys":
        arrays[2:] = [x[:1] for x in arrays[2:]]
    if kind == "shared queries":
        arrays[1] = arrays[1][:1]
    if stored:
        arrays = [x.astype(stored) for x in arrays]
    return arrays, options.get(kind, {})


TILED, OF_HALVES = ", by tiles", ", by tiles of float16"
KINDS = [
    "full", "causal", "window", "pairs", "score", "dropout", "not finite", "packed", "float16",
    "float64", "shared keys", "shared queries", "one block",
]  # fmt: skip
QUICK = ["causal", "score", "not finite", "packed", "shared queries", "one block"]
BY_TILES = [kind for kind in KINDS if kind not in ("float16", "float64")]
QUICK = [kind + suffix for suffix in ("", TILED) for kind in QUICK]
KINDS += [kind + suffix for suffix in (TILED, OF_HALVES) for kind in BY_TILES]
BY_KIND = mostly_thorough(
    "kind", KINDS, quick=QUICK, why="the same loops for other options, and for tiles of float16"
)


def gradients(monkeypatch: pytest.MonkeyPatch, kind: str, threads: int) -> list:
    """Return a case's gradients by this number of threads, and how many tiles were visited."""
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", str(threads))
    arrays, options = problem(kind)
    return list(attend_backward(*arrays, TILES, **options))


def same(ours: list, theirs: list) -> bool:
    assert [x is None for x in ours] == [x is None for x in theirs]
    return all(
        x == y if isinstance(x, int) else same_bits(x, y)
        for x, y in zip(ours, theirs, strict=True)
        if x is not None
    )


@BY_KIND
def test_one_pass_and_two_give_the_same_bits(monkeypatch, kind):
    passes = []

    def is_faster(heads: int) -> bool:
        passes.append(backward_work.is_one_pass_faster(heads))
        return passes[-1]

    monkeypatch.setattr(backward_call, "is_one_pass_faster", is_faster)
    one, two = (gradients(monkeypatch, kind, threads) for threads in (1, 16))
    assert same(one, two)
    if kind.startswith("one block"):
        assert not one[0][..., :70, :].any()
    # Queries that several batch entries share have gradients that several heads would add to.
    assert passes == ([] if kind.startswith("shared queries") else [True, False])


@BY_KIND
def test_a_head_may_be_left_and_taken_up_again(monkeypatch, kind):
    at_once = gradients(monkeypatch, kind, 1)
    monkeypatch.setattr(backward_work, "_MOST_PRODUCTS", 1)
    monkeypatch.setattr(replay, "_entries", {})
    lists = []
    real = backward_call.key_blocks
    monkeypatch.setattr(
        backward_call, "key_blocks", lambda *a: lists.extend(real(*a)) or iter(lists)
    )
    assert same(at_once, gradients(monkeypatch, kind, 1))
    longest = {"packed": 76, "one block": 37}.get(kind.split(",")[0], LENGTHS[1])
    assert len(lists) == (1 if kind.startswith("shared queries") else -(-longest // TILES[1]))


@pytest.mark.parametrize("panel", [1, 2, 8], ids=lambda pairs: f"{pairs} pairs")
@BY_KIND
def test_panels_of_any_width_give_the_same_bits(monkeypatch, kind, panel):
    arrays, options = problem(kind)
    ours = [*attend(*arrays[1:], TILES, **options), *gradients(monkeypatch, kind, 1)]
    # Columns are pairs of vectors, whose width is the CPU's, or what a product of tiles sums up.
    monkeypatch.setattr(prepared, "PANEL", panel * lanes_of_pair(4))
    monkeypatch.setattr(prepared, "TILE_PANEL", panel * amx_memory.DEPTH)
    monkeypatch.setattr(replay, "_entries", {})
    assert same(ours, [*attend(*arrays[1:], TILES, **options), *gradients(monkeypatch, kind, 1)])


@pytest.mark.parametrize(
    ("heads", "threads", "faster"), [(8, 1, True), (8, 2, True), (8, 6, False), (1, 2, False)]
)
def test_one_pass_where_heads_keep_all_threads_busy(monkeypatch, heads, threads, faster):
    monkeypatch.setenv("CUPYFLASH_NUM_THREADS", str(threads))
    assert backward_work.is_one_pass_faster(heads) is faster
