"""Router in a separate process, for tests that kill it: `python -m tests.e2e.router_process`.

The first line on stdin says what to be, in JSON; the answer is one line, its HTTP address. It lives until it is killed.
Calls between processes are in clear: the spec says `security.tls: off`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from core.identity.deployment_secrets import DeploymentSecrets
from core.identity.process_name import ProcessName
from core.process.ports import free_port
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from frontend.service import RouterService
from tests.support.identities import in_clear


@contextmanager
def router_process(
    spec: Spec, credentials: DeploymentSecrets, name: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a router. Returns the process and the URL of its HTTP endpoint."""
    tree: dict[str, Any] = spec.model_dump()
    tree["router"] |= {"grpc_port": free_port(), "http_port": free_port()}
    order = {"spec": tree, "secret": credentials.secret.hex(), "index_url": credentials.index_url, "name": name}
    command = [sys.executable, "-m", "tests.e2e.router_process"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def serve(order: dict[str, Any]) -> None:
    spec = parse_spec(order["spec"])
    service = await RouterService.open(
        spec,
        credentials=DeploymentSecrets(secret=bytes.fromhex(order["secret"]), index_url=order["index_url"]),
        identity=in_clear(ProcessName.of_router(spec.name, order["name"])),
    )
    print("http://{}:{}".format(*service.http_address), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))
