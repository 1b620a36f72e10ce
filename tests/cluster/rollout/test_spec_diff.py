"""Changes between specs, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster.rollout.spec_diff import Needs, SpecChange, changes_of, check_possible, kind_of, tokens_of, updated
from cluster.rollout.updater import roles_of
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role

BASE = parse_spec({"name": "one", "model": {"dtype": "float32"}, "decode": {"replicas": 2}})


def _updated(named: dict[str, Any]) -> Spec:
    return updated(BASE, named, is_whole=False)


def _needs(old: Spec, new: Spec) -> dict[str, Needs]:
    return {change.path: change.needs for change in changes_of(old, new)}


@pytest.mark.parametrize(
    ("named", "path", "needs"),
    [
        ({"decode": {"replicas": 3}}, "decode.replicas", Needs.NOTHING),
        ({"timeouts": {"drain_s": 5}}, "timeouts.drain_s", Needs.NOTHING),
        ({"decode": {"max_running": 8}}, "decode.max_running", Needs.DECODE),
        ({"speculation": {"method": "ngram"}}, "speculation.method", Needs.DECODE),
        ({"speculation": {"method": "self"}}, "speculation.method", Needs.DECODE),
        ({"speculation": {"method": "mtp"}}, "speculation.method", Needs.REPLICAS),
        ({"prefill": {"tensor_parallel": 2}}, "prefill.tensor_parallel", Needs.PREFILL),
        ({"prefill": {"resources": {"custom": {"ssd": 1}}}}, "prefill.resources.custom.ssd", Needs.PREFILL),
        ({"kv": {"pool_dtype": "int8"}}, "kv.pool_dtype", Needs.REPLICAS),
        ({"model": {"weights": "int8"}}, "model.weights", Needs.REPLICAS),
        ({"kv": {"block_size": 32}}, "kv.block_size", Needs.DEPLOYMENT),
        ({"model": {"source": "hf:other/model"}}, "model.source", Needs.DEPLOYMENT),
        ({"router": {"http_port": 9}}, "router.http_port", Needs.DEPLOYMENT),
        ({"index": "redis://h"}, "index", Needs.DEPLOYMENT),
        ({"autoscale": {"slo_ttft_ms": 500}}, "autoscale", Needs.NOTHING),
    ],
)
def test_needs_of_each_change(named: dict[str, Any], path: str, needs: Needs) -> None:
    found = _needs(BASE, _updated(named))
    assert set(found.values()) == {needs} and all(one.startswith(path) for one in found)


@pytest.mark.parametrize(
    ("before", "after", "needs"),
    [
        (("off", "/heads"), ("eagle", "/heads"), Needs.REPLICAS),
        (("eagle", "/heads"), ("off", "/heads"), Needs.REPLICAS),
        (("auto", "/heads"), ("off", "/heads"), Needs.REPLICAS),
        (("eagle", "/heads"), ("auto", "/heads"), Needs.DECODE),
        (("off", None), ("auto", None), Needs.DECODE),
        (("off", "/small"), ("draft", "/small"), Needs.DECODE),
    ],
)
def test_switching_draft_heads_replaces_both_roles(
    before: tuple[str, str | None], after: tuple[str, str | None], needs: Needs
) -> None:
    """Their layers are transferred, so a prefill replica without heads and a decode replica with them reject each
    other."""
    old, new = (_updated({"speculation": {"method": method, "model": model}}) for method, model in (before, after))
    assert _needs(old, new) == {"speculation.method": needs}
    assert (kind_of(old) == kind_of(new)) == (needs is Needs.DECODE), "running answers move where layers are the same"


def test_every_spec_key_has_a_rule_or_is_listed() -> None:
    """A new key is rejected by updates until it has a rule or is listed here."""
    beyond = {path for path in _paths(Spec) if SpecChange(path=path, old=0, new=1).needs is Needs.DEPLOYMENT}
    assert {path for path in beyond if not path.startswith(("router.", "security."))} == {
        "name", "index", "kv.block_size", "model.source", "model.served_name", "model.max_context", "model.tool_parser",
        "model.generation_config",
        "model.reasoning_parser", "model.chat_template", "timeouts.queue_s", "timeouts.request_s", "timeouts.unread_s",
        "tracing.otlp_endpoint", "tracing.ratio",
    }  # fmt: skip
    assert not any(path.startswith(("router.", "security.")) for path in set(_paths(Spec)) - beyond)


def test_unnamed_keys_get_defaults_unless_unchangeable() -> None:
    """A spec file without the deployment's port and model does not change them."""
    deployed = parse_spec({"model": {"source": "hf:a/b", "dtype": "float32"}, "router": {"http_port": 9}, "name": "x"})
    new = updated(deployed, {"decode": {"max_running": 8}}, is_whole=True)
    assert (new.model.source, new.router.http_port, new.name) == ("hf:a/b", 9, "x")
    assert {str(change) for change in changes_of(deployed, new)} == {
        "model.dtype: float32 -> bfloat16",
        "decode.max_running: 64 -> 8",
    }
    assert updated(deployed, {"decode": {"max_running": 8}}, is_whole=False).model.dtype == "float32"


