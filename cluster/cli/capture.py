"""`cluster capture`: record live traffic to a file, as hashes, lengths and times."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from cluster.cli.connection import ask, ask_deployed, find_state, join_controller
from cluster.cli.options import Name
from core.types.errors import SpecError

capture = typer.Typer(no_args_is_help=True, help="Record live traffic: hashes, lengths and times, never text.")

_PIECE = 8 << 20  # bytes per fetch
# Routers report finished requests within this time.
_REPORTED_S = 6.0


@capture.command()
def start(
    name: Name = None, max_mib: Annotated[int, typer.Option(min=1, max=65_536, help="Size limit of the file.")] = 256
) -> None:
    """Record the requests that arrive from now on, at all routers. The file stays on the head until it is fetched."""
    ask_deployed(name, "start_capture", max_bytes=max_mib << 20)
    print("recording; run `cluster capture stop -o FILE` to end it and fetch the file")


@capture.command()
def stop(
    output: Annotated[Path, typer.Option("--output", "-o", help="Trace file to write.")], name: Name = None
) -> None:
    """Stop the recording and write the trace, for `cluster bench`, `simulate`, `plan` and `autoscale replay`.

    Requests in flight are left out.
    """
    controller = join_controller(find_state(name))
    if ask(controller, "capture") is None:
        raise SpecError("no capture is running; start one with `cluster capture start`")
    time.sleep(_REPORTED_S)
    report: dict[str, Any] = ask(controller, "capture")
    try:
        with _open_private(output) as file:
            # Counted here, because a pipe has no position.
            num_bytes = 0
            while piece := ask(controller, "read_capture", num_bytes, _PIECE):
                num_bytes += file.write(piece)
    except OSError as error:
        raise SpecError(f"{output}: {error.strerror}; the recording continues") from None
    ask(controller, "stop_capture")
    full = "; it reached its size limit, so later requests are missing" if report["is_full"] else ""
    print(f"{output}: {report['requests']:,} requests in {report['seconds']:,.0f} s{full}")


def _open_private(path: Path) -> BinaryIO:
    """Open an empty file that only its owner can read, replacing its contents. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        # Not for a pipe, such as /dev/stdout.
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            os.fchmod(file.fileno(), 0o600)
            file.truncate(0)
    except OSError:
        file.close()
        raise
    return file
