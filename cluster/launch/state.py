"""State files of the deployments made from this machine: enough to find each one and to take it down.

One file per deployment, $CLUSTER_STATE_DIR/<name>/state.json (default ~/.local/state/xpyd), next to its logs. It is
written before anything starts, so `cluster down` can clean up after any interruption.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from cluster.launch.local_ray import LocalRay
from core.process import processes
from core.process.atomic_file import user_dir, write_whole
from core.types.errors import DeployError, NotDeployed, SpecError

_FILE = "state.json"
# Written by any Ray that runs on this host.
_RAY_MARK = Path("/tmp/ray/ray_current_cluster")
_RAY_HINT = "; for the Ray that runs on this host, use `cluster --address auto …`"


@dataclass(frozen=True)
class DeployProcess:
    """Process of a running `cluster deploy`."""

    pid: int
    start_time: int | None

    @classmethod
    def current(cls) -> DeployProcess:
        return cls(os.getpid(), processes.start_time(os.getpid()))

    @property
    def is_running(self) -> bool:
        return self.start_time is not None and processes.start_time(self.pid) == self.start_time


@dataclass(frozen=True, kw_only=True)
class State:
    """Stored state of one deployment."""

    name: str
    ray_address: str
    local_ray: LocalRay | None = None  # local Ray started for this deployment
    lent_ray: LocalRay | None = None  # local Ray of the deployment whose endpoints this one uses
    claim: str = ""  # id of the deployment's name lock on Ray at ray_address; empty: none
    owns_serve: bool = False  # Ray Serve was started for this deployment
    grpc: str = ""  # "host:port", or several, separated by commas
    http: str = ""  # "http://host:port", or several, as `grpc`
    # "host:port" of every admin port that a router may use on its own node.
    admin: tuple[str, ...] = ()
    needs_keys: bool = False  # clients need an API key
    certificate: str | None = None  # file with the TLS certificate of the endpoints
    endpoints: str = ""  # name of the deployment whose endpoints this one uses; empty: its own
    model: str = ""  # served model name; empty: unknown, for a partial deployment
    deploying: DeployProcess | None = None  # None once deployed

    @property
    def joined_ray(self) -> LocalRay | None:
        """Local Ray that the deployment runs on. A process must join it before connecting."""
        return self.local_ray or self.lent_ray

    @property
    def is_interrupted(self) -> bool:
        """True if the `cluster deploy` that was deploying it is gone."""
        return self.deploying is not None and not self.deploying.is_running


def state_dir(name: str) -> Path:
    return _root() / name


def log_dir(name: str) -> Path:
    return state_dir(name) / "logs"


def audit_log_path() -> Path:
    """Return the path of the audit log of commands."""
    return _root() / "commands.jsonl"


def operator_key_file(name: str) -> Path:
    """Return the path of the operator's API key, for deployments that require keys."""
    return state_dir(name) / "operator.key"


@contextmanager
def reserve(name: str) -> Iterator[None]:
    """Lock `name` against other commands of this user while a deploy starts. Raises DeployError if it is locked."""
    # Imported here, because only `cluster deploy` needs it, and it takes long.
    from filelock import FileLock, Timeout

    file = _root() / f"{name}.lock"
    lock = FileLock(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock.acquire(blocking=False)
    except Timeout:
        raise DeployError(f"{name} is being deployed by another command") from None
    except OSError as error:
        raise DeployError(f"{file}: {error.strerror}; set CLUSTER_STATE_DIR to a writable directory") from None
    with lock:
        yield


def save(state: State) -> None:
    """Write the state file atomically. Raises DeployError."""
    write_whole(state_dir(state.name) / _FILE, json.dumps(asdict(state), indent=1))


def load(name: str) -> State | None:
    """Return the state of `name`, also if a newer version wrote it; None if it is not deployed from here.

    Raises DeployError if the file cannot be read.
    """
    file = state_dir(name) / _FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a state file of `cluster deploy`"
        raise DeployError(
            f"{file}: {why}; check that nothing of {name} is running (`cluster --address RAY down`, or end its Ray), "
            "and delete the file"
        ) from None


def forget(name: str) -> None:
    """Delete the state file. The logs stay until the next deployment of this name."""
    (state_dir(name) / _FILE).unlink(missing_ok=True)


def deployed_names() -> list[str]:
    return sorted(path.parent.name for path in _root().glob(f"*/{_FILE}"))


def find(name: str | None) -> State:
    """Return the deployment called `name`, or the only one. Raises NotDeployed, or SpecError if there are several."""
    state = load(choose(name, deployed_names(), hint=_RAY_HINT if _RAY_MARK.exists() else ""))
    assert state is not None, "it is one of those that are deployed"
    return state


def choose(name: str | None, deployed: Sequence[str], *, hint: str = "") -> str:
    """Choose a name as find() does. hint: appended to the error if nothing is deployed."""
    if name is None and len(deployed) > 1:
        raise SpecError(f"several deployments are up: {', '.join(deployed)}; choose one with --name")
    if not deployed or (name is not None and name not in deployed):
        problem = f"{name} is not deployed" if name else "nothing is deployed"
        raise NotDeployed(f"{problem}; run `cluster deploy 1P1D` to deploy{hint}")
    return name or deployed[0]


def _root() -> Path:
    """Return the absolute state directory; it is sent to processes with other working directories."""
    return user_dir("CLUSTER_STATE_DIR", ".local", "state", "xpyd")
