"""Private key generated in its own process, and the request for its certificate."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from core.identity.credentials import Certificate, TlsCredentials


class KeyPair:
    """Key pair of one process, on the curve P-256. The key is never written to disk; `request` (PEM) is public."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        # The subject stays empty: the authority takes the name from the caller that it trusts, not from the request.
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(self._key, hashes.SHA256())
        self.request = request.public_bytes(serialization.Encoding.PEM)

    def tls_credentials(self, certificate: Certificate) -> TlsCredentials:
        """Combine the key with the certificate issued for `request`."""
        key = self._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return TlsCredentials(certificate=certificate, key=key)
