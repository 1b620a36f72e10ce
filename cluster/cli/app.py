"""All commands in one place, and what every error becomes: one line on stderr and an exit code.

0 done · 1 it failed, or is not ready · 2 the user's turn: a bad spec, flag or request, a deployment that cannot be ·
3 nothing is deployed (status only) · 130 interrupted

What a command needs is imported inside it: `cluster generate` should not wait for Ray, nor `--help` for anything.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from typing import Annotated

import typer

from cluster.cli import (
    autoscale,
    batch,
    bench,
    capture,
    chaos,
    deploy,
    doctor,
    explain,
    generate,
    keys,
    operate,
    operators,
    plan,
    profile,
    quality,
    simulate,
    status,
    top,
    trace,
    train_draft,
    update,
)
from cluster.cli.connection import ADDRESS
from cluster.launch.person_file import CERTIFICATE
from core.types.errors import ClusterError, Interrupted, SpecError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    doctor.doctor,
    deploy.deploy,
    status.status,
    operate.scale,
    operate.switch,
    operate.drain,
    operate.logs,
    update.update,
    deploy.down,
    generate.generate,
    generate.chat,
    batch.batch,
    explain.explain,
    trace.trace,
    top.top,
    chaos.chaos,
    simulate.simulate,
    plan.plan,
    profile.profile,
    quality.quantize,
    train_draft.train_draft,
):
    app.command()(command)
app.add_typer(bench.bench, name="bench")
app.add_typer(autoscale.autoscale, name="autoscale")
app.add_typer(capture.capture, name="capture")
app.add_typer(keys.keys, name="keys")
app.add_typer(operators.operators, name="operators")
app.add_typer(quality.evaluate, name="eval")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"cluster {version('xpyd')}")
        raise typer.Exit


@app.callback()
def main_options(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Option(
            envvar=ADDRESS,
            help="HOST[:PORT] of a Ray of which this is a node, or USER@HOST, where ssh runs it. Default: what was "
            "deployed from here.",
        ),
    ] = None,
    certificate: Annotated[
        str | None,
        typer.Option(
            "--as",
            metavar="FILE",
            envvar=CERTIFICATE,
            help="A file of `cluster operators create`: by it status, logs, scale, switch, drain and keys, no Ray.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print it, and do nothing.")
    ] = False,
) -> None:
    """Serve one model by prefill and decode replicas: deploy, watch, rescale, ask."""
    if address and certificate:
        raise SpecError(
            f"--as and --address (or {CERTIFICATE} and {ADDRESS}): a certificate does without Ray; give one"
        )
    if address and "@" in address:
        _run_at(address, sys.argv[sys.argv.index(str(context.invoked_subcommand), 1) :])
    if address:
        os.environ[ADDRESS] = address
    if certificate:
        os.environ[CERTIFICATE] = certificate


def _run_at(address: str, command: list[str]) -> None:
    """By ssh, in place of this process. `deploy` goes to the Ray that runs there, and has a spec of that machine."""
    host, _, port = address.rpartition(":")
    if ":" not in host and port.isdigit():
        raise SpecError(
            f"--address {address}: ssh takes USER@HOST, without Ray's port; write {host} "
            f"(or ssh://{address}, where {port} is a port of its sshd)"
        )
    if command[0] == "deploy":
        here = [word for word in command[1:] if word.endswith((".yaml", ".yml")) and os.path.isfile(word)]
        if here:
            raise SpecError(
                f"{here[0]} is a file of this machine, and the command runs at {address}: `scp {here[0]} {address}:`, "
                f"then `ssh -t {address} cluster deploy {os.path.basename(here[0])} --address auto`"
            )
        if not any(word.partition("=")[0] == "--address" for word in command):
            command = [*command, "--address", "auto"]
    terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    # What is set over there names another address, or this very one again, for ever.
    there = ["env", "-u", ADDRESS, "-u", CERTIFICATE, "cluster", *command]
    os.execvp("ssh", ["ssh", *terminal, "--", address, shlex.join(there)])


_UsageError = typer.BadParameter.__base__  # typer carries its own copy of click, or uses click: this is right for both


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and note it; returns the exit code."""
    from cluster.launch.audit_log import note_command

    begin, code, said = time.monotonic(), 1, ""  # 1: by a bug of ours
    try:
        code, said = _run(arguments)
        return code
    finally:
        note_command(arguments, exit_code=code, error=said, seconds=time.monotonic() - begin)


def _run(arguments: list[str]) -> tuple[int, str]:
    """The exit code, and what was said of an error. An edge: here every error of ours ends."""
    try:
        code = app(args=arguments, prog_name="cluster", standalone_mode=False)
        if code == Interrupted.exit_code:  # some versions of typer make this of Ctrl-C
            raise KeyboardInterrupt
    except ClusterError as error:
        print(f"cluster: {error}", file=sys.stderr)
        for line in getattr(error, "log", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        return getattr(error, "exit_code", 2), str(error)
    except (KeyboardInterrupt, typer.Abort):
        print("cluster: interrupted", file=sys.stderr)
        return Interrupted.exit_code, "interrupted"
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0, ""
    except Exception as error:
        if not (_UsageError and isinstance(error, _UsageError)):
            raise
        said = error.format_message()  # type: ignore[attr-defined]
        print(f"cluster: {said}", file=sys.stderr)
        return 2, said
    return code if isinstance(code, int) else 0, ""
