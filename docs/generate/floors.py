"""The rooms on their floors (docs/ARCHITECTURE.md), from the imports."""

from __future__ import annotations

from tests.rooms import picture, room_arrows


def drawing() -> str:
    return f"```\n{picture(room_arrows())}\n```"
