"""Fixtures of the frontend: tokenizers, completions and running endpoints."""

from tests.support.frontend_fixtures import *  # noqa: F403
