"""`python -m benchmarks isolation`: effect of long prompts on running streams."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Annotated, Any

import typer

from benchmarks.isolation.load import Workload, measure
from cluster.cli.connection import access_to, find_state
from cluster.cli.options import DEFAULT_MODEL, ApiKeyOption, Model
from cluster.launch.state import State

_NAME = "bench-isolation"
_ANSWER_S = 300.0


def isolation(
    rate: Annotated[float, typer.Option(min=0.01, help="Prompts per second.")] = 0.4,
    streams: Annotated[int, typer.Option(min=1)] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 1024,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Duration of the load; before it, a quarter of that without load.")
    ] = 40.0,
    name: Annotated[
        str | None, typer.Option(help="Running deployment to use; default: deploy 1P1D and take it down again.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    api_key: ApiKeyOption = None,
) -> None:
    """Measure the inter-token latency of running streams with and without a load of long prompts.

    Uses a deployment of one prefill and one decode replica with one compute thread each, through its gRPC endpoint.
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
    """Deploy 1P1D on its own Ray and on free ports, and take it down at the end."""
    from cluster.cli.console import reporter
    from cluster.control.desired_state import Parts
    from cluster.launch import deployment
    from core.process.ports import free_port
    from core.spec.loader import load_spec

    ports = [f"router.grpc_port={free_port()}", f"router.http_port={free_port()}"]
    spec = load_spec("1P1D", overrides=[f"name={_NAME}", f"model.source={model}", *ports])
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
            f"{row['itl_max_ms']} ms max; {row['tokens_per_s']} tokens/s in {result['streams']} streams"
        )
    row = result["loaded"]
    yield (
        f"{result['prompt_tokens']}-token prompts, {result['prefills_per_s']} per second: first token after "
        f"{row['ttft_p50_ms']} ms (p50), {row['ttft_p99_ms']} ms (p99); {row['prefills_answered']} answered, "
        f"{row['prefills_failed']} failed"
    )
