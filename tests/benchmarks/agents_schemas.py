"""What a door makes of schemas: those of every day, drawn ones, and hostile ones beside somebody else's stream."""

from __future__ import annotations

import asyncio
import enum
import itertools
import json
import time
from collections import Counter
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, Literal
from uuid import UUID

import httpx
from jsonschema import ValidationError
from jsonschema.validators import validator_for
from pydantic import BaseModel, ConfigDict, Field

from tests.benchmarks.agents_doors import MODEL, AgentsDoor
from tests.support.generated_schemas import schemas
from tests.support.hostile_schemas import hostile_schemas

_NUM_DRAWN, _AT_ONCE, _MAX_TOKENS = 100, 16, 160
_PATIENCE_S, _HOSTILE_S = 120.0, 15.0
_FORM = '"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true, "schema": '


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Priority(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


class _Address(_Strict):
    street: Annotated[str, Field(max_length=20)]
    postcode: Annotated[str, Field(pattern=r"^[0-9]{5}$")]
    country: Literal["DE", "FR", "IT"]


class _Contact(_Strict):
    name: Annotated[str, Field(max_length=20)]
    born: date
    address: _Address | None
    tags: Annotated[list[Annotated[str, Field(max_length=8)]], Field(max_length=3)]


class _Line(_Strict):
    product: Annotated[str, Field(max_length=12)]
    quantity: Annotated[int, Field(ge=1, le=99)]
    unit_price: Annotated[Decimal, Field(ge=0, le=999, decimal_places=2)]


class _Order(_Strict):
    id: UUID
    placed_at: datetime
    lines: Annotated[list[_Line], Field(min_length=1, max_length=3)]


class _Ticket(_Strict):
    priority: _Priority
    score: Annotated[float, Field(gt=0, lt=1)]
    is_open: bool
    assignee: str | None = Field(default=None, max_length=12)


class _Circle(_Strict):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0, le=100)]


class _Square(_Strict):
    kind: Literal["square"]
    side: Annotated[int, Field(ge=1, le=10)]


class _Drawing(_Strict):
    shapes: Annotated[
        list[Annotated[_Circle | _Square, Field(discriminator="kind")]], Field(min_length=1, max_length=2)
    ]


class _Choice(_Strict):
    shape: _Circle | _Square


class _Scores(_Strict):
    by_name: Annotated[dict[str, Annotated[int, Field(ge=0, le=10)]], Field(max_length=3)]


class _Pair(_Strict):
    point: tuple[Annotated[int, Field(ge=-9, le=9)], Annotated[int, Field(ge=-9, le=9)]]
    step: Annotated[int, Field(multiple_of=5, ge=0, le=100)]


class _Labels(_Strict):
    labels: Annotated[set[Literal["a", "b", "c"]], Field(min_length=1)]


class _Tree(_Strict):
    name: Annotated[str, Field(max_length=6)]
    children: Annotated[list[_Tree], Field(max_length=1)]


EVERYDAY = (_Contact, _Order, _Ticket, _Drawing, _Choice, _Scores, _Pair, _Labels, _Tree)


def everyday_schemas() -> dict[str, Any]:
    return {model.__name__.strip("_"): model.model_json_schema() for model in EVERYDAY}


async def correctness(endpoint: AgentsDoor) -> dict[str, Any]:
    """What became of each, and which answers ended and are no instances."""
    asked = {**{f"drawn {i}": schema for i, schema in enumerate(schemas(_NUM_DRAWN))}, **everyday_schemas()}
    gate = asyncio.Semaphore(_AT_ONCE)
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=_PATIENCE_S) as client:

        async def one(number: int, schema: Any) -> tuple[str, str]:
            async with gate:
                return await _answer(client, schema, number)

        found = await asyncio.gather(*(one(i, schema) for i, schema in enumerate(asked.values())))
    by_name = dict(zip(asked, found, strict=True))
    told = {name: f"{ending}: {text[:300]}" for name, (ending, text) in by_name.items() if ending not in _FINE}
    groups = {"drawn": [n for n in asked if n.startswith("drawn")], "everyday": list(everyday_schemas())}
    return {
        **{group: dict(Counter(by_name[name][0] for name in names)) for group, names in groups.items()},
        "told": told,
        "starts": endpoint.num_starts,
    }


