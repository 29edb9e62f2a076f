"""The generating example writes the same with a cache and without; a wrong file is explained."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from halves import mostly_thorough
from small_model import EXAMPLES, SETTING, load, some_weights, transformer

from cupyflash.problem import formats

model_file, generate, program = map(load, ("model_file", "generate", "program"))
SCRIPT = EXAMPLES / "generate.py"
PROMPTS = [b"d", b"A class", b"The prompt is longer than what the model sees at once"]


def both(kv_dtype):
    """Return the types of keys and of values, of one for both or of two."""
    return kv_dtype if kv_dtype is None or isinstance(kv_dtype, tuple) else (kv_dtype, kv_dtype)


def write(
    prompts, number, weights, cached, temperature=0.0, top_k=256, seed=1, xp=np, kv_dtype=None
):
    """Return the texts, the reader and all logits."""
    reader = (
        generate.CachedReader([*map(len, prompts)], number, SETTING, "float32", xp, both(kv_dtype))
        if cached
        else generate.Reader(len(prompts), SETTING, "float32", xp)
    )
    sampler = generate.Sampler.of(len(prompts), seed, temperature, top_k)
    logits = []

    def kept(some):
        logits.append(some)
        return sampler(some)

    chosen = list(generate.written(prompts, number, reader, weights, kept))
    lines = np.transpose(chosen).tolist()
    texts = [prompt + bytes(line) for prompt, line in zip(prompts, lines, strict=True)]
    return texts, reader, np.array(logits)


# --- the same, with a cache and without ---


@mostly_thorough("temperature", [0.0, 1.0], quick=[1.0], why="greedy; what is drawn is quick")
def test_the_cache_changes_no_byte(temperature):
    weights = some_weights()
    texts, reader, logits = write(PROMPTS, 45, weights, True, temperature)
    again, _, others = write(PROMPTS, 45, weights, False, temperature)
    assert texts == again
    np.testing.assert_allclose(logits, others, atol=1e-4)
    assert [len(text) for text in texts] == [len(prompt) + 45 for prompt in PROMPTS]
    # Whole texts have more pages than the cache has: those that nobody sees came back.
    assert reader.k.shape[1] < sum(generate.pages(len(text)) for text in texts) - 3
    held = [reader.table[b, reader.dropped[b] : reader.held[b]] for b in range(len(PROMPTS))]
    owned = [*np.concatenate(held), *reader.free]
    assert sorted(owned) == list(range(reader.k.shape[1]))
    # A text is the same in other company.
    assert write(PROMPTS[:1], 45, weights, True, temperature)[0] == texts[:1]


def test_reading_is_what_the_model_was_trained_as():
    weights = some_weights()
    text = np.frombuffer(b"twenty-one bytes long", np.uint8).astype(np.int64)
    assert len(text) == SETTING.context

    def attend(_, qkv):
        return transformer.attend(qkv, 1, SETTING.heads, "float32", np)

    wanted = transformer.model(text, weights, SETTING.layers, attend, np)[0]
    for cached in (True, False):
        logits = write([bytes(text[:9].tolist())], 1, weights, cached)[2]
        np.testing.assert_allclose(logits[0, 0], wanted[8], atol=1e-4)
    reader = generate.CachedReader([9], 12, SETTING, "float32", np)
    steps = [reader.read([some], weights)[0] for some in np.split(text, range(9, 21))]
    np.testing.assert_allclose(steps, wanted[8:], atol=1e-4)


def test_bytes_beyond_the_context_are_not_seen():
    weights = some_weights()

    def logits(start, others):
        return write([start + b"x" * others], 3, weights, True)[2]

    far = 2 * (SETTING.context - 1)  # two layers see so far
    np.testing.assert_array_equal(logits(b"a", far + 1), logits(b"b", far + 1))
    np.testing.assert_allclose(logits(b"a", far + 1), logits(b"abc", far + 1), atol=1e-4)
    assert not np.array_equal(logits(b"a", far), logits(b"b", far))


def test_what_lies_in_free_pages_does_not_matter(monkeypatch):
    weights = some_weights()
    texts = write(PROMPTS, 30, weights, True)[0]
    grow = generate.CachedReader._grow

    def poisoned(reader, counts):
        grow(reader, counts)
        for array in (reader.k, reader.v):
            array[:, reader.free] = np.nan

    monkeypatch.setattr(generate.CachedReader, "_grow", poisoned)
    assert write(PROMPTS, 30, weights, True)[0] == texts


def test_a_cache_of_codes_holds_the_same_rows():
    """In the first layer, whose rows are those of a cache of numbers."""
    weights = some_weights()
    wanted = write(PROMPTS, 1, weights, True)
    # Half of the largest distance of codes, in units of the scale, and what a sum is off by.
    for form, step in (("int8", 1), ("float8_e4m3fn", 32), ("float8_e5m2", 8192), ("int4", 1)):
        _, reader, logits = write(PROMPTS, 1, weights, True, kv_dtype=form)
        held = np.unique(np.concatenate([
            reader.table[b, : reader.held[b]] for b in range(len(PROMPTS))
        ]))  # fmt: skip
        for name in "kv":
            codes, scale = getattr(reader, name)[0], getattr(reader, f"{name}_scale")[0]
            assert codes.dtype == np.uint8
            with np.errstate(all="ignore"):  # unused rows hold anything
                numbers = scale * formats.numbers(codes, formats.FORMATS[form])
            exact = getattr(wanted[1], name)[0]
            used = np.zeros(exact.shape[:3], bool)
            for b, length in enumerate(reader.lengths):
                for j in range(length):
                    used[reader.table[b, j // generate.PAGE], :, j % generate.PAGE] = True
            assert used.any(axis=(1, 2)).sum() == len(held)
            off = np.abs(numbers[used] - exact[used])
            assert (off <= 0.51 * step * scale[used]).all()
        assert not np.array_equal(logits, wanted[2])
        assert np.abs(logits - wanted[2]).max() < 0.5 * np.abs(wanted[2]).max()


def test_free_pages_of_codes_do_not_matter(monkeypatch):
    weights = some_weights()
    forms = "int4", ("int8", "float8_e4m3fn")
    texts = [write(PROMPTS, 30, weights, True, kv_dtype=form)[0] for form in forms]
    grow = generate.CachedReader._grow

    def poisoned(reader, counts):
        grow(reader, counts)
        for array in (reader.k_scale, reader.v_scale):
            array[:, reader.free] = np.nan

    monkeypatch.setattr(generate.CachedReader, "_grow", poisoned)
    assert [write(PROMPTS, 30, weights, True, kv_dtype=form)[0] for form in forms] == texts


@pytest.mark.parametrize("dim", [64, 48, 6])
def test_rows_of_codes_are_those_that_append_takes(dim):
    groups = {64: 2, 48: 1, 6: 1}[dim]
    assert generate.bytes_and_scales(dim, "int4") == (dim // 2, groups)
    assert generate.bytes_and_scales(dim, "int8") == (dim, 1)


# --- sampling ---


def test_probabilities():
    logits = np.tile(np.log([0.1, 0.2, 0.3, 0.4]).astype(np.float32), (4_000, 1))

    def shares(**options):
        sampler = generate.Sampler.of(len(logits), seed=1, **options)
        return np.bincount(sampler(logits), minlength=4) / len(logits)

    assert shares(temperature=0.0, top_k=256).tolist() == [0, 0, 0, 1]
    assert shares(temperature=1.0, top_k=1).tolist() == [0, 0, 0, 1]
    # Five standard deviations of a share are at most 0.04.
    np.testing.assert_allclose(shares(temperature=1.0, top_k=256), [0.1, 0.2, 0.3, 0.4], atol=0.04)
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2), [0, 0, 3 / 7, 4 / 7], atol=0.04)
    squares = np.array([1, 4, 9, 16]) / 30
    np.testing.assert_allclose(shares(temperature=0.5, top_k=256), squares, atol=0.04)


def test_a_seed_repeats_a_text():
    weights = some_weights()
    one, again, other = (
        write(PROMPTS[:2], 15, weights, True, 1.0, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert one == again
    assert all(a != b for a, b in zip(one, other, strict=True))


# --- files ---


@pytest.fixture
def saved(tmp_path):
    for name in ("rich", "safetensors"):
        pytest.importorskip(name, reason=program.INSTALL)
    path = tmp_path / "model.safetensors"
    model_file.save(path, some_weights(), SETTING, np)
    return path


def test_a_file_holds_the_whole_model(saved):
    weights, setting = model_file.load(saved, np)
    assert setting == SETTING
    wanted = some_weights()
    assert weights.keys() == wanted.keys()
    for name, w in wanted.items():
        np.testing.assert_array_equal(weights[name], w)


def change(path, weights=None, **metadata):
    """Write a model anew, with other metadata or weights."""
    from safetensors.numpy import save_file

    told = {
        "made by": model_file.MADE_BY,
        "tokens": model_file.TOKENS,
        "setting": json.dumps(dataclasses.asdict(SETTING)),
    }
    save_file(some_weights() | (weights or {}), path, told | metadata)


def sizes(**changed):
    return {"setting": json.dumps(dataclasses.asdict(SETTING) | changed)}


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda path: path.unlink(), "cannot be read"),
        (lambda path: path.write_bytes(b"no model at all"), "is not a safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-7]), "is not a safetensors file"),
        (
            lambda path: change(path, **{"made by": "somebody"}),
            "does not contain a model of train_lm.py",
        ),
        (lambda path: change(path, tokens="words"), "does not contain a model of train_lm.py"),
        (lambda path: change(path, setting="{"), "got the sizes '{'"),
        (lambda path: change(path, setting="[1]"), "got the sizes '[1]'"),
        (lambda path: change(path, **sizes(colour=1)), "got the sizes"),
        (lambda path: change(path, **sizes(heads=0)), "got the sizes"),
        (lambda path: change(path, **sizes(heads=5)), "got the sizes"),
        (lambda path: change(path, **sizes(layers=1.5)), "got the sizes"),
        (lambda path: change(path, **sizes(width=24)), "expected float32 of shape (24,)"),
        (lambda path: change(path, **sizes(layers=3)), "got nothing for the weights '2.attention"),
        (lambda path: change(path, {"more": np.ones(1)}), "expected nothing"),
        (lambda path: change(path, {"norm": np.ones(12)}), "got float64 of shape (12,)"),
    ],
)
def test_a_wrong_file_is_explained(damage, wanted, saved, capsys):
    damage(saved)
    assert generate.main([str(saved), "--device", "cpu", "--tokens", "1"]) == 1
    captured = capsys.readouterr()
    assert wanted in captured.err
    assert "train_lm.py --save FILE" in captured.err
    assert not captured.out


def test_a_folder_is_no_file(tmp_path, capsys):
    pytest.importorskip("safetensors", reason=program.INSTALL)
    assert generate.main([str(tmp_path), "--device", "cpu"]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    with pytest.raises(program.UnusableError, match="got a folder"):
        model_file.writable(tmp_path)
    with pytest.raises(program.UnusableError, match="make it first"):
        model_file.writable(tmp_path / "none" / "model.safetensors")


# --- the program ---


def test_as_a_user_runs_it(saved):
    def printed(*arguments):
        done = subprocess.run(
            [sys.executable, SCRIPT, saved.name, "--device", "cpu", "--tokens", "9", *arguments],
            cwd=saved.parent,
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    cached = printed("--prompt", "The import statement", "A class")
    assert re.search(r"written at [\d,]+ bytes/s, [\d,]+ of each text\n", cached)
    assert "each byte sees 21" in cached
    assert "\x1b" not in cached  # neither a bar nor colours in a pipe
    assert cached.count("\n--- given\n") == cached.count("\n--- written\n") == 2
    assert "--- given\nThe import statement\n" in cached


def test_both_ways_print_the_same_texts(saved, capsys):
    def texts(*arguments):
        assert generate.main([str(saved), "--device", "cpu", "--tokens", "5", *arguments]) == 0
        return capsys.readouterr().out.partition("--- given")[2]

    default = texts()
    assert default.count("--- given") == len(generate.PROMPTS) - 1
    assert texts("--no-cache") == default
    assert texts("--seed", "2") != default
    assert texts("--kv-dtype", "int8").count("--- given") == len(generate.PROMPTS) - 1
    assert texts("--kv-dtype", "int8,int4").count("--- given") == len(generate.PROMPTS) - 1
    greedy = texts("--temperature", "0")
    assert greedy == texts("--top-k", "1", "--no-cache") != default


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["--tokens", "0"], "a whole number of 1 or more"),
        (["--temperature", "-1"], "a finite number of 0 or more"),
        (["--temperature", "nan"], "a finite number of 0 or more"),
        (["--top-k", "0"], "a whole number of 1 or more"),
        (["--attention", "float16"], "bfloat16"),
        (["--kv-dtype", "int2"], "float8_e4m3fn"),
        (["--kv-dtype", "int8,int4,int4"], "as in int8,int4"),
        (["--kv-dtype", "int8", "--no-cache"], "leave one of them out"),
    ],
)
def test_wrong_arguments(arguments, wanted, capsys):
    with pytest.raises(SystemExit) as error:
        generate.main(["model.safetensors", "--device", "cpu", *arguments])
    assert error.value.code == 2
    assert wanted in capsys.readouterr().err


def test_two_codes_of_int4_need_an_even_number_of_columns(tmp_path, capsys):
    for name in ("rich", "safetensors"):
        pytest.importorskip(name, reason=program.INSTALL)
    setting = dataclasses.replace(SETTING, width=15)
    path = tmp_path / "model.safetensors"
    model_file.save(path, some_weights(setting), setting, np)
    arguments = [str(path), "--device", "cpu", "--tokens", "1", "--kv-dtype"]
    assert generate.main([*arguments, "int4"]) == 1
    assert "heads have 5 columns" in capsys.readouterr().err
    assert generate.main([*arguments, "int8"]) == 0
    assert "positions in each layer, in int8" in capsys.readouterr().out


def test_an_empty_prompt_is_explained(saved, capsys):
    assert generate.main([str(saved), "--device", "cpu", "--prompt", "a", ""]) == 1
    assert "--prompt" in capsys.readouterr().err


def test_missing_safetensors_are_explained(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    assert generate.main(["model.safetensors", "--device", "cpu"]) == 1
    assert program.INSTALL in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [*generate.FORMATS, ("int8", "int4")])
def test_the_gpu_writes_the_same_from_codes(gpu, kv_dtype):
    import cupy

    wanted = write(PROMPTS, 20, some_weights(), True, kv_dtype=kv_dtype)[0]
    weights = some_weights(xp=cupy)
    assert write(PROMPTS, 20, weights, True, xp=cupy, kv_dtype=kv_dtype)[0] == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_gpu_writes_the_same(gpu, cached, temperature):
    import cupy

    wanted = write(PROMPTS, 40, some_weights(), True, temperature)[0]
    weights = some_weights(xp=cupy)
    assert write(PROMPTS, 40, weights, cached, temperature, xp=cupy)[0] == wanted
