"""Setup of one rank: its parameters, its model and its lower tiers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.model import config as model_config
from core.model import source as model_source
from core.model.draft_heads import HeadsPlace
from core.model.draft_source import fetch_for_a_switch, heads_source
from core.spec.kv_windows import why_windows_stay
from core.spec.schema import PoolSpec, Spec
from core.types.errors import SpecError
from core.types.failpoint import Failpoint, unobserved
from core.types.launch import Launch
from core.types.request import Role
from core.types.role_switch import largest_step, unlike
from core.wire.rank_server import RankHost
from engine.config import GIB, EngineConfig
from engine.kv.block_manager import BlockManager
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.scheduler.prompts import Prompt
from engine.tiers.block_file import Stamp
from engine.tiers.commands import LoadResult
from engine.tiers.directory_lock import DirectoryLock, choose_lock, open_key, take_lock
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import RankTiers
from engine.tiers.tiers import Tiers
from kvtransfer.links.backends import backend_for
from kvtransfer.links.nccl import NCCL_BYTES
from worker.grammars import Grammars


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Deployment parameters and process resources of one rank."""

    launch: Launch
    role: Role
    addresses: list[str]  # all ranks of this replica, in rank order
    host: RankHost
    on_progress: Callable[[str, float], None]  # stage, fraction of the whole load
    failpoint: Failpoint = unobserved

    @property
    def spec(self) -> Spec:
        return self.launch.spec

    @property
    def replica(self) -> str:
        return self.host.identity.name.replica

    @property
    def rank(self) -> int:
        return self.host.identity.name.rank

    @property
    def pool(self) -> PoolSpec:
        """Spec of this role's replicas."""
        return self.spec.pool(self.role)


def load_model(
    setup: RankSetup,
    parallel: TensorParallel,
    device: torch.device,
    configure: Callable[[EngineConfig, Spec], EngineConfig],
) -> ModelRunner:
    """Load this rank's shard of the weights and allocate its KV pool. Returns when every rank is loaded.

    configure: adapts the engine's configuration to the role.
    """
    spec, pool = setup.spec, setup.pool
    max_batch_tokens, max_running = largest_step(spec, setup.role)
    torch.set_num_threads(max(1, int(pool.resources.cpus)))
    setup.on_progress("resolving the model", 0.05)
    heads, model_dir = heads_source(spec), model_source.resolve(spec.model.source)
    kept = why_windows_stay(spec, model_config.load(model_dir, max_context=spec.model.max_context))
    if setup.rank == 0:
        fetch_for_a_switch(spec, setup.role)
    config = EngineConfig(
        model_dir=model_dir,
        device=str(device),
        dtype=spec.model.dtype,
        weights=spec.model.weights,
        pool_dtype=spec.kv.pool_dtype,
        unquantized_layers=tuple(spec.kv.unquantized_layers),
        block_size=spec.kv.block_size,
        kv_memory_gib=pool.kv_memory_gib,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_context=spec.model.max_context,
        link_bytes=_link_bytes(setup, device),
        deterministic=spec.engine.deterministic,
        frees_windows=kept is None,
        heads=HeadsPlace(heads.heads, heads.directory) if heads and heads.heads else None,
    )

    def is_loaded() -> None:
        if pool.tensor_parallel > 1:
            setup.on_progress("waiting for the other ranks", 1.0)
        parallel.wait_for_all("load", timeout_s=spec.timeouts.start_s)
        setup.on_progress("running the largest batch", 1.0)

    runner = ModelRunner(
        configure(config, spec),
        parallel,
        progress=lambda fraction: setup.on_progress("loading weights", 0.1 + 0.9 * fraction),
        is_loaded=is_loaded,
    )
    parallel.wait_for_all("pool", timeout_s=spec.timeouts.start_s)
    # Kernel selection may compile for minutes on one rank. Without this barrier the others would wait for it in a
    # collective.
    runner.warm_up(
        max_batch_tokens, on_chosen=lambda: parallel.wait_for_all("kernels", timeout_s=spec.timeouts.start_s)
    )
    return runner


