"""What people with certificates may ask of a controller, and what is noted of it: by real handshakes and calls."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.control.operations import Operations
from cluster.control.operator_registry import PersonBook
from cluster.launch.certified_controller import CertifiedController
from cluster.launch.person_file import PersonFile
from cluster.ray import authority_store
from cluster.ray.authority_store import issue_identity
from core.identity.authority import Authority
from core.identity.key_pair import KeyPair
from core.identity.operator_account import PersonRole
from core.identity.process_name import ProcessName
from core.process.log import LogPart
from core.spec.loader import parse_spec
from core.types.api_key import ApiKey, KeyChange, new_key, new_secret
from core.types.errors import DeployError, SpecError
from tests.cluster.control.operating import NAME, Operating, operating
from tests.support.identities import in_clear, proven, rank, router

_KEY = new_key("acme", new_secret(), tenant="t", rpm=7, priorities=(0, 3))
_CHANGES: list[tuple[str, tuple[Any, ...]]] = [
    ("scale", ({"decode": 3},)),
    ("drain", ("decode-1",)),
    ("switch", ("decode-1",)),
    ("keys", ()),
    ("add_key", (_KEY,)),
    ("revoke_key", (_KEY,)),
]


async def _ask(file: PersonFile, method: str, *args: Any, **kwargs: Any) -> Any:
    return await asyncio.to_thread(CertifiedController(file).ask, method, *args, within_s=30.0, **kwargs)


@pytest.fixture
async def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Operating]:
    async with operating(tmp_path, monkeypatch) as found:
        yield found


async def test_an_operator_does_what_the_controller_does_and_hears_what_it_says(served: Operating) -> None:
    alice = served.person("alice", PersonRole.OPERATOR)
    report, whole = await _ask(alice, "status"), await served.controller.status()
    assert "s3cret" in str(whole) and whole["spec"].pop("index")
    assert report == whole, "all but the password of the index"
    assert await _ask(alice, "logs", "decode-1", lines=7) == {0: LogPart("decode-1 7 None\n", 9), 1: LogPart("", 0)}
    assert (await _ask(alice, "logs", "router", starts={0: 5}))[0].text == "router 50 {0: 5}\n"
    assert await _ask(alice, "scale", {"decode": 3}, wait_for_nodes=True) == {"decode": (1, 3)}
    await _ask(alice, "drain", "decode-1")
    assert await _ask(alice, "switch", "decode-1") == "prefill-1"
    assert await _ask(alice, "add_key", _KEY) == KeyChange(key=_KEY, is_told=True)
    assert (await _ask(alice, "keys")).keys == (_KEY,)
    assert await _ask(alice, "revoke_key", _KEY) == KeyChange(key=_KEY, is_told=False, problem="the disk is full")
    with pytest.raises(SpecError, match="no key is called key-"):
        await _ask(alice, "revoke_key", _KEY)
    assert served.controller.asked == [
        "scale {'decode': 3} True",
        "drain decode-1",
        "switch decode-1",
        "add acme",
        "keys",
        *("keys", "revoke acme"),
        "keys",
    ]
    with pytest.raises(SpecError, match="no replica is called decode-99; there are: decode-1"):
        await _ask(alice, "drain", "decode-99")
    for replicas in ({}, {"router": 2}):
        with pytest.raises(SpecError, match="replicas: say how many"):
            await _ask(alice, "scale", replicas)


async def test_a_viewer_looks_and_changes_nothing(served: Operating) -> None:
    bob = served.person("bob", PersonRole.VIEWER)
    assert (await _ask(bob, "status"))["pools"]["decode"]["ready"] == 1 and (await _ask(bob, "logs", "decode-1"))[
        0
    ].end == 9
    for method, args in _CHANGES:
        with pytest.raises(DeployError, match="only an operator may call this; viewer/bob is a viewer"):
            await _ask(bob, method, *args)
    assert not served.controller.asked and not served.lines


async def test_who_is_not_in_the_book_gets_nothing_whatever_certificate_it_has(served: Operating) -> None:
    """Neither a person who was revoked, nor one whom nobody has entered, nor a process of the deployment."""
    carol = served.person("carol", PersonRole.OPERATOR)
    assert await _ask(carol, "status")
    served.book.remove("carol")
    ours, theirs = authority_store.find(served.spec), Authority.create(NAME)
    name = ProcessName.of_person(NAME, PersonRole.OPERATOR, "carol")
    strangers = [carol, *(served.file(proven(authority, name)) for authority in (ours, theirs))]
    strangers += [
        served.file(proven(ours, process)) for process in (router(deployment=NAME), rank("decode-0", deployment=NAME))
    ]
    strangers += [served.file(proven(ours, name, life_s=-1.0)), served.file(in_clear(name))]
    again = served.person("carol", PersonRole.VIEWER)  # the name is free, and an earlier certificate of it is not
    for pending_peer in strangers:
        for method, args in [("status", ()), *_CHANGES]:
            with pytest.raises(DeployError):
                await _ask(pending_peer, method, *args)
    assert not served.controller.asked and not served.lines
    assert await _ask(again, "status")
    assert [person.name for person in PersonBook(NAME).people.known] == ["carol"], "a controller that restarts knows"


async def test_who_has_changed_what_is_written_down(served: Operating) -> None:
    alice, bob = served.person("alice", PersonRole.OPERATOR), served.person("bob", PersonRole.OPERATOR)
    key = new_key("acme", new_secret())
    await _ask(alice, "status")
    await _ask(alice, "scale", {"decode": 3})
    await _ask(bob, "add_key", key)
    with pytest.raises(SpecError):
        await _ask(bob, "drain", "decode-99")
    scaled, added, drained = served.lines
    assert (scaled["who"], scaled["command"], scaled["error"]) == ("operator/alice", "Scale", "")
    assert scaled["asked"] == {"replicas": {"decode": 3}} and scaled["peer"].startswith("ipv4:127.0.0.1:")
    assert (added["who"], added["command"], added["asked"]) == ("operator/bob", "CreateKey", {"name": "acme"})
    assert drained["asked"] == {"replica": "decode-99"} and "no replica is called" in drained["error"]
    assert key.digest not in served.audit_log.read_text()
    assert stat.S_IMODE(served.audit_log.stat().st_mode) == 0o600


async def test_a_key_that_the_command_would_not_have_made_is_refused(served: Operating) -> None:
    """It goes to every router, which relies upon it."""
    alice = served.person("alice", PersonRole.OPERATOR)
    good = new_key("acme", new_secret())
    for spoilt in ({"rpm": "many"}, {"rpm": 0}, {"digest": "short"}, {"id": "../x"}, {"tenant": "a b"}, {"tenant": 7}):
        with pytest.raises(SpecError):
            await _ask(alice, "add_key", _spoil(good, **spoilt))
    assert not served.controller.asked


def _spoil(key: ApiKey, **fields: Any) -> ApiKey:
    for name, value in fields.items():
        key = ApiKey(**(vars(key) | {name: value}))
    return key


async def test_a_name_that_is_taken_and_a_deployment_where_nobody_listens_are_one_line(served: Operating) -> None:
    served.person("alice", PersonRole.VIEWER)
    with pytest.raises(SpecError, match="alice already; `cluster operators revoke alice`"):
        served.person("alice", PersonRole.OPERATOR)
    with pytest.raises(SpecError, match="nobody is called dave; there is: alice"):
        served.book.remove("dave")
    silent = parse_spec({"name": NAME})
    with pytest.raises(SpecError, match=r"security\.operators is not set"):
        served.book.issue(silent, "dave", PersonRole.VIEWER, KeyPair().request, days=1)
    with pytest.raises(SpecError, match="small letters"):
        served.person("Dave the third", PersonRole.VIEWER)


async def test_an_address_that_cannot_be_listened_at_is_one_line(served: Operating, tmp_path: Path) -> None:
    identity = issue_identity(served.spec, ProcessName.of_controller(NAME))
    with pytest.raises(DeployError, match=r"security\.operators: cannot listen at 192\.0\.2\.1:1"):
        await Operations.open(served.controller, served.book, "192.0.2.1:1", identity, audit_log=tmp_path / "t")
