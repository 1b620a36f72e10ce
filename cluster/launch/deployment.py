r"""Deploying a cluster and taking it down.

    checks -> state file -> Ray (found or started) -+-> index, controller -> every replica -+-> health
                                                    '-> Ray Serve ---------> router --------'

The state file is written before anything starts and names all of it, so take_down() can undo any partial deployment.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cluster.control.desired_state import Parts
from cluster.control.placement import Node
from cluster.control.replica import Reporter
from cluster.launch import attached_endpoints, host_checks, local_ray, operator_key, preflight
from cluster.launch import state as states
from cluster.launch.audit_log import user_name
from cluster.launch.endpoints import LOOPBACK, Endpoints, keys_of, plan_endpoints, with_endpoints
from cluster.launch.state import DeployProcess, State
from cluster.ray import name_lock
from cluster.ray.name_lock import NameLock
from core.identity.deployment_secrets import DeploymentSecrets
from core.process.background import BackgroundThread
from core.process.log import clear_logs
from core.process.ports import free_ports
from core.process.processes import ENDINGS
from core.process.stopwatch import Stopwatch
from core.spec.schema import RouterSpec, Spec
from core.types.errors import DeployError
from core.types.launch import Launch
from core.types.request import Role

if TYPE_CHECKING:  # Ray must not be imported before local_ray.join()
    from ray import serve

logger = logging.getLogger(__name__)

_STOP_S = 60.0
_SERVE_S = 60.0
_ROUTER_HOSTS_S = 60.0
_POLL_S = 0.5


def deploy(
    spec: Spec, *, address: str | None, deadline: float, wait_for_nodes: bool, parts: Parts, reporter: Reporter
) -> State:
    """Deploy `spec` on the Ray at `address`, or on a local Ray if None. Returns once its router sees all replicas.

    Raises ClusterError. On failure or interruption, everything that was started is removed.
    """
    watch = Stopwatch()
    # Two concurrent deploys would both find the name free.
    with states.reserve(spec.name):
        place = _check(spec, address, wait_for_nodes=wait_for_nodes, say=reporter.say)
        claim = NameLock.new(user_name())
        state = replace(place.state, claim=claim.id, deploying=DeployProcess.current())
        states.save(state)
    clear_logs(str(states.log_dir(spec.name)))
    watch.lap("checks")
    try:
        if state.local_ray:
            reporter.say("starting a local Ray")
            _start_ray(state, state.local_ray)
            watch.lap("Ray")
        name_lock.take(spec.name, claim)
        endpoints = _start(place, state, parts=parts, deadline=deadline, reporter=reporter, watch=watch)
        up = replace(state, deploying=None, grpc=endpoints.grpc, http=endpoints.http)
        # Inside the try block: after a failed write, on a full disk, the deployment is removed.
        states.save(up)
    except BaseException:
        with _signals_ignored():
            # The terminal may be gone, which may have caused this exit.
            with contextlib.suppress(OSError):
                reporter.say("removing what was started")
            take_down(state, force=True)
        raise
    reporter.say(f"took: {watch}")
    return up


def check(spec: Spec, *, address: str | None, wait_for_nodes: bool, reporter: Reporter) -> None:
    """Run all checks of deploy() without starting anything. Raises ClusterError."""
    with states.reserve(spec.name):
        _check(spec, address, wait_for_nodes=wait_for_nodes, say=reporter.say)


def take_down(state: State, *, force: bool = False) -> NameLock | None:
    """Remove everything that deploy() started, and its state file.

    A local Ray is stopped with all that runs in it. On a shared Ray the parts are removed one by one. If that Ray does
    not answer, raises DeployError, or with `force` assumes that it is gone. If another deployment holds the name there,
    it is left alone and its lock is returned. Raises DeployError if other deployments use its endpoints, unless
    `force`.
    """
    other = None
    if state.local_ray is not None:
        if not force:
            attached_endpoints.check_no_attached(state)
        local_ray.stop(state.local_ray)
    elif state.lent_ray is None or state.lent_ray.is_running:
        other = _remove_from_ray(state, force=force)
    states.forget(state.name)
    return other


def router_application(launch: Launch, endpoints: Endpoints) -> serve.Application:
    """Return the Ray Serve application of the router."""
    from cluster.launch.router_replica import build

    return build(launch, endpoints.actor_options, max_per_node=endpoints.max_per_node)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Placement of a deployment, and the settings chosen for it."""

    # With the router's host, keys and ports filled in.
    spec: Spec
    endpoints: Endpoints
    state: State
    nodes: Sequence[Node] = ()  # if Ray has several machines
    # More nodes may join soon.
    is_growing: bool = False

    @property
    def is_attached(self) -> bool:
        """True if this deployment uses the endpoints of another one."""
        return self.spec.router.endpoints is not None


