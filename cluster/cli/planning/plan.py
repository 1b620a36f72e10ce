"""`cluster plan`: cheapest topology that meets an SLO, disaggregated or colocated; KV memory; benefit of drafts."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.deploy import AsJson, Name
from cluster.cli.planning.draft_options import DraftPass, DraftsOption, draft_lines, lines_table
from cluster.cli.planning.simulate import HostTokens, ProfileName, Simulator, Speedup, pools_of, running_deployment
from core.trace.trace import read_trace
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.model.kv_memory import KVArithmetic
    from core.model.shape import ModelConfig
    from core.spec.schema import Spec
    from core.types.request import Role
    from planner.simulator.candidate import Candidate
    from planner.simulator.plan import CapacityPlan

_NO_SPEC = "1P1D"
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_CONTEXTS = (2048, 8192, 32_768, 131_072)


def plan(
    trace: Annotated[Path | None, typer.Option(help="Trace to plan for.")] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="Limit for the time to first token.")] = 2000.0,
    slo_itl_ms: Annotated[float, typer.Option(help="Limit for a request's mean inter-token latency.")] = 25.0,
    good: Annotated[float, typer.Option(min=0, max=1, help="Share of requests that must meet both limits.")] = 0.95,
    max_replicas: Annotated[int, typer.Option(min=2, help="Maximum number of replicas.")] = 16,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens per block; default: the spec's.")] = None,
    host_tokens: HostTokens = 0,
    speedup: Speedup = 1.0,
    profile: ProfileName = None,
    drafts: DraftsOption = None,
    draft_pass_ms: DraftPass = 0.0,
    name: Name = None,
    spec: Annotated[
        str | None,
        typer.Option(help="Spec to start from: model, KV, resources, limits. Default: the deployment's, or 1P1D."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as a spec.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the cost frontier to a .png or .svg file; needs matplotlib.")
    ] = None,
    memory: Annotated[
        bool, typer.Option("--memory", help="Show only the KV memory of --spec; no trace needed.")
    ] = False,
    formats: Annotated[
        bool, typer.Option("--formats", help="Show only memory and speed of weight and KV formats; no trace needed.")
    ] = False,
    memory_gib: Annotated[float, typer.Option(min=0.01, max=1e6, help="With --formats: memory of one rank.")] = 80.0,
    batch: Annotated[int, typer.Option(min=1, help="With --formats: sequences decoded at a time.")] = 32,
    speculation: Annotated[
        bool, typer.Option("--speculation", help="Show only the benefit of --drafts at --context; no trace needed.")
    ] = False,
    context: Annotated[
        int, typer.Option(min=0, help="With --speculation and --formats: context length in tokens.")
    ] = 2048,
    as_json: AsJson = False,
) -> None:
    """Find the cheapest topology that meets an SLO on a trace.

    Topologies are xPyD, and 0PyD, where decode replicas compute their own prompts. Exit code 1 if none within
    --max-replicas meets it.

    Without --spec and --profile, the plan is for the running deployment: its spec, at the rates that its replicas have
    learned.
    """
    if memory:
        report = _memory(spec or _NO_SPEC)
        print(json.dumps(report, indent=1) if as_json else _memory_table(report))
        return
    if formats:
        print(_formats(spec or _NO_SPEC, profile, memory_gib, batch, context, as_json=as_json))
        return
    if speculation:
        simulator = Simulator(profile, drafts, draft_pass_ms)
        lines = draft_lines(simulator.profile, context=context)
        print(json.dumps(lines, indent=1) if as_json else f"{lines_table(lines)}\n{simulator.times_note}")
        return
    if trace is None:
        raise SpecError("give --trace, --memory, --formats or --speculation")
    from core.spec.loader import load_spec
    from planner.simulator.fleet_setup import FleetSetup
    from planner.simulator.plan import make_plan

    running = running_deployment(name) if name is not None or not (spec or profile) else None
    source = spec or (running[0] if running else _NO_SPEC)
    simulator = Simulator(profile or (running[1] if running else None), drafts, draft_pass_ms)
    overrides = [f"kv.block_size={block_size}"] if block_size is not None else []
    given = load_spec(source, overrides=overrides)
    if simulator.profile.kv.pool_tokens < given.kv.block_size:
        raise SpecError(
            f"--block-size {given.kv.block_size}: a replica's KV pool has {simulator.profile.kv.pool_tokens} tokens"
        )
    setup = FleetSetup(
        **pools_of(given),
        policy="cost",
        block_size=given.kv.block_size,
        kv_tokens=simulator.profile.kv.pool_tokens,
        host_tokens=host_tokens,
        prefix_fetches=True,
    )
    found = make_plan(
        setup,
        simulator.profile,
        read_trace(trace, speedup=speedup, max_requests=max_requests),
        slo_ttft_s=slo_ttft_ms / 1e3,
        slo_itl_s=slo_itl_ms / 1e3,
        good_share=good,
        max_replicas=max_replicas,
        tried=lambda c: print(f"{_name(c)}: {c.good_share:.1%} within the SLO", file=sys.stderr, flush=True),
    )
    if plot:
        from planner.simulator.plot import plot as draw

        draw(found, plot, good_share=good)
    if output and found.best:
        output.write_text(
            _as_spec(source, overrides, given, found.best, threads=simulator.profile.threads), encoding="utf-8"
        )
    print(json.dumps(_as_tree(found), indent=1) if as_json else _table(found, times=simulator.times_note))
    raise typer.Exit(0 if found.best else 1)


def _as_spec(source: str | dict[str, Any], overrides: list[str], given: Spec, best: Candidate, *, threads: int) -> str:
    """Return `source` with the plan's pools as YAML for `cluster deploy`. threads: of the profile's replica."""
    import yaml

    from core.spec.loader import load_spec

    sizes = [*overrides, f"prefill.replicas={best.num_prefill}", f"decode.replicas={best.num_decode}"]
    if best.decode_batch_tokens != given.decode.max_batch_tokens:
        sizes.append(f"decode.max_batch_tokens={best.decode_batch_tokens}")
    for role, role_threads in (("prefill", best.prefill_threads), ("decode", best.decode_threads)):
        if role_threads != threads:
            sizes.append(f"{role}.resources.cpus={role_threads}")
    spec = load_spec(source, overrides=sizes)
    return yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True), sort_keys=False)


def _as_tree(found: CapacityPlan) -> dict[str, Any]:
    def tree(candidate: Candidate) -> dict[str, Any]:
        return {"topology": candidate.topology} | asdict(candidate)

    return {
        "best": tree(found.best) if found.best else None,
        "same_resources": {
            "apart": tree(found.apart),
            "colocated": tree(found.colocated),
            "better": _better(found)[0].topology,
        },
        "frontier": [tree(candidate) for candidate in found.frontier],
        "tried": [tree(candidate) for candidate in found.tried],
    }


def _table(found: CapacityPlan, *, times: str) -> str:
    from cluster.cli.console import columns

    titles = ["", "TOPOLOGY", "THREADS", "CHUNK", "USD/H", "WITHIN SLO", "GOODPUT/s"]
    rows = [[*titles, "TTFT P50 ms", "P99", "ITL P50 ms", "P99", "REUSED"]]
    shown = [*found.frontier, *(c for c in (found.apart, found.colocated) if c not in found.frontier)]
    for c in shown:
        mark = "*" if c == found.best else ""
        threads = str(c.decode_threads) if c.is_colocated else f"{c.prefill_threads}+{c.decode_threads}"
        shape = [c.topology, threads, str(c.decode_batch_tokens) if c.is_colocated else "-", f"{c.usd_per_hour:.2f}"]
        times_ms = [f"{c.ttft_p50_ms:,.0f}", f"{c.ttft_p99_ms:,.0f}", f"{c.itl_p50_ms:,.1f}", f"{c.itl_p99_ms:,.1f}"]
        rows.append([mark, *shape, f"{c.good_share:.1%}", f"{c.goodput_rps:.2f}", *times_ms, f"{c.reuse_share:.1%}"])
    best = f"{_name(found.best)} is the cheapest" if found.best else "no tried topology meets the SLO"
    return f"{columns(rows)}\n{_comparison(found)}\n{best}; {times}"


def _comparison(found: CapacityPlan) -> str:
    """Compare disaggregated and colocated in one sentence."""
    better, other = _better(found)
    how = (
        "computes prompts on replicas of their own" if other.is_colocated else "runs prefill and decode on each replica"
    )

    def figures(c: Candidate) -> str:
        return f"{c.good_share:.1%}, {c.goodput_rps:.2f}/s, P99 {c.ttft_p99_ms:,.0f} and {c.itl_p99_ms:,.1f} ms"

    return (
        f"with equal resources, {_name(better)}, which {how}, meets this SLO better than {_name(other)}: "
        f"{figures(better)} against {figures(other)}"
    )


def _better(found: CapacityPlan) -> tuple[Candidate, Candidate]:
    """Return the better of the two candidates with equal resources, then the other one."""
    pair = sorted((found.apart, found.colocated), key=lambda c: c.merit, reverse=True)
    return pair[0], pair[1]


def _name(c: Candidate) -> str:
    """Return the topology with the settings that distinguish it from others."""
    if c.is_colocated:
        return f"{c.topology} (threads {c.decode_threads}, chunks {c.decode_batch_tokens})"
    return f"{c.topology} (threads {c.prefill_threads} + {c.decode_threads})"


def _memory(source: str) -> dict[str, Any]:
    from cluster.launch.preflight import check_ranks
    from core.model import config as model_config
    from core.model import source as model_source
    from core.model.draft_heads import load_heads
    from core.model.draft_source import heads_source
    from core.model.gguf_table import TABLE, read_table
    from core.spec.kv_windows import why_windows_stay, window_arithmetic
    from core.spec.loader import load_spec
    from core.types.request import Role
    from core.types.role_switch import largest_step

    spec = load_spec(source)
    directory = model_source.resolve(spec.model.source)
    config = model_config.load(directory, max_context=spec.model.max_context)
    check_ranks(spec, config)
    drafts = heads_source(spec)
    heads = load_heads(drafts.heads, drafts.directory, config) if drafts and drafts.heads else None
    limit = min(config.max_context, spec.model.max_context or config.max_context)
    pools = {}
    for role in Role:
        pool = spec.pool(role)
        if pool.kv_memory_gib is None and pool.resources.gpus:
            raise SpecError(f"{role}.kv_memory_gib: must be set; free GPU memory is unknown here")
        own = spec.model.dtype if spec.kv.pool_dtype == "auto" else spec.kv.pool_dtype
        by_dtype = {
            dtype: _arithmetic(
                spec,
                config,
                role,
                dtype,
                memory_bytes=(pool.kv_memory_gib or 1.0) * 2**30,
                heads=heads,
                activations=spec.model.dtype,
                max_running=largest_step(spec, role)[1],
                windows=window_arithmetic(
                    spec, config, block_size=spec.kv.block_size, max_batch_tokens=largest_step(spec, role)[0]
                ),
            )
            for dtype in dict.fromkeys((own, spec.model.dtype, "fp8_e4m3", "int8", "int4"))
            if config.can_keep_kv(dtype)
        }
        kv = by_dtype[own]
        contexts = [*(context for context in _CONTEXTS if context < limit), limit]
        pools[role.value] = {
            "bytes_per_token": kv.bytes_per_token,
            "blocks_per_replica": kv.sizes.num_blocks,
            "tokens_per_replica": kv.sizes.num_blocks * spec.kv.block_size,
            "tokens_by_pool_dtype": {name: one.sizes.num_blocks * spec.kv.block_size for name, one in by_dtype.items()},
            "max_batch": {str(context): kv.max_batch(context) for context in contexts},
            **_slots(kv),
            "tier_places": {
                name: int(gib * 2**30) // kv.cache.place_bytes if kv.cache.place_bytes else 0
                for name, gib in (("host", pool.kv_host_gib), ("disk", pool.kv_disk_gib))
            },
        }
    why_whole = why_windows_stay(spec, config) if any(config.kv_windows) else None
    count = config.num_parameters
    weights = {spec.model.dtype: count * _ITEM_BYTES[spec.model.dtype], "int8": count}
    if (directory / TABLE).exists():
        weights["as stored"] = sum(tensor.num_bytes for tensor in read_table(directory))
    elif model_config.quantization_config(directory):
        weights["as stored"] = _stored_bytes(directory)
    return {
        "model": spec.model.name,
        "block_size": spec.kv.block_size,
        "parameters": count,
        "weight_bytes": weights,
        # MTP heads are stored in the model's own files.
        "heads_bytes": _stored_bytes(heads.directory) if heads and heads.kind != "mtp" else 0,
        "why_windows_stay": why_whole,
        "pools": pools,
    }


def _arithmetic(spec: Spec, config: ModelConfig, role: Role, dtype: str, **more: Any) -> KVArithmetic:
    """Return the KV memory of a role's replicas with a pool of `dtype`. more: further arguments of KVArithmetic."""
    from core.model.kv_memory import KVArithmetic

    return KVArithmetic(
        config=config,
        dtype=dtype,
        block_size=spec.kv.block_size,
        tensor_parallel=spec.pool(role).tensor_parallel,
        unquantized_layers=config.layers_at("kv.unquantized_layers", spec.kv.unquantized_layers),
        **more,
    )