def open_tiers(setup: RankSetup, runner: ModelRunner, on_loaded: Callable[[LoadResult], None]) -> RankTiers | None:
    """Open the tiers below this rank's pool. Returns None if the spec configures none.

    All ranks of a replica must call this together. Raises SpecError if the directory is unusable.
    """
    pool, layout = setup.pool, runner.layout
    num_host, num_disk = (
        int(gib * GIB) // layout.place_bytes if gib else 0 for gib in (pool.kv_host_gib, pool.kv_disk_gib)
    )
    host = disk = None
    if num_host:
        host = HostStore(num_places=num_host, place_bytes=layout.place_bytes, device=runner.pool.device)
    if num_disk:
        root = _root(pool) / setup.spec.name / setup.role.value
        lock = _claim(setup, runner.parallel, root=root)
        stamp = Stamp(layout, setup.rank, _key(root))
        disk = DiskStore(lock.directory, stamp, num_places=num_disk, ended=lock.release)
    return RankTiers(runner.pool, host=host, disk=disk, on_loaded=on_loaded) if host or disk else None


def _root(pool: PoolSpec) -> Path:
    return Path(pool.kv_disk_path).expanduser() if pool.kv_disk_path else model_source.cache_root() / "blocks"


def _key(root: Path) -> bytes:
    try:
        return open_key(root)
    except OSError as error:
        raise SpecError(f"kv_disk_path: {error}") from error


def _claim(setup: RankSetup, parallel: TensorParallel, *, root: Path) -> DirectoryLock:
    """Lock this rank's directory. Rank 0 chooses its name; the other ranks use the same name."""
    try:
        if parallel.is_leader:
            lock = choose_lock(root, replica=setup.replica)
            parallel.broadcast_bytes(lock.name.encode())
            return lock
        name = parallel.broadcast_bytes().decode()
        # Another replica may use that name for this rank; the rank then starts with an empty tier.
        return take_lock(root, name=name, rank=parallel.rank) or choose_lock(
            root, replica=setup.replica, rank=parallel.rank
        )
    except OSError as error:
        raise SpecError(f"kv_disk_path: {root}: {error.strerror or error}") from error


def _link_bytes(setup: RankSetup, device: torch.device) -> int:
    """Return the device memory in bytes for links to and from every other replica that the spec allows."""
    is_nccl = backend_for(device, host_link=setup.spec.kv.host_link) == "nccl"
    return 2 * num_link_peers(setup.spec, setup.pool.tensor_parallel) * NCCL_BYTES if is_nccl else 0


def num_link_peers(spec: Spec, tensor_parallel: int) -> int:
    """Return the number of ranks of other replicas that one rank may link to.

    Counts, per replica, the ranks that share heads with it. With an autoscaler, counts its maximum number of replicas;
    `cluster scale` may exceed this.
    """
    bounds = (spec.autoscale.prefill.max, spec.autoscale.decode.max) if spec.autoscale else (0, 0)
    pools = zip((spec.prefill, spec.decode), bounds, strict=True)
    of_each = ((max(pool.replicas, most), -(-pool.tensor_parallel // tensor_parallel)) for pool, most in pools)
    return max(0, sum(replicas * ranks for replicas, ranks in of_each) - 1)


@dataclass(frozen=True, kw_only=True)
class LeaderHandoverState:
    """State of rank 0. Every block is free or cached."""

    blocks: BlockManager
    tiers: Tiers[Prompt]
    grammars: Grammars


@dataclass(frozen=True, kw_only=True)
class HandoverState:
    """State of an idle rank: nothing computes, and no link accesses its blocks."""

    spec: Spec  # as loaded
    role: Role  # as loaded
    runner: ModelRunner
    tiers: RankTiers | None
    leader: LeaderHandoverState | None

    def check(self, spec: Spec, role: Role) -> None:
        """Raise SpecError if this state does not fit a rank with the given spec and role."""
        if names := unlike(self.spec, self.role, spec):
            raise SpecError(f"loaded {', '.join(names)} differ from those of a {role} replica")
        most, needed = largest_step(self.spec, self.role), largest_step(spec, role)
        if self.runner.device.type == "cuda" and any(need > had for need, had in zip(needed, most, strict=True)):
            raise SpecError(
                f"memory for steps of {most[0]} tokens and {most[1]} sequences, needs {needed[0]} and {needed[1]}"
            )
