"""What tests of a router's heart share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of planned losses need not be logged; and what is kept of a line knows the error in it, and by that the
    request."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
