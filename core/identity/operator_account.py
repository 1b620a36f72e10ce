"""People who operate a deployment by certificates of their own, without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from core.identity.process_name import ProcessName
from core.types.errors import SpecError
from core.types.json_records import known_fields


class PersonRole(StrEnum):
    """What a person may do; each RPC of proto/operate.proto says which it takes (core/identity/rules.py)."""

    VIEWER = "viewer"  # looks: status, logs
    OPERATOR = "operator"  # and changes: scale, switch, drain, API keys


@dataclass(frozen=True, kw_only=True)
class Person:
    """Whom the controller lets in, and by which certificate."""

    name: str
    role: PersonRole
    fingerprint: str  # SHA-256 of the certificate, in hex
    ends_at: float  # Unix time

    def process_name(self, deployment: str) -> ProcessName:
        """What the certificate says."""
        return ProcessName.of_person(deployment, self.role, self.name)


@dataclass(frozen=True)
class People:
    """All of a deployment, by name."""

    known: tuple[Person, ...] = ()

    def with_person(self, person: Person) -> People:
        """Raises SpecError where the name is taken."""
        if any(other.name == person.name for other in self.known):
            raise SpecError(
                f"somebody is called {person.name} already; `cluster operators revoke {person.name}` takes it back"
            )
        return People((*self.known, person))

    def without(self, name: str) -> People:
        """Raises SpecError where nobody is called so."""
        kept = tuple(person for person in self.known if person.name != name)
        if len(kept) == len(self.known):
            there = ", ".join(person.name for person in self.known) or "nobody"
            raise SpecError(f"nobody is called {name}; there is: {there}")
        return People(kept)

    def find(self, fingerprint: str) -> Person | None:
        """Who has this certificate; None: nobody, or not any more."""
        return next((person for person in self.known if person.fingerprint == fingerprint), None)

    def to_json(self) -> str:
        return json.dumps([asdict(person) for person in self.known])

    @classmethod
    def from_json(cls, text: str | bytes) -> People:
        """What to_json has made, or a newer version's. Raises ValueError and its kin."""
        return cls(tuple(_people(json.loads(text))))


def _people(trees: Iterable[dict[str, object]]) -> Iterable[Person]:
    for tree in trees:
        yield Person(**(known_fields(Person, tree) | {"role": PersonRole(str(tree["role"]))}))
