"""flash_attn 4's functions, PyTorch's varlen_attn, and the hook for its flash attention."""

from __future__ import annotations

import itertools

import pytest

from cupyflash import ArgumentError, masks, scores

torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402 (after the skip)

from cupyflash.torch import (  # noqa: E402
    attention,
    cute,
    implementation,
    register_flash_attention,
    varlen_attn,
)


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def formula(q, k, v, scale=None, seen=None, cap=0.0, sink=None, change=None):
    """Out and lse of one sequence, (L, H, D), by the formula."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap:
        s = cap * torch.tanh(s / cap)
    if change is not None:
        s = change(s)
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
    if sink is not None:
        s = torch.cat([s, sink.view(-1, 1, 1).expand(*s.shape[:2], 1)], -1)
    lse = s.logsumexp(-1)
    weights = (s - lse[..., None]).exp()[..., : k.shape[1]]
    return (weights @ v).transpose(0, 1), lse


def agree(ours, theirs, tensors):
    """Compare (out, lse) and the gradients of both."""
    found = []
    for function in ours, theirs:
        out, lse = function(*[x.requires_grad_() for x in tensors])
        loss = out.square().sum() + lse.sin().sum()
        found.append([out, lse, *torch.autograd.grad(loss, tensors)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


DIAGONAL = torch.ones(5, 7, dtype=torch.bool).tril(2)
WINDOW = DIAGONAL.triu(-1)
SINK = draw(4)
CASES = {
    "plain": ({}, {}),
    "scale": ({"softmax_scale": 0.3, "num_splits": 3, "pack_gqa": True}, {"scale": 0.3}),
    "causal": ({"causal": True, "window_size": (None, None)}, {"seen": DIAGONAL}),
    "window": ({"window_size": (3, 0)}, {"seen": WINDOW}),
    "causal window": ({"causal": True, "window_size": (3, 2)}, {"seen": WINDOW}),
    "negative": ({"window_size": (-1, -1)}, {}),
    "softcap": ({"softcap": 0.7}, {"cap": 0.7}),
    "sink": ({"learnable_sink": SINK}, {"sink": SINK}),
    "score": ({"score_mod": scores.softcap(0.7)}, {"cap": 0.7}),
    "mask": ({"mask_mod": masks.window(3, 0)}, {"seen": WINDOW}),
}


@pytest.mark.parametrize("name", CASES)
def test_flash_attn_4(name):
    given, wanted = CASES[name]
    tensors = draw(1, 5, 4, 8), draw(1, 7, 2, 8), draw(1, 7, 2, 6)

    def one(*x):
        out, lse = formula(*(each[0] for each in x), **wanted)
        return out[None], lse[None]

    agree(lambda *x: cute.flash_attn_func(*x, **given), one, tensors)


def test_flash_attn_4_with_queries_of_the_values():
    q, k, v, qv = draw(1, 5, 4, 8), draw(1, 7, 2, 8), draw(1, 7, 2, 6), draw(1, 5, 4, 6)

    def one(q, k, v, qv):
        out, lse = formula(torch.cat([q, qv], -1)[0], torch.cat([k, v], -1)[0], v[0])
        return out[None], lse[None]

    agree(lambda q, k, v, qv: cute.flash_attn_func(q, k, v, qv=qv), one, (q, k, v, qv))


STARTS_Q, STARTS_K = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 3, 8], [0, 4, 6, 11]))


def each_sequence(q, k, v, seen=lambda lq, lk: torch.ones(lq, lk).tril(lk - lq).bool(), **options):
    made = []
    for n in range(len(STARTS_Q) - 1):
        of_q, of_k = (slice(int(x[n]), int(x[n + 1])) for x in (STARTS_Q, STARTS_K))
        rows = q[of_q], k[of_k], v[of_k]
        made.append(formula(*rows, seen=seen(len(rows[0]), len(rows[1])), **options))
    return torch.cat([out for out, _ in made]), torch.cat([lse for _, lse in made], -1)


def packed():
    return draw(8, 4, 8), draw(11, 2, 8), draw(11, 2, 6)


def test_flash_attn_4_of_packed_sequences():
    given = {"cu_seqlens_q": STARTS_Q, "cu_seqlens_k": STARTS_K, "causal": True}
    given |= {"max_seqlen_q": 5, "max_seqlen_k": 5, "learnable_sink": SINK}
    agree(
        lambda *x: cute.flash_attn_varlen_func(*x, **given),
        lambda *x: each_sequence(*x, sink=SINK),
        packed(),
    )
    dense = draw(2, 5, 4, 8)
    same = cute.flash_attn_varlen_func(dense, dense, dense)[0]
    assert torch.equal(same, cute.flash_attn_func(dense, dense, dense)[0])


def in_pages(k, v, size=2):
    """Rows of STARTS_K in pages, and the table."""
    pages = [draw(9, size, *x.shape[1:], seed=5) for x in (k, v)]
    table, free = torch.full((3, 3), -1, dtype=torch.int32), iter(torch.randperm(9).tolist())
    for b, (start, end) in enumerate(itertools.pairwise(STARTS_K)):
        for n, at in enumerate(range(int(start), int(end), size)):
            table[b, n] = page = next(free)
            rows = slice(at, min(at + size, int(end)))
            for held, x in zip(pages, (k, v), strict=True):
                held[page, : rows.stop - rows.start] = x[rows]
    return pages, table


def test_pages_by_both_names():
    q, k, v = packed()
    (pages_k, pages_v), table = in_pages(k, v)
    lengths = STARTS_K.diff()
    wanted = each_sequence(q, k, v)
    ours = cute.flash_attn_varlen_func(
        q, pages_k, pages_v, cu_seqlens_q=STARTS_Q, seqused_k=lengths, page_table=table, causal=True
    )
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    options = {"window_size": (-1, 0), "enable_gqa": True, "return_aux": Lse()}
    options |= {"seqused_k": lengths, "block_table": table, "num_splits": 1}
    ours = varlen_attn(q, pages_k, pages_v, STARTS_Q, None, 5, 5, **options)
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)
    cache = torch.stack([torch.nn.functional.pad(k[:4], (0, 0, 0, 0, 0, 3))] * 2)
    one = cute.flash_attn_varlen_func(
        draw(2, 1, 4, 8), cache, cache, seqused_k=torch.tensor([4, 2], dtype=torch.int32),
        learnable_sink=SINK,
    )  # fmt: skip
    rows = draw(2, 1, 4, 8)
    for b, n in enumerate((4, 2)):
        out, lse = formula(rows[b], k[:n], k[:n], sink=SINK)
        torch.testing.assert_close((one[0][b], one[1][b]), (out, lse), rtol=1e-12, atol=1e-12)


class Lse:
    """What PyTorch's AuxRequest is, which older versions lack."""

    lse = True


