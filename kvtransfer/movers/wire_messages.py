"""What ranks say to each other about handoffs as protobuf messages, and back."""

from __future__ import annotations

from cluster.rpc import transfer_pb2 as pb
from cluster.wire.fields import from_message, to_message
from cluster.words.errors import TransferError
from cluster.words.tier import Tier
from engine.tiers.orders import LoadResult
from kvtransfer.protocol.frames import CommitFrame, SegmentFrame
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.protocol.segment import Segment

Part = Landing | Shipment | LoadResult  # what a rank has to tell its rank 0


def frame_to_proto(frame: SegmentFrame | CommitFrame) -> pb.SenderFrame:
    if isinstance(frame, CommitFrame):
        return pb.SenderFrame(commit=to_message(pb.Commit, frame))
    segment = pb.Segment(
        handoff=frame.handoff,
        epoch=frame.epoch,
        number=frame.number,
        first_layer=frame.segment.first_layer,
        num_layers=frame.segment.num_layers,
        first_token=frame.segment.first_token,
        num_tokens=frame.segment.num_tokens,
        num_bytes=frame.num_bytes,
        checksum=frame.checksum,
    )
    return pb.SenderFrame(segment=segment)


def frame_from_proto(message: pb.SenderFrame, copy: HeadCopy) -> SegmentFrame | CommitFrame:
    """`copy`: what this link brings, which says whose heads they are here."""
    if message.WhichOneof("frame") == "segment":
        announced = message.segment
        segment = Segment(
            first_layer=announced.first_layer,
            num_layers=announced.num_layers,
            first_token=announced.first_token,
            num_tokens=announced.num_tokens,
            first_head=copy.receiver_head,
            num_heads=copy.num_heads,
        )
        return SegmentFrame(
            handoff=announced.handoff,
            epoch=announced.epoch,
            number=announced.number,
            segment=segment,
            num_bytes=announced.num_bytes,
            checksum=announced.checksum,
        )
    return from_message(CommitFrame, message.commit)


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
    match report.WhichOneof("part"):
        case "landed":
            return from_message(Landing, report.landed)
        case "loaded":
            num_bytes = {Tier(tier): count for tier, count in report.loaded.num_bytes.items()}
            seconds = {Tier(tier): seconds for tier, seconds in report.loaded.seconds.items()}
            return from_message(LoadResult, report.loaded, num_bytes=num_bytes, seconds=seconds)
        case _:
            error = report.shipped.error
            return from_message(Shipment, report.shipped, error=TransferError(error) if error else None)
