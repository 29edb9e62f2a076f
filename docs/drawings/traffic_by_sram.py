"""HBM traffic against the size of SRAM: Theorem 2."""

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, GREEN, GREY, ORANGE, TEXT, figure

from cupyflash import analysis

N, D = 4096, 64


def draw() -> Figure:
    """Return the figure."""
    made, axes = figure(6.6, 4)
    sizes = np.unique(np.geomspace(4 * D, N * D, 120).astype(int))
    first, second = [], []
    for sram in sizes:
        block_q, block_kv = analysis.block_sizes(int(sram), D)
        one = analysis.flash_attention(N, N, D, block_q=block_q, block_kv=block_kv)
        two = analysis.flash_attention_2(N, N, D, block_q=block_q, block_kv=block_kv)
        first.append(one.total)
        second.append(two.total)
    axes.loglog(sizes, first, color=BLUE, label="FlashAttention")
    axes.loglog(sizes, second, color=GREEN, label="FlashAttention-2")
    axes.loglog(sizes, 12 * N**2 * D**2 / sizes, "--", color=GREY, lw=1, label="12 N² d² / M")
    standard = analysis.standard_attention(N, N, D).total
    axes.axhline(standard, color=ORANGE, label="standard")
    for name in ("T4", "A100-80GB", "H200"):
        sram = analysis.device(name).sram_elements("float16")
        block_q, block_kv = analysis.block_sizes(sram, D)
        there = analysis.flash_attention(N, N, D, block_q=block_q, block_kv=block_kv).total
        axes.plot(sram, there, "o", color=BLUE, markersize=5)
        label = name.partition("-")[0]
        axes.annotate(
            label,
            (sram, there),
            (-16, -12) if name == "T4" else (5, 4),
            textcoords="offset points",
            color=TEXT,
        )
    axes.set(xlabel="M, elements of SRAM", ylabel="elements moved, of one head")
    axes.grid(visible=True)
    axes.legend()
    return made
