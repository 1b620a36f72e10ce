"""Who issues a deployment's certificates: kept where its desired state is kept, so that a controller that restarts
issues as before.

An authority of the deployment's own lies in Ray's control store and nowhere else: whoever may ask that may run code on
every node anyway. Of an operator's, only the paths are kept.
"""

from __future__ import annotations

from cluster.control.desired_state import namespace
from cluster.ray.store import StoreEntry
from core.identity.authority import Authority
from core.spec.schema import SecuritySpec, Spec
from core.types.errors import DeployError


def prepare(spec: Spec) -> None:
    """Make the deployment's own authority, or look at the operator's. Raises SpecError."""
    if spec.security.tls == "auto":
        _entry(spec.name).put(Authority.create(spec.name).to_json())
    elif spec.security.tls == "files":
        open_files(spec.security)


def find(spec: Spec) -> Authority:
    """The one that issues now: files are read anew. Raises SpecError, and DeployError where there is none."""
    if spec.security.tls == "files":
        return open_files(spec.security)
    if stored := _entry(spec.name).get():
        return Authority.from_json(stored)
    raise DeployError(f"{spec.name} has no authority for certificates (security.tls: {spec.security.tls})")


def open_files(security: SecuritySpec) -> Authority:
    """An operator's, on this machine. Raises SpecError."""
    assert security.ca and security.certificate and security.key, "the spec is checked"
    return Authority.from_files(ca=security.ca, certificate=security.certificate, key=security.key)


def forget(name: str) -> None:
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry("authority", namespace=namespace(name))
