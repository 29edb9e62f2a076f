"""`cupyflash verify`: what it prints, writes and returns."""

from __future__ import annotations

import json
import shlex
import sys

import numpy as np
import pytest

import cupyflash
from cupyflash import api, testing
from cupyflash.commands.main import main


def run(capsys, *arguments):
    status = main(["verify", *arguments])
    return status, *capsys.readouterr()


FEW = ("--only", "keys_permuted", "--only", "exact_mean", "--examples", "4")


def test_a_table_and_a_line_for_each_property(capsys):
    status, out, err = run(capsys, *FEW)
    assert status == 0
    assert "all 2 properties passed" in out
    assert out.startswith("cpu: float16, bfloat16, float32, float64; 4 examples")
    lines = [line for line in err.splitlines() if not line.startswith("cupyflash: compiling")]
    assert lines == ["1/2  keys_permuted: passed", "2/2  exact_mean: passed"]


def test_json(capsys, tmp_path):
    path = tmp_path / "report.json"
    assert run(capsys, *FEW, "--json", str(path), "--seed", "3")[0] == 0
    content = json.loads(path.read_text())
    assert content["passed"] is True
    assert content["seed"] == 3
    assert [x["name"] for x in content["results"]] == ["keys_permuted", "exact_mean"]
    assert content["results"][0]["worst"][0]["ratio"] <= 1
    status, _, err = run(capsys, *FEW, "--json", str(tmp_path / "none" / "x.json"))
    assert status == 2
    assert "--json" in err


def test_a_failure_and_the_command_that_repeats_it(capsys, monkeypatch):
    attention = api.attention

    def wrong(q, k, v, **options):
        out, lse = attention(q, k, v, **options)
        return np.where(np.arange(out.shape[-2])[:, None] == 7, 0, out).astype(out.dtype), lse

    monkeypatch.setattr(api, "attention", wrong)
    status, out, _ = run(capsys, *FEW, "--seed", "5")
    assert status == 1
    assert "FAILED exact_mean" in out
    assert "problem = cupyflash.testing.problem(" in out
    command = out.rstrip().splitlines()[-1].strip()
    assert command == "cupyflash verify --device cpu --only exact_mean --examples 4 --seed 5"
    status, again, _ = run(capsys, *shlex.split(command)[2:])
    assert status == 1
    problem = next(x for x in out.splitlines() if "problem = " in x)
    assert problem in again
    monkeypatch.undo()
    assert run(capsys, *shlex.split(command)[2:])[0] == 0


def test_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    status, _, err = run(capsys, *FEW)
    assert status == 0
    assert "[############............] 1/2  keys_permuted" in err
    assert err.endswith("\r\033[K")


def test_list(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0
    lines = out.splitlines()
    assert len(lines) == len(cupyflash.testing.PROPERTIES)
    assert lines[0].startswith("forward_within_bound  ")


def test_what_cannot_be_run(capsys):
    status, out, err = run(capsys, "--only", "exact_men")
    assert (status, out) == (2, "")
    assert "did you mean exact_mean" in err
    status, out, err = run(capsys, "--only", "xyzzy")
    assert (status, out) == (2, "")
    assert all(name in err for name in testing.PROPERTIES)
    assert max(map(len, err.splitlines())) <= 100
    try:
        import cupy
    except ImportError:
        status, _, err = run(capsys, "--device", "gpu")
        assert status == 2
        assert 'pip install ".[cuda12]"' in err
    else:
        assert cupy


@pytest.mark.parametrize("arguments", [["--examples", "0"], ["--seed", "-1"], ["--device", "x"]])
def test_wrong_arguments(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        run(capsys, *arguments)
    assert stop.value.code == 2
    assert arguments[1] in capsys.readouterr().err
