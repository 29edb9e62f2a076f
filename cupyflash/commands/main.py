"""The command line: its parser, and which function serves a command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ..similar import did_you_mean
from . import bench, demo, explain, info, verify
from .text import wrapped


def version() -> str:
    """Version of the package."""
    return str(importlib.import_module("cupyflash").__version__)


def show_info(_: argparse.Namespace) -> int:
    """Print versions, threads, devices and the cache folders."""
    print(wrapped(info.lines(version())))
    return 0


def parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Build the parser of the command line, and return it with the names of the commands."""
    top = argparse.ArgumentParser(
        prog="cupyflash", description="Exact attention for NumPy-style array code."
    )
    top.add_argument("--version", action="version", version=f"cupyflash {version()}")
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo.add_command(commands)
    verify.add_command(commands)
    explain.add_command(commands)
    bench.add_command(commands)

    text = "versions, threads, devices and cache folders"
    command = commands.add_parser("info", help=text, description=f"Show {text}.")
    command.set_defaults(function=show_info)
    return top, list(commands.choices)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; ``sys.argv`` unless given. Without any, the help is
        printed.

    Returns
    -------
    int
        Exit status: 0 when all went well, 1 when the demo cannot run or finds an error beyond
        the bound. Wrong arguments exit with 2.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    top, commands = parser()
    if not words:
        top.print_help()
        return 0
    if not words[0].startswith("-") and words[0] not in commands:
        near = did_you_mean(words[0], commands)
        top.error(f"there is no command {words[0]!r}, only {', '.join(commands)}{near}")
    options = top.parse_args(words)
    status: int = options.function(options)
    return status
