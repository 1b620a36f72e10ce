"""`python -m benchmarks kv`: KV transfer between two processes."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from benchmarks.counts import parse_counts
from cluster.cli import options
from core.types.errors import SpecError

_MESSAGES = "64,256,1024,4096,16384,65536"
_Counts = Annotated[str, typer.Option(metavar="N[,N…]")]


def kv(
    model: options.Model = options.DEFAULT_MODEL,
    message: Annotated[str, typer.Option(metavar="KIB[,KIB…]", help="Message sizes in KiB.")] = _MESSAGES,
    prompt: _Counts = "256,1024,2048,8192",
    threads: Annotated[int, typer.Option(min=1, help="Threads of the process that computes prompts.")] = 1,
    dtype: options.ModelDType = options.DEFAULT_DTYPE,
    wire_dtype: options.WireDType = "fp8_e4m3",
    host_link: options.HostLink = options.DEFAULT_HOST_LINK,
    encrypt: Annotated[bool, typer.Option("--encrypt", help="Encrypt the link, like kv.encrypt; tcp only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the transfer of KV blocks between two processes on this machine's CPUs.

    Messages over our link, alone (wire) and with packing, checking and unpacking (raw, fp8), compared with a bare TCP
    connection and memory copies, best of five. Then prompts of a model: the transfer time alone, and the share of it
    that overlaps with computation.
    """
    from benchmarks.kv.run import bench_kv
    from core.model.source import resolve

    if encrypt and host_link != "tcp":
        raise SpecError(f"--encrypt: supported by tcp only, not {host_link}")
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
