"""Execution of an update: replica counts per revision and traffic shares.

Its state is in Desired; everything else is derived from the running replicas.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ray.exceptions import RayError

from cluster.control.desired_state import Desired
from cluster.control.placement import check_fit, check_room, live_nodes, pools_of, share_out
from cluster.control.pool import Goal, ReplicaPool
from cluster.control.replica import ReplicaState, RevisionReport, UpdateReport
from cluster.control.replica_lifecycle import ReplicaLifecycle
from cluster.rollout.revision_reporter import RevisionReporter
from cluster.rollout.spec_diff import SpecChange, changes_of, check_possible, kind_of, tokens_of
from cluster.rollout.update import Phase, Update, UpdateOptions
from cluster.rollout.update_plan import ReplicaCount, RoleView, TargetSizes, is_at_end, next_step, problem_of
from core.spec.schema import PoolSpec, Spec
from core.types.errors import DeployError, SpecError
from core.types.request import Role
from core.types.revisions import Revision, RevisionTable

logger = logging.getLogger(__name__)

# Time after which routers have seen a serving replica.
_SEEN_S = 2.0
# Failed start rounds of a new revision before it is rolled back.
_FAILED_ROUNDS = 3


class Updater:
    """Updater of a deployment, owned by the controller's event loop."""

    def __init__(
        self, pools: Mapping[Role, ReplicaPool], *, reporter: RevisionReporter, save: Callable[[], None]
    ) -> None:
        """save: stores the changed desired state."""
        self._pools = pools
        self._reporter = reporter
        self._save = save
        # time.monotonic() at which the canary became complete.
        self._tried_since: float | None = None
        # Traffic share of the new revision.
        self._share = 0.0
        self._waits_for = ""
        self._published: tuple[Revision, ...] | None = None

    def begin(
        self, desired: Desired, spec: Spec, options: UpdateOptions, *, seen: Spec | None = None
    ) -> list[SpecChange]:
        """Start an update to `spec`. Returns the changes.

        seen: the spec that the operator edited, which must still be current; None: any is. Raises SpecError, and
        DeployError if there is no room for the new revision next to the old one; nothing has changed then.
        """
        update = desired.update
        is_returning = update is not None and update.phase is Phase.RETURNING
        if update and not is_returning and (update.spec, update.options) == (spec, options):
            # Ray repeats a call that a controller had not answered when it died.
            return []
        if desired.update:
            raise SpecError(
                f"an update to revision {desired.update.revision} is under way ({desired.update.phase}): wait for it, "
                "or roll it back with `cluster update --abort`"
            )
        changes = changes_of(desired.spec, spec)
        meanwhile = changes_of(seen, desired.spec) if seen else []
        # Without changes it may be a repeated call, with nothing to replace.
        if changes and meanwhile:
            differences = ", ".join(map(str, meanwhile))
            raise SpecError(f"the deployment was changed in the meantime ({differences}): run `cluster update` again")
        check_possible(changes)
        roles = roles_of(changes, restarts_all=options.restarts_all)
        if not roles:
            if not options.waits_for_nodes:
                more = {role: spec.pool(role).replicas - desired.spec.pool(role).replicas for role in Role}
                check_room(spec, more, is_draining=any(pool.has_draining for pool in self._pools.values()))
            desired.launch = replace(desired.launch, spec=spec)
        else:
            if not options.waits_for_nodes:
                self._check_room(desired, spec, roles)
            desired.last_revision += 1
            phase = Phase.CANARY if options.canary else Phase.ROLLING
            desired.update = Update(
                revision=desired.last_revision, spec=spec, roles=roles, options=options, phase=phase
            )
            self._reporter.begin()
        for pools in self._pools.values():
            pools.retry()
        self._save()
        return changes

    def check_none(self, desired: Desired) -> None:
        """Raise SpecError during an update, which owns the pool sizes."""
        if update := desired.update:
            raise SpecError(
                f"an update to revision {update.revision} is under way: pool sizes cannot change until it ends"
            )

    def abort(self, desired: Desired, reason: str) -> None:
        """Roll back to the old revision. Raises SpecError if there is no update."""
        if desired.update is None:
            raise SpecError("no update is under way")
        if desired.update.phase is not Phase.RETURNING:
            desired.update = replace(desired.update, phase=Phase.RETURNING, reason=reason)
            logger.warning("rolling back revision=%d reason=%s", desired.update.revision, reason)
            self._save()

    def goals(self, desired: Desired) -> dict[Role, dict[int, Goal]]:
        """Advance the update, and return the desired pools by role and revision."""
        self._advance(desired)
        goals = {role: {desired.makes[role]: Goal(desired, desired.spec.pool(role).replicas)} for role in Role}
        if update := desired.update:
            views = self._views(desired, update)
            steps = self._step(update, views)
            for role, targets in steps.items():
                old, new = _by_age(update, targets)
                goals[role] = {
                    desired.makes[role]: Goal(desired, old),
                    update.revision: Goal(desired.of(update.spec), new),
                }
            self._share = _new_share(update, views, steps)
        return goals

    def tell(self, desired: Desired) -> RevisionTable:
        """Publish to routers which replicas belong to which revision. Returns the table."""
        revisions = self._revisions(desired)
        if revisions != self._published and (desired.update or desired.table_version):
            desired.table_version += 1
            self._save()
        self._published = revisions
        table = RevisionTable(version=desired.table_version, revisions=revisions)
        self._reporter.tell(table)
        return table

    async def close(self) -> None:
        await self._reporter.close()

    def report(self, desired: Desired) -> RevisionReport:
        """Return the update's part of `cluster status`."""
        shown: UpdateReport | None = None
        if update := desired.update:
            shown = {
                "revision": update.revision,
                "phase": update.phase,
                "reason": update.reason,
                "roles": sorted(update.roles),
                "share": round(self._share, 3),
                "step": self._step_in_words(desired, update),
            }
        return {"number": desired.revision, "update": shown, "last_update": desired.last_update}

    def _advance(self, desired: Desired) -> None:
        """Move to the next phase if the current one is complete."""
        if (update := desired.update) is None:
            return
        if update.phase is not Phase.RETURNING and (problem := self._problem(desired, update)):
            self.abort(desired, problem)
        elif update.phase is Phase.CANARY:
            self._watch_canary(desired, update)
        elif is_at_end(self._views(desired, update)):
            self._end(desired, update)

    def _watch_canary(self, desired: Desired, update: Update) -> None:
        now = time.monotonic()
        if not all(view.candidate.ready >= view.candidate_target for view in self._views(desired, update).values()):
            self._tried_since = None
        elif self._tried_since is None:
            self._tried_since = now
        elif now - self._tried_since >= update.options.canary_s:
            desired.update = replace(update, phase=Phase.ROLLING)
            logger.info("canary passed, rolling out revision=%d", update.revision)
            self._save()

    def _end(self, desired: Desired, update: Update) -> None:
        if update.phase is Phase.ROLLING:
            desired.launch = replace(desired.launch, spec=update.spec)
            desired.revision = update.revision
            desired.makes |= dict.fromkeys(update.roles, update.revision)
            desired.last_update = f"revision {update.revision} serves"
        else:
            desired.last_update = f"revision {update.revision} was rolled back: {update.reason}"
        desired.update, desired.made = None, {}
        self._tried_since, self._share = None, 0.0
        logger.info("update finished result=%s", desired.last_update)
        self._save()

    def _problem(self, desired: Desired, update: Update) -> str:
        """Return why the new revision must be rolled back, or ""."""
        for role in update.roles:
            starts = self._pools[role].starts(update.revision)
            final = [failure for failure in starts.failures if failure["will_repeat"]]
            if final or starts.rounds >= _FAILED_ROUNDS:
                return (final or starts.failures)[-1]["text"]
        counts, options = self._reporter.counts, update.options
        return problem_of(
            counts.get(desired.revision),
            counts.get(update.revision),
            max_error_increase=options.max_error_increase,
            max_latency_factor=options.max_latency_factor,
        )

    def _views(self, desired: Desired, update: Update) -> dict[Role, RoleView]:
        """Return the replicas of both revisions for each replaced role."""
        views: dict[Role, RoleView] = {}
        candidate_pools: dict[Role, PoolSpec] = {}
        lacking: dict[Role, int] = {}
        for role in update.roles:
            old = _tally(self._pools[role].lives_of(desired.makes[role])), desired.spec.pool(role)
            new = _tally(self._pools[role].lives_of(update.revision)), self._pool_now(update, role)
            (leaving, before), (candidate, after) = (new, old) if update.phase is Phase.RETURNING else (old, new)
            view = RoleView(
                leaving=leaving, candidate=candidate, leaving_target=before.replicas, candidate_target=after.replicas
            )
            views[role], candidate_pools[role] = view, after
            lacking[role] = min(max(0, after.replicas - candidate.staying), view.surge)
        rooms = lacking if update.options.waits_for_nodes else self._room(candidate_pools, lacking)
        return {role: replace(view, room=rooms[role]) for role, view in views.items()}

    def _pool_now(self, update: Update, role: Role) -> PoolSpec:
        """Return the new revision's pool; scaled down while it is a canary."""
        pool = update.spec.pool(role)
        if update.phase is not Phase.CANARY or not update.options.canary:
            return pool
        return pool.model_copy(
            update={"replicas": min(pool.replicas, max(1, round(update.options.canary * pool.replicas)))}
        )

    def _step(self, update: Update, views: Mapping[Role, RoleView]) -> dict[Role, TargetSizes]:
        short = sorted(role for role, view in views.items() if view.is_short_of_room)
        self._waits_for = f"no room for another {' and '.join(short)} replica" if short else ""
        return next_step(views, is_trial=update.phase is Phase.CANARY)

    def _room(self, pools: Mapping[Role, PoolSpec], lacking: Mapping[Role, int]) -> dict[Role, int]:
        """Return how many of the lacking replicas have room now."""
        waiting = {role: sum(view.state is ReplicaState.PENDING for view in self._pools[role].views) for role in pools}
        try:
            return share_out(live_nodes(), pools, waiting, lacking)
        except RayError:
            # Without data from Ray, start nothing.
            return dict.fromkeys(pools, 0)

    def _check_room(self, desired: Desired, spec: Spec, roles: Iterable[Role]) -> None:
        """Check that one new replica of each role fits next to the old ones, or after these have shrunk to one.

        Raises DeployError.
        """
        nodes = live_nodes()
        pools = pools_of(spec)
        counts = {role: min(1, pools[role].replicas) for role in roles}
        try:
            check_fit(nodes, pools, counts)
        except DeployError as error:
            # Raise if they would not fit on empty nodes either.
            check_fit([replace(node, available=node.total) for node in nodes], pools, counts)
            alone = [role for role in roles if desired.spec.pool(role).replicas == 1]
            if alone:
                raise DeployError(
                    f"{error}: there is no room for a new revision beside the old one, whose only {alone[0]} replica "
                    f"cannot make room without an outage; run `cluster scale {alone[0]}=2` if that fits, add a "
                    "node, or run `cluster down` and deploy again"
                ) from None

    def _revisions(self, desired: Desired) -> tuple[Revision, ...]:
        update = desired.update
        if update is None:
            return ()
        new_makes = desired.makes | dict.fromkeys(update.roles, update.revision)
        is_new_taking = update.phase is Phase.ROLLING
        return (
            self._revision(desired.revision, desired.spec, desired.makes, 1 - self._share, takes_more=True),
            self._revision(update.revision, update.spec, new_makes, self._share, takes_more=is_new_taking),
        )

    def _revision(
        self, number: int, spec: Spec, makes: Mapping[Role, int], share: float, *, takes_more: bool
    ) -> Revision:
        lives = [life for role in Role for life in self._pools[role].lives_of(makes[role])]
        return Revision(
            number=number,
            share=share,
            takes_more=takes_more,
            tokens=tokens_of(spec),
            kind=kind_of(spec),
            replicas=frozenset(life.view.id for life in lives),
        )

    def _step_in_words(self, desired: Desired, update: Update) -> str:
        parts = []
        for role in sorted(update.roles):
            makes = desired.makes[role], update.revision
            old, new = (_tally(self._pools[role].lives_of(make)) for make in makes)
            parts.append(
                f"{role} {old.staying} old, {new.ready} of {update.spec.pool(role).replicas} new"
                + (f", {old.draining + new.draining} draining" if old.draining + new.draining else "")
            )
        return "; ".join([*parts, self._waits_for] if self._waits_for else parts)


