"""What the commands do when their output cannot be written, or nobody reads it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from halves import mostly_thorough

from cupyflash import figures, masks
from cupyflash.commands import output

COMMANDS = [
    ("info",),
    ("--help",),
    ("explain", "1,1,64,16", "--no-compile"),
    ("explain", "1,1,4096,16", "--no-compile", "--device", "H200", "--mask", "causal"),
    ("verify", "--list"),
    ("verify", "--device", "cpu", "--only", "idle_options", "--examples", "1"),
    ("bench", "--device", "cpu", "--shape", "1,1,4,4", "--runs", "1", "--only", "standard"),
    ("demo", "--device", "cpu"),
    ("warmup", "--dtype", "float32"),
]
FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
each_command = mostly_thorough(
    "arguments",
    COMMANDS,
    quick=lambda case: case[0] in {"info", "--help", "explain"},
    why="the same of commands that compute",
)


def run(tmp_path: Path, arguments: tuple[str, ...], **streams: object) -> tuple[int, str]:
    """Run a command, and return its status and what it writes on standard error."""
    if arguments[0] == "bench":
        pytest.importorskip("rich", reason='pip install ".[bench]"')
    done = subprocess.run(
        [sys.executable, "-m", "cupyflash", *arguments],
        cwd=tmp_path, check=False, text=True, **({"stderr": subprocess.PIPE} | streams),
    )  # fmt: skip
    return done.returncode, done.stderr or ""


@each_command
def test_nobody_reads(tmp_path, arguments):
    """`| true`: a silent end, with the status of a program that SIGPIPE ends."""
    reading, writing = os.pipe()
    os.close(reading)
    status, said = run(tmp_path, arguments, stdout=writing)
    os.close(writing)
    assert status == output.NOBODY_READS
    assert not any(word in said for word in ("Traceback", "rror", "Exception"))


@pytest.mark.parametrize("arguments", [COMMANDS[5], COMMANDS[6]], ids=lambda case: case[0])
@pytest.mark.thorough("the same of both streams")
def test_nobody_reads_either_stream(tmp_path, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    status, _ = run(tmp_path, arguments, stdout=writing, stderr=writing)
    os.close(writing)
    assert status == output.NOBODY_READS


@FULL
@each_command
def test_a_full_disk(tmp_path, arguments):
    """One sentence, and status 1."""
    with Path("/dev/full").open("w") as full:
        status, said = run(tmp_path, arguments, stdout=full)
    assert status == 1
    last = said.strip().splitlines()[-1]
    assert last == "error: the output cannot be written (No space left on device)."
    assert "Traceback" not in said


def test_a_first_line_is_enough(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "cupyflash", "explain", "1,1,64,16", "--no-compile"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline().startswith("call")
    process.stdout.close()
    assert process.wait() in {0, output.NOBODY_READS}  # all may be in the pipe already
    assert process.stderr.read() == ""
    process.stderr.close()


def test_streams_are_given_back(capsys):
    before = sys.stdout, sys.stderr
    assert output.watched(lambda: print("é") or 3) == 3
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out == "é\n"


class Ascii(io.StringIO):
    encoding = "ascii"


def test_other_encodings(monkeypatch):
    stream = Ascii()
    monkeypatch.setattr(sys, "stdout", stream)
    assert output.watched(lambda: print("a é") or 0) == 0
    assert stream.getvalue() == "a \\xe9\n"


@pytest.mark.parametrize(
    "figure",
    [
        figures.mask_tiles(masks.causal(), 100, block_q=10, block_kv=10),
        figures.mask_pairs(masks.causal(), 5),
        figures.mask_tiles(masks.window(3, 0), 4096),
    ],
)
def test_figures_are_printed_in_any_encoding(figure, monkeypatch):
    assert not figure.text.isascii()
    monkeypatch.setattr(sys, "stdout", Ascii())
    assert str(figure).isascii()
    assert "#" in str(figure) or "+" in str(figure)
    utf_8 = Ascii()
    utf_8.encoding = "utf-8"
    monkeypatch.setattr(sys, "stdout", utf_8)
    assert str(figure) == figure.text