def test_varlen_attn():
    options = {"enable_gqa": True, "window_size": (-1, 0), "return_aux": Lse()}
    agree(lambda *x: varlen_attn(*x, STARTS_Q, STARTS_K, 5, 5, **options), each_sequence, packed())
    alone = varlen_attn(*packed(), STARTS_Q, STARTS_K, 5, 5, enable_gqa=True, window_size=(-1, 0))
    torch.testing.assert_close(alone, each_sequence(*packed())[0], rtol=1e-12, atol=1e-12)


X = draw(1, 4, 2, 8)
ROWS = X[0]
STARTS = torch.tensor([0, 4], dtype=torch.int32)
CHOSEN = torch.tensor([[[0, 1], [1, 2], [2, 3], [0, 3]]])
ALL = ("gather_kv_indices", "score_mod_bwd", "aux_tensors", "aux_scalars", "block_sparse_tensors")


@pytest.mark.parametrize(
    ("name", "function"),
    [(name, cute.flash_attn_func) for name in (*ALL, "block_sparse_tensors_bwd")]
    + [(name, cute.flash_attn_varlen_func) for name in (*ALL, "seqused_q")]
    + [(name, cute.flash_attn_func) for name in ("score_mod", "mask_mod")],
)
def test_what_has_no_support_is_refused_by_name(name, function):
    with pytest.raises((ArgumentError, TypeError), match=f"^{name}: got .*expected"):
        function(X, X, X, **{name: lambda *_: None})


def paged(**options):
    table = torch.zeros(1, 1, dtype=torch.int32)
    return cute.flash_attn_varlen_func(ROWS, X, X, cu_seqlens_q=STARTS, page_table=table, **options)