def _slots(kv: KVArithmetic) -> dict[str, int]:
    """Return what a replica keeps beside blocks: states of recurrent layers, or parts of layers with a window."""
    cache, sizes = kv.cache, kv.sizes
    return {
        "states_per_replica": sizes.num_states,
        "state_bytes": cache.state_bytes * kv.tensor_parallel,
        "window": cache.window,
        "window_bytes_per_token": cache.window_token_bytes * kv.tensor_parallel,
        "window_parts_per_replica": (sizes.num_window_parts or 1) - 1,
        "places_beside_a_block": cache.num_pieces,
    }


def _formats(source: str, profile: str | None, memory_gib: float, batch: int, context: int, *, as_json: bool) -> str:
    """Return the table of formats, or its JSON."""
    from cluster.cli.console import columns
    from cluster.cli.planning.formats import WEIGHT_BITS, format_plan, formats_table
    from core.model import config as model_config
    from core.model import source as model_source
    from core.model.kv_memory import QUANTIZED
    from core.spec.loader import load_spec
    from core.types.request import Role

    spec = load_spec(source)
    config = model_config.load(model_source.resolve(spec.model.source))
    simulator, ranks = Simulator(profile, None, 0.0), spec.decode.tensor_parallel
    plans = []
    for kv, dtype in ({"bf16": "bfloat16"} | QUANTIZED).items():
        if not config.can_keep_kv(dtype):
            continue
        plans += [
            format_plan(
                config,
                weights,
                kv,
                _arithmetic(spec, config, Role.DECODE, dtype, memory_bytes=0),
                simulator.profile,
                memory_bytes=memory_gib * 2**30 * ranks,
                batch=batch,
                context=context,
            )
            for weights in WEIGHT_BITS
        ]
    if as_json:
        return json.dumps([asdict(one) for one in plans], indent=1)
    return f"{columns(formats_table(plans, batch=batch))}\n{simulator.times_note}"


