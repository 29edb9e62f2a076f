"""The command line: its parser, and the function for each command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..hints.did_you_mean import did_you_mean
from . import bench, demo, explain, info, verify, warmup
from .output import watched
from .text import printable, wrapped


def version() -> str:
    """Version of the package."""
    return str(importlib.import_module("cupyflash").__version__)


def show_info(_: argparse.Namespace) -> int:
    """Print versions, threads, devices and the cache folders."""
    print(wrapped(info.lines(version())))
    return 0


def add_info(subparsers: Any) -> None:
    """Add `info` to the command line."""
    text = "versions, threads, devices and cache folders"
    command = subparsers.add_parser("info", help=text, description=f"Show {text}.")
    command.set_defaults(function=show_info)


COMMANDS: dict[str, Callable[[Any], None]] = {
    "demo": demo.add_command,
    "verify": verify.add_command,
    "explain": explain.add_command,
    "bench": bench.add_command,
    "warmup": warmup.add_command,
    "info": add_info,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors contain no control characters, even if the arguments do."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and an error, and exit with 2."""
        super().error(printable(message))


def parser() -> Parser:
    """Build the parser of the command line."""
    top = Parser(prog="cupyflash", description="Exact attention for NumPy-style array code.")
    top.add_argument("--version", action="version", version=f"cupyflash {version()}")
    subparsers = top.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS.values():
        add(subparsers)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; by default from ``sys.argv``. If there are none, the help
        is printed.

    Returns
    -------
    int
        Exit status: 0 when all went well, 1 when the demo cannot run or finds an error beyond
        the bound, or the output cannot be written; 141 when nobody reads it. Wrong arguments exit
        with 2.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    return watched(lambda: run(words))


def run(words: Sequence[str]) -> int:
    """Run a command from its words."""
    top = parser()
    if not words:
        top.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        near = did_you_mean(words[0], COMMANDS)
        top.error(f"there is no command {words[0]!r}, only {', '.join(COMMANDS)}{near}")
    options = top.parse_args(words)
    status: int = options.function(options)
    return status
