"""Version of the protocol between routers and workers, and between ranks."""

from __future__ import annotations

WIRE_VERSION = 4
# 1: payload as drawn in kvtransfer/transfer/codec.py; checksum as in engine.kv.checksum.
# 2: a commit carries the number of positions sent, and its next tokens may be those of a migrated sequence.
# 3: the ends of a tcp link authenticate with the deployment's secret; its payloads may be encrypted.
# 4: token frames have a port of their own, without gRPC (core/wire/frames.py); a member announces it.
#
# New fields of messages and records need no new version: older processes ignore them. Raise the version when an
# existing field changes its meaning; processes of different versions then refuse to work together.
# tests/support/oldest_version.py names the oldest commit whose processes must work with those of today.
