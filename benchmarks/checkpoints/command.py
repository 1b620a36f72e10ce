"""`python -m benchmarks checkpoints`: share of prompt tokens that each rule for state checkpoints reuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.model.kv_memory import KVArithmetic

# Widths of Qwen3.5-35B-A3B: of every four layers, the last has attention.
QWEN = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "vocab_size": 248_320,
    "max_position_embeddings": 262_144,
}


def checkpoints(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace in Mooncake's format.")],
    rules: Annotated[
        str,
        typer.Option(
            metavar="RULE[,RULE…]",
            help="end: at a prompt's last full block, as in all rules; +sight: also where cached blocks end; +answers: "
            "also every 128 tokens of answers; +N: also every N tokens of prompts; free: after every block, and states "
            "take no memory.",
        ),
    ] = "end,sight,sight+answers,512,2048,8192,free",
    shares: Annotated[
        str, typer.Option(metavar="SHARE[,SHARE…]", help="Percent of memory for states; default: as replicas do.")
    ] = "default,10,25,50,75",
    gib: Annotated[float, typer.Option(min=0.1, help="Memory of a replica for blocks and states.")] = 40.0,
    replicas: Annotated[int, typer.Option(min=1)] = 8,
    max_running: Annotated[int, typer.Option(min=1, help="As in a spec; determines the default share.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 64,
    token_ms: Annotated[float, typer.Option(min=0.0, help="Time per token of an answer.")] = 20.0,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory with a config.json; default: Qwen3.5-35B-A3B.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Replay a trace against block managers with state slots, and report the share of prompt tokens reused.

    Nothing is computed. Prompts take no time, and answers hold their blocks and slots at a fixed pace. The next turn of
    a conversation contains the answer.
    """
    from benchmarks.checkpoints.replay import Pool, Rule, replay, routes
    from core.model import config as model_config
    from core.model.kv_memory import KVArithmetic
    from core.trace.trace import read_trace
    from planner.simulator.prefix_hashes import hashes_of

    memory = KVArithmetic(
        config=model_config.load(model) if model else model_config.parse(QWEN, Path("config.json")),
        dtype="bfloat16",
        block_size=block_size,
        tensor_parallel=1,
        memory_bytes=gib * 2**30,
        max_running=max_running,
    )
    parsed = {name: Rule.parse(name, block_size=block_size) for name in rules.split(",")}
    splits = {share: _split(memory, share) for share in shares.split(",")}
    requests = read_trace(trace)
    hashes, chosen = hashes_of(requests, block_size), routes(requests, replicas)
    for name, rule in parsed.items():
        for share, (num_blocks, num_states) in ({"0": _split(memory, "0")} if rule.is_free else splits).items():
            pool = Pool(num_blocks=num_blocks, num_states=num_states, block_size=block_size, token_s=token_ms / 1e3)
            tally = replay(requests, hashes, chosen, rule, pool)
            row = {
                "rule": name,
                "share": share,
                "blocks": num_blocks,
                "states": num_states,
                "states_gib": round(num_states * memory.cache.state_bytes / 2**30, 2),
                "reused": round(tally.reused_tokens / tally.prompt_tokens, 4),
                "checkpoints": tally.checkpoints,
                "used": tally.used,
                "evicted": tally.evicted,
            }
            print(json.dumps(row) if as_json else _line(row), flush=True)


def _split(memory: KVArithmetic, share: str) -> tuple[int, int]:
    """Return the numbers of blocks and of state slots of a replica. Raises SpecError."""
    if share == "default":
        return memory.sizes.num_blocks, memory.sizes.num_states
    if not share.isdecimal() or int(share) >= 100:
        raise SpecError(f"--shares {share}: write default, or percents below 100")
    num_states = int(memory.memory_bytes * int(share) / 100) // memory.cache.state_bytes
    num_bytes = int(memory.memory_bytes) - num_states * memory.cache.state_bytes
    return num_bytes // memory.cache.block_bytes, num_states


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['rule']:<16} {row['share']:>7} % for states: {row['blocks']} blocks, {row['states']} states of "
        f"{row['states_gib']} GiB; {row['reused']:.2%} of prompt tokens reused; {row['checkpoints']} checkpoints made, "
        f"{row['used']} used, {row['evicted']} evicted"
    )
