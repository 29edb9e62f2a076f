"""tests/tools/gpu_transformers.py, with tiny models on the CPU: what it times, and its record."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import gpu_machine
import host_cupy
import pytest

WANTED = 'needs PyTorch and transformers: pip install ".[torch]" transformers'
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

import gpu_transformers  # noqa: E402 (after the skip)
from gpu_transformers import GENERATE, OURS, ROWS, SDPA  # noqa: E402

from cupyflash.torch import transformers as adapter  # noqa: E402 (after the skip)
from cupyflash.torch.growing_cache import GrowingLayer  # noqa: E402
from cupyflash.torch.static_cache import StaticLayer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about each other
TINY = {
    "image_size": 32, "max_source_positions": 8, "vocab_size": 97,
    **dict.fromkeys(("n_embd", "hidden_size", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("n_layer", "num_hidden_layers", "encoder_layers", "decoder_layers"), 1),
    **dict.fromkeys(("n_head", "num_attention_heads", "encoder_attention_heads"), 4),
    "decoder_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
NEW = 3


def tiny(row):
    """Return a row of the same model with few and small layers, and few tokens."""
    config = {name: TINY.get(name, value) for name, value in row.config.items()}
    return row._replace(config=config, shape=(2, 5), new=NEW if row.new else 0)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Return what runs the tool on the CPU, and the keys that this package's attention was given.

    `run` returns the exit status and the record.
    """
    keys, own = [], adapter.attention_forward

    def watched(module, query, key, value, mask, **options):
        keys.append((type(module).__name__, query.dtype, query.requires_grad))
        return own(module, query, key, value, mask, **options)

    def run(*words):
        folder = tmp_path / "made"
        words = ["--commit", "0123abc", "--folder", str(folder), "--rounds", "2", *words]
        status = gpu_transformers.main(words)
        (path,) = folder.iterdir()
        assert path.name == "transformers_nvidia-h200_0123abc.json"
        return status, json.loads(path.read_text())

    monkeypatch.setattr(gpu_transformers, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_transformers, "ROWS", {name: tiny(row) for name, row in ROWS.items()})
    monkeypatch.setattr(adapter, "attention_forward", watched)
    verbosity = transformers.logging.get_verbosity()
    with host_cupy.for_records(monkeypatch):
        yield SimpleNamespace(run=run, keys=keys, folder=tmp_path / "made")
    monkeypatch.undo()
    adapter.register()
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def records(monkeypatch):
    """Return the module that makes the tables of the site."""
    pytest.importorskip("docutils", reason='the site is built by what pip install ".[docs]" brings')
    monkeypatch.syspath_prepend(str(gpu_machine.ROOT / "docs"))
    return importlib.import_module("records")


STEPS = [name for name, row in ROWS.items() if not row.new]
GENERATIONS = [name for name, row in ROWS.items() if row.new]


def test_every_row_is_recorded_and_shown(tool, records, monkeypatch):
    status, made = tool.run()
    assert status == 0, made
    assert (made["commit"], made["dtype"], made["rounds"]) == ("0123abc", "bfloat16", 2)
    assert [*made["rows"]] == [*ROWS]
    for name in STEPS:
        row = made["rows"][name]
        assert row["shape"] == [2, 5]
        assert 0 <= row["loss_difference"] < 0.02
        for what in ("inference", "training step"):
            assert list(row[what]["ms"]) == [SDPA, OURS]
            assert all(x > 0 for x in row[what]["ms"].values())
            assert row[what]["turns"] == 2
            assert list(row[what]["speed"]) == [OURS]
    for name in GENERATIONS:
        row = made["rows"][name]
        assert row["new_tokens"] == NEW
        assert list(row["generation"]["ms"]) == [*GENERATE] == [*row["first_seconds"]]
        assert list(row["generation"]["speed"]) == [*GENERATE][1:]
        assert row["equal_tokens"][SDPA] == 1
        assert all(x > 0.5 for x in row["equal_tokens"].values())
    # This package computed in every kind of model, in the type that the record says.
    assert {name for name, _, _ in tool.keys} == {
        "GPT2Attention", "LlamaAttention", "BertSelfAttention", "ViTAttention", "WhisperAttention",
    }  # fmt: skip
    assert {dtype for _, dtype, _ in tool.keys} == {torch.bfloat16}

    monkeypatch.setattr(records, "RECORDS", tool.folder)
    (found,) = records.records("transformers")
    head, rows = records.of_steps(found)
    assert [row[0] for row in rows] == [f"{ROWS[name].title}, (2, 5)" for name in STEPS]
    for name, row in zip(STEPS, rows, strict=True):
        assert len(row) == len(head)
        assert row[2] == f"{made['rows'][name]['inference']['speed'][OURS]:.2f}"
        assert row[4] == f"{made['rows'][name]['training step']['speed'][OURS]:.2f}"
    head, rows = records.of_generation(found)
    assert head == ["model", *GENERATE]
    assert [row[0] for row in rows] == [
        f"{ROWS[name].title}, (2, 5) + {NEW}" for name in GENERATIONS
    ]
    assert all(" ms" in cell and " s" in cell for row in rows for cell in row[1:])
    assert "NVIDIA H200" in records.about(found)


