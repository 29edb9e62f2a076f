"""An attention implementation for models of Hugging Face's transformers.

`register` makes "cupy_attention" a value for a model's ``attn_implementation``. The library makes
the same masks as for "sdpa": boolean tensors, or none for a causal mask without padding.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from .. import masks, scores
from ..errors import ArgumentError
from . import autograd, continuous, recognised_cpu, tensors
from .cached import attention_cached
from .functions import drawn_seed, run
from .held import Held, held
from .operands import Operands, Settings
from .tensors import is_transforming
from .transformers_mask import EAGER, attention_mask

__all__ = [
    "Held",
    "attention_forward",
    "attention_mask",
    "growing_cache",
    "held",
    "register",
    "static_cache",
]


def register(name: str = "cupy_attention") -> None:
    """Register a name with transformers, for ``attn_implementation=`` of models.

    Parameters
    ----------
    name : str
        The name. It must not contain "flash", because transformers takes such names for kernels of
        flash_attn and makes other masks for them. "sdpa" takes the place of the library's own, for
        all models of the process with that name. Continuous batching takes no other new name.

    Raises
    ------
    ArgumentError
        The name contains "flash".

    Examples
    --------
    >>> from cupyflash.torch import transformers
    >>> transformers.register()

    Then load a model by ``AutoModelForCausalLM.from_pretrained(...,
    attn_implementation="cupy_attention")``, or change a loaded one by
    ``model.set_attn_implementation("cupy_attention")``.
    """
    if "flash" in name:
        raise ArgumentError(
            f'name: got {name!r}; expected one without "flash", which transformers takes for a '
            "kernel of flash_attn."
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


def growing_cache(config: Any, rows: int = 0) -> Any:
    """Return a cache with room for later tokens, so that a step copies only its own rows.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The configuration of the model.
    rows : int
        How many tokens a sequence will have at most, if that is known: a layer without a window
        then has its room from the start. Otherwise rooms grow by half of what they hold.

    Returns
    -------
    transformers.DynamicCache
        The library's own cache, whose layers hold the same numbers as views of larger tensors. It
        may be cropped, reordered and copied by ``copy.deepcopy``. Rows that need a gradient, and
        those of compiled models, are copied as always.

    Raises
    ------
    ArgumentError
        No layer of the model holds keys of all tokens or of a window, or `rows` is wrong.

    Examples
    --------
    Generate with ``model.generate(tokens, cache=growing_cache(model.config))``; before transformers
    5.24, the argument is `past_key_values`. The attention may be any implementation.
    """
    from .growing_cache import growing

    return growing(config, rows)


def static_cache(config: Any, rows: int) -> Any:
    """Return a cache with room for all tokens of a generation, which models compiled for it take.

    On a GPU, ``model.generate`` then compiles the model's step, and replays it as a CUDA graph: the
    host's time between two kernels, of which most of a small model's step consists, is spared.

    Parameters
    ----------
    config : transformers.PreTrainedConfig
        The configuration of the model.
    rows : int
        How many tokens a sequence will have at most, its prompt included.

    Returns
    -------
    transformers.StaticCache
        The library's own static cache, whose layers write keys and values by one kernel. Those of
        a window are the library's.

    Raises
    ------
    ArgumentError
        No layer of the model holds keys of all tokens, `rows` is wrong, or, in a step on a CPU, a
        sequence has more tokens. On a GPU and in graphs, PyTorch's assertion fails then.

    Examples
    --------
    Generate with ``model.generate(tokens, cache=static_cache(model.config, 512))``; before
    transformers 5.24, the argument is `past_key_values`. The attention may be any implementation.
    """
    from .static_cache import static

    return static(config, rows)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer, as transformers calls it.

    Parameters
    ----------
    module : torch.nn.Module
        The layer. Its ``is_causal`` is used if the argument is None.
    query : torch.Tensor, shape (B, Hq, Lq, D)
        Queries.
    key : torch.Tensor, shape (B, Hkv, Lk, D)
        Keys.
    value : torch.Tensor, shape (B, Hkv, Lk, Dv)
        Values.
    attention_mask : torch.Tensor or None
        It broadcasts to (B, Hq, Lq, Lk). If it is bool, True means attend. If it is of floats, it
        is added to the scores. Keys beyond its last column are hidden.
    dropout : float
        Probability of dropping a pair. The seed comes from PyTorch's generator of the CPU.
    scaling : float, optional
        Default: 1 / sqrt(D).
    is_causal : bool, optional
        Whether queries see no later keys if there is no mask. They are then the last ones.
    softcap : float, optional
        Bound of the scores, which then lie in (-softcap, softcap).
    s_aux : torch.Tensor, shape (Hq,), optional
        Logits of one extra key of value 0 per head.
    position_bias : torch.Tensor, optional
        It broadcasts to (B, Hq, Lq, Lk), and is added to the scores.
    indices : torch.Tensor of int, shape (B, Lq, n), optional
        The keys that each query may see, in addition to what the mask says.
    **options : object
        Arguments that change nothing here are ignored, and others are errors unless they are None
        or False.

    Returns
    -------
    out : torch.Tensor, shape (B, Lq, Hq, Dv)
        In the dtype of `query`.
    weights : None
        Weights are never stored.

    Raises
    ------
    ArgumentError
        ``output_attentions`` is True, or an argument is not known to change nothing.
    """
    if options:
        _refuse_unknown(options, attention_mask)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    dropout = dropout or 0.0  # GPT-2 passes an int: the same call, under another key
    if attention_mask is softcap is s_aux is position_bias is indices is None and not dropout:
        out = _usual(query, key, value, is_causal, scaling)
        if out is not None:
            return out, None
    queries = query.shape[2]
    mask: Any = attention_mask
    if attention_mask is None:
        if is_causal and queries > 1:
            if queries > key.shape[2]:
                _refuse_missing_queries(queries, key.shape[2])
            mask = _CAUSAL  # queries are the last ones if some are missing
    else:
        is_plain = type(attention_mask) in tensors.PLAIN and not attention_mask.is_nested
        if not is_plain or attention_mask.layout is not torch.strided:
            tensors.check({"attention_mask": attention_mask})
        held = attention_mask.shape[-1]
        if 1 < held < key.shape[2]:
            key, value = key[:, :, :held], value[:, :, :held]
            if position_bias is not None:
                position_bias = position_bias[..., :held]
    if indices is not None:
        mask = _chosen(indices, mask, queries, key.shape[2])
    elif position_bias is None and not dropout and _is_step(query, key, attention_mask):
        return _step(query, key, value, attention_mask, softcap, s_aux, scaling), None
    bias = position_bias
    if attention_mask is not None and mask.dtype is not torch.bool:
        mask, bias = None, mask if bias is None else mask + bias
    settings = Settings(
        mask,
        None if softcap is None else scores.softcap(float(softcap)),
        scaling,
        dropout,
        drawn_seed(dropout) if dropout else None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        rows_first=True,
    )
    if options.get("write_index") is not None and position_bias is indices is None:
        out = continuous.attention(settings, query, key, value, bias, s_aux, options)
        if out is not None:
            return out, None
    out = run(settings, query, key, value, bias, s_aux, None, None, False)
    return out.contiguous(), None


