"""Deployments that use the endpoints of another deployment on the same Ray (`router.endpoints`)."""

from __future__ import annotations

import json
import logging

from cluster.control import desired_state
from cluster.launch import state as states
from cluster.launch.state import State
from cluster.ray import name_lock
from core.process.ports import free_ports
from core.spec.schema import RouterSpec, Spec, TracingSpec
from core.types.errors import ClusterError, DeployError, SpecError
from core.types.launch import Launch

logger = logging.getLogger(__name__)

# Router settings that belong to the endpoints, not to a model behind them.
_OF_ENDPOINTS = (
    "replicas", "host", "grpc_port", "http_port", "keys", "tls_cert", "tls_key", "unknown_fields", "cors_origins",
    "stored_responses_mib", "stored_responses_s", "max_tokens_beyond_context", "keepalive_s", "shutdown_delay_s",
)  # fmt: skip


class AttachedList:
    """Deployments attached to one deployment's endpoints. Caches parsed records, because they rarely change."""

    def __init__(self, endpoints: str) -> None:
        """endpoints: name of the deployment that owns the endpoints."""
        self._endpoints = endpoints
        # Stored bytes, and the launch parsed from them; None if the deployment is not attached to these endpoints.
        self._parsed: dict[str, tuple[bytes, Launch | None]] = {}

    def launches(self) -> list[Launch]:
        """Return the launch parameters of each attached deployment.

        Raises DeployError if Ray's store does not answer.
        """
        stored = {name: desired_state.stored(name) for name in name_lock.claimed() if name != self._endpoints}
        self._parsed = {name: self._parse(name, text) for name, text in stored.items() if text}
        return [launch for _, launch in self._parsed.values() if launch]

    def _parse(self, name: str, text: bytes) -> tuple[bytes, Launch | None]:
        known = self._parsed.get(name)
        if known and known[0] == text:
            return known
        try:
            names = json.loads(text)["spec"].get("router", {}).get("endpoints")
            return text, desired_state.Desired.from_json(text).launch if names == self._endpoints else None
        except (ClusterError, ValueError, LookupError, TypeError, AttributeError) as error:
            # The record may be from another version.
            logger.warning("ignored unreadable deployment record deployment=%s error=%r", name, error)
            return text, known[1] if known else None


def check_own(spec: Spec) -> None:
    """Raise SpecError if an attached deployment sets what belongs in the spec of the endpoints' owner."""
    if spec.router.endpoints == spec.name:
        raise SpecError(f"router.endpoints: {spec.name} is this deployment; remove the setting")
    misplaced = [
        f"router.{field}" for field in _OF_ENDPOINTS if getattr(spec.router, field) != getattr(RouterSpec(), field)
    ]
    if spec.tracing != TracingSpec():
        misplaced.append("tracing")
    if misplaced:
        raise SpecError(
            f"{', '.join(misplaced)}: not allowed with router.endpoints; set this in the spec of "
            f"{spec.router.endpoints}, which owns the endpoints"
        )


def owner_state(endpoints: str) -> State:
    """Return the state of the deployment that owns the endpoints, as stored on this machine.

    Raises SpecError, DeployError.
    """
    state = states.load(endpoints)
    if state is None or state.deploying or (state.joined_ray and not state.joined_ray.is_running):
        raise SpecError(
            f"router.endpoints: {endpoints} is not deployed from this machine: deploy it first, or name its Ray with "
            "--address if another machine deployed it"
        )
    return state


def attach(spec: Spec) -> RouterSpec:
    """Return the router settings of a spec with `router.endpoints`, completed with those of the endpoints.

    A driver must be connected to their Ray. Raises SpecError.
    """
    endpoints, names = spec.router.endpoints, spec.model.names
    assert endpoints
    owner = desired_state.load(endpoints)
    if owner is None:
        raise SpecError(f"router.endpoints: {endpoints} is not deployed on this Ray; deploy it first")
    if owner.spec.router.endpoints:
        raise SpecError(
            f"router.endpoints: {endpoints} has no endpoints of its own; name {owner.spec.router.endpoints} instead"
        )
    behind = [owner.spec, *(launch.spec for launch in AttachedList(endpoints).launches())]
    for one in behind:
        if shared := [name for name in names if name in one.model.names]:
            raise SpecError(
                f"model.served_name: {shared[0]} is already served by {one.name} at these endpoints; "
                "choose another name"
            )
    lent = {field: getattr(owner.spec.router, field) for field in _OF_ENDPOINTS}
    ports = {"admin_port": spec.router.admin_port or free_ports(2 * owner.spec.router.replicas)}
    return spec.router.model_copy(update={**lent, **ports})


def check_no_attached(state: State) -> None:
    """Raise DeployError if other deployments use this one's endpoints: they would be cut off.

    On a Ray shared by several deployments, a driver must be connected.
    """
    if state.local_ray is not None:
        others = (states.load(name) for name in states.deployed_names() if name != state.name)
        attached_deployments = [
            one.name for one in others if one and (one.endpoints, one.lent_ray) == (state.name, state.local_ray)
        ]
    elif state.endpoints:
        return
    else:
        attached_deployments = sorted(launch.spec.name for launch in AttachedList(state.name).launches())
    if attached_deployments:
        first = " and ".join(f"`cluster down --name {name}`" for name in attached_deployments)
        raise DeployError(
            f"{state.name}: its endpoints also serve {', '.join(attached_deployments)}; {first} first, or add --force"
        )
