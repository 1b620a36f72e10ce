"""Fixtures of a rank, shared by the tests of both roles."""

from tests.worker.rank_of_one import model, rank  # noqa: F401
