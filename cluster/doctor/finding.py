"""One thing that was found on a host, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    PROBLEM = "problem"  # a deployment fails, or gives wrong answers
    WARNING = "warning"  # it works, worse than it could


@dataclass(frozen=True, kw_only=True)
class Finding:
    check: str  # its name, for scripts
    host: str  # address; empty: of all of them
    severity: Severity
    found: str
    fix: str
