"""Desired state of a deployment, stored in Ray's control store so that a restarted controller can load it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import msgspec

from cluster.ray import store
from cluster.ray.store import namespace
from cluster.rollout.update import Update
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import AutoscaleSpec, Spec
from core.types.json_records import known_fields
from core.types.launch import Launch
from core.types.request import Role


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Import paths ("module:name") of the rank factories. The controller must not import them: they bring torch."""

    prefill: str = "prefill_worker.actor:make_rank"
    decode: str = "decode_worker.actor:make_rank"

    def rank(self, role: Role) -> str:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(kw_only=True)
class Desired:
    """Desired state: how replicas are started, and the current spec, including scaling since it was applied."""

    launch: Launch
    parts: Parts = Parts()
    # Next number for replica ids; never reused.
    next_number: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    # Revision of the spec.
    revision: int = 1
    # Highest revision ever given; never reused.
    last_revision: int = 1
    # Revision that the replicas of each role were started from.
    makes: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 1))
    # Exceptions to `makes`: replica id to the revision it was started from.
    made: dict[str, int] = field(default_factory=dict)
    update: Update | None = None
    # Outcome of the last update, one line.
    last_update: str = ""
    # Version of the revision table that routers read.
    table_version: int = 0
    # Replicas that have switched or are switching their role: gang id (Ray's name, from the first role) to replica id.
    switched: dict[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        return self.launch.spec

    def of(self, spec: Spec) -> Desired:
        """Return a copy with another spec, for starting replicas of another revision."""
        return replace(self, launch=replace(self.launch, spec=spec))

    def make_of(self, replica: str, role: Role) -> int:
        """Return the revision that a replica was started from."""
        return self.made.get(replica, self.makes[role])

    def as_made(self, replica: str, role: Role) -> Desired:
        """Return the desired state with the spec that this replica was started from."""
        if self.update and self.make_of(replica, role) == self.update.revision:
            return self.of(self.update.spec)
        return self

    def scale(self, role: Role, replicas: int) -> None:
        pool = self.spec.pool(role).model_copy(update={"replicas": replicas})
        self.launch = replace(self.launch, spec=self.spec.model_copy(update={role.value: pool}))

    def set_autoscale(self, rules: AutoscaleSpec | None) -> None:
        """Set the rules, also in a running update's target spec, which would otherwise restore the old rules."""
        change = {"autoscale": rules}
        self.launch = replace(self.launch, spec=self.spec.model_copy(update=change))
        if self.update:
            self.update = replace(self.update, spec=self.update.spec.model_copy(update=change))

    def take_number(self, role: Role) -> int:
        number = self.next_number[role]
        self.next_number[role] = number + 1
        return number

    def to_json(self) -> str:
        credentials = self.launch.credentials
        tree = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "launch"} | {
            "spec": self.spec.model_dump(mode="json"),
            "index_url": credentials.index_url,
            "log_dir": self.launch.log_dir,
            "credentials": {"secret": credentials.secret.hex()},
            "parts": asdict(self.parts),
            "update": self.update.to_tree() if self.update else None,
        }
        return json.dumps(tree)

    @classmethod
    def from_json(cls, text: str | bytes) -> Desired:
        tree: dict[str, Any] = json.loads(text)
        secret = bytes.fromhex(tree["credentials"]["secret"])
        launch = Launch(
            spec=parse_spec(tree["spec"], origin="the stored spec"),
            log_dir=tree["log_dir"],
            credentials=DeploymentSecrets(secret=secret, index_url=tree["index_url"]),
        )
        read: dict[str, Any] = {
            "launch": launch,
            "parts": msgspec.convert(tree["parts"], Parts),
            "next_number": msgspec.convert(tree["next_number"], dict[Role, int]),
            "makes": msgspec.convert(tree["makes"], dict[Role, int]),
            "update": Update.from_tree(tree["update"]) if tree["update"] else None,
        }
        return cls(**known_fields(cls, tree) | read)


def save(desired: Desired) -> None:
    """Store the desired state in Ray's control store."""
    store.put(namespace(desired.spec.name), "desired", desired.to_json())


def load(name: str) -> Desired | None:
    text = stored(name)
    return Desired.from_json(text) if text else None


def stored(name: str) -> bytes | None:
    """Return the stored bytes, for callers that only compare them. Raises DeployError."""
    return store.get(namespace(name), "desired")
