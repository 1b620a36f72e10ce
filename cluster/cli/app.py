"""Registration of all commands, and conversion of errors to one line on stderr and an exit code.

0: done. 1: failed, degraded or not ready. 2: user error, such as a bad spec, flag or request. 3: nothing is deployed
(`status`). 130: interrupted.

Commands import what they need when they run, so that `cluster generate` does not import Ray and `--help` stays fast.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import Annotated, Any

import typer

from cluster.cli import batch, bench, capture, deploy, generate, keys, operate, quality, status, top, trace, update
from cluster.cli.connection import ADDRESS, run_over_ssh
from cluster.cli.planning import autoscale, plan, profile, simulate
from core.process.processes import ENDINGS
from core.types.errors import ClusterError, Interrupted

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
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
    trace.explain,
    trace.trace,
    top.top,
    bench.bench,
    simulate.simulate,
    plan.plan,
    profile.profile,
    quality.quantize,
    quality.calibrate,
):
    app.command()(command)
app.add_typer(autoscale.autoscale, name="autoscale")
app.add_typer(capture.capture, name="capture")
app.add_typer(keys.keys, name="keys")
app.add_typer(quality.evaluate, name="eval")


def _print_version(is_requested: bool) -> None:
    if is_requested:
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
            help="USER@HEAD: run the command there over SSH. HOST[:PORT]: use the Ray that this host is a node of. "
            "Default: deployments made from this machine.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Serve one model with prefill and decode replicas: deploy, monitor, scale, query."""
    if address and "@" in address:
        arguments: list[str] = context.obj
        run_over_ssh(address, arguments[arguments.index(str(context.invoked_subcommand)) :])
    if address:
        os.environ[ADDRESS] = address


# typer bundles click or depends on it; this works for both.
_UsageError = typer.BadParameter.__base__


def main() -> None:
    for number in ENDINGS:
        # A signal that is ignored stays so, for example under nohup.
        if signal.getsignal(number) is not signal.SIG_IGN:
            # Exit through SystemExit, to clean up as on Ctrl-C.
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    # A terminal in another encoding than UTF-8 shows "?" for characters that it lacks.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = run(sys.argv[1:])
    if any(thread.name == "joining Ray" for thread in threading.enumerate()):
        # That thread hangs in Ray's C++ code, which would crash or wait in a regular exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and write it to the audit log. Returns the exit code."""
    from cluster.launch.audit_log import note_command

    # The exit code stays 1 if a bug raises.
    begin, code, message = time.monotonic(), 1, ""
    try:
        code, message = run_app(app, arguments, name="cluster")
        return code
    finally:
        note_command(arguments, exit_code=code, error=message, seconds=time.monotonic() - begin)


def run_app(commands: typer.Typer, arguments: list[str], *, name: str) -> tuple[int, str]:
    """Run one command. Returns the exit code and the error message; known errors are printed on stderr."""
    try:
        code = commands(args=arguments, prog_name=name, standalone_mode=False, obj=list(arguments))
        # Some versions of typer convert Ctrl-C to this exit code.
        if code == Interrupted.exit_code:
            raise KeyboardInterrupt
    except ClusterError as error:
        print(f"{name}: {error}", file=sys.stderr)
        for line in getattr(error, "log", "").splitlines():
            print(f"  | {line}", file=sys.stderr)
        return getattr(error, "exit_code", 2), str(error)
    except (KeyboardInterrupt, typer.Abort):
        print(f"{name}: interrupted", file=sys.stderr)
        return Interrupted.exit_code, "interrupted"
    except BrokenPipeError:
        # The reader of our output has closed the pipe.
        return 0, ""
    except Exception as error:
        if not (_UsageError and isinstance(error, _UsageError)):
            raise
        found: str = error.format_message()  # type: ignore[attr-defined]
        message = _missing(error) or found + _misplaced(commands, arguments, error)
        print(f"{name}: {message}", file=sys.stderr)
        return 2, message
    return code if isinstance(code, int) else 0, ""


def _missing(error: Any) -> str:
    """Return one message for all required options that are missing; click names the first one only."""
    if getattr(getattr(error, "param", None), "param_type_name", "") != "option" or not hasattr(error, "ctx"):
        return ""
    given = error.ctx.params
    names = [one.opts[0] for one in error.ctx.command.params if one.required and one.name not in given]
    return f"missing options: {', '.join(names)}" if len(names) > 1 else ""


def _misplaced(commands: typer.Typer, arguments: list[str], error: Exception) -> str:
    """Return a hint with the right order if an option was given before its command, else ""."""
    option = str(getattr(error, "option_name", ""))
    known = getattr(typer.main.get_command(commands), "commands", {})
    command = next((one for one in arguments if one in known), "")
    if not option or not command or option not in arguments[: arguments.index(command)]:
        return ""
    if not any(option in parameter.opts for parameter in known[command].params):
        return ""
    return f"; options of a command follow it: `cluster {command} {option} ...`"
