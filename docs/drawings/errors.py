"""Errors in units of the bound: a right kernel, and one that leaves out a key."""

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, ORANGE, TEXT, figure

import cupyflash
from cupyflash import testing


def draw() -> Figure:
    """Return the figure."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 100, 32), np.float32)
    k, v = rng.standard_normal((2, 2, 2000, 32), np.float32)
    right = testing.forward_bound(q, k, v, precision=testing.Precision.of("float32")).out
    calls = {
        "cupyflash": (cupyflash.attention(q, k, v), BLUE),
        "without one key": (cupyflash.attention(q, k[:, :-1], v[:, :-1]), ORANGE),
    }
    made, axes = figure(6.6, 3)
    edges = np.geomspace(1e-7, 1e4, 90)
    for name, (out, colour) in calls.items():
        ratio = np.abs(out.astype(np.float64) - right.exact) / right.bound
        axes.hist(ratio.ravel(), edges, color=colour, alpha=0.85, label=name)
    axes.axvline(1, color=TEXT, lw=1.2, ls="--")
    axes.set(xscale="log", xlabel="error / bound", ylabel="elements")
    axes.legend()
    return made
