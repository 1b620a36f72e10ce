"""Error tree of the project, and the table that maps each error to its gRPC and HTTP status.

ClusterError
├── SpecError               invalid spec, flag or model source           (CLI: one line, exit code 2)
├── DeployError             a replica, a port or a resource failed       (CLI: one line, exit code 2)
│   └── ReplicaDidNotStart  carries the end of the replica's log
├── Interrupted             the user ended a command                     (CLI: exit code 130)
├── NotDeployed             no such deployment
├── ReplicaFailed           a replica's process ended or is unusable; the controller starts another
│   └── RankUnreachable     possibly temporary
├── RequestFailed           error that a deployment returned to a client (CLI: exit code 1, or 2 for a user error)
├── Unauthenticated         API key missing, unknown or revoked
├── KeysUnknown             the router has not read the API keys yet
├── RequestError            invalid request; retrying will not help
│   ├── UnknownModel
│   ├── UnknownResponse     no stored response with that id for this tenant
│   ├── UnsupportedField    valid field, unsupported value
│   ├── ContextLengthExceeded
│   ├── RequestTooLarge
│   └── UnsupportedEncoding
├── CapacityError           overloaded; retry after `retry_after_s`
│   ├── ModelUnavailable    no replica serves this model at present; other models may be served
│   └── RateLimited         the API key's own limit, not the cluster's
├── DeadlineExceeded        the request's own deadline passed
├── ClientTooSlow           the client does not read its answer
├── GrammarNotFollowed      no next token satisfies the request's grammar, or finding one costs too much
├── NoTokenAllowed          the request's token rules exclude every token
├── LogitsNotFinite         the model returned NaN or inf for this request; a retry would hardly help
├── StoreUnavailable        the store of responses is unreachable
├── ReplicaLost             a replica died, disconnected or is draining; another one may serve
└── TransferError           KV blocks did not arrive; the handoff may be retried
    ├── LayoutMismatch      the two sides disagree about the block layout; never retried
    ├── HandoffExpired      the ticket is closed, fenced by a newer epoch, or past its ttl
    ├── LinkClosed          the link failed or was aborted; a new link needs a new epoch
    └── ChecksumMismatch    received bytes differ from the sent ones
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


class ClusterError(Exception):
    """Base class of all errors that this project raises deliberately. `str(error)` can be shown to a user."""


class SpecError(ClusterError):
    """Invalid spec, flag or model source. The message names the path and the fix."""


class Interrupted(ClusterError):
    """Interruption of a command by the user. The message states what continues in the background."""

    exit_code = 130


class DeployError(ClusterError):
    """Failure of a deployment. The message names what failed and why."""


class ReplicaDidNotStart(DeployError):
    """Failed start of a replica, where a retry would hardly help. `log` holds the end of the replica's log."""

    def __init__(self, message: str, *, log: str) -> None:
        super().__init__(message)
        self.log = log


class NotDeployed(ClusterError):
    """No deployment of that name exists."""


class ReplicaFailed(ClusterError):
    """Failure of a replica that ends it. `rank` is the failed rank, or 0 if it is unknown."""

    def __init__(self, reason: str, *, rank: int = 0, will_repeat: bool = False) -> None:
        super().__init__(reason)
        self.rank = rank
        self.will_repeat = will_repeat


class RankUnreachable(ReplicaFailed):
    """Failed call to a rank whose process may still be alive."""


class RequestFailed(ClusterError):
    """Error returned to a client: the deployment rejected the request or did not complete it."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Unauthenticated(ClusterError):
    """Request without an API key, or with an unknown or revoked one."""


class KeysUnknown(ClusterError):
    """Request to a router that has not read the API keys yet."""


class RequestError(ClusterError):
    """Request that no replica could serve. `param` names the offending field, as in the OpenAI API."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def at(cls, param: str, problem: str) -> Self:
        """Create the error of one field, whose name begins the message."""
        return cls(f"{param}: {problem}", param=param)


class UnknownModel(RequestError):
    """Request for a model that is not served here."""


class UnknownResponse(RequestError):
    """Request for a response that is not stored for this tenant: never stored, expired or deleted."""


class UnsupportedField(RequestError):
    """Request with a known field whose value is unsupported."""


class ContextLengthExceeded(RequestError):
    """Prompt, or prompt plus requested tokens, larger than the model's context or a replica's pool."""


class RequestTooLarge(RequestError):
    """Request with more bytes than an endpoint reads."""


class UnsupportedEncoding(RequestError):
    """Request body in a Content-Encoding that is not supported."""


class CapacityError(ClusterError):
    """Lack of capacity. `retry_after_s` estimates when there will be room."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelUnavailable(CapacityError):
    """Model without a serving replica, or in a deployment that cannot be reached."""


class RateLimited(CapacityError):
    """API key over one of its limits: requests per minute, tokens per minute or concurrency."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        headers: Mapping[str, str] | None = None,
        is_certain: bool = False,
    ) -> None:
        """headers: rate-limit headers of the answer. is_certain: no request of this key passes earlier."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = dict(headers or {})
        self.is_certain = is_certain


class DeadlineExceeded(ClusterError):
    """Request past the client's deadline."""


class ClientTooSlow(ClusterError):
    """Client that left its answer unread for too long, or too much of it."""


class GrammarNotFollowed(ClusterError):
    """Grammar that allows no next token. Never retried: every replica would fail in the same way."""


class NoTokenAllowed(ClusterError):
    """Token rules that allow no next token. Never retried: every replica would fail in the same way.

    The cause is the request's `allowed_token_ids` or `bad_words`, often combined with each other, a grammar, a thinking
    budget or `min_tokens`.
    """

    @classmethod
    def of(cls, request_id: str) -> NoTokenAllowed:
        rules = "its allowed_token_ids and bad_words, together with its grammar, thinking budget and min_tokens if set,"
        return cls(f"{request_id}: {rules} exclude every next token; relax them")


class LogitsNotFinite(ClusterError):
    """Logits with NaN, or without any possible token. Never retried: other replicas hold the same model."""

    @classmethod
    def of(cls, request_id: str) -> LogitsNotFinite:
        return cls(f"{request_id}: the model's output for this request is not finite; no token can be chosen")


class StoreUnavailable(ClusterError):
    """The store of responses cannot be reached."""


class ReplicaLost(ClusterError):
    """A replica cannot continue this request: it died, disconnected or is draining."""


class TransferError(ClusterError):
    """KV blocks did not arrive complete and in time."""


class LayoutMismatch(TransferError):
    """Sender and receiver have different models, block sizes or wire versions."""


class HandoffExpired(TransferError):
    """The handoff is no longer open under this epoch."""


class LinkClosed(TransferError):
    """The link between two ranks failed. A failed group is never reused."""


class ChecksumMismatch(TransferError):
    """Received bytes differ from the sent ones."""


@dataclass(frozen=True)
class Outcome:
    """Status of an error for clients: gRPC status name, HTTP status, and OpenAI's `type` and `code`."""

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
    (UnsupportedEncoding, Outcome("INVALID_ARGUMENT", 415, "invalid_request_error", "unsupported_encoding")),
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
    """Return every error code, without duplicates."""
    return list(dict.fromkeys(outcome.code for _, outcome in _OUTCOMES))


def outcome_of(error: BaseException) -> Outcome:
    """Return the table row for `error`; an error outside the tree is an internal error."""
    for kind, outcome in _OUTCOMES:
        if isinstance(error, kind):
            return outcome
    return _OUTCOMES[-1][1]
