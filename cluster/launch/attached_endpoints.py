"""A deployment without doors of its own: those of another one, on the same Ray, serve it (`router.endpoints`)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.launch import state as states
from cluster.launch.state import State
from core.process.ports import free_ports
from core.spec.schema import RouterSpec, Spec, TracingSpec
from core.types.errors import DeployError, SpecError

# What is of doors, and not of a model behind them.
_OF_ENDPOINTS = (
    "replicas", "host", "grpc_port", "http_port", "keys", "tls_cert", "tls_key", "unknown_fields", "cors_origins",
    "stored_responses_mib", "stored_responses_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class AttachedEndpoints:
    """Of the deployment that has them."""

    router: RouterSpec  # the borrower's own, with what is the doors' filled in
    num_routers: int


def check_own(spec: Spec) -> None:
    """Raises SpecError where a borrower's spec says what is for the spec of the doors."""
    if spec.router.endpoints == spec.name:
        raise SpecError(f"router.endpoints: {spec.name} is this deployment itself; leave it out")
    said = [f"router.{field}" for field in _OF_ENDPOINTS if getattr(spec.router, field) != getattr(RouterSpec(), field)]
    if spec.tracing != TracingSpec():
        said.append("tracing")
    if said:
        raise SpecError(
            f"{', '.join(said)}: not beside router.endpoints, for the doors are those of {spec.router.endpoints}, "
            f"whose spec "
            "says this"
        )


def lender(endpoints: str) -> State:
    """The deployment of that name, as this machine remembers it. Raises SpecError, DeployError."""
    state = states.load(endpoints)
    if state is None or state.deploying or (state.joined_ray and not state.joined_ray.is_running):
        raise SpecError(
            f"router.endpoints: {endpoints} is not deployed from here: deploy it first or, where another machine has, "
            f"name its "
            "Ray with --address"
        )
    return state


def attach(spec: Spec) -> AttachedEndpoints:
    """What the spec's routers are then. A driver must be connected to the Ray of both. Raises SpecError."""
    from cluster.control import desired_state as desired_store
    from cluster.control.attached_list import AttachedList

    endpoints, model = spec.router.endpoints, spec.model.name
    assert endpoints
    owner = desired_store.load(endpoints)
    if owner is None:
        raise SpecError(f"router.endpoints: {endpoints} is not deployed on this Ray; deploy it first")
    if owner.spec.router.endpoints:
        raise SpecError(
            f"router.endpoints: {endpoints} has none of its own; name {owner.spec.router.endpoints}, whose it uses"
        )
    behind = [owner.spec, *(launch.spec for launch in AttachedList(endpoints).launches())]
    if taken := next((one.name for one in behind if one.model.name == model), None):
        raise SpecError(
            f"model.served_name: {model} is what clients of these doors call the model of {taken}; set another"
        )
    lent = {field: getattr(owner.spec.router, field) for field in _OF_ENDPOINTS}
    ports = {"admin_port": spec.router.admin_port or free_ports(2 * owner.spec.router.replicas)}
    return AttachedEndpoints(
        router=spec.router.model_copy(update={**lent, **ports}), num_routers=owner.spec.router.replicas
    )


def check_no_attached(state: State) -> None:
    """Raises DeployError where its doors serve others, who would be cut off. On a Ray of several deployments a driver
    must be connected."""
    if state.local_ray is not None:
        attached_deployments = states.served_by(state)
    elif state.endpoints:
        return
    else:
        from cluster.control.attached_list import attached_to

        attached_deployments = attached_to(state.name)
    if attached_deployments:
        first = " and ".join(f"`cluster down --name {name}`" for name in attached_deployments)
        raise DeployError(
            f"{state.name}: its doors serve {', '.join(attached_deployments)}, too; {first} first, or add --force"
        )
