"""Requests and tokens as protobuf messages, and back. The dataclasses are what the code speaks; this is the wire."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from cluster.rpc import worker_pb2 as pb
from cluster.words.handoff import Handoff, Holder
from cluster.words.request import FinishReason, SampledToken, Sampling, SequenceRequest, TokenLogprob
from cluster.words.timing import StepTiming


def sequence_to_proto(request: SequenceRequest) -> pb.Sequence:
    sampling = request.sampling
    return pb.Sequence(
        id=request.id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        sampling=pb.Sampling(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            stop_token_ids=sampling.stop_token_ids,
            num_logprobs=sampling.num_logprobs,
        ),
        choices=request.choices,
        stream=request.stream,
        salt=request.salt,
        adapter=request.adapter,
        priority=request.priority,
        deadline_s=request.deadline_s,
    )


def sequence_from_proto(message: pb.Sequence) -> SequenceRequest:
    sampling = message.sampling
    return SequenceRequest(
        id=message.id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=Sampling(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            stop_token_ids=tuple(sampling.stop_token_ids),
            num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        ),
        choices=tuple(message.choices),
        stream=message.stream,
        salt=message.salt,
        adapter=message.adapter,
        priority=message.priority,
        deadline_s=message.deadline_s if message.HasField("deadline_s") else None,
    )


def handoff_to_proto(handoff: Handoff) -> pb.Handoff:
    return pb.Handoff(
        id=handoff.id,
        epoch=handoff.epoch,
        replica=handoff.replica,
        ranks=handoff.ranks,
        layout=handoff.layout,
        num_tokens=handoff.num_tokens,
        max_tokens=handoff.max_tokens,
        first_token=handoff.first_token,
        ttl_s=handoff.ttl_s,
    )


def handoff_from_proto(message: pb.Handoff) -> Handoff:
    return Handoff(
        id=message.id,
        epoch=message.epoch,
        replica=message.replica,
        ranks=tuple(message.ranks),
        layout=message.layout,
        num_tokens=message.num_tokens,
        max_tokens=message.max_tokens,
        first_token=message.first_token,
        ttl_s=message.ttl_s,
    )


def holder_to_proto(holder: Holder) -> pb.Holder:
    return pb.Holder(replica=holder.replica, address=holder.address, num_tokens=holder.num_tokens)


def holder_from_proto(message: pb.Holder) -> Holder:
    return Holder(replica=message.replica, address=message.address, num_tokens=message.num_tokens)


def tokens_to_proto(tokens: Iterable[SampledToken]) -> list[pb.SampledToken]:
    return [
        pb.SampledToken(
            token_id=token.token_id,
            logprob=_logprob_to_proto(token.logprob) if token.logprob else None,
            finish_reason=token.finish_reason or "",
        )
        for token in tokens
    ]


def tokens_from_proto(messages: Iterable[pb.SampledToken]) -> list[SampledToken]:
    return [
        SampledToken(
            token_id=message.token_id,
            logprob=_logprob_from_proto(message.logprob) if message.HasField("logprob") else None,
            finish_reason=FinishReason(message.finish_reason) if message.finish_reason else None,
        )
        for message in messages
    ]


def _logprob_to_proto(logprob: TokenLogprob) -> pb.Logprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in logprob.top]
    return pb.Logprob(logprob=logprob.logprob, top=top)


def _logprob_from_proto(message: pb.Logprob) -> TokenLogprob:
    return TokenLogprob(logprob=message.logprob, top=tuple((top.token_id, top.logprob) for top in message.top))


def timing_to_proto(timing: StepTiming | None) -> pb.StepTiming | None:
    return pb.StepTiming(**asdict(timing)) if timing else None


def timing_from_proto(timing: pb.StepTiming) -> StepTiming:
    return StepTiming(base_s=timing.base_s, token_s=timing.token_s, pair_s=timing.pair_s, context_s=timing.context_s)
