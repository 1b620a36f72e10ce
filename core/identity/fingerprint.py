"""What one certificate is told from all others by."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives import hashes


def fingerprint_of(chain: bytes) -> str:
    """SHA-256, in hex, of the first certificate in `chain` (PEM). Raises ValueError where there is none."""
    return x509.load_pem_x509_certificate(chain).fingerprint(hashes.SHA256()).hex()
