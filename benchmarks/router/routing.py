"""Cost of a routing decision: `python -m benchmarks.router.routing`. See docs/benchmarks/planner.md.

All times are CPU time of one core, so other load does not count. Redis is not involved.

Fills an index with chains of blocks of random depth on random replicas. Then prompts of 100,000 tokens, each starting
with part of a chain, are hashed, matched and given to the policy.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Sequence

from core.index.prefix_index import PrefixIndex
from core.model.kv_memory import CacheShape
from core.types.prefix_hash import HASH_BYTES, block_hashes, root_hash
from core.types.step_timing import StepTiming
from router.routing.candidates import CandidateReplica, Option, Policy, RoutingRequest
from router.routing.policies import make_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    random.seed(0)
    index, prompts, bytes_per_block = _fill(options)
    policy = make_policy("cost", prefix_fetches=True)
    hashing, matching, choosing = [], [], []
    for _ in range(options.rounds):
        tokens = random.choice(prompts)
        times = [time.thread_time()]
        hashes = block_hashes(root_hash("model"), tokens, block_size=options.block_size)
        times.append(time.thread_time())
        depths = index.match(hashes)
        times.append(time.thread_time())
        _choose(policy, depths, options)
        times.append(time.thread_time())
        hashing.append(times[1] - times[0])
        matching.append(times[2] - times[1])
        choosing.append(times[3] - times[2])
    whole = [sum(parts) for parts in zip(hashing, matching, choosing, strict=True)]
    decision = [match + choice for match, choice in zip(matching, choosing, strict=True)]
    print(
        f"{options.tokens:,} tokens, {options.replicas} replicas, {len(index):,} indexed blocks of {options.block_size}"
    )
    print(f"index: {bytes_per_block:.0f} bytes per block")
    rows = {"hash": hashing, "match": matching, "choose": choosing, "match + choose": decision, "whole request": whole}
    for name, seconds in rows.items():
        quantiles = statistics.quantiles(seconds, n=20)
        print(f"{name:<16} p50 {statistics.median(seconds) * 1e3:7.3f} ms   p95 {quantiles[-1] * 1e3:7.3f} ms")


def _fill(options: argparse.Namespace) -> tuple[PrefixIndex, list[list[int]], float]:
    """Return an index of `options.blocks` blocks, and prompts that share prefixes with it."""
    replicas = [_name(i) for i in range(options.replicas)]
    per_prompt = options.tokens // options.block_size
    prompts = [[random.randrange(1 << 17) for _ in range(options.tokens)] for _ in range(8)]
    tracemalloc.start()
    index = PrefixIndex()
    for tokens in prompts:
        hashes = block_hashes(root_hash("model"), tokens, block_size=options.block_size)
        for replica in random.sample(replicas, k=min(8, len(replicas))):
            index.store(replica, hashes[: random.randrange(per_prompt)])
        del hashes
    while len(index) < options.blocks:
        chain = [os.urandom(HASH_BYTES) for _ in range(min(per_prompt, options.blocks - len(index)))]
        for replica in random.sample(replicas, k=2):
            index.store(replica, chain)
        del chain
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return index, prompts, num_bytes / len(index)


def _choose(policy: Policy, depths: dict[str, int], options: argparse.Namespace) -> Sequence[Option]:
    timing = StepTiming(base_s=0.006, token_s=3e-5, pair_s=1e-9, context_s=2e-8)
    views = [
        CandidateReplica(
            replica=_name(i),
            cached_tokens=depths.get(_name(i), 0) * options.block_size,
            stored_tokens=depths.get(_name(i), 0) * options.block_size,
            queue_s=0.01 * i,
            num_streams=i % 8,
            num_blocks=100_000,
            available_blocks=50_000,
            timing=timing,
            max_batch_tokens=8192,
            link_bytes_per_s=4e10,
        )
        for i in range(options.replicas)
    ]
    half = options.replicas // 2
    demand = RoutingRequest(
        num_tokens=options.tokens,
        cache=CacheShape(block_size=options.block_size, token_bytes=67_584),
        max_local_tokens=16,
    )
    return policy.options(demand, views[:half], views[half:])


def _name(number: int) -> str:
    return f"replica-{number}"


if __name__ == "__main__":
    main()
