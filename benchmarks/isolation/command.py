"""`python -m benchmarks isolation`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any

import typer

from benchmarks.isolation.load import Workload, measure
from cluster.cli.connection import find_state
from cluster.cli.endpoint_options import ApiKeyOption, access_to
from cluster.cli.planning.model_options import DEFAULT_MODEL, Model
from cluster.launch.state import State

_OF_ITS_OWN = "bench-isolation"
_ANSWER_S = 300.0


def isolation(
    rate: Annotated[float, typer.Option(min=0.01, help="Prompts a second.")] = 0.4,
    streams: Annotated[int, typer.Option(min=1)] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Under load; before it, the streams alone for a quarter.")
    ] = 40.0,
    name: Annotated[
        str | None, typer.Option(help="A running deployment; otherwise 1P1D is deployed, and taken down.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    api_key: ApiKeyOption = None,
) -> None:
    """What running streams notice of long prompts: the time between their tokens, with and without such a load.

    A deployment of one prefill and one decode replica, each with one compute thread, asked through its gRPC door.
    """
    workload = Workload(
        prefills_per_s=rate, streams=streams, prompt_tokens=prompt_tokens, loaded_s=seconds, quiet_s=seconds / 4
    )
    if name is not None:
        result = _measure(workload, find_state(name), api_key)
    else:
        with _deployment(model) as state:
            result = _measure(workload, state, api_key)
    print(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _measure(workload: Workload, state: State, api_key: str | None) -> dict[str, Any]:
    from cluster.bench.endpoints import open_endpoint

    async def run() -> dict[str, Any]:
        async with open_endpoint(state.grpc, access_to(state, api_key)) as endpoint:

            async def ask(token_ids: list[int], max_tokens: int) -> AsyncIterator[int]:
                async with aclosing(endpoint.ask(token_ids, max_tokens=max_tokens, timeout_s=_ANSWER_S)) as items:
                    async for item in items:
                        if isinstance(item, int):
                            yield item

            return await measure(workload, ask)

    return asyncio.run(run())


@contextmanager
def _deployment(model: str) -> Iterator[State]:
    """1P1D on a Ray of its own, on ports that nobody uses."""
    from cluster.cli.console import reporter
    from cluster.control.desired_state import Parts
    from cluster.launch import deployment
    from core.process.ports import free_port
    from core.spec.loader import load_spec

    ports = [f"router.grpc_port={free_port()}", f"router.http_port={free_port()}"]
    spec = load_spec("1P1D", overrides=[f"name={_OF_ITS_OWN}", f"model.source={model}", *ports])
    with reporter(is_new=True) as report:
        state = deployment.deploy(
            spec,
            address=None,
            deadline=time.monotonic() + spec.timeouts.start_s,
            wait_for_nodes=False,
            parts=Parts(),
            reporter=report,
        )
    try:
        yield state
    finally:
        deployment.take_down(state)


def _lines(result: dict[str, Any]) -> Iterator[str]:
    for phase in ("quiet", "loaded"):
        row = result[phase]
        yield (
            f"{phase:<7} tokens {row['itl_p50_ms']} ms apart (p50), {row['itl_p99_ms']} ms (p99), "
            f"{row['itl_max_ms']} ms at most; {row['tokens_per_s']} tokens/s in {result['streams']} streams"
        )
    row = result["loaded"]
    yield (
        f"{result['prompt_tokens']}-token prompts, {result['prefills_per_s']} a second: first token after "
        f"{row['ttft_p50_ms']} ms (p50), {row['ttft_p99_ms']} ms (p99); {row['prefills_answered']} answered, "
        f"{row['prefills_failed']} failed"
    )
