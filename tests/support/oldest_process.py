"""Process of the oldest version that must interoperate with ours, a rank or a router, run from that version's tree.

tests.support.oldest_version puts that tree on PYTHONPATH, so imports and names here are that version's.
The first line on stdin is a JSON object that describes the process; the reply is one line of JSON on stdout. Later
lines are "drain" and "lift". The process ends at the end of stdin.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from core.identity.credentials import Certificate, Identity, TlsCredentials
from core.identity.deployment_secrets import DeploymentSecrets
from core.identity.process_name import ProcessName
from core.spec.loader import parse_spec
from core.types.launch import Launch


def main() -> None:
    order = json.loads(sys.stdin.readline())
    name = ProcessName.parse(order["name"])
    assert name
    identity = Identity(name, _tls_credentials(order["tls_credentials"]))
    if name.is_router:
        asyncio.run(_route(order, identity))
    else:
        _work(order, identity)


def _tls_credentials(tree: dict[str, Any]) -> TlsCredentials:
    certificate = Certificate(
        chain=tree["chain"].encode(), authorities=tree["authorities"].encode(), life_s=tree["life_s"]
    )
    return TlsCredentials(certificate=certificate, key=tree["key"].encode())


def _secrets(order: dict[str, Any]) -> DeploymentSecrets:
    return DeploymentSecrets(secret=bytes.fromhex(order["secret"]), index_url=order["index_url"])


def _work(order: dict[str, Any], identity: Identity) -> None:
    ceiling = None
    if order["ceiling"]:
        from tests.support.ceiling import Ceiling

        ceiling = Ceiling(order["ceiling"])
        ceiling.arm()
    role = identity.name.replica.partition("-")[0]
    rank = importlib.import_module(f"{role}_worker.actor").make_rank(
        Launch(spec=parse_spec(order["spec"]), log_dir="unused", credentials=_secrets(order)),
        identity=identity,
        host="127.0.0.1",
    )
    address = rank.bind()["address"]
    rank.load([address])
    _say(address=address)
    for line in sys.stdin:
        if line.strip() == "drain":
            rank.drain()
        elif ceiling:
            ceiling.lift()
    rank.stop()
    os._exit(0)


async def _route(order: dict[str, Any], identity: Identity) -> None:
    from frontend.service import RouterService

    service = await RouterService.open(
        parse_spec(order["spec"]),
        credentials=_secrets(order),
        identity=identity,
    )
    _say(grpc=f"127.0.0.1:{service.grpc_port}", admin="{}:{}".format(*service.admin_address))
    await asyncio.to_thread(sys.stdin.read)
    await service.close()


def _say(**facts: str) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
