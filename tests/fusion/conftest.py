"""A fixture that the tests of compiled regions share."""

from __future__ import annotations

import pytest

from fxremat.planning import compiled


@pytest.fixture
def always_in_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in regions are taken whatever they gain: those of tests are too small to gain any."""
    monkeypatch.setattr(compiled._Search, "_seconds", lambda _, found, single: [1.0] * len([*found, *single]))
    monkeypatch.setattr(compiled, "SLOWER", 1e9)
    monkeypatch.setattr(compiled, "LITTLE", -1.0)
    monkeypatch.setattr(compiled, "COMPILING", -1e9)
