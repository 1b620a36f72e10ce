"""Clients for plain HTTP. They load no certificate authorities, which would take 20 ms for each client."""

from __future__ import annotations

from typing import Any

import httpx

from tests.support import quick_uvicorn  # noqa: F401


def http_client(**options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=False, **options)
