"""Conversion of messages between ranks to and from protobuf."""

from __future__ import annotations

from core.rpc import transfer_pb2 as pb
from core.types.errors import RequestError, TransferError
from core.types.tier import Tier
from core.types.validation import check, check_name
from core.wire.messages import from_message, to_message
from engine.tiers.commands import LoadResult
from kvtransfer.protocol.frames import CommitFrame, Segment, SegmentFrame
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.rank_transfer import Shipment
from kvtransfer.protocol.validation import MAX_TOKENS, check_seconds

_MAX_REASON = 1000  # characters of another rank's error message

Part = Landing | Shipment | LoadResult  # reported by a rank to its rank 0


def frame_to_proto(frame: SegmentFrame | CommitFrame) -> pb.SenderFrame:
    if isinstance(frame, CommitFrame):
        return pb.SenderFrame(commit=to_message(pb.Commit, frame))
    announced = {name: value for name, value in vars(frame).items() if name != "segment"}
    return pb.SenderFrame(segment=to_message(pb.Segment, frame.segment, **announced))


def frame_from_proto(message: pb.SenderFrame) -> SegmentFrame | CommitFrame:
    """Parse a frame. Raises RequestError."""
    kind = message.WhichOneof("frame")
    check(kind in ("segment", "commit"), "frame", "must be a segment or a commit")
    if kind == "commit":
        return from_message(CommitFrame, message.commit)
    return from_message(SegmentFrame, message.segment, segment=from_message(Segment, message.segment))


def part_to_report(part: Part, *, rank: int) -> pb.ReportRequest:
    if isinstance(part, Landing):
        return pb.ReportRequest(rank=rank, landed=to_message(pb.LandedPart, part))
    if isinstance(part, LoadResult):
        num_bytes = {int(tier): count for tier, count in part.num_bytes.items()}
        seconds = {int(tier): seconds for tier, seconds in part.seconds.items()}
        loaded = to_message(pb.LoadedPart, part, num_bytes=num_bytes, seconds=seconds)
        return pb.ReportRequest(rank=rank, loaded=loaded)
    error = str(part.error) if part.error else ""
    return pb.ReportRequest(rank=rank, shipped=to_message(pb.ShippedPart, part, error=error))


def part_from_report(report: pb.ReportRequest) -> Part:
    """Parse and validate a rank's report. Raises RequestError."""
    match report.WhichOneof("part"):
        case "landed":
            check_name(report.landed.handoff, "landed.handoff")
            check(report.landed.num_tokens <= MAX_TOKENS, "landed.num_tokens", f"must be at most {MAX_TOKENS}")
            return from_message(Landing, report.landed)
        case "loaded":
            return _load_result(report.loaded)
        case "shipped":
            check_name(report.shipped.handoff, "shipped.handoff")
            check_seconds([report.shipped.seconds, report.shipped.link_s], "shipped.seconds")
            error = report.shipped.error[:_MAX_REASON]
            return from_message(Shipment, report.shipped, error=TransferError(error) if error else None)
        case _:
            raise RequestError("report: part is missing", param="part")


def _load_result(loaded: pb.LoadedPart) -> LoadResult:
    tiers = {int(tier) for tier in Tier}
    check({*loaded.num_bytes, *loaded.seconds} <= tiers, "loaded.num_bytes", "has unknown tiers")
    check({*loaded.seconds} <= {*loaded.num_bytes}, "loaded.seconds", "must be of tiers in num_bytes")
    check_seconds(loaded.seconds.values(), "loaded.seconds")
    num_bytes = {Tier(tier): count for tier, count in loaded.num_bytes.items()}
    seconds = {Tier(tier): seconds for tier, seconds in loaded.seconds.items()}
    return from_message(LoadResult, loaded, num_bytes=num_bytes, seconds=seconds)
