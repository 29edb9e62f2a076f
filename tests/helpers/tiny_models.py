"""Tiny models of the classes of transformers, made from their default configurations."""

from __future__ import annotations

import inspect
import re
from typing import Any, NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto as auto

VOCABULARY = 99
MOST_PARAMETERS = 3_000_000
# Numbers of a configuration by their names: the first expression that is found tells the most.
_MOST = (
    (r"^n_group$|^topk_group$|num_expert_group", 1),
    (r"^sliding_window$|^sliding_window_size$|^attention_chunk_size$", 5),
    (r"(^|_)vocab_size", VOCABULARY),
    (r"num_key_value_heads|num_kv_heads|multi_query_group_num|n_head_kv|num_kv$", 2),
    (r"heads?$|^n_head|num_heads|_attention_heads|attn_heads", 4),
    (r"head_dim|head_size|attention_head_size|d_kv|kv_channels|d_head|attention_key_size", 8),
    (r"rotary_dim", 8),
    (r"lora_rank|_rank$", 8),
    (r"(num|n)_(hidden_)?layers|_layers$|^n_layer|num_blocks|_depth$|^depth$", 2),
    (r"intermediate_size|ffn|d_ff|n_inner|mlp_dim|ff_dim|feed_?forward|_inner|dim_ff", 48),
    (r"hidden_size_per_layer_input", 8),
    (r"max_position|n_positions|max_seq|n_ctx|max_.*positions|context_length|max_len", 96),
    (r"hidden_size|d_model|n_embd|embed_dim|embedding_size|hidden_dim|^dim$|_dim$", 32),
    (r"embedding_dim|projection_size|_width$|^width$", 32),
    (r"num_experts_per_tok|top_?k|moe_k|experts_per_tok", 2),
    (r"num_shared", 1),
    (r"experts|num_expert", 4),
    (r"image_size", 16),
    (r"patch_size", 4),
)
_OTHER = re.compile(
    "token_id|_id$|type_vocab|num_labels|pad|bos|eos|num_channels|n_group|topk_group|kernel|stride|"
    "groups|theta|eps|scale|_std|range|factor|dropout|window|version|block|size_per|chunk|ratio|"
    "temperature|_prob|pattern|interval|period|freq|num_mel|sampling|rate|layer_idx|first_k|conv|"
    "state|dt_|expand"
)
_LEFT_OUT = {
    "transformers_version", "model_type", "architectures", "torch_dtype", "dtype", "layer_types",
    "mlp_layer_types", "sub_configs", "id2label", "label2id", "attribute_map",
    "base_model_tp_plan",
}  # fmt: skip
_DEPTHS = "num_hidden_layers", "n_layer", "num_layers", "encoder_layers"
# What the names do not tell: numbers that must agree, and layers of every kind.
_FULL = {"layer_types": ["full_attention"] * 2}
_MORE: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1]},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 0, "n_output_layers": 1},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 4},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gemma4_text": {"num_kv_shared_layers": 1, **_FULL},
    "granitemoehybrid": {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "layer_types": ["mamba", "attention"],
    },
    "glm5_next": {"num_key_value_heads": 4, "index_topk": 16},
    "glm5_next_text": {"num_key_value_heads": 4, "index_topk": 16},
    "granite_speech_encoder": {"context_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 1,
    },
    "neomme": {"head_dim": 16},
    "nemotron_h": {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8},
    "recurrent_gemma": {"block_types": ["attention", "recurrent"]},
    "xlnet": {"d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8},
}


class Choice(NamedTuple):
    """The class of models for a type."""

    kind: str
    name: str


def choices() -> dict[str, Choice]:
    """Return the classes of every type of models, those that generate text if there are any."""
    found: dict[str, Choice] = {}
    generate = "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT"
    for kind in (*generate, "MULTIMODAL_LM", ""):
        table = f"MODEL_FOR_{kind}_MAPPING_NAMES" if kind else "MODEL_MAPPING_NAMES"
        for model_type, names in getattr(auto, table).items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(model_type, Choice(kind, name))
    return found


