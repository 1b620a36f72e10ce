"""`cluster operators`: people who operate a deployment by certificates of their own, without Ray."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.cli.connection import ask_deployed, find_state
from cluster.cli.deploy import Name
from core.identity.operator_account import PersonRole

if TYPE_CHECKING:
    from core.identity.operator_account import People

operators = typer.Typer(
    help="People who operate by certificates of their own, without Ray: who may look, and who may change things.",
    no_args_is_help=True,
)


@operators.command()
def create(
    person: Annotated[str, typer.Argument(metavar="NAME", help="Whose certificate it is to be.")],
    role: Annotated[PersonRole, typer.Option(help="viewer: status, logs. operator: scale, switch, drain, keys, too.")],
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="For which it holds.")] = 30.0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: NAME.json, here.")] = None,
    name: Name = None,
) -> None:
    """Make a certificate, and a file with it and its key, for `cluster --as FILE`. Nobody else has the key."""
    from cluster.launch.person_file import PersonFile
    from core.identity.credentials import Identity
    from core.identity.key_pair import KeyPair
    from core.identity.process_name import ProcessName

    state = find_state(name)
    who = ProcessName.of_person(state.name, role, person)
    file = out or Path(f"{person}.json")
    PersonFile.check_free(file)
    keys = KeyPair()
    address, certificate = ask_deployed(name, "add_person", person, role, keys.request, days=days)
    PersonFile(address=address, identity=Identity(who, keys.tls_credentials(certificate))).save(file)
    days_left = f"{certificate.life_s / 86_400:.4g} days"
    print(f"{person} may operate {state.name} as {role} for {days_left}, by {socket.gethostname()}:{file.absolute()}")


@operators.command("list")
def list_operators(
    name: Name = None, as_json: Annotated[bool, typer.Option("--json", help="One JSON array.")] = False
) -> None:
    """Show whose certificates are let in."""
    people: People = ask_deployed(name, "people")
    if as_json:
        print(json.dumps([asdict(person) for person in people.known], indent=1))
        return
    from cluster.cli.console import columns

    rows = [["NAME", "ROLE", "UNTIL (UTC)", "CERTIFICATE"]]
    for person in people.known:
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(person.ends_at))
        rows.append([person.name, person.role, until, person.fingerprint[:16]])
    print(columns(rows))


@operators.command()
def revoke(person: Annotated[str, typer.Argument(metavar="NAME")], name: Name = None) -> None:
    """Let nobody in by this person's certificate any more, from the next call on."""
    ask_deployed(name, "remove_person", person)
    print(f"{person} is let in no more")
