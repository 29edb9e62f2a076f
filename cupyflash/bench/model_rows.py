"""Shapes that models run, by the model's name: the problems of the suite `models`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .. import masks, scores


@dataclass(frozen=True)
class Special:
    """A mask or a change of scores, as this package says it and as FlexAttention does.

    Attributes
    ----------
    words : str
        What it is.
    ours : callable
        Returns options of `attention`, given the array module and the model.
    mask : callable or None
        When query i sees key j, given positions as tensors.
    score : callable or None
        The new score, given PyTorch, the model, the score, the head, i and j.
    """

    words: str
    ours: Callable[[Any, Model], dict[str, Any]]
    mask: Callable[[Any, Any], Any] | None = None
    score: Callable[[Any, Model, Any, Any, Any, Any], Any] | None = None


@dataclass(frozen=True)
class Model:
    """A call of attention as a model makes it.

    Attributes
    ----------
    name : str
        The model's, or that of a part of it.
    batch, heads, len_q, d : int
        Numbers of batch entries, query heads and queries, and columns of queries and keys.
    heads_kv, len_k, d_v : int
        Key heads, keys and columns of values; 0 where they are as those of the queries.
    causal, lengths : bool
        Whether queries see the keys up to their own; whether entries have keys of their own number,
        a quarter of all at least.
    bias : int
        Batch entries of a bias; 0 if there is none.
    dropout : float
        The probability that a pair is dropped.
    special : Special or None
        Another mask or change of scores.
    precision : {None, "tf32x3"}
        How float32 numbers are multiplied here; PyTorch's memory-efficient kernel has one way.
    backward : bool
        Whether its gradients are timed as well.
    """

    name: str
    batch: int
    heads: int
    len_q: int
    d: int
    heads_kv: int = 0
    len_k: int = 0
    d_v: int = 0
    causal: bool = False
    lengths: bool = False
    bias: int = 0
    dropout: float = 0.0
    special: Special | None = None
    precision: Literal["tf32x3"] | None = None
    backward: bool = True

    @property
    def key_heads(self) -> int:
        """Key heads."""
        return self.heads_kv or self.heads

    @property
    def keys(self) -> int:
        """Keys."""
        return self.len_k or self.len_q

    @property
    def bias_shape(self) -> tuple[int, int, int, int]:
        """The shape of the bias."""
        return self.bias, self.heads, self.len_q, self.keys

    @property
    def flops(self) -> float:
        """Operations of a forward's matrix products."""
        pairs = self.len_q * self.keys / (2 if self.causal else 1)
        return 2 * self.batch * self.heads * pairs * (self.d + (self.d_v or self.d))

    @property
    def title(self) -> str:
        """Its name, sizes and options."""
        words = [f"{self.name} ({sizes(self)})"]
        words += ["causal"] * self.causal + ["lengths"] * self.lengths
        words += [f"bias {self.bias_shape}"] if self.bias else []
        words += [f"dropout {self.dropout:g}"] if self.dropout else []
        words += [self.special.words] if self.special else []
        words += [f"precision {self.precision}"] if self.precision else []
        return ", ".join(words)


@dataclass(frozen=True)
class Cached:
    """Queries over a full cache; pages of so many keys, or 0 for keys in one piece."""

    name: str
    batch: int
    heads: int
    key_heads: int
    len_q: int
    keys: int
    d: int
    page: int = 0

    d_v = 0

    @property
    def title(self) -> str:
        """Its name, sizes and pages."""
        pages = f", pages of {self.page}" if self.page else ""
        return f"{self.name} ({sizes(self)}){pages}"


@dataclass(frozen=True)
class Packed:
    """Packed sequences, of at least and at most so many tokens."""

    name: str
    sequences: int
    least: int
    most: int
    heads: int
    key_heads: int
    d: int
    causal: bool

    @property
    def offsets(self) -> np.ndarray[Any, Any]:
        """Where sequences begin and end, always the same."""
        drawn = np.random.default_rng(0).integers(self.least, self.most, self.sequences)
        return np.concatenate([[0], drawn.cumsum()]).astype(np.int32)

    @property
    def title(self) -> str:
        """Its name and sizes."""
        heads = _either(self.heads, self.key_heads)
        words = f"{self.name} ({self.sequences} of {self.least} to {self.most}, {heads}, {self.d})"
        return words + ", causal" * self.causal


def sizes(model: Model | Cached) -> str:
    """Batch, heads, length and columns, as `shape_of` reads them where values have as many."""
    heads = _either(model.heads, model.key_heads)
    length, columns = _either(model.len_q, model.keys), _either(model.d, model.d_v or model.d)
    return f"{model.batch}, {heads}, {length}, {columns}"