REMEDIES = {
    "window_size: got .*by None": (
        lambda: cute.flash_attn_func(X, X, X, window_size=(-1, 0)),
        lambda: cute.flash_attn_func(X, X, X, window_size=(None, 0)),
    ),
    "mask_mod: got it with causal": (
        lambda: cute.flash_attn_func(X, X, X, causal=True, mask_mod=masks.window(1, 0)),
        lambda: cute.flash_attn_func(X, X, X, mask_mod=masks.causal() & masks.window(1, 0)),
    ),
    "softcap: got 2.0 with": (
        lambda: cute.flash_attn_func(X, X, X, softcap=2.0, score_mod=scores.softcap(1.0)),
        lambda: cute.flash_attn_func(X, X, X, score_mod=[scores.softcap(2.0), scores.softcap(1.0)]),
    ),
    "gather_kv_indices: .*scatter": (
        lambda: cute.flash_attn_func(X, X, X, gather_kv_indices=CHOSEN),
        lambda: attention(
            *[X.transpose(1, 2)] * 3,
            mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool).scatter(
                -1, CHOSEN[:, None].long(), True
            ),
        ),
    ),
    "cu_seqlens_q, cu_seqlens_k: got one": (
        lambda: cute.flash_attn_varlen_func(X, ROWS, ROWS, cu_seqlens_k=STARTS),
        lambda: cute.flash_attn_varlen_func(
            X.flatten(0, 1), ROWS, ROWS, cu_seqlens_q=torch.arange(2) * 4, cu_seqlens_k=STARTS
        ),
    ),
    "page_table: got it without seqused_k": (paged, lambda: paged(seqused_k=STARTS.diff())),
    "qv: got it with keys in a cache": (
        lambda: paged(seqused_k=STARTS.diff(), qv=ROWS),
        lambda: paged(seqused_k=STARTS.diff()),
    ),
    "seqused_k: got it with cu_seqlens_k": (
        lambda: cute.flash_attn_varlen_func(
            ROWS, ROWS, ROWS, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS, seqused_k=STARTS.diff()
        ),
        lambda: cute.flash_attn_varlen_func(
            ROWS, ROWS, ROWS, cu_seqlens_q=STARTS, cu_seqlens_k=STARTS
        ),
    ),
    "qv: got shape": (
        lambda: cute.flash_attn_func(X, X, X, qv=X[..., :3]),
        lambda: cute.flash_attn_func(X, X, X, qv=X),
    ),
    "q: got shape": (
        lambda: cute.flash_attn_func(ROWS, X, X),
        lambda: cute.flash_attn_func(X, X, X),
    ),
    "query, key: got 2 and 1 heads.*enable_gqa=True": (
        lambda: varlen_attn(ROWS, ROWS[:, :1], ROWS[:, :1], STARTS, STARTS, 4, 4),
        lambda: varlen_attn(ROWS, ROWS[:, :1], ROWS[:, :1], STARTS, STARTS, 4, 4, enable_gqa=True),
    ),
    "cu_seq_k: got None.*cu_seq_k=cu_seq_q": (
        lambda: varlen_attn(ROWS, ROWS, ROWS, STARTS, None, 4, 4),
        lambda: varlen_attn(ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4),
    ),
    "block_table: got it without": (
        lambda: varlen_attn(ROWS, X, X, STARTS, STARTS, 4, 4, block_table=STARTS[:1, None]),
        lambda: varlen_attn(
            ROWS, X, X, STARTS, STARTS, 4, 4, block_table=STARTS[:1, None], seqused_k=STARTS.diff()
        ),
    ),
    "seqused_k: got it without a block_table": (
        lambda: varlen_attn(ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4, seqused_k=STARTS.diff()),
        lambda: varlen_attn(ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4),
    ),
    "key: got list": (
        lambda: varlen_attn(ROWS, [1.0], ROWS, STARTS, STARTS, 4, 4),
        lambda: varlen_attn(ROWS, ROWS, ROWS, STARTS, STARTS, 4, 4),
    ),
}


@pytest.mark.parametrize("message", REMEDIES)
def test_errors_have_a_remedy(message):
    wrong, remedy = REMEDIES[message]
    with pytest.raises((ArgumentError, TypeError), match="^" + message):
        wrong()
    remedy()


