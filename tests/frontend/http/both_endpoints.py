"""Both endpoints of one service, and invariants of every response."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import grpc
import httpx
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from core.rpc import inference_pb2 as pb
from core.rpc.inference_pb2_grpc import InferenceStub

# Error messages without the field's name; OpenAI's format has it in `param`.
_UNNAMED = ("model's context", "chat template", "is not served here")


@dataclass
class BothDoors:
    """Both endpoints of one service, on their own ports."""

    runner: asyncio.Runner
    http: httpx.AsyncClient
    stub: InferenceStub
    good: list[int] | None = None  # tokens of the valid request's first answer

    def post(self, path: str, body: dict[str, str]) -> None:
        self.runner.run(self._post(path, body))

    def generate(self, request: pb.GenerateRequest) -> None:
        self.runner.run(self._generate(request))

    async def _post(self, path: str, body: dict[str, str]) -> None:
        text = "{" + ",".join(f"{json.dumps(name)}:{raw}" for name, raw in body.items()) + "}"
        answer = await self.http.post(path, content=text.encode("utf-8", "surrogatepass"), timeout=30)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), (text, answer.text)
            # Anthropic's format has no param.
            path = error["param"] if "param" in error else error["message"].partition(":")[0]
            named = str(path).partition(".")[0].partition("[")[0]
            renamed = {"max_completion_tokens": "max_tokens", "max_tokens": "max_completion_tokens"}
            is_named = named in body or renamed.get(named) in body or "not valid JSON" in error["message"]
            is_named = is_named or ("param" not in error and any(words in error["message"] for words in _UNNAMED))
            assert is_named, (text, error)
        await self._check_good()

    async def _generate(self, request: pb.GenerateRequest) -> None:
        try:
            async for _ in self.stub.Generate(request, timeout=30):
                pass
        except grpc.aio.AioRpcError as error:
            assert error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND), (request, error)
            assert _fields_of(error), (request, error)
        await self._check_good()

    async def _check_good(self) -> None:
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        answer = await self.http.post("/v1/completions", json=body, timeout=30)
        tokens = answer.json()["choices"][0]["token_ids"]
        assert answer.status_code == 200 and len(tokens) == 4
        self.good = self.good or tokens
        assert tokens == self.good


def _fields_of(error: grpc.aio.AioRpcError) -> list[str]:
    """Return the fields in the error's details, after checking that the message has them."""
    status = rpc_status.from_call(error)
    named = []
    for packed in status.details if status else ():
        violations = error_details_pb2.BadRequest()
        if packed.Unpack(violations):
            named += [violation.field for violation in violations.field_violations]
    for path in named:
        kind = pb.GenerateRequest.DESCRIPTOR
        for name in path.partition("[")[0].split("."):
            kind = kind.fields_by_name[name].message_type
    return named
