"""The command `cupyflash verify`: the verification kit on this package's kernels, or on others'."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import api, cache_update, cached, forward_mode, second_order, varlen
from ..arrays import cuda_device
from ..files import check_ending, check_writable, write_text
from ..gpu.kernels import registry
from .text import complain, printable, whole_number

if TYPE_CHECKING:
    from ..testing import Precision, Report, Result

# A minute on two cores; a few minutes on a GPU, because every problem has its own kernels to
# compile.
EXAMPLES = {"cpu": 40, "gpu": 3}
BAR = 24
# The tile sizes around which lengths are drawn; no kernel's tiles have fewer keys.
TILES = {"cpu": (128, 64), "gpu": (64, 8)}


class Progress:
    """What shows on standard error meanwhile: a bar on a terminal, elsewhere a line a property."""

    def __init__(self) -> None:
        self._bar = sys.stderr.isatty()

    def __call__(self, done: int, total: int, result: Result) -> None:
        """Show a property that has just been run."""
        if self._bar:
            full = BAR * done // total
            text = f"[{'#' * full}{'.' * (BAR - full)}] {done}/{total}  {result.name}"
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
            return
        text = f"{done:>{len(str(total))}}/{total}  {result.name}: {result.status}"
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def again(options: argparse.Namespace, name: str) -> str:
    """Return the command that repeats a property as it was run."""
    return (
        f"cupyflash verify --device {options.device} --only {name} "
        f"--examples {options.examples} --seed {options.seed}"
    )


def precision_of(device: str) -> Callable[[Any], Precision]:
    """Return, as a function of the dtype, what this package's kernels compute with."""
    from ..testing import Precision

    def precision(dtype: Any) -> Precision:
        cores = device == "gpu" and registry.multiplies(dtype, None, cuda_device.here().capability)
        return Precision.of(dtype, tensor_cores=cores)

    return precision


def float8_of(device: str) -> Literal["float32", "out_dtype", "codes"]:
    """Return what this package's kernels multiply for codes of float8."""
    if device == "cpu":
        return "float32"
    specs = registry.KERNELS["forward_codes"]
    here = cuda_device.here()
    is_there = any(spec.capability == here.capability and not here.lacks for spec in specs)
    return "codes" if is_there else "out_dtype"


def _run(options: argparse.Namespace, progress: Progress) -> Report:
    from ..testing.verification import memory_of, verify

    memory_of(options.device)  # it says what is missing
    # Properties ask for equal bits.
    return verify(
        api.attention,
        functools.partial(api.attention_backward, deterministic=True),
        varlen=varlen.attention_varlen,
        varlen_backward=functools.partial(varlen.attention_varlen_backward, deterministic=True),
        combine=api.combine,
        cached=cached.attention_cached,
        append=cache_update.append,
        rope=cache_update.rope,
        jvp=forward_mode.attention_jvp,
        varlen_jvp=forward_mode.attention_varlen_jvp,
        backward_jvp=second_order.attention_backward_jvp,
        device=options.device,
        examples=options.examples,
        seed=options.seed,
        only=options.only,
        tiles=TILES[options.device],
        precision=precision_of(options.device),
        float8=float8_of(options.device),
        progress=progress,
    )


def _verify_peers(options: argparse.Namespace) -> int:
    """Judge functions of other libraries, and print what they do otherwise."""
    from ..testing.peers import PEERS, run

    try:
        if options.json is not None:
            check_ending(options.json, "--json", (".json",))
            check_writable(options.json, "--json")
        named = list(PEERS) if "all" in options.peer else options.peer
        chosen = {name: run.peer_of(name) for name in named}
        absent = [x for x in chosen.values() if x.missing]
        judged = run.verify_peers(
            [name for name, peer in chosen.items() if not peer.missing],
            examples=options.examples or run.EXAMPLES, seed=options.seed,
            seconds=options.seconds or run.SECONDS, only=options.only,
            begun=lambda name: print(
                f"{name} {chosen[name].version} ...", file=sys.stderr, flush=True
            ),
        )  # fmt: skip
        print(printable(run.table(judged, absent)))
        if options.json is not None:
            write_text(options.json, run.to_json(judged, absent) + "\n")
    except (AttributeError, ImportError, OSError, ValueError) as error:
        complain(error)
        return 2
    if not judged:
        return 2
    return 1 if any(x.failures or x.ended for x in judged) else 0


def verify(options: argparse.Namespace) -> int:
    """Run the properties, print the table, and for failures how to see them again."""
    if options.peer:
        return _verify_peers(options)
    if options.list:
        from ..testing import PROPERTIES

        width = max(len(name) for name in PROPERTIES)
        for name, prop in PROPERTIES.items():
            print(f"{name:<{width}}  {prop.formula}")
        return 0
    options.examples = options.examples or EXAMPLES[options.device]
    progress = Progress()
    try:
        if options.json is not None:
            check_ending(options.json, "--json", (".json",))
            check_writable(options.json, "--json")
        report = _run(options, progress)
    except (ImportError, ValueError, RuntimeError) as error:
        progress.close()
        complain(error)
        return 2
    progress.close()
    print(printable(str(report)))
    if report.failures:
        print("\nTo see a failure again:")
        for result in report.failures:
            print(f"  {again(options, result.name)}")
    if options.json is not None:
        try:
            write_text(options.json, report.to_json() + "\n")
        except OSError as error:
            complain(f"--json: {error}")
            return 2
    return 0 if report.passed else 1


def add_command(subparsers: Any) -> None:
    """Add `verify` to the command line."""
    text = "try every property of attention on this machine's kernels"
    command = subparsers.add_parser(
        "verify",
        help=text,
        description=f"{text[0].upper()}{text[1:]}: rounding-error bounds, identities, gradients, "
        "exact cases, NaN, strides, memory beside arrays. Needs hypothesis.",
        epilog="The exit status is 0 if every property passed, 1 if one failed, 2 if none could "
        "be run.",
    )
    command.add_argument(
        "--device", choices=("cpu", "gpu"), default="cpu", help="whose kernels (default: cpu)"
    )
    command.add_argument(
        "--examples", type=whole_number(1), metavar="N",
        help="problems for a property; bounds get 8 times as many (default: "
        f"{EXAMPLES['cpu']}, which take about a minute; on a GPU, where every problem compiles "
        f"kernels of its own, {EXAMPLES['gpu']}, which take some)",
    )  # fmt: skip
    command.add_argument(
        "--peer", action="append", metavar="NAME",
        help="judge a function of another library instead, all that are installed, or MODULE:NAME "
        "of a Peer of your own; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--seconds", type=whole_number(1), metavar="N",
        help="with --peer: the time for each (default: 18, so that all of them take under five "
        "minutes on two cores); what is not done by then is counted as late",
    )  # fmt: skip
    command.add_argument(
        "--only", action="append", metavar="NAME", help="run this property; may be repeated"
    )
    command.add_argument("--list", action="store_true", help="list the properties' names and stop")
    command.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report to FILE, as JSON"
    )
    command.add_argument(
        "--seed", type=whole_number(0), default=0, metavar="N",
        help="the same seed draws the same problems (default: %(default)s)",
    )  # fmt: skip
    command.set_defaults(function=verify)
