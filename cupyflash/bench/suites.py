"""Which cases belong to a suite, and which contenders are timed on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import blocks, derivatives, host, models, programs, short
from .cases import PASSES, VARIANTS, Case, made
from .tasks import TaskSuite

Shape = tuple[int, int, int, int, int, int]  # B, Hq, Hkv, Lq, Lk, D
OURS, PAGES, SMALL_PAGES = "cupyflash", "cupyflash-pages", "cupyflash-pages-of-1"
OURS_FP8 = "cupyflash-fp8"
CODES: dict[str, str | tuple[str, str]] = {  # over caches of these
    "cupyflash-int8": "int8",
    "cupyflash-e4m3": "float8_e4m3fn",
    "cupyflash-int4": "int4",
    "cupyflash-int8-int4": ("int8", "int4"),  # keys and values
}


@dataclass(frozen=True)
class Suite:
    """Shapes, and what is timed for each.

    Attributes
    ----------
    what : str
        What it is, in words.
    shapes : tuple of tuple of int
        B, Hq, Hkv, Lq, Lk, D.
    dtype : str
        The dtype, unless another one is asked for.
    variants : tuple of str
        Names in `VARIANTS`.
    passes : tuple of str
        forward, backward.
    contenders : tuple of str
        Which contenders are timed, in order.
    """

    what: str
    shapes: tuple[Shape, ...]
    dtype: str
    variants: tuple[str, ...]
    passes: tuple[str, ...]
    contenders: tuple[str, ...]

    def cases(
        self,
        dtypes: Sequence[str] = (),
        variants: Sequence[tuple[str, int | None]] = (),
        passes: Sequence[str] = (),
    ) -> Iterator[Case]:
        """Yield the cases, with other dtypes, variants or passes where some are given."""
        for direction in passes or self.passes:
            for variant, size in variants or [(name, None) for name in self.variants]:
                for dtype in dtypes or (self.dtype,):
                    for shape in self.shapes:
                        yield made(shape, dtype, variant, size, direction)


def _same(batch: int, heads: int, length: int, d: int) -> Shape:
    return batch, heads, heads, length, length, d


_ARTICLE = tuple(_same(2, 8, length, 64) for length in (512, 1024, 2048, 4096, 8192))
_TOKENS, _HIDDEN = 16384, 2048
_PEERS = tuple(
    _same(_TOKENS // length, _HIDDEN // d, length, d)
    for d in (64, 128, 256)
    for length in (512, 1024, 2048, 4096, 8192, 16384)
)
_DECODE = tuple(
    (batch, 32, 8, 1, length, 128)
    for batch, length in (
        (1, 4096), (1, 32768), (1, 131072), (8, 8192), (32, 8192), (128, 4096),
    )
)  # fmt: skip
_SDPA = ("torch-cudnn", "torch-flash", "torch-efficient")
_ARTICLE_SAYS = "(2, 8, L, 64) for L = 512 to 8192, against standard attention"

SUITES: dict[str, dict[str, Suite]] = {
    "cpu": {
        "quick": Suite(
            "a few seconds: (1, 4, L, 64) for L = 256 to 1024",
            tuple(_same(1, 4, length, 64) for length in (256, 512, 1024)),
            "float32",
            ("full", "causal"),
            PASSES,
            (OURS, "standard", "torch-cpu"),
        ),
        "article": Suite(
            _ARTICLE_SAYS, _ARTICLE, "float32", ("full",), ("forward",), (OURS, "standard")
        ),
        "peers": Suite(
            "(1, 8, 2048, 64) and (1, 8, 4096, 128), against PyTorch's CPU kernel",
            (_same(1, 8, 2048, 64), _same(1, 8, 4096, 128)),
            "float32",
            ("full", "causal"),
            PASSES,
            (OURS, "torch-cpu"),
        ),
        "variants": Suite(
            "every mask and score change at (1, 4, 2048, 64)",
            (_same(1, 4, 2048, 64),),
            "float32",
            tuple(VARIANTS),
            PASSES,
            (OURS, "standard", "torch-cpu"),
        ),
        "decode": Suite(
            "one query against 4096 to 32768 keys, 32 query heads and 8 key heads of 128",
            tuple((1, 32, 8, 1, length, 128) for length in (4096, 16384, 32768)),
            "float32",
            ("full",),
            ("forward",),
            (OURS, PAGES, SMALL_PAGES, *CODES, "standard", "torch-cpu"),
        ),
        "fp8": Suite(
            "(1, 8, 1024, 64) and (1, 8, 2048, 128), numbers beside codes of 8 bits",
            (_same(1, 8, 1024, 64), _same(1, 8, 2048, 128)),
            "float32",
            ("full", "causal"),
            ("forward",),
            (OURS, OURS_FP8),
        ),
    },
    "gpu": {
        "quick": Suite(
            "a first look: (2, 16, L, 64) for L = 512 to 4096",
            tuple(_same(2, 16, length, 64) for length in (512, 1024, 2048, 4096)),
            "float16",
            ("full", "causal"),
            PASSES,
            (OURS, "standard", *_SDPA),
        ),
        "article": Suite(
            _ARTICLE_SAYS, _ARTICLE, "float16", ("full",), ("forward",), (OURS, "standard")
        ),
        "peers": Suite(
            "16,384 tokens in all, hidden size 2048, heads of 64, 128 and 256, L = 512 to 16384",
            _PEERS,
            "bfloat16",
            ("full", "causal"),
            PASSES,
            (OURS, *_SDPA, "flash-attn-4"),
        ),
        "variants": Suite(
            "every mask and score change at (2, 16, 8192, 128)",
            (_same(2, 16, 8192, 128),),
            "bfloat16",
            tuple(VARIANTS),
            PASSES,
            (OURS, "torch-flex", "torch-efficient"),
        ),
        "decode": Suite(
            "one query against 4096 to 131072 keys, 32 query heads and 8 key heads of 128",
            _DECODE,
            "bfloat16",
            ("full",),
            ("forward",),
            (OURS, PAGES, SMALL_PAGES, *CODES, "torch-cudnn", "torch-flash"),
        ),
        "fp8": Suite(
            "numbers beside codes of 8 bits: the shapes of peers from L = 2048 on",
            tuple(shape for shape in _PEERS if shape[3] >= 2048),
            "bfloat16",
            ("full", "causal"),
            ("forward",),
            (OURS, OURS_FP8, "torch-cudnn"),
        ),
    },
}
TASKS: dict[str, dict[str, TaskSuite]] = {
    "cpu": {
        "host": host.SUITES["cpu"],
        "short": short.SUITE,
        "programs": programs.SUITE,
        "models": models.SUITES["cpu"],
        "blocks": blocks.SUITES["cpu"],
        "derivatives": derivatives.SUITES["cpu"],
    },
    "gpu": {
        "host": host.SUITES["gpu"],
        "models": models.SUITES["gpu"],
        "blocks": blocks.SUITES["gpu"],
        "derivatives": derivatives.SUITES["gpu"],
    },
}


def own_shapes(kind: str, shapes: Sequence[Shape]) -> Suite:
    """Return a suite of a user's shapes: forwards without a mask, by the quick suite's contenders.

    Parameters
    ----------
    kind : str
        cpu or gpu.
    shapes : sequence of tuple of int
        B, Hq, Hkv, Lq, Lk, D.

    Returns
    -------
    Suite
        Its cases may be asked for in other dtypes, variants and passes.
    """
    quick = SUITES[kind]["quick"]
    return Suite(
        "own shapes", tuple(shapes), quick.dtype, ("full",), ("forward",), quick.contenders
    )
