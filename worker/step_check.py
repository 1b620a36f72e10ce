"""What a rank makes sure of before it carries out a step that rank 0 has sent.

The kernels that compute a step, and those that move blocks, read and write where they are told: on rank 0 that is what
its own block manager has given out, and on every other rank it is what comes through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.types.errors import ReplicaFailed, RequestError
from core.types.handoff import HandoffKey
from core.types.tier import Tier
from core.types.validation import check
from engine.batch.batch import KeptRows
from engine.batch.rows import Ints, RowChanges
from engine.kv.layout import KVLayout
from engine.scheduler.step_commands import BeginOrder, DeviceTokenOrder, Orders
from engine.tiers.commands import TierOrders
from kvtransfer.protocol.validation import check_blocks, check_handoff

_MOST_ADAPTERS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What there is on this rank, and may be named in a step."""

    layout: KVLayout
    num_blocks: int
    vocab_size: int
    max_context: int
    num_places: Mapping[Tier, int]  # of its lower tiers
    max_drafted: int = 0  # rows that heads may be asked about, of which this rank has a share


def check_step(changes: RowChanges | None, orders: Orders, limits: StepLimits, last_rows: KeptRows) -> None:
    """Raises ReplicaFailed: the ranks of this replica do not speak of the same, and no step can be left out.

    last_rows: those of the step before, on this rank."""
    try:
        _check_orders(orders, limits)
        for tiers in orders.tiers:
            _check_tiers(tiers, limits)
        if changes:
            _check_rows(changes, limits, last_rows)
        if changes and orders.device_tokens:
            _check_device_tokens(orders.device_tokens, changes, last_rows)
        check(changes is not None or not orders.device_tokens, "fed", "must be of a batch")
        check(changes is None or not orders.draft, "draft", "must be of no batch")
        num_rows = len(changes.kept) if changes else 0
        check(not any(orders.rows) or len(orders.rows) == num_rows, "rows", f"must be {num_rows}")
    except (RequestError, OverflowError) as error:  # that one: of a number that no array holds
        raise ReplicaFailed(f"rank 0 orders what cannot be: {error}") from error


def _check_rows(changes: RowChanges, limits: StepLimits, last_rows: KeptRows) -> None:
    """Before anything is made from them. What a batch says of positions and slots follows from what is checked here."""
    kept, query_lens, num_tokens = changes.kept, changes.query_lens, len(changes.token_ids)
    check(1 <= len(kept) <= limits.num_blocks, "rows", f"must be 1 to {limits.num_blocks}")
    if not changes.is_whole:
        check(changes.number == last_rows.number + 1, "number", f"must follow {last_rows.number}")
    _check_range(kept + 1, len(last_rows) + 1, "kept")
    going_on = kept[kept >= 0]
    check(len(np.unique(going_on)) == len(going_on), "kept", "must name each row once")
    num_new = len(kept) - len(going_on)
    check(len(changes.starts) == num_new, "starts", f"must be {num_new}")
    _check_range(query_lens - 1, num_tokens, "query_lens")
    check(int(query_lens.sum()) == num_tokens, "query_lens", f"must add up to {num_tokens}")
    _check_range(changes.num_logits, num_tokens + 1, "num_logits")
    check(bool((changes.num_logits <= query_lens).all()), "num_logits", "must be query_lens or less")
    rows, counts = changes.scored.T
    _check_range(rows, len(kept), "scored")
    check(len(np.unique(rows)) == len(rows), "scored", "must name each row once")
    check(bool(((counts >= 1) & (counts <= query_lens[rows])).all()), "scored", "must be query_lens or less")
    _check_range(changes.starts, limits.max_context, "starts")
    _check_range(changes.adapters, _MOST_ADAPTERS, "adapters")
    _check_range(changes.token_ids, limits.vocab_size, "token_ids")
    _check_range(changes.blocks, limits.num_blocks, "blocks")
    ends, num_added = last_rows.ends_of(kept, changes.starts, query_lens)
    _check_range(ends, limits.max_context + 1, "ends")
    check(int(num_added.sum()) == len(changes.blocks), "blocks", f"must be {num_added.sum()}")


def _check_device_tokens(device_tokens: DeviceTokenOrder, changes: RowChanges, last_rows: KeptRows) -> None:
    """As many tokens come as the step before has rows, or ranks would wait for each other on their devices; each is for
    the row that goes on from there."""
    check(
        device_tokens.num_chosen == len(last_rows),
        "fed",
        f"must be chosen by the {len(last_rows)} rows of the step before",
    )
    sources, places = np.array(device_tokens.sources, dtype=np.int64), np.array(device_tokens.places, dtype=np.int64)
    check(len(sources) == len(places) > 0, "fed", "must name a place for each")
    _check_range(sources, len(last_rows), "fed")
    _check_range(places, len(changes.token_ids), "fed")
    rows = np.repeat(np.arange(len(changes.kept)), changes.query_lens)[places]
    check(bool((changes.kept[rows] == sources).all()), "fed", "must be for rows that go on from those that choose")
    check(bool((changes.query_lens[rows] == 1).all()), "fed", "must be all that their rows compute")


def _check_range(numbers: Ints, end: int, what: str) -> None:
    is_met = not numbers.size or (numbers.min() >= 0 and numbers.max() < end)
    check(bool(is_met), what, f"must be below {end}")


def _check_orders(orders: Orders, limits: StepLimits) -> None:
    for incoming in orders.incoming_transfers:
        _check_table(incoming.blocks, incoming.end, limits)
        check(0 <= incoming.start <= incoming.end, "arrivals", "must end where they start, or later")
    if draft := orders.draft:
        check(1 <= len(draft.rows) <= limits.max_drafted, "draft", f"must be 1 to {limits.max_drafted} rows")
        check(0 <= draft.max_tokens <= limits.layout.block_size, "draft", "must be a block of tokens, or less")
        for token_id, position, blocks in draft.rows:
            check(0 <= token_id < limits.vocab_size, "draft", f"must be below {limits.vocab_size}")
            check(1 <= position < limits.max_context, "draft", f"must be below {limits.max_context}")
            _check_table(blocks, position, limits)  # beyond its table heads write behind the pool
    for pair in orders.copies:
        check_blocks(pair, num_blocks=limits.num_blocks)
    for begin in (*orders.served_fetches, *orders.begins):
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
