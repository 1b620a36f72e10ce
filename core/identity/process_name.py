"""The names that certificates carry: which process of which deployment, or which person."""

from __future__ import annotations

import re
from dataclasses import dataclass

from core.types.errors import SpecError

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_URI = re.compile(rf"xpyd://(?P<deployment>{_LABEL})/(?P<group>{_LABEL})/(?P<member>{_LABEL})")
_REPLICA = re.compile(r"(?:prefill|decode)-[0-9]+")
_RANK = re.compile(r"0|[1-9][0-9]*")  # one way to write each
_ROUTER, _CONTROLLER = "router", "controller"


@dataclass(frozen=True)
class ProcessName:
    """One process: a router ("router", its own name), a rank (its replica, its rank) or the controller. Or a person:
    their role (core.identity.operator_account) and name."""

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
    def of_controller(cls, deployment: str) -> ProcessName:
        return cls(deployment, _CONTROLLER, "0")

    @classmethod
    def of_person(cls, deployment: str, role: str, person: str) -> ProcessName:
        """Raises SpecError where a certificate could not carry the name."""
        if not re.fullmatch(_LABEL, person):
            raise SpecError(f"{person!r}: write 1 to 63 small letters, digits and dashes")
        return cls(deployment, role, person)

    @classmethod
    def parse(cls, uri: str) -> ProcessName | None:
        """What `uri` has made; None for anything else."""
        match = _URI.fullmatch(uri)
        return cls(**match.groupdict()) if match else None

    def __str__(self) -> str:
        return f"{self.group}/{self.member}"

    @property
    def uri(self) -> str:
        return f"xpyd://{self.deployment}/{self.group}/{self.member}"

    @property
    def host(self) -> str:
        """The same as a host's name, which is what TLS compares; no name server knows it."""
        return f"{self.member}.{self.group}.{self.deployment}.xpyd"

    @property
    def is_router(self) -> bool:
        return self.group == _ROUTER

    @property
    def router(self) -> str:
        """A router's own name."""
        assert self.is_router, self
        return self.member

    @property
    def is_rank(self) -> bool:
        return _REPLICA.fullmatch(self.group) is not None and _RANK.fullmatch(self.member) is not None

    @property
    def replica(self) -> str:
        """A rank's."""
        assert not self.is_router, self
        return self.group

    @property
    def rank(self) -> int:
        """A rank's number in its replica."""
        assert not self.is_router, self
        return int(self.member)
