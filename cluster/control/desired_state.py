"""What a deployment should be: written to Ray's own control store, so that a controller that restarts knows it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.ray.store import StoreEntry
from cluster.rollout.update import Update
from core.identity.deployment_secrets import DeploymentSecrets
from core.spec.loader import parse_spec
from core.spec.schema import AutoscaleSpec, Spec
from core.types.json_records import known_fields
from core.types.launch import Launch
from core.types.request import Role

CONTROLLER = "controller"  # the name of its actor


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a rank's process imports by path, "module:name": this process must not, for it brings torch."""

    prefill: str = "prefill_worker.actor:make_rank"
    decode: str = "decode_worker.actor:make_rank"

    def rank(self, role: Role) -> str:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(kw_only=True)
class Desired:
    """What every replica is started with, with the spec as it is now: scaled since the operator wrote it."""

    launch: Launch
    parts: Parts = Parts()
    next_number: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))  # of replica ids, never reused
    revision: int = 1  # of the spec
    last_revision: int = 1  # that there was; never reused
    makes: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 1))  # revisions that made its replicas
    made: dict[str, int] = field(default_factory=dict)  # by replica: the revision that has made it
    update: Update | None = None
    last_update: str = ""  # what came of it, in a line
    table_version: int = 0  # of what routers are told of revisions
    # Replicas that have changed their role, or are about to: what Ray calls their gangs (the id of their first life),
    # and the id that they have now, or will have.
    switched: dict[str, str] = field(default_factory=dict)

    @property
    def spec(self) -> Spec:
        return self.launch.spec

    def of(self, spec: Spec) -> Desired:
        """With another spec: what a replica of another revision is started with."""
        return replace(self, launch=replace(self.launch, spec=spec))

    def make_of(self, replica: str, role: Role) -> int:
        """The revision that has made a replica."""
        return self.made.get(replica, self.makes[role])

    def as_made(self, replica: str, role: Role) -> Desired:
        """With the spec by which this replica was started."""
        update = self.update
        is_new = update is not None and self.make_of(replica, role) == update.revision
        return self.of(update.spec) if update is not None and is_new else self

    def scale(self, role: Role, replicas: int) -> None:
        pool = self.spec.pool(role).model_copy(update={"replicas": replicas})
        self.launch = replace(self.launch, spec=self.spec.model_copy(update={role.value: pool}))

    def set_autoscale(self, rules: AutoscaleSpec | None) -> None:
        """Also where an update leads to, which would else bring the rules back that it was begun with."""
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
        return json.dumps(
            {
                "spec": self.spec.model_dump(mode="json"),
                "index_url": credentials.index_url,
                "log_dir": self.launch.log_dir,
                "credentials": {"secret": credentials.secret.hex()},
                "parts": asdict(self.parts),
                "next_number": self.next_number,
                "revision": self.revision,
                "last_revision": self.last_revision,
                "makes": self.makes,
                "made": self.made,
                "update": self.update.to_tree() if self.update else None,
                "last_update": self.last_update,
                "table_version": self.table_version,
                "switched": self.switched,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Desired:
        tree: dict[str, Any] = json.loads(text)
        secret = bytes.fromhex(tree["credentials"]["secret"])
        return cls(
            launch=Launch(
                spec=parse_spec(tree["spec"], origin="the stored spec"),
                log_dir=tree["log_dir"],
                credentials=DeploymentSecrets(secret=secret, index_url=tree["index_url"]),
            ),
            parts=Parts(**known_fields(Parts, tree["parts"])),
            next_number=_by_role(tree["next_number"]),
            revision=tree.get("revision", 1),
            last_revision=tree.get("last_revision", 1),
            makes=_by_role(tree.get("makes", dict.fromkeys(Role, 1))),
            made=tree.get("made", {}),
            update=Update.from_tree(update) if (update := tree.get("update")) else None,
            last_update=tree.get("last_update", ""),
            table_version=tree.get("table_version", 0),
            switched=tree.get("switched", {}),
        )


def _by_role(numbers: dict[str, int]) -> dict[Role, int]:
    return {Role(role): number for role, number in numbers.items()}


def namespace(name: str) -> str:
    """The Ray namespace of a deployment's actors; its placement groups are named `<namespace>/<replica>`."""
    return f"xpyd-{name}"


def save(desired: Desired) -> None:
    """Keep it in Ray's own control store."""
    _entry(desired.spec.name).put(desired.to_json())


def load(name: str) -> Desired | None:
    text = stored(name)
    return Desired.from_json(text) if text else None


def stored(name: str) -> bytes | None:
    """As it lies there, for who only looks whether it has changed. Raises RayError."""
    return _entry(name).get()


def forget(name: str) -> None:
    _entry(name).delete()


def _entry(name: str) -> StoreEntry:
    return StoreEntry("desired", namespace=namespace(name))
