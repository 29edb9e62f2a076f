"""examples/match_forces.py, which learns an energy from forces: right gradients, and it learns."""

import numpy as np
from small_model import load

forces = load("match_forces")


def test_gradients_are_those_of_differences():
    assert forces.main(["--check"]) == 0
    assert forces.largest_difference(seed=1) < 1e-5


def test_training_reduces_the_error(capsys):
    losses = forces.train(60)
    assert np.mean(losses[-10:]) < np.mean(losses[:2]) / 4
    assert forces.main(["--steps", "1"]) == 0
    assert "mean square error of forces" in capsys.readouterr().out
