"""Who issues the certificates of a deployment: an authority of its own, or one that an operator lends it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.identity.credentials import Certificate
from core.identity.process_name import ProcessName
from core.types.errors import SpecError

LIFE_S = 24 * 3600.0
_BACKDATED_S = 600.0  # clocks of machines differ
_OWN_LIFE = datetime.timedelta(days=3650)  # of an authority that is made for a deployment: it ends with that
_MAX_BYTES = 1 << 20
_OPEN_TO_OTHERS = 0o077

_SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


class Authority:
    """Holds the one private key that could make another process look like ours; whoever has this object may issue."""

    def __init__(self, key: _SigningKey, chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> None:
        """chain: the certificate of `key` first, then those between it and one of `roots`."""
        self._key = key
        self._chain = chain
        self._roots = roots

    @classmethod
    def create(cls, deployment: str) -> Authority:
        """A new one, which nobody else knows."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"xpyd {deployment}")])
        now = _now()
        root = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(seconds=_BACKDATED_S))
            .not_valid_after(now + _OWN_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(key, [root], [root])

    @classmethod
    def from_files(cls, *, ca: str, certificate: str, key: str) -> Authority:
        """An operator's: `certificate` may issue others, and comes from `ca`. Raises SpecError, by the file's name."""
        roots, chain = _read_certificates("ca", ca), _read_certificates("certificate", certificate)
        authority = cls(_read_key(key), chain, roots)
        authority._check(certificate, key)
        return authority

    @classmethod
    def from_json(cls, text: str | bytes) -> Authority:
        """What to_json has made."""
        tree = json.loads(text)
        key = serialization.load_pem_private_key(tree["key"].encode(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        root = x509.load_pem_x509_certificate(tree["certificate"].encode())
        return cls(key, [root], [root])

    def to_json(self) -> str:
        """All of it, the private key too: of an authority made by create()."""
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return json.dumps({"key": key.decode(), "certificate": _pem(self._roots).decode()})

    def issue(self, name: ProcessName, request: bytes, *, life_s: float = LIFE_S) -> Certificate:
        """A certificate for whoever holds the key of this request (PEM). What else the request says is not looked at.

        Raises SpecError for what is no such request, and when the authority's own certificate has ended.
        """
        asked = _read_request(request)
        issuer, now = self._chain[0], _now()
        ends = min(now + datetime.timedelta(seconds=life_s), *(link.not_valid_after_utc for link in self._chain))
        if ends <= now and life_s > 0:
            raise SpecError(f"the authority's own certificate has ended, on {ends:%Y-%m-%d %H:%M} UTC: renew it")
        names = [x509.UniformResourceIdentifier(name.uri), x509.DNSName(name.host)]
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(issuer.subject)
            .public_key(asked.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, ends) - datetime.timedelta(seconds=_BACKDATED_S))
            .not_valid_after(ends)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(_PURPOSES, critical=False)
            .sign(self._key, None if isinstance(self._key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
        )
        between = [link for link in self._chain if link not in self._roots]
        chain, roots = _pem([made, *between]), _pem(self._roots)
        return Certificate(chain=chain, authorities=roots, life_s=(ends - now).total_seconds())

    def _check(self, certificate: str, key: str) -> None:
        """That others will believe what we issue."""
        own = self._chain[0]
        if own.public_key() != self._key.public_key():
            _reject("key", key, "is not the key of security.certificate")
        try:
            is_issuer = own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_issuer = False
        if not is_issuer:
            _reject("certificate", certificate, "may not issue others (CA:TRUE): give an intermediate authority's")
        if not _is_path(self._chain, self._roots):
            _reject("certificate", certificate, "does not come from security.ca; put what is between into this file")
        if min(link.not_valid_after_utc for link in self._chain) <= _now():
            _reject("certificate", certificate, "has ended")


_PURPOSES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _is_path(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> bool:
    """Whether each one is issued by the next, and the last by a root, if it is none itself."""
    last = chain[-1]
    ends = last in roots or any(_has_issued(root, last) for root in roots)
    return ends and all(_has_issued(issuer, issued) for issued, issuer in pairwise(chain))


def _has_issued(issuer: x509.Certificate, issued: x509.Certificate) -> bool:
    try:
        issued.verify_directly_issued_by(issuer)
    except (InvalidSignature, TypeError, ValueError):
        return False
    return True


def _read_request(request: bytes) -> x509.CertificateSigningRequest:
    try:
        asked = x509.load_pem_x509_csr(request)
    except ValueError as error:
        raise SpecError(f"this is no request for a certificate: {error}") from None
    if not asked.is_signature_valid:
        raise SpecError("this request for a certificate is not signed by the key that it names")
    return asked


def _read_certificates(field: str, path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(field, path))
    except ValueError:
        _reject(field, path, "holds no PEM certificate")


def _read_key(path: str) -> _SigningKey:
    if Path(path).exists() and Path(path).stat().st_mode & _OPEN_TO_OTHERS:
        _reject("key", path, f"may be read by others than its owner: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(_read("key", path), password=None)
    except (TypeError, ValueError):
        _reject("key", path, "holds no PEM private key without a password")
    if not isinstance(key, _SigningKey):
        _reject("key", path, "is of a kind that signs no certificates here: ECDSA, RSA or Ed25519")
    return key


def _read(field: str, path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError as error:
        _reject(field, path, error.strerror or "cannot be read")


def _reject(field: str, path: str, why: str) -> NoReturn:
    raise SpecError(f"security.{field}: {path} {why}")


def _pem(certificates: Sequence[x509.Certificate]) -> bytes:
    return b"".join(certificate.public_bytes(serialization.Encoding.PEM) for certificate in certificates)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