def _check(spec: Spec, address: str | None, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """Run every check that needs nothing started. Returns where the deployment will run."""
    preflight.check_is_free(spec.name, say)
    preflight.check_index(spec.index, name=spec.name, trust_network=spec.kv.trust_network)
    if spec.router.endpoints:
        return _check_attached(spec, address, wait_for_nodes=wait_for_nodes, say=say)
    if address is not None:
        preflight.check_model(spec, say)
        return _join_ray(spec, address, wait_for_nodes=wait_for_nodes, say=say)
    from core.identity.authority import Authority

    here = preflight.this_node()
    endpoints = plan_endpoints(spec.router, [here], is_one_machine=True)
    if spec.security.tls == "files":  # on a shared Ray, the head checks them
        Authority.from_files(spec.security)
    preflight.check_ports(spec.router, endpoints.host or LOOPBACK)
    preflight.check_certificate(spec.router)
    preflight.check_nodes(spec, [here], wait_for_nodes=wait_for_nodes)
    host_checks.check_hosts(spec, [here], say, is_local=True)
    spec = _with_router(spec, _router(spec, endpoints))
    preflight.check_model(spec, say)
    local = local_ray.prepare()
    state = State(name=spec.name, ray_address=local.address, local_ray=local, owns_serve=True)
    return _Place(spec=spec, endpoints=endpoints, state=with_endpoints(state, spec, endpoints))


def _check_attached(spec: Spec, address: str | None, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """Check an attached deployment; it runs on the Ray of its endpoints, which may be a local one."""
    assert spec.router.endpoints
    attached_endpoints.check_own(spec)
    lent_ray = None
    if address is None:
        owner = attached_endpoints.owner_state(spec.router.endpoints)
        address, lent_ray = owner.ray_address, owner.joined_ray
    if lent_ray:
        local_ray.join(lent_ray)
    preflight.check_model(spec, say)
    place = _join_ray(spec, address, wait_for_nodes=wait_for_nodes, say=say)
    return replace(place, state=replace(place.state, lent_ray=lent_ray))


def _join_ray(spec: Spec, address: str, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """Connect to an existing Ray and check that the deployment may start there."""
    import ray

    from cluster.control.placement import live_nodes, router_nodes
    from cluster.launch import driver, router_app

    driver.connect(address, spec.name)
    if (lock := name_lock.find(spec.name)) or driver.find_controller(spec.name) is not None:
        by = f"by {lock}" if lock else "from another machine or user"
        raise DeployError(
            f"{spec.name} is deployed on this Ray already, or is being deployed, {by}; "
            f"`cluster --address {address} down --name {spec.name}` takes it down"
        )
    owns_serve, nodes = not router_app.is_serve_running(), live_nodes()
    lent = attached_endpoints.attach(spec) if spec.router.endpoints else None
    is_one_machine = len({node.ip for node in nodes}) == 1 and not (wait_for_nodes or driver.is_of_ray_up())
    preflight.check_network(spec, nodes, is_one_machine=is_one_machine)
    endpoints = plan_endpoints(lent or spec.router, nodes, is_one_machine=is_one_machine)
    if lent:
        # The owner's routers already listen there.
        pass
    elif is_one_machine:
        preflight.check_ports(spec.router, endpoints.host or LOOPBACK)
        preflight.check_certificate(spec.router)
    else:
        homes = router_nodes(nodes)
        preflight.check_endpoint_ports(
            spec.router,
            [node.ip for node in homes],
            lambda port: driver.run_on_each(homes, driver.is_endpoint_free, spec.router.host, port),
        )
    preflight.check_nodes(spec, nodes, wait_for_nodes=wait_for_nodes)
    host_checks.check_hosts(spec, nodes, say)
    spec = _with_router(spec, lent or _router(spec, endpoints))
    state = State(name=spec.name, ray_address=ray.get_runtime_context().gcs_address, owns_serve=owns_serve)
    return _Place(
        spec=spec,
        endpoints=endpoints,
        state=with_endpoints(state, spec, endpoints),
        nodes=() if is_one_machine else nodes,
        is_growing=wait_for_nodes,
    )


def _with_router(spec: Spec, router: RouterSpec) -> Spec:
    return spec.model_copy(update={"router": router})


def _router(spec: Spec, endpoints: Endpoints) -> RouterSpec:
    """Fill in the router settings that the spec leaves open: host, keys, admin ports."""
    has_keys = operator_key.has_keys(spec.name)
    decided = {
        "host": endpoints.host,
        "keys": keys_of(spec.router, endpoints, has_keys=has_keys),
        "admin_port": spec.router.admin_port or free_ports(2 * spec.router.replicas),
    }
    return spec.router.model_copy(update=decided)


def _start_ray(state: State, local: local_ray.LocalRay) -> None:
    local_ray.start(local, log=states.log_dir(state.name) / "ray.log")
    local_ray.join(local)
    from cluster.launch import driver

    driver.connect(local.address, state.name, within_s=local_ray.START_S)


def _start(
    place: _Place, state: State, *, parts: Parts, deadline: float, reporter: Reporter, watch: Stopwatch
) -> Endpoints:
    """Start index, controller and router. Returns the endpoints once everything is ready."""
    from cluster.launch import driver, router_admin, router_app, status

    spec, log_dir = place.spec, str(states.log_dir(state.name))
    driver.run_on_each(place.nodes, clear_logs, log_dir)
    start_serve = (lambda: None) if place.is_attached else router_app.start_serve
    serving = BackgroundThread(start_serve, name="serve")
    serving.start()
    # Its process starts while we wait for the index.
    controller = driver.start_controller(spec.name)
    head = next((node for node in place.nodes if node.is_head), None)
    index_url = driver.start_index(spec.name, log_dir, head) if spec.index == "embedded" else spec.index
    watch.lap("index")
    launch = Launch(spec=spec, log_dir=log_dir, credentials=DeploymentSecrets.new(index_url=index_url))
    driver.ask(controller, "apply", launch, parts=parts)
    watch.lap("controller")
    serving.join(_SERVE_S)
    if serving.failure:
        raise serving.failure
    watch.lap("Serve")
    if place.is_growing:
        status.await_ready(controller, Role, deadline=deadline, reporter=reporter)
        watch.lap("replicas")
        _await_router_hosts(spec.router.replicas)
    endpoints = place.endpoints
    if not place.is_attached:
        reporter.say("starting the router")
        endpoints = _endpoints_now(place)
        router_app.start_router(spec.name, router_application(launch, endpoints))
        watch.lap("router")
    status.await_ready(controller, Role, deadline=deadline, reporter=reporter)
    watch.lap("replicas after that")
    counts = {role.value: spec.pool(role).replicas for role in Role}
    # Routers of the endpoints' owner run already; some of our own may still be starting.
    router_admin.await_seen(state, counts, num_routers=spec.router.replicas if place.is_attached else 1)
    if spec.router.keys == "required" and not place.is_attached:
        operator_key.make(controller, spec.name, say=reporter.say)
    watch.lap("router sees all")
    return endpoints


def _await_router_hosts(num_hosts: int) -> None:
    """Wait up to 60 s until each router can have its own host. The replicas are ready, so their hosts are up."""
    from cluster.control.placement import live_nodes, router_nodes

    deadline = time.monotonic() + _ROUTER_HOSTS_S
    while len(router_nodes(live_nodes())) < num_hosts and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _endpoints_now(place: _Place) -> Endpoints:
    """Return the endpoints. On several machines they depend on the current nodes."""
    if not place.nodes:
        return place.endpoints
    from cluster.control.placement import live_nodes

    return plan_endpoints(place.spec.router, live_nodes(), is_one_machine=False)


def _remove_from_ray(state: State, *, force: bool) -> NameLock | None:
    """Remove this deployment from a shared Ray. If another one holds the name, touch nothing and return its lock."""
    if state.lent_ray:
        local_ray.join(state.lent_ray)
    import ray
    from ray.exceptions import RayError

    from cluster.launch import driver, router_app

    try:
        driver.connect(state.ray_address, state.name)
        lock = name_lock.find(state.name)
    except DeployError:
        if not force:
            raise
        return None
    # The lock is taken before anything is started, and released after everything is gone.
    if (lock.id if lock else "") != state.claim:
        return lock
    if not force:
        attached_endpoints.check_no_attached(state)
    try:
        router_app.stop_router(state.name, owns_serve=state.owns_serve and not state.endpoints)
        # Returns the running controller, or starts one for the cleanup.
        controller = driver.start_controller(state.name)
        driver.ask(controller, "stop", within_s=_STOP_S)
        ray.kill(controller)
    except (DeployError, RayError) as error:
        if not force:
            raise
        logger.warning("removing without the controller error=%s", error)
        driver.remove_by_force(state.name)
    driver.stop_index(state.name)
    name_lock.give_up(state.name)
    ray.shutdown()
    return None


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and termination signals, which would interrupt the removal halfway."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDINGS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
