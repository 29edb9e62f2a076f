"""The online softmax at work: elements, the running maximum, and the running sum."""

import numpy as np
from matplotlib.figure import Figure
from svg import BLUE, GREY, ORANGE, TEXT, figure

X = np.array([0.6, 0.1, 0.4, 1.5, 0.9, 1.2, 0.2, 2.6, 1.9, 2.2, 3.1, 2.4])


def draw() -> Figure:
    """Return the figure."""
    made, (above, below) = figure(7, 4.2, 2)
    steps = np.arange(len(X))
    m, l = -np.inf, 0.0
    maxima, sums = [], []
    for x in X:
        m_new = max(m, x)
        rescaled = l * np.exp(m - m_new)
        if m_new > m and l:
            arrow = {"arrowstyle": "->", "color": ORANGE, "lw": 1.6}
            step = len(sums)
            below.annotate("", (step - 0.5, rescaled), (step - 0.5, l), arrowprops=arrow)
            label = f"× {np.exp(m - m_new):.2f}"
            below.text(step - 0.42, (l + rescaled) / 2, label, color=ORANGE, va="center")
        l = rescaled + np.exp(x - m_new)
        m = m_new
        maxima.append(m)
        sums.append(l)
    above.bar(steps, X, 0.5, color=GREY)
    above.step(steps, maxima, where="mid", color=BLUE)
    above.text(steps[-1] + 0.6, maxima[-1], "m", color=BLUE, va="center")
    above.set_ylabel("x")
    below.step(steps, sums, where="mid", color=BLUE)
    below.text(steps[-1] + 0.6, sums[-1], "l", color=BLUE, va="center")
    below.set(ylabel="sum", xlabel="element", ylim=(0, None))
    for axes in (above, below):
        axes.set_xlim(-0.6, len(X))
        axes.set_xticks(steps, steps + 1)
        axes.tick_params(color=TEXT)
    return made
