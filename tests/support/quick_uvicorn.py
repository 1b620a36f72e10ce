"""Let uvicorn's servers end within 20 ms. They poll in steps of 0.1 s, and hundreds of tests wait for that.

Import this module where servers are opened.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import uvicorn.server


async def _sleep(delay_s: float) -> None:
    await asyncio.sleep(delay_s / 10)


vars(uvicorn.server)["asyncio"] = SimpleNamespace(**vars(asyncio) | {"sleep": _sleep})
