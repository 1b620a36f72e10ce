"""Who may operate a deployment by a certificate: kept by its controller in Ray's store, and ending with it."""

from __future__ import annotations

import logging
import time

from cluster.control.desired_state import namespace
from cluster.ray import authority_store
from cluster.ray.store import StoreEntry
from core.identity.credentials import Certificate
from core.identity.fingerprint import fingerprint_of
from core.identity.operator_account import People, Person, PersonRole
from core.identity.process_name import ProcessName
from core.spec.schema import Spec
from core.types.errors import SpecError

logger = logging.getLogger(__name__)

_DAY_S = 86_400.0


class PersonBook:
    """Owned by the controller, on its event loop."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._entry = _entry(deployment)
        stored = self._entry.get()
        self.people = People.from_json(stored) if stored else People()

    def issue(self, spec: Spec, name: str, role: PersonRole, request: bytes, *, days: float) -> tuple[str, Certificate]:
        """Where `name` may operate from now on, and the certificate of the key of `request`.

        Raises SpecError where the name is taken, or where nobody would listen.
        """
        address = spec.security.operators
        if address is None:
            raise SpecError("security.operators is not set, so nobody would listen: deploy with HOST:PORT there")
        who = ProcessName.of_person(self._deployment, role, name)
        certificate = authority_store.find(spec).issue(who, request, life_s=days * _DAY_S)
        person = Person(
            name=name,
            role=role,
            fingerprint=fingerprint_of(certificate.chain),
            ends_at=time.time() + certificate.life_s,
        )
        self._save(self.people.with_person(person))
        logger.info("certificate issued to %s for %.0f s", who, certificate.life_s)
        return address, certificate

    def remove(self, name: str) -> None:
        """From now on nobody is let in by that certificate. Raises SpecError where nobody is called so."""
        self._save(self.people.without(name))
        logger.info("%s is let in no more", name)

    def admitted(self, certificate: bytes) -> ProcessName | None:
        """Who shows this certificate (PEM), as it says; None: it is not, or no longer, in the book."""
        person = self.people.find(fingerprint_of(certificate))
        return person.process_name(self._deployment) if person else None

    def _save(self, people: People) -> None:
        self._entry.put(people.to_json())
        self.people = people


def forget(deployment: str) -> None:
    _entry(deployment).delete()


def _entry(deployment: str) -> StoreEntry:
    return StoreEntry("people", namespace=namespace(deployment))
