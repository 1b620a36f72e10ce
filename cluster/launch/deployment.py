r"""Deploying and taking down: the one procedure that starts and ends everything a deployment consists of.

    checks -> state file -> Ray (found or started) -+-> index, controller -> every replica -+-> health
                                                    '-> Ray Serve ---------> router --------'

The state file is written before anything is started, and names all of it: so take_down() undoes it from wherever it
was left.
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
from cluster.launch import attached_endpoints, host_checks, local_ray, operator_key, preflight
from cluster.launch import state as states
from cluster.launch.audit_log import user_name
from cluster.launch.endpoints import LOOPBACK, Endpoints, admin_addresses, keys_of, plan_endpoints
from cluster.launch.reporter import Reporter
from cluster.launch.state import Command, State
from cluster.ray import name_lock
from cluster.ray.name_lock import NameLock
from core.identity.deployment_secrets import DeploymentSecrets
from core.process.background import BackgroundThread
from core.process.log import clear_logs
from core.process.ports import free_ports
from core.process.stopwatch import Stopwatch
from core.spec.schema import RouterSpec, Spec
from core.types.errors import DeployError
from core.types.launch import Launch
from core.types.request import Role

if TYPE_CHECKING:  # Ray must not be imported before local_ray.join()
    from ray import serve

logger = logging.getLogger(__name__)

ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # by which a command is told to end, but for Ctrl-C
_STOP_S = 60.0
_SERVE_S = 60.0
_ROUTER_HOSTS_S = 60.0
_POLL_S = 0.5


def deploy(
    spec: Spec,
    *,
    address: str | None,
    deadline: float,
    wait_for_nodes: bool,
    parts: Parts,
    reporter: Reporter,
) -> State:
    """Bring `spec` up on the Ray at `address`, or on one of our own, and return when its router answers for all of it.

    Raises ClusterError. Then, and when it is interrupted, nothing that it started is left.
    """
    watch = Stopwatch()
    with states.reserve(spec.name):  # two at once would both find it free
        place = _check(spec, address, wait_for_nodes=wait_for_nodes, say=reporter.say)
        claim = NameLock.new(user_name())
        state = place.state(spec, claim)
        states.save(state)
    clear_logs(str(states.log_dir(spec.name)))
    watch.lap("checks")
    try:
        if state.local_ray:
            reporter.say("starting a local Ray")
            _start_ray(state, state.local_ray)
            watch.lap("Ray")
        name_lock.take(spec.name, claim)
        endpoints = _start(place, spec, state, parts=parts, deadline=deadline, reporter=reporter, watch=watch)
        up = replace(state, deploying=None, grpc=endpoints.grpc, http=endpoints.http)
        states.save(up)  # a full disk, too, must not leave a deployment that counts as interrupted
    except BaseException:
        with _undisturbed():
            with contextlib.suppress(OSError):  # whoever listened may have gone: that may be why
                reporter.say("removing what was started")
            take_down(state, force=True)
        raise
    reporter.say(f"it took: {watch}")
    return up


def check(spec: Spec, *, address: str | None, wait_for_nodes: bool, reporter: Reporter) -> None:
    """Run every check of deploy(), and start nothing. Raises ClusterError."""
    with states.reserve(spec.name):
        _check(spec, address, wait_for_nodes=wait_for_nodes, say=reporter.say)


def take_down(state: State, *, force: bool = False) -> NameLock | None:
    """Remove everything that deploy() started, and forget it.

    A Ray of our own ends with all that runs in it. On somebody else's, our parts are removed one by one; if that Ray
    does not answer, raises DeployError, or, with `force`, takes it for gone. Where another deployment has the name
    there by now, it is left as it is, and its claim is returned. Raises DeployError where its doors serve others, too,
    but for `force`, by which these lose them.
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
    """The router as Ray Serve takes it."""
    from cluster.launch.router_replica import build

    return build(launch, endpoints.actor_options, max_per_node=endpoints.max_per_node)


