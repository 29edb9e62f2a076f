"""Programs that set `numpy.seterr`: results do not depend on it, and nothing is raised."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from halves import mostly_thorough

import cupyflash
from cupyflash import analysis, distributed, expr, figures, masks, scores, streamed, testing

TYPES = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)


def hard(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    """Numbers of every size, with infinities and NaN: all that sets a flag somewhere."""
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        info = ml_dtypes.finfo(dtype)
        sizes = [0, 1, float(info.tiny), float(info.smallest_subnormal), float(info.max) / 64]
        x = rng.standard_normal(shape) * rng.choice(sizes, shape)
        x[..., 3, 0], x[..., 5, 1], x[..., 6, 2] = np.nan, np.inf, -np.inf
        return x.astype(dtype)


def arrays(dtype: type) -> list[np.ndarray]:
    return [hard((2, 4, 20, 8), dtype, seed) for seed in range(4)]


OPTIONS = {
    "plain": {},
    "mask": {"mask": masks.window(3, 2) | masks.lengths(np.array([4, 20]))},
    "score": {"score_mod": scores.score(lambda s, b, h, i, j: expr.exp(s) / (i - j))},
    "softcap": {"score_mod": [scores.softcap(1e-30), scores.alibi(np.full(4, 1e30))]},
    "bias": {"bias": hard((4, 20, 20), np.float32, 7), "sink": hard((8, 4), np.float32, 8)[0]},
    "constants": {
        "score_mod": scores.score(lambda s, b, h, i, j: s * expr.exp(i * 0 - 1e3) * 1e-40)
    },
    "scale": {"scale": 1e-30, "dropout": 0.5, "seed": 3},
}


def dense(dtype, options):
    q, k, v, do = arrays(dtype)
    out, lse, vjp = cupyflash.attention_vjp(q, k, v, return_lse=True, **options)
    made = cupyflash.attention_backward(do, q, k, v, out, lse, deterministic=True, **options)
    cupyflash.plan(q, k, v, **options)
    return out, lse, *vjp(do, lse), *made


def packed(dtype, options):
    if "bias" in options:
        options = {"sink": options["sink"]}
    q, k, v, do = (x[0] for x in arrays(dtype))
    offsets = np.array([0, 7, 20])
    if "mask" in options:
        options = {"mask": masks.causal()}
    out, vjp = cupyflash.attention_varlen_vjp(q, k, v, offsets, offsets, **options)
    return out, *vjp(do)


def in_chunks(dtype, options):
    q, k, v, do = arrays(dtype)
    out, vjp = streamed.attention_vjp(q, k, v, chunk=7, **options)
    return out, *vjp(do)


def over_ranks(dtype, options):
    q, k, v, do = arrays(dtype)

    def work(comm):
        with np.errstate(all="raise"):  # which is a thread's own
            layout = distributed.layout(comm, 20)
            own, own_k, own_v, own_do = (layout.take(x) for x in (q, k, v, do))
            more = options | ({"bias": layout.take(options["bias"])} if "bias" in options else {})
            out, vjp = distributed.attention_vjp(
                own, own_k, own_v, comm=comm, layout=layout, **more
            )
            return out, *vjp(own_do)

    return [x for rank in distributed.Threads(2).run(work) for x in rank]


def cached(dtype, options):
    options = {name: x for name, x in options.items() if name not in {"dropout", "seed", "bias"}}
    q, k, v, new = arrays(dtype)
    lengths = np.array([5, 20])
    cupyflash.append(new[:, :, :3], new[:, :, :3], k, v, lengths)
    results = [k, v, cupyflash.attention_cached(q[:, :, :2], k, v, lengths, **options)]
    for kind in ("int8", "float8_e4m3fn", "float8_e5m2") if dtype is not np.float64 else ():
        (codes, scale), (values, scale_v) = (cupyflash.quantize(x, kind) for x in (k, v))
        results.append(
            cupyflash.attention_cached(
                q[:, :, :2], codes, values, lengths, k_scale=scale, v_scale=scale_v, **options
            )
        )
    return results


def rows(dtype, options):
    x = hard((2, 4, 20, 8), dtype, 1)
    angles = hard((20, 4), np.float32, 2)
    rotary = cupyflash.Rotary(angles, angles)
    out, lse = cupyflash.attention(x, x, x, return_lse=True)
    results = [cupyflash.rope(x, np.arange(20) % 7, rotary), cupyflash.hadamard(x, 3)]
    results += cupyflash.combine([(out, lse), (x, np.full_like(lse, -np.inf))])
    results += cupyflash.quantize(x, "int4", group=8)
    return results


def described(dtype, options):
    mask = options.get("mask", masks.causal())
    cupyflash.explain(
        (1, 2, 64, 16), dtype="float16", mask=masks.causal(), compile=False, device="H200"
    )
    figures.mask_tiles(masks.causal(), 50, block_q=10, block_kv=10)
    analysis.flash_attention(64, 64, 16, block_q=16, block_kv=16)
    with_scores = options.get("score_mod")
    made = []
    if isinstance(with_scores, scores.Score):
        s = hard((20, 20), np.float32, 3)
        i, j = np.arange(20)[:, None], np.arange(20)

        class sizes:
            lead, heads, len_q, len_k, start_q, start_k = (1,), 1, 20, 20, 0, 0

        made += with_scores.evaluate(s, 0, 0, i, j, sizes)
    return [*made, mask.to_array(2, 4, 20, 20)]


def judged(dtype, options):
    """The bounds of the kit."""
    with np.errstate(all="ignore"):
        q, k, v, do = (
            np.nan_to_num(x.astype(np.float32), posinf=1, neginf=1) for x in arrays(dtype)
        )
    options = {name: x for name, x in options.items() if name in {"mask", "scale"}}
    options["precision"] = testing.Precision.of(np.float32)
    bound = testing.forward_bound(q, k, v, **options)
    back = testing.backward_bound(do, q, k, v, **options)
    return [bound.out.bound, bound.lse.bound, back.dq.bound]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "calls", [dense, packed, in_chunks, over_ranks, cached, rows, described, judged]
)
@mostly_thorough(
    "dtype",
    TYPES,
    quick=lambda case: case in (np.float16, np.float32),
    why="the same of other types",
    ids=lambda x: x.__name__,
)
def test_errors_of_numpy_are_left_alone(dtype, calls, options):
    if calls is rows and options != "plain":
        return
    with np.errstate(all="ignore"):
        wanted = calls(dtype, dict(OPTIONS[options]))
    with np.errstate(all="raise"):
        got = calls(dtype, dict(OPTIONS[options]))
        assert np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "raise")
    for x, y in zip(wanted, got, strict=True):
        assert (x is None and y is None) or x.tobytes() == y.tobytes()


def test_the_kit_itself():
    """Its problems have subnormal numbers; they are drawn and judged all the same."""
    with np.errstate(all="raise"):
        report = testing.verify(
            cupyflash.attention, cupyflash.attention_backward, examples=2,
            only=["twice_is_the_same", "twice_do", "idle_options", "dlse_alone"],
        )  # fmt: skip
    assert report.passed, report


@pytest.mark.thorough("all properties; some are quick")
def test_the_whole_kit():
    with np.errstate(all="raise"):
        report = testing.verify(
            cupyflash.attention, cupyflash.attention_backward, varlen=cupyflash.attention_varlen,
            varlen_backward=cupyflash.attention_varlen_backward, combine=cupyflash.combine,
            cached=cupyflash.attention_cached, append=cupyflash.append, rope=cupyflash.rope,
            examples=3,
        )  # fmt: skip
    assert report.passed, report
