"""Routing policy whose routes the test sets."""

from __future__ import annotations

from collections.abc import Sequence

from router.routing.candidates import CandidateReplica, Option, RoutingRequest


class FakePolicy:
    """Policy that gives each prompt, and each moving choice, the first of its routes whose replicas exist."""

    def __init__(self, *default: Option) -> None:
        self.default: Sequence[Option] = default  # routes of all other prompts
        self.ways: dict[int, Sequence[Option]] = {}  # by the prompt's length

    def options(
        self, demand: RoutingRequest, prefills: Sequence[CandidateReplica], decodes: Sequence[CandidateReplica]
    ) -> Sequence[Option]:
        there = {view.replica for view in (*prefills, *decodes)}
        ways = self.ways.get(demand.num_tokens, self.default)
        return [way for way in ways if {way.prefill or way.decode, way.decode} <= there]
