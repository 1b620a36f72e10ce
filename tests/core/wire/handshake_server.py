"""gRPC server set up like a rank's. Prints its port; exits at the end of its standard input.

python -m tests.core.wire.handshake_server
"""

from __future__ import annotations

import asyncio
import sys

from core.identity.authority import Authority
from core.wire.channel import listen, make_server
from tests.support.identities import proven, rank


async def serve() -> None:
    identity = proven(Authority.create("cluster"), rank("decode-0"))
    server = make_server(identity)
    print(listen(server, "127.0.0.1:0", identity), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve())
