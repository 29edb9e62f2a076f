"""What attention functions of libraries do where they differ: docs/peers.md, from observations.

tests/data/peers has the questions, and for each library programs that answer them. What they gave
lies in tests/data/peer_answers.json, and the page is made of that.

    python tests/tools/peer_questions.py               write the page from the stored answers
    python tests/tools/peer_questions.py --ask all     ask all libraries: look at what git shows
    python tests/tools/peer_questions.py --ask torch   ask some of them again
    python tests/tools/peer_questions.py --ask gpu --to FILE     on a machine with a GPU
    python tests/tools/peer_questions.py --read FILE             take what it answered

An answer has the machine on which it was given, the version of the library, and the date.
"""

from __future__ import annotations

import argparse
import ast
import datetime as dt
import importlib.metadata
import json
import math
import re
import subprocess
import sys
import tomllib
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "data" / "peers"
ANSWERS = ROOT / "tests" / "data" / "peer_answers.json"
PAGE = ROOT / "docs" / "peers.md"
OURS = "cupyflash"
INNER = re.compile(r"\[[^\[\]{}]*\]|\[\s*(?:\[[^\[\]{}]*\],?\s*)+\]")  # lists in one line
SECONDS = 600  # for all questions to a library
NONE = "–"  # it has no such option, or the question has no program
CPU = "a CPU (x86-64)"
NEAR = 2e-3  # of answers in words, whatever the type; they are far from each other


