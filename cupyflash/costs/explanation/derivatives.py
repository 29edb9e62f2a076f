"""What kernels of tangents read, write and compute, and what standard attention does for them.

With tangents of all arrays, a forward has three times the products of one without: S, two of its
tangent, P v, and two of the output's tangent. Tangents of gradients come after that: S and its
tangent again, dP and its tangent, tangents of dv, and two products each of those of dk and dq.
"""

from __future__ import annotations

from collections.abc import Mapping

from .results import Bytes

# Part of a call -> its products of each pair: over columns of q and k, and over those of v.
PRODUCTS: Mapping[str, tuple[int, int]] = {
    "tangents": (3, 3),
    "tangent_dkdv": (5, 3),
    "tangent_dq": (5, 2),
    "tangent_bias": (3, 2),
    "tangent_delta": (0, 0),
    "tangent_sink": (0, 0),
}
# Of a call, if nothing is computed twice, and out and lse of a backward are given.
LEAST = {False: (3, 3), True: (10, 5)}
# What standard attention computes for the same; P is there before gradients.
OF_STANDARD = {False: (3, 3), True: (6, 5)}
MATRICES = {False: 4, True: 7}  # of scores, which it stores: those of `standard_moved`
NAMES = {False: "S, P and their tangents", True: "P, dP, dS and tangents of these and of S"}


def flops(products: tuple[int, int], pairs: int, d: int, d_v: int) -> int:
    """Return the floating-point operations of products over a number of pairs."""
    return 2 * pairs * (products[0] * d + products[1] * d_v)


def with_tangents(arrays: Mapping[str, int]) -> dict[str, int]:
    """Return bytes of arrays and of their tangents, which have the same sizes."""
    return {**arrays, **{f"t{name}": n for name, n in arrays.items()}}


def moved(
    part: str,
    arrays: Mapping[str, int],
    seen: Mapping[str, int],
    again: Mapping[str, int],
    pass_by: Mapping[str, int],
) -> tuple[Bytes, Bytes]:
    """Return what a kernel moves at least (everything once) and at most.

    Parameters
    ----------
    part : str
        What the kernel computes: a name in `PRODUCTS`.
    arrays : mapping
        Bytes of q, k, v, o and of lse, which is as large as delta.
    seen, again : mapping
        Bytes of k and v in visited tiles, each counted once, and each time.
    pass_by : mapping
        Bytes of q, o and lse in visited tiles, each counted each time.
    """
    q, o, row = arrays["q"], arrays["o"], arrays["lse"]
    if part == "tangent_delta":
        rows = Bytes({"o": o, "do": o, "to": o, "tdo": o}, {"delta": row, "tdelta": row})
        return rows, rows
    statistics = {"lse": row, "tlse": row, "delta": row, "tdelta": row}
    if part == "tangent_dkdv":
        keys = with_tangents({name: arrays[name] for name in "kv"})
        once = with_tangents({"q": q, "do": o}) | statistics
        each = with_tangents({"q": pass_by["q"], "do": pass_by["o"]})
        each |= dict.fromkeys(statistics, pass_by["lse"])
        once = {name: min(n, each[name]) for name, n in once.items()}
        results = {"tdk": arrays["k"], "tdv": arrays["v"]}
        return Bytes(keys | once, results), Bytes(keys | each, results)
    if part == "tangents":
        mine, results = with_tangents({"q": q}), with_tangents({"o": o, "lse": row})
    else:
        mine, results = with_tangents({"q": q, "do": o}) | statistics, {"tdq": q}
    return (
        Bytes(mine | with_tangents(seen), results),
        Bytes(mine | with_tangents(again), results),
    )


def least(arrays: Mapping[str, int], seen: Mapping[str, int], backward: bool) -> Bytes:
    """Return what moves if every array of a call moves once, k and v as far as seen."""
    inputs, o, row = with_tangents({"q": arrays["q"], **seen}), arrays["o"], arrays["lse"]
    if not backward:
        return Bytes(inputs, with_tangents({"o": o, "lse": row}))
    gradients = {f"td{name}": arrays[name] for name in "qkv"}
    return Bytes(
        inputs | {"o": o, "do": o, "tdo": o, "lse": row}, gradients | {"to": o, "tlse": row}
    )


def standard_moved(n_q: int, n_k: int, d: int, d_v: int, backward: bool) -> Bytes:
    """Return elements that standard attention moves, if products read every matrix once."""
    pairs, q, k, v, o = n_q * n_k, n_q * d, n_k * d, n_k * d_v, n_q * d_v
    if not backward:
        reads = {"q": 2 * q, "tq": q, "k": 2 * k, "tk": k, "v": 2 * v, "tv": v}
        scores = {"s": 1, "ts": 1, "p": 3, "tp": 1}
        written = {"o": o, "to": o}
    else:
        reads = {"q": 2 * q, "tq": 2 * q, "k": 2 * k, "tk": 2 * k, "v": 2 * v, "tv": 2 * v}
        reads |= {"do": 3 * o, "tdo": 2 * o}
        scores = {"p": 5, "ts": 1, "tp": 3, "dp": 2, "tdp": 1, "ds": 2, "tds": 2}
        written = {"tdq": q, "tdk": k, "tdv": v, "to": o}
    stored = {name: pairs for name in scores if name != "p" or not backward}
    return Bytes(reads | {name: n * pairs for name, n in scores.items()}, stored | written)
