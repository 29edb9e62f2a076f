"""Cases to time: a problem's sizes, which pairs attend, and how its operations are counted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays.dtypes import FLOATS
from ..errors import ArgumentError

CAP = 20.0  # of softcap
PASSES = ("forward", "backward")
# All are causal except full and documents. The sizes are for a length of 8192, and scale with other
# lengths.
VARIANTS = {
    "full": "every query sees every key",
    "causal": "query i sees the keys up to its own",
    "window": "causal, and only the last 1024 keys before its own",
    "documents": "queries see the keys of their own document of 1000 tokens",
    "prefix": "causal, and everybody sees the first 1024 keys",
    "alibi": "causal, and scores fall linearly with the distance",
    "softcap": f"causal, and scores are held within {CAP:g} by a tanh",
}
SIZED = {"window": 1024, "documents": 1000, "prefix": 1024}
CHANGES_SCORES = ("alibi", "softcap")


@dataclass(frozen=True)
class Case:
    """A problem, and which pass over it.

    Attributes
    ----------
    batch, heads, heads_kv : int
        Numbers of batch entries, and of query heads and key-value heads in each.
    len_q, len_k : int
        Queries and keys.
    d : int
        Columns of q, k and v.
    dtype : str
        Of q, k and v.
    variant : str
        A name in `VARIANTS`.
    size : int
        Number of keys of the window, of a document or of the prefix; 0 for other variants.
    direction : str
        forward or backward.
    """

    batch: int
    heads: int
    heads_kv: int
    len_q: int
    len_k: int
    d: int
    dtype: str = "float32"
    variant: str = "full"
    size: int = 0
    direction: str = "forward"

    def __post_init__(self) -> None:
        numbers = (self.batch, self.heads, self.heads_kv, self.len_q, self.len_k, self.d)
        if min(numbers) < 1:
            raise ArgumentError(f"sizes: got {numbers}; expected whole numbers of 1 or more")
        if self.heads % self.heads_kv:
            raise ArgumentError(
                f"heads: got {self.heads} query heads; expected a multiple of {self.heads_kv}"
            )
        for name, value, known in (
            ("variant", self.variant, tuple(VARIANTS)),
            ("dtype", self.dtype, FLOATS),
            ("direction", self.direction, PASSES),
        ):
            if value not in known:
                raise ArgumentError(f"{name}: got {value!r}; expected one of {', '.join(known)}")
        if (self.variant in SIZED) != (self.size > 0):
            raise ArgumentError(
                f"size: got {self.size} with the variant {self.variant}; expected a number of 1 "
                f"or more for {', '.join(SIZED)}, and 0 for the others"
            )
        if self.len_q > self.len_k and self.variant != "full":
            raise ArgumentError(
                f"shape: got {self.len_q} queries and {self.len_k} keys; expected at least as "
                f"many keys as queries, because with the variant {self.variant} some queries "
                "would see no key"
            )

    @property
    def backward(self) -> bool:
        """Whether the gradients are timed."""
        return self.direction == "backward"

    @property
    def shape(self) -> str:
        """Sizes as `shape_of` reads them."""
        heads = f"{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        length = f"{self.len_q}/" * (self.len_q != self.len_k) + f"{self.len_k}"
        return f"{self.batch},{heads},{length},{self.d}"

    @property
    def kind(self) -> str:
        """The variant with its number."""
        return f"{self.variant} {self.size}" if self.size else self.variant

    @property
    def words(self) -> list[str]:
        """What it is, line by line."""
        return [f"({self.shape.replace(',', ', ')})", f"{self.kind}, {self.direction}"]

    @property
    def decodes(self) -> bool:
        """Whether there is one query only, so that reading K and V takes the time."""
        return self.len_q == 1 and not self.backward

    @property
    def pairs(self) -> float:
        """How many pairs of a query and a key are counted for one head.

        These are the pairs that attend; but for a square causal case they are half of all pairs, as
        in the tables of other projects.
        """
        if self.variant in ("causal", *CHANGES_SCORES) and self.len_q == self.len_k:
            return self.len_q * self.len_k / 2
        first, last = self.keys_of_rows
        return float((last - first).sum())

    @property
    def keys_of_rows(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The first key of each query, and the one after its last (a prefix begins at 0)."""
        at = np.arange(self.len_q) + self.len_k - self.len_q
        first, last = np.zeros_like(at), np.clip(at + 1, 0, self.len_k)
        if self.variant == "full":
            last = np.full_like(at, self.len_k)
        elif self.variant == "window":
            first = np.clip(at - self.size, 0, self.len_k)
        elif self.variant == "documents":
            first = at // self.size * self.size
            last = np.minimum(first + self.size, self.len_k)
            first = np.maximum(first, 0)
        elif self.variant == "prefix":
            last = np.maximum(last, min(self.size, self.len_k))
        return first, np.maximum(first, last)

    @property
    def flops(self) -> float:
        """How many floating-point operations of the matrix products are counted.

        Each pair of `pairs` counts 4 D in the forward, and 2.5 times that in the backward.
        Exponentials and score changes do not count.
        """
        return (10 if self.backward else 4) * self.batch * self.heads * self.pairs * self.d

    @property
    def key_bytes(self) -> int:
        """Bytes of K and V, which a step of decoding has to read."""
        size = {"float64": 8, "float32": 4}.get(self.dtype, 2)
        return 2 * self.batch * self.heads_kv * self.len_k * self.d * size

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores in float32, or float64."""
        size = 8 if self.dtype == "float64" else 4
        return self.batch * self.heads * self.len_q * self.len_k * size

    @property
    def slopes(self) -> np.ndarray[Any, Any]:
        """ALiBi's slope of each head."""
        return 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)