def read(name: str) -> dict[str, Any]:
    """Return a file of tests/data/peers."""
    return tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the libraries, cupyflash first."""
    every = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "questions")
    return [OURS, *(name for name in every if name != OURS)]


def shown(answers: dict[str, Any]) -> list[str]:
    """Return the libraries that have answered."""
    return [name for name in names() if name in answers]


def on(gpu: bool) -> list[str]:
    """Return the libraries that are asked on a GPU, or those that need none."""
    return [name for name in names() if ("machine" in read(name)) == gpu]


def questions() -> dict[str, Any]:
    """Return the questions by their keys, in the order of the page."""
    content = read("questions")
    return {key: content[key] for topic in content["topics"] for key in topic["questions"]}


# What an answer is in words.


def is_nan(result: Any) -> bool:
    """Whether there is nothing but NaN."""
    return bool(np.isnan(result).all())


def of_row(result: Any) -> str:
    """Say what the row of a query without keys is: its weights, or its outputs."""
    row = np.asarray(result)[0]
    if row.size and is_nan(row):
        return "NaN"
    if (row == 0).all():
        return "0"
    return "mean" if np.allclose(row, 1 / row.size, NEAR) else "another"


def of_gradient(result: Any) -> str:
    """Say what the gradient of values is that no query sees."""
    if is_nan(result):
        return "NaN"
    return "0" if not np.any(result) else "1/n" if np.allclose(result, 1 / 3, NEAR) else "another"


def of_mask(first: str, second: str) -> Callable[[Any], str]:
    """Say which of two keys has all the weight."""

    def said(result: Any) -> str:
        row = np.ravel(result)
        for word, expected in ((first, [1, 0]), (second, [0, 1]), ("is ignored", [0.5, 0.5])):
            if np.allclose(row, expected, NEAR, NEAR):
                return word
        return "added" if np.allclose(row[0] / row[1], math.e, NEAR) else f"{row}"

    return said


def seen(result: Any) -> str:
    """Say how many keys have a weight, for each query."""
    if is_nan(np.asarray(result)[-1]):
        return "NaN"
    return ", ".join(str(n) for n in (np.nan_to_num(result) > 1e-20).sum(axis=-1))


def of_scale(default: float) -> Callable[[Any], str]:
    """Say which scale a product of 4 had."""

    def said(result: Any) -> str:
        if np.isnan(result).any():
            return "NaN"
        scale = float(np.log(result[0] / result[1])) / 4
        for word, expected in (("1/√D", 0.5), ("1", 1.0), ("is 0", 0.0), ("is −½", -0.5)):
            if abs(scale - expected) < NEAR:
                return word if default == 0 or expected != 0.5 else "as not given"
        return f"{scale:.3g}"

    return said


def number(words: dict[str, float], unit: float = 1e-3) -> Callable[[Any], str]:
    """Say which of some numbers a result is."""

    def said(result: Any) -> str:
        value = float(np.ravel(result)[0])
        if math.isnan(value):
            return "NaN"
        for word, expected in words.items():
            near = math.isfinite(expected) and abs(value - expected) <= unit * abs(expected)
            if value == expected or near:
                return word
        return f"{value:.3g}"

    return said


def of_axes(result: Any) -> str:
    """Say which axis of numbered values was summed over."""
    x = np.arange(24.0).reshape(1, 2, 3, 4)
    for word, axis in (("B H L D", 2), ("B L H D", 1)):
        if np.allclose(result, x.mean(axis=axis, keepdims=True), NEAR):
            return word
    return "another"


def of_rotation(result: Any) -> str:
    """Say which column got the sine of the first one."""
    place = int(np.argmax(np.abs(np.ravel(result)[1:]) > 0.5)) + 1
    return {1: "neighbours: 0 with 1", 2: "halves: 0 with 2"}.get(place, f"0 with {place}")


def of_cache(result: Any) -> str:
    """Say where the newer of two keys is."""
    x = np.asarray(result)
    where = "after them" if np.ravel(x).tolist() == [1, 2] else "before them"
    return f"{where}, {'B H L D' if x.shape == (1, 1, 2, 1) else 'B L H D'}"


def of_error(result: float) -> str:
    """Say of which type an error is."""
    return "1e-16" if result < 1e-14 else "1e-8" if result < 1e-5 else f"{result:.0e}"


WORDS: dict[str, Callable[[Any], str]] = {
    "empty": of_row,
    "empty_bias": of_row,
    "empty_gradient": of_gradient,
    "no_keys": of_row,
    "nan_hidden": lambda x: "NaN" if np.isnan(x).any() else "stays out",
    "bool_mask": of_mask("attends", "hides"),
    "hidden_weight": lambda x: f"{np.min(x):.2g}",
    "int_mask": of_mask("as Booleans", "as Booleans, True hides"),
    "more_keys": seen,
    "fewer_keys": seen,
    "window": lambda x: seen(x).split(", ")[-1],
    "scale": of_scale(0),
    "scale_zero": of_scale(1),
    "scale_negative": of_scale(1),
    "cap_bias": lambda x: (
        "after it" if np.allclose(x[0][0] / x[0][1], np.exp(5), NEAR) else "before it"
    ),
    "sink": number({"½": 0.5}),
    "lse": number({"natural": math.log(4), "base 2": 2.0}, 0.01),
    "lse_empty": number({"−∞": -math.inf, "0": 0.0, "−2.4e38": -2.38197633e38}),
    "lse_type": str,
    "many_keys": number({"1": 1.0}, 1e-2),
    "double": of_error,
    "large_scores": lambda x: "NaN" if np.isnan(x).any() else "finite",
    "axes": of_axes,
    "groups": lambda x: " ".join(str(int(n)) for n in np.ravel(x)),
    "dropout": lambda x: " and ".join(f"{n:g}" for n in np.ravel(x)),
    "rotary": of_rotation,
    "cache": of_cache,
}


# Asking.


def evaluate(program: str, namespace: dict[str, Any]) -> Any:
    """Run the lines of a program, and return the value of its last one."""
    tree = ast.parse(program)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr), program
    exec(compile(tree, "<program>", "exec"), namespace)
    return eval(compile(ast.Expression(last.value), "<program>", "eval"), namespace)


def namespace_of(name: str) -> dict[str, Any]:
    """Return the names that the programs of a library begin with."""
    module = sys.modules["_asked"] = types.ModuleType("_asked")  # some look for it
    namespace = vars(module)
    exec(read("questions")["prelude"] + read(name)["setup"], namespace)
    return namespace


def stored(result: Any) -> Any:
    """Return a result as JSON has it, to seven digits; infinities and NaN are words."""
    if isinstance(result, str):
        return result
    found = np.asarray(result, np.float64)
    if found.ndim:
        return [stored(each) for each in found]
    value = float(found)
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def restored(content: Any) -> Any:
    """Return a result from JSON: an array, or the name of a type."""
    if isinstance(content, str) and content not in ("nan", "inf", "-inf"):
        return content
    return np.asarray(content, np.float64) if content != [] else np.zeros((1, 0))


def ask_here(name: str) -> dict[str, Any]:
    """Ask a library in this process."""
    warnings.simplefilter("ignore")  # of other libraries
    namespace, found = namespace_of(name), {}
    for key in questions():
        program = program_of(name, key)
        if program is None:
            continue
        with np.errstate(all="ignore"):
            try:
                result = evaluate(program, namespace)
                found[key] = {"result": stored(result), "answer": WORDS[key](result)}
            except Exception as error:  # noqa: BLE001 -- whatever a library raises is an answer
                first = (str(error).strip().splitlines() or [type(error).__name__])[0][:150]
                found[key] = {"error": first, "answer": "error"}
    return {
        "version": importlib.metadata.version(read(name)["package"]).partition("+")[0],
        "machine": eval(read(name).get("machine", "_cpu"), namespace | {"_cpu": CPU}),
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "answers": found,
    }


def ask(name: str) -> dict[str, Any]:
    """Ask a library in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--print", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])[name]
    return result


