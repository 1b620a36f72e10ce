"""`cluster profile`: measure this machine for the simulator."""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli import options
from cluster.cli.connection import ask_routers_of, open_access
from cluster.cli.console import columns, say
from core.types.errors import ClusterError, SpecError
from core.types.request import Role
from core.types.step_timing import StepTiming

if TYPE_CHECKING:
    from core.wire.client_access import EndpointAccess

# Prompt lengths in tokens. Their transfers give a link's latency and rate.
_PROMPTS = (64, 1024)
# Assumed latency of a link if it is not measured.
_LATENCY_S = 0.003
# Tokens per prompt, and number of prompts, for measuring the time of a request besides its steps.
_SHORT, _NUM_SHORT = 64, 9
_COPY_BYTES, _NUM_COPIES = 1 << 20, 512


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")],
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.ModelDType = options.DEFAULT_DTYPE,
    weights: options.ModelWeights = options.DEFAULT_WEIGHTS,
    pool_dtype: options.PoolDType = "auto",
    wire_dtype: options.WireDType = "fp8_e4m3",
    kv_memory_gib: Annotated[float, typer.Option(min=0.001, help="KV memory of one replica, as in a spec.")] = 1.0,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of one replica.")] = 1,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent replicas; default: two per processor.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.001, help="Duration of each step measurement.")] = 1.0,
    live: Annotated[
        bool, typer.Option("--live", help="Use the rates that a deployment learned under its last load instead.")
    ] = False,
    name: options.Name = None,
    endpoint: Annotated[str | None, typer.Option(help="http://HOST:PORT of a router, for --live.")] = None,
    admin: Annotated[str | None, typer.Option(help="HOST:PORT of its admin endpoint, for --live.")] = None,
    usd_per_hour: Annotated[float, typer.Option(min=0.0001, help="Cost of one replica, for `cluster plan`.")] = 1.0,
    api_key: options.ApiKeyOption = None,
) -> None:
    """Measure the step times of a model on this machine, and its link rates, for `cluster simulate`.

    Starts processes that hold the model and work like replicas: prefill and decode of several sizes, alone and in
    parallel, and KV transfers. Takes a minute or two; run nothing else meanwhile.
    """
    from core.model.source import resolve
    from planner.simulator.profile import Profile

    model_dir = resolve(model)
    of = {"dtype": dtype, "weights": weights, "pool_dtype": pool_dtype, "threads": threads}
    if live:
        steps = _learned(*_router(name, endpoint, admin, api_key))
    else:
        count = replicas or 2 * (os.cpu_count() or 1)
        steps = _measured(model_dir, of, wire_dtype=wire_dtype, num_replicas=count, seconds=seconds)
    kv = _kv(model_dir, dtype=dtype, pool_dtype=pool_dtype, wire_dtype=wire_dtype, kv_memory_gib=kv_memory_gib)
    words = ", ".join(f"{key} {value}" for key, value in of.items())
    machine = f"{os.cpu_count()} processors, {platform.processor() or platform.machine()}"
    derivation = [
        f"On {datetime.date.today()}, {machine}; {model}, wire {wire_dtype}, {words}.",
        *steps.pop("derivation"),
        "host_bytes_per_s: copies of 1 MiB within memory. usd_per_hour: as given.",
    ]
    tree = {"name": output.stem, "origin": "measured", "derivation": derivation, **steps, "kv": kv}
    from kvtransfer.profile.shipped_prompts import copy_in_memory  # loads torch

    copying_s = copy_in_memory(num_bytes=_COPY_BYTES, count=_NUM_COPIES)
    tree |= {"host_bytes_per_s": _COPY_BYTES * _NUM_COPIES / copying_s, "usd_per_hour": usd_per_hour}
    output.write_text(Profile.model_validate(tree).model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(_table(tree))


def _measured(
    model_dir: Path, of: dict[str, Any], *, wire_dtype: str, num_replicas: int, seconds: float
) -> dict[str, Any]:
    from engine.tools.step_profile import profile_steps

    say(f"measuring steps of {model_dir.name}, alone and with up to {num_replicas} concurrent replicas")
    measured = profile_steps(model_dir, **of, num_replicas=num_replicas, seconds=seconds)
    wider = []
    for width in _widths(of["threads"]):
        say(f"measuring steps of one replica with {width * of['threads']} threads")
        wide = profile_steps(model_dir, **of | {"threads": width * of["threads"]}, num_replicas=1, seconds=seconds)
        wider.append({"width": width} | _steps(wide["prefill"], wide["decode"]))
    say("measuring KV transfers between processes")
    return {
        "derivation": [
            "steps: least squares over prompts of several lengths; decode_steps: over several batches and contexts.",
            "slowdown: mean over prefill and decode of the time with concurrent replicas, divided by the time alone.",
            "wider: like steps and decode_steps, for one replica alone with a multiple of the threads.",
            "link: transfers of two prompts without overlapping compute, including packing and checking.",
        ],
        **_steps(measured["prefill"], measured["decode"]),
        "weight_bytes": max(1, measured["weight_bytes"]),
        "threads": of["threads"],
        "wider": wider,
        "slowdown": measured["slowdown"],
        "link": _link(model_dir, dtype=of["dtype"], wire_dtype=wire_dtype, threads=of["threads"]),
    }


def _widths(threads: int) -> list[int]:
    """Return the multiples of `threads`, by powers of two, that this machine has processors for."""
    most = (os.cpu_count() or 1) // threads
    return [1 << n for n in range(1, most.bit_length())]


def _steps(prefill: StepTiming, decode: StepTiming) -> dict[str, Any]:
    return {"steps": asdict(prefill) | {"context_s": decode.context_s}, "decode_steps": asdict(decode)}


def _learned(http: str, access: EndpointAccess, replicas: list[dict[str, Any]]) -> dict[str, Any]:
    from planner.simulator.drafts import by_place

    learned = learned_rates(replicas)
    drafts = by_place(learned.drafted, learned.accepted, num_steps=learned.num_row_steps)
    prefill, decode = learned.steps[Role.PREFILL], learned.steps[Role.DECODE]
    request_s = max(0.0, asyncio.run(_first_token_s(http, access)) - prefill.prefill_s(_SHORT, after=0, chunk=_SHORT))
    return {
        "derivation": [
            "steps, decode_steps: learned by the replicas of each pool from their own steps under their last load,",
            "including any other load of the machine, so there is no separate slowdown.",
            "drafts: tokens drafted and accepted by position, on the decode replicas since they started.",
            "link: bytes per second of busy links; the latency is assumed.",
            f"request_s: the median of {_NUM_SHORT} prompts of {_SHORT} tokens, in sequence, minus their step.",
        ],
        "request_s": request_s,
        **_steps(prefill, decode),
        "slowdown": [],
        "drafts": drafts and drafts.model_dump(),
        "link": {"latency_s": _LATENCY_S, "bytes_per_s": learned.link_bytes_per_s},
    }


@dataclass(frozen=True, kw_only=True)
class LearnedRates:
    """Learned rates, averaged over the replicas of a role."""

    steps: dict[Role, StepTiming]
    link_bytes_per_s: float
    drafted: list[float]  # tokens by their position in a draft, of all decode replicas since they started
    accepted: list[float]
    num_row_steps: float  # steps, each counted once per row; approximate


def learned_rates(replicas: Sequence[Mapping[str, Any]]) -> LearnedRates:
    """Return the rates of `replicas`, as RouterView shows them. Raises ClusterError if they have served nothing yet."""
    timings = {role: [one["timing"] for one in replicas if one["role"] == role and one["timing"]] for role in Role}
    links = [one["link_bytes_per_s"] for one in replicas if one["link_bytes_per_s"]]
    if not links or not all(timings.values()):
        raise ClusterError("the replicas have not learned their rates yet: run a load, such as `cluster bench`, first")
    drafts = [draft for one in replicas for draft in one["drafts"]]
    decode = [one for one in replicas if one["role"] == Role.DECODE]
    return LearnedRates(
        steps={
            role: StepTiming(**{field.name: mean(one[field.name] for one in found) for field in fields(StepTiming)})
            for role, found in timings.items()
        },
        link_bytes_per_s=mean(links),
        drafted=_by_position(draft["tokens"] for draft in drafts),
        accepted=_by_position(draft["accepted"] for draft in drafts),
        num_row_steps=sum(one["generated_tokens"] / max(1.0, one["tokens_per_row"]) for one in decode),
    )


def _by_position(counts: Iterable[Sequence[float]]) -> list[float]:
    return [sum(at) for at in zip_longest(*counts, fillvalue=0.0)]


def _router(
    name: str | None, endpoint: str | None, admin: str | None, api_key: str | None
) -> tuple[str, EndpointAccess, list[dict[str, Any]]]:
    """Return the HTTP endpoint of a router, the access to it, and the replicas as that router shows them."""
    if (endpoint is None) != (admin is None):
        raise SpecError("--endpoint and --admin: give both, of the same router")
    state, access = open_access(name, endpoint, api_key)
    answers = ask_routers_of(name, admin, "/debug/view")
    return endpoint or (state.http if state else ""), access, answers[0].json().get("replicas", [])


async def _first_token_s(http: str, access: EndpointAccess) -> float:
    """Return the median time to first token of short prompts, sent in sequence."""
    from cluster.bench.endpoints import open_endpoint
    from cluster.bench.replay import replay
    from core.trace.trace import TraceRequest

    # A random seed, so that no prefix is cached.
    seed = secrets.randbits(32)
    async with open_endpoint(http, access) as target:
        answers = []
        for number in range(_NUM_SHORT):
            request = TraceRequest(number=number, arrival_s=0.0, num_tokens=_SHORT, num_output=2, ids=None)
            answers += await replay([request], target, seed=seed, timeout_s=60.0)
    return median(answer.ttft_s for answer in answers)


def _kv(model_dir: Path, *, dtype: str, pool_dtype: str, wire_dtype: str, kv_memory_gib: float) -> dict[str, int]:
    from core.model import config as model_config
    from core.model.kv_memory import KVArithmetic
    from core.spec.kv_windows import window_arithmetic
    from core.spec.schema import Spec

    config, spec = model_config.load(model_dir), Spec()
    windows = window_arithmetic(spec, config, block_size=1, max_batch_tokens=spec.prefill.max_batch_tokens)

    def of(kind: str) -> KVArithmetic:
        return KVArithmetic(
            config=config,
            dtype=kind,
            block_size=1,
            tensor_parallel=1,
            memory_bytes=kv_memory_gib * 2**30,
            activations=dtype,
            max_running=spec.decode.max_running,
            windows=windows,
        )

    pool = of(dtype if pool_dtype == "auto" else pool_dtype)
    wire = pool if wire_dtype == "raw" or pool_dtype != "auto" else of(wire_dtype)
    return {
        "bytes_per_token": pool.bytes_per_token,
        "wire_bytes_per_token": wire.bytes_per_token,
        "num_layers": config.num_layers,
        "pool_tokens": pool.sizes.num_blocks,
        "window": wire.cache.window,
        "window_wire_bytes_per_token": wire.cache.window_token_bytes,
        "pool_window_tokens": (pool.sizes.num_window_parts or 1) - 1,
        "state_bytes": wire.cache.state_bytes,
        "pool_states": pool.sizes.num_states,
    }


def _link(model_dir: Path, *, dtype: str, wire_dtype: str, threads: int) -> dict[str, float]:
    """Fit latency and rate to two transfers: seconds = latency + bytes / rate."""
    from kvtransfer.profile.shipped_prompts import ship_prompts

    small, large = ship_prompts(
        model_dir, _PROMPTS, dtype=dtype, wire_dtype=wire_dtype, host_link=options.DEFAULT_HOST_LINK, threads=threads
    )
    seconds = (large["transfer_ms"] - small["transfer_ms"]) / 1e3
    num_bytes = large["wire_bytes"] - small["wire_bytes"]
    per_byte_s = max(seconds, 1e-6) / num_bytes
    latency_s = max(0.0, small["transfer_ms"] / 1e3 - small["wire_bytes"] * per_byte_s)
    return {"latency_s": latency_s, "bytes_per_s": 1 / per_byte_s}


def _table(tree: dict[str, Any]) -> str:
    rows = [["", "STEP ms", "TOKEN us", "PAIR ns", "CONTEXT ns"]]
    kinds = [(tree["steps"], "prompts"), (tree["decode_steps"], "decoding")]
    for wide in tree.get("wider", []):
        threads = f"{wide['width'] * tree['threads']} threads"
        kinds += [(wide["steps"], f"prompts, {threads}"), (wide["decode_steps"], f"decoding, {threads}")]
    for of, title in kinds:
        rates = (of["base_s"] * 1e3, of["token_s"] * 1e6, of["pair_s"] * 1e9, of["context_s"] * 1e9)
        rows.append([title, *(f"{rate:.4g}" for rate in rates)])
    slowdown = ", ".join(f"{k} concurrent {factor:.2f}" for k, factor in enumerate(tree["slowdown"], start=1)) or "none"
    link = tree["link"]
    return "\n".join(
        [
            columns(rows),
            f"slowdown: {slowdown}",
            f"link: {link['latency_s'] * 1e3:.2f} ms + bytes / {link['bytes_per_s'] / 1e6:,.0f} MB/s",
        ]
    )
