"""Names that other libraries have for what is here: the error says what to call instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .did_you_mean import did_you_mean

_OF_LENGTH_FIRST = (
    "call attention(q, k, v) on arrays of shape (B, H, L, D); x.swapaxes(-3, -2) makes one of "
    "(B, L, H, D)"
)
_VARLEN = (
    "call attention_varlen(q, k, v, offsets_q, offsets_k) on packed arrays of shape (H, total, D); "
    "x.swapaxes(0, 1) makes one of (total, H, D)"
)
_PACKED_QKV = (
    "take the views q, k and v of the packed array and call attention(q, k, v), which reads any "
    "strides"
)
_CACHE = (
    "call append(k, v, k_cache, v_cache, lengths), which writes new rows and may rotate them, then "
    "attention_cached(q, k_cache, v_cache, lengths); cupyflash.torch has flash_attn_with_kvcache"
)
_ROPE = "call cupyflash.rope(x, positions, rotary), which rotates rows of q or k"
PACKAGE: Mapping[str, str] = {
    "BlockMask": "masks.mask(function) and masks.blocks(layout, block_q, block_k) make such masks",
    "attention_bwd": "call attention_backward(do, q, k, v, out, lse), or attention_vjp(q, k, v)",
    "attention_forward": "call attention(q, k, v, return_lse=True)",
    "attention_fwd": "call attention(q, k, v, return_lse=True)",
    "backward": "call attention_backward(do, q, k, v, out, lse), or attention_vjp(q, k, v)",
    "bench": "import cupyflash.bench before it is used",
    "create_block_mask": "call masks.mask(function), which finds the blocks by itself",
    "create_mask": "call masks.mask(function)",
    "dot_product_attention": _OF_LENGTH_FIRST,
    "flash_attention": "call attention(q, k, v) on arrays of shape (..., H, L, D)",
    "flash_attn_func": _OF_LENGTH_FIRST,
    "flash_attn_kvpacked_func": _PACKED_QKV,
    "flash_attn_qkvpacked_func": _PACKED_QKV,
    "flash_attn_varlen_func": _VARLEN,
    "flash_attn_varlen_kvpacked_func": _VARLEN,
    "flash_attn_varlen_qkvpacked_func": _VARLEN,
    "flash_attn_with_kvcache": _CACHE,
    "flex_attention": (
        "call attention(q, k, v, score_mod=scores.score(function), mask=masks.mask(function))"
    ),
    "grad": "call attention_vjp(q, k, v), which returns (out, vjp)",
    "memory_efficient_attention": _OF_LENGTH_FIRST,
    "merge_attention_states": "call combine([(out, lse), ...])",
    "merge_state": "call combine([(out, lse), ...])",
    "merge_states": "call combine([(out, lse), ...])",
    "multi_head_attention": "project x to q, k and v, then call attention(q, k, v)",
    "multi_head_attention_forward": "project x to q, k and v, then call attention(q, k, v)",
    "MultiheadAttention": "project x to q, k and v, then call attention(q, k, v)",
    "apply_rotary_emb": _ROPE,
    "apply_rotary_pos_emb": _ROPE,
    "paged_attention": "call attention_cached(q, k, v, lengths, table=table); k and v are pages",
    "rotary_embedding": _ROPE,
    "scaled_dot_product_attention": (
        "call attention(q, k, v), whose arrays have the shape (..., H, L, D), too"
    ),
    "sdpa": "call attention(q, k, v), whose arrays have the shape (..., H, L, D), too",
    "testing": "import cupyflash.testing before it is used",
    "varlen_attention": _VARLEN,
    "verify": "import cupyflash.testing and call cupyflash.testing.verify(attention_fn)",
    "vjp": "call attention_vjp(q, k, v), which returns (out, vjp)",
}

_WINDOW = "call masks.window(left, right)"
_LENGTHS = "call masks.lengths(k_lengths), with the number of keys of every batch entry"
_SEGMENTS = (
    "call masks.segments(ids), or attention_varlen(q, k, v, offsets_q, offsets_k) on packed "
    "sequences"
)
_DENSE = "call masks.dense(array), or pass the boolean array itself as mask="
_FUNCTION = "call masks.mask(function)"
_ALL = "pass mask=None, which lets every query see every key"
_SCORE = "it changes scores and hides nothing: call scores.{} and pass it as score_mod="
MASKS: Mapping[str, str] = {
    "alibi": _SCORE.format("alibi(slopes)"),
    "all": _ALL,
    "and_masks": "join masks with &",
    "array": _DENSE,
    "banded": _WINDOW,
    "block_diagonal": _SEGMENTS,
    "block_sparse": "call masks.blocks(layout, block_q, block_k)",
    "boolean": _DENSE,
    "causal_lower_right": "call masks.causal()",
    "causal_upper_left": "call masks.causal(offset=0)",
    "custom": _FUNCTION,
    "document": _SEGMENTS,
    "documents": _SEGMENTS,
    "from_array": _DENSE,
    "from_function": _FUNCTION,
    "full": _ALL,
    "key_padding": _LENGTHS,
    "local": _WINDOW,
    "lower_triangular": "call masks.causal()",
    "no_mask": _ALL,
    "none": _ALL,
    "or_masks": "join masks with |",
    "packed": _SEGMENTS,
    "padding": _LENGTHS,
    "prefix_lm": "call masks.prefix(n) | masks.causal()",
    "relative_bias": _SCORE.format("relative_bias(table)"),
    "segment_ids": _SEGMENTS,
    "sliding_window": _WINDOW,
    "softcap": _SCORE.format("softcap(c)"),
    "strided": "call masks.dilated(step)",
    "tril": "call masks.causal()",
}

_SOFTCAP = "call scores.softcap(c)"
_TABLE = "call scores.relative_bias(table)"
_HIDES = "it hides pairs and changes no score: call masks.{} and pass it as mask="
SCORES: Mapping[str, str] = {
    "alibi_bias": "call scores.alibi(slopes)",
    "bias": "pass the array as bias= of attention",
    "causal": _HIDES.format("causal()"),
    "custom": "call scores.score(function)",
    "dropout": "pass dropout=p, seed=number to attention",
    "from_function": "call scores.score(function)",
    "logit_cap": _SOFTCAP,
    "logit_softcap": _SOFTCAP,
    "logits_soft_cap": _SOFTCAP,
    "relative_position_bias": _TABLE,
    "rope": _ROPE,
    "rotary": _ROPE,
    "scale": "pass scale=number to attention",
    "score_mod": "call scores.score(function)",
    "sink": "pass an array of one logit per query head as sink= of attention",
    "sinks": "pass an array of one logit per query head as sink= of attention",
    "soft_cap": _SOFTCAP,
    "t5_bias": _TABLE,
    "tanh_softcap": _SOFTCAP,
    "temperature": "pass scale=number to attention",
    "window": _HIDES.format("window(left, right)"),
}


def no_attribute(
    module: str, name: str, known: Iterable[str], remedies: Mapping[str, str]
) -> AttributeError:
    """Return the error for a name that a module does not have.

    Parameters
    ----------
    module : str
        Its full name.
    name : str
        What was asked for.
    known : iterable of str
        The module's public names.
    remedies : mapping of str to str
        Names that other libraries have, and what to do here: one of the tables above.
    """
    remedy = remedies.get(name)
    words = did_you_mean(name, known) if remedy is None else f"; {remedy}."
    # With the name, and without the module, Python does not add a guess of its own.
    return AttributeError(f"module {module!r} has no attribute {name!r}{words}", name=name)
