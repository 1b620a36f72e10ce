"""Options of commands that run a model without a deployment match those of the spec."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from cluster.cli import options
from core.spec.schema import KVSpec, ModelSpec


@pytest.mark.parametrize(
    ("option", "section", "field"),
    [
        (options.ModelDType, ModelSpec, "dtype"),
        (options.ModelWeights, ModelSpec, "weights"),
        (options.PoolDType, KVSpec, "pool_dtype"),
        (options.WireDType, KVSpec, "wire_dtype"),
    ],
)
def test_option_accepts_the_values_of_the_spec(option: Any, section: Any, field: str) -> None:
    literal, *_ = get_args(option)
    assert set(get_args(literal)) == set(get_args(get_type_hints(section)[field]))


def test_defaults_match_the_spec() -> None:
    spec = ModelSpec()
    defaults = (options.DEFAULT_MODEL, options.DEFAULT_DTYPE, options.DEFAULT_WEIGHTS)
    assert defaults == (spec.source, spec.dtype, spec.weights)
    assert KVSpec().host_link == options.DEFAULT_HOST_LINK
