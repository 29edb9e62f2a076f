"""Gradients of learned look-ups: against the specification, by differences, what they promise."""

import tracemalloc

import numpy as np
import pytest
from halves import mostly_thorough
from hypothesis import given
from learned import lookup_ratios
from placement import same_bits
from strategies import BFLOAT16, DTYPES, problems

import cupyflash
from cupyflash import ArgumentError, ArgumentTypeError, expr, lookup, masks, scores
from cupyflash.reference.cpu import backward_lookup_call
from cupyflash.reference.spec import naive, naive_lookups

OPTIONS = {"mask": masks.window(9, 5), "dropout": 0.2, "seed": 5}


def drawn(seed, dtype=np.float64, len_q=21, len_k=26):
    rng = np.random.default_rng(seed)
    shapes = (2, 4, len_q, 6), (2, 4, len_q, 8), (2, 2, len_k, 8), (1, 2, len_k, 6)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def arrays_of(seed=0, dtype=np.float64, len_q=21):
    rng = np.random.default_rng([seed, 1])
    shapes = {"cap": (), "slopes": (2, 4), "table": (4, 7), "gate": (2, len_q), "pairs": (3, 3)}
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
    made["cap"] = np.array(2.0, dtype)
    return made


def changes_of(arrays):
    """Look-ups by name, and score changes that read them."""
    t = {name: lookup(np.asarray(array), learned=True) for name, array in arrays.items()}
    place = lookup(np.arange(26) * 5 % 3)

    def change(s, b, h, i, j):
        return s * t["gate"][b, i] + t["pairs"][place[i], place[j]]

    return t, [
        scores.alibi(t["slopes"]), scores.softcap(t["cap"]), scores.relative_bias(t["table"]),
        scores.score(change),
    ]  # fmt: skip


def gradients(x, **options):
    do, q, k, v = x
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **OPTIONS, **given_without(options))
    return cupyflash.attention_backward(do, q, k, v, out, lse, **OPTIONS, **options)


def given_without(options):
    return {"score_mod": options["score_mod"]}


@mostly_thorough(
    "dtype", DTYPES, quick=[BFLOAT16, np.dtype(np.float32)], why="the same kernel", ids=str
)
def test_gradients_are_within_the_bound(dtype):
    @given(problems(dtype))
    def check(problem):
        ratios = lookup_ratios(problem)
        assert max(ratios.values(), default=0) <= 1, list(ratios.values())

    check()


def test_the_specification_has_the_differences_of_its_results():
    (do, q, k, v), arrays = drawn(0), arrays_of()
    dlse = np.random.default_rng(1).standard_normal(do.shape[:-1])

    def loss(arrays):
        changes = changes_of(arrays)[1]
        made = naive.attention(q, k, v, score_mod=changes, **OPTIONS, dtype=np.longdouble)
        return (made.out * do).sum() + (made.lse * dlse).sum()

    tables, changes = changes_of(arrays)
    made = naive_lookups.attention_lookup_gradients(
        do, q, k, v, dlse=dlse, score_mod=changes, **OPTIONS
    )
    rng, step = np.random.default_rng(2), 1e-6
    for name, array in arrays.items():
        along = rng.standard_normal(array.shape)
        ends = [loss(arrays | {name: array + e * along}) for e in (step, -step)]
        expected = (ends[0] - ends[1]) / (2 * step)
        assert abs(expected - (made[tables[name]] * along).sum()) < 1e-8, name


def test_packed_sequences_have_those_of_the_specification():
    rng, offsets = np.random.default_rng(3), [0, 5, 5, 30]
    q, k, v, do = (rng.standard_normal((2, 30, 8)) for _ in range(4))
    tables = [lookup(rng.standard_normal(shape), learned=True) for shape in ((3, 2), (5,), (30,))]
    slopes, distances, gate = tables
    changes = [
        scores.alibi(slopes), scores.relative_bias(distances),
        scores.score(lambda s, b, h, i, j: s * gate[i]),
    ]  # fmt: skip
    how = {"mask": masks.causal(), "score_mod": changes}
    out, vjp = cupyflash.attention_varlen_vjp(q, k, v, offsets, offsets, **how)
    made = vjp(do).dlookups
    exact = naive_lookups.attention_varlen_lookup_gradients(do, q, k, v, offsets, offsets, **how)
    assert set(made) == set(tables)
    for table in tables:
        assert np.abs(made[table] - exact[table]).max() < 1e-13
    assert out.shape == do.shape


def test_bits_depend_on_no_thread_and_no_turn(monkeypatch):
    x, arrays = drawn(4, np.float32), arrays_of(4, np.float32)
    made = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("CUPYFLASH_NUM_THREADS", threads)
        monkeypatch.setattr(backward_lookup_call, "_SECONDS_OF_TURN", 1e-9 if threads == "2" else 1)
        tables, changes = changes_of(arrays)
        found = gradients(x, score_mod=changes).dlookups
        made.append([found[tables[name]] for name in arrays])
    for others in made[1:]:
        assert all(same_bits(a, b) for a, b in zip(made[0], others, strict=True))


