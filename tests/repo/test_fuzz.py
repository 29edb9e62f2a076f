"""tests/tools/fuzz.py: it finds nothing wrong with cupyflash, and finds what is put wrong."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzz
import fuzz_caches
import fuzz_problems
import independent_model
import independent_words
import numpy as np
import pytest

import cupyflash
from cupyflash import masks
from cupyflash.problem.call import Gradients

SEED = 1


EVERY = (*fuzz_problems.KINDS, "cached")


def found(numbers: Any, kinds: tuple[str, ...] = EVERY) -> Iterator[str]:
    """Yield what is wrong with the problems of these numbers and kinds."""
    chosen = (n for n in numbers if fuzz.drawn(SEED, n).kind in kinds)
    return (text for n in chosen if (text := fuzz.attempt(n, SEED, "cpu")[3]))


def test_sixty_problems_are_right():
    assert list(found(range(60))) == []


def test_every_kind_type_word_and_layout_is_drawn():
    cases = [fuzz.draw(SEED, n) for n in range(600)]
    assert {(x.kind, x.dtype) for x in cases} == {
        (kind, dtype) for kind in fuzz_problems.KINDS for dtype in fuzz_problems.DTYPES
    }
    text = "\n".join(x.describe() for x in cases)
    words = (*fuzz_problems.MASKS, *fuzz_problems.SCORES, *fuzz_problems.LAYOUTS)
    words += (*fuzz_problems.FUNCTION_MASKS, *fuzz_problems.FUNCTION_SCORES)
    for word in (*words, "and", "or", "xor", "not", "NaN in", "where nobody looks"):
        assert word in text, word
    shapes = [x.arrays["q"].shape for x in cases if "q" in x.arrays]
    assert any(0 in shape for shape in shapes)
    assert any(len(shape) == 2 for shape in shapes)
    assert any(x.options.scale == 0 for x in cases)


def test_variants_differ_in_lengths_and_numbers_alone():
    def words(x):
        return tuple(map(words, x)) if isinstance(x, tuple) else x if isinstance(x, str) else ""

    for first in range(0, 320, 16):
        cases = [fuzz_problems.draw(3, n, variants=16) for n in range(first, first + 16)]
        kernels = {
            (c.kind, c.dtype, len(c.lead), words(c.options.mask or ()), words(c.options.scores))
            for c in cases
        }
        assert len(kernels) == 1
        assert len({c.describe() for c in cases}) > 8


def test_functions_of_expressions_are_right():
    words = (*fuzz_problems.FUNCTION_MASKS, *fuzz_problems.FUNCTION_SCORES)
    left = dict.fromkeys(words, 2)
    for n in range(400):
        case = fuzz.draw(SEED, n)
        text = str((case.options.mask, case.options.scores))
        here = [word for word in words if f"'{word}'" in text and left[word]]
        if here and all(x.size for x in case.arrays.values()):
            assert fuzz.attempt(n, SEED, "cpu")[3] == ""
            for word in here:
                left[word] -= 1
    assert not any(left.values())


def test_caches_of_every_pair_of_types_are_drawn():
    generators = [np.random.default_rng(n) for n in range(700)]
    cases = [fuzz_caches.draw(rng, rng) for rng in generators]
    assert {x.forms for x in cases} == set(itertools.product(fuzz_caches.FORMS, repeat=2))
    assert {(x.packed, x.table is not None) for x in cases} == {*itertools.product((0, 1), (0, 1))}
    assert {x.dtype for x in cases} == set(fuzz_problems.DTYPES)


def test_problems_are_drawn_again():
    a, b = (fuzz.draw(SEED, 17) for _ in "ab")
    assert a.describe() == b.describe()
    assert all(x.tobytes() == b.arrays[name].tobytes() for name, x in a.arrays.items())


def scale_is_off(real: Any) -> Any:
    def attention(q: Any, *others: Any, **options: Any) -> Any:
        scale = options.pop("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return real(q, *others, scale=scale * (1 + 2.0**-6), **options)

    return attention


def a_key_is_dropped(real: Any) -> Any:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if k.shape[-2] > 1 and not options.keys() & {"mask", "score_mod", "bias"}:
            return real(q, k[..., :-1, :], v[..., :-1, :], **options)
        return real(q, k, v, **options)

    return attention


def another_seed(real: Any) -> Any:
    def attention_vjp(*arrays: Any, **options: Any) -> Any:
        if "seed" in options:
            options["seed"] ^= 1
        return real(*arrays, **options)

    return attention_vjp


def dlse_is_forgotten(real: Any) -> Any:
    def attention_vjp(*arrays: Any, **options: Any) -> Any:
        out, lse, vjp = real(*arrays, **options)
        return out, lse, lambda do, dlse: vjp(do)

    return attention_vjp


def one_gradient_is_off(real: Any) -> Any:
    def attention_vjp(*arrays: Any, **options: Any) -> Any:
        out, lse, vjp = real(*arrays, **options)

        def wrong(do: Any, dlse: Any) -> Gradients:
            gradients = vjp(do, dlse)
            if gradients.dk.size:
                gradients.dk[..., -1:, :] = 0
            return gradients

        return out, lse, wrong

    return attention_vjp


def a_part_is_dropped(real: Any) -> Any:
    return lambda parts: real(parts[: max(1, len(parts) - 1)])


def an_input_is_written(real: Any) -> Any:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        result = real(q, k, v, **options)
        if v.size and v.flags.writeable:
            v[(0,) * v.ndim] = 12345
        return result

    return attention


def keys_are_values(real: Any) -> Any:
    def append(k: Any, v: Any, *others: Any, **options: Any) -> Any:
        return real(v if v.shape == k.shape else k * 2, v, *others, **options)

    return append


def the_last_key_is_forgotten(real: Any) -> Any:
    def attention(q: Any, k: Any, v: Any, lengths: Any, **options: Any) -> Any:
        return real(q, k, v, np.maximum(lengths - 1, 0), **options)

    return attention


def it_warns(real: Any) -> Any:
    def attention(q: Any, k: Any, v: Any, **options: Any) -> Any:
        np.float32(1e-40) * np.float32(1e-10)
        return real(q, k, v, **options)

    return attention


@pytest.mark.parametrize(
    ("name", "fault", "kinds"),
    [
        ("attention", scale_is_off, ("forward",)),
        ("attention", a_key_is_dropped, ("forward",)),
        ("attention", an_input_is_written, ("forward",)),
        ("attention", it_warns, ("forward",)),
        ("attention_varlen", scale_is_off, ("varlen",)),
        ("attention_vjp", another_seed, ("vjp",)),
        ("attention_vjp", dlse_is_forgotten, ("vjp",)),
        ("attention_vjp", one_gradient_is_off, ("vjp",)),
        ("combine", a_part_is_dropped, ("combine", "split")),
        ("append", keys_are_values, ("cached",)),
        ("attention_cached", the_last_key_is_forgotten, ("cached",)),
        ("attention_cached", scale_is_off, ("cached",)),
    ],
)
def test_a_fault_is_found(monkeypatch, name, fault, kinds):
    monkeypatch.setattr(cupyflash, name, fault(getattr(cupyflash, name)))
    assert any(found(range(400 if kinds == ("cached",) else 80), kinds))


def test_a_mask_that_is_off_by_one_is_found(monkeypatch):
    real = masks.causal
    monkeypatch.setattr(masks, "causal", lambda offset=None: real(0 if offset is None else offset))
    assert any(found(range(80)))


@pytest.mark.thorough("a fault that is found is quick")
def test_a_finding_is_printed_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(cupyflash, "combine", a_part_is_dropped(cupyflash.combine))
    assert fuzz.main(["--problems", "80", "--seed", str(SEED)]) == 1
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if line.startswith("python "))
    assert f"--seed {SEED} --only " in command
    assert fuzz.main(command.split()[2:]) == 1
    said = capsys.readouterr().out
    assert "1 problems of seed 1, 1 wrong" in said
    monkeypatch.undo()
    assert fuzz.main(command.split()[2:]) == 0


def test_the_model_imports_nothing_of_the_package():
    for module in (independent_model, independent_words):
        tree = ast.parse(Path(module.__file__).read_text())
        names = {x.module for x in ast.walk(tree) if isinstance(x, ast.ImportFrom)}
        names |= {y.name for x in ast.walk(tree) if isinstance(x, ast.Import) for y in x.names}
        assert names <= {"__future__", "collections.abc", "dataclasses", "itertools", "typing"} | {
            "numpy",
            "independent_words",
        }