def _shrunk(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)) and name == "image_size":
        return [_shrunk(name, each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, most in _MOST:
        if re.search(pattern, name):
            return min(value, most)
    return 32 if value > 256 and not _OTHER.search(name) else value


def _numbers(kind: type) -> dict[str, Any]:
    """Return what makes a configuration tiny."""
    base = kind()
    named = {name: x for name, x in vars(base).items() if not name.startswith("_")}
    made: dict[str, Any] = {}
    for name, value in named.items():
        if name in _LEFT_OUT or value is None:
            continue
        if isinstance(value, transformers.PretrainedConfig):
            made[name] = _numbers(type(value))
            if "Auto" in getattr(kind.sub_configs.get(name), "__name__", ""):
                made[name]["model_type"] = value.model_type
        elif name.endswith(("token_id", "token_index")):
            made[name] = _token(name, value)
        elif (new := _shrunk(name, value)) != value:
            made[name] = new
    depth = next((named[name] for name in _DEPTHS if isinstance(named.get(name), int)), None)
    if depth is not None and depth > 2:
        lists = {name: x for name, x in named.items() if isinstance(x, (list, tuple))}
        made |= {name: _two(x) for name, x in lists.items() if len(x) == depth}
    if "head_dim" in named and named["head_dim"] is None:
        made["head_dim"] = 8
    if "num_key_value_heads" in named and named["num_key_value_heads"] is None:
        made["num_key_value_heads"] = 2
    if "kv_lora_rank" in named and "num_key_value_heads" in named:
        made["num_key_value_heads"] = 4  # latents are expanded to every head
    kinds = named.get("layer_types")
    if isinstance(kinds, list) and len(set(kinds)) > 1:
        made["layer_types"] = _two(kinds)
    _sections(base.model_type, named, made)
    return made | _MORE.get(base.model_type, {})


def _token(name: str, value: Any) -> Any:
    if isinstance(value, int):
        return value if value < VOCABULARY else 50 + sum(map(ord, name)) % 40
    return [x % 90 for x in value if isinstance(x, int)] if isinstance(value, list) else value


def _two(layers: Any) -> list[Any]:
    """Return the kinds of two layers that differ, if there are such."""
    kinds = []
    for each in layers:
        if each not in kinds:
            kinds.append(each)
    return kinds[:2] if len(kinds) > 1 else list(layers)[:2]


_ROTATED_BY_AXES = re.compile(r"qwen2(_5)?_(vl|omni)|glm4v|glm46v|glm_ocr|glm_image|paddleocr_vl")


def _sections(model_type: str, named: dict[str, Any], made: dict[str, Any]) -> None:
    """Divide the pairs of rotary columns among the axes of a picture as before."""
    rope = named.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    if "mrope_section" not in rope and not _ROTATED_BY_AXES.match(model_type):
        return
    width = made.get("head_dim", named.get("head_dim") or 8)
    pairs = int(width * rope.get("partial_rotary_factor", 1)) // 2
    first = max(1, pairs // 2)
    second = (pairs - first + 1) // 2
    made["rope_parameters"] = {**rope, "mrope_section": [first, second, pairs - first - second]}


def make(model_type: str, choice: Choice) -> Any:
    """Return a model in float32 whose weights are large enough to tell wrong attention.

    Raises
    ------
    Exception
        Whatever the library raises for such a configuration, or MemoryError if it is not tiny.
    """
    kind = transformers.CONFIG_MAPPING[model_type]
    numbers = _numbers(kind)
    if choice.kind == "CAUSAL_LM" and "is_decoder" in vars(kind()):
        numbers["is_decoder"] = True
    build = getattr(transformers, choice.name)
    with torch.device("meta"):
        count = sum(x.numel() for x in build(_config(kind(**numbers), build)).parameters())
    if count > MOST_PARAMETERS:
        raise MemoryError(f"{count:,} parameters")
    torch.manual_seed(0)
    config = _config(kind(**numbers), build)
    config._attn_implementation = "eager"
    model = build(config).eval().float()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.1 * torch.randn_like(x))
    return model


def _config(config: Any, build: Any) -> Any:
    """Return the configuration, or its part for text if the class of models takes only that."""
    text = config.get_text_config()
    return text if isinstance(text, build.config_class or ()) else config


def _number(config: Any, *names: str) -> Any:
    """Return a number of a configuration, or of one that is part of it."""
    parts = [getattr(config, name, None) for name in config.sub_configs]
    for each in (config, *(part for part in parts if part is not None)):
        for name in names:
            if isinstance(getattr(each, name, None), (int, list, tuple)):
                return getattr(each, name)
    return None


def inputs(model: Any) -> list[dict[str, torch.Tensor]]:
    """Return what to call a model with, in several ways of which it may take one."""
    takes = inspect.signature(model.forward).parameters
    random = torch.Generator().manual_seed(1)
    config = model.config
    ids = torch.randint(3, 49, (2, 12), generator=random)
    text = {"input_ids": ids} if "input_ids" in takes else {}
    if "decoder_input_ids" in takes:
        text["decoder_input_ids"] = torch.randint(3, 49, (2, 9), generator=random)
    made = []
    if model.main_input_name == "input_values":
        text["input_values"] = torch.randn(2, 400, generator=random)
    if model.main_input_name == "input_features":
        bins = _number(config, "num_mel_bins", "feature_size", "input_feat_per_channel") or 80
        steps = _number(config, "max_source_positions")
        shape = (2, 48, bins) if steps is None else (2, bins, 2 * steps)
        text["input_features"] = torch.randn(shape, generator=random)
    if "pixel_values" in takes:
        size = _number(config, "image_size") or 32
        height, width = (size, size) if isinstance(size, int) else size
        channels = _number(config, "num_channels", "in_channels", "in_chans")
        channels = channels if isinstance(channels, int) else 3
        pixels = torch.randn(2, channels, height, width, generator=random)
        made = [{**text, "pixel_values": pixels}, {"pixel_values": pixels}]
    return [text, *made] if model.main_input_name == "input_ids" else [*made, text]


def use(model: Any, implementation: str) -> None:
    """Choose the attention implementation of a model, whatever the library thinks of it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, transformers.PretrainedConfig):
            config._attn_implementation = implementation