needs_hook = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"),
    reason="needs PyTorch 2.11: its hook for implementations",
)


@pytest.fixture
def called(monkeypatch):
    """Activate ours, with a list of the functions that PyTorch calls."""
    names = []

    def counted(name, function):
        def call(*args, **options):
            names.append(name)
            return function(*args, **options)

        return call

    for name, function in implementation._FUNCTIONS.items():
        monkeypatch.setitem(implementation._FUNCTIONS, name, counted(name, function))
    register_flash_attention()
    torch.nn.attention.activate_flash_attention_impl("cupyflash")
    yield names
    torch.nn.attention.restore_flash_attention_impl(_raise_warn=False)


SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril(1)},
    "floats": {"attn_mask": draw(7, 7)},
    "scale": {"scale": 0.3},
}


@needs_hook
def test_pytorch_computes_by_the_hook(called):
    tensors = [draw(2, 4, 7, 8, seed=n).requires_grad_() for n in range(3)]

    def step(options):
        out = scaled_dot_product_attention(*tensors, **options)
        return out, *torch.autograd.grad(out.square().sum(), tensors)

    ours = [step(options) for options in SDPA.values()]
    both = "_scaled_dot_product_flash_attention_for_cpu", "_for_cpu_backward"
    assert called == [both[0], both[0] + "_backward"] * len(SDPA)
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager")
    assert torch.equal(compiled(*tensors, is_causal=True), ours[1][0])
    assert torch.nn.attention.current_flash_attention_impl() == "cupyflash"
    torch.nn.attention.restore_flash_attention_impl()
    called.clear()
    for options, found in zip(SDPA.values(), ours, strict=True):
        torch.testing.assert_close(found, step(options), rtol=1e-12, atol=1e-12)
    assert not called


@needs_hook
def test_pytorchs_varlen_attn_by_the_hook(called):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="needs PyTorch 2.11")
    q, k, v = (draw(11, 4, 8, seed=n, dtype=torch.float32) for n in range(3))
    tensors = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for function in varlen.varlen_attn, varlen_attn:
        out = function(*tensors, STARTS_K, STARTS_K, 5, 5, window_size=(3, 0))
        found.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert called == ["_flash_attention_forward", "_flash_attention_backward"]
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@needs_hook
@pytest.mark.parametrize("causal", [False, True])
def test_what_a_gpu_would_compute_by_the_hook(called, causal):
    """The functions of GPUs, run on the CPU, with dropout and its gradient."""
    x = [draw(1, 2, 6, 8, seed=n) for n in range(4)]
    aten = torch.ops.aten
    torch.manual_seed(3)
    out, lse, cu_q, cu_k, max_q, max_k, rng, rest, _ = aten._scaled_dot_product_flash_attention(
        *x[:3], 0.4, causal
    )
    grads = aten._scaled_dot_product_flash_attention_backward(
        x[3], *x[:3], out, lse, cu_q, cu_k, max_q, max_k, 0.4, causal, rng, rest
    )
    leaves = [each.clone().requires_grad_() for each in x[:3]]
    mask = masks.causal(0) if causal else None
    wanted = attention(*leaves, dropout=0.4, seed=int(rng.view(torch.int64)[0]), mask=mask)
    assert torch.equal(out, wanted)
    for a, b in zip(grads, torch.autograd.grad(wanted, leaves, x[3]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert len(called) == 2


@needs_hook
def test_what_the_hook_refuses(called):
    with pytest.raises(ArgumentError, match=r"^name: got 'FA4'"):
        register_flash_attention("FA4")
    with pytest.raises(ArgumentError, match=r"^return_debug_mask"):
        torch.ops.aten._scaled_dot_product_flash_attention(X, X, X, 0.0, False, True)
    with pytest.raises(ArgumentError, match=r"^dropout_p: got 0.5"):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(X, X, X, 0.5)
    rest = STARTS, STARTS, 4, 4, 0.0, False, False
    with pytest.raises(ArgumentError, match=r"^seqused_k, block_table"):
        torch.ops.aten._flash_attention_forward(ROWS, X, X, *rest, seqused_k=STARTS.diff())
    assert called
