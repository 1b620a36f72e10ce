"""Fixtures of the engine and router tests."""

from __future__ import annotations

from tests.engine.conftest import make_runner, tiny_model
from tests.support.frontend_fixtures import byte_level, byte_level_dir, completions

__all__ = ["byte_level", "byte_level_dir", "completions", "make_runner", "tiny_model"]
