"""A private key made where it is used, and the request for a certificate of it."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from core.identity.credentials import Certificate, TlsCredentials


class KeyPair:
    """One process's, on the curve P-256. The key is never written anywhere; `request` (PEM) may be seen by anybody."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        nobody = x509.Name([])  # whose key it is, the authority is told by those who know
        request = x509.CertificateSigningRequestBuilder().subject_name(nobody).sign(self._key, hashes.SHA256())
        self.request = request.public_bytes(serialization.Encoding.PEM)

    def tls_credentials(self, certificate: Certificate) -> TlsCredentials:
        """With what the authority has answered to `request`."""
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return TlsCredentials(certificate=certificate, key=key)
