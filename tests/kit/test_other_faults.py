"""`verify` finds faults of all functions but attention and its gradient, which have a catalogue."""

from __future__ import annotations

import numpy as np
import pytest

import cupyflash
from cupyflash import testing


def neighbours(q, k, v, offsets_q, offsets_k, **options):
    """Packed sequences whose queries see the sequence before theirs."""
    return cupyflash.attention_varlen(q, k, v, offsets_q, np.roll(offsets_k, 1), **options)


def whole(q, k, v, offsets_q, offsets_k, **options):
    """Packed sequences taken for one."""
    ends = [[0, x[-1]] for x in (offsets_q, offsets_k)]
    return cupyflash.attention_varlen(q, k, v, *ends, **options)


def mean_of(parts):
    """Parts joined as if they weighed the same."""
    return sum(x[0] for x in parts) / len(parts), cupyflash.combine(parts)[1]


def divided_last(parts):
    """Parts added up before they are divided by the sum of their weights."""
    weights = [np.exp(x[1])[..., None] for x in parts]
    with np.errstate(over="ignore"):
        numerator = sum(w * x[0] for w, x in zip(weights, parts, strict=True))
    return numerator / sum(weights), cupyflash.combine(parts)[1]


def elsewhere(q, k, v, *, out=None, lse_out=None, **options):
    """Outputs that are returned and not written where they were wanted."""
    return cupyflash.attention(q, k, v, **options)


def no_gradients_out(*arguments, grads_out=None, **options):
    return cupyflash.attention_backward(*arguments, **options)


def half_gradients(*arguments, **options):
    return cupyflash.attention_varlen_backward(*arguments, **options)._replace(dv=None)


PACKED = {"varlen": cupyflash.attention_varlen, "varlen_backward": half_gradients}


def cached(wrong):
    """Attention over a cache whose arguments are changed, or whose results."""

    def function(q, k, v, lengths, **options):
        with np.errstate(all="ignore"):
            return wrong(q, k, v, lengths, options)

    return function


def nudged(result, by=1e-6):
    return result[0] * np.asarray(1 + by, result[0].dtype), result[1]


def all_room(q, k, v, lengths, options):
    room = k.shape[2] if options.get("table") is None else lengths
    return cupyflash.attention_cached(q, k, v, room, **options)


def other_pages(q, k, v, lengths, options):
    if options.get("table") is not None:
        options = options | {"table": options["table"].clip(0, len(k) - 1)[:, ::-1]}
    return cupyflash.attention_cached(q, k, v, lengths, **options)


def all_rows_count(q, k, v, lengths, options):
    return nudged(cupyflash.attention_cached(q, k, v, lengths, **options), 0 * (k.sum() + v.sum()))


def all_entries_count(q, k, v, lengths, options):
    return nudged(cupyflash.attention_cached(q, k, v, lengths, **options), (len(q) - 1) * 1e-6)


def all_queries_count(q, k, v, lengths, options):
    result = cupyflash.attention_cached(q, k, v, lengths, **options)
    return nudged(result, (q.shape[-2] - 1) * 1e-6)


def first_queries(q, k, v, lengths, options):
    offsets = options.get("offsets_q")
    if offsets is not None:
        options = options | {"offsets_q": [0, *offsets[2:], offsets[-1]]}
    return cupyflash.attention_cached(q, k, v, lengths, **options)


def no_mask(q, k, v, lengths, options):
    return cupyflash.attention_cached(q, k, v, lengths, **options | {"mask": None})


def last_columns(q, k, v, lengths, options):
    v = k[..., -v.shape[-1] :] if np.shares_memory(k, v) else v
    return cupyflash.attention_cached(q, k, v, lengths, **options)


def one_scale(q, k, v, lengths, options):
    if "v_scale" in options:
        v_scale = options["v_scale"]
        options = options | {"v_scale": np.broadcast_to(v_scale[..., :1, :], v_scale.shape)}
    return cupyflash.attention_cached(q, k, v, lengths, **options)


def all_scales_count(q, k, v, lengths, options):
    result = cupyflash.attention_cached(q, k, v, lengths, **options)
    return nudged(result, 0 * options["k_scale"].sum())


def keys_of_e5m2(q, k, v, **options):
    if options.get("qkv_dtype") == "float8_e4m3fn":
        options["qkv_dtype"] = "float8_e5m2"
    return cupyflash.attention(q, k, v, **options)