def test_removed_label_is_removed() -> None:
    labelled = parse_spec({"decode": {"labels": {"pool": "decode"}}})
    assert updated(labelled, {"decode": {"replicas": 1}}, is_whole=True).decode.labels == {}
    assert updated(labelled, {"decode": {"replicas": 1}}, is_whole=False).decode.labels == {"pool": "decode"}


_NAMES = st.sampled_from(["pool", "ray.io/market-type", "topology.kubernetes.io/zone", "ray", "ray.io"])
_LABELS = st.dictionaries(_NAMES, st.sampled_from(["a", "b"]), max_size=3)
_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "prefill": st.fixed_dictionaries({"labels": _LABELS, "replicas": st.integers(0, 3)}),
        "decode": st.fixed_dictionaries({}, optional={"labels": _LABELS, "max_running": st.integers(1, 9)}),
        "autoscale": st.none() | st.fixed_dictionaries({"max_devices": st.integers(2, 9)}),
        "router": st.fixed_dictionaries({"http_port": st.integers(1, 9)}),
    },
)


@given(old=_SPECS, named=_SPECS, is_whole=st.booleans())
def test_named_values_are_applied_for_any_key_names(old: dict[str, Any], named: dict[str, Any], is_whole: bool) -> None:
    """Label names may contain dots, like those of Ray and Kubernetes."""
    before = parse_spec(old)
    after = updated(before, named, is_whole=is_whole)
    for section, keys in named.items():
        found = getattr(after, section)
        for key, value in (keys or {}).items():
            has = getattr(found, key)
            assert has == value if is_whole or key != "labels" else has.items() >= value.items()
    assert bool(changes_of(before, after)) == (before != after)
    assert updated(after, named, is_whole=is_whole) == after


def test_impossible_update_is_one_line_with_the_keys() -> None:
    changes = changes_of(BASE, _updated({"router": {"http_port": 9}, "kv": {"block_size": 8}}))
    with pytest.raises(SpecError, match=r"^kv.block_size, router.http_port: cannot change while deployed"):
        check_possible(changes)
    check_possible(changes_of(BASE, _updated({"kv": {"pool_dtype": "int8"}})))


def test_redis_password_is_not_shown() -> None:
    (change,) = changes_of(BASE, _updated({"index": "rediss://:secret@h"}))
    assert "secret" not in str(change)


def test_only_affected_roles_are_replaced() -> None:
    decode = changes_of(BASE, _updated({"decode": {"max_running": 8, "replicas": 5}}))
    assert roles_of(decode) == {Role.DECODE} and roles_of(decode, restarts_all=True) == set(Role)
    assert roles_of(changes_of(BASE, _updated({"prefill": {"replicas": 2}}))) == set()


def test_token_and_transfer_compatibility() -> None:
    changes = ({"decode": {"tensor_parallel": 2}}, {"kv": {"host_link": "gloo"}}, {"kv": {"pool_dtype": "int8"}})
    more, link, eight = map(_updated, changes)
    assert tokens_of(BASE) == tokens_of(more) == tokens_of(link) != tokens_of(eight)
    assert kind_of(BASE) == kind_of(more) != kind_of(link)
    ngram, mtp = (_updated({"speculation": {"method": name}}) for name in ("ngram", "mtp"))
    assert kind_of(BASE) == kind_of(ngram) != kind_of(mtp), "it has a layer more"


def _paths(section: type[BaseModel], under: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _paths(kind, f"{under}{name}.")
        else:
            yield f"{under}{name}"
