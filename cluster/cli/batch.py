"""`cluster batch`: a file of requests, answered when nobody else waits, over the OpenAI API's batches."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import find_state
from cluster.cli.deploy import Name
from cluster.cli.endpoint_options import ApiKeyOption, access_to
from core.types.errors import EndpointUnavailable, Interrupted, RequestFailed, SpecError

if TYPE_CHECKING:
    from cluster.cli.batch_door import BatchClient

_LOOK_S, _MAX_LOOK_S = 0.5, 5.0  # each look counts for the limits of the API key
_UNAVAILABLE_S = 120.0  # without a door that answers, before waiting is given up
_ENDED = ("completed", "failed", "expired", "cancelled")
_SAID = 3  # problems of a file that are shown
_DEFAULT_ENDPOINT = "/v1/chat/completions"


def batch(
    file: Annotated[
        Path | None,
        typer.Argument(help="A line for each request: custom_id, method, url and body, as OpenAI has them."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where answers go; default: FILE.out.jsonl. Errors go beside it."),
    ] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help="Wait for a batch that was begun before.")] = None,
    cancel: Annotated[str | None, typer.Option(metavar="ID", help="End a batch; what is answered stays.")] = None,
    name: Name = None,
    endpoint: Annotated[
        str | None, typer.Option(help="http(s)://HOST:PORT of a router; default: the deployment's own.")
    ] = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Have a file of requests answered when nobody else waits, and write the answers.

    Ctrl-C leaves it running; --resume comes back to it. Exit code 1 where a request failed or was not answered.
    """
    if [file, resume, cancel].count(None) != 2:
        raise SpecError("give one of them: a FILE to be answered, --resume ID or --cancel ID")
    from cluster.cli.batch_door import BatchClient

    to = _output(output, file, resume)
    url = _checked(file) if file else ""
    state = None if endpoint else find_state(name)
    with BatchClient(endpoint or (state.http if state else ""), access_to(state, api_key)) as target:
        if cancel:
            print(f"{cancel} is {target.cancel(cancel)['status']}", file=sys.stderr)
            return
        if file:
            sent = target.send(file)
            try:
                begun = target.create(sent["id"], endpoint=url)
            except RequestFailed:
                target.delete_file(sent["id"])
                raise
        else:
            assert resume
            begun = target.batch(resume)
        _say_begun(begun)
        ended = _waited_for(target, begun)
        num_lost = _written(target, ended, to)
    raise typer.Exit(1 if num_lost or ended["status"] != "completed" else 0)


def _output(output: Path | None, file: Path | None, resume: str | None) -> Path:
    """Raises SpecError where nothing can be written there: before anything is asked for."""
    to = output or (file.with_suffix(".out.jsonl") if file else Path(f"{Path(resume or '').name}.out.jsonl"))
    if to.is_dir():
        raise SpecError(f"--output {to}: is a directory; name a file")
    if not to.absolute().parent.is_dir():
        raise SpecError(f"--output {to}: there is no directory {to.absolute().parent}")
    if file and output and output.exists() and file.exists() and output.samefile(file):
        raise SpecError(f"--output {to}: is the file of the requests; name another one")
    return to


def _checked(file: Path) -> str:
    """The url of its first line, which is the endpoint of all. Raises SpecError."""
    try:
        with file.open("rb") as lines:
            first = next((line for line in lines if line.strip()), b"")
    except OSError as error:
        raise SpecError(f"{file}: {error.strerror}") from None
    try:
        fields = json.loads(first)
        url = fields.get("url", _DEFAULT_ENDPOINT)
    except (ValueError, AttributeError):
        what = "has no line" if not first else "its first line is no JSON object"
        raise SpecError(f"{file}: {what}; write one for each request, with custom_id, method, url and body") from None
    return url if isinstance(url, str) else _DEFAULT_ENDPOINT


def _say_begun(batch: dict[str, Any]) -> None:
    print(f"{batch['id']} is {batch['status']}", file=sys.stderr)


