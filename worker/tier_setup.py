"""Creation of a rank's lower tiers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.model import source as model_source
from core.spec.schema import PoolSpec
from core.types.errors import SpecError
from engine.config import GIB
from engine.runner.parallel import TensorParallel
from engine.runner.runner import ModelRunner
from engine.tiers.block_file import Stamp
from engine.tiers.commands import LoadResult
from engine.tiers.directory_lock import DirectoryLock, choose_lock, open_key, take_lock
from engine.tiers.disk_store import DiskStore
from engine.tiers.host_store import HostStore
from engine.tiers.rank_tiers import RankTiers
from worker.rank_setup import RankSetup


def open_tiers(setup: RankSetup, runner: ModelRunner, on_loaded: Callable[[LoadResult], None]) -> RankTiers | None:
    """Open the tiers below this rank's pool. Returns None if the spec configures none.

    All ranks of a replica must call this together. Raises SpecError if the directory is unusable.
    """
    pool, layout = setup.pool, runner.layout
    num_host, num_disk = (int(gib * GIB) // layout.block_bytes for gib in (pool.kv_host_gib, pool.kv_disk_gib))
    host = disk = None
    if num_host:
        host = HostStore(num_places=num_host, block_bytes=layout.block_bytes, device=runner.pool.device)
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
