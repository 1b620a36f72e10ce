"""What an update changes of a spec, and what each change needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster.rollout.spec_diff import Needs, SpecChange, changes_of, check_possible, kind_of, tokens_of, updated
from cluster.rollout.updater import roles_of
from core.spec.loader import parse_spec
from core.spec.schema import Spec
from core.types.errors import SpecError
from core.types.request import Role

BASE = parse_spec({"name": "one", "model": {"dtype": "float32"}, "decode": {"replicas": 2}})


def _changed(named: dict[str, Any], *, is_whole: bool = False) -> dict[str, Needs]:
    changes = changes_of(BASE, updated(BASE, named, is_whole=is_whole))
    return {change.path: change.needs for change in changes}


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
    ],
)
def test_each_change_has_its_need(named: dict[str, Any], path: str, needs: Needs) -> None:
    assert _changed(named) == {path: needs}


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
def test_heads_that_are_named_already_come_and_go_on_both_roles(
    before: tuple[str, str | None], after: tuple[str, str | None], needs: Needs
) -> None:
    """Their layers are shipped: a prefill replica without them and a decode replica with them refuse each other."""
    old, new = (
        updated(BASE, {"speculation": {"method": method, "model": model}}, is_whole=False)
        for method, model in (before, after)
    )
    assert {change.path: change.needs for change in changes_of(old, new)} == {"speculation.method": needs}
    assert (kind_of(old) == kind_of(new)) == (needs is Needs.DECODE), "running answers move where layers are the same"


def test_rules_of_the_autoscaler_are_taken_live() -> None:
    assert set(_changed({"autoscale": {"slo_ttft_ms": 500, "slo_itl_ms": 50}}).values()) == {Needs.NOTHING}


def test_every_key_of_a_spec_is_thought_of() -> None:
    """A new key is refused by an update until somebody has given it a rule, or has written it down here."""
    beyond = {path for path in _paths(Spec) if SpecChange(path=path, old=0, new=1).needs is Needs.DEPLOYMENT}
    assert {path for path in beyond if not path.startswith(("router.", "security."))} == {
        "name", "index", "kv.block_size", "model.source", "model.served_name", "model.max_context", "model.tool_parser",
        "model.reasoning_parser", "model.chat_template", "timeouts.queue_s", "timeouts.request_s", "timeouts.unread_s",
        "tracing.otlp_endpoint", "tracing.ratio",
    }  # fmt: skip
    assert not any(path.startswith(("router.", "security.")) for path in set(_paths(Spec)) - beyond)


def test_what_a_spec_does_not_name_is_its_default_but_for_what_cannot_change() -> None:
    """A spec file without the port and the model that the deployment has does not ask for others."""
    deployed = parse_spec({"model": {"source": "hf:a/b", "dtype": "float32"}, "router": {"http_port": 9}, "name": "x"})
    new = updated(deployed, {"decode": {"max_running": 8}}, is_whole=True)
    assert (new.model.source, new.router.http_port, new.name) == ("hf:a/b", 9, "x")
    assert {str(change) for change in changes_of(deployed, new)} == {
        "model.dtype: float32 -> bfloat16",
        "decode.max_running: 64 -> 8",
    }
    assert updated(deployed, {"decode": {"max_running": 8}}, is_whole=False).model.dtype == "float32"


def test_a_label_that_a_spec_no_longer_has_is_gone() -> None:
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
@settings(max_examples=100, deadline=None)
def test_whatever_the_keys_are_called_what_is_named_is_what_comes(
    old: dict[str, Any], named: dict[str, Any], is_whole: bool
) -> None:
    """Labels have dots in their own names: those that Ray and Kubernetes give do."""
    before = parse_spec(old)
    after = updated(before, named, is_whole=is_whole)
    for section, keys in named.items():
        found = getattr(after, section)
        for key, value in (keys or {}).items():
            has = getattr(found, key)
            assert has == value if is_whole or key != "labels" else has.items() >= value.items()
    assert bool(changes_of(before, after)) == (before != after)
    assert updated(after, named, is_whole=is_whole) == after


def test_what_an_update_cannot_do_is_one_line_with_the_keys() -> None:
    changes = changes_of(BASE, updated(BASE, {"router": {"http_port": 9}, "kv": {"block_size": 8}}, is_whole=False))
    with pytest.raises(SpecError, match=r"^kv.block_size, router.http_port: cannot change while deployed"):
        check_possible(changes)
    check_possible(changes_of(BASE, updated(BASE, {"kv": {"pool_dtype": "int8"}}, is_whole=False)))


def test_a_redis_password_is_never_shown() -> None:
    (change,) = changes_of(BASE, updated(BASE, {"index": "rediss://:secret@h"}, is_whole=False))
    assert "secret" not in str(change)


def test_only_the_roles_that_a_change_is_of_are_replaced() -> None:
    decode = changes_of(BASE, updated(BASE, {"decode": {"max_running": 8, "replicas": 5}}, is_whole=False))
    assert roles_of(decode) == {Role.DECODE} and roles_of(decode, restarts_all=True) == set(Role)
    assert roles_of(changes_of(BASE, updated(BASE, {"prefill": {"replicas": 2}}, is_whole=False))) == set()


def test_specs_that_give_the_same_tokens_and_those_between_which_answers_move() -> None:
    more, link, eight = (
        updated(BASE, named, is_whole=False)
        for named in ({"decode": {"tensor_parallel": 2}}, {"kv": {"host_link": "gloo"}}, {"kv": {"pool_dtype": "int8"}})
    )
    assert tokens_of(BASE) == tokens_of(more) == tokens_of(link) != tokens_of(eight)
    assert kind_of(BASE) == kind_of(more) != kind_of(link)
    ngram, mtp = (updated(BASE, {"speculation": {"method": name}}, is_whole=False) for name in ("ngram", "mtp"))
    assert kind_of(BASE) == kind_of(ngram) != kind_of(mtp), "it has a layer more"


def _paths(section: type[BaseModel], under: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _paths(kind, f"{under}{name}.")
        else:
            yield f"{under}{name}"
