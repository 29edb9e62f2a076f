"""What the attention for transformers does in a model: the same as eager attention, or an error.

`tests/data/model_outcomes.csv` says it for every type of models, with the reason where a model
cannot be made or called. `tests/tools/model_table.py` writes it.
"""

from __future__ import annotations

import csv
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tiny_models
import torch
import transformers

import cupyflash.torch.transformers as adapter
from cupyflash import ArgumentError, ArgumentTypeError

TABLE = Path(__file__).parent.parent / "data" / "model_outcomes.csv"
NAME = "counted_attention"
WORDS = {
    "equal": "the outputs and gradients of eager attention",
    "refused": "an error of ours in some calls, and the same in others",
    "unused": "the same, because the model never calls the registered function",
    "not made": "no tiny model of this class",
    "not run": "eager attention fails on the inputs",
}
_OUTPUTS, _GRADIENTS = 1e-4, 1e-3  # of the largest number; float32 is within a tenth of both
_WRITES = "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"


# A query that sees no key gets 0 here, as it does by sdpa. Eager attention gives an average of all
# keys or NaN, which goes on to other rows in these models.
AS_SDPA = {
    "recurrent_gemma", "nemotron3_5_asr", "nemotron_asr_streaming",
    "nemotron_asr_streaming_encoder",
}  # fmt: skip


class Outcome(NamedTuple):
    """What a model does. `word` is one of `WORDS`, or "wrong"."""

    name: str
    word: str
    note: str


class Numbers(NamedTuple):
    """Named tensors of a call."""

    outputs: list[tuple[str, torch.Tensor]]
    gradients: list[tuple[str, torch.Tensor]]


class Counter:
    """The registered function, with a count of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.calls += 1
        return adapter.attention_forward(*args, **keywords)


def _flat(x: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(x, torch.Tensor):
        if x.is_floating_point():
            yield path, x
    elif isinstance(x, dict):
        for key, each in x.items():
            yield from _flat(each, f"{path}.{key}")
    elif isinstance(x, (list, tuple)):
        for n, each in enumerate(x):
            yield from _flat(each, f"{path}.{n}")


def _call(model: Any, given: dict[str, Any], seen: torch.Tensor | None = None) -> Numbers:
    """Return the outputs where `seen` is True, and gradients of a random sum of them."""
    model.zero_grad()
    torch.manual_seed(5)
    outputs, total = [], torch.zeros((), dtype=torch.float64)
    for path, x in _flat(dict(model(**given))):
        if seen is not None:
            if x.shape[:2] == seen.shape:
                x = x[seen]
            elif "decoder_input_ids" not in given:
                continue
        outputs.append((path, x.detach()))
        if x.requires_grad:
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
            total = total + (x.double() * weights).sum()
    if total.requires_grad:
        total.backward()
    named = model.named_parameters()
    return Numbers(outputs, [(name, x.grad.clone()) for name, x in named if x.grad is not None])


def _write(model: Any, ids: torch.Tensor, **options: Any) -> Numbers:
    """Return what a model writes, and its scores."""
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6,
            do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_scores=True,
            **options,
        )  # fmt: skip
    scores = [(f"score {n}", x) for n, x in enumerate(made.scores)]
    return Numbers([("tokens", made.sequences.double()), *scores], [])


def _distance(
    ours: list[tuple[str, torch.Tensor]], theirs: list[tuple[str, torch.Tensor]]
) -> float:
    """Return the largest difference, in units of the largest number of a tensor."""
    if [(name, x.shape) for name, x in ours] != [(name, x.shape) for name, x in theirs]:
        return math.inf
    tops = [float(y.abs().max()) for _, y in theirs if y.numel() and y.isfinite().all()]
    worst = 0.0
    for (_, x), (_, y) in zip(ours, theirs, strict=True):
        finite = y.isfinite()  # eager attention gives NaN where a query sees no key
        if finite.any():
            top = float(y[finite].abs().max()) + 1e-3 * max(tops, default=0.0)
            far = float((x.double() - y.double())[finite].abs().max())
            worst = max(worst, far / top if math.isfinite(far) and top else far)
    return worst


def _calls(model: Any, choice: tiny_models.Choice) -> dict[str, Callable[[], Numbers]]:
    """Return the calls of a model by what they try. The first must work."""
    failures: list[Exception] = []
    for given in tiny_models.inputs(model):
        try:
            _call(model, given)
            break
        except Exception as error:  # noqa: BLE001 (the library's own, of any kind)
            failures.append(error)
    else:
        raise failures[0]
    takes = inspect.signature(model.forward).parameters
    calls = {"plain": lambda: _call(model, given)}
    ids = given.get("input_ids")
    if ids is None:
        return calls
    if "attention_mask" in takes:
        for side, columns in {"left": slice(0, 4), "right": slice(-4, None)}.items():
            mask = torch.ones_like(ids)
            mask[0, columns] = 0
            calls[f"padded on the {side}"] = lambda mask=mask: _call(
                model, {**given, "attention_mask": mask}, mask.bool()
            )
    if "logits_to_keep" in takes:
        calls["logits_to_keep"] = lambda: _call(model, {**given, "logits_to_keep": 3})
    if choice.kind in _WRITES and hasattr(model, "generate"):
        model.generation_config.decoder_start_token_id = 1
        again = ids.clone()
        again[:, 6:9] = again[:, 0:3]
        calls["a cache"] = lambda: _write(model, again)
        calls["a static cache"] = lambda: _write(model, again, cache_implementation="static")
        calls["prompt look-up"] = lambda: _write(
            model, again[:1], prompt_lookup_num_tokens=3, max_matching_ngram_size=2
        )
    return calls


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()}"[:150]


def outcome(model_type: str, choice: tiny_models.Choice) -> Outcome:
    """Compare a model with both attentions in every way in which it can be called."""
    count = Counter()
    adapter.register(NAME)
    transformers.AttentionInterface.register(NAME, count)
    try:
        model = tiny_models.make(model_type, choice)
    except Exception as error:  # noqa: BLE001 (the library's own, of any kind)
        return Outcome(choice.name, "not made", _short(error))
    try:
        calls = _calls(model, choice)
    except Exception as error:  # noqa: BLE001
        return Outcome(choice.name, "not run", _short(error))
    tried, refused, wrong = [], {}, {}
    for what, call in calls.items():
        tiny_models.use(model, "sdpa" if model_type in AS_SDPA else "eager")
        try:
            wanted = call()
        except Exception:  # noqa: BLE001 (the model cannot do this)
            continue
        tiny_models.use(model, NAME)
        try:
            made = call()
        except (ArgumentError, ArgumentTypeError) as error:
            refused[what] = str(error)
            continue
        except Exception as error:  # noqa: BLE001
            wrong[what] = _short(error)
            continue
        far = _distance(made.outputs, wanted.outputs), _distance(made.gradients, wanted.gradients)
        if far[0] > _OUTPUTS or far[1] > _GRADIENTS:
            wrong[what] = f"outputs differ by {far[0]:.1e}, gradients by {far[1]:.1e}"
        tried.append(what)
    if wrong:
        return Outcome(choice.name, "wrong", repr(wrong))
    if refused:
        first = next(iter(refused.values())).partition(":")[0]
        return Outcome(choice.name, "refused", first)
    return Outcome(choice.name, "equal" if count.calls else "unused", ", ".join(tried))


def listed() -> dict[str, Outcome]:
    """Return the table."""
    with TABLE.open(newline="") as file:
        return {kind: Outcome(*rest) for kind, *rest in csv.reader(file)}
