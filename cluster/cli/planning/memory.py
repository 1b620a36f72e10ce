"""`cluster plan --memory` and `--formats`: KV memory of a spec, and memory and speed of weight and KV formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cluster.cli.console import columns
from cluster.cli.planning.simulate import open_profile, times_note
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.model.kv_memory import KVArithmetic
    from core.model.shape import ModelConfig
    from core.spec.schema import Spec
    from core.types.request import Role
    from planner.simulator.profile import Profile

_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_CONTEXTS = (2048, 8192, 32_768, 131_072)
# Bits per weight of the matrices in the layers, with their scales.
_WEIGHT_BITS: Final = {"bf16": 16.0, "fp8": 8.002, "int8": 8.01, "int4": 4.125, "nvfp4": 4.5, "mxfp4": 4.25}
# Share of a rank's memory for weights and KV; the rest is for activations, graphs and links.
_USABLE = 0.9


def memory_report(source: str) -> dict[str, Any]:
    """Return the KV memory of a spec's pools, and the size of its weights. Raises SpecError."""
    from cluster.launch.preflight import check_ranks
    from core.model import config as model_config
    from core.model import source as model_source
    from core.model.draft_heads import load_heads
    from core.model.draft_source import heads_source
    from core.model.gguf_file import TABLE, read_table
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


def memory_table(report: dict[str, Any]) -> str:
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


def formats_report(
    source: str, profile: str | None, memory_gib: float, batch: int, context: int, *, as_json: bool
) -> str:
    """Return the table of formats, or its JSON."""
    from core.model import config as model_config
    from core.model import source as model_source
    from core.model.kv_memory import QUANTIZED
    from core.spec.loader import load_spec
    from core.types.request import Role

    spec = load_spec(source)
    config = model_config.load(model_source.resolve(spec.model.source))
    times, ranks = open_profile(profile), spec.decode.tensor_parallel
    plans = []
    for kv, dtype in ({"bf16": "bfloat16"} | QUANTIZED).items():
        if not config.can_keep_kv(dtype):
            continue
        plans += [
            _format_plan(
                config,
                weights,
                kv,
                _arithmetic(spec, config, Role.DECODE, dtype, memory_bytes=0),
                times,
                memory_bytes=memory_gib * 2**30 * ranks,
                batch=batch,
                context=context,
            )
            for weights in _WEIGHT_BITS
        ]
    if as_json:
        return json.dumps(plans, indent=1)
    return f"{columns(_formats_table(plans, batch=batch))}\n{times_note(times)}"


def _weight_bytes(config: ModelConfig, bits: float) -> int:
    """Return the bytes of all weights if the matrices of the layers take `bits` each, and the rest 16."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.hidden_size
    return round(tables * 2 + (config.num_parameters - tables) * bits / 8)


def _format_plan(
    config: ModelConfig,
    weights: str,
    kv_name: str,
    kv: KVArithmetic,
    profile: Profile,
    *,
    memory_bytes: float,
    batch: int,
    context: int,
) -> dict[str, Any]:
    """Return the figures of one weight format with one KV format. memory_bytes: of a whole replica.

    Key `tokens`: KV tokens that fit beside the weights; None: the weights do not fit. Key `tokens_s`: expected decode
    speed of one sequence and of `batch`, from the profile's decode step and the bytes that it reads; None if the
    profile lacks its weight bytes. The profile should be of this model: its compute per token is used unchanged.
    """
    size = _weight_bytes(config, _WEIGHT_BITS[weights])
    room = memory_bytes * _USABLE - size
    timing, known = profile.decode_timing(), profile.weight_bytes

    def tokens_s(sequences: int) -> float | None:
        if known is None:
            return None
        weights_s = timing.base_s * size / known
        context_s = timing.context_s * kv.bytes_per_token / profile.kv.bytes_per_token
        return sequences / (weights_s + sequences * (timing.token_s + context * context_s))

    return {
        "weights": weights,
        "kv": kv_name,
        "weight_bytes": size,
        "kv_bytes_per_token": kv.bytes_per_token,
        "tokens": int(room // kv.bytes_per_token) if room > 0 else None,
        "tokens_s": tokens_s(1),
        "batch_tokens_s": tokens_s(batch),
    }


def _formats_table(plans: list[dict[str, Any]], *, batch: int) -> list[list[str]]:
    """Return the rows of the report, the first with titles."""
    rows = [["WEIGHTS", "KV", "WEIGHTS GiB", "KV BYTES/TOKEN", "KV TOKENS THAT FIT", "TOKENS/s", f"AT BATCH {batch}"]]
    for plan in plans:
        fit = "weights do not fit" if plan["tokens"] is None else f"{plan['tokens']:,}"
        speeds = ["-" if speed is None else f"{speed:,.0f}" for speed in (plan["tokens_s"], plan["batch_tokens_s"])]
        sizes = [f"{plan['weight_bytes'] / 2**30:.2f}", f"{plan['kv_bytes_per_token']:,}", fit]
        rows.append([plan["weights"], plan["kv"], *sizes, *speeds])
    return rows


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


def _stored_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
