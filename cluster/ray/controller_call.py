"""Calls to a deployment's controller from processes started by Ray, such as for their TLS credentials."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.ray.store import CONTROLLER, namespace
from core.identity.authority import KeyPair
from core.identity.credentials import Certificate, Identity, Renewal, TlsCredentials
from core.identity.process_name import ProcessName
from core.types.errors import ClusterError, DeployError

# Longer than a controller needs to restart.
_ASK_S = 60.0


def ask_controller(deployment: str, method: str, *args: Any) -> Any:
    """Call a controller method and block.

    Raises the controller's own ClusterError, or DeployError for anything else.
    """
    try:
        controller: Any = ray.get_actor(CONTROLLER, namespace=namespace(deployment))
        return ray.get(getattr(controller, method).remote(*args), timeout=_ASK_S)
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise DeployError(f"{deployment}'s controller: {method}: {error.cause}") from error
    except (RayError, GetTimeoutError, ValueError) as error:
        raise DeployError(f"{deployment}'s controller: {method}: {' '.join(str(error).split())}") from error


def open_identity(name: ProcessName, *, tls: str) -> Identity:
    """Return this process's identity, renewed until it ends.

    `tls` is the spec's setting. Blocks. Raises ClusterError.
    """
    return open_tls_credentials(name, tls=tls).identity


def open_tls_credentials(name: ProcessName, *, tls: str) -> Renewal:
    """Like open_identity(), but return the renewal, so that a process that changes its name can stop it."""
    identity = Identity(name, None if tls == "off" else _obtain(name))
    renewal = Renewal(identity, lambda: _obtain(name))
    renewal.start()
    return renewal


def _obtain(name: ProcessName) -> TlsCredentials:
    """Request a certificate. The private key is created here and stays in this process."""
    keys = KeyPair()
    certificate: Certificate = ask_controller(name.deployment, "certify", name, keys.request)
    return keys.tls_credentials(certificate)
