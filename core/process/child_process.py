"""Child process that executes commands: one JSON command per line over a connection, and a reply to each."""

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
_EXITED = "a measuring process has exited; its error is above"


class ChildProcess:
    """Client of `python -m MODULE PORT ARGUMENTS…`, which calls `obey`. Commands are (method name, arguments)."""

    def __init__(self, module: str, *arguments: str, answer_s: float) -> None:
        """answer_s: limit for its start and for each reply. Raises ReplicaLost."""
        self._answer_s = answer_s
        with socket.create_server((_HOST, 0)) as server:
            server.settimeout(answer_s)
            port = str(server.getsockname()[1])
            self._process = subprocess.Popen([sys.executable, "-m", module, port, *arguments])
            try:
                self._connection, _ = server.accept()
            except TimeoutError as error:
                self._process.kill()
                raise ReplicaLost(f"{module} did not start within {answer_s:.0f} s") from error
        self._connection.settimeout(answer_s)
        # Two files: a single one for both directions would drop its read-ahead at each write.
        self._answers, self._orders = self._connection.makefile("r"), self._connection.makefile("w")

    def ask(self, order: str, **arguments: Any) -> Any:
        """Send a command and return its reply. Raises ReplicaLost."""
        self.tell(order, **arguments)
        return self.answer()

    def tell(self, order: str, **arguments: Any) -> None:
        """Send a command without waiting; call `answer` for its reply. Raises ReplicaLost."""
        try:
            self._orders.write(json.dumps([order, arguments]) + "\n")
            self._orders.flush()
        except ConnectionError as error:
            raise ReplicaLost(_EXITED) from error

    def answer(self) -> Any:
        """Return the reply to the oldest pending command. Raises ReplicaLost."""
        try:
            if line := self._answers.readline():
                return json.loads(line)
        except TimeoutError as error:
            raise ReplicaLost(f"a measuring process did not answer within {self._answer_s:.0f} s") from error
        except ConnectionError:  # it had not read all commands
            pass
        raise ReplicaLost(_EXITED)

    def close(self) -> None:
        """Close the connection and wait for the process to exit; kill it after 10 s."""
        with suppress(OSError):  # it exited already
            self._orders.close()
        self._answers.close()
        self._connection.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def obey(make: Callable[[], object]) -> None:
    """Run in the child process: execute commands on the object that `make` returns until the connection closes."""
    with (
        socket.create_connection((_HOST, int(sys.argv[1]))) as connection,
        connection.makefile("r") as orders,
        connection.makefile("w") as answers,
    ):
        target = make()
        for line in orders:
            order, arguments = json.loads(line)
            answers.write(json.dumps(getattr(target, order)(**arguments)) + "\n")
            answers.flush()
