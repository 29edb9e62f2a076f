"""A problem: the inputs and options of one call, all given by one line of Python."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupyflash.arrays import dtypes

from .families import FAMILIES
from .options import Sizes, float_type, mask_of, scores_of
from .placement import Layout, Placed, random_layout

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

LAYOUTS = ("fresh", "plain", "rows", "random")
# Defaults, which a line need not mention.
DEFAULTS: dict[str, Any] = {
    "offsets": None, "family": "normal", "mask": None, "scores": (), "bias": None, "sink": None,
    "scale": None, "dropout": 0.0, "dlse": False, "layouts": "fresh", "tiles": None,
    "workspace": False,
}  # fmt: skip


@dataclass
class Problem:
    """Inputs and options of one call, as `problem` makes them.

    Attributes
    ----------
    dtype : dtype
        The dtype of q, k, v and do.
    family : str
        The family of the arrays' elements.
    q, k, v, do : ndarray
        The inputs, and a gradient of the output.
    dlse : ndarray or None
        A gradient of the LSE.
    options : dict
        Those of mask, score_mod, bias, sink, scale, dropout and seed that the call has.
    offsets : tuple of 2 lists of int, or None
        The offsets of packed sequences.
    tiles : tuple of 2 int, or None
        The rows and keys of a tile for which the lengths were drawn.
    layouts : str
        How the arrays lie in memory.
    workspace : bool
        Whether the backward is to be given a workspace.
    seed : int
        The seed of the elements.
    hard : bool
        Whether logits are so large that single rows may be ill-conditioned.
    placed : list of Placed
        The arrays' surroundings; empty for fresh arrays.
    rng : numpy.random.Generator
        The generator for everything else that a property draws.
    line : str
        The call that makes this problem.
    """

    dtype: np.dtype[Any]
    family: str
    q: Array
    k: Array
    v: Array
    do: Array
    dlse: Array | None
    options: dict[str, Any]
    offsets: tuple[list[int], list[int]] | None
    tiles: tuple[int, int] | None
    layouts: str
    workspace: bool
    seed: int
    hard: bool
    line: str = ""
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    placed: list[Placed] = field(default_factory=list)

    @property
    def accumulator(self) -> np.dtype[Any]:
        """Type of the LSE and of its gradient."""
        return dtypes.accumulator(self.dtype)

    def __repr__(self) -> str:
        return self.line

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(self.line)  # hypothesis would print every element


def _line(dtype: np.dtype[Any], shapes: dict[str, Shape], seed: int, more: dict[str, Any]) -> str:
    parts = [repr(dtype.name), *(f"{name}={shape}" for name, shape in shapes.items())]
    parts += [f"{name}={value!r}" for name, value in more.items() if value != DEFAULTS[name]]
    return f"cupyflash.testing.problem({', '.join(parts)}, seed={seed})"


@np.errstate(all="ignore")
def problem(
    dtype: Any,
    q: Shape,
    k: Shape | None = None,
    v: Shape | None = None,
    *,
    offsets: tuple[Sequence[int], Sequence[int]] | None = None,
    family: str = "normal",
    mask: str | None = None,
    scores: Sequence[str] = (),
    bias: str | None = None,
    sink: str | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dlse: bool = False,
    layouts: str = "fresh",
    tiles: tuple[int, int] | None = None,
    workspace: bool = False,
    seed: int = 0,
) -> Problem:
    """Make a problem: the call gives sizes and options, and elements come from the seed.

    Parameters
    ----------
    dtype : dtype_like
        float16, bfloat16, float32 or float64.
    q, k, v : tuple of int
        Shapes, as in `cupyflash.attention`. By default, k is like q and v is like k.
    offsets : tuple of 2 sequences of int, optional
        Offsets of packed sequences in q and in k and v.
    family : str
        One of `cupyflash.testing.FAMILIES`.
    mask : str, optional
        One of ``options.MASKS``, one with "~", two joined by "&" or "|", or "array".
    scores : sequence of str
        Names in ``options.SCORES``.
    bias, sink : str, optional
        The dtype of bias and sink. With some seeds, some elements are -inf.
    scale : float, optional
        As in `cupyflash.attention`.
    dropout : float
        As in `cupyflash.attention`; its seed follows from `seed`.
    dlse : bool
        Whether there is a gradient of the LSE.
    layouts : str
        "fresh": arrays as NumPy makes them. The others are read-only arrays in poisoned memory:
        "plain" in C order, "rows" with the heads inside the rows, "random" with any strides.
    tiles : tuple of 2 int, optional
        Rows and keys of a tile.
    workspace : bool
        Whether the backward is to be given a workspace.
    seed : int
        The seed of every element.

    Returns
    -------
    Problem
        The arrays and options.

    Examples
    --------
    >>> from cupyflash.testing import problem
    >>> p = problem("float32", q=(2, 4, 33, 16), k=(2, 2, 65, 16), mask="causal", seed=123)
    >>> p.q.shape, p.v.shape, p.options["mask"]
    ((2, 4, 33, 16), (2, 2, 65, 16), <mask (j <= (i + (len_k - len_q)))>)
    """
    if layouts not in LAYOUTS:
        raise ValueError(f"layouts: got {layouts!r}; expected one of {', '.join(LAYOUTS)}")
    if family not in FAMILIES:
        raise ValueError(f"family: got {family!r}; expected one of {', '.join(FAMILIES)}")
    held = float_type(dtype)
    shapes = {"q": tuple(q), "k": tuple(k or q)}
    shapes["v"] = tuple(v or shapes["k"])
    packed = None if offsets is None else tuple([int(n) for n in part] for part in offsets)
    line = _line(held, shapes, seed, {
        "offsets": packed, "family": family, "mask": mask, "scores": tuple(scores), "bias": bias,
        "sink": sink, "scale": scale, "dropout": dropout, "dlse": dlse, "layouts": layouts,
        "tiles": tiles, "workspace": workspace,
    })  # fmt: skip
    placed: list[Placed] = []

    def rng_of(what: str) -> np.random.Generator:  # so that no option changes another's elements
        return np.random.default_rng([seed, zlib.crc32(what.encode())])

    def place(values: Array, what: str) -> Array:
        if layouts == "fresh":
            return np.array(values, order="C")
        layout = Layout()
        if layouts == "rows" and values.ndim >= 3:  # (..., L, H, D)
            axes = list(range(values.ndim))
            layout = Layout((*axes[:-3], axes[-2], axes[-3], axes[-1]))
        elif layouts == "random":
            where = rng_of(f"layout of {what}")
            layout = random_layout(where, values.ndim, values.dtype.itemsize, repeats=True)
        placed.append(Placed(values.shape, values.dtype, layout, values))
        return placed[-1].view

    matrices = all(len(shape) == 2 for shape in shapes.values())
    full = {name: x if len(x) > 2 else (1, *x) for name, x in shapes.items()}
    heads, lengths = full["q"][-3], [full[name][-2] for name in "qk"]
    lead: Shape = np.broadcast_shapes(*(x[:-3] for x in full.values()))
    totals = None
    if packed is not None:
        lead, totals = (len(packed[0]) - 1,), (packed[0][-1], packed[1][-1])
        lengths = [int(np.diff(x).max(initial=0)) for x in packed]
        out_shape: Shape = (heads, totals[0], full["v"][-1])
    else:
        out_shape = (lengths[0], full["v"][-1])
        out_shape = out_shape if matrices else (*lead, heads, *out_shape)
    made = FAMILIES[family](rng_of("arrays"), shapes | {"do": out_shape})
    if family == "near overflow" and dropout:  # what is kept is divided by 1 - dropout
        made["v"] = made["v"] * (0.999 * (1 - dropout))
    with np.errstate(over="ignore"):
        arrays = {name: place(x.astype(held), name) for name, x in made.items()}

    def sizes(what: str) -> Sizes:
        return Sizes(lead, heads, lengths[0], lengths[1], totals, rng_of(what))

    options: dict[str, Any] = {"mask": mask_of(mask, sizes("mask"))}
    options["score_mod"] = scores_of(scores, sizes("scores"))
    if bias is not None:
        z = sizes("bias")
        values = z.rng.standard_normal(z.broadcast(heads, *lengths))
        if z.rng.random() < 0.5:
            values = np.where(z.rng.random(values.shape) < 0.2, -np.inf, values)
        options["bias"] = place(values.astype(float_type(bias)), "bias")
    if sink is not None:
        rng = rng_of("sink")
        values = np.where(rng.random(heads) < 0.2, -np.inf, rng.standard_normal(heads) * 2)
        options["sink"] = place(values.astype(float_type(sink)), "sink")
    options["scale"] = scale
    if dropout:
        options["dropout"] = dropout
        options["seed"] = int(rng_of("dropout").integers(2**64, dtype=np.uint64))
    accumulator = dtypes.accumulator(held)
    row_gradient = rng_of("dlse").standard_normal(out_shape[:-1]).astype(accumulator)
    large = abs(scale or 0) * math.sqrt(shapes["q"][-1]) > 2.5
    return Problem(
        held, family, **arrays, dlse=place(row_gradient, "dlse") if dlse else None,
        options={name: value for name, value in options.items() if value is not None},
        offsets=None if packed is None else (packed[0], packed[1]), tiles=tiles,
        layouts=layouts, workspace=workspace, seed=seed, hard=large or family == "huge logits",
        line=line, rng=rng_of("more"), placed=placed,
    )  # fmt: skip
