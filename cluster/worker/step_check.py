"""What a rank makes sure of before it carries out a step that rank 0 has sent.

The kernels that compute a step, and those that move blocks, read and write where they are told: on rank 0 that is what
its own block manager has given out, and on every other rank it is what comes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cluster.words.checking import check
from cluster.words.errors import ReplicaFailed, RequestError
from cluster.words.handoff import HandoffKey
from cluster.words.tier import Tier
from engine.batch.batch import Batch, Ints
from engine.kv.layout import KVLayout
from engine.orders import BeginOrder, Orders
from engine.tiers.orders import TierOrders
from kvtransfer.protocol.checks import check_blocks, check_handoff


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What there is on this rank."""

    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_context: int
    num_places: Mapping[Tier, int]  # of its lower tiers


def check_step(batch: Batch | None, orders: Orders, limits: StepLimits) -> None:
    """Raises ReplicaFailed: the ranks of this replica do not speak of the same, and no step can be left out."""
    try:
        _check_orders(orders, limits)
        for tiers in orders.tiers:
            _check_tiers(tiers, limits)
        if batch:
            _check_batch(batch, limits)
        num_rows = len(batch.query_lens) if batch else 0
        check(not any(orders.rows) or len(orders.rows) == num_rows, "rows", f"must be {num_rows}")
    except RequestError as error:
        raise ReplicaFailed(f"rank 0 orders what cannot be: {error}") from error


def _check_batch(batch: Batch, limits: StepLimits) -> None:
    tables_RB, size = batch.block_tables, limits.layout.block_size
    num_tokens = batch.num_tokens
    check(len(batch.query_lens) >= 1 and batch.query_lens.min() >= 1, "query_lens", "must be 1 or more")
    check(int(batch.query_lens.sum()) == num_tokens, "query_lens", f"must add up to {num_tokens}")
    check(bool((batch.query_lens <= batch.context_lens).all()), "context_lens", "must be query_lens or more")
    most = min(tables_RB.shape[1] * size, limits.max_context)
    _check_range(batch.context_lens, most + 1, "context_lens")
    _check_range(batch.positions, most, "positions")
    _check_range(batch.token_ids, limits.vocab_size, "token_ids")
    _check_range(batch.slots, limits.num_blocks * size, "slots")
    _check_range(tables_RB, limits.num_blocks, "block_tables")
    _check_range(batch.logits_rows, num_tokens, "logits_rows")


def _check_range(numbers: Ints, end: int, what: str) -> None:
    is_met = not numbers.size or (numbers.min() >= 0 and numbers.max() < end)
    check(bool(is_met), what, f"must be below {end}")


def _check_orders(orders: Orders, limits: StepLimits) -> None:
    for pair in orders.copies:
        check_blocks(pair, num_blocks=limits.num_blocks)
    for begin in (*orders.grants, *orders.begins):
        _check_begin(begin, limits)
    for ship in orders.ships:
        _check_table(ship.blocks, ship.end, limits)
        check(0 <= ship.start <= ship.end, "ships", "must end where they start, or later")
    for commit in orders.commits:
        check(commit.num_tokens >= 0 and all(token >= 0 for token in commit.next_tokens), "commits", "are negative")
    keys: Iterable[HandoffKey | None] = (*orders.aborts, *orders.rows)
    check(all(key is None or key[1] >= 0 for key in keys), "aborts", "must have an epoch")


def _check_begin(begin: BeginOrder, limits: StepLimits) -> None:
    check_handoff(begin.handoff, limits.layout)
    _check_table(begin.blocks, begin.num_tokens, limits)


def _check_table(blocks: Sequence[int], num_tokens: int, limits: StepLimits) -> None:
    check_blocks(blocks, num_blocks=limits.num_blocks)
    most = len(blocks) * limits.layout.block_size
    check(0 <= num_tokens <= most, "num_tokens", f"must be at most the {most} of its blocks")


def _check_tiers(orders: TierOrders, limits: StepLimits) -> None:
    places = limits.num_places
    for spill in orders.spills:
        _check_place(Tier.HOST, spill.source, places)
        _check_place(Tier.DISK, spill.target, places)
    for save in orders.saves:
        _check_place(save.tier, save.place, places)
    for source in (source for load in orders.loads for source in load.sources):
        _check_place(source.tier, source.place, places)
    blocks = [save.block for save in orders.saves]
    blocks += [source.block for load in orders.loads for source in load.sources]
    check_blocks(blocks, num_blocks=limits.num_blocks)


def _check_place(tier: Tier, place: int, places: Mapping[Tier, int]) -> None:
    check(0 <= place < places.get(tier, 0), "tiers", f"{tier.name} has no place {place} here")