def written(wrong):
    """Rows that are appended with other arguments."""

    def function(k_new, v_new, k, v, lengths, **options):
        return cupyflash.append(*wrong([k_new, v_new, k, v, lengths], options), **options)

    return function


def one_early(arguments, options):
    return [*arguments[:4], np.maximum(arguments[4] - 1, arguments[0].shape[2])]


def one_more(arguments, options):
    k_new, _, k, _, lengths = arguments
    before = lengths[0] - k_new.shape[2] - 1
    if options.get("table") is None and before >= 0:
        k[0, :, before] = 0
    return arguments


def other_entry(arguments, options):
    if options.get("table") is not None:
        arguments[2][options["table"][0, 0], 0, 0] = 0
    return arguments


def a_little_larger(arguments, options):
    return [arguments[0] * np.float32(1.01), *arguments[1:]]


def one_further(k_new, v_new, k, v, lengths, *, rotary=None, **options):
    if rotary is not None:
        at = np.asarray(lengths)[:, None] - k_new.shape[2] + np.arange(k_new.shape[2])
        at = options.pop("positions", at)
        options["positions"] = np.minimum(at + 1, len(rotary.cos) - 1)
    return cupyflash.append(k_new, v_new, k, v, lengths, rotary=rotary, **options)


def rotated_other_way(x, positions, rotary, inverse=False):
    return cupyflash.rope(x, positions, rotary, inverse=not inverse)


def lengthened(x, positions, rotary, inverse=False):
    return cupyflash.rope(x, positions, rotary, inverse=inverse) * x.dtype.type(1.001)


def by_squares(x, positions, rotary, inverse=False):
    return cupyflash.rope(x, positions**2 // len(rotary.cos), rotary, inverse=inverse)


def never_back(x, positions, rotary, inverse=False):
    return cupyflash.rope(x, positions, rotary)


@pytest.mark.parametrize(
    ("name", "functions"),
    [
        ("packed_within_bound", {"varlen": whole}),
        ("sequences_apart", {"varlen": whole}),
        ("neighbours_change_nothing", {"varlen": whole}),
        ("packed_within_bound", {"varlen": neighbours}),
        ("packed_gradients_within_bound", PACKED),
        ("combined_parts", {"combine": mean_of}),
        ("combined_parts_of_any_size", {"combine": divided_last}),
        ("given_outputs_are_written", {"attention_fn": elsewhere}),
        ("given_outputs_are_written", {"backward_fn": no_gradients_out}),
        ("cached_within_bound", {"cached": cached(all_room)}),
        ("pages_are_contiguous", {"cached": cached(other_pages)}),
        ("unused_parts_of_a_cache_change_nothing", {"cached": cached(all_rows_count)}),
        ("entries_of_a_cache_apart", {"cached": cached(all_entries_count)}),
        ("drafts_are_steps", {"cached": cached(all_queries_count)}),
        ("packed_queries_of_a_cache", {"cached": cached(first_queries)}),
        ("windows_drop_pages", {"cached": cached(all_rows_count)}),
        ("trees_are_dense_masks", {"cached": cached(no_mask)}),
        ("values_in_keys_are_copies", {"cached": cached(last_columns)}),
        ("appended_rows_are_written", {"append": written(one_early)}),
        ("packed_rows_are_written", {"append": written(other_entry)}),
        ("appended_in_chunks", {"append": written(one_more)}),
        ("appended_rows_are_rotated", {"append": one_further}),
        ("codes_of_a_cache_within_bound", {"cached": cached(one_scale)}),
        ("unused_codes_change_nothing", {"cached": cached(all_scales_count)}),
        ("appended_codes_are_those_of_quantize", {"append": written(a_little_larger)}),
        ("float8_within_bound", {"attention_fn": keys_of_e5m2}),
        ("rotated_within_bound", {"rope": rotated_other_way}),
        ("rotations_keep_norms", {"rope": lengthened}),
        ("rotated_products_are_relative", {"rope": by_squares}),
        ("rotated_back", {"rope": never_back}),
    ],
)
def test_faults_of_the_other_functions_are_found(name, functions):
    ours = {"attention_fn": cupyflash.attention, "backward_fn": cupyflash.attention_backward}
    ours |= {"append": cupyflash.append, "rope": cupyflash.rope}
    options = {"only": name, "dtypes": ["float32"], "examples": 20, "stop": True}
    assert testing.verify(**ours | functions, **options).failures
