"""Rooflines of GPUs, with the intensities of standard attention and of FlashAttention."""

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, GREEN, ORANGE, PURPLE, TEXT, figure

from cupyflash import analysis

N, D = 8192, 64
NAMES = ["T4", "A100-80GB", "H100-SXM", "H200"]


def draw() -> Figure:
    """Return the figure."""
    made, axes = figure(6.6, 4)
    problem = analysis.Problem(N, N, D, dtype="float16")
    standard = analysis.standard_attention(N, N, D)
    intensity = np.geomspace(8, 4096, 200)
    for name, colour in zip(NAMES, (PURPLE, GREEN, ORANGE, BLUE), strict=True):
        gpu = analysis.device(name)
        peak = gpu.peak_of("float16")
        roof = np.minimum(peak, intensity * gpu.bandwidth) / 1e12
        axes.loglog(intensity, roof, color=colour, label=name)
        block_q, block_kv = analysis.block_sizes(gpu.sram_elements("float16"), D)
        flash = analysis.flash_attention(N, N, D, block_q=block_q, block_kv=block_kv)
        for traffic, marker in ((standard, "s"), (flash, "o")):
            least = analysis.roofline(problem, gpu, traffic)
            rate = least.flops / least.seconds / 1e12
            axes.plot(least.intensity, rate, marker, color=colour, markersize=6)
    for marker, label in (("s", "standard"), ("o", "FlashAttention")):
        axes.plot([], [], marker, color=TEXT, markersize=6, label=label)
    axes.set(xlabel="intensity, FLOP per byte", ylabel="at most, TFLOP/s")
    axes.set_xticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.grid(visible=True)
    axes.legend(loc="lower right")
    return made
