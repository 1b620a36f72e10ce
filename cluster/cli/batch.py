"""`cluster batch`: send a file of OpenAI batch lines at offline priority, and append each answer to a file."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from cluster.cli.batch_files import BatchRequest, open_output, parse_line, record, scan
from cluster.cli.connection import open_access
from cluster.cli.console import progress_bar
from cluster.cli.options import ApiKeyOption, Name
from core.types.errors import Interrupted, RequestFailed, SpecError
from core.types.request import OFFLINE

if TYPE_CHECKING:
    import httpx

    from core.wire.client_access import EndpointAccess

_CONNECT_S = 5.0
# Backoff between attempts of a request.
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0
_RETRIED = (429, 502, 503)
_UNAUTHENTICATED = 401
_MAX_MESSAGE_CHARS = 300
# Without keepalive, a server that vanishes would hold its requests until the deadline.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
)


def batch(
    file: Annotated[
        Path, typer.Argument(help="One request per line: custom_id, method, url and body, as in OpenAI's Batch API.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Answers are appended to this file; failures go to a file beside it.")
    ],
    name: Name = None,
    url: Annotated[
        str | None, typer.Option(help="http(s)://HOST:PORT of the server; default: the deployment's routers.")
    ] = None,
    api_key: ApiKeyOption = None,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Requests in flight.")] = 32,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds until the requests without an answer fail; a resume sends them again.")
    ] = 86_400.0,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline/--online",
            help=f"--offline adds `priority: {OFFLINE}`, so that all other requests go first. Use --online for servers "
            "that refuse the field.",
        ),
    ] = True,
) -> None:
    """Send a file of requests and append the answers to another one.

    To resume, run the same command again: requests with an answer are skipped. Exit code 1 if any line failed.
    """
    failures = output.with_name(output.name.removesuffix(".jsonl") + ".errors.jsonl") if output.name else output
    if any(path.exists() and file.exists() and path.samefile(file) for path in (output, failures)):
        raise SpecError(f"--output {output}: would overwrite {file}; name another file")
    state, access = open_access(name, url, api_key)
    urls = [one.rstrip("/").removesuffix("/v1") for one in (url or (state.http if state else "")).split(",")]
    if not all(one.startswith(("http://", "https://")) for one in urls):
        raise SpecError(f"--url {url}: write http://HOST:PORT or https://HOST:PORT")
    try:
        with file.open("rb") as requests:
            answers, answered = open_output(output)
            with answers:
                failures.unlink(missing_ok=True)  # left by an earlier run
                run = _Run(requests, answers, failures, urls, model=access.model, is_offline=offline)
                try:
                    asyncio.run(run.send_all(answered, access, concurrency=concurrency, deadline_s=deadline))
                except KeyboardInterrupt:
                    raise Interrupted(f"{run.num_answered} answers in {output}; run it again to resume") from None
    except OSError as error:
        raise SpecError(f"{error.filename or output}: {error.strerror or error}") from None
    print(f"{run.num_answered} answers in {output} ({run.num_skipped} of them from an earlier run)")
    if run.num_failed:
        print(f"{run.num_failed} lines failed; see {failures}")
        raise typer.Exit(1)


class _Run:
    """One pass over the input: workers take its lines in order and send them until each has an answer or a failure."""

    def __init__(
        self, requests: BinaryIO, answers: BinaryIO, failures: Path, urls: list[str], *, model: str, is_offline: bool
    ) -> None:
        """model: added to requests that name none, unless empty."""
        self._requests = requests
        self._answers = answers
        self._failures = failures
        self._urls = urls
        self._defaults: dict[str, Any] = {"model": model} if model else {}
        if is_offline:
            self._defaults["priority"] = OFFLINE
        self._announced: set[str] = set()  # reasons of retries
        self.num_answered = self.num_skipped = self.num_failed = 0

    async def send_all(
        self, answered: set[str], access: EndpointAccess, *, concurrency: int, deadline_s: float
    ) -> None:
        """Send each well-formed line that has no answer.

        Raises RequestFailed if no server answers or the API key is refused, and OSError if a file cannot be written.
        """
        with progress_bar(is_transient=False) as self._progress:
            to_send = self._scan(answered)
            self._task = self._progress.add_task("", total=len(to_send))
            if not to_send:
                return
            self._end_at = asyncio.get_running_loop().time() + deadline_s
            async with _open_client(access, concurrency) as self._client:
                await self._check_server()
                await self._send_each(self._read(to_send), num_workers=min(concurrency, len(to_send)))

    def _scan(self, answered: set[str]) -> set[int]:
        """Return the numbers of the lines to send."""
        to_send: set[int] = set()
        for number, found in scan(self._requests):
            if isinstance(found, ValueError):
                self._fail(number, None, str(found))
            elif found in answered:
                self.num_skipped += 1
            else:
                to_send.add(number)
        self.num_answered = self.num_skipped
        return to_send

    def _read(self, numbers: Collection[int]) -> Iterator[tuple[int, BatchRequest]]:
        """Yield these lines, one at a time: the file may be larger than memory."""
        self._requests.seek(0)
        for number, line in enumerate(self._requests, 1):
            if number in numbers:
                try:
                    yield number, parse_line(line)
                except ValueError as error:
                    raise SpecError(f"{self._requests.name}:{number}: changed during the run: {error}") from None

    async def _check_server(self) -> None:
        """Raise RequestFailed if no server answers now. Later in the run, requests wait for one until the deadline."""
        import httpx

        for url in self._urls:
            try:
                await self._client.get(f"{url}/v1/models", timeout=_CONNECT_S)
                return
            except (httpx.RequestError, httpx.InvalidURL) as error:
                self._print(f"{url}: {error or type(error).__name__}")
        raise RequestFailed(f"no server answers at {', '.join(self._urls)}; see `cluster status`")

    async def _send_each(self, requests: Iterable[tuple[int, BatchRequest]], *, num_workers: int) -> None:
        async def work() -> None:
            for number, request in requests:
                await self._send(number, request)
                self._progress.advance(self._task)

        workers = [asyncio.create_task(work()) for _ in range(num_workers)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _send(self, number: int, request: BatchRequest) -> None:
        """Send one request, and record its answer or its failure."""
        try:
            answer = await self._final_answer(request)
        except TimeoutError as error:
            self._fail(number, request.custom_id, str(error))
            return
        if answer.status_code == _UNAUTHENTICATED:
            raise RequestFailed(f"{_message_of(answer)}; set --api-key or XPYD_API_KEY", exit_code=2)
        try:
            body = answer.json()
        except ValueError:
            body = None
        request_id = answer.headers.get("x-request-id") or secrets.token_hex(16)
        response = {"status_code": answer.status_code, "request_id": request_id, "body": body}
        if answer.status_code != 200 or body is None:
            self._fail(number, request.custom_id, f"{answer.status_code} {_message_of(answer)}", response)
            return
        self._answers.write(record(request.custom_id, request_id=request_id, response=response, error=None))
        # A killed process loses at most the line it was writing.
        self._answers.flush()
        self.num_answered += 1

    async def _final_answer(self, request: BatchRequest) -> httpx.Response:
        """Send a request, and retry while a later attempt may succeed. Raises TimeoutError with the last reason."""
        import httpx

        content = json.dumps(self._defaults | request.body).encode()
        first, num_tries, reason = random.randrange(len(self._urls)), 0, "the server was still answering"
        try:
            async with asyncio.timeout_at(self._end_at):
                while True:
                    url = self._urls[(first + num_tries) % len(self._urls)] + request.url
                    wait_s = min(_MAX_WAIT_S, _FIRST_WAIT_S * 2 ** min(num_tries, 10)) * random.uniform(0.5, 1)
                    try:
                        answer = await self._client.post(url, content=content)
                        if answer.status_code not in _RETRIED:
                            return answer
                        kind, reason = str(answer.status_code), f"{answer.status_code} {_message_of(answer)}"
                        wait_s = max(wait_s, _retry_after_s(answer))
                    except httpx.RequestError as error:
                        kind, reason = type(error).__name__, str(error) or type(error).__name__
                    if kind not in self._announced:
                        self._announced.add(kind)
                        self._print(f"retrying until the deadline: {reason}")
                    await asyncio.sleep(wait_s)
                    num_tries += 1
        except TimeoutError:
            raise TimeoutError(f"no answer before the deadline: {reason}") from None

    def _fail(self, number: int, custom_id: str | None, why: str, response: dict[str, Any] | None = None) -> None:
        self.num_failed += 1
        named = "" if custom_id is None else f"custom_id {custom_id!r}: "
        self._print(f"{self._requests.name}:{number}: {named}{why}")
        message = f"line {number}: {why}"
        with self._failures.open("ab") as failures:
            failures.write(record(custom_id, request_id=secrets.token_hex(16), response=response, error=message))

    def _print(self, text: str) -> None:
        """Print one line above the progress bar."""
        text = "".join(char if char.isprintable() else " " for char in text)
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@asynccontextmanager
async def _open_client(access: EndpointAccess, concurrency: int) -> AsyncIterator[httpx.AsyncClient]:
    import httpx

    transport = httpx.AsyncHTTPTransport(
        verify=access.ssl_context(),
        limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        socket_options=_KEEPALIVE,
    )
    # No limit for an answer: the router and the deadline end it.
    timeout = httpx.Timeout(None, connect=_CONNECT_S)
    headers = access.headers | {"content-type": "application/json"}
    async with httpx.AsyncClient(headers=headers, transport=transport, timeout=timeout, trust_env=False) as client:
        yield client


def _message_of(answer: httpx.Response) -> str:
    """Return the server's error message, or the beginning of its body."""
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = answer.text
    return message[:_MAX_MESSAGE_CHARS]


def _retry_after_s(answer: httpx.Response) -> float:
    """Return the seconds of Retry-After, at most _MAX_WAIT_S; 0 if there are none."""
    after = answer.headers.get("retry-after", "")
    return min(_MAX_WAIT_S, float(after)) if after.isascii() and after.isdigit() else 0.0
