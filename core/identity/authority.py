"""Key pairs, and the certificate authority of a deployment: generated, or an intermediate one from the operator."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from core.identity.credentials import Certificate, TlsCredentials
from core.identity.process_name import ProcessName
from core.types.errors import SpecError

if TYPE_CHECKING:
    from core.spec.schema import SecuritySpec

LIFE_S = 24 * 3600.0
_BACKDATED_S = 600.0  # allows for clock skew
_OWN_LIFE = datetime.timedelta(days=3650)  # of a generated authority, which is deleted with its deployment
_MAX_BYTES = 1 << 20
_OPEN_TO_OTHERS = 0o077

_SigningKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey | ed25519.Ed25519PrivateKey


@dataclass(frozen=True, eq=False)
class Authority:
    """Certificate authority with its private key. Any holder of this object can issue certificates."""

    _key: _SigningKey
    _chain: Sequence[x509.Certificate]  # the certificate of the key, then the intermediates up to one of the roots
    _roots: Sequence[x509.Certificate]

    @classmethod
    def create(cls, deployment: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"xpyd {deployment}")])
        now = _now()
        begin, end = now - _OWN_LIFE, now + _OWN_LIFE  # starts in the past, in case clocks are set back later
        builder = _builder(name, issuer=name, key=key.public_key(), begin=begin, end=end, signs=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        root = builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())
        return cls(key, [root], [root])

    @classmethod
    def from_files(cls, security: SecuritySpec) -> Authority:
        """Read an operator's authority: `certificate` is a CA issued by `ca`. Raises SpecError that names the file."""
        ca, certificate, key = security.ca, security.certificate, security.key
        assert ca and certificate and key, "the spec is validated"
        roots, chain = _read_certificates("ca", ca), _read_certificates("certificate", certificate)
        authority = cls(_read_key(key), chain, roots)
        authority._check(certificate, key)
        return authority

    @classmethod
    def from_json(cls, text: str | bytes) -> Authority:
        tree = json.loads(text)
        key = serialization.load_pem_private_key(tree["key"].encode(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        root = x509.load_pem_x509_certificate(tree["certificate"].encode())
        return cls(key, [root], [root])

    def to_json(self) -> str:
        """Serialize an authority made by create(), private key included."""
        return json.dumps({"key": _private_pem(self._key).decode(), "certificate": _pem(self._roots).decode()})

    def issue(self, name: ProcessName, request: bytes, *, life_s: float = LIFE_S) -> Certificate:
        """Issue a certificate for the key of this request (PEM). All other fields of the request are ignored.

        Raises SpecError for an invalid request, and if the authority's own certificate has expired.
        """
        csr = _read_request(request)
        issuer, now = self._chain[0], _now()
        ends = min(now + datetime.timedelta(seconds=life_s), *(link.not_valid_after_utc for link in self._chain))
        if ends <= now and life_s > 0:
            raise SpecError(f"the authority's own certificate expired on {ends:%Y-%m-%d %H:%M} UTC; renew it")
        names = [x509.UniformResourceIdentifier(name.uri), x509.DNSName(name.host)]
        begin = min(now, ends) - datetime.timedelta(seconds=_BACKDATED_S)
        leaf = (
            _builder(x509.Name([]), issuer=issuer.subject, key=csr.public_key(), begin=begin, end=ends, signs=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(_PURPOSES, critical=False)
            .sign(self._key, None if isinstance(self._key, ed25519.Ed25519PrivateKey) else hashes.SHA256())
        )
        between = [link for link in self._chain if link not in self._roots]
        chain, roots = _pem([leaf, *between]), _pem(self._roots)
        return Certificate(chain=chain, authorities=roots, life_s=(ends - now).total_seconds())

    def _check(self, certificate: str, key: str) -> None:
        """Check that peers will accept what this authority issues. Raises SpecError."""
        own = self._chain[0]
        if own.public_key() != self._key.public_key():
            _reject("key", key, "is not the key of security.certificate")
        try:
            is_issuer = own.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_issuer = False
        if not is_issuer:
            _reject("certificate", certificate, "is not a CA certificate (CA:TRUE); use an intermediate authority's")
        if not _is_path(self._chain, self._roots):
            text = "is not issued by security.ca; add the intermediate certificates to this file"
            _reject("certificate", certificate, text)
        if min(link.not_valid_after_utc for link in self._chain) <= _now():
            _reject("certificate", certificate, "has expired")


class KeyPair:
    """Key pair of one process, on the curve P-256. The key is never written to disk; `request` (PEM) is public."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        # The subject stays empty: the authority takes the name from the caller that it trusts, not from the request.
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(self._key, hashes.SHA256())
        self.request = request.public_bytes(serialization.Encoding.PEM)

    def tls_credentials(self, certificate: Certificate) -> TlsCredentials:
        """Combine the key with the certificate issued for `request`."""
        return TlsCredentials(certificate=certificate, key=_private_pem(self._key))


_PURPOSES = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])


def _builder(
    subject: x509.Name,
    *,
    issuer: x509.Name,
    key: CertificatePublicKeyTypes,
    begin: datetime.datetime,
    end: datetime.datetime,
    signs: bool,
) -> x509.CertificateBuilder:
    """Return an unsigned certificate. key: public key of the subject. signs: whether the subject is an authority."""
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only")
    usage = {"digital_signature": not signs, "key_cert_sign": signs, "crl_sign": signs, "decipher_only": False}
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=0 if signs else None), critical=True)
        .add_extension(x509.KeyUsage(**usage, **dict.fromkeys(unused, False)), critical=True)
    )


def _is_path(chain: Sequence[x509.Certificate], roots: Sequence[x509.Certificate]) -> bool:
    """Return whether each certificate is issued by the next, and the last is a root or issued by one."""
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
        csr = x509.load_pem_x509_csr(request)
    except ValueError as error:
        raise SpecError(f"invalid certificate request: {error}") from None
    if not csr.is_signature_valid:
        raise SpecError("invalid certificate request: it is not signed by the key that it names")
    return csr


def _read_certificates(field: str, path: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(field, path))
    except ValueError:
        _reject(field, path, "contains no PEM certificate")


def _read_key(path: str) -> _SigningKey:
    if Path(path).exists() and Path(path).stat().st_mode & _OPEN_TO_OTHERS:
        _reject("key", path, f"is readable by other users: chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(_read("key", path), password=None)
    except (TypeError, ValueError):
        _reject("key", path, "contains no PEM private key, or an encrypted one")
    if not isinstance(key, _SigningKey):
        _reject("key", path, "has an unsupported type; supported: ECDSA, RSA and Ed25519")
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


def _private_pem(key: _SigningKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0)
