"""All commands in one place, and what every error becomes: one line on stderr and an exit code.

0 done · 1 it failed, or is not ready · 2 the user's turn: a bad spec, flag or request, a deployment that cannot be · 3
nothing is deployed (status only) · 130 interrupted

What a command needs is imported inside it: `cluster generate` should not wait for Ray, nor `--help` for anything.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import typer

from cluster.cli import (
    batch,
    bench,
    capture,
    deploy,
    explain,
    generate,
    keys,
    operate,
    quality,
    status,
    top,
    trace,
    update,
)
from cluster.cli.connection import ADDRESS
from cluster.cli.over_ssh import run_over_ssh
from cluster.cli.planning import autoscale, plan, profile, simulate
from core.types.errors import ClusterError, Interrupted

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
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
    bench.bench,
    simulate.simulate,
    plan.plan,
    profile.profile,
    quality.quantize,
):
    app.command()(command)
app.add_typer(autoscale.autoscale, name="autoscale")
app.add_typer(capture.capture, name="capture")
app.add_typer(keys.keys, name="keys")
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
            help="USER@HEAD: run the command there over SSH; HOST[:PORT]: the Ray that this host is a node of. "
            "Default: the deployments made from here.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print it, and do nothing.")
    ] = False,
) -> None:
    """Serve one model by prefill and decode replicas: deploy, watch, rescale, ask."""
    if address and "@" in address:
        arguments: list[str] = context.obj
        run_over_ssh(address, arguments[arguments.index(str(context.invoked_subcommand)) :])
    if address:
        os.environ[ADDRESS] = address


_UsageError = typer.BadParameter.__base__  # typer carries its own copy of click, or uses click: this is right for both


def main() -> None:
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and note it; returns the exit code."""
    from cluster.launch.audit_log import note_command

    begin, code, said = time.monotonic(), 1, ""  # 1: by a bug of ours
    try:
        code, said = run_app(app, arguments, name="cluster")
        return code
    finally:
        note_command(arguments, exit_code=code, error=said, seconds=time.monotonic() - begin)


def run_app(commands: typer.Typer, arguments: list[str], *, name: str) -> tuple[int, str]:
    """Run one of the commands; returns the exit code and the error message. Prints every error of ours on stderr."""
    try:
        code = commands(args=arguments, prog_name=name, standalone_mode=False, obj=list(arguments))
        if code == Interrupted.exit_code:  # some versions of typer make this of Ctrl-C
            raise KeyboardInterrupt
    except ClusterError as error:
        print(f"{name}: {error}", file=sys.stderr)
        for line in getattr(error, "log", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        return getattr(error, "exit_code", 2), str(error)
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        return Interrupted.exit_code, "interrupted"
    except BrokenPipeError:  # the reader of our output has seen enough
        return 0, ""
    except Exception as error:
        if not (_UsageError and isinstance(error, _UsageError)):
            raise
        said = error.format_message()  # type: ignore[attr-defined]
        print(f"{name}: {said}", file=sys.stderr)
        return 2, said
    return code if isinstance(code, int) else 0, ""
