"""What is wrong between a spec, its model and its Redis is said before anything is placed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cluster.host.preflight import check_index, check_model
from cluster.process.ports import free_port
from cluster.words.errors import DeployError, SpecError
from cluster.words.spec_file import parse_spec
from tests.cluster.model.test_config import write


@pytest.mark.parametrize(
    ("decode", "error"),
    [
        ({"tensor_parallel": 2, "expert_parallel": True, "redundant_experts": 5}, None),
        (
            {"tensor_parallel": 2, "expert_parallel": True, "redundant_experts": 6},
            r"decode\.redundant_experts: 6 are more than the 5 that 2 ranks do not hold",
        ),
        ({"tensor_parallel": 12, "expert_parallel": True}, r"decode\.expert_parallel: 5 experts do not fill 12 ranks"),
        ({"tensor_parallel": 5}, r"decode\.tensor_parallel: 5 does not fit 12 query and 4 KV heads"),
    ],
)
def test_ranks_must_fit_the_model(tmp_path: Path, decode: dict[str, Any], error: str | None) -> None:
    write(tmp_path, architectures=["MixtralForCausalLM"], num_local_experts=5, num_experts_per_tok=2)
    for file in ("model.safetensors", "tokenizer.json"):
        (tmp_path / file).touch()
    spec = parse_spec({"model": {"source": str(tmp_path)}, "decode": decode})
    if error is None:
        check_model(spec, print)
    else:
        with pytest.raises(SpecError, match=error):
            check_model(spec, print)


def test_a_redis_that_does_not_answer_is_named_without_its_password(redis_url: str) -> None:
    check_index("embedded")
    check_index(redis_url)
    port = free_port()
    with pytest.raises(
        DeployError, match=rf"^index: no Redis answers at redis://127.0.0.1:{port}/2: .*refused"
    ) as raised:
        check_index(f"redis://user:s3cret@127.0.0.1:{port}/2?password=s3cret")
    assert "s3cret" not in str(raised.value)
