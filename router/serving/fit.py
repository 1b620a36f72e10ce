"""Whether a request could ever be held by the replicas that there are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from core.index.membership import Member
from core.types.errors import ContextLengthExceeded, RequestError
from core.types.request import SequenceRequest
from router.routing.tenant_share import most_choices


def check_fit(request: SequenceRequest, members: Sequence[Member], *, share: float) -> None:
    """Raises RequestError where replicas are there, and none could ever hold the request. members: decode replicas.
    share: of them, that one tenant may have."""
    if not members:
        return
    if len(request.token_ids) >= (limit := max(member.max_tokens for member in members)):
        raise ContextLengthExceeded(
            f"{len(request.token_ids)} tokens leave no room in the {limit} that a replica holds", param="prompt"
        )
    places = [member.max_running for member in members]
    if len(request.choices) > (most := min(max(places), most_choices(sum(places), share=share))):
        of_whom = "" if most == max(places) else " of one tenant"
        raise RequestError(
            f"n: a replica runs at most {most} choices{of_whom} at once, not {len(request.choices)}", param="n"
        )
