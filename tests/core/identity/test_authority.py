"""Certificates: issued by an authority, also an operator's, and renewed in time."""

from __future__ import annotations

import base64
import datetime
import queue
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from core.identity import credentials as credentials_module
from core.identity.authority import LIFE_S, Authority, KeyPair
from core.identity.credentials import Certificate, Identity, Renewal, TlsCredentials
from core.spec.schema import SecuritySpec
from core.types.errors import DeployError, SpecError
from tests.core.identity.authorities import IssuedAuthority, issue_authority
from tests.support.identities import DEPLOYMENT, in_clear, rank, tls_credentials
from tests.support.waiting import WITHIN_S, until

_NAME = rank("decode-3", 1)


def _names(certificate: Certificate) -> list[str]:
    """Return the process's names. The chain must end with a trusted root."""
    own, *between = x509.load_pem_x509_certificates(certificate.chain)
    roots = x509.load_pem_x509_certificates(certificate.authorities)
    for issued, issuer in pairwise([own, *between, roots[0]]):
        issued.verify_directly_issued_by(issuer)
    names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [name.value for name in names]


def test_certificate_ignores_the_requests_own_names() -> None:
    found = tls_credentials(Authority.create(DEPLOYMENT), _NAME)
    assert _names(found.certificate) == [_NAME.uri, _NAME.host]
    assert found.certificate.life_s == LIFE_S
    own = x509.load_pem_x509_certificate(found.certificate.chain)
    assert not own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert own.not_valid_before_utc < datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=5)


def test_repr_of_credentials_hides_the_key() -> None:
    found = tls_credentials(Authority.create(DEPLOYMENT), _NAME)
    assert b"PRIVATE KEY" in found.key and "PRIVATE" not in repr(found) and str(found.key) not in repr(found)


def test_restored_authority_issues_valid_certificates() -> None:
    before = Authority.create(DEPLOYMENT)
    after = Authority.from_json(before.to_json())
    assert (
        tls_credentials(after, _NAME).certificate.authorities == tls_credentials(before, _NAME).certificate.authorities
    )
    assert _names(tls_credentials(after, _NAME).certificate)


@pytest.mark.parametrize(
    "spoil",
    [lambda request: b"", lambda request: b"what?", lambda request: _resigned(request)],
    ids=["empty", "no request", "of a key that did not sign it"],
)
def test_invalid_request_is_rejected(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SpecError, match="request"):
        Authority.create(DEPLOYMENT).issue(_NAME, spoil(KeyPair().request))


def _resigned(request: bytes) -> bytes:
    """Return the request with a corrupted signature."""
    der = bytearray(x509.load_pem_x509_csr(request).public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    return b"-----BEGIN CERTIFICATE REQUEST-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE REQUEST-----\n"


@pytest.fixture
def root() -> IssuedAuthority:
    return issue_authority("the operator's root")


def test_intermediate_authority_issues_with_its_chain(root: IssuedAuthority, tmp_path: Path) -> None:
    ca, _ = root.write(tmp_path, "root")
    certificate, key = issue_authority("for xpyd", root).write(tmp_path, "own")
    found = tls_credentials(
        Authority.from_files(SecuritySpec(tls="files", ca=ca, certificate=certificate, key=key)), _NAME
    )
    assert _names(found.certificate) == [_NAME.uri, _NAME.host]
    assert len(x509.load_pem_x509_certificates(found.certificate.chain)) == 2


def test_root_authority_may_issue(root: IssuedAuthority, tmp_path: Path) -> None:
    ca, key = root.write(tmp_path, "root")
    found = tls_credentials(Authority.from_files(SecuritySpec(tls="files", ca=ca, certificate=ca, key=key)), _NAME)
    assert _names(found.certificate) and len(x509.load_pem_x509_certificates(found.certificate.chain)) == 1


def test_certificate_expires_no_later_than_its_chain(root: IssuedAuthority, tmp_path: Path) -> None:
    ca, _ = root.write(tmp_path, "root")
    certificate, key = issue_authority("for xpyd", root, days=0.5).write(tmp_path, "own")
    found = tls_credentials(
        Authority.from_files(SecuritySpec(tls="files", ca=ca, certificate=certificate, key=key)), _NAME
    )
    assert found.certificate.life_s < LIFE_S * 0.51


def _mistakes(root: IssuedAuthority, directory: Path) -> dict[str, tuple[dict[str, str], str]]:
    """Return the files and the expected error of each mistake."""
    ca, _ = root.write(directory, "root")
    certificate, key = issue_authority("for xpyd", root).write(directory, "own")
    leaf, leaf_key = issue_authority("a web server", root, is_authority=False).write(directory, "leaf")
    ended, ended_key = issue_authority("last year's", root, days=-1).write(directory, "ended")
    other, other_key = issue_authority("of nobody").write(directory, "other")
    shared = directory / "shared.key"
    shared.write_bytes(Path(key).read_bytes())
    shared.chmod(0o640)
    right = {"ca": ca, "certificate": certificate, "key": key}
    return {
        "no file": (right | {"ca": f"{directory}/none"}, f"security.ca: {directory}/none No such file or directory"),
        "no PEM": (right | {"certificate": __file__}, f"security.certificate: {__file__} contains no PEM certificate"),
        "a certificate for a key": (right | {"key": f"{directory}/none.key"}, "security.key: "),
        "another's key": (right | {"key": other_key}, "is not the key of security.certificate"),
        "a key for all": (right | {"key": str(shared)}, f"chmod 600 {shared}"),
        "no authority": (right | {"certificate": leaf, "key": leaf_key}, "is not a CA certificate"),
        "not from there": (right | {"certificate": other, "key": other_key}, "is not issued by security.ca"),
        "ended": (right | {"certificate": ended, "key": ended_key}, "has expired"),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        *("no file", "no PEM", "a certificate for a key", "another's key", "a key for all", "no authority"),
        *("not from there", "ended"),
    ],
)
def test_invalid_authority_file_is_one_line(root: IssuedAuthority, tmp_path: Path, mistake: str) -> None:
    files, expected = _mistakes(root, tmp_path)[mistake]
    with pytest.raises(SpecError) as rejected:
        Authority.from_files(SecuritySpec(tls="files", **files))
    assert expected in str(rejected.value) and "\n" not in str(rejected.value)


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
