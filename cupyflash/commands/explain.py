"""The command `cupyflash explain`: what a call would run, and what that costs."""

from __future__ import annotations

import argparse
import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..arrays.dtypes import FLOATS
from ..costs.analysis import DEVICES
from ..costs.analysis.roofline import Roofline
from ..costs.explanation import Bytes, Explanation, KernelUse, derivatives, explain_cached
from ..costs.explanation import explain as explained
from ..costs.figures.terminal import ascii_only, can_show
from ..distributed.partition.simulation import Simulation
from ..errors import ArgumentError
from ..files import check_ending, check_writable, write_text
from ..problem.coded import DEFAULT_RESULT, FORMS, RESULTS
from ..problem.formats import FORMATS
from .text import complain, printable, table, whole_number, wrapped
from .words import MASKS, read, score_words


def quantity(number: float, unit: str) -> str:
    """Return a number with three digits and a unit: 134 MB, 1.18 GB."""
    signs = ("", "k", "M", "G", "T", "P", "E")
    step = 0 if number <= 0 else min(int(math.log10(number) // 3), len(signs) - 1)
    step = max(step, 0)
    value = number / 1000.0**step
    if value >= 999.5 and step < len(signs) - 1:
        value, step = value / 1000, step + 1
    digits = 0 if value >= 99.95 or (step == 0 and value == int(value)) else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {signs[step]}{unit}"


def types(text: str) -> str | tuple[str, ...]:
    """Read a type, or types with a comma between them."""
    found = tuple(text.split(","))
    return found if len(found) > 1 else text


def seconds(number: float) -> str:
    """Return a time with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number / 1e-6:.3g} us"


def shape(text: str) -> tuple[int, ...]:
    """Read lengths with commas between them."""
    try:
        found = tuple(int(word) for word in text.split(","))
    except ValueError:
        found = ()
    if len(found) < 2 or min(found) < 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected lengths of 1 or more, as B,H,L,D or L,D"
        )
    return found


def shapes(options: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of q, k and v."""
    q = options.shape
    keys = options.keys or q[-2]
    k = (*q[:-2], keys, q[-1])
    if options.heads_kv:
        k = (*q[:-3], options.heads_kv, keys, q[-1])
    return q, k, (*k[:-1], options.dv or q[-1])


def lengths(text: str) -> int | list[int]:
    """Read the length of all entries, or one for each with commas between them."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected the positions in use: N, or N,N,... for each batch entry"
        ) from None
    return found if len(found) > 1 else found[0]


def _has_cache(options: argparse.Namespace) -> bool:
    """Whether a call over a cache is asked about; refuse what such calls do not have."""
    given = [name for name in _CACHE if getattr(options, name) is not None]
    if not given and not options.cache:
        return False
    for name, (is_given, remedy) in {
        "--backward": (options.backward, "gradients are those of a call without a cache"),
        "--deterministic": (options.deterministic, "it is about gradients"),
        "--precision": (options.precision, "a call over a cache has none"),
        "--tangents": (options.tangents, "it is for a call without a cache"),
        "--ranks": (options.ranks, "ranks have no cache"),
        "--out-dtype": (options.out_dtype, "results have the type of the queries"),
        f"--dtype {options.dtype}": (
            options.dtype in FORMS,
            "--kv-dtype says what a cache holds, and --dtype what q is",
        ),
    }.items():
        if is_given:
            said = f"--{given[0].replace('_', '-')}" if given else "--cache"
            raise ArgumentError(f"{name}: got it with {said}; leave one of them out: {remedy}.")
    return True


_CACHE = "lengths", "page", "kv_dtype", "shared"


def explain(options: argparse.Namespace) -> int:
    """Print the explanation, and write what was asked for to files."""
    q, k, v = shapes(options)
    heads = q[-3] if len(q) > 2 else 1
    try:
        for option, file in (("--svg", options.svg), ("--json", options.json)):
            if file is not None:
                check_ending(file, option, (option.replace("--", "."),))
                check_writable(file, option)
        mask = None if options.mask is None else read(options.mask, "--mask", MASKS)
        score = None
        if options.score is not None:
            score = read(options.score, "--score", score_words(heads))
        more: dict[str, Any] = {
            "dtype": options.dtype,
            "mask": mask,
            "score_mod": score,
            "device": options.device,
        }
        more["compile"] = not options.no_compile
        if _has_cache(options):
            made = explain_cached(
                q, k, v, options.lengths, page=options.page, kv_dtype=options.kv_dtype,
                shared=options.shared or 0, **more,
            )  # fmt: skip
        else:
            made = explained(
                q,
                k,
                v,
                backward=options.backward,
                deterministic=options.deterministic,
                precision=options.precision,
                out_dtype=options.out_dtype,
                ranks=options.ranks,
                nodes=options.nodes,
                tangents=options.tangents,
                **more,
            )
    except (ValueError, TypeError) as error:
        complain(error)
        return 2
    text = report(made, options.mask)
    if options.ascii or not can_show(text):
        text = ascii_only(text)
    print(printable(text))
    for option, file, content in (
        ("--svg", options.svg, made.figure.svg),
        ("--json", options.json, made.to_json() + "\n"),
    ):
        if file is not None:
            try:
                write_text(file, content)
            except OSError as error:
                complain(f"{option}: {error}")
                return 2
    return 0


def report(made: Explanation, mask: str | None) -> str:
    """Return an explanation as text of 100 columns; `mask` are the user's own words."""
    words = "gradients" if made.backward else "forward"
    words += " and tangents" if made.tangents else ""
    lines = [
        ("call", f"{words} of q {made.q_shape}, k {made.k_shape}, v {made.v_shape}, {made.dtype}"),
        ("axes", made.axes),
        *([("cache", made.cache)] if made.cache else []),
        ("mask", made.mask if mask is None else f"{mask}: {made.mask}"),
        *([] if made.score == "no change" else [("score", made.score)]),
        ("device", made.device),
        ("why", made.reason),
    ]
    parts = [wrapped(lines), table(_kernels(made.kernels), left=1 + len(made.kernels))]
    main, tiles = made.main, made.main.tiles
    assert tiles is not None
    share = f"{100 * tiles.visited / tiles.total:.1f} %"
    parts.append(
        wrapped([
            ("tiles", f"of {main.name} in all heads: {tiles.full:,} FULL, {tiles.partial:,} "
             f"PARTIAL, {tiles.empty:,} EMPTY, so {share} are visited; of the first head:"),
        ])
    )  # fmt: skip
    parts.append(made.figure.text)
    parts.append(table(_traffic(made), left=1))
    parts.append(wrapped(_costs(made)))
    return "\n\n".join(parts)


def _kernels(kernels: Sequence[KernelUse]) -> list[list[str]]:
    """Return a column for each kernel, without lines that say nothing."""
    lines = [["kernel", *(kernel.name for kernel in kernels)]]
    width = max(_WIDTH // len(kernels), 20)
    parts = [textwrap.wrap(kernel.computes, width) for kernel in kernels]
    for n, words in enumerate(itertools.zip_longest(*parts, fillvalue="")):
        lines.append(["" if n else "computes", *words])
    for label, say in _LINES:
        cells = [say(kernel) for kernel in kernels]
        if any(cells):
            lines.append([label, *(cell or "-" for cell in cells)])
    return lines


def _tile(kernel: KernelUse) -> str:
    return f"{kernel.block_q} queries x {kernel.block_kv} keys" if kernel.block_kv else ""


def _shared(kernel: KernelUse) -> str:
    return f"{kernel.shared_memory:,} bytes" if kernel.shared_memory else ""


def _registers(kernel: KernelUse) -> str:
    has = kernel.registers
    return "" if has is None else f"{has.count} a thread"


def _spills(kernel: KernelUse) -> str:
    has = kernel.registers
    if has is None or not has.spill_stores + has.spill_loads:
        return ""
    return f"{has.spill_stores} + {has.spill_loads} bytes"


def _occupancy(kernel: KernelUse) -> str:
    has = kernel.occupancy
    return "" if has is None else f"{has.blocks}, by {has.limited_by}"


def _warps(kernel: KernelUse) -> str:
    has = kernel.occupancy
    if has is None:
        return "" if kernel.warps is None else f"{kernel.warps} a block"
    return f"{has.warps} of {has.most_warps}, {kernel.warps} a block"


def _waves(kernel: KernelUse) -> str:
    has = kernel.occupancy
    return f"{kernel.blocks:,}" + ("" if has is None else f" in {has.waves:.1f} waves")


_WIDTH = 78  # of all columns but the first
_LINES = (
    ("tile", _tile),
    ("stages", lambda kernel: "" if kernel.stages is None else str(kernel.stages)),
    ("shared memory", _shared),
    ("registers", _registers),
    ("spilled", _spills),
    ("blocks an SM", _occupancy),
    ("warps an SM", _warps),
    ("blocks", _waves),
)


def _traffic(made: Explanation) -> list[list[str]]:
    rows = [["bytes between memory and chip", "read", "written", "together"]]

    def row(label: str, moved: Bytes) -> None:
        numbers = (moved.read, moved.written, moved.total)
        rows.append([label, *(quantity(number, "B") for number in numbers)])

    row("every array once", made.least)
    for kernel in made.kernels:
        if kernel.once == kernel.most:
            row(kernel.name, kernel.once)
            continue
        hint = {True: ", expected", False: "", None: ""}[kernel.in_cache]
        row(f"{kernel.name}, arrays once{hint}", kernel.once)
        row(f"{kernel.name}, every load", kernel.most)
    row("standard attention", made.standard.traffic)
    return rows


def _costs(made: Explanation) -> list[tuple[str, str]]:
    standard = made.standard
    matrices = "P, dP and dS" if made.backward else "S and P"
    if made.tangents:
        matrices = derivatives.NAMES[made.backward]
    pairs = "at most" if made.pairs is None else f"{made.pairs:,} pairs attend:"
    lines = [
        ("work", f"{pairs} {quantity(made.flops, 'FLOP')}, {made.intensity:,.1f} FLOP per byte"),
        ("memory", f"{quantity(made.memory, 'B')} for results and scratch; standard attention "
         f"{quantity(standard.memory, 'B')}, with {matrices} of all heads"),
    ]  # fmt: skip
    for label, what, line in (
        ("time", "for the problem", made.roofline),
        ("", "for these kernels, which compute whole tiles", made.kernels_roofline),
        ("", "for standard attention, which computes all pairs", standard.roofline),
    ):
        if line is not None:
            lines.append((label, f"{_least(line)} at least {what}"))
    if made.share is not None:
        lines.append((
            "",
            f"so these kernels can reach {100 * made.share:.0f} % of the roofline: bounds by data "
            "sheets, not measurements",
        ))  # fmt: skip
    if made.over_ranks is not None:
        lines += _over_ranks(made.over_ranks)
    lines += [("not told", words) for words in made.unknown]
    return lines


def _over_ranks(made: Simulation) -> list[tuple[str, str]]:
    rounds = "1 exchange" if made.rounds == 1 else f"{made.rounds:,} exchanges"
    nodes = "1 node" if made.nodes == 1 else f"{made.nodes:,} nodes"
    needed = "" if made.needed is None else f", of which {quantity(made.needed, 'B')} are needed"
    lines = [
        ("over ranks", f"simulated, not measured: {made.ranks:,} GPUs on {nodes}, layout "
         f"{made.layout}, scheme {made.scheme} with {rounds}"),
        ("", f"the heaviest rank has {made.imbalance:.2f} times the mean of the pairs; "
         f"{quantity(made.moved, 'B')} travel{needed}"),
        ("", f"a rank allocates {quantity(made.memory, 'B')} besides its arrays and results"),
    ]  # fmt: skip
    if made.one_rank is not None:
        times = "; ".join(
            f"{scheme} {seconds(time)}, {made.one_rank / (made.ranks * time):.0%}"
            for scheme, time in made.schemes.items()
            if time
        )
        lines.append(("", f"time and efficiency by a model: {times}"))
    return lines


def _least(line: Roofline) -> str:
    return f"{seconds(line.seconds)} (bound by {line.bound})"


def add_command(subparsers: Any) -> None:
    """Add `explain` to the command line."""
    text = "which kernels and tiles would run for a shape, and what they cost"
    command = subparsers.add_parser(
        "explain",
        help=text,
        description=f"Say {text}: tiles that a mask leaves, shared memory, registers, occupancy, "
        "traffic and time by the roofline. Nothing runs, and no GPU is needed.",
        epilog=f"MASK is one of {', '.join(MASKS)}, as cupyflash.masks has them (documents(n): "
        "documents of n tokens), with arguments, such as 'window(1024, 0)', joined by & | ^ ~; "
        "SCORE is softcap(c) or alibi; each may be module:name of an object of your own.",
    )
    command.add_argument("shape", type=shape, metavar="SHAPE", help="of q: B,H,L,D or L,D")
    command.add_argument("--mask", metavar="MASK", help="such as causal (default: none)")
    command.add_argument("--score", metavar="SCORE", help="such as softcap(30) (default: none)")
    command.add_argument(
        "--dtype",
        choices=(*FLOATS, *FORMS),
        default=FLOATS[0],
        help="of q, k, v; float8 are codes with a scale for each row (default: %(default)s)",
    )
    command.add_argument(
        "--out-dtype", choices=RESULTS, help=f"of the results of codes (default: {DEFAULT_RESULT})"
    )
    command.add_argument(
        "--device",
        metavar="NAME",
        help=f"{', '.join(DEVICES)}, cpu, or gpu for the current one (default: gpu where there is "
        "one, else cpu)",
    )
    command.add_argument(
        "--heads-kv", type=whole_number(1), metavar="N", help="heads of k and v (default: q's)"
    )
    command.add_argument(
        "--keys",
        type=whole_number(1),
        metavar="N",
        help="length of k and v, or room of a cache (default: q's)",
    )
    command.add_argument(
        "--dv", type=whole_number(1), metavar="N", help="columns of v (default: q's)"
    )
    command.add_argument(
        "--cache", action="store_true", help="k and v are a cache: explain attention_cached"
    )
    command.add_argument(
        "--lengths",
        type=lengths,
        metavar="N[,N...]",
        help="positions of a cache that are in use, of all batch entries or of each (default: all)",
    )
    command.add_argument(
        "--page", type=whole_number(1), metavar="N", help="positions of a page of a cache"
    )
    command.add_argument(
        "--shared",
        type=whole_number(1),
        metavar="N",
        help="positions that all batch entries of a cache share",
    )
    command.add_argument(
        "--kv-dtype",
        type=types,
        metavar="TYPE[,TYPE]",
        help=f"codes of a cache, with a scale for each row: {', '.join(FORMATS)}; or two types, "
        "those of keys and of values, one of which may be that of --dtype",
    )
    command.add_argument("--backward", action="store_true", help="gradients, not the forward")
    command.add_argument(
        "--tangents",
        action="store_true",
        help="with tangents: forward mode; or, with --backward, second derivatives",
    )
    command.add_argument(
        "--deterministic", action="store_true", help="gradients that are equal bit for bit"
    )
    command.add_argument(
        "--precision", choices=("tf32x3",), help="float32 by tensor cores, in three products"
    )
    command.add_argument(
        "--no-compile", action="store_true", help="without registers and occupancy; quicker"
    )
    command.add_argument(
        "--ranks", type=whole_number(1), metavar="N", help="simulate so many GPUs, too"
    )
    command.add_argument(
        "--nodes",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="machines that have them (default: %(default)s)",
    )
    command.add_argument("--ascii", action="store_true", help="without block characters")
    command.add_argument("--svg", type=Path, metavar="FILE", help="write the tiles as SVG")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all numbers as JSON")
    command.set_defaults(function=explain)
