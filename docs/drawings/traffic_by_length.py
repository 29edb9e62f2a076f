"""HBM traffic against the length of a sequence."""

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, GREEN, GREY, ORANGE, figure

from cupyflash import analysis

D, M = 64, 25_600
LENGTHS = [2**n for n in range(8, 17)]


def totals() -> dict[str, list[int]]:
    """Return the elements that each algorithm moves, by length."""
    block_q, block_kv = analysis.block_sizes(M, D)
    sizes = {"block_q": block_q, "block_kv": block_kv}
    return {
        "one pass": [analysis.one_pass_attention(n, n, D).total for n in LENGTHS],
        "standard": [analysis.standard_attention(n, n, D).total for n in LENGTHS],
        "FlashAttention": [analysis.flash_attention(n, n, D, **sizes).total for n in LENGTHS],
        "FlashAttention-2, causal": [
            analysis.flash_attention_2(n, n, D, causal=True, **sizes).total for n in LENGTHS
        ],
    }


def draw() -> Figure:
    """Return the figure."""
    made, axes = figure(6.6, 4)
    for (name, counts), colour in zip(totals().items(), (GREY, ORANGE, BLUE, GREEN), strict=True):
        axes.loglog(LENGTHS, counts, "o-", color=colour, markersize=4, label=name)
    ticks = LENGTHS[::2]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_yticks(10.0 ** np.arange(5, 13, 2), ["100,000", "10 million", "1 billion", "100 bn"])
    axes.minorticks_off()
    axes.set(xlabel="queries and keys", ylabel="elements moved, of one head")
    axes.grid(visible=True)
    axes.legend()
    return made