def _stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def _memory_table(report: dict[str, Any]) -> str:
    from cluster.cli.console import columns

    sizes = ", ".join(f"{size / 2**30:.2f} GiB in {name}" for name, size in report["weight_bytes"].items())
    lines = [
        f"{report['model']}, blocks of {report['block_size']} tokens",
        f"weights: {report['parameters'] / 1e6:,.0f} million, about {sizes}; each rank has its share",
    ]
    if report["heads_bytes"]:
        lines.append(f"draft heads: {report['heads_bytes'] / 2**20:,.0f} MiB as stored, on each replica")
    if report["why_windows_stay"]:
        lines.append(f"layers with a window keep KV for whole contexts: {report['why_windows_stay']}")
    for role, pool in report["pools"].items():
        lines.append(
            f"{role}: {pool['bytes_per_token']:,} bytes per token, {pool['blocks_per_replica']:,} blocks"
            f" = {pool['tokens_per_replica']:,} tokens per replica"
        )
        by_dtype = ", ".join(f"{tokens:,} in {name}" for name, tokens in pool["tokens_by_pool_dtype"].items())
        lines += [f"  by kv.pool_dtype: {by_dtype}", *_slot_lines(pool)]
        rows = [["  CONTEXT", "SEQUENCES AT A TIME"]]
        rows += [[f"  {int(context):,}", f"{batch:,}"] for context, batch in pool["max_batch"].items()]
        lines.append(columns(rows))
    return "\n".join(lines)


def _slot_lines(pool: dict[str, Any]) -> list[str]:
    lines, beside = [], ""
    if pool["state_bytes"]:
        beside = "a checkpoint"
        lines.append(
            f"  states: {pool['states_per_replica']:,} of {pool['state_bytes']:,} bytes; each running sequence"
            " takes one, the others are checkpoints of cached prefixes"
        )
    if pool["window"]:
        beside = "its part with a window"
        lines.append(
            f"  windows: {pool['window_bytes_per_token']:,} of the bytes per token are freed {pool['window']:,}"
            f" tokens back; {pool['window_parts_per_replica']:,} blocks at a time have them"
        )
    if any(pool["tier_places"].values()):
        places = " and ".join(f"{count:,} on {name}" for name, count in pool["tier_places"].items() if count)
        more = f", {beside} {pool['places_beside_a_block']:,}" if beside else ""
        lines.append(f"  lower tiers: {places}; a block takes one{more}")
    return lines
