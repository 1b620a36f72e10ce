"""The thread that owns an engine: it runs commands between steps, and steps while there is work."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

Command = Callable[[], None]


class StepLoop:
    """Runs `step` again and again on one thread, and `post`ed commands between steps.

    All state of the engine belongs to this thread; others speak to it by `post` only. `step` does one step and says
    whether there was anything to do; when there was not, the thread sleeps until a command comes, and calls `idle`
    every `idle_s`. An exception in any of them ends the loop: `failure` holds it and `on_end` is called.
    """

    def __init__(
        self, *, step: Callable[[], bool], idle: Callable[[], None], on_end: Callable[[], None], idle_s: float = 1.0
    ) -> None:
        self.failure: BaseException | None = None
        self._step = step
        self._idle = idle
        self._on_end = on_end
        self._idle_s = idle_s
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Run `command` on the loop's thread, after the step under way. From any thread."""
        self._commands.put(command)

    def stop(self, *, timeout_s: float) -> None:
        """End the loop after the step under way. From any other thread; a step that hangs is left behind."""
        self.post(self._stop)
        self._thread.join(timeout_s)

    def _stop(self) -> None:
        self._is_stopping = True

    def _run(self) -> None:
        try:
            did_work = True
            while not self._is_stopping:
                self._run_commands(wait=not did_work)
                did_work = not self._is_stopping and self._step()
        except BaseException as error:  # the edge of this thread: whatever ended it must be known
            logger.exception("the step loop ended")
            self.failure = error
        finally:
            self._on_end()

    def _run_commands(self, *, wait: bool) -> None:
        try:
            command = self._commands.get(timeout=self._idle_s) if wait else self._commands.get_nowait()
            while True:
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            if wait:
                self._idle()
