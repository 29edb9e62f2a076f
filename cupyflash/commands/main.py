"""The command line: its parser, and which function serves a command."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from . import bench, demo, explain, info, verify
from .text import wrapped


def version() -> str:
    """Version of the package."""
    return str(importlib.import_module("cupyflash").__version__)


def show_info(_: argparse.Namespace) -> int:
    """Print versions, threads, devices and the cache folders."""
    print(wrapped(info.lines(version())))
    return 0


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
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
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    arguments : sequence of str, optional
        What follows the program's name; ``sys.argv`` unless given.

    Returns
    -------
    int
        Exit status: 0 when all went well, 1 when the demo cannot run or finds an error beyond
        the bound. Wrong arguments exit with 2.
    """
    options = parser().parse_args(arguments)
    status: int = options.function(options)
    return status
