"""`cluster keys`: API keys of clients."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.connection import ask_deployed
from cluster.cli.console import columns
from cluster.cli.options import Name
from core.types.errors import DeployError

if TYPE_CHECKING:
    from core.types.api_key import KeyChange, KeyRegistry

keys = typer.Typer(help="API keys of clients: identity and limits.", no_args_is_help=True)


@keys.command()
def create(
    key: Annotated[str, typer.Argument(metavar="NAME", help="Name of the key's owner.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Tenant; its keys share cached prefixes and one share of the queue. Default: NAME."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per minute, prompts and answers.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum concurrent requests.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of one answer.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="LOW[:HIGH]", help="Allowed priorities; smaller values are served first.")
    ] = None,
    name: Name = None,
) -> None:
    """Create a key and print its secret, which is shown only once. Routers accept the key within a second."""
    from core.types.api_key import new_key, new_secret, parse_priorities

    secret = new_secret()
    new = new_key(
        key,
        secret,
        tenant=tenant,
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        max_tokens=max_tokens,
        priorities=parse_priorities(priority) if priority else None,
    )
    change: KeyChange = ask_deployed(name, "add_key", new)
    typer.echo(f"{new.id} for {new.name}, tenant {new.tenant}; the secret is shown only once:", err=True)
    print(secret)
    if not change.is_published:
        typer.echo("Redis is unavailable: routers accept this key when it is back", err=True)


@keys.command("list")
def list_keys(
    name: Name = None, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False
) -> None:
    """List all keys, without their secrets."""
    registry: KeyRegistry = ask_deployed(name, "keys")
    if as_json:
        trees = [{field: value for field, value in asdict(one).items() if field != "digest"} for one in registry.keys]
        print(json.dumps(trees, indent=1))
        return
    rows = [["NAME", "ID", "TENANT", "RPM", "TPM", "CONCURRENCY", "MAX TOKENS", "PRIORITY"]]
    for one in registry.keys:
        limits = (one.rpm, one.tpm, one.concurrency, one.max_tokens)
        bounds = ":".join(map(str, one.priorities)) if one.priorities else "-"
        rows.append([one.name, one.id, one.tenant, *("-" if limit is None else str(limit) for limit in limits), bounds])
    print(columns(rows))


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="NAME", help="Name or id of a key; see `cluster keys list`.")],
    name: Name = None,
) -> None:
    """Revoke a key: routers reject it within a second. Running requests continue."""
    registry: KeyRegistry = ask_deployed(name, "keys")
    revoked = registry.find(key)
    change: KeyChange = ask_deployed(name, "revoke_key", revoked)
    unavailable = (
        ""
        if change.is_published
        else "Redis is unavailable: running routers accept it until it is back; new ones do not"
    )
    if problems := [problem for problem in (unavailable, change.problem) if problem]:
        raise DeployError(f"{revoked.id} of {revoked.name} is revoked, but {'; and '.join(problems)}")
    print(f"{revoked.id} of {revoked.name} is revoked")