_VARIANT = re.compile(r"([a-z]+)(?:=(\d{1,9}))?")
_SHAPE = re.compile(r"(\d+),(\d+)(?:/(\d+))?,(\d+)(?:/(\d+))?,(\d+)", re.ASCII)


def variant_of(text: str) -> tuple[str, int | None]:
    """Read a variant such as ``window`` or ``window=512``.

    Parameters
    ----------
    text : str
        A name in `VARIANTS`; ``=`` and a number may follow if the variant has a size.

    Returns
    -------
    name : str
        The variant.
    size : int or None
        Its size.
    """
    match = _VARIANT.fullmatch(text)
    name, number = match.groups() if match else (text, None)
    if name not in VARIANTS:
        raise ArgumentError(f"variant: got {text!r}; expected one of {', '.join(VARIANTS)}")
    if number is not None and (name not in SIZED or int(number) < 1):
        raise ArgumentError(
            f"variant: got {text!r}; expected a number of 1 or more, and only after "
            f"{', '.join(SIZED)}"
        )
    return name, int(number) if number else None


def shape_of(text: str) -> tuple[int, int, int, int, int, int]:
    """Read a shape.

    Parameters
    ----------
    text : str
        ``B,H,L,D``, where H may be ``Hq/Hkv`` and L ``Lq/Lk``.

    Returns
    -------
    tuple of int
        B, Hq, Hkv, Lq, Lk, D.
    """
    match = _SHAPE.fullmatch(text.replace(" ", "").strip("()"))
    if match is None:
        raise ArgumentError(
            f"shape: got {text!r}; expected B,H,L,D, such as 2,8,1024,64, where H may be Hq/Hkv "
            "(query and key heads) and L may be Lq/Lk (queries and keys)"
        )
    b, hq, hkv, lq, lk, d = match.groups()
    numbers = int(b), int(hq), int(hkv or hq), int(lq), int(lk or lq), int(d)
    if min(numbers) < 1:
        raise ArgumentError(f"shape: got {text!r}; expected numbers of 1 or more")
    return numbers


def made(
    shape: tuple[int, int, int, int, int, int],
    dtype: str,
    variant: str,
    size: int | None,
    direction: str,
) -> Case:
    """Return a case.

    Parameters
    ----------
    shape : tuple of int
        B, Hq, Hkv, Lq, Lk, D.
    dtype : str
        Of q, k and v.
    variant : str
        A name in `VARIANTS`.
    size : int or None
        Size of the window, a document or the prefix; None for a size in proportion to the number of
        keys.
    direction : str
        forward or backward.

    Returns
    -------
    Case
        The problem.
    """
    if size is None:
        size = max(1, SIZED[variant] * shape[4] // 8192) if variant in SIZED else 0
    return Case(*shape, dtype=dtype, variant=variant, size=size, direction=direction)


def hidden(case: Case) -> np.ndarray[Any, Any] | None:
    """Return which pairs do not attend, (Lq, Lk), or None where all do."""
    if case.variant == "full":
        return None
    first, last = case.keys_of_rows
    j = np.arange(case.len_k)
    outside: np.ndarray[Any, Any] = (j < first[:, None]) | (j >= last[:, None])
    return outside