def taken(answers: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return answers with those of a file, in which words are found again for each result."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for name, key, each in ((n, k, x) for n in found for k, x in found[n]["answers"].items()):
        if name in names() and "error" not in each:
            each["answer"] = WORDS[key](restored(each["result"]))
    return answers | {name: found[name] for name in found if name in names()}


# The page.


def program_of(name: str, key: str) -> str | None:
    """Return the program that answers a question to a library, or None."""
    programs: dict[str, str] = read(name)["programs"]
    return programs.get(key) or programs.get(questions()[key].get("program_of", key))


def answer_of(name: str, key: str, answers: dict[str, Any]) -> dict[str, Any] | None:
    """Return what a library answered: its result and words for it, or its error."""
    found: dict[str, Any] | None = answers[name]["answers"].get(key)
    return found


def markdown(cells: list[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(topic: dict[str, Any], answers: dict[str, Any]) -> list[str]:
    """Return the table of a topic: a row for each library, a column for each question."""
    asked = questions()
    lines = [markdown(["", *(asked[key]["title"] for key in topic["questions"])])]
    lines += [f"|{'---|' * (1 + len(topic['questions']))}"]
    for name in shown(answers):
        found = [answer_of(name, key, answers) for key in topic["questions"]]
        cells = [NONE if each is None else each["answer"] for each in found]
        if set(cells) != {NONE}:
            title = f"{read(name)['title']} ({answers[name]['version']})"
            lines.append(markdown([title, *cells]))
    return lines


def section(key: str, answers: dict[str, Any]) -> list[str]:
    """Return how a question was asked, and how cupyflash gives the same."""
    question = questions()[key]
    lines = ["", f"### {question['title'][0].upper()}{question['title'][1:]}", "", question["text"]]
    given = {answers[name]["answers"].get(key, {}).get("answer") for name in shown(answers)}
    same = {word: f"`{program}`" for word, program in question.get("same", {}).items()}
    lines += ["", "| answer | the same from cupyflash |", "|---|---|"]
    rows = (same | question.get("instead", {})).items()
    lines += [markdown([word, text]) for word, text in rows if word in given]
    lines += ["", "| library | program | what it gave |", "|---|---|---|"]
    for name in shown(answers):
        found = answer_of(name, key, answers)
        if found is not None:
            gave = found.get("error") or json.dumps(found["result"])
            lines.append(markdown([name, f"`{program_of(name, key)}`", f"`{gave}`"]))
    return lines


def stamps(answers: dict[str, Any]) -> list[str]:
    """Say where and when libraries were asked: a line for each machine."""
    dates: dict[str, set[str]] = {}
    for name in shown(answers):
        dates.setdefault(answers[name]["machine"], set()).add(answers[name]["date"])
    lines = ["Observed, with the versions that the rows have:", ""]
    machines = sorted(dates, key=lambda machine: (machine != CPU, machine))
    return lines + [f"- {machine}: {', '.join(sorted(dates[machine]))}" for machine in machines]


def page(answers: dict[str, Any]) -> str:
    """Return the page."""
    content = read("questions")
    lines = [content["head"], *stamps(answers)]
    for topic in content["topics"]:
        lines += ["", f"## {topic['title']}", "", *table(topic, answers)]
    lines += ["", "## The programs", "", "All of them begin with these lines:", ""]
    lines += ["```python", content["prelude"].strip(), "```"]
    lines += ["", "Those of cupyflash go on like this:", ""]
    lines += ["```python", read(OURS)["setup"].strip(), "```"]
    for key in questions():
        lines += section(key, answers)
    lines += ["", "## How the programs of the libraries go on"]
    for name in shown(answers)[1:]:
        setup = read(name)["setup"].strip()
        lines += ["", f"### {read(name)['title']} ({name})", "", "```text", setup, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Ask, and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    groups = "all that need no GPU, gpu for those that do, or libraries"
    parser.add_argument("--ask", nargs="+", metavar="NAME", default=[], help=groups)
    parser.add_argument("--to", type=Path, metavar="FILE", help="write answers there, and no page")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take what --to wrote")
    parser.add_argument("--print", metavar="NAME", help="ask a library here, and write nothing")
    options = parser.parse_args()
    if options.print:
        print(json.dumps({options.print: ask_here(options.print)}))
        return
    stored_before = ANSWERS.exists() and not options.to
    answers = json.loads(ANSWERS.read_text(encoding="utf-8")) if stored_before else {}
    wanted = {"all": on(gpu=False), "gpu": on(gpu=True)}
    for name in [x for each in options.ask for x in wanted.get(each, [each])]:
        print(name, "...", file=sys.stderr, flush=True)
        answers[name] = ask(name)
    if options.read:
        answers = taken(answers, options.read)
    text = json.dumps(answers, indent=1, ensure_ascii=False)
    text = INNER.sub(lambda found: " ".join(found[0].split()), text)
    (options.to or ANSWERS).write_text(text + "\n", encoding="utf-8")
    if not options.to:
        PAGE.write_text(page(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