def roles_of(changes: Iterable[SpecChange], *, restarts_all: bool = False) -> frozenset[Role]:
    """Return the roles whose replicas an update replaces."""
    return frozenset(Role) if restarts_all else frozenset(role for one in changes for role in one.needs.roles)


def _new_share(update: Update, views: Mapping[Role, RoleView], steps: Mapping[Role, TargetSizes]) -> float:
    """Return the new revision's share of requests after this step; the role with the smaller share limits it."""
    is_candidate_complete = all(view.is_candidate_ready for view in views.values())
    candidate = min((view.share_there for view in views.values()), default=0.0) if is_candidate_complete else 0.0
    leaving = min(
        (
            min(view.leaving.ready, steps[role].leaving) / view.leaving_target
            for role, view in views.items()
            if view.leaving_target
        ),
        default=0.0,
    )
    if update.phase is Phase.CANARY:
        return (update.options.canary or 0.0) if candidate else 0.0
    if update.phase is Phase.RETURNING:
        return leaving / (leaving + candidate) if leaving and not candidate else 0.0
    return candidate / (leaving + candidate) if candidate else 0.0


def _by_age(update: Update, targets: TargetSizes) -> tuple[int, int]:
    """Return the sizes of the old and the new revision."""
    is_back = update.phase is Phase.RETURNING
    return (targets.candidate, targets.leaving) if is_back else (targets.leaving, targets.candidate)


def _tally(lives: Iterable[ReplicaLifecycle]) -> ReplicaCount:
    now, counts = time.monotonic(), dict.fromkeys(("ready", "starting", "pending", "draining"), 0)
    for life in lives:
        state, since = life.view.state, life.serving_since
        is_seen = life.is_adopted or (since is not None and now - since >= _SEEN_S)
        if state is ReplicaState.DRAINING:
            counts["draining"] += 1
        elif state is ReplicaState.PENDING and life.view.stage:
            # Without a stage, placement has just been requested.
            counts["pending"] += 1
        else:
            counts["ready" if state is ReplicaState.READY and is_seen else "starting"] += 1
    return ReplicaCount(**counts)