def _waited_for(target: BatchClient, batch: dict[str, Any]) -> dict[str, Any]:
    """As it is at its end. Raises RequestFailed, and Exit where the user stops waiting."""
    id, heard_at, look_s = batch["id"], time.monotonic(), _LOOK_S
    try:
        with _progress() as show:
            while batch["status"] not in _ENDED:
                show(batch)
                time.sleep(look_s)
                look_s = min(_MAX_LOOK_S, 1.1 * look_s)
                try:
                    batch, heard_at = target.batch(id), time.monotonic()
                except EndpointUnavailable as error:
                    if time.monotonic() - heard_at > _UNAVAILABLE_S:
                        raise RequestFailed(f"{error}; `cluster batch --resume {id}` goes on waiting") from None
            show(batch)
    except KeyboardInterrupt:
        raise Interrupted(
            f"{id} goes on; `cluster batch --resume {id}` waits for it, `cluster batch --cancel {id}` ends it"
        ) from None
    return batch


@contextmanager
def _progress() -> Iterator[Callable[[dict[str, Any]], None]]:
    """A bar on a terminal; elsewhere a line on stderr where something has changed by a tenth."""
    if not sys.stderr.isatty():
        said = set[str]()

        def say(batch: dict[str, Any]) -> None:
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"]
            step = f"{batch['status']} {10 * done // total if total else 0}"
            if step not in said:
                said.add(step)
                print(f"{batch['status']} {done}/{total}", file=sys.stderr, flush=True)

        yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(batch: dict[str, Any]) -> None:
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"] or None
            progress.update(task, description=batch["status"], completed=done, total=total)

        yield show


def _written(target: BatchClient, batch: dict[str, Any], to: Path) -> int:
    """What came of it, in files; how many requests have no answer. Raises RequestFailed where none was made."""
    problems = (batch["errors"] or {}).get("data", [])
    if not batch["output_file_id"] and not batch["error_file_id"]:
        if batch["status"] == "cancelled":
            print(f"{batch['id']} was cancelled before anything was answered", file=sys.stderr)
            return 1
        raise RequestFailed(f"{batch['id']} has {batch['status']}: {_told(problems)}", exit_code=2)
    counts = batch["request_counts"]
    if id := batch["output_file_id"]:
        print(f"{_number(_fetched(target, id, to), 'answer')} in {to}")
    if id := batch["error_file_id"]:
        errors = to.with_name(to.name.removesuffix(".jsonl") + ".errors.jsonl")
        print(f"{_number(_fetched(target, id, errors), 'error')} in {errors}")
    if batch["status"] != "completed":
        why = f": {_told(problems)}" if problems else ""
        print(f"cluster: {batch['id']} has {_ENDINGS[batch['status']]}{why}", file=sys.stderr)
    return int(counts["total"] - counts["completed"])


_ENDINGS = {"failed": "failed", "expired": "run out of time", "cancelled": "been cancelled"}


def _told(problems: list[dict[str, Any]]) -> str:
    lines = [
        (f"line {problem['line']}: " if problem.get("line") else "") + problem["message"]
        for problem in problems[:_SAID]
    ]
    more = [f"and {len(problems) - _SAID} more"] if len(problems) > _SAID else []
    return "; ".join([*lines, *more])


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _fetched(target: BatchClient, file_id: str, to: Path) -> int:
    """The whole file, or what was there before; its lines. Raises RequestFailed, SpecError."""
    try:
        with tempfile.NamedTemporaryFile(dir=to.absolute().parent, prefix=f".{to.name}-", delete=False) as made:
            path = Path(made.name)
            try:
                num_lines = target.read(file_id, made)  # type: ignore[arg-type]
                path.replace(to)
            except BaseException:
                path.unlink()
                raise
    except OSError as error:
        raise SpecError(f"{to}: {error.strerror}; `cluster batch --resume` writes it again") from None
    return num_lines