def test_targets_are_written_and_everything_else_stays():
    x, arrays = drawn(5), arrays_of(5)
    tables, changes = changes_of(arrays)
    fresh = gradients(x, score_mod=changes)
    wide = np.full((4, 14), 7.0)
    targets = cupyflash.Gradients(None, None, None, dlookups={tables["table"]: wide[:, ::2]})
    made = gradients(x, score_mod=changes, grads_out=targets)
    assert made.dlookups[tables["table"]] is targets.dlookups[tables["table"]]
    assert (wide[:, 1::2] == 7).all()
    for name in arrays:
        assert same_bits(made.dlookups[tables[name]], fresh.dlookups[tables[name]])
    plain = gradients(x, score_mod=changes_of(arrays)[1])
    assert all(same_bits(a, b) for a, b in zip(fresh[:3], plain[:3], strict=True))
    assert len(made) == 5  # as for any other call


def test_each_call_gives_the_look_ups_of_its_own_score_changes():
    x, arrays = drawn(6), arrays_of(6)
    for _ in range(3):  # like calls are recognised from the second one on
        tables, changes = changes_of(arrays)
        assert set(gradients(x, score_mod=changes).dlookups) == set(tables.values())
        unlearned = [scores.alibi(arrays["slopes"]), *changes[1:]]
        assert tables["slopes"] not in gradients(x, score_mod=unlearned).dlookups
    assert not gradients(x, score_mod=scores.alibi(arrays["slopes"])).dlookups


def test_a_look_up_that_is_read_twice_has_the_sum():
    x = drawn(7)
    table = lookup(np.array([0.5, 0.25]), learned=True)
    twice = scores.score(lambda s, b, h, i, j: s * table[h % 2] + table[j % 2] * table[h % 2])
    made = gradients(x, score_mod=twice).dlookups[table]
    exact = naive_lookups.attention_lookup_gradients(*x, score_mod=twice, **OPTIONS)[table]
    assert np.abs(made - exact).max() < 1e-13


def test_a_call_without_pairs_has_zeros():
    table = lookup(np.ones(4), learned=True)
    for len_q, len_k in ((0, 5), (5, 0)):
        x = drawn(8, len_q=len_q, len_k=len_k)
        made = gradients(x, score_mod=scores.alibi(table)).dlookups[table]
        assert (made == 0).all()
    hidden = drawn(8)
    hidden[1][...] = np.nan
    do, q, k, v = hidden
    how = {"mask": np.zeros((21, 26), bool), "score_mod": scores.alibi(table)}
    out, lse = cupyflash.attention(q, k, v, return_lse=True, **how)
    made = cupyflash.attention_backward(do, q, k, v, out, lse, **how).dlookups[table]
    assert (made == 0).all()


def test_memory_grows_with_the_length():
    def peak(length):
        rng = np.random.default_rng(9)
        q, k, v, do = (rng.standard_normal((1, 2, length, 8), dtype=np.float32) for _ in range(4))
        table = lookup(np.ones(33, np.float32), learned=True)
        out, vjp = cupyflash.attention_vjp(q, k, v, score_mod=scores.relative_bias(table))
        vjp(do)
        tracemalloc.start()
        vjp(do)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most - out.size

    assert peak(1024) < 4 * peak(256) + 2**20


def test_gradients_are_converted_with_their_look_ups():
    x = drawn(10)
    table = lookup(np.ones(4), learned=True)
    made = gradients(x, score_mod=scores.alibi(table))
    again = cupyflash.convert(made, like=x[0])
    assert again.dlookups[table] is made.dlookups[table]


def test_what_is_not_served_is_refused():
    (do, q, k, v), table = drawn(11), lookup(np.ones(4), learned=True)
    alibi = scores.alibi(table)
    _, vjp = cupyflash.streamed.attention_vjp(q, k, v, score_mod=alibi)
    with pytest.raises(ArgumentTypeError, match=r"shape \(4,\).*by chunks.*pass that as bias"):
        vjp(do)
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=alibi)
    with pytest.raises(ArgumentTypeError, match="tangents of gradients"):
        vjp.jvp(do, q)
    at_score = scores.score(lambda s, b, h, i, j: s + table[expr.clip(expr.floor(s), 0, 3)])
    _, vjp = cupyflash.attention_vjp(q, k, v, score_mod=at_score)
    with pytest.raises(ArgumentError, match="depends on the score"):
        vjp(do)
    hides = masks.mask(lambda b, h, i, j: table[h] > 0)
    with pytest.raises(ArgumentError, match=r"mask: .*condition has no derivative"):
        cupyflash.attention(q, k, v, mask=hides)
    with pytest.raises(ArgumentTypeError, match=r"int64 with learned=True"):
        lookup(np.arange(3), learned=True)
    with pytest.raises(ArgumentTypeError, match="learned is 1"):
        lookup(np.ones(3), learned=1)
    with pytest.raises(ArgumentError, match=r"grads_out\.dlookups: .*no learned look-up"):
        gradients(drawn(11), score_mod=alibi, grads_out=cupyflash.Gradients(
            None, None, None, dlookups={lookup(np.ones(4), learned=True): np.ones(4)}
        ))  # fmt: skip
    with pytest.raises(ArgumentTypeError, match=r"grads_out\.dlookups: got list"):
        gradients(drawn(11), score_mod=alibi, grads_out=cupyflash.Gradients(
            None, None, None, dlookups=[np.ones(4)]
        ))  # fmt: skip
    for wrong in (np.ones(3), np.ones(4, np.float32), table.array):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="dlookups of look-up 0"):
            gradients(drawn(11), score_mod=alibi, grads_out=cupyflash.Gradients(
                None, None, None, dlookups={table: wrong}
            ))  # fmt: skip
