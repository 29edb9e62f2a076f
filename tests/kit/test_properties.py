"""Every property of the verification kit, on the CPU kernels with tiles of a few rows and keys.

`verify` runs the same functions on a kernel as it is; small tiles put several of them, and their
edges, into small problems.
"""

from halves import mostly_thorough
from harness import small_tiles
from hypothesis import given, settings

from cupyflash.testing import FEATURES, PROPERTIES
from cupyflash.testing.options import known_floats
from cupyflash.testing.verification import FUNCTIONS, strategy_of

# Of some, `verify` tries several times as many problems: that is a thorough test.
WEIGHTS = [(name, min(prop.weight, 0.2)) for name, prop in PROPERTIES.items()]
LONGER = [(name, prop.weight) for name, prop in PROPERTIES.items() if prop.weight > 0.2]


@mostly_thorough(
    ("name", "weight"), WEIGHTS + LONGER, quick=WEIGHTS, why="the same, searched for longer"
)
def test_property(name, weight):
    prop = PROPERTIES[name]

    @settings(max_examples=max(10, round(settings().max_examples * weight)))
    @given(strategy_of(prop, known_floats(), FEATURES, None))
    def check(problem):
        with small_tiles(problem) as subject:
            prop.check(subject, problem)

    check()


def test_small_tiles_are_used(monkeypatch):
    """Two problems that differ in their tiles alone run with other tiles."""
    from cupyflash.reference.cpu import launch
    from cupyflash.testing import problem

    seen = []
    forward = launch.forward

    def spy(*arguments, **options):
        seen.append([x for x in arguments if isinstance(x, int)])
        return forward(*arguments, **options)

    monkeypatch.setattr(launch, "forward", spy)
    for tiles in ((5, 8), (16, 5)):
        p = problem("float32", (1, 2, 30, 8), tiles=tiles)
        with small_tiles(p) as subject:
            subject.attend_problem(p)
    assert [x[:2] for x in seen] == [[5, 8], [16, 5]]


def test_each_property_says_what_it_holds_under():
    for name, prop in PROPERTIES.items():
        assert prop.name == name
        assert prop.formula.endswith((".", ":")), name
        assert prop.needs <= set(FEATURES) | set(FUNCTIONS)
