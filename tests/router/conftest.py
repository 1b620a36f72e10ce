"""Fixtures of the frontend: tokenizers, completions and a running HTTP endpoint."""

from tests.support.frontend_fixtures import (  # noqa: F401
    byte_fallback,
    byte_fallback_dir,
    byte_level,
    byte_level_dir,
    completions,
    endpoint,
    serve,
    server,
)
