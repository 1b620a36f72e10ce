"""Step thread: runs an engine's steps, and commands between them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress

from core.process.background import BackgroundThread

Command = Callable[[], None]


class StepLoop:
    """Loop that runs `step` repeatedly on one thread, and posted commands between steps.

    This thread owns all state of the engine; other threads use `post`. `step` returns whether there was work. If not,
    the thread sleeps until the next command and calls `idle` at least every `idle_s` seconds. An exception in any of
    them ends the loop, and `run` raises it.
    """

    def __init__(
        self, *, step: Callable[[], bool], idle: Callable[[], None], idle_s: float, ended: Callable[[], None]
    ) -> None:
        """ended: called last, on the loop's thread, also after an error."""
        self._step = step
        self._idle = idle
        self._idle_s = idle_s
        self._ended = ended
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = BackgroundThread(self._work, name="step-loop")

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run `command` on the loop's thread, after the current step. Thread-safe."""
        self._commands.put(command)

    def run(self) -> None:
        """Wait until the loop has ended. Raises the exception that ended it, if any."""
        self._thread.run()

    def stop(self, last: Command, *, timeout_s: float) -> None:
        """End the loop after the current step, with `last` as its last command. Call from another thread.

        Returns after `timeout_s` even if a step hangs.
        """

        def end() -> None:
            self._is_stopping = True
            last()

        self.post(end)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        idle_at = 0.0
        did_work = True
        try:
            while not self._is_stopping:
                now = time.monotonic()
                if did_work:
                    idle_at = now + self._idle_s
                self._run_commands(within_s=0.0 if did_work else max(0.0, idle_at - now))
                if not (did_work or self._is_stopping) and time.monotonic() >= idle_at:
                    self._idle()
                    idle_at = time.monotonic() + self._idle_s
                did_work = not self._is_stopping and self._step()
        finally:
            self._ended()

    def _run_commands(self, *, within_s: float) -> None:
        """Run posted commands, after waiting up to `within_s` for the first."""
        with suppress(queue.Empty):
            self._commands.get(timeout=within_s)()
            while not self._is_stopping:
                self._commands.get_nowait()()
