"""Names of other libraries, and misspelt ones: the error says what to call instead."""

from __future__ import annotations

import importlib
import inspect
import re
import types
from typing import Any

import numpy as np
import pytest

import cupyflash
from cupyflash import attention, masks, scores
from cupyflash.hints import other_libraries
from cupyflash.hints.did_you_mean import did_you_mean
from cupyflash.problem import keywords

TABLES = {
    cupyflash: other_libraries.PACKAGE,
    masks: other_libraries.MASKS,
    scores: other_libraries.SCORES,
}
NAMES = [(module, name) for module, table in TABLES.items() for name in table]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_names_of_other_libraries(module: types.ModuleType, name: str) -> None:
    if module is cupyflash and hasattr(module, name):  # a subpackage that a test has imported
        assert name in {"bench", "testing"}
        return
    assert name not in module.__all__
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    wanted = f"module {module.__name__!r} has no attribute {name!r}; {TABLES[module][name]}."
    assert str(caught.value) == wanted
    assert caught.value.name == name


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_remedies_name_what_there_is(module: types.ModuleType, name: str) -> None:
    """Every function that a remedy calls exists, and takes the keywords that it shows."""
    remedy = TABLES[module][name]
    for space, called in re.findall(r"\b(masks|scores)\.(\w+)", remedy):
        assert called in getattr(cupyflash, space).__all__
    known = {*inspect.signature(attention).parameters, "offset"}
    for called in re.findall(r"(?<![.\w])(\w+)\(", remedy):
        assert called in cupyflash.__all__, called
        known |= {*inspect.signature(getattr(cupyflash, called)).parameters}
    for keyword in re.findall(r"\b(\w+)=", remedy):
        assert keyword in known


def values() -> dict[str, Any]:
    """Return something for every name in the code of remedies."""
    rng = np.random.default_rng(0)
    q, k, v, do = rng.standard_normal((4, 2, 3, 8, 4), np.float32)
    out, lse = attention(q, k, v, return_lse=True)
    caches = np.zeros((2, 2, 3, 8, 4), np.float32)
    offsets = np.array([0, 5, 8])
    return {
        "cupyflash": cupyflash, "masks": masks, "scores": scores, "np": np,
        **{name: getattr(cupyflash, name) for name in cupyflash.__all__},
        "q": q, "k": k, "v": v, "do": do, "out": out, "lse": lse, "x": q,
        "k_cache": caches[0], "v_cache": caches[1], "lengths": np.array([8, 8]),
        "table": np.arange(2)[:, None], "offsets_q": offsets, "offsets_k": offsets,
        "function": None, "positions": np.arange(8),
        "rotary": cupyflash.Rotary(*np.ones((2, 8, 2), np.float32)),
        "attention_fn": attention, "k_lengths": np.array([8, 3]), "q_lengths": np.array([7, 8]),
        "ids": np.array([0, 0, 0, 1, 1, 2, 2, 2]), "layout": np.ones((2, 2), bool),
        "block_q": 4, "block_k": 4, "left": 2, "right": None, "n": 3, "step": 2, "c": 30.0,
        "slopes": scores.alibi_slopes(3), "array": np.ones((8, 8), bool), "p": 0.25, "number": 3,
    }  # fmt: skip


# Code in a remedy: a call, perhaps of what calls return, joined by |.
CALL = r"[A-Za-z_][\w.]*\((?:[^()]|\([^()]*\))*\)"
CODE = re.compile(rf"{CALL}(?: \| {CALL})*")
FUNCTIONS = {"masks": lambda b, h, i, j: i >= j, "scores": lambda s, b, h, i, j: 2 * s}


def executed(code: str, names: dict[str, Any]) -> Any:
    """Return what code of a remedy gives."""
    space = "scores" if code.startswith("scores.") else "masks"
    names = names | {"function": FUNCTIONS[space]}
    if code.startswith("attention_varlen"):  # on packed arrays
        names |= {name: names[name][0] for name in "qkv"}
    if code.startswith("scores.relative_bias"):
        names["table"] = np.ones((3, 33), np.float32)
    if code.startswith("attention(") and "score_mod=" in code:
        names["scores"] = types.SimpleNamespace(
            score=lambda function: scores.score(FUNCTIONS["scores"])
        )
    return eval(code.replace(", ...]", "]"), names)


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_code_of_remedies_works(module: types.ModuleType, name: str) -> None:
    """Each call that a remedy writes is made, and masks and scores go where it says."""
    remedy, names = TABLES[module][name], values()
    calls = CODE.findall(remedy)
    for code in calls:
        if code.startswith("cupyflash.testing.verify"):
            continue  # it takes minutes; tests/kit calls it
        result = executed(code, names)
        word = {masks.Mask: "mask", scores.Score: "score_mod"}.get(type(result))
        if word is not None:
            attention(names["q"], names["k"], names["v"], **{word: result})
    settings = [] if calls else re.findall(r"\b\w+=\w+", remedy)
    if settings:
        options = eval(f"dict({', '.join(settings)})", names)
        attention(names["q"], names["k"], names["v"], **options)
    for word in re.findall(r"\b(?:import )(cupyflash\.\w+)", remedy):
        importlib.import_module(word)


@pytest.mark.parametrize("name", sorted(keywords._OTHER_NAMES))
def test_code_for_keywords_of_other_libraries_works(name: str) -> None:
    """What a hint says to say is said, in each of its forms."""
    hint, names = keywords._OTHER_NAMES[name], values()
    q, k, v = (names[x] for x in "qkv")
    if hint.startswith(("say q=", "say k=", "say v=")):
        arrays = {"q": q, "k": k, "v": v} | eval(f"dict({hint[4:]})", {"array": q})
        attention(**arrays)
    elif hint.startswith("say "):
        said = re.findall(rf"\b\w+=(?:{CALL}|[\w.]+)(?:, \w+=\w+)*", hint)
        for code in said:
            options = eval(f"dict({code})", names | {"function": FUNCTIONS["masks"]})
            if "bias" in options:
                options["bias"] = options["bias"].astype(np.float32)
            if "sink" in options:
                options["sink"] = np.zeros(3, np.float32)
            attention(q, k, v, **options)
        assert said or hint == "say score_mod=", hint
    elif "plan(" in hint:
        assert cupyflash.plan(q, k, v)
    elif "exp(logits" in hint:
        (code,) = re.findall(r"exp\(.*\)", hint)
        logits = q @ k.swapaxes(-1, -2) / 2
        weights = eval(code, names | {"logits": logits, "exp": np.exp})
        np.testing.assert_allclose(weights @ v, names["out"], rtol=1e-4, atol=1e-5)
    elif "offsets_" in hint and "running sum" in hint:
        offsets = np.cumsum([0, 5, 3])
        cupyflash.attention_varlen(q[0], k[0], v[0], offsets, offsets)
    else:
        assert hint.startswith(("leave it out", "explain_cached")) or " take" in hint, hint


@pytest.mark.parametrize(
    ("module", "name", "meant"),
    [
        (cupyflash, "atention", "attention or attention_vjp"),
        (masks, "Causal", "causal"),
        (masks, "segment", "segments"),
        (scores, "softcaps", "softcap"),
    ],
)
def test_misspelt_names(module: types.ModuleType, name: str, meant: str) -> None:
    with pytest.raises(AttributeError, match=rf"{name}'; did you mean {meant}\?$"):
        getattr(module, name)


def test_names_like_nothing() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'$"):
        _ = cupyflash.xyzzy
    assert did_you_mean("xyzzy", ["causal"]) == ""