@dataclass(frozen=True)
class _Place:
    """A Ray, and what a deployment will have there."""

    ray_address: str
    endpoints: Endpoints
    router: RouterSpec  # with what was decided of it
    local: local_ray.LocalRay | None = None
    nodes: Sequence[Node] = ()  # of a Ray of several machines
    is_growing: bool = False  # it may have more of them soon
    owns_serve: bool = True
    lent_ray: local_ray.LocalRay | None = None  # of the deployment whose doors serve this one
    num_routers: int = 1  # that shall see it

    @property
    def is_attached(self) -> bool:
        """The doors are another deployment's."""
        return self.router.endpoints is not None

    def state(self, spec: Spec, claim: NameLock) -> State:
        return State(
            name=spec.name,
            lent_ray=self.lent_ray,
            endpoints=self.router.endpoints or "",
            model=spec.model.name,
            claim=claim.id,
            ray_address=self.ray_address,
            local_ray=self.local,
            owns_serve=self.owns_serve,
            grpc=self.endpoints.grpc,
            http=self.endpoints.http,
            admin=admin_addresses(self.router),
            needs_keys=self.router.keys == "required",
            certificate=self.router.tls_cert,
            deploying=Command.current(),
        )


def _check(spec: Spec, address: str | None, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """Whatever can be found wrong before anything is started; returns where the deployment will be."""
    preflight.check_is_free(spec.name, say)
    preflight.check_index(spec.index, name=spec.name, trust_network=spec.kv.trust_network)
    if spec.router.endpoints:
        return _check_attached(spec, address, wait_for_nodes=wait_for_nodes, say=say)
    if address is not None:
        preflight.check_model(spec, say)
        return _join_ray(spec, address, wait_for_nodes=wait_for_nodes, say=say)
    here = preflight.this_node()
    endpoints = plan_endpoints(spec.router, [here], is_one_machine=True)
    preflight.check_authority(spec.security)
    preflight.check_ports(spec.router, endpoints.host or LOOPBACK)
    preflight.check_certificate(spec.router)
    preflight.check_nodes(spec, [here], wait_for_nodes=wait_for_nodes)
    host_checks.check_hosts(spec, [here], say, is_local=True)
    router = _router(spec, endpoints)
    preflight.check_model(spec, say)
    local = local_ray.prepare()
    return _Place(local.address, endpoints, router, local=local)


def _check_attached(spec: Spec, address: str | None, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """It is on the Ray of those doors, also where that is a local one."""
    assert spec.router.endpoints
    attached_endpoints.check_own(spec)
    lent_ray = None
    if address is None:
        lender = attached_endpoints.lender(spec.router.endpoints)
        address, lent_ray = lender.ray_address, lender.joined_ray
    if lent_ray:
        local_ray.join(lent_ray)
    preflight.check_model(spec, say)
    return replace(_join_ray(spec, address, wait_for_nodes=wait_for_nodes, say=say), lent_ray=lent_ray)


def _join_ray(spec: Spec, address: str, *, wait_for_nodes: bool, say: Callable[[str], None]) -> _Place:
    """Connect to a Ray that is not ours, and check that the deployment may start there."""
    import ray

    from cluster.control.placement import live_nodes, router_nodes
    from cluster.launch import driver, router_app

    driver.connect(address, spec.name)
    if (prefix_source := name_lock.find(spec.name)) or driver.find_controller(spec.name) is not None:
        by = f"by {prefix_source}" if prefix_source else "from another machine or user"
        raise DeployError(
            f"{spec.name} is deployed on this Ray already, or is being deployed, {by}; "
            f"`cluster --address {address} down --name {spec.name}` takes it down"
        )
    owns_serve, nodes = not router_app.is_serve_running(), live_nodes()
    lent = attached_endpoints.attach(spec) if spec.router.endpoints else None
    is_one_machine = len({node.ip for node in nodes}) == 1 and not (wait_for_nodes or driver.is_of_ray_up())
    preflight.check_network(spec, nodes, is_one_machine=is_one_machine)
    endpoints = plan_endpoints(lent.router if lent else spec.router, nodes, is_one_machine=is_one_machine)
    if lent:
        pass  # they are open
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
    gcs: str = ray.get_runtime_context().gcs_address
    return _Place(
        gcs,
        endpoints,
        lent.router if lent else _router(spec, endpoints),
        num_routers=lent.num_routers if lent else 1,
        nodes=() if is_one_machine else nodes,
        is_growing=wait_for_nodes,
        owns_serve=owns_serve,
    )


def _router(spec: Spec, endpoints: Endpoints) -> RouterSpec:
    """With what is left to us decided: where it listens, at which ports operators ask, whether clients need keys."""
    has_keys = operator_key.are_there_keys(spec.name)
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

    driver.connect(local.address, state.name)


def _start(
    place: _Place, spec: Spec, state: State, *, parts: Parts, deadline: float, reporter: Reporter, watch: Stopwatch
) -> Endpoints:
    """Start the index, the controller and the router; return, when everything is ready, where the doors are."""
    from cluster.launch import driver, pool_watch, router_admin, router_app

    log_dir = str(states.log_dir(spec.name))
    driver.run_on_each(place.nodes, clear_logs, log_dir)
    start_serve = (lambda: None) if place.is_attached else router_app.start_serve
    serving = BackgroundThread(start_serve, name="serve")
    serving.start()
    controller = driver.start_controller(spec.name)  # its process comes up while we wait for the index
    head = next((node for node in place.nodes if node.is_head), None)
    index_url = driver.start_index(spec.name, log_dir, head) if spec.index == "embedded" else spec.index
    watch.lap("index")
    launch = Launch(
        spec=spec.model_copy(update={"router": place.router}),
        log_dir=log_dir,
        credentials=DeploymentSecrets.new(index_url=index_url),
    )
    driver.ask(controller, "apply", launch, parts=parts)
    watch.lap("controller")
    serving.join(_SERVE_S)
    if serving.failure:
        raise serving.failure
    watch.lap("Serve")
    if place.is_growing:
        pool_watch.await_ready(controller, Role, deadline=deadline, reporter=reporter)
        watch.lap("replicas")
        _await_router_hosts(spec.router.replicas)
    endpoints = place.endpoints
    if not place.is_attached:
        reporter.say("starting the router")
        endpoints = _endpoints_now(place, spec)
        router_app.start_router(spec.name, router_application(launch, endpoints))
        watch.lap("router")
    pool_watch.await_ready(controller, Role, deadline=deadline, reporter=reporter)
    watch.lap("replicas after that")
    wanted = {role.value: spec.pool(role).replicas for role in Role}
    router_admin.await_seen(state, wanted, num_routers=place.num_routers)
    if place.router.keys == "required" and not place.is_attached:
        operator_key.make(controller, spec.name, say=reporter.say)
    watch.lap("router sees all")
    return endpoints


def _await_router_hosts(wanted: int) -> None:
    """For a while, until each can have a host of its own: those of the replicas are there, so it cannot be long."""
    from cluster.control.placement import live_nodes, router_nodes

    deadline = time.monotonic() + _ROUTER_HOSTS_S
    while len(router_nodes(live_nodes())) < wanted and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _endpoints_now(place: _Place, spec: Spec) -> Endpoints:
    """On a Ray of several machines they are where its nodes of this moment say."""
    if not place.nodes:
        return place.endpoints
    from cluster.control.placement import live_nodes

    return plan_endpoints(spec.router, live_nodes(), is_one_machine=False)


def _remove_from_ray(state: State, *, force: bool) -> NameLock | None:
    """Returns the claim of another deployment that has the name, of which nothing is touched."""
    if state.lent_ray:
        local_ray.join(state.lent_ray)
    import ray
    from ray.exceptions import RayError

    from cluster.launch import driver, router_app

    try:
        driver.connect(state.ray_address, state.name)
        prefix_source = name_lock.find(state.name)
    except (DeployError, RayError):
        if not force:
            raise
        return None
    if (
        prefix_source.id if prefix_source else ""
    ) != state.claim:  # claimed before, and given up after, anything is there
        return prefix_source
    if not force:
        attached_endpoints.check_no_attached(state)
    try:
        router_app.stop_router(state.name, owns_serve=state.owns_serve and not state.endpoints)
        controller = driver.start_controller(state.name)  # the one that is there, or one to clean up after it
        driver.ask(controller, "stop", within_s=_STOP_S)
        ray.kill(controller)
    except (DeployError, RayError) as error:
        if not force:
            raise
        logger.warning("its parts are removed without its controller: %s", error)
        driver.remove_by_force(state.name)
    driver.stop_index(state.name)
    name_lock.give_up(state.name)
    ray.shutdown()
    return None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C must not leave half of it behind, nor the end of the connection over which it came."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDINGS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
