"""Which instructions kernels may have, as Numba's settings say."""

from __future__ import annotations

import pytest
from llvmlite import binding
from numba.core import config

from cupyflash.reference.cpu import amx, target


def test_they_are_those_of_the_host(monkeypatch):
    monkeypatch.setattr(config, "CPU_FEATURES", None)
    assert dict(target.features()) == dict(binding.get_host_cpu_features())


@pytest.mark.parametrize("chosen", ["", "+avx,-f16c"])
def test_a_setting_takes_their_place(monkeypatch, chosen):
    monkeypatch.setattr(config, "CPU_FEATURES", chosen)
    found = target.features()
    assert not found.get("f16c")
    assert found.get("avx", False) == bool(chosen)
    assert not amx.is_available.__wrapped__()  # whatever the host has
