"""A process of our own that does what it is told: one JSON order a line over a connection, and an answer to each."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from core.types.errors import ReplicaLost

_HOST = "127.0.0.1"
_END_S = 10.0


class ChildProcess:
    """Runs `python -m MODULE PORT ARGUMENTS…`, which calls `obey`. Orders come as (a method's name, its arguments)."""

    def __init__(self, module: str, *arguments: str, answer_s: float) -> None:
        """answer_s: for it to start, and for each answer. Raises ReplicaLost."""
        self._answer_s = answer_s
        with socket.create_server((_HOST, 0)) as server:
            server.settimeout(answer_s)
            port = str(server.getsockname()[1])
            self._process = subprocess.Popen([sys.executable, "-m", module, port, *arguments])
            try:
                self._connection, _ = server.accept()
            except TimeoutError as error:
                self._process.kill()
                raise ReplicaLost(f"{module} does not start") from error
        self._connection.settimeout(answer_s)
        # One file for both ways would forget what it has read ahead whenever it writes.
        self._answers, self._orders = self._connection.makefile("r"), self._connection.makefile("w")

    def ask(self, order: str, **arguments: Any) -> Any:
        """Give an order, and wait for its answer. Raises ReplicaLost."""
        self.tell(order, **arguments)
        return self.answer()

    def tell(self, order: str, **arguments: Any) -> None:
        """Give an order, whose `answer` is waited for later."""
        self._orders.write(json.dumps([order, arguments]) + "\n")
        self._orders.flush()

    def answer(self) -> Any:
        """Of the oldest order. Raises ReplicaLost."""
        try:
            if line := self._answers.readline():
                return json.loads(line)
        except TimeoutError as error:
            raise ReplicaLost(f"a measuring process did not answer within {self._answer_s:.0f} s") from error
        raise ReplicaLost("a measuring process is gone")

    def close(self) -> None:
        """End it."""
        with suppress(OSError):  # it is gone already
            self._orders.close()
        self._answers.close()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def obey(make: Callable[[], object]) -> None:
    """In such a process: carry out orders with what `make` returns, until the connection ends."""
    with (
        socket.create_connection((_HOST, int(sys.argv[1]))) as connection,
        connection.makefile("r") as orders,
        connection.makefile("w") as answers,
    ):
        obedient = make()
        for line in orders:
            order, arguments = json.loads(line)
            answers.write(json.dumps(getattr(obedient, order)(**arguments)) + "\n")
            answers.flush()
