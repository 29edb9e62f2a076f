"""tests/tools/peer_record.py: what became of judged libraries, and the page that shows it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import peer_record
import pytest

from cupyflash.testing.peers import PEERS
from cupyflash.testing.peers.run import Judged, to_json
from cupyflash.testing.report import FAILED, NOT_APPLICABLE, PASSED, Failure, Result
from cupyflash.testing.verification import LATE

ROOT = Path(__file__).resolve().parents[2]


def result(name, status, examples=3, reason="", message=""):
    failures = (Failure(message, "problem", "normal"),) if message else ()
    return Result(name, "formula", status, reason, examples, failures=failures)


def test_a_record_counts_what_was_tried_and_says_what_failed(tmp_path, monkeypatch):
    known = next(iter(PEERS["paddle"].instead))
    results = (
        result("right", PASSED),
        result(known, FAILED, message="off by 1"),
        result("unknown", FAILED, message="off by 2"),
        result("late", NOT_APPLICABLE, 0, LATE),
        result("never", NOT_APPLICABLE, 0, "no varlen function was given"),
    )
    judged = [Judged("paddle", "3.0+cpu", results), Judged("mlx", "1.0", (), "it stopped")]
    report = tmp_path / "report.json"
    report.write_text(to_json(judged, []), encoding="utf-8")
    monkeypatch.setattr(peer_record, "RECORDS", tmp_path / "records")
    peer_record.main(["here", "two cores", str(report)])
    found = json.loads((tmp_path / "records" / "here.json").read_text(encoding="utf-8"))
    assert found["machine"] == "two cores"
    assert list(found["peers"]) == ["mlx", "paddle"]
    assert found["peers"]["mlx"]["ended"] == "it stopped"
    assert found["peers"]["paddle"] == {
        "version": "3.0", "properties": 3, "problems": 9, "late": 1, "ended": "",
        "failed": {known: PEERS["paddle"].instead[known], "unknown": "off by 2"},
    }  # fmt: skip


def test_the_page_shows_every_library_of_the_records(monkeypatch):
    pytest.importorskip("docutils", reason='the site is built by what pip install ".[docs]" brings')
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    records = importlib.import_module("records")
    paths = sorted(peer_record.RECORDS.glob("*.json"))
    assert [path.stem for path in paths] == ["cpu", "gpu"]
    for path in paths:
        begin, (head, rows) = records.of_peers(path)
        made = json.loads(path.read_text(encoding="utf-8"))
        assert begin == f"{made['machine']}; {made['date']}."
        assert {len(row) for row in rows} == {len(head)}
        for row, (name, found) in zip(rows, made["peers"].items(), strict=True):
            assert name in PEERS
            assert row[0] == f"{name} {found['version']}"
            assert all(words in row[-1] for words in found["failed"].values())
    assert ":::{peer-runs}" in (ROOT / "docs" / "verified.md").read_text(encoding="utf-8")
