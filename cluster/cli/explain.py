"""`cluster explain`: the routing decision of a request."""

from __future__ import annotations

import json
from typing import Any

from cluster.cli.deploy import AsJson, Name
from cluster.cli.routers import Admin, RequestId, remembered

_PARTS = ("wait_s", "queue_s", "fetch_s", "compute_s", "keep_s", "transfer_s", "stall_s", "decode_s", "cost_s")


def explain(
    request_id: RequestId,
    name: Name = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Show the replica pairs that the router considered for a request, with the predicted cost of each; the chosen pair
    is first.

    A router remembers its last 1,000 requests.
    """
    requests = remembered(name, admin, "/debug/routes/", request_id)
    if as_json:
        print(json.dumps(requests, indent=1))
        return
    for id, attempts in requests.items():
        for number, attempt in enumerate(attempts, start=1):
            print(f"request {id}, attempt {number}: milliseconds, the first line was chosen")
            print(_options_table(attempt["options"]))
            print("state of the replicas, with the rates learned from their steps")
            print(_replicas_table(attempt["replicas"]))
            if drafts := attempt.get("drafts"):
                print(_drafts_line(drafts))


def _options_table(options: list[dict[str, Any]]) -> str:
    from cluster.cli.console import columns

    rows = [["PREFILL", "DECODE", "PULL FROM", *(part.removesuffix("_s").upper() for part in _PARTS)]]
    for option in options:
        names = [option["prefill"] or "-", option["decode"], option["fetch_from"] or "-"]
        rows.append([*names, *(f"{option.get(part, 0.0) * 1e3:.1f}" for part in _PARTS)])
    return columns(rows)


def _replicas_table(replicas: dict[str, dict[str, Any]]) -> str:
    from cluster.cli.console import columns

    rows = [
        ["REPLICA", "CACHED", "QUEUE ms", "STREAMS", "BLOCKS", "STEP ms", "TOKEN us", "PAIR ns", "CONTEXT ns", "MB/S"]
    ]
    for name, view in replicas.items():
        timing = view["timing"]
        rates = [timing["base_s"] * 1e3, timing["token_s"] * 1e6, timing["pair_s"] * 1e9, timing["context_s"] * 1e9]
        numbers = [view["cached_tokens"], round(view["queue_s"] * 1e3), view["num_streams"], view["available_blocks"]]
        learnt = [f"{rate:.3g}" for rate in rates] if view.get("is_learnt", True) else ["not learnt yet", "-", "-", "-"]
        rows.append([name, *map(str, numbers), *learnt, f"{view['link_bytes_per_s'] / 1e6:.3g}"])
    return columns(rows)


def _drafts_line(drafts: dict[str, float]) -> str:
    """Describe how much was drafted, and why not more."""
    steps, drafted, accepted = drafts["steps"], drafts["drafted"], drafts["accepted"]
    not_worth = steps - drafts["drafts"] - drafts["unguessed"]
    accepted_share = f", {accepted} of them accepted ({accepted / drafted:.0%})" if drafted else ""
    floor = drafts["floors"] / steps
    needed = (
        f"drafting pays if a token is accepted with probability {floor:.2f} or more"
        if floor < 1
        else "drafting would not pay even if every token were accepted"
    )
    return (
        f"drafts: {drafts['drafted']} tokens{accepted_share}, in {drafts['drafts']} of {steps} steps; no draft found in"
        f" {drafts['unguessed']}, not worthwhile or no room in {not_worth}; with the other rows and token costs of its"
        f" replica, {needed}"
    )
