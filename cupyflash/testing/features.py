"""What a kernel may support beyond softmax(scale q kᵀ) v on arrays of one shape (B, H, L, D)."""

from __future__ import annotations

from collections.abc import Iterable

FEATURES = {
    "causal": "mask=masks.causal(), aligned at the last query",
    "masks": "any mask of cupyflash.masks, and boolean arrays",
    "scores": "score_mod=, one or several changes of cupyflash.scores",
    "bias": "bias=, of any shape that broadcasts, -inf included; with a backward also its gradient",
    "sink": "sink=, one logit per query head; with a backward also its gradient",
    "scale": "scale=, any finite number; without, 1/sqrt(D) is expected",
    "dropout": "dropout= and seed=, drawn by Philox4x32-7 as CONTRIBUTING.md says",
    "any_dropout": "dropout= and seed=, drawn in any way that a seed repeats",
    "gqa": "fewer key heads than query heads",
    "lengths": "as many keys as one likes beside the queries: Lq != Lk",
    "widths": "values of another width than the keys: Dv != D",
    "empty": "axes of length 0: the next three features",
    "empty_queries": "no queries: Lq = 0",
    "empty_keys": "no keys: Lk = 0",
    "empty_batch": "leading axes of length 0, and no sequences",
    "broadcast": "any number of leading axes, broadcast as by numpy.matmul, and matrices",
    "strides": "arrays of any strides and alignment; without, all are contiguous",
    "lse": "returns (out, lse) and not (out, None)",
    "dlse": "dlse=, a gradient by the LSE",
    "out": "out=, lse_out= and grads_out=, arrays to write to",
    "nonfinite": "NaN and infinities reach no row that does not see them",
    "finite": "no NaN of finite inputs, even where logits are so large that no bound holds",
    "codes": "caches of codes: k_scale=, v_scale= and kv_dtype= of cached and append",
    "mixed": "caches whose keys and values have two types, codes of two or one of numbers: "
    "kv_dtype= is a pair",
    "float8": "q, k and v of float8: q_scale=, k_scale=, v_scale=, qkv_dtype= and out_dtype=",
    "bitwise": "a row's bits depend on its query, keys and values alone, not on where they stand",
    "repeatable": "the same call gives the same bits",
}
ALL = frozenset(FEATURES)
IMPLIED = {
    "masks": {"causal"},
    "dropout": {"any_dropout"},
    "empty": {"empty_queries", "empty_keys", "empty_batch"},
}


def features_of(names: Iterable[str] | None) -> frozenset[str]:
    """Return a set of features, all of them for None; a name that is none is an error."""
    if names is None:
        return ALL
    if isinstance(names, str):
        names = (names,)
    given = frozenset(names)
    unknown = sorted(given - ALL)
    if unknown:
        raise ValueError(
            f"features: got {', '.join(unknown)}; expected some of {', '.join(FEATURES)}"
        )
    return given.union(*(more for name, more in IMPLIED.items() if name in given))
