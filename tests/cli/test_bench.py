"""`cupyflash.bench`: what is counted, who is right, what is timed and what is told."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from halves import mostly_thorough

from cupyflash import bench, cached, quantize
from cupyflash.analysis import Problem, flops
from cupyflash.bench import measure, results, torch_peers
from cupyflash.bench.cases import SIZED, VARIANTS, hidden
from cupyflash.bench.codes import numbers_of
from cupyflash.bench.contenders import draw, options_of
from cupyflash.errors import ArgumentError
from cupyflash.problem.formats import FORMATS


class Clock(measure.Cpu):
    """A meter for which a call takes as long as it returns, and that writes down what it did."""

    def __init__(self):
        self.did = []

    def settle(self):
        self.did.append("settle")

    def release(self):
        self.did.append("release")

    def seconds(self, work):
        return work()

    def peak_memory(self, work):
        work()
        return 1000


class Quick(measure.Cpu):
    """Times like any other, and takes no pauses."""

    def settle(self):
        pass

    release = settle


class Says(bench.Contender):
    """Claims a result, and takes so many seconds in each run; an exception is raised."""

    def __init__(self, name, result, seconds=(1.0,)):
        self.name, self.what, self.result, self.times = name, "a test", result, list(seconds)
        self.released = False

    def prepare(self, meter, case, inputs):
        if isinstance(self.result, Exception):
            raise self.result

        def work():
            if isinstance(meter, Clock):
                meter.did.append(self.name)
            taken = self.times.pop(0) if len(self.times) > 1 else self.times[0]
            if isinstance(taken, Exception):
                raise taken
            return taken

        return bench.Job(work, lambda: None, lambda _: [self.result], meter.peak_memory)

    def release(self, meter):
        self.released = True


CASE = bench.made((1, 1, 1, 4, 4, 2), "float32", "full", None, "forward")
ONES = np.ones((2, 3), np.float32)


def run_case(*contenders, meter=None, **options):
    options = {"runs": 3, "seconds": 60.0, **options}
    return bench.run_case(meter or Clock(), CASE, contenders, **options)


SHAPES = [(1, 2, 2, 40, 40, 8), (2, 4, 2, 7, 33, 8), (1, 2, 1, 1, 20, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_pairs_are_those_that_attend(variant, shape):
    size = 5 if variant in SIZED else None
    case = bench.made(shape, "float32", variant, size, "forward")
    outside = hidden(case)
    mask = options_of(case).get("mask")
    if outside is None:
        assert mask is None
        outside = np.zeros((case.len_q, case.len_k), bool)
    else:
        np.testing.assert_array_equal(mask.to_array(1, 1, *outside.shape)[0, 0], ~outside)
    pairs = (~outside).sum()
    half = variant in ("causal", "alibi", "softcap") and case.len_q == case.len_k
    assert case.pairs == (40 * 40 / 2 if half else pairs)
    assert case.flops == 4 * 8 * case.pairs * case.batch * case.heads
    backward = bench.made(shape, "float32", variant, size, "backward")
    assert backward.flops == 2.5 * case.flops


def test_flops_of_full_attention_are_those_of_the_analysis():
    case = bench.made((2, 8, 8, 512, 512, 64), "float16", "full", None, "backward")
    assert case.flops == flops(Problem(512, 512, 64, batch=2, heads=8, backward=True))


def test_sizes_of_masks_grow_with_the_length():
    found = [
        bench.made((2, 16, 16, length, length, 128), "float16", name, None, "forward").size
        for length in (8192, 1024, 4)
        for name in ("window", "documents", "prefix", "alibi")
    ]
    assert found == [1024, 1000, 1024, 0, 128, 125, 128, 0, 1, 1, 1, 0]


def test_shapes_and_variants_are_read():
    assert bench.shape_of("2,8,1024,64") == (2, 8, 8, 1024, 1024, 64)
    assert bench.shape_of("(1, 32/8, 1/4096, 128)") == (1, 32, 8, 1, 4096, 128)
    assert bench.variant_of("window=512") == ("window", 512)
    for text in ("2,8,1024", "2,8,0,64", "2,-8,4,64", "a"):
        with pytest.raises(ArgumentError, match="shape"):
            bench.shape_of(text)
    for text in ("windows", "window=0", "causal=3", "window=x"):
        with pytest.raises(ArgumentError, match="variant"):
            bench.variant_of(text)
    with pytest.raises(ArgumentError, match="8 queries and 4 keys"):
        bench.made((1, 1, 1, 8, 4, 2), "float32", "causal", None, "forward")
    with pytest.raises(ArgumentError, match="multiple"):
        bench.made((1, 3, 2, 8, 8, 2), "float32", "full", None, "forward")


def test_suites_are_whole():
    for kind, suites in bench.SUITES.items():
        assert set(suites) == {"quick", "article", "peers", "variants", "decode", "fp8"}
        known = {c.name for c in bench.CONTENDERS if kind in c.kinds}
        for suite in suites.values():
            cases = list(suite.cases())
            assert cases
            assert len(set(cases)) == len(cases)
            assert set(suite.contenders) <= known
            assert suite.contenders[0] == "cupyflash"
    article = [case.shape for case in bench.SUITES["gpu"]["article"].cases()]
    assert article == [f"2,8,{n},64" for n in (512, 1024, 2048, 4096, 8192)]
    peers = list(bench.SUITES["gpu"]["peers"].cases())
    assert len(peers) == 3 * 6 * 2 * 2
    assert {case.batch * case.len_q for case in peers} == {16384}
    assert {case.heads * case.d for case in peers} == {2048}


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_standard_attention_agrees(variant, direction):
    """With shared key heads and fewer queries than keys; far closer than what tells wrong ones."""
    case = bench.made((2, 4, 2, 19, 50, 8), "float64", variant, 6 * (variant in SIZED), direction)
    row = bench.run_case(Quick(), case, [bench.Cupyflash(), bench.Standard()], runs=2, seconds=9.0)
    assert [x.status for x in row.results] == ["measured"] * 2, row
    assert row.results[1].difference < 1e-12
    for result in row.results:
        assert 0 < result.low <= result.seconds <= result.high
        assert result.runs == 2
    assert row.results[1].peak_bytes > case.score_bytes  # holds p


def test_data_are_random_and_the_same_for_everybody():
    case = bench.made((1, 4, 2, 30, 50, 16), "float16", "full", None, "forward")
    first, again = draw(measure.Cpu(), case), draw(measure.Cpu(), case)
    for x, y in zip(first, again, strict=True):
        assert x.dtype == np.float16
        assert 0.8 < x.astype(np.float64).std() < 1.2
        np.testing.assert_array_equal(x, y)
    assert [x.shape for x in first] == [(1, 4, 30, 16), *[(1, 2, 50, 16)] * 2, (1, 4, 30, 16)]
    assert not np.array_equal(first.k, first.v)


@pytest.mark.parametrize("result", [1.01 * ONES, np.nan * ONES, ONES[:1], 0 * ONES], ids=str)
def test_a_wrong_result_is_not_timed(result):
    meter = Clock()
    wrong = Says("b", result)
    row = run_case(Says("a", ONES), wrong, Says("c", ONES), meter=meter)
    assert [x.status for x in row.results] == ["measured", "WRONG", "measured"]
    assert row.results[1].seconds is None
    assert meter.did.count("b") == 1  # the one that was compared
    report = bench.Report("own shapes", "cpu", "", {}, "", (row,), {})
    assert report.wrong == [(CASE, row.results[1])]
    assert report.contenders == ["a", "c"]


def test_the_first_result_must_be_finite():
    row = run_case(Says("a", np.inf * ONES), Says("b", ONES), Says("c", ONES))
    assert [x.status for x in row.results] == ["WRONG", "measured", "measured"]


def test_who_refuses_is_told_with_the_reason():
    late = Says("late", ONES, [1.0, 1.0, 1.0, ValueError("tired\nof it")])
    contenders = [
        Says("small", MemoryError("no room")),
        Says("a", ONES),
        Says("picky", bench.RefusalError("no masks")),
        late,
    ]
    small, a, picky, late_result = run_case(*contenders).results
    assert small.reason == "it ran out of memory (no room)"
    assert picky.reason == "no masks"
    assert (late_result.status, late_result.reason) == ("refused", "ValueError: tired")
    assert (a.status, a.runs) == ("measured", 3)
    assert all(contender.released for contender in contenders)


def test_contenders_take_turns_and_another_one_begins_each_round():
    meter = Clock()
    times = [9.0, 9.0, 3.0, 1.0, 2.0]  # the check's run, the warm-up's, three that count
    row = run_case(Says("a", ONES, times), Says("b", ONES), meter=meter)
    assert meter.did.pop() == "release"
    order = [name for name in meter.did if name != "settle"]
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a", "a", "b"]
    assert meter.did.count("settle") == 8  # before each run but the two that are compared
    a = row.results[0]
    assert (a.low, a.seconds, a.high, a.runs, a.peak_bytes) == (1.5, 2.0, 2.5, 3, 1000)
    assert a.spread == 0.5
    assert row.factors("a", "b") == (0.5, 1.0)
    assert run_case(Says("a", ONES), seconds=1e-9).results[0].runs == 1


def test_standard_attention_is_refused_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(measure.Cpu, "free_memory", lambda _: 10**9)
    case = bench.made((1, 8, 8, 10_000, 10_000, 1), "float32", "full", None, "forward")
    with pytest.raises(bench.RefusalError, match=r"some 4\.8 GB; 1\.0 GB are free"):
        bench.Standard().prepare(measure.Cpu(), case, draw(measure.Cpu(), CASE))


def test_inputs_that_do_not_fit_are_told():
    def asarray(_):
        raise MemoryError("none")

    class Full(Clock):
        xp = SimpleNamespace(asarray=asarray)

    row = run_case(Says("a", ONES), Says("b", ONES), meter=Full())
    assert [x.status for x in row.results] == ["refused"] * 2
    assert "no memory for its arrays" in row.results[0].reason


def test_a_call_waits_until_other_threads_have_stopped_spinning(monkeypatch):
    """What the process computes in a pause is taken from a list: two pauses are busy."""
    clock = iter([0.0, 0.005, 0.005, 0.009, 0.009, 0.0091])
    pauses: list[float] = []
    monkeypatch.setattr(measure.time, "process_time", lambda: next(clock))
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    measure.Cpu().settle()
    assert len(pauses) == 3
    assert next(clock, None) is None


@pytest.mark.parametrize(("each", "calls"), [(0.004, 6), (0.3, 2)])
def test_threads_are_awake_when_a_call_is_timed(monkeypatch, each, calls):
    """A call of 4 ms is made for 20 ms before it is timed; a long one once."""
    now, made = [0.0], []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def work():
        made.append(now[0])
        now[0] += each

    assert measure.Cpu().seconds(work) == pytest.approx(each)
    assert len(made) == calls


def test_it_does_not_wait_for_ever(monkeypatch):
    monkeypatch.setattr(measure.time, "process_time", iter(range(10**9)).__next__)
    now = iter(range(10**9))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: 0.1 * next(now))
    pauses: list[float] = []
    monkeypatch.setattr(measure.time, "sleep", pauses.append)
    measure.Cpu().settle()
    assert 1 < len(pauses) < 10


def test_free_memory_of_this_machine():
    free = measure.Cpu().free_memory()
    assert free is None or 2**20 < free < 2**50


def test_a_report_survives_json():
    row = run_case(Says("a", ONES), Says("b", bench.RefusalError("ü no")))
    report = bench.Report("quick", "cpu", "a CPU", {"numpy": "2"}, "so", (row,), {"c": "absent"})
    assert bench.Report.from_json(report.to_json()) == report
    for text in ("", "[]", "{}", '{"format": "cupyflash bench 1"}',
                 report.to_json().replace('"cpu"', '"tpu"'),
                 report.to_json().replace('"full"', '"fall"')):  # fmt: skip
        with pytest.raises(ArgumentError, match="not what --json writes"):
            bench.Report.from_json(text)


@pytest.fixture
def forget():
    """Let PyTorch be searched for anew, before and after."""
    torch_peers.find.cache_clear()
    yield
    torch_peers.find.cache_clear()


def test_pytorch_is_named_with_the_remedy_where_it_is_absent(forget, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    for peer in torch_peers.PEERS:
        for kind in peer.kinds:
            assert "pip install torch" in peer.obstacle(kind)
    assert "on a GPU only" in torch_peers.PEERS[0].obstacle("cpu")
    assert all(not c.obstacle("cpu") for c in bench.CONTENDERS[:2])


def fake_torch(monkeypatch, version="2.11.0+cu130", available=True, backends=("MATH",)):
    backends = SimpleNamespace(**{name: name for name in backends})
    attention = SimpleNamespace(SDPBackend=backends)
    torch = SimpleNamespace(
        __version__=version,
        cuda=SimpleNamespace(is_available=lambda: available),
        nn=SimpleNamespace(attention=attention),
    )
    for name, module in (("torch", torch), ("torch.nn.attention", attention)):
        monkeypatch.setitem(sys.modules, name, module)


def test_a_pytorch_that_does_not_serve_is_told(forget, monkeypatch):
    peers = {peer.name: peer for peer in torch_peers.PEERS}
    fake_torch(monkeypatch)
    assert peers["torch-math"].obstacle("gpu") == ""
    assert "no CUDNN_ATTENTION" in peers["torch-cudnn"].obstacle("gpu")
    fake_torch(monkeypatch, available=False)
    torch_peers.find.cache_clear()
    assert "sees no GPU" in peers["torch-math"].obstacle("gpu")
    assert peers["torch-math"].obstacle("cpu") == ""
    fake_torch(monkeypatch, version="2.3.1")
    torch_peers.find.cache_clear()
    assert "got PyTorch 2.3.1; expected 2.5" in peers["torch-math"].obstacle("cpu")


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="needs PyTorch")
@mostly_thorough(
    ("direction", "dtype"),
    [
        (direction, dtype)
        for direction in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
    ],
    quick=[("forward", "float32"), ("backward", "bfloat16")],
    why="each direction and each type has a quick case; PyTorch compiles for each",
)
def test_pytorch_agrees(direction, dtype):
    peers = [bench.Cupyflash(), *(x for x in torch_peers.PEERS if not x.obstacle("cpu"))]
    assert len(peers) == 4
    for variant in ("causal", "documents", "alibi", "softcap"):
        case = bench.made((1, 4, 4, 60, 60, 16), dtype, variant, None, direction)
        row = bench.run_case(measure.Cpu(), case, peers, runs=1, seconds=1.0)
        wanted = "refused" if variant == "softcap" else "measured"
        assert {x.status for x in row.results[1:]} == {wanted}, row


def test_flash_attention_4_is_timed_by_its_own_function(monkeypatch):
    """It has rows before heads; here PyTorch stands for it."""
    torch = pytest.importorskip("torch", reason='needs PyTorch: pip install ".[torch]"')
    peer = torch_peers.FlashAttention4()
    peer.kinds = ("cpu", "gpu")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert "cannot be imported (ModuleNotFoundError" in peer.obstacle("cpu")
    asked = []

    def attend(*qkv, causal=False, window_size=(None, None), softcap=0.0):
        asked.append((causal, window_size, softcap))
        q, k, v = (x.transpose(1, 2) for x in qkv)
        s = q @ k.mT / q.shape[-1] ** 0.5
        s = softcap * (s / softcap).tanh() if softcap else s
        behind = torch.arange(60)[:, None] - torch.arange(60)
        if causal or window_size[0]:
            seen = (behind >= 0) & (behind <= (window_size[0] or 60))
            s = s.masked_fill(~seen, -torch.inf)
        return (s.softmax(-1) @ v).transpose(1, 2), None

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_attn_func=attend))
    assert not peer.obstacle("cpu")
    shape, both, none = (1, 4, 4, 60, 60, 16), [bench.Cupyflash(), peer], (None, None)

    def results_of(dtype, variant, direction="forward"):
        size = 9 if variant == "window" else None
        case = bench.made(shape, dtype, variant, size, direction)
        return bench.run_case(measure.Cpu(), case, both, runs=1, seconds=1.0).results

    wanted = {
        "full": (False, none, 0.0),
        "causal": (True, none, 0.0),
        "window": (False, (9, 0), 0.0),
        "softcap": (True, none, 20.0),
    }
    for direction in ("forward", "backward"):
        for variant, options in wanted.items():
            found = results_of("bfloat16", variant, direction)
            assert [x.status for x in found] == ["measured"] * 2, found
            assert set(asked) == {options}
            asked.clear()
    assert "no argument for alibi" in results_of("bfloat16", "alibi")[1].reason
    assert "not float32" in results_of("float32", "full")[1].reason


def test_pages_are_timed_beside_whole_arrays():
    suite = bench.own_shapes("cpu", [(2, 4, 2, 1, 70, 16)])
    known = {each.name: each for each in bench.CONTENDERS}
    names = "cupyflash", "cupyflash-pages", "cupyflash-pages-of-1"
    contenders = [known[name] for name in names]
    assert [each.page for each in contenders[1:]] == [16, 1]
    assert all(
        set(names) <= set(bench.SUITES[kind]["decode"].contenders) for kind in ("cpu", "gpu")
    )
    for variant, size, status in (("full", None, "measured"), ("documents", 7, "refused")):
        (case,) = suite.cases(variants=[(variant, size)])
        row = bench.run_case(measure.Cpu(), case, contenders, runs=1, seconds=0.01)
        assert [each.status for each in row.results] == ["measured", status, status]
    (case,) = suite.cases(passes=["backward"])
    row = bench.run_case(measure.Cpu(), case, contenders[1:], runs=1, seconds=0.01)
    assert "no backward" in row.results[0].reason


CODED = {each.name: each for each in bench.CONTENDERS if "-int" in each.name or "e4m3" in each.name}


def test_caches_of_codes_are_timed_beside_numbers():
    (case,) = bench.own_shapes("cpu", [(2, 4, 2, 1, 70, 32)]).cases()
    contenders = [bench.Cupyflash(), *CODED.values()]
    for kind in ("cpu", "gpu"):
        assert CODED.keys() <= set(bench.SUITES[kind]["decode"].contenders)
    row = bench.run_case(Quick(), case, contenders, runs=1, seconds=0.01)
    assert [x.status for x in row.results] == ["measured"] * (1 + len(CODED)), row
    # A row of 32 columns: codes and a scale of four bytes.
    rows = 2 * 2 * 2 * 70
    bytes_of = [x.key_bytes for x in row.results]
    assert bytes_of == [None, *(rows * (columns + 4) for columns in (32, 32, 16, 24))]
    assert row.results[0].difference == 0
    assert results.rate(case, row.results[3], "cpu", True) == pytest.approx(
        bytes_of[3] / row.results[3].seconds / 1e9
    )


def test_float8_is_timed_beside_numbers():
    suite = bench.own_shapes("cpu", [(1, 4, 2, 70, 90, 32)])
    contenders = [bench.Cupyflash(), bench.CupyflashFloat8()]
    for variant in ("causal", "alibi"):
        (case,) = suite.cases(dtypes=["bfloat16"], variants=[(variant, None)])
        row = bench.run_case(Quick(), case, contenders, runs=1, seconds=0.01)
        assert [x.status for x in row.results] == ["measured"] * 2, row
        assert 0 < row.results[1].difference < 2.0**-4


@pytest.mark.parametrize("name", [*CODED, "cupyflash-fp8"])
def test_codes_refuse_what_they_cannot_do(name):
    (contender,) = [each for each in bench.CONTENDERS if each.name == name]
    for dtype, direction, wanted in (
        ("float64", "forward", "codes have no float64"),
        ("float32", "backward", "gradients" if name == "cupyflash-fp8" else "no backward"),
    ):
        case = bench.made((1, 1, 1, 1, 9, 6), dtype, "full", None, direction)
        row = bench.run_case(Quick(), case, [contender], runs=1, seconds=0.01)
        assert row.results[0].status == "refused"
        assert wanted in row.results[0].reason


@pytest.mark.parametrize("form", ["int8", "float8_e4m3fn", "int4"])
def test_what_codes_mean(form):
    """Half a step at most from the numbers; and a fault is found by what is expected of codes."""
    x = np.random.default_rng(0).standard_normal((2, 3, 64), np.float32)
    group = 32 if form == "int4" else 64
    made, scale = quantize(x, form, group=group)
    numbers = numbers_of(made, scale, FORMATS[form], "float32", np)
    step = {"int8": 1, "float8_e4m3fn": 32, "int4": 1}[form]  # the largest distance of codes
    assert (np.abs(numbers - x) <= 0.51 * step * np.repeat(scale, group, axis=-1)).all()
    assert np.array_equal(quantize(numbers, form, group=group)[0].view(np.uint8), made.view("u1"))


def test_a_wrong_result_over_codes_is_not_timed(monkeypatch):
    attend = cached.attention_cached
    monkeypatch.setattr(cached, "attention_cached", lambda *x, **y: 1.05 * attend(*x, **y))
    (case,) = bench.own_shapes("cpu", [(1, 2, 2, 1, 40, 32)]).cases()
    row = bench.run_case(Quick(), case, list(CODED.values()), runs=1, seconds=0.01)
    assert [x.status for x in row.results] == ["WRONG"] * len(CODED)
    assert "from that of its codes" in row.results[0].reason
