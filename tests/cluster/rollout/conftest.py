"""Fixtures of the control plane's tests."""

from tests.cluster.control.conftest import deploy  # noqa: F401
