"""What commands write: whole or not at all, and refused before anything is measured."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from halves import mostly_thorough
from test_cli import run

from cupyflash import ArgumentError, figures, files, masks
from cupyflash.bench.results import Report
from cupyflash.commands import words
from cupyflash.commands.main import main


def test_a_file_is_replaced_when_it_is_whole(tmp_path):
    file = tmp_path / "report.json"
    file.write_text("old")
    file.chmod(0o640)
    files.write_text(file, "new")
    assert file.read_text() == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [x.name for x in tmp_path.iterdir()] == ["report.json"]


def test_an_error_leaves_the_old_file(tmp_path):
    file = tmp_path / "report.svg"
    file.write_text("old")

    def half() -> None:
        with files.replacing(file) as beside:
            assert beside.suffix == ".svg"  # by which some choose the format
            beside.write_text("new, but hal")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        half()
    assert file.read_text() == "old"
    assert [x.name for x in tmp_path.iterdir()] == ["report.svg"]


def test_a_link_is_followed(tmp_path):
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    files.write_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"


@pytest.mark.skipif(not Path("/dev/null").exists(), reason="this system has no /dev/null")
def test_what_is_no_file_is_written_to():
    files.check_writable(Path("/dev/null"), "--json")
    files.write_text("/dev/null", "text")
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize("name", [".", "none/file", "file/below"])
def test_what_cannot_be_written_is_said_first(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(ArgumentError, match="--json: "):
        files.check_writable(tmp_path / name, "--json")
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


def test_names_that_no_file_can_have(tmp_path):
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    away = tmp_path / "away"
    away.symlink_to(tmp_path / "none" / "file")
    for path, message in (
        (
            tmp_path / ("x" * 300),
            r"--svg: .* \.\.\. x{15} cannot be written \(File name too long\)",
        ),
        (tmp_path / ("x" * 250), r"cannot be written \(File name too long\)"),
        (circle, "circle cannot be written"),
        (away, "there is no folder .*none; make it first"),
        (tmp_path / "a\0b", "cannot be written .*null"),
    ):
        with pytest.raises(ArgumentError, match=message):
            files.check_writable(path, "--svg")


@mostly_thorough(
    "arguments",
    [
        ("bench", "--device", "cpu", "--shape", "1,1,4,4", "--runs", "1", "--json"),
        ("explain", "1,1,64,16", "--json"),
        ("explain", "1,1,64,16", "--svg"),
        ("verify", "--device", "cpu", "--json"),
    ],
    quick=lambda case: case[0] != "explain",
    why="the same check of another command",
)
def test_commands_refuse_a_file_before_they_begin(tmp_path, arguments):
    if arguments[0] == "bench":
        pytest.importorskip("rich", reason='pip install ".[bench]"')
    done = run(tmp_path, *arguments, str(tmp_path / "none" / "file"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{arguments[-1]}: there is no folder" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["mask.png", "mask.PDF", "mask.jpg"])
def test_a_name_of_another_format_is_refused(tmp_path, name):
    figure = figures.mask_tiles(masks.causal(), 100, block_q=10, block_kv=10)
    with pytest.raises(ArgumentError, match=rf"save: .*{name}; .*\.svg or \.txt.* mask\.svg"):
        figure.save(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "begins"), [("a.svg", "<svg"), ("a.SVG", "<svg"), ("a", "<svg")])
def test_an_svg_is_saved(tmp_path, name, begins):
    figure = figures.mask_pairs(masks.causal(), 5)
    figure.save(str(tmp_path / name))
    assert (tmp_path / name).read_text().startswith(begins)
    figure.save(tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == figure.text + "\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "1,1,64,16", "--json", "made.svg"),
        ("explain", "1,1,64,16", "--svg", "made.png"),
        ("verify", "--device", "cpu", "--json", "made.txt"),
    ],
)
def test_commands_refuse_names_of_other_formats(tmp_path, capsys, arguments):
    assert main([*arguments[:-1], str(tmp_path / arguments[-1])]) == 2
    assert f"{arguments[-2]}: got the file" in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_deep_json_is_no_report():
    deep = "[" * 100_000 + "]" * 100_000
    with pytest.raises(ArgumentError, match="not what --json writes"):
        Report.from_json(deep)


@pytest.mark.thorough("such a name with an escape is quick")
def test_names_in_a_file_are_no_markup(tmp_path):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    file = tmp_path / "report.json"
    made = run(
        tmp_path,
        *("bench", "--device", "cpu", "--shape", "1,1,4,4", "--runs", "1", "--only", "standard"),
        *("--json", str(file)),
    )
    assert made.returncode == 0, made.stderr
    text = file.read_text().replace('"standard"', '"[/red]"')
    json.loads(text)
    file.write_text(text)
    shown = run(tmp_path, "bench", "--load", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "[/red]" in shown.stdout


@pytest.mark.parametrize("text", ["~" * 3000 + "causal", "(" * 3000 + "causal" + ")" * 3000])
def test_words_nested_deep_are_an_error(text):
    with pytest.raises(ArgumentError, match="--mask: ") as caught:
        words.read(text, "--mask", words.MASKS)
    assert len(str(caught.value)) < 400


ESCAPE = "\x1b[31m"


@mostly_thorough(
    "arguments",
    [
        (ESCAPE,),
        ("explain", ESCAPE),
        ("explain", "1,1,64,16", f"--{ESCAPE}"),
        ("explain", "1,1,64,16", ESCAPE),
        ("explain", "1,1,64,16", "--mask", ESCAPE),
        ("explain", "1,1,64,16", "--mask", f"os:{ESCAPE}"),
        ("explain", "1,1,64,16", "--device", ESCAPE),
        ("explain", "1,1,64,16", "--svg", f"{ESCAPE}/file.svg"),
        ("verify", "--only", ESCAPE),
        ("verify", "--json", f"{ESCAPE}/file"),
        ("bench", "--load", ESCAPE),
        ("bench", "--only", ESCAPE),
        ("info",),
    ],
    quick=lambda case: case[0] != "bench" and len(case) < 3,
    why="more commands with the same escape",
)
def test_names_command_no_terminal(tmp_path, monkeypatch, arguments):
    if arguments[0] == "bench":
        pytest.importorskip("rich", reason='pip install ".[bench]"')
    folder = tmp_path / f"cache{ESCAPE}"
    monkeypatch.setenv("CUPYFLASH_CACHE_DIR", str(folder))
    done = run(tmp_path, *arguments)
    said = done.stdout + done.stderr
    assert "x1b[31m" in said  # as Python writes it
    assert "\x1b" not in said
    assert "Traceback" not in said


def test_names_in_a_file_command_no_terminal(tmp_path):
    pytest.importorskip("rich", reason='pip install ".[bench]"')
    file = tmp_path / "report.json"
    made = run(
        tmp_path,
        *("bench", "--device", "cpu", "--shape", "1,1,4,4", "--runs", "1", "--only", "standard"),
        *("--json", str(file)),
    )
    assert made.returncode == 0, made.stderr
    report = json.loads(file.read_text())
    text = json.dumps(report).replace('"standard"', json.dumps(f"name{ESCAPE}"))
    text = text.replace(json.dumps(report["device"]), json.dumps(f"device{ESCAPE}"))
    file.write_text(text)
    shown = run(tmp_path, "bench", "--load", str(file))
    assert shown.returncode == 0, shown.stderr
    assert "name\\x1b[31m" in shown.stdout
    assert "device\\x1b[31m" in shown.stdout
    assert "\x1b" not in shown.stdout
