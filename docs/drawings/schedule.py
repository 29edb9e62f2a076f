"""FlashAttention-3's order of products and softmax, from the schedule that its twin returns."""

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from svg import BLUE, GREEN, ORANGE, figure

from cupyflash.reference.algorithms import flash_attention_3

LANES = {"q k": (1, BLUE, "Q K"), "p v": (1, GREEN, "P V"), "softmax": (0, ORANGE, "softmax")}


def draw() -> Figure:
    """Return the figure."""
    x = np.ones((4, 1))
    schedule = flash_attention_3.forward(x, x, x, block_q=4, block_kv=1).schedule
    made, axes = figure(7.2, 1.7)
    # A unit of time each. A product begins when it is issued and the tensor cores are free, and a
    # wait ends when it has; the softmax runs in between.
    now, free, ends = 0.0, 0.0, {}
    for _, event, j in schedule:
        what, _, product = event.partition(" ")
        if what == "wait":
            now = max(now, ends[product, j])
            continue
        lane, colour, name = LANES[product or what]
        begin = max(now, free) if what == "issue" else now
        box = Rectangle((begin + 0.03, lane + 0.08), 0.94, 0.8, color=colour, alpha=0.9, lw=0)
        axes.add_patch(box)
        label = f"{name} {j}"
        axes.text(begin + 0.5, lane + 0.48, label, ha="center", va="center", color="white", size=8)
        if what == "issue":
            free = ends[product, j] = begin + 1
        else:
            now = begin + 1
    axes.set(xlim=(0, max(now, free)), ylim=(0, 2), xlabel="time")
    axes.set_yticks([0.5, 1.5], ["other units", "tensor cores"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)
    return made
