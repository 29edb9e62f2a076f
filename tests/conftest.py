"""What all tests share: which cupyflash they test, and Hypothesis' profiles."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

ROOT = Path(__file__).resolve().parent.parent
LONG_FILES = {  # take a minute and more
    "test_backward_sm90", "test_cuda_compile", "test_emulator", "test_emulator_barriers",
    "test_faults", "test_forward_sm80", "test_forward_sm90", "test_forward_sm90_masks",
    "test_outputs", "test_properties",
}  # fmt: skip
QUICK = "not thorough"  # pyproject.toml selects these tests unless the command line has a -m
FROM_THE_END = "collects from the end"  # what a worker is told if all tests are run
EMULATOR_CACHE = "CUPYFLASH_EMULATOR_CACHE"  # of kernels that are compiled for the CPU

# `python -m pytest` puts the current folder on sys.path. In a checkout that would give a
# `cupyflash` without its parts `reference` and `kernels_cu`, which lie beside it and come under
# its name only by installing. So the tests import what is installed (an editable install is the
# checkout itself), and say so when there is nothing or something else installed.
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]


def installed_package_is_this_checkout() -> None:
    remedy = 'install this checkout first, from its top: pip install ".[test]" (or with -e)'
    found = importlib.util.find_spec("cupyflash")
    if found is None or found.origin is None:
        raise pytest.UsageError(f"cupyflash is not installed; {remedy}")
    package = Path(found.origin).parent
    if package == ROOT / "cupyflash":
        return
    import installed  # one of the modules that tests share

    if difference := installed.difference(ROOT, package):
        raise pytest.UsageError(
            f"the installed cupyflash ({package}) is not this checkout: {difference}; {remedy}"
        )


def pytest_runtest_setup() -> None:
    """Let no test depend on calls that were made before it."""
    replay = sys.modules.get("cupyflash.problem.replay")
    if replay is not None:
        replay._entries.clear()


@pytest.fixture(scope="session")
def gpu() -> object:
    """The memory of a GPU; tests that need one are skipped where there is none."""
    import gpu_arrays  # imports cupyflash, whose place is settled above

    return gpu_arrays.memory()


@pytest.fixture(scope="session")
def nvrtc() -> None:
    """The compiler for GPUs; tests that need it are skipped where there is none, but not in CI."""
    from cuda_table import CannotCompile, nvrtc_version

    try:
        nvrtc_version()
    except CannotCompile as error:
        remedy = f'NVRTC cannot be used ({error}); pip install ".[test]" has it, but for macOS'
        if os.environ.get("CI"):
            pytest.fail(remedy)
        pytest.skip(remedy)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """No callbacks of the garbage collector (Hypothesis has one): Python swallows what a signal
    raises inside one, and goes on, so that the test would wait for an exception that never comes.
    """
    gc.disable()
    yield
    gc.enable()


def one_thread_for_each_worker(config: pytest.Config) -> None:
    """Let libraries that wait for their threads by spinning have one: workers share the cores."""
    if config.getoption("numprocesses", None):
        for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(name, "1")  # what workers start with
        # The package would follow OpenMP's number; its threads do not spin.
        os.environ.setdefault("CUPYFLASH_NUM_THREADS", str(os.cpu_count() or 1))


def compile_for_all_workers(config: pytest.Config) -> None:
    """Compile what every worker needs at once, before a run of all tests: the CPU's kernels, and
    the emulator's runtime.
    """
    if (
        not config.getoption("numprocesses", None)
        or config.option.collectonly
        or config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    ):
        return
    command = [sys.executable, "-m", "cupyflash", "warmup", "--dtype"]
    processes = [  # not in the checkout, whose `cupyflash/` is not the whole package
        subprocess.Popen([*command, dtype], cwd=tempfile.gettempdir(), stdout=subprocess.DEVNULL)
        for dtype in ("float32", "float64")
    ]
    from emulator import build  # imports cupyflash, whose place is settled above

    if build.missing() is None:
        build.runtime()
    for process in processes:
        process.wait()  # if it fails, it says why, and the tests compile for themselves


def pytest_configure(config: pytest.Config) -> None:
    installed_package_is_this_checkout()
    if EMULATOR_CACHE not in os.environ:  # workers and programs that tests start find it there
        folder = tempfile.mkdtemp(prefix="cupyflash-emulator-")
        os.environ[EMULATOR_CACHE] = folder

        def forget() -> None:
            del os.environ[EMULATOR_CACHE]
            shutil.rmtree(folder, ignore_errors=True)

        config.add_cleanup(forget)
    if not hasattr(config, "workerinput"):
        one_thread_for_each_worker(config)
        compile_for_all_workers(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.markexpr == QUICK:
        terminalreporter.write_line(
            "These were the quick tests: `-m thorough` runs the others, `-m ''` runs both."
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI, let a run fail in which tests were skipped that should run there."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("CI") or hasattr(session.config, "workerinput") or reporter is None:
        return
    import allowed_skips

    reasons = [
        report.longrepr[2].removeprefix("Skipped: ")
        for report in reporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple)
    ]
    found = allowed_skips.forbidden(reasons, os.environ.get(allowed_skips.WITHOUT, ""))
    for reason in found:
        reporter.write_line(f"Skipped, which CI does not allow: {reason}", red=True)
    nothing_failed = pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED
    if found and session.exitstatus in nothing_failed:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share out whole files: much of what a file's tests need is made once for all of them."""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # which is by the number of tests
    return LoadFileScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell workers that all tests are run, and every other one to collect them from the end."""
    if node.config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        node.workerinput[FROM_THE_END] = int(node.gateway.id.removeprefix("gw")) % 2 == 1


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Collect a folder from its end, so that workers meet in the middle.

    Pytest rewrites the assertions of a file once, and keeps that. Two workers that go through the
    files in the same order would both do it for all of them.
    """
    report = yield
    told = getattr(collector.config, "workerinput", {})
    if told.get(FROM_THE_END) and isinstance(collector, pytest.Dir | pytest.Package):
        report.result.reverse()
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if FROM_THE_END in getattr(config, "workerinput", ()):
        items.sort(key=lambda item: item.path)  # all workers must have one order
    items.sort(key=lambda item: item.path.stem not in LONG_FILES)  # so that workers end together
    keep_share(config, items)


def pytest_collection_finish() -> None:
    """Keep what lives to the end out of garbage collections: a million objects of PyTorch, say."""
    gc.collect()
    gc.freeze()


def keep_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the tests, say every 8th from the 3rd on, where the environment names it.

    The name is taken out: a pytest that a test starts runs all of the tests it was given.
    """
    share = os.environ.pop("CUPYFLASH_TEST_SHARE", None)  # "3/8"
    if share is None:
        return
    number, shares = map(int, share.split("/"))
    kept = items[number - 1 :: shares]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


# dev: while writing; ci: the same examples every time; nightly: a long search for new ones.
# deadline=None: the first call of a kernel compiles it.
slow_is_fine = [HealthCheck.too_slow, HealthCheck.data_too_large]
common = {"deadline": None, "suppress_health_check": slow_is_fine, "print_blob": True}
settings.register_profile("dev", max_examples=25, **common)
settings.register_profile("ci", max_examples=50, derandomize=True, database=None, **common)
settings.register_profile("nightly", max_examples=2000, **common)
# sanitizer: a few, for tools that make a GPU many times slower (tests/tools/gpu_check.py).
settings.register_profile(
    "sanitizer",
    max_examples=4,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    **common,
)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)
