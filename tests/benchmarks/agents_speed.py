"""How quickly a door answers 32 requests at once, with schemas and without, and how soon a first token comes."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import time
from itertools import cycle, islice
from typing import Any

import httpx

from tests.benchmarks.agents_doors import MODEL, AgentsDoor
from tests.benchmarks.forced_tokens import SCHEMAS

_BATCH, _FREE_TOKENS, _MAX_TOKENS, _TRIES = 32, 77, 200, 1
_PATIENCE_S = 170.0
_numbers = itertools.count()


async def speed(endpoint: AgentsDoor) -> dict[str, Any]:
    """After a warm-up; the machine's load before and after."""
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=_PATIENCE_S) as client:
        await asyncio.gather(*(_ask(client, _FREE_TOKENS // 4, None) for _ in range(_BATCH)))
        await asyncio.gather(*(_ask(client, _MAX_TOKENS, schema) for schema in SCHEMAS.values()))
        load = [round(os.getloadavg()[0], 1)]
        free = [await _batch(client, endpoint, [None] * _BATCH) for _ in range(_TRIES)]
        bound = [await _batch(client, endpoint, list(islice(cycle(SCHEMAS.values()), _BATCH))) for _ in range(_TRIES)]
        ttft = await _first_tokens(client)
        load.append(round(os.getloadavg()[0], 1))
    best = {"free": min(free, key=lambda row: row["s"]), "schemas": min(bound, key=lambda row: row["s"])}
    return {**best, "all": [*free, *bound], "ttft_ms": ttft, "load": load}


async def _batch(client: httpx.AsyncClient, endpoint: AgentsDoor, asked: list[Any]) -> dict[str, Any]:
    """tokens_per_s: of the whole, prompts of about 40 tokens included. cpu_s: of all the door's processes, which can be
    compared on a machine that is busy with other things."""
    before, begin = endpoint.cpu_s(), time.monotonic()
    rows = await asyncio.gather(*(_ask(client, _MAX_TOKENS if schema else _FREE_TOKENS, schema) for schema in asked))
    seconds, tokens = max(row["end"] for row in rows) - begin, sum(row["tokens"] for row in rows)
    return {
        "s": round(seconds, 2),
        "tokens": tokens,
        "tokens_per_s": round(tokens / seconds, 1),
        "cpu_s": round(endpoint.cpu_s() - before, 2),
        "answers_per_s": round(len(rows) / seconds, 2),
        "ended": sum(row["reason"] == "stop" for row in rows),
        "characters": sum(row["characters"] for row in rows),
    }


async def _first_tokens(client: httpx.AsyncClient) -> dict[str, Any]:
    """One request at a time. A schema is new by the name of one more property; no two prompts are the same."""
    rows: dict[str, list[float]] = {"no schema": [], "first use": [], "second use": []}
    for round_ in range(2):
        for schema in SCHEMAS.values():
            new = json.loads(json.dumps(schema)) | {"$comment": f"{next(_numbers)} {round_}"}
            fields = new.get("properties") or new["items"]["properties"]
            fields[f"field_{next(_numbers)}_{time.time_ns()}"] = {"type": "boolean"}
            for kind, bound in (("no schema", None), ("first use", new), ("second use", new)):
                row = await _ask(client, 4, bound)
                rows[kind].append((row["first"] - row["begin"]) * 1e3)
    return {
        kind: {"median": round(statistics.median(took), 1), "most": round(max(took), 1)} for kind, took in rows.items()
    }


async def _ask(client: httpx.AsyncClient, max_tokens: int, schema: Any) -> dict[str, Any]:
    number = next(_numbers)
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": f"Number {number}. Write something as JSON, please."}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is None:
        body["ignore_eos"] = True
    else:
        form = {"name": "s", "strict": True, "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    row: dict[str, Any] = {"begin": time.monotonic(), "tokens": 0, "reason": "", "characters": 0}
    async with client.stream("POST", "/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()[:500]}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    row.setdefault("first", time.monotonic())
                    row["characters"] += len(text)
                row["reason"] = choice["finish_reason"] or row["reason"]
            row["tokens"] = (event.get("usage") or {}).get("completion_tokens", row["tokens"])
    row["end"] = time.monotonic()
    return row
