"""Dataclasses that are kept or sent as JSON, and what another version has written of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


def known_fields(kind: type[Record], tree: Mapping[str, Any]) -> dict[str, Any]:
    """What `kind` has fields for. The rest a newer version has added: it is passed over."""
    return {name: value for name, value in tree.items() if name in kind.__dataclass_fields__}
