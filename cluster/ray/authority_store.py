"""Certificate authority of a deployment, stored next to its desired state so that a restarted controller can issue.

The deployment's own authority is kept in Ray's control store only; processes that can read it can run code on every
node anyway. For an operator's authority only the paths are stored.
"""

from __future__ import annotations

from cluster.control.desired_state import namespace
from cluster.ray.store import StoreEntry
from core.identity.authority import Authority
from core.spec.schema import SecuritySpec, Spec
from core.types.errors import DeployError


def prepare(spec: Spec) -> None:
    """Create the deployment's own authority, or validate the operator's. Raises SpecError."""
    if spec.security.tls == "auto":
        _entry(spec.name).put(Authority.create(spec.name).to_json())
    elif spec.security.tls == "files":
        open_files(spec.security)


def find(spec: Spec) -> Authority:
    """Return the issuing authority; files are read on each call. Raises SpecError, and DeployError if there is none."""
    if spec.security.tls == "files":
        return open_files(spec.security)
    if stored := _entry(spec.name).get():
        return Authority.from_json(stored)
    raise DeployError(f"{spec.name} has no certificate authority (security.tls: {spec.security.tls})")


def open_files(security: SecuritySpec) -> Authority:
    """Read an operator's authority from files on this machine. Raises SpecError."""
    assert security.ca and security.certificate and security.key, "the spec is validated"
    return Authority.from_files(ca=security.ca, certificate=security.certificate, key=security.key)


def forget(name: str) -> None:
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry("authority", namespace=namespace(name))