def _either(a: int, b: int) -> str:
    return f"{a}" if a == b else f"{a}/{b}"


# --- on a CPU ---

_MODELS = (
    Model("ViT-S", 8, 6, 197, 64),
    Model("MiniLM", 32, 12, 64, 32, lengths=True),
    Model("BERT", 8, 12, 128, 64, lengths=True),
    Model("Swin", 256, 4, 49, 32, bias=1),
    Model("Evoformer", 64, 4, 128, 32, bias=1),
    Model("cross attention", 2, 8, 1024, 40, len_k=77),
    Model("Whisper", 1, 8, 1500, 64),
    Model("shared key heads", 1, 32, 512, 64, heads_kv=8, causal=True),
    Model("characters", 32, 6, 256, 64, causal=True),
    Model("one query", 1, 32, 1, 128, heads_kv=8, len_k=512, backward=False),
    Model("one query", 1, 8, 1, 64, len_k=4096, backward=False),
)
_WIDE: dict[str, tuple[Model, ...]] = {
    "float32": (
        *_MODELS,
        Model("narrow heads", 64, 8, 64, 16),
        Model("heads of 80", 4, 16, 257, 80),
        Model("a small training", 4, 4, 32, 16, causal=True),
    ),
    "float64": (Model("science", 16, 4, 100, 16), Model("science", 4, 8, 512, 32, causal=True)),
}
ON_CPU: dict[str, tuple[Model, ...]] = _WIDE | dict.fromkeys(("bfloat16", "float16"), _MODELS)

# --- on a GPU ---


def window(keys: int, sink: bool = False) -> Special:
    """The query's own key and so many before it."""

    def ours(xp: Any, model: Model) -> dict[str, Any]:
        # Logits so small that results stay those of a peer that has none.
        logits = {"sink": xp.full(model.heads, -16, np.float32)} if sink else {}
        return {"mask": masks.window(keys, 0), **logits}

    words = f"window {keys}" + ", a sink for this package alone" * sink
    return Special(words, ours, lambda i, j: (i >= j) & (i - j <= keys))


def image(side: int, reach: int) -> Special:
    """Pixels of a square image, which see those of a square around them."""

    def near(i: Any, j: Any) -> Any:
        rows, columns = i // side - j // side, i % side - j % side
        return (abs(rows) <= reach) & (abs(columns) <= reach)

    words = f"an image of {side} × {side}, neighbours of {2 * reach + 1} × {2 * reach + 1}"
    mask = masks.mask(lambda b, h, i, j: near(i, j))
    return Special(words, lambda xp, model: {"mask": mask}, near)


