"""What ranks say to each other about handoffs as protobuf messages, and back."""

from __future__ import annotations

from cluster.rpc import transfer_pb2 as pb
from cluster.words.errors import TransferError
from kvtransfer.protocol.frames import CommitFrame, Opening, SegmentFrame
from kvtransfer.protocol.ledger import Landing
from kvtransfer.protocol.passage import Shipment
from kvtransfer.protocol.plan import HeadCopy
from kvtransfer.protocol.segment import Segment


def opening_to_proto(opening: Opening) -> pb.OpenRequest:
    return pb.OpenRequest(
        handoff=opening.handoff,
        first_token=opening.first_token,
        num_tokens=opening.num_tokens,
        max_tokens=opening.max_tokens,
        block_ids=opening.block_ids,
    )


def opening_from_proto(message: pb.OpenRequest) -> Opening:
    return Opening(
        handoff=message.handoff,
        first_token=message.first_token,
        num_tokens=message.num_tokens,
        max_tokens=message.max_tokens,
        block_ids=tuple(message.block_ids),
    )


def frame_to_proto(frame: SegmentFrame | CommitFrame) -> pb.SenderFrame:
    if isinstance(frame, CommitFrame):
        commit = pb.Commit(
            handoff=frame.handoff,
            epoch=frame.epoch,
            num_segments=frame.num_segments,
            checksum=frame.checksum,
            num_tokens=frame.num_tokens,
            next_tokens=frame.next_tokens,
        )
        return pb.SenderFrame(commit=commit)
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
    commit = message.commit
    return CommitFrame(
        handoff=commit.handoff,
        epoch=commit.epoch,
        num_segments=commit.num_segments,
        checksum=commit.checksum,
        num_tokens=commit.num_tokens,
        next_tokens=tuple(commit.next_tokens),
    )


def part_to_report(part: Landing | Shipment, *, rank: int) -> pb.ReportRequest:
    """What another rank than 0 tells its rank 0 of its part of a handoff."""
    if isinstance(part, Landing):
        landed = pb.LandedPart(handoff=part.handoff, epoch=part.epoch, num_tokens=part.num_tokens)
        return pb.ReportRequest(rank=rank, landed=landed)
    shipped = pb.ShippedPart(
        handoff=part.handoff,
        epoch=part.epoch,
        wire_bytes=part.wire_bytes,
        seconds=part.seconds,
        link_s=part.link_s,
        error=str(part.error) if part.error else "",
    )
    return pb.ReportRequest(rank=rank, shipped=shipped)


def landing_from_proto(message: pb.LandedPart) -> Landing:
    return Landing(handoff=message.handoff, epoch=message.epoch, num_tokens=message.num_tokens)


def shipment_from_proto(message: pb.ShippedPart) -> Shipment:
    return Shipment(
        handoff=message.handoff,
        epoch=message.epoch,
        wire_bytes=message.wire_bytes,
        seconds=message.seconds,
        link_s=message.link_s,
        error=TransferError(message.error) if message.error else None,
    )
