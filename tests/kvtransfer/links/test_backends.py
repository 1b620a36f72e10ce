"""Choice of the link backend."""

from __future__ import annotations

import pytest
import torch

from core.types.errors import SpecError
from kvtransfer.links import nixl
from kvtransfer.links.backends import LINKS, backend_for

_CPU, _GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_gpus_use_nccl_unless_nixl_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: object())
    assert {link: backend_for(_CPU, host_link=link) for link in LINKS} == {link: link for link in LINKS}
    assert {link: backend_for(_GPU, host_link=link) for link in LINKS} == {
        link: "nixl" if link == "nixl" else "nccl" for link in LINKS
    }


def test_missing_package_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "find_spec", lambda name: None)
    for device in (_CPU, _GPU):
        with pytest.raises(SpecError, match="pip install nixl") as caught:
            backend_for(device, host_link="nixl")
        assert "\n" not in str(caught.value)
