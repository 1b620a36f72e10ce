"""A deployment without doors of its own: those of another one, on the same Ray, serve it (`router.doors`)."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.launch import state as states
from cluster.launch.state import State
from core.process.ports import free_ports
from core.spec.schema import RouterSpec, Spec, TracingSpec
from core.types.errors import DeployError, SpecError

# What is of doors, and not of a model behind them.
_OF_DOORS = (
    "replicas", "host", "grpc_port", "http_port", "keys", "tls_cert", "tls_key", "unknown_fields", "cors_origins",
    "stored_responses_mib", "stored_responses_s", "batch_mib",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BorrowedDoors:
    """Of the deployment that has them."""

    router: RouterSpec  # the borrower's own, with what is the doors' filled in
    num_routers: int


def check_own(spec: Spec) -> None:
    """Raises SpecError where a borrower's spec says what is for the spec of the doors."""
    if spec.router.doors == spec.name:
        raise SpecError(f"router.doors: {spec.name} is this deployment itself; leave it out")
    said = [f"router.{field}" for field in _OF_DOORS if getattr(spec.router, field) != getattr(RouterSpec(), field)]
    if spec.tracing != TracingSpec():
        said.append("tracing")
    if said:
        raise SpecError(
            f"{', '.join(said)}: not beside router.doors, for the doors are those of {spec.router.doors}, whose spec "
            "says this"
        )


def lender(doors: str) -> State:
    """The deployment of that name, as this machine remembers it. Raises SpecError, DeployError."""
    state = states.load(doors)
    if state is None or state.deploying or (state.joined_ray and not state.joined_ray.is_running):
        raise SpecError(
            f"router.doors: {doors} is not deployed from here: deploy it first or, where another machine has, name its "
            "Ray with --address"
        )
    return state


def borrow(spec: Spec) -> BorrowedDoors:
    """What the spec's routers are then. A driver must be connected to the Ray of both. Raises SpecError."""
    from cluster.control import desired_state as desired_store
    from cluster.control.attached_list import BorrowerList

    doors, model = spec.router.doors, spec.model.name
    assert doors
    owner = desired_store.load(doors)
    if owner is None:
        raise SpecError(f"router.doors: {doors} is not deployed on this Ray; deploy it first")
    if owner.spec.router.doors:
        raise SpecError(f"router.doors: {doors} has none of its own; name {owner.spec.router.doors}, whose it uses")
    behind = [owner.spec, *(launch.spec for launch in BorrowerList(doors).launches())]
    if taken := next((one.name for one in behind if one.model.name == model), None):
        raise SpecError(
            f"model.served_name: {model} is what clients of these doors call the model of {taken}; set another"
        )
    lent = {field: getattr(owner.spec.router, field) for field in _OF_DOORS}
    ports = {"admin_port": spec.router.admin_port or free_ports(2 * owner.spec.router.replicas)}
    return BorrowedDoors(
        router=spec.router.model_copy(update={**lent, **ports}), num_routers=owner.spec.router.replicas
    )


def check_no_borrowers(state: State) -> None:
    """Raises DeployError where its doors serve others, who would be cut off. On a Ray of several deployments a driver
    must be connected."""
    if state.local_ray is not None:
        borrowers = states.served_by(state)
    elif state.doors:
        return
    else:
        from cluster.control.attached_list import borrowers_of

        borrowers = borrowers_of(state.name)
    if borrowers:
        first = " and ".join(f"`cluster down --name {name}`" for name in borrowers)
        raise DeployError(f"{state.name}: its doors serve {', '.join(borrowers)}, too; {first} first, or add --force")
