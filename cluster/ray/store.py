"""Ray's control store as key-value storage, as durable as Ray's own table of actors.

Each deployment has a namespace for its entries. Ray must be connected when a function is called. All functions raise
DeployError if the store does not answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from core.types.errors import DeployError

# Name of the controller's actor.
CONTROLLER = "controller"


def namespace(name: str) -> str:
    """Return the namespace of a deployment's entries, which is also Ray's namespace of its actors.

    Its placement groups are named `<namespace>/<replica>`.
    """
    return f"xpyd-{name}"


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Translate Ray's errors into DeployError with one line."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, OSError) as error:
        raise DeployError(f"Ray's key-value store does not answer: {' '.join(str(error).split())}") from error


@_one_line_errors()
def put(space: str, key: str, text: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key.encode(), text.encode(), overwrite=True, namespace=space.encode())


@_one_line_errors()
def put_new(space: str, key: str, text: str) -> bool:
    """Store the text unless an entry exists. Returns whether it was stored."""
    from ray.experimental import internal_kv

    return not internal_kv._internal_kv_put(key.encode(), text.encode(), overwrite=False, namespace=space.encode())


@_one_line_errors()
def get(space: str, key: str) -> bytes | None:
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=space.encode())
    return found


@_one_line_errors()
def keys_in(space: str) -> list[str]:
    """Return the keys of a namespace, sorted."""
    from ray.experimental import internal_kv

    return sorted(key.decode() for key in internal_kv._internal_kv_list(b"", namespace=space.encode()))


@_one_line_errors()
def delete(space: str, key: str) -> None:
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key.encode(), namespace=space.encode())