@pytest.mark.parametrize("name", ROWS)
def test_models_have_their_full_sizes_and_take_their_inputs(name, monkeypatch):
    monkeypatch.setattr(gpu_transformers, "DEVICE", "meta")  # shapes without numbers
    row = ROWS[name]
    model = gpu_transformers.model_of(row)
    assert {(x.dtype, x.device.type) for x in model.parameters()} == {(torch.bfloat16, "meta")}
    millions = sum(x.numel() for x in model.parameters()) / 1e6
    assert 300 < millions < 500 if row.model == "Llama" else 80 < millions < 120
    batch, length = row.shape
    positions = getattr(model.config, "max_position_embeddings", length)
    assert length + row.new <= positions
    given = gpu_transformers.inputs(row, model.config)
    assert all(len(x) == batch for x in given.values())
    given.pop("attention_mask", None)  # whether it hides anything is a question to numbers
    assert model(**given).loss.shape == ()


def test_a_training_step_has_gradients_and_inference_has_none(tool):
    status, _ = tool.run("--only", "bert")
    assert status == 0
    needed = [x for _, _, x in tool.keys]
    # Two calls and two turns of each.
    assert needed == [False] * 4 + [True] * 4


def test_ways_have_the_caches_that_they_name(tool, monkeypatch):
    made, generate = [], transformers.LlamaForCausalLM.generate

    def watched(model, *arguments, **options):
        cache = options.get(gpu_transformers.CACHE)
        kind = type(cache.layers[0]) if cache is not None else options.get("cache_implementation")
        made.append((model.config._attn_implementation, kind))
        return generate(model, *arguments, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate", watched)
    assert tool.run("--only", "llama-generate-1")[0] == 0
    ways = [
        ("sdpa", None), ("cupy_attention", None), ("cupy_attention", GrowingLayer),
        ("sdpa", "static"), ("cupy_attention", StaticLayer),
    ]  # fmt: skip
    assert made == [way for way in ways for _ in range(2)] + ways + ways[::-1]


def test_what_fails_is_recorded_with_its_error(tool, records, monkeypatch):
    rows = {name: gpu_transformers.ROWS[name] for name in ("gpt2", "bert", "gpt2-generate-1")}
    rows["gpt2"] = rows["gpt2"]._replace(config={"n_embd": 7, "n_head": 2})
    monkeypatch.setattr(gpu_transformers, "ROWS", rows)

    def refused(config):
        raise RuntimeError("no room\nfor more")

    monkeypatch.setattr(adapter, "growing_cache", refused)
    status, made = tool.run()
    assert status == 1
    failed = made["rows"]["gpt2"]["error"]
    assert failed.startswith("ValueError: ")
    assert "error" not in made["rows"]["bert"]
    row = made["rows"]["gpt2-generate-1"]
    assert row["error"] == "cupyflash, growing cache: RuntimeError: no room"
    assert [*row["generation"]["ms"]] == [way for way in GENERATE if "growing" not in way]
    shown = records.of_steps(made)[1]
    assert shown[0][-1] == failed
    _, (shown,) = records.of_generation(made)
    assert row["error"] in shown[0]


def test_a_run_that_is_cut_keeps_its_rows(tool, monkeypatch):
    measure = gpu_transformers.measure

    def cut(row, rounds):
        if row.model == "ViT":
            raise KeyboardInterrupt
        return measure(row, rounds)

    monkeypatch.setattr(gpu_transformers, "measure", cut)
    with pytest.raises(KeyboardInterrupt):
        tool.run("--only", "bert", "vit")
    (path,) = tool.folder.iterdir()
    assert list(json.loads(path.read_text())["rows"]) == ["bert"]
