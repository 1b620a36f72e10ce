"""Calls to a deployment's controller, and the TLS credentials that processes started by Ray get from it."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from cluster.ray.store import CONTROLLER, namespace
from core.identity.authority import KeyPair
from core.identity.credentials import Certificate, Identity, Renewal, TlsCredentials
from core.identity.process_name import ProcessName
from core.types.errors import ClusterError, DeployError

# Longer than a controller needs to restart.
ASK_S = 60.0


def find_controller(deployment: str) -> Any | None:
    """Return the handle of a deployment's controller, or None if there is none in this Ray cluster."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(CONTROLLER, namespace=namespace(deployment))
    return None


def ask(actor: Any, method: str, *args: Any, within_s: float = ASK_S, **kwargs: Any) -> Any:
    """Call an actor's method and wait. Raises the actor's own ClusterError, or DeployError for anything else."""
    try:
        return ray.get(getattr(actor, method).remote(*args, **kwargs), timeout=within_s)
    except RayTaskError as error:
        if isinstance(error.cause, ClusterError):
            raise error.cause from None
        raise DeployError(f"{method}: {type(error.cause).__name__}: {' '.join(str(error.cause).split())}") from error
    except GetTimeoutError:
        raise DeployError(
            f"{method}: no answer within {within_s:g} s; its process restarts, is overloaded or stands still"
        ) from None
    except RayError as error:
        raise DeployError(f"{method}: {' '.join(str(error).split())}") from error


def ask_controller(deployment: str, method: str, *args: Any) -> Any:
    """Like ask(), for the controller of a deployment. Raises the controller's own ClusterError, or DeployError."""
    try:
        controller = find_controller(deployment)
    except RayError as error:  # Ray's head does not answer
        raise DeployError(f"{deployment}'s controller: {method}: {' '.join(str(error).split())}") from error
    if controller is None:
        raise DeployError(f"{deployment}'s controller: {method}: it does not run")
    return ask(controller, method, *args)


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
