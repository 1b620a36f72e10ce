"""`cluster generate` and `cluster chat`: send requests over gRPC."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cluster.cli.connection import open_access
from cluster.cli.options import ApiKeyOption, Name
from core.types.errors import RequestFailed, SpecError

if TYPE_CHECKING:
    from cluster.cli.inference_client import InferenceClient
    from core.rpc import inference_pb2 as pb

Endpoint = Annotated[
    str | None, typer.Option(help="HOST:PORT of a router, or grpcs://HOST:PORT with TLS; default: the deployment's.")
]
MaxTokens = Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Maximum length of the answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy; default: 1.")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling threshold; default: 1.")]
TopK = Annotated[
    int | None, typer.Option(min=0, max=2**31 - 1, help="Sample from the k likeliest tokens; default: 0 (off).")
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same answer.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
Timeout = Annotated[float, typer.Option(help="Limit for one answer, in seconds.")]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat the prompt as a user message and apply the chat template.")
    ] = False,
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of text.")] = False,
    account: Annotated[
        bool, typer.Option("--account", help="Print the request's route and timing at the end.")
    ] = False,
    timeout: Timeout = 600.0,
    name: Name = None,
    endpoint: Endpoint = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Send one prompt and print the answer as it arrives."""
    from cluster.cli.inference_client import InferenceClient
    from core.rpc import inference_pb2 as pb

    text = _utf8("the prompt", _stdin() if prompt == "-" else prompt)
    sampling = pb.SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=[_utf8("--stop", text) for text in stop or []],
    )
    request = pb.GenerateRequest(sampling=sampling)
    if chat or system is not None:
        request.chat.CopyFrom(pb.Chat(messages=[*_system(system), pb.ChatMessage(role="user", content=text)]))
    else:
        request.prompt = text
    state, access = open_access(name, endpoint, api_key)
    with InferenceClient(endpoint or (state.grpc if state else ""), access) as client:
        answer = _stream(client, request, timeout_s=timeout, is_shown=not as_json)
    if as_json:
        print(json.dumps(answer, ensure_ascii=False))
    elif account:
        print(_account(answer))


def chat(
    system: System = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    timeout: Timeout = 600.0,
    name: Name = None,
    endpoint: Endpoint = None,
    api_key: ApiKeyOption = None,
) -> None:
    """Chat with the model. Ctrl-C stops an answer, /new starts over, /quit or Ctrl-D ends."""
    from cluster.cli.inference_client import InferenceClient
    from core.rpc import inference_pb2 as pb

    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    messages = _system(system)
    is_terminal = sys.stdin.isatty()
    state, access = open_access(name, endpoint, api_key)
    with InferenceClient(endpoint or (state.grpc if state else ""), access) as client:
        while (line := _read_line("> " if is_terminal else "")) is not None and line.strip() != "/quit":
            if line.strip() == "/new":
                messages = _system(system)
            if not line.strip() or line.strip() == "/new":
                continue
            messages.append(pb.ChatMessage(role="user", content=_utf8("this line", line)))
            request = pb.GenerateRequest(chat=pb.Chat(messages=messages), sampling=sampling)
            try:
                answer = _stream(client, request, timeout_s=timeout, is_shown=True)
            except (RequestFailed, KeyboardInterrupt) as error:
                if not is_terminal:
                    raise
                print(f"\n({error or 'stopped'})", file=sys.stderr)
                # Drop the unanswered message.
                messages.pop()
            else:
                messages.append(pb.ChatMessage(role="assistant", content=answer["text"]))


def _stream(
    client: InferenceClient, request: pb.GenerateRequest, *, timeout_s: float, is_shown: bool
) -> dict[str, Any]:
    """Run one request. Prints its text as it arrives if `is_shown`; returns text, usage and route."""
    text: list[str] = []
    token_ids: list[int] = []
    finish_reason, summary = "", None
    for event in client.generate(request, timeout_s=timeout_s):
        if event.HasField("delta"):
            text.append(event.delta.text)
            token_ids.extend(event.delta.token_ids)
            if is_shown:
                print(event.delta.text, end="", flush=True)
        elif event.HasField("finished"):
            finish_reason = event.finished.finish_reason
        else:
            summary = event.summary
    if is_shown:
        print()
    account = {"text": "".join(text), "token_ids": token_ids, "finish_reason": finish_reason}
    return account | (_summary(summary) if summary else {})


def _summary(summary: pb.Summary) -> dict[str, Any]:
    usage, trace = summary.usage, summary.trace
    return {
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "prefill_replica": trace.prefill_replica,
        "decode_replica": trace.decode_replica,
        "cached_tokens": usage.cached_tokens,
        "blocks_shipped": trace.blocks_shipped,
        "wire_bytes": trace.wire_bytes,
        "ttft_ms": trace.ttft_ms,
        "itl_ms": trace.itl_ms,
        "attempts": trace.attempts,
        "request_id": summary.request_id,
    }


def _account(answer: dict[str, Any]) -> str:
    """Format the output of `--account`: route, transfer and timing."""
    usage = answer["usage"]
    prefill = answer["prefill_replica"] or "none (the decode replica computed the prompt)"
    tokens_per_s = 1e3 / answer["itl_ms"] if answer["itl_ms"] else 0.0
    return (
        f"\nprefill {prefill} · decode {answer['decode_replica'] or 'none'}"
        f"\nprompt {usage['prompt_tokens']} tokens, {usage['cached_tokens']} of them cached"
        f" · shipped {answer['blocks_shipped']} KV blocks, {answer['wire_bytes']:,} bytes"
        f"\nfirst token after {answer['ttft_ms']:.0f} ms · then {tokens_per_s:.1f} tokens/s"
        f" · {usage['completion_tokens']} tokens, {answer['finish_reason']}"
    )


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise SpecError(f"the prompt is not UTF-8: {error}") from None


def _utf8(source: str, text: str) -> str:
    """Return the text with surrogates decoded as UTF-8. Raises SpecError if they are not UTF-8.

    Python turns bytes that the locale cannot decode into surrogates: with LC_ALL=C, all bytes that are not ASCII.
    """
    try:
        has_surrogates = any("\ud800" <= one <= "\udfff" for one in text)
        return os.fsencode(text).decode("utf-8") if has_surrogates else text
    except UnicodeError:
        raise SpecError(f"{source} is not UTF-8") from None


def _system(text: str | None) -> list[pb.ChatMessage]:
    from core.rpc import inference_pb2 as pb

    return [pb.ChatMessage(role="system", content=_utf8("--system", text))] if text else []


def _read_line(prompt: str) -> str | None:
    """Return the user's next line, or None at the end."""
    try:
        return input(prompt)
    except EOFError:
        return None
    except UnicodeDecodeError as error:
        raise SpecError(f"this line is not UTF-8: {error}") from None
