"""`cluster keys`: the API keys of clients."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import ask_deployed
from cluster.cli.deploy import Name
from core.types.errors import DeployError

if TYPE_CHECKING:
    from core.types.api_key import ApiKey, KeyChange, KeyRegistry

keys = typer.Typer(help="The API keys of clients: who may ask, as whom, and how much.", no_args_is_help=True)


@keys.command()
def create(
    key: Annotated[str, typer.Argument(metavar="NAME", help="Of whoever is to have it.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="Keys of one tenant share cached prefixes and a share of the queue. Default: NAME."),
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests in any minute.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens in any minute, of prompts and answers.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at a time.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one answer.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="LOW[:HIGH]", help="What it may ask for; the smaller goes first.")
    ] = None,
    name: Name = None,
) -> None:
    """Make a key, and print its secret: this once, and nowhere else. Every router takes it within a second."""
    from core.types.api_key import new_key, new_secret, parse_priorities

    secret = new_secret()
    made = new_key(
        key,
        secret,
        tenant=tenant,
        rpm=rpm,
        tpm=tpm,
        concurrency=concurrency,
        max_tokens=max_tokens,
        priorities=parse_priorities(priority) if priority else None,
    )
    change: KeyChange = ask_deployed(name, "add_key", made)
    typer.echo(f"{made.id} for {made.name}, of tenant {made.tenant}; it is shown only now:", err=True)
    print(secret)
    if not change.is_told:
        typer.echo("Redis is away: routers take this key when it is back", err=True)


@keys.command("list")
def list_keys(
    name: Name = None, as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False
) -> None:
    """Show every key, without its secret, which nobody has but its client."""
    registry: KeyRegistry = ask_deployed(name, "keys")
    if as_json:
        print(json.dumps([_public(one) for one in registry.keys], indent=1))
        return
    from cluster.cli.console import columns

    rows = [["NAME", "ID", "TENANT", "RPM", "TPM", "CONCURRENCY", "MAX TOKENS", "PRIORITY"]]
    for one in registry.keys:
        limits = (one.rpm, one.tpm, one.concurrency, one.max_tokens)
        bounds = ":".join(map(str, one.priorities)) if one.priorities else "-"
        rows.append([one.name, one.id, one.tenant, *("-" if limit is None else str(limit) for limit in limits), bounds])
    print(columns(rows))


@keys.command()
def revoke(
    key: Annotated[str, typer.Argument(metavar="NAME", help="The name or the id of a key; see `cluster keys list`.")],
    name: Name = None,
) -> None:
    """Let nobody in by this key any more: every router refuses it within a second. What runs goes on to its end."""
    registry: KeyRegistry = ask_deployed(name, "keys")
    revoked = registry.find(key)
    change: KeyChange = ask_deployed(name, "revoke_key", revoked)
    unavailable = (
        "" if change.is_told else "Redis is away: routers that run let it in until it is back; one that starts does not"
    )
    if problems := [problem for problem in (unavailable, change.problem) if problem]:
        raise DeployError(f"{revoked.id} of {revoked.name} is revoked, but {'; and '.join(problems)}")
    print(f"{revoked.id} of {revoked.name} is revoked")


def _public(key: ApiKey) -> dict[str, Any]:
    fields = asdict(key)
    del fields["digest"]
    return fields