def documents(tokens: int) -> Special:
    """Causal within documents of so many tokens, whose numbers are an array."""

    def ours(xp: Any, model: Model) -> dict[str, Any]:
        ids = xp.asarray(np.arange(model.len_q, dtype=np.int32) // tokens)
        return {"mask": masks.segments(ids) & masks.causal()}

    return Special(
        f"causal, documents of {tokens}", ours, lambda i, j: (i // tokens == j // tokens) & (i >= j)
    )


def prefix(tokens: int) -> Special:
    """Causal, and everybody sees the first tokens."""
    return Special(
        f"causal, prefix of {tokens}",
        lambda xp, model: {"mask": masks.causal() | masks.prefix(tokens)},
        lambda i, j: (i >= j) | (j < tokens),
    )


def slopes(model: Model) -> np.ndarray[Any, Any]:
    """ALiBi's slope of each head."""
    return (2.0 ** (-8 * np.arange(1, model.heads + 1) / model.heads)).astype(np.float32)


ALIBI = Special(
    "causal, ALiBi",
    lambda xp, model: {
        "mask": masks.causal(), "score_mod": scores.alibi(xp.asarray(slopes(model))),
    },
    lambda i, j: i >= j,
    lambda torch, model, s, h, i, j: s + torch.exp2(-8 * (h + 1) / model.heads) * (j - i),
)  # fmt: skip
SOFTCAP = Special(
    "causal, soft cap of 50",
    lambda xp, model: {"mask": masks.causal(), "score_mod": scores.softcap(50.0)},
    lambda i, j: i >= j,
    lambda torch, model, s, h, i, j: 50 * torch.tanh(s / 50),
)
_GPT2 = Model("GPT-2", 8, 12, 1024, 64, causal=True)
_PAIRS = Model("Evoformer", 256, 4, 256, 32, bias=1)
_IN_FLOAT32 = (
    _GPT2,
    _PAIRS,
    Model("narrow heads", 16, 8, 512, 16),
    Model("float32", 4, 16, 2048, 64),
    Model("float32", 2, 16, 2048, 128, causal=True),
)
ON_GPU: dict[str, tuple[Model, ...]] = {
    "bfloat16": (
        Model("Llama 8B", 2, 32, 4096, 128, heads_kv=8, causal=True),
        Model("Llama 70B", 1, 64, 8192, 128, heads_kv=8, causal=True),
        Model("one key head", 1, 32, 8192, 128, heads_kv=1, causal=True),
        Model("Qwen", 4, 16, 2048, 64, heads_kv=2, causal=True),
        _GPT2,
        Model("ViT-B", 128, 12, 197, 64),
        Model("ViT-L, 336 pixels", 32, 16, 577, 64),
        Model("ViT-H", 32, 16, 257, 80),
        Model("SigLIP", 16, 16, 729, 72),
        Model("Stable Diffusion 1.5", 8, 8, 4096, 40),
        Model("Stable Diffusion 1.5, cross", 8, 8, 4096, 40, len_k=77),
        Model("Stable Diffusion 1.5, middle", 8, 8, 256, 160),
        Model("SDXL", 4, 10, 4096, 64),
        Model("SDXL, cross", 4, 20, 1024, 64, len_k=77),
        Model("Flux", 1, 24, 4608, 128),
        Model("video", 1, 24, 32760, 128, backward=False),
        Model("Phi-3", 2, 32, 4096, 96, causal=True),
        Model("DeepSeek, prompt", 1, 32, 4096, 192, d_v=128, causal=True),
        Model("BERT", 64, 12, 128, 64, lengths=True),
        Model("BERT", 32, 12, 512, 64, lengths=True),
        Model("MiniLM", 256, 12, 64, 32, lengths=True),
        Model("Whisper", 8, 20, 1500, 64),
        Model("Whisper, cross", 8, 20, 448, 64, len_k=1500),
        Model("Swin", 2048, 4, 49, 32, bias=1),
        _PAIRS,
        Model("T5", 16, 12, 512, 64, bias=1),
        Model("a bias of each entry", 4, 16, 2048, 64, bias=4),
        Model("dropout", 8, 16, 1024, 64, dropout=0.1),
        Model("dropout", 2, 16, 4096, 128, causal=True, dropout=0.1),
        Model("narrow heads", 16, 16, 1024, 32),
        Model("small", 1, 8, 128, 64),
        Model("small", 4, 8, 64, 64, causal=True),
        Model("Mistral", 1, 32, 16384, 128, heads_kv=8, special=window(4096)),
        Model("Gemma 2", 2, 16, 4096, 256, heads_kv=8, special=SOFTCAP),
        Model("Gemma", 2, 8, 4096, 256, heads_kv=1, causal=True),
        Model("MPT", 2, 32, 4096, 128, special=ALIBI),
        Model("neighbourhood", 1, 8, 4096, 64, special=image(64, 3)),
        Model("prefix", 2, 16, 4096, 128, special=prefix(1024)),
        Model("gpt-oss", 1, 64, 4096, 64, heads_kv=8, special=window(127, sink=True)),
        Model("short prompts", 8, 32, 512, 128, heads_kv=8, causal=True),
        Model("short prompts", 64, 32, 128, 128, heads_kv=8, causal=True),
        Model("documents in rows", 4, 16, 2048, 64, special=documents(100)),
    ),
    "float16": (_GPT2,),
    "float32": (
        *_IN_FLOAT32,
        *(replace(x, precision="tf32x3", backward=False) for x in _IN_FLOAT32),
    ),
}
CACHED = (
    Cached("a piece of a prompt", 4, 32, 8, 512, 8192, 128),
    Cached("a piece of a prompt", 4, 32, 8, 512, 8192, 128, 16),
    Cached("a draft", 8, 32, 8, 4, 8192, 128, 16),
    Cached("a draft", 8, 32, 8, 16, 8192, 128, 16),
    Cached("one query", 64, 32, 8, 1, 1024, 128, 16),
    Cached("one query", 16, 64, 8, 1, 4096, 64),
    Cached("one query", 4, 32, 32, 1, 4096, 128),
)
PACKED = (
    Packed("packed BERT", 256, 20, 500, 12, 12, 64, False),
    Packed("packed fine-tuning", 32, 200, 4000, 32, 8, 128, True),
    Packed("packed ViT", 64, 64, 1024, 16, 16, 72, False),
)