_FINE = ("instance", "length")


async def _answer(client: httpx.AsyncClient, schema: Any, number: int) -> tuple[str, str]:
    form = {"type": "json_schema", "json_schema": {"name": "s", "strict": True, "schema": schema}}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Thing {number}, as JSON."}],
        "response_format": form,
        "max_tokens": _MAX_TOKENS,
        "temperature": number // 2 % 2,
        "seed": number,
    }
    try:
        answer = await client.post("/chat/completions", json=body)
    except httpx.TimeoutException:
        return "hangs", ""
    except httpx.HTTPError as error:
        return "connection lost", repr(error)
    if answer.status_code != 200:
        return str(answer.status_code), answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] != "stop":
        return choice["finish_reason"], text
    why = _why_no_instance(schema, text)
    return ("no instance", f"{why}: {text} of {json.dumps(schema)}") if why else ("instance", text)


def _why_no_instance(schema: Any, text: str) -> str:
    """In decimal: of 0.07, fp64 says that it is no multiple of 0.01."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = validator_for(exact)
    try:
        kind(exact, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text, parse_float=_number))
    except (ValidationError, ValueError) as error:
        return str(getattr(error, "message", error))[:200]
    return ""


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # its exponent is beyond what decimals have
        return float(text)


async def hostile(endpoint: AgentsDoor) -> dict[str, Any]:
    """Each by itself beside a stream; the door is started again where it has died or hangs."""
    rows: list[dict[str, Any]] = []
    quiet: list[float] = []
    for name, (text, _) in hostile_schemas().items():
        await asyncio.to_thread(endpoint.ensure)
        async with httpx.AsyncClient(base_url=endpoint.url, timeout=_HOSTILE_S) as client:
            pieces: list[float] = []
            stream = asyncio.create_task(_stream(endpoint.url, pieces))
            await _come(pieces, 9)
            quiet.append(_longest_gap(pieces[2:]))
            since, begin = len(pieces) - 1, time.monotonic()
            status = await _hostile_status(client, text)
            seconds = time.monotonic() - begin
            await _come(pieces, len(pieces) + 4)
            stands_still_s = time.monotonic() - pieces[-1]
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        gap = max(_longest_gap(pieces[since:]), stands_still_s)
        rows.append({"name": name, "status": status, "s": round(seconds, 3), "gap_s": round(gap, 3)})
    return {
        "statuses": dict(Counter(row["status"] for row in rows)),
        "slowest": sorted(rows, key=lambda row: -row["s"])[:8],
        "longest_gaps": sorted(rows, key=lambda row: -row["gap_s"])[:8],
        "longest_gap_without_s": round(max(quiet), 3),
        "no_4xx_and_no_200": [row for row in rows if row["status"] not in ("200", "400", "413", "422")],
        "rows": rows,
        "starts": endpoint.num_starts,
    }


async def _hostile_status(client: httpx.AsyncClient, schema: str) -> str:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "A thing."}], "temperature": 0, "max_tokens": 2}
    body = f"{json.dumps(chat)[:-1]}, {_FORM}{schema}}}}}}}".encode(errors="surrogateescape")
    try:
        answer = await client.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    except httpx.TimeoutException:
        return "hangs"
    except httpx.HTTPError:
        return "connection lost"
    return str(answer.status_code)


async def _stream(url: str, pieces: list[float]) -> None:
    """An answer without a schema: when its pieces came."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Tell me a tale."}],
        "temperature": 0,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client,
        client.stream("POST", "/chat/completions", json=body) as answer,
    ):
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                pieces.append(time.monotonic())


async def _come(pieces: list[float], count: int) -> None:
    """For as long as a hostile request may take, and no longer: a stream that has died brings nothing more."""
    end_at = time.monotonic() + _HOSTILE_S
    while len(pieces) < count and time.monotonic() < end_at:
        await asyncio.sleep(0.01)


def _longest_gap(times: list[float]) -> float:
    return max((later - sooner for sooner, later in itertools.pairwise(times)), default=0.0)
