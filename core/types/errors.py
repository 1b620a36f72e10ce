"""One tree of errors, and one table from each error to what a client and an operator see.

ClusterError
├── SpecError               the operator wrote something wrong           (CLI: one line, exit code 2)
├── DeployError             a replica, a port or a resource failed       (CLI: one line, exit code 2)
│   └── ReplicaDidNotStart  with the last that it wrote
├── Interrupted             the user ended a command                     (CLI: exit code 130)
├── NotDeployed             there is nothing to speak to
├── ReplicaFailed           a replica's process ended, or cannot go on; the controller starts another
│   └── RankUnreachable     for the moment, perhaps
├── RequestFailed           what a client was told by a deployment       (CLI: exit code 1, or 2 where it is the user's)
├── Unauthenticated         no API key, or one that is not known (any more)
├── KeysUnknown             a router has not heard yet which keys there are
├── RequestError            the client sent something wrong; retrying will not help
│   ├── UnknownModel
│   ├── UnknownResponse     none is stored under that id, for whoever asks
│   ├── UnsupportedField    known, and not served here
│   ├── ContextLengthExceeded
│   └── RequestTooLarge
├── CapacityError           full right now; retry after `retry_after_s`
│   ├── ModelUnavailable    no replica of this model serves at present; others may
│   └── RateLimited         the key's own limit, not the cluster's
├── DeadlineExceeded        the request's own deadline passed
├── ClientTooSlow           the client does not read its answer
├── GrammarNotFollowed      no next token keeps to the request's grammar, or it costs too much to find one
├── NoTokenAllowed          what a request asks of its tokens leaves none
├── LogitsNotFinite         the model made no numbers of this request; another try would hardly end otherwise
├── StoreUnavailable        the store of responses cannot be reached at present
├── ReplicaLost             a worker died, hung up or is draining; another one may serve
└── TransferError           KV blocks did not arrive; the handoff may be tried again
    ├── LayoutMismatch      the two sides disagree about blocks; never retried
    ├── HandoffExpired      the ticket is closed, fenced by a newer epoch, or past its ttl
    ├── LinkClosed          the link failed or was aborted; a new link needs a new epoch
    └── ChecksumMismatch    the bytes that landed are not the bytes that were sent
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class ClusterError(Exception):
    """Base of everything that this project raises on purpose. `str(error)` is fit to show to a user."""


class SpecError(ClusterError):
    """A spec, a flag or a model source is wrong; the message names the path and the fix."""


class Interrupted(ClusterError):
    """The user ended a command, and the message says how what it began goes on."""

    exit_code = 130


class DeployError(ClusterError):
    """A deployment could not be carried out; the message names what failed and why."""


class ReplicaDidNotStart(DeployError):
    """A replica failed to start, and another try would hardly end otherwise. `log` holds the last that it wrote."""

    def __init__(self, message: str, *, log: str) -> None:
        super().__init__(message)
        self.log = log


class NotDeployed(ClusterError):
    """There is nothing here to speak to."""


class ReplicaFailed(ClusterError):
    """A replica cannot go on. `rank` is the one to blame, where one is known."""

    def __init__(self, reason: str, *, rank: int = 0, will_repeat: bool = False) -> None:
        super().__init__(reason)
        self.rank = rank
        self.will_repeat = will_repeat


class RankUnreachable(ReplicaFailed):
    """A rank cannot be reached at present; its process may well live."""


class RequestFailed(ClusterError):
    """As a client sees it: the deployment refused a request, or did not carry it out."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unauthenticated(ClusterError):
    """The request came without an API key, or with one that is not known here (any more)."""


class KeysUnknown(ClusterError):
    """This router has not heard yet which API keys there are."""


class RequestError(ClusterError):
    """A request that no replica could serve. `param` names the offending field, as the OpenAI API does."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(RequestError):
    """The model named in the request is not served here."""


class UnknownResponse(RequestError):
    """No response of that id is stored here for whoever asks: it was not, it is too long ago, or it was deleted."""


class UnsupportedField(RequestError):
    """The field is known, and what it says cannot be served here."""


class ContextLengthExceeded(RequestError):
    """The prompt, or the prompt plus the tokens asked for, does not fit the model's context or a replica's pool."""


class RequestTooLarge(RequestError):
    """The request has more bytes than a door reads."""


class CapacityError(ClusterError):
    """No room at present. `retry_after_s` is our best estimate of when there will be."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelUnavailable(CapacityError):
    """Nothing serves this model at present: its deployment has no replica, or cannot be reached."""


class RateLimited(CapacityError):
    """The API key has used up what it may ask for at present: requests, tokens, or requests at a time."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
        is_certain: bool = False,
    ) -> None:
        """headers: what a client is told of its limits. is_certain: nothing of this key can pass any sooner."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = dict(headers or {})
        self.is_certain = is_certain


