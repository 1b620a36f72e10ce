"""Certificates are renewed in time, and failed renewals are retried."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest

from core.identity import credentials as credentials_module
from core.identity.authority import Authority
from core.identity.credentials import Identity, Renewal, TlsCredentials
from core.types.errors import DeployError
from tests.support.identities import DEPLOYMENT, in_clear, rank, tls_credentials
from tests.support.waiting import WITHIN_S, until

_NAME = rank("decode-0")
_AUTHORITY = Authority.create(DEPLOYMENT)


class FakeController:
    """Controller that gives the test's answers in order, and errors for None."""

    def __init__(self, *answers: TlsCredentials | None) -> None:
        self.calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._answers = iter(answers)

    def obtain(self) -> TlsCredentials:
        self.calls.put(None)
        if (answer := next(self._answers, None)) is None:
            raise DeployError("the controller does not answer")
        return answer


def _tls_credentials(life_s: float) -> TlsCredentials:
    """Credentials with a real certificate and a pretended lifetime."""
    made = tls_credentials(_AUTHORITY, _NAME)
    return replace(made, certificate=replace(made.certificate, life_s=life_s))


@pytest.fixture
def soon_over() -> Iterator[Identity]:
    yield Identity(_NAME, _tls_credentials(0.03))


def test_identity_is_renewed_before_its_certificate_expires(soon_over: Identity) -> None:
    fresh = _tls_credentials(3600.0)
    controller = FakeController(fresh)
    renewal = Renewal(soon_over, controller.obtain)
    renewal.start()
    until(lambda: soon_over.tls_credentials is fresh)
    renewal.stop()
    assert controller.calls.qsize() == 1, "not due again for an hour"


@pytest.mark.parametrize("hours", [-1, 30])
def test_a_clock_that_is_set_makes_a_renewal_due(hours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate has ended, or does not hold yet, although no time has passed."""
    looks: queue.SimpleQueue[float] = queue.SimpleQueue()

    class Clock:
        now = 1e9

        @classmethod
        def time(cls) -> float:
            looks.put(cls.now)
            return cls.now

    monkeypatch.setattr(credentials_module, "time", Clock)
    identity, fresh = Identity(_NAME, _tls_credentials(24 * 3600.0)), _tls_credentials(24 * 3600.0)
    controller = FakeController(fresh)
    renewal = Renewal(identity, controller.obtain, retry_s=0.001)
    renewal.start()
    for _ in range(3):
        looks.get(timeout=WITHIN_S)
    assert controller.calls.empty()
    Clock.now += hours * 3600
    until(lambda: identity.tls_credentials is fresh)
    renewal.stop()
    assert controller.calls.qsize() == 1


def test_failed_renewal_is_retried(soon_over: Identity) -> None:
    before, fresh = soon_over.tls_credentials, _tls_credentials(3600.0)
    controller = FakeController(None, None, fresh)
    renewal = Renewal(soon_over, controller.obtain, retry_s=0.01)
    renewal.start()
    until(lambda: soon_over.tls_credentials is not before)
    renewal.stop()
    assert soon_over.tls_credentials is fresh and controller.calls.qsize() == 3


def test_without_tls_nothing_is_renewed() -> None:
    controller = FakeController()
    renewal = Renewal(in_clear(_NAME), controller.obtain, retry_s=0.0)
    renewal.start()
    renewal.stop()
    assert controller.calls.empty()
