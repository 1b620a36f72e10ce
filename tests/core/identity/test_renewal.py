"""Certificates are renewed in time, and failed renewals are retried."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace

import pytest

from core.identity.authority import Authority
from core.identity.credentials import Identity, TlsCredentials
from core.identity.renewal import Renewal
from core.types.errors import DeployError
from tests.support.identities import DEPLOYMENT, in_clear, rank, tls_credentials
from tests.support.waiting import until

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
