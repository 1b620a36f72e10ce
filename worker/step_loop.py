"""The thread that owns an engine: it runs commands between steps, and steps while there is work."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress

from core.process.background import BackgroundThread

Command = Callable[[], None]


class StepLoop:
    """Runs `step` again and again on one thread, and `post`ed commands between steps.

    All state of the engine belongs to this thread; others speak to it by `post` only. `step` does one step and says
    whether there was anything to do; when there was not, the thread sleeps until a command comes, and calls `idle` at
    least every `idle_s`. An exception in any of them ends the loop, and `run` raises it.
    """

    def __init__(
        self, *, step: Callable[[], bool], idle: Callable[[], None], idle_s: float, ended: Callable[[], None]
    ) -> None:
        """`ended` is called last, on the loop's thread, however it ends."""
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
        """Run `command` on the loop's thread, after the step under way. From any thread."""
        self._commands.put(command)

    def run(self) -> None:
        """Wait until the loop has ended; raise what ended it if it was not `stop`."""
        self._thread.run()

    def stop(self, last: Command, *, timeout_s: float) -> None:
        """End the loop after the step under way, with `last` as its last command. From any other thread.

        A step that hangs is left behind.
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
        """Run what is posted, after waiting up to so long for the first of them."""
        with suppress(queue.Empty):
            self._commands.get(timeout=within_s)()
            while not self._is_stopping:
                self._commands.get_nowait()()
