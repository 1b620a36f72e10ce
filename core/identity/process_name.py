"""Names of processes, as in their certificates."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_URI = re.compile(rf"xpyd://(?P<deployment>{_LABEL})/(?P<group>{_LABEL})/(?P<member>{_LABEL})")
_REPLICA = re.compile(r"(?:prefill|decode)-[0-9]+")
_RANK = re.compile(r"0|[1-9][0-9]*")  # canonical decimal only
_ROUTER = "router"


@dataclass(frozen=True)
class ProcessName:
    """Name of one process: (group "router", router name) or (replica, rank)."""

    deployment: str
    group: str
    member: str

    @classmethod
    def of_router(cls, deployment: str, router: str) -> ProcessName:
        return cls(deployment, _ROUTER, router)

    @classmethod
    def of_rank(cls, deployment: str, replica: str, rank: int) -> ProcessName:
        return cls(deployment, replica, str(rank))

    @classmethod
    def parse(cls, uri: str) -> ProcessName | None:
        """Parse the result of `uri`; None for any other string."""
        match = _URI.fullmatch(uri)
        return cls(**match.groupdict()) if match else None

    def __str__(self) -> str:
        return f"{self.group}/{self.member}"

    @property
    def uri(self) -> str:
        return f"xpyd://{self.deployment}/{self.group}/{self.member}"

    @property
    def host(self) -> str:
        """Host name that stands for this process in TLS checks. It does not resolve in DNS."""
        return f"{self.member}.{self.group}.{self.deployment}.xpyd"

    @property
    def is_router(self) -> bool:
        return self.group == _ROUTER

    @property
    def router(self) -> str:
        assert self.is_router, self
        return self.member

    @property
    def is_rank(self) -> bool:
        return _REPLICA.fullmatch(self.group) is not None and _RANK.fullmatch(self.member) is not None

    @property
    def replica(self) -> str:
        assert not self.is_router, self
        return self.group

    @property
    def rank(self) -> int:
        assert not self.is_router, self
        return int(self.member)