class DeadlineExceeded(ClusterError):
    """The time that the client gave has passed."""


class ClientTooSlow(ClusterError):
    """The client has left its answer unread for too long, or too much of it."""


class GrammarNotFollowed(ClusterError):
    """No next token can be chosen by the request's grammar. Never retried: it would end so elsewhere."""


class NoTokenAllowed(ClusterError):
    """What the request asks of its tokens leaves none that could come next. Never retried: it would end so elsewhere.

    That is its `allowed_token_ids` and `bad_words`, together with each other, a grammar, a thinking budget or
    `min_tokens`.
    """

    @classmethod
    def of(cls, request_id: str) -> NoTokenAllowed:
        asked = (
            "its allowed_token_ids and bad_words, with its grammar, thinking budget and min_tokens where it has them"
        )
        return cls(f"{request_id}: {asked}, leave no token that could come next; ask for less")


class LogitsNotFinite(ClusterError):
    """For the next token of a sequence the model has NaN, or no token that is possible. Never retried: another replica
    holds the same model."""

    @classmethod
    def of(cls, request_id: str) -> LogitsNotFinite:
        return cls(f"{request_id}: the model's output for this request is not finite; no token can be chosen")


class StoreUnavailable(ClusterError):
    """The store of responses cannot be reached at present."""


class ReplicaLost(ClusterError):
    """A replica cannot go on with this request: it died, it hung up, or it is draining."""


class TransferError(ClusterError):
    """KV blocks did not arrive whole and in time."""


class LayoutMismatch(TransferError):
    """Sender and receiver hold different models, block sizes or wire versions."""


class HandoffExpired(TransferError):
    """The handoff is no longer open under this epoch."""


class LinkClosed(TransferError):
    """The link between two ranks has failed. A group that has failed once is never used again."""


class ChecksumMismatch(TransferError):
    """What landed differs from what was sent."""


@dataclass(frozen=True)
class Outcome:
    """How one kind of error looks from outside: a gRPC status name, an HTTP status, and OpenAI's `type` and `code`."""

    grpc: str
    http: int
    type: str
    code: str


# Most specific first; the first match wins.
_OUTCOMES: tuple[tuple[type[ClusterError], Outcome], ...] = (
    (Unauthenticated, Outcome("UNAUTHENTICATED", 401, "invalid_request_error", "invalid_api_key")),
    (KeysUnknown, Outcome("UNAVAILABLE", 503, "server_error", "keys_unknown")),
    (UnknownModel, Outcome("NOT_FOUND", 404, "invalid_request_error", "model_not_found")),
    (UnknownResponse, Outcome("NOT_FOUND", 404, "invalid_request_error", "response_not_found")),
    (UnsupportedField, Outcome("INVALID_ARGUMENT", 400, "invalid_request_error", "unsupported_parameter")),
    (ContextLengthExceeded, Outcome("INVALID_ARGUMENT", 400, "invalid_request_error", "context_length_exceeded")),
    (RequestTooLarge, Outcome("RESOURCE_EXHAUSTED", 413, "invalid_request_error", "request_too_large")),
    (RequestError, Outcome("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_value")),
    (RateLimited, Outcome("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded")),
    (ModelUnavailable, Outcome("UNAVAILABLE", 503, "server_error", "model_unavailable")),
    (CapacityError, Outcome("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "overloaded")),
    (DeadlineExceeded, Outcome("DEADLINE_EXCEEDED", 504, "timeout_error", "deadline_exceeded")),
    (ClientTooSlow, Outcome("ABORTED", 408, "timeout_error", "client_too_slow")),
    (GrammarNotFollowed, Outcome("INVALID_ARGUMENT", 400, "invalid_request_error", "grammar_not_followed")),
    (NoTokenAllowed, Outcome("INVALID_ARGUMENT", 400, "invalid_request_error", "no_token_allowed")),
    (LogitsNotFinite, Outcome("INTERNAL", 500, "server_error", "logits_not_finite")),
    (StoreUnavailable, Outcome("UNAVAILABLE", 503, "server_error", "store_unavailable")),
    (LayoutMismatch, Outcome("FAILED_PRECONDITION", 500, "server_error", "layout_mismatch")),
    (TransferError, Outcome("UNAVAILABLE", 503, "server_error", "transfer_failed")),
    (ReplicaLost, Outcome("UNAVAILABLE", 503, "server_error", "replica_lost")),
    (ClusterError, Outcome("INTERNAL", 500, "server_error", "internal_error")),
)


def outcome_codes() -> list[str]:
    """Every code that an error may have."""
    return list(dict.fromkeys(outcome.code for _, outcome in _OUTCOMES))


def outcome_of(error: BaseException) -> Outcome:
    """The row of the table for `error`; anything that is not ours is an internal error."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return _OUTCOMES[-1][1]
