"""Files and batches at a deployment's HTTP doors, for the command that asks for them; httpx comes when it asks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from core.types.errors import EndpointUnavailable, RequestFailed, SpecError
from core.wire.client_access import EndpointAccess

if TYPE_CHECKING:
    import httpx

JSON = dict[str, Any]

_CONNECT_S, _ANSWER_S = 3.0, 60.0
_UPLOAD_S = 600.0
_FOR_NOW = (408, 429, 500, 502, 503, 504)


class BatchClient:
    """Any of a deployment's doors; close it by leaving its `with` block."""

    def __init__(self, endpoints: str, access: EndpointAccess) -> None:
        """doors: http(s)://HOST:PORT, or several with commas between them. Raises SpecError."""
        import httpx

        self._endpoints = [target.rstrip("/") for target in endpoints.split(",")]
        if not all(target.startswith(("http://", "https://")) for target in self._endpoints):
            raise SpecError(f"--endpoint {endpoints}: write http://HOST:PORT or https://HOST:PORT, of the OpenAI API")
        verify = access.ssl_context() if self._endpoints[0].startswith("https://") else True
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._client = httpx.Client(headers=access.headers, verify=verify, timeout=timeout, trust_env=False)

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self._client.close()

    def send(self, path: Path) -> JSON:
        """The file, as it is there. Raises RequestFailed."""
        with path.open("rb") as content:
            files = {"file": (path.name, content, "application/jsonl")}
            return self._asked("POST", "/v1/files", data={"purpose": "batch"}, files=files, timeout=_UPLOAD_S)

    def create(self, file_id: str, *, endpoint: str) -> JSON:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return self._asked("POST", "/v1/batches", json=body)

    def batch(self, id: str) -> JSON:
        return self._asked("GET", f"/v1/batches/{id}")

    def cancel(self, id: str) -> JSON:
        return self._asked("POST", f"/v1/batches/{id}/cancel")

    def delete_file(self, id: str) -> None:
        self._asked("DELETE", f"/v1/files/{id}")

    def read(self, file_id: str, into: BinaryIO) -> int:
        """Write all of a file; how many lines that were. Raises RequestFailed."""
        num_lines = 0
        answer = self._sent("GET", f"/v1/files/{file_id}/content", is_streamed=True)
        import httpx

        try:
            for piece in answer.iter_bytes():
                num_lines += piece.count(b"\n")
                into.write(piece)
        except httpx.HTTPError as error:
            raise EndpointUnavailable(f"the answers broke off: {error or type(error).__name__}") from None
        finally:
            answer.close()
        return num_lines

    def _asked(self, method: str, path: str, **more: Any) -> JSON:
        answer = self._sent(method, path, **more)
        found: JSON = answer.json()
        return found

    def _sent(self, method: str, path: str, *, is_streamed: bool = False, **more: Any) -> httpx.Response:
        """An answer that is none of an error. Raises RequestFailed, DoorAway."""
        import httpx

        for target in self._endpoints:
            try:
                answer = self._client.send(
                    self._client.build_request(method, target + path, **more), stream=is_streamed
                )
            except (httpx.ConnectError, httpx.ConnectTimeout):
                for _, content, _ in more.get("files", {}).values():
                    content.seek(0)
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise EndpointUnavailable(f"{target}: {error or type(error).__name__}") from None
            if not answer.is_error:
                return answer
            answer.read()
            if answer.status_code in _FOR_NOW:
                raise EndpointUnavailable(_said(answer))
            raise RequestFailed(_said(answer), exit_code=2)
        raise EndpointUnavailable(f"no router answers at {','.join(self._endpoints)}; see `cluster status`")


def _said(answer: httpx.Response) -> str:
    """What is wrong, in the server's words."""
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return f"{answer.url} answers {answer.status_code}, which no OpenAI API of ours does"