def _usual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scaling: float | None,
) -> torch.Tensor | None:
    """Compute a call with nothing but a causal mask as an earlier one; None if there was none.

    The result is (B, L, H, D), contiguous. Between two layers, a model uses most of the CPU's
    caches. So this makes few objects and calls.
    """
    if tensors.is_traced():
        return None
    queries = query.shape[2]
    if queries == 1:
        is_causal = False
        if query.is_cpu and (scaling is None or scaling == query.shape[3] ** -0.5):
            out = _one_query(query, key, value)
            if out is not None:
                return out.transpose(1, 2).contiguous()
    elif is_causal and queries > key.shape[2]:
        return None
    how = is_causal, scaling, _is_deterministic()
    settings = _settings.get(how)
    if settings is None:
        mask, last = _CAUSAL if is_causal else None, how[2]
        settings = Settings(mask, scale=scaling, deterministic=last, rows_first=True)
        if len(_settings) >= _MOST_SETTINGS:
            _settings.clear()
        _settings[how] = settings
    made = autograd.again(settings, Operands(query, key, value), False)
    return None if made is None else made[0].contiguous()


_CAUSAL = masks.causal()
_settings: dict[tuple[bool, float | None, bool], Settings] = {}
_MOST_SETTINGS = 64
# The public function is one in Python.
_is_deterministic = getattr(
    torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled
)


