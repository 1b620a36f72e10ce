"""Options of commands that send requests: API key and endpoint access."""

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
        help="Prefer the environment variable: other users can see arguments. Default: the operator's key.",
    ),
]


def access_to(state: State | None, api_key: str | None) -> EndpointAccess:
    """Return access to a deployment's endpoints; None: to an endpoint given by its address."""
    from core.wire.client_access import EndpointAccess

    if state is None:
        return EndpointAccess(api_key=api_key)
    if not api_key and state.needs_keys:
        from cluster.launch import operator_key

        api_key = operator_key.read(state.endpoints or state.name)
    is_tls = state.http.startswith("https://")
    return EndpointAccess(api_key=api_key, certificate=state.certificate, is_tls=is_tls, model=state.model)
