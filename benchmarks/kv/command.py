"""`python -m benchmarks kv`."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from benchmarks.counts import parse_counts
from cluster.cli.planning import model_options as options
from core.types.errors import SpecError

_MESSAGES = "64,256,1024,4096,16384,65536"
_Counts = Annotated[str, typer.Option(metavar="N[,N…]")]


def kv(
    model: options.Model = options.DEFAULT_MODEL,
    message: Annotated[str, typer.Option(metavar="KIB[,KIB…]", help="Sizes of messages in KiB.")] = _MESSAGES,
    prompt: _Counts = "256,1024,2048,8192",
    threads: Annotated[int, typer.Option(min=1, help="Of the process that computes prompts.")] = 1,
    dtype: options.ModelDType = options.DEFAULT_DTYPE,
    wire_dtype: options.WireDType = "fp8_e4m3",
    host_link: options.HostLink = options.DEFAULT_HOST_LINK,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="As kv.encrypt does, over tcp.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """The way of KV blocks from one process to another on this machine's processors.

    Messages over our link, alone (wire) and with packing, checking and unpacking (raw, fp8), beside a bare TCP
    connection and copies in memory, best of five. Then prompts of a model: how long their transfer takes alone, and how
    much of it the computation hides.
    """
    from benchmarks.kv.run import bench_kv
    from core.model.source import resolve

    if encrypt and host_link != "tcp":
        raise SpecError(f"--encrypt: only tcp can, not {host_link}")
    result = bench_kv(
        resolve(model),
        dtype=dtype,
        wire_dtype=wire_dtype,
        host_link=host_link,
        encrypt=encrypt,
        messages=[1024 * size for size in parse_counts("message", message)],
        prompts=parse_counts("prompt", prompt),
        threads=threads,
    )
    print(json.dumps(result) if as_json else "\n".join(_lines(result)))


def _lines(result: dict[str, Any]) -> list[str]:
    ways = ("memcpy", "tcp", "tcp_ring", "wire", "raw", "fp8")
    return [
        *(
            f"{row['bytes'] >> 10:6} KiB  " + "  ".join(f"{way} {row[f'{way}_gb_s']:5.2f} GB/s" for way in ways)
            for row in result["messages"]
        ),
        *(
            f"{row['tokens']:6} tokens  {row['wire_bytes'] / 1e6:7.2f} MB in {row['transfer_ms']:7.2f} ms, "
            f"{100 * row['hidden_share']:5.1f} % of it hidden behind {row['prefill_ms']:8.1f} ms of computation"
            for row in result["prompts"]
        ),
    ]
