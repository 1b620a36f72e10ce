"""`cluster capture`: live traffic to a file, as hashes, lengths and times."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from cluster.cli.connection import ask_deployed, find_state, join_controller
from cluster.cli.deploy import Name
from core.types.errors import SpecError

capture = typer.Typer(no_args_is_help=True, help="Record live traffic: hashes, lengths and times, never text.")

_PIECE = 8 << 20  # bytes that are fetched at a time
_TOLD_S = 6.0  # within which routers have told of what is over


@capture.command()
def start(
    name: Name = None,
    max_mib: Annotated[int, typer.Option(min=1, max=65_536, help="It ends by itself there.")] = 256,
) -> None:
    """Record the requests that arrive from now on, at all doors. They lie on the head until they are fetched."""
    ask_deployed(name, "start_capture", max_bytes=max_mib << 20)
    print("recording; `cluster capture stop -o FILE` ends it and fetches what came")


@capture.command()
def stop(
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace to write.")],
    name: Name = None,
) -> None:
    """End the recording, and write it: for `cluster bench`, `simulate`, `plan` and `autoscale replay`.

    Requests that are still being answered are left out.
    """
    controller = join_controller(find_state(name))
    from cluster.launch.driver import ask

    if ask(controller, "capture") is None:
        raise SpecError("no capture is under way; begin one by `cluster capture start`")
    time.sleep(_TOLD_S)
    report: dict[str, Any] = ask(controller, "capture")
    try:
        with _own_file(output) as file:
            num_bytes = 0  # a pipe cannot tell
            while piece := ask(controller, "read_capture", num_bytes, _PIECE):
                num_bytes += file.write(piece)
    except OSError as error:
        raise SpecError(f"{output}: {error.strerror}; the recording goes on") from None
    ask(controller, "stop_capture")
    full = "; it was full, and what came later is missing" if report["is_full"] else ""
    print(f"{output}: {report['requests']:,} requests in {report['seconds']:,.0f} s{full}")


def _own_file(path: Path) -> BinaryIO:
    """Empty, and for nobody else to read, also where there was one. Raises OSError, as where it is somebody else's."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # no pipe, as /dev/stdout may be
            os.fchmod(file.fileno(), 0o600)
            file.truncate(0)
    except OSError:
        file.close()
        raise
    return file
