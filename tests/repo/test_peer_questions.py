"""docs/peers.md: it is what libraries were seen to do, and cupyflash gives the same as it says."""

from __future__ import annotations

import importlib.metadata
import json

import numpy as np
import peer_questions as asked
import pytest

ANSWERS = json.loads(asked.ANSWERS.read_text(encoding="utf-8"))
QUESTIONS = asked.questions()
# Answers that name a type of numbers, of which only the size can be compared.
SIZES = {"double"}


@pytest.fixture(scope="module")
def ours():
    """The names of the programs of cupyflash."""
    return asked.namespace_of(asked.OURS)


def cells():
    """Yield each question and library with what it answered."""
    for name in asked.shown(ANSWERS):
        for key in QUESTIONS:
            found = asked.answer_of(name, key, ANSWERS)
            if found is not None:
                yield name, key, found


def test_the_page_is_made_of_the_answers():
    assert asked.PAGE.read_text(encoding="utf-8") == asked.page(ANSWERS), (
        "python tests/tools/peer_questions.py writes it"
    )


def test_answers_are_those_of_the_programs():
    assert set(QUESTIONS) == set(asked.WORDS)
    assert set(asked.on_cpu()) <= set(ANSWERS) <= set(asked.names())
    for name in asked.shown(ANSWERS):
        programs = {key for key in QUESTIONS if asked.program_of(name, key)}
        assert programs == set(ANSWERS[name]["answers"])
        assert set(asked.read(name)["programs"]) <= set(QUESTIONS)
    for name, key, found in cells():
        if "error" not in found:
            assert asked.WORDS[key](asked.restored(found["result"])) == found["answer"], (name, key)


def test_cupyflash_does_what_is_stored():
    for key, found in asked.ask_here(asked.OURS)["answers"].items():
        stored = ANSWERS[asked.OURS]["answers"][key]
        assert found["answer"] == stored["answer"], key
        if key not in SIZES:
            assert "error" in found or same(found["result"], stored["result"]), key


def same(a, b):
    """Whether two results from JSON are the same up to rounding."""
    a, b = asked.restored(a), asked.restored(b)
    if isinstance(a, str):
        return a == b
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 1e-6, equal_nan=True)


@pytest.mark.parametrize("key", QUESTIONS)
def test_cupyflash_gives_the_same(ours, key):
    """Each answer of a library can be had, or the page says what is here instead."""
    programs, texts = QUESTIONS[key]["same"], QUESTIONS[key].get("instead", {})
    given = {found["answer"] for _, each, found in cells() if each == key} - {"error"}
    assert given <= {*programs, *texts}
    for word, program in programs.items():
        result = asked.evaluate(program, ours)
        assert asked.WORDS[key](result) == word
        for name, each, found in cells():
            if each == key and found["answer"] == word and key not in SIZES:
                assert same(asked.stored(result), found["result"]), (name, program)


@pytest.mark.thorough("asks libraries again, in a process each")
@pytest.mark.parametrize("name", [x for x in asked.on_cpu() if x.startswith(("torch", "jax"))])
def test_libraries_do_what_is_stored(name):
    package = asked.read(name)["package"]
    stored = ANSWERS[name]
    try:
        version = importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs {package}")
    if version != stored["version"]:
        pytest.skip(f"{package} is {version}; {stored['version']} was asked")
    found = asked.ask(name)["answers"]
    assert {key: x["answer"] for key, x in found.items()} == {
        key: x["answer"] for key, x in stored["answers"].items()
    }


def test_answers_of_another_machine_are_read(tmp_path, monkeypatch):
    printed, answers = tmp_path / "printed", tmp_path / "answers.json"
    answers.write_text(json.dumps(ANSWERS), encoding="utf-8")
    other = {"torch": ANSWERS["torch"] | {"version": "9.9"}}
    printed.write_text(f"a warning\n{json.dumps(other)}\n", encoding="utf-8")
    monkeypatch.setattr(asked, "ANSWERS", answers)
    monkeypatch.setattr(asked, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["peer_questions.py", "--read", str(printed)])
    asked.main()
    assert json.loads(answers.read_text(encoding="utf-8")) == ANSWERS | other
    assert ", CPU (9.9) |" in (tmp_path / "page.md").read_text(encoding="utf-8")


def test_words_tell_answers_apart():
    words = asked.WORDS
    assert words["empty"](np.array([[np.nan, 1]])) == "another"
    assert words["empty"](np.array([[0.5, 0.5]])) == "mean"
    assert words["more_keys"](np.array([[1, 0], [0.5, 0.5]])) == "1, 2"
    assert words["cap_bias"](np.array([[0.5, 0.5]])) == "before it"
    assert words["scale"](np.array([np.e**4, 1])) == "1"
    assert words["lse"](np.array([2.0])) == "base 2"
    assert words["rotary"](np.array([0.5, 0.8, 0, 0])) == "neighbours: 0 with 1"
    assert words["cache"](np.array([[[[2.0], [1.0]]]])) == "before them, B H L D"
    assert words["axes"](np.zeros((1, 2, 3, 4))) == "another"
