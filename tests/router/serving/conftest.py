"""Fixtures for tests of a router's serving core."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Suppress the log of planned losses. Captured records would also keep errors, and so requests, alive."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
