"""What our processes mean by what they tell each other: routers and workers, and one rank and another."""

from __future__ import annotations

WIRE_VERSION = 4
# 1: payload as drawn in kvtransfer/transfer/codec.py; checksum as in engine.kv.checksum.
# 2: a commit says how many positions were sent, and its next tokens may be those of a moved sequence.
# 3: the ends of a tcp link prove who they are by the deployment's secret; its payloads may be encrypted.
# 4: token frames have a port of their own, and no gRPC (core/wire/frame_server.py); a member announces it.
#
# Messages and records may gain fields without a new version: whoever does not know them passes them over. It is raised
# when what is there means something else; then processes of the two versions have nothing to do with each other.
# tests/support/oldest.py names the commit from which on processes must work with those of today.
