"""`cluster explain`: why a request went to the replicas that served it."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated, Any

import typer

from cluster.cli.connection import find_state
from cluster.cli.deploy import Name
from cluster.words.errors import ClusterError, SpecError

_TIMEOUT_S = 10.0
_PARTS = ("queue_s", "pull_s", "compute_s", "keep_s", "transfer_s", "stall_s", "decode_s", "cost_s")


def explain(
    request_id: Annotated[str, typer.Argument(help="As `generate --json` and the X-Request-Id header say it.")],
    name: Name = None,
    endpoint: Annotated[
        str | None, typer.Option(help="http://HOST:PORT of a router; default: the deployment's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show which pairs of replicas the router weighed, the one taken first, and what each would have cost.

    A router remembers its last 1,000 requests. With several routers, another than the one that
    chose may answer.
    """
    requests = _ask(endpoint or find_state(name).http, request_id)
    if as_json:
        print(json.dumps(requests, indent=1))
        return
    for id, attempts in requests.items():
        for number, attempt in enumerate(attempts, start=1):
            print(f"request {id}, attempt {number}: milliseconds, the first line was taken")
            print(_options_table(attempt["options"]))
            print("what was known of the replicas, with the rates learnt from their steps")
            print(_replicas_table(attempt["replicas"]))


def _ask(http: str, request_id: str) -> dict[str, Any]:
    if not http.startswith(("http://", "https://")):
        raise SpecError(f"--endpoint {http}: write http://HOST:PORT")
    url = f"{http}/debug/routes/{urllib.parse.quote(request_id, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            requests: dict[str, Any] = json.load(answer)
            return requests
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise ClusterError(f"the router at {http} does not remember request {request_id}") from None
        raise ClusterError(f"the router at {http} answers {error.code}") from None
    except OSError as error:
        raise ClusterError(f"no router answers at {http}: {error}") from None


def _options_table(options: list[dict[str, Any]]) -> str:
    from cluster.cli.console import columns

    rows = [["PREFILL", "DECODE", "PULL FROM", *(part.removesuffix("_s").upper() for part in _PARTS)]]
    for option in options:
        names = [option["prefill"] or "-", option["decode"], option["pull_from"] or "-"]
        rows.append([*names, *(f"{option[part] * 1e3:.1f}" for part in _PARTS)])
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
        cells = [*map(str, numbers), *(f"{rate:.3g}" for rate in (*rates, view["link_bytes_per_s"] / 1e6))]
        rows.append([name, *cells])
    return columns(rows)
