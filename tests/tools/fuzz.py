"""Random problems, compared with a model that shares no code with cupyflash.

    python tests/tools/fuzz.py                                20,000 problems on the CPU
    python tests/tools/fuzz.py --problems 500 --seed 7        others, and fewer
    python tests/tools/fuzz.py --device gpu --variants 16     on CuPy arrays; 16 problems in a row
                                                              share their compiled kernels
    python tests/tools/fuzz.py --seed 7 --only 41             one of them, with its description

Every problem is drawn from the seed and its number alone. tests/helpers/independent_model.py has
the exact results and the bounds of their errors. The exit status is 1 where a result is beyond its
bound; the line that is printed then repeats the problem.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import operator
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

import fuzz_caches
import independent_model as model
import numpy as np
from fuzz_problems import DTYPES, KINDS, Array, Case, draw, longest_axis
from independent_model import Bounded, Options

import cupyflash
from cupyflash import expr, lookup, masks, scores

# What a problem asks of cupyflash


def laid(x: Array, layout: str, xp: Any) -> Any:
    """Return an array of the same elements that lies in memory in a certain way."""
    axis = longest_axis(x)
    first = (slice(None),) * axis
    if layout == "F":
        return moved(x.T.copy(), xp).T
    if layout == "swapped" and x.ndim > 2:
        return moved(x.swapaxes(-3, -2).copy(), xp).swapaxes(-3, -2)
    if layout == "sliced" and x.ndim:
        wide = np.full((*x.shape[:axis], 2 * x.shape[axis] + 1, *x.shape[axis + 1 :]), np.nan)
        wide = wide.astype(x.dtype)
        here = (*first, slice(1, None, 2))
        wide[here] = x
        return moved(wide, xp)[here]
    if layout == "negative" and x.ndim:
        here = (*first, slice(None, None, -1))
        return moved(x[here].copy(), xp)[here]
    if layout == "zero" and x.ndim and x.size:
        return xp.broadcast_to(moved(x[(*first, slice(1))].copy(), xp), x.shape)
    if layout == "odd" and xp is np:  # off the multiples of an element's size
        whole = np.zeros(x.nbytes + 1, np.uint8)
        result = np.ndarray(x.shape, x.dtype, whole, 1)
        result[...] = x
        return result
    return moved(x.copy(), xp)


def moved(x: Array, xp: Any) -> Any:
    """Return a contiguous array where a problem is to be computed."""
    if xp is np:
        return x
    if x.dtype == DTYPES["bfloat16"]:  # which is not CuPy's own
        return xp.asarray(x.view(np.uint16)).view(x.dtype)
    return xp.asarray(x)


def host(x: Any) -> Array:
    if isinstance(x, np.ndarray):
        return x
    return np.asarray(x.view(f"u{x.dtype.itemsize}").get()).view(x.dtype)


_JOINED: dict[str, Callable[..., masks.Mask]] = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def make_mask(d: tuple[Any, ...], xp: Any) -> masks.Mask:
    """Make the mask of a description."""
    word, *p = d
    if word == "not":
        return ~make_mask(p[0], xp)
    if word in _JOINED:
        return _JOINED[word](make_mask(p[0], xp), make_mask(p[1], xp))
    p = [moved(x, xp) if isinstance(x, np.ndarray) else x for x in p]
    if word == "strided":
        return masks.mask(lambda b, h, i, j: (p[0] * i + p[1] * j + h + b) % p[2] < p[3])
    if word == "table":
        table = lookup(p[0])
        return masks.mask(lambda b, h, i, j: table[h, i] > j // 2)
    if word == "slanted":
        return masks.mask(lambda b, h, i, j: p[0] * i < j)
    if word == "shifted":
        return masks.mask(lambda b, h, i, j: (i >> p[0]) + h == j >> p[0])
    if word == "doubled":  # proven to fit into 64 bits
        return masks.mask(lambda b, h, i, j: j << min(p[0], 40) <= i << 1)
    if word == "root":
        return masks.mask(lambda b, h, i, j: expr.sqrt(i + 1) * 0.5 * p[0] > j)
    made: masks.Mask = getattr(masks, word)(*p)
    return made


def make_score(d: tuple[Any, ...], xp: Any) -> scores.Score:
    """Make the score change of a description."""
    word, *p = d
    p = [moved(x, xp) if isinstance(x, np.ndarray) else x for x in p]
    if word in ("softcap", "alibi"):
        return getattr(scores, word)(*p)
    if word == "relative":
        return scores.relative_bias(*p)
    table = lookup(p[0]) if word == "table" else None
    functions: dict[str, Callable[..., Any]] = {
        "linear": lambda s, b, h, i, j: p[0] * s + p[1] * (i - j),
        "some": lambda s, b, h, i, j: expr.where((i + 2 * j + h) % p[0] == 0, s, p[1] * s),
        "hidden": lambda s, b, h, i, j: expr.where((i + j + b) % p[0] == 0, -np.inf, s),
        "square": lambda s, b, h, i, j: p[0] * s * s,
        "table": lambda s, b, h, i, j: s * table[h, i],
        "absolute": lambda s, b, h, i, j: abs(s),
        "least": lambda s, b, h, i, j: expr.minimum(s, p[0]),
        "gate": lambda s, b, h, i, j: s + p[0] * expr.sigmoid(s),
        "erf": lambda s, b, h, i, j: s + p[0] * expr.erf(s),
        "power": lambda s, b, h, i, j: expr.where(
            s < 0, s, (1 + expr.maximum(s, 0)) ** (1 + p[0]) - 1
        ),
        "wave": lambda s, b, h, i, j: s * (1 + p[0] * expr.cos((i - j) / 4)),
        "distance": lambda s, b, h, i, j: s - p[0] * expr.sqrt(abs(i - j)),
        "decay": lambda s, b, h, i, j: s * expr.exp2(-p[0] * abs(i - j) / 8),
        "exponential": lambda s, b, h, i, j: expr.exp(expr.clip(s, -p[0], p[0])) / 2,
    }
    return scores.score(functions[word])


def computed(case: Case, xp: Any) -> dict[str, Any]:
    """Run a problem, and return its results by name; inputs must be as they were."""
    o, flags = case.options, case.flags
    inputs = {name: laid(x, case.layouts[name], xp) for name, x in case.arrays.items()}
    if case.kind == "combine":
        count = len(inputs) // 2
        out, lse = cupyflash.combine([(inputs[f"out{n}"], inputs[f"lse{n}"]) for n in range(count)])
        check_unchanged(case, inputs)
        return {"out": out, "lse": lse}
    q, k, v = (inputs[name] for name in "qkv")
    options: dict[str, Any] = {"scale": o.scale, "dropout": o.dropout}
    if o.dropout:
        options["seed"] = o.seed
    if o.mask is not None:
        options["mask"] = make_mask(o.mask, xp)
    if o.scores:
        options["score_mod"] = [make_score(x, xp) for x in o.scores]
    for name, x in (("bias", o.bias), ("sink", o.sink)):
        if x is not None:
            options[name] = moved(x, xp)
    if case.kind == "split":
        return split(case, q, k, v, options, xp)
    offsets = () if case.offsets is None else tuple(map(np.asarray, case.offsets))
    do, dlse = inputs["do"], inputs.get("dlse")
    places: dict[str, Any] = {}
    if flags["outputs"]:
        like = {
            "out": case.arrays["do"],
            "lse": case.arrays["do"][..., 0].astype(sums_of(case.dtype)),
            **{f"d{x}": case.arrays[x] for x in "qkv"},
        }
        places = {
            name: laid(np.full_like(x, np.nan), case.layouts[name], xp) for name, x in like.items()
        }
    if case.kind.endswith("vjp"):
        function = cupyflash.attention_varlen_vjp if offsets else cupyflash.attention_vjp
        out, lse, vjp = function(
            q, k, v, *offsets, return_lse=True, deterministic=flags["deterministic"], **options
        )
        gradients = vjp(do, dlse)
    else:
        function = cupyflash.attention_varlen if offsets else cupyflash.attention
        lse = None
        where = {"out": places.get("out"), "lse_out": places.get("lse")}
        if case.kind.endswith("backward") or flags["return_lse"]:
            out, lse = function(q, k, v, *offsets, return_lse=True, **where, **options)
        else:
            out = function(q, k, v, *offsets, out=where["out"], **options)
        gradients = ()
        if case.kind.endswith("backward"):
            function = (
                cupyflash.attention_varlen_backward if offsets else cupyflash.attention_backward
            )
            grads_out = tuple(places[f"d{x}"] for x in "qkv") if places else None
            gradients = function(
                do,
                q,
                k,
                v,
                out,
                lse,
                *offsets,
                dlse=dlse,
                grads_out=grads_out,
                deterministic=flags["deterministic"],
                **options,
            )
    results = {"out": out, "lse": lse}
    results |= dict(zip(("dq", "dk", "dv", "dbias", "dsink"), gradients, strict=False))
    check_unchanged(case, inputs)
    return {name: x for name, x in results.items() if x is not None}


def sums_of(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def split(case: Case, q: Any, k: Any, v: Any, options: dict[str, Any], xp: Any) -> dict[str, Any]:
    """Compute attention over parts of the keys, and combine them."""
    parts = []
    for first, last in itertools.pairwise(case.cuts):
        here = dict(options)
        if "mask" in here:
            here["mask"] = masks.dense(moved(_keys(case.options.mask[1], first, last), xp))
        if "bias" in here:
            here["bias"] = moved(_keys(case.options.bias, first, last), xp)
        keys = (..., slice(first, last), slice(None))
        parts.append(cupyflash.attention(q, k[keys], v[keys], return_lse=True, **here))
    out, lse = cupyflash.combine(parts)
    return {"out": out, "lse": lse}


def _keys(x: Array, first: int, last: int) -> Array:
    return x if x.shape[-1] == 1 else x[..., first:last]


def check_unchanged(case: Case, inputs: dict[str, Any]) -> None:
    for name, x in case.arrays.items():
        assert host(inputs[name]).tobytes() == x.tobytes(), f"{name} was changed"


# Comparing


def wrong(case: Case, xp: Any = np) -> str:
    """Return in words what is wrong with the results of a problem; nothing where they are right."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")  # a call must not depend on what its caller does with them
        got = computed(case, xp)
    ar = model.arithmetic(case.dtype, xp is not np)
    low, high = np.array(-np.inf), np.array(np.inf)
    o = case.options
    if case.kind == "combine":
        work = np.longdouble if case.dtype == "float64" else np.float64
        held = {
            name: Bounded(x.astype(np.float64).astype(work), np.zeros(x.shape))
            for name, x in case.arrays.items()
        }
        pairs = [(held[f"out{n}"], held[f"lse{n}"]) for n in range(len(held) // 2)]
        wanted = model.combine(pairs, case.dtype, ar)
    elif case.kind == "split":
        pairs = []
        for first, last in itertools.pairwise(case.cuts):
            part = Options(scores=o.scores, scale=o.scale)
            part.mask = None if o.mask is None else ("dense", _keys(o.mask[1], first, last))
            part.bias = None if o.bias is None else _keys(o.bias, first, last)
            k, v = (case.arrays[x][..., first:last, :] for x in "kv")
            made, _, _ = model.attention(case.arrays["q"], k, v, part, case.dtype, ar)
            pairs.append((made["out"], made["lse"]))
        wanted = model.combine(pairs, case.dtype, ar)
    else:
        a = case.arrays
        do = a["do"] if "dq" in got else None
        wanted, low, high = model.attention(
            a["q"], a["k"], a["v"], o, case.dtype, ar, case.offsets, do, a.get("dlse")
        )
    for name, x in got.items():
        hull = (low, high) if name == "out" else (-np.inf, np.inf)
        found = beyond(host(x), wanted[name], *hull)
        if found:
            return f"{name}{found}"
    return ""


@np.errstate(all="ignore")
def beyond(y: Array, wanted: Bounded, low: Any, high: Any) -> str:
    """Return which element is beyond its bound, or not between the values that its row sees."""
    exact, bound = wanted
    if y.shape != exact.shape:
        return f" has shape {y.shape}, exact {exact.shape}"
    z = y.astype(np.float64).astype(exact.dtype)
    room = 0.02 * np.maximum(np.abs(low), np.abs(high)) + 1e-7
    unbounded = np.isinf(low) & np.isinf(high)
    between = unbounded | ((z >= low - room) & (z <= high + room))
    near = (np.abs(z - exact) <= bound) | (z == exact) | np.isinf(bound)
    right = np.where(np.isnan(exact), np.isnan(z), near & between)
    if right.all():
        return ""
    place = tuple(int(n) for n in np.argwhere(~right)[0])
    return (
        f"{list(place)} is {z[place]}, exact {exact[place]}, bound {bound[place]}; "
        f"{int((~right).sum())} of {right.size} are wrong"
    )


def wrong_cached(case: fuzz_caches.Cached, xp: Any) -> str:
    """Return in words what is wrong after a step of a cache."""
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        got, held = fuzz_caches.computed(case, partial(moved, xp=xp), host)
    found = fuzz_caches.written_wrong(case, held)
    wanted = fuzz_caches.exact(case, held, model.arithmetic(case.dtype, xp is not np))
    for name, x in got.items():
        if not found and (problem := beyond(x, wanted[name], -np.inf, np.inf)):
            found = f"{name}{problem}"
    return found


def drawn(seed: int, index: int, gpu: bool = False, variants: int = 1) -> Case | fuzz_caches.Cached:
    """Return a problem; one of ten is a step of a cache."""
    entropy = [seed, index // variants, 1]
    if np.random.default_rng(entropy).random() < 0.1:
        rng = np.random.default_rng([*entropy, 1])
        return fuzz_caches.draw(rng, np.random.default_rng([seed, index, variants, 1]))
    return draw(seed, index, gpu, variants)


def attempt(index: int, seed: int, device: str, variants: int = 1) -> tuple[int, str, str, str]:
    """Run one problem: its number, kind and type, and what is wrong."""
    xp: Any = np
    if device == "gpu":
        import cupy as xp
    case = drawn(seed, index, device == "gpu", variants)
    try:
        is_cached = isinstance(case, fuzz_caches.Cached)
        found = wrong_cached(case, xp) if is_cached else wrong(case, xp)
    except Exception as error:  # noqa: BLE001 (whatever is raised, it is a finding)
        found = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    return index, case.kind, case.dtype, found and f"{found}\n    {case.describe()}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--variants", type=int, default=1, help="problems that share their kernels")
    parser.add_argument("--only", type=int, help="the number of one problem")
    asked = parser.parse_args(arguments)
    one = partial(attempt, seed=asked.seed, device=asked.device, variants=asked.variants)
    if asked.only is not None:
        case = drawn(asked.seed, asked.only, asked.device == "gpu", asked.variants)
        print("   ", case.describe())
    numbers = range(asked.problems) if asked.only is None else [asked.only]
    counts, failed, begin = Counter[tuple[str, str]](), 0, time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, asked.jobs), context) as pool:
        several = -(-50 // asked.variants) * asked.variants
        done = map(one, numbers) if asked.jobs < 2 else pool.map(one, numbers, chunksize=several)
        for n, (index, kind, dtype, found) in enumerate(done, 1):
            counts[kind, dtype] += 1
            if found:
                failed += 1
                command = f"python tests/tools/fuzz.py --seed {asked.seed} --only {index}"
                command += " --device gpu" if asked.device == "gpu" else ""
                command += f" --variants {asked.variants}" if asked.variants > 1 else ""
                print(f"{command}\n    {found}", flush=True)
            if n % 500 == 0:
                seconds = time.perf_counter() - begin
                print(
                    f"{n} of {len(numbers)} problems, {failed} wrong, {seconds:.0f} s", flush=True
                )
    print(f"{'':16}" + "".join(f"{x:>10}" for x in DTYPES))
    for kind in (*KINDS, "cached"):
        print(f"{kind:16}" + "".join(f"{counts[kind, x]:10}" for x in DTYPES))
    print(f"{sum(counts.values())} problems of seed {asked.seed}, {failed} wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