def _one_query(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """Compute one query of each entry over keys on the CPU as over a cache of that length.

    A step of generation is such a call. None if it has to be computed as any other.
    """
    length = key.shape[2]
    out = recognised_cpu.cached_query(query, key, value, length, None)
    if out is not None or query.dtype not in (torch.float32, torch.float64):
        return out
    qkv = query, key, value
    if is_transforming() or any(type(x) not in tensors.PLAIN or x.requires_grad for x in qkv):
        return None
    return attention_cached(query, key, value, length)


def _is_step(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether a graph has one query of each entry, and a mask of the rows that a cache holds."""
    if mask is None or query.shape[2] != 1 or torch.is_grad_enabled() or not tensors.is_traced():
        return False
    entries, keys = query.shape[0], key.shape[2]
    if entries != key.shape[0] or not keys:
        return False
    return mask.dtype is torch.bool and mask.shape == (entries, 1, 1, keys)


def _step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    softcap: float | None,
    s_aux: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute a step of generation as over a cache of which each entry holds the rows it sees.

    A cache for graphs has the room of all tokens from the start: what is behind the last row that
    an entry sees is not read. How many rows these are is the same in all layers, and so it is
    computed once for them.
    """
    ends = torch.arange(1, mask.shape[3] + 1, device=mask.device, dtype=torch.int32)
    lengths = torch.where(mask[:, 0, 0], ends, 1).amax(-1)
    change = None if softcap is None else scores.softcap(float(softcap))
    options: dict[str, Any] = {"mask": mask, "score_mod": change, "sink": s_aux, "scale": scaling}
    out = attention_cached(query, key, value, lengths, **options)
    return out.transpose(1, 2).contiguous()


def _refuse_missing_queries(queries: int, keys: int) -> NoReturn:
    """Refuse layers without a mask that have more queries than keys.

    `attention_mask` leaves out no mask of more keys than queries, so that the model left out
    queries afterwards, as the layers of Gemma 4 that share keys do.
    """
    raise ArgumentError(
        f"attention_mask: got None with {queries} queries and {keys} keys, of which each query "
        "should see no later ones; expected a mask, because nothing tells which keys are "
        "later. Pass a bool mask of shape (B, 1, Lq, Lk), or is_causal=False."
    )


def _chosen(indices: torch.Tensor, mask: Any, queries: int, keys: int) -> torch.Tensor:
    """Return a mask that also hides the keys that are not chosen."""
    tensors.check({"indices": indices})
    if indices.ndim != 3 or indices.shape[1] != queries or indices.is_floating_point():
        raise ArgumentError(
            f"indices: got shape {tuple(indices.shape)}, {indices.dtype}; expected integers of "
            f"shape (B, {queries}, n), the keys of each query. {EAGER}"
        )
    hidden = torch.ones(len(indices), queries, keys, dtype=torch.bool, device=indices.device)
    hidden = hidden.scatter(-1, indices.long(), False).unsqueeze(1)
    if mask is None:
        return ~hidden
    if not isinstance(mask, torch.Tensor):
        return torch.ones_like(hidden).tril(keys - queries) & ~hidden
    if mask.dtype is torch.bool:
        return mask & ~hidden
    chosen: torch.Tensor = mask.masked_fill(hidden, float("-inf"))
    return chosen


# What transformers and its models pass to every layer, and what changes no attention here: a window
# is part of the mask, and so are sequences that lie one after the other, by their positions.
_HARMLESS = frozenset({
    "cache_position",
    "deterministic",
    "input_ids",
    "inputs_embeds",
    "labels",
    "logits_indices",
    "logits_processor_args",
    "logits_to_keep",
    "max_length_k",
    "max_length_q",
    "mm_token_type_ids",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_ids",
    "read_index",
    "return_dict",
    "seq_idx",
    "sliding_window",
    "token_type_ids",
    "use_cache",
    "write_index",
})  # fmt: skip


def _refuse_unknown(options: dict[str, Any], mask: torch.Tensor | None) -> None:
    """Refuse arguments of a layer that may change its result."""
    for name, value in options.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        if name == "output_attentions":
            raise ArgumentError(
                "output_attentions: got True; expected False, because weights are never stored. "
                f"{EAGER}"
            )
        if name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            if mask is not None or len(value) <= 2:  # one sequence, or the mask has them all
                continue
            raise ArgumentError(
                f"{name}: got {len(value) - 1} sequences without a mask; expected a mask that "
                "separates them. Pass the model position_ids that begin at 0 in each sequence."
            )
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ArgumentError(
            f"{name}: got {type(value).__name__}{shape}; expected None, because this argument of "
            f"the model may change its attention, and nothing here takes it. {EAGER}"
        )
