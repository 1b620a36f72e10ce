"""What every command takes that asks the model: an API key, and which deployment's doors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from cluster.launch.state import State
    from core.wire.client_access import EndpointAccess

API_KEY = "XPYD_API_KEY"

ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar=API_KEY,
        show_default=False,
        help="Better in the environment: arguments are seen by everybody. Default: this machine's operator's.",
    ),
]


def access_to(state: State | None, api_key: str | None) -> EndpointAccess:
    """How to enter the doors of a deployment; None: of an endpoint that was named."""
    from core.wire.client_access import EndpointAccess

    if state is None:
        return EndpointAccess(api_key=api_key)
    if not api_key and state.needs_keys:
        from cluster.launch import operator_key

        api_key = operator_key.read(state.endpoints or state.name)
    is_tls = state.http.startswith("https://")
    return EndpointAccess(api_key=api_key, certificate=state.certificate, is_tls=is_tls, model=state.model)
