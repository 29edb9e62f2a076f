"""Writes down what became of other libraries that `cupyflash verify --peer` judged, as JSON.

    cupyflash verify --peer all --json all.json
    python tests/tools/peer_record.py cpu "two cores of an AMD EPYC, 161 s" all.json

The record is tests/data/judged/NAME.json; docs/verified.md shows it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
from pathlib import Path
from typing import Any

from cupyflash.testing.peers import PEERS
from cupyflash.testing.report import FAILED, NOT_APPLICABLE
from cupyflash.testing.verification import LATE

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "data" / "judged"


def of_peer(judged: dict[str, Any]) -> dict[str, Any]:
    """Return how many properties of a library were tried, and what it does instead of some."""
    run = [each for each in judged["results"] if each["status"] != NOT_APPLICABLE]
    instead = PEERS[judged["name"]].instead
    return {
        "version": judged["version"].partition("+")[0],
        "properties": len(run),
        "problems": sum(each["examples"] for each in run),
        "late": sum(each["reason"] == LATE for each in judged["results"]),
        "failed": {
            each["name"]: instead.get(each["name"]) or each["failures"][0]["message"]
            for each in run
            if each["status"] == FAILED
        },
        "ended": judged["ended"],
    }


def record(machine: str, reports: list[Path]) -> dict[str, Any]:
    """Return the record of reports that `cupyflash verify --peer` wrote on one machine."""
    peers: dict[str, Any] = {}
    for report in reports:
        content = json.loads(report.read_text(encoding="utf-8"))
        peers |= {judged["name"]: of_peer(judged) for judged in content["peers"]}
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return {"machine": machine, "date": date, "peers": dict(sorted(peers.items()))}


def main(arguments: list[str] | None = None) -> None:
    """Read reports, and write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="of the record")
    parser.add_argument("machine", help="which one, in words, and how long it took")
    parser.add_argument("reports", nargs="+", type=Path, help="what --json wrote")
    asked = parser.parse_args(arguments)
    RECORDS.mkdir(exist_ok=True)
    text = json.dumps(record(asked.machine, asked.reports), indent=1, ensure_ascii=False)
    (RECORDS / f"{asked.name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
