"""What the command line remembers of each deployment on this machine: enough to find it again, and to take it down.

One file per deployment, $CLUSTER_STATE_DIR/<name>/state.json, beside its logs; by default under ~/.local/state/xpyd. It
is written before anything is started: whatever became of the command that wrote it, `cluster down` can clean up.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.launch.local_ray import LocalRay
from core.process import processes
from core.process.atomic_file import write_whole
from core.types.errors import DeployError, NotDeployed, SpecError
from core.types.json_records import known_fields

_FILE = "state.json"
_RAY_MARK = Path("/tmp/ray/ray_current_cluster")  # of whoever's Ray runs on this host
_RAY_HINT = "; what runs on the Ray of this host is asked by `cluster --address auto …`"


@dataclass(frozen=True)
class Command:
    """A running `cluster deploy`."""

    pid: int
    start_time: int | None

    @classmethod
    def current(cls) -> Command:
        return cls(os.getpid(), processes.start_time(os.getpid()))

    @property
    def is_running(self) -> bool:
        return self.start_time is not None and processes.start_time(self.pid) == self.start_time


@dataclass(frozen=True, kw_only=True)
class State:
    """One deployment."""

    name: str
    ray_address: str
    local_ray: LocalRay | None  # the Ray that was started for it
    lent_ray: LocalRay | None = None  # the Ray that was started for the deployment whose doors serve it
    claim: str = ""  # the id of its claim on that Ray; "": of a version that made none
    owns_serve: bool = False  # Ray Serve was started for it
    grpc: str  # "host:port", or several of them: "host:port,host:port"
    http: str  # "http://host:port", likewise
    admin: tuple[str, ...] = ()  # "host:port" of every port at which a router may answer operators, on its own node
    needs_keys: bool = False  # clients show an API key
    certificate: str | None = None  # a file: the doors' own
    endpoints: str = ""  # the deployment whose doors serve it; empty: its own
    model: str = ""  # what clients call its model; empty: of a version that did not say
    deploying: Command | None  # None: deployed

    @property
    def joined_ray(self) -> LocalRay | None:
        """The Ray of this machine that it is on, ours: a process that speaks to it joins that first."""
        return self.local_ray or self.lent_ray

    @property
    def is_interrupted(self) -> bool:
        """The command that was deploying it is gone."""
        return self.deploying is not None and not self.deploying.is_running


def state_dir(name: str) -> Path:
    return _root() / name


def log_dir(name: str) -> Path:
    return state_dir(name) / "logs"


def audit_log_path() -> Path:
    """Of the commands that have changed any of them."""
    return _root() / "commands.jsonl"


def operator_key_file(name: str) -> Path:
    """The API key of this machine's operator, where the deployment asks for one."""
    return state_dir(name) / "operator.key"


@contextmanager
def reserve(name: str) -> Iterator[None]:
    """Nobody else of this machine's user reserves `name` meanwhile: whoever finds it free may take it. Raises
    DeployError where somebody has it."""
    file = _root() / f"{name}.lock"
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = file.open("w")
    except OSError as error:
        raise DeployError(f"{file}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process, whatever becomes of it
            has_it = os.path.samestat(os.fstat(lock.fileno()), file.stat())
        except (BlockingIOError, FileNotFoundError):
            has_it = False
        if not has_it:  # or somebody had it, and has removed it since we opened it: it keeps nobody out any more
            raise DeployError(f"{name} is being deployed by another command, which has just begun")
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def save(state: State) -> None:
    """Atomically: a reader never sees half a file. Raises DeployError."""
    write_whole(state_dir(state.name) / _FILE, json.dumps(asdict(state), indent=1))


def load(name: str) -> State | None:
    """What is remembered of `name`, also by a newer version; None when it is not deployed from here. Raises
    DeployError where it cannot be read."""
    file = state_dir(name) / _FILE
    try:
        return _parse(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not what `cluster deploy` has written"
        raise DeployError(
            f"{file}: {why}; see that nothing of {name} runs any more (`cluster --address RAY down`, or end its Ray), "
            "and delete the file"
        ) from None


def forget(name: str) -> None:
    """The logs stay, until the next deployment of this name."""
    (state_dir(name) / _FILE).unlink(missing_ok=True)


def deployed_names() -> list[str]:
    return sorted(path.parent.name for path in _root().glob(f"*/{_FILE}"))


def served_by(endpoints: State) -> list[str]:
    """Deployments on the Ray that was started for this one, which its doors serve, too. Raises DeployError."""
    others = (load(name) for name in deployed_names() if name != endpoints.name)
    return [
        one.name for one in others if one and one.endpoints == endpoints.name and one.lent_ray == endpoints.local_ray
    ]


def find(name: str | None) -> State:
    """The deployment called `name`, or the only one. Raises NotDeployed, or SpecError when there are several."""
    state = load(choose(name, deployed_names(), hint=_RAY_HINT if _RAY_MARK.exists() else ""))
    assert state is not None, "it is one of those that are deployed"
    return state


def choose(name: str | None, deployed: Sequence[str], *, hint: str = "") -> str:
    """As find(), of these names. hint: where else it may be."""
    if name is None and len(deployed) > 1:
        raise SpecError(f"several deployments are up: {', '.join(deployed)}; choose one with --name")
    if not deployed or (name is not None and name not in deployed):
        what = f"{name} is not deployed" if name else "nothing is deployed"
        raise NotDeployed(f"{what}; `cluster deploy 1P1D` would do so{hint}")
    return name or deployed[0]


def _parse(text: str) -> State:
    tree = json.loads(text)
    local_ray, lent_ray = tree.pop("local_ray"), tree.pop("lent_ray", None)
    deploying, admin = tree.pop("deploying"), tree.pop("admin", ())
    return State(
        local_ray=LocalRay(**known_fields(LocalRay, local_ray)) if local_ray else None,
        lent_ray=LocalRay(**known_fields(LocalRay, lent_ray)) if lent_ray else None,
        deploying=Command(**known_fields(Command, deploying)) if deploying else None,
        admin=tuple(admin),
        **known_fields(State, tree),
    )


def _root() -> Path:
    """Absolute: it is sent to processes that stand in other directories."""
    directory = os.environ.get("CLUSTER_STATE_DIR")
    return Path(directory).expanduser().absolute() if directory else Path.home() / ".local" / "state" / "xpyd"
