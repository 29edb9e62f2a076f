"""Every type of models of transformers: equal to eager attention in whatever it can do, or refused.

`tests/data/model_outcomes.csv` lists the types, and says why some cannot be made tiny or called.
"""

from __future__ import annotations

import pytest
from halves import mostly_thorough

WANTED = 'needs PyTorch and transformers: pip install ".[torch]" transformers'
torch = pytest.importorskip("torch", reason=WANTED)
transformers = pytest.importorskip("transformers", reason=WANTED)

import model_outcomes  # noqa: E402 (after the skip)
import tiny_models  # noqa: E402 (after the skip)

from cupyflash.torch import transformers as adapter  # noqa: E402 (after the skip)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries, about each other
CHOICES = tiny_models.choices()
LISTED = model_outcomes.listed()
VERSION = LISTED.pop("transformers").word
QUICK = {
    "bert": "no causal mask",
    "bloom": "attention of its own",
    "deepseek_v32": "chosen keys",
    "deepseek_v4": "columns of floats that a layer adds to its mask",
    "falcon": "attention of its own, which knows sdpa by name",
    "gemma4_text": "queries that are left out in layers with keys of others",
    "gpt2": "learned positions",
    "gpt_oss": "sinks",
    "inkling2_text": "a sink for each query",
    "llama": "grouped queries",
    "minimax_m3_vl_text": "chosen blocks",
    "paligemma": "layers that are not causal with causal masks",
    "t5": "position biases",
}


@mostly_thorough("model_type", CHOICES, quick=QUICK, why="all types; the quick ones differ most")
def test_models_are_as_with_eager_attention_or_refused(model_type):
    made = model_outcomes.outcome(model_type, CHOICES[model_type])
    assert made.word in model_outcomes.WORDS, made.note
    if transformers.__version__ == VERSION and not LISTED[model_type].word.startswith("not"):
        # The others may need packages that are installed elsewhere.
        assert made[:2] == LISTED[model_type][:2], made


def test_the_table_lists_every_type_and_its_reason():
    if transformers.__version__ != VERSION:
        pytest.skip(f"the table is of transformers {VERSION}")
    assert LISTED.keys() == CHOICES.keys()
    words = [each.word for each in LISTED.values()]
    assert set(words) <= model_outcomes.WORDS.keys()
    assert all(each.note for each in LISTED.values())
    assert words.count("equal") > 300


@pytest.mark.parametrize(
    ("model_type", "broken"),
    [
        ("llama", {"attention_mask": None, "is_causal": False}),
        ("bert", {"attention_mask": None}),
        ("deepseek_v32", {"indices": None}),
        ("gpt_oss", {"s_aux": None}),
        ("t5", {"position_bias": None}),
    ],
)
def test_wrong_attention_is_found(model_type, broken, monkeypatch):
    own = adapter.attention_forward

    def ignoring(module, query, key, value, attention_mask, **options):
        return own(
            module, query, key, value, **{"attention_mask": attention_mask, **options} | broken
        )

    monkeypatch.setattr(adapter, "attention_forward", ignoring)
    assert model_outcomes.outcome(model_type, CHOICES[model_type]).word == "wrong"
