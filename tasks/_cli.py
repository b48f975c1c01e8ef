"""Command line of a flow: `python -m flows.pretrain --conf … -o train.train_iters=50`."""

import argparse
import inspect
import os
import signal
import stat
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from prefect import Flow
from prefect.settings import PREFECT_API_URL

from megacore.artifact.files import access_error
from megacore.config import load_config, load_finetune_config, parse_overrides
from megacore.errors import (
    ConfigError,
    LaunchError,
    MegacoreError,
    TrainingStoppedError,
    WorkspaceError,
)
from megacore.redact import redact, redact_values
from tasks._environment import answers, check_proxies
from tasks._form import FINE_TUNING, OTHERS, PRETRAINING
from tasks._temporary_server import database_problem, end_process, start_server
from tasks.preflight import CONF_DIR

_SWITCHES = ("dry_run", "find_batch_size")
"""Boolean parameters of flows."""


class TerminatedError(BaseException):
    """Arrival of SIGTERM or SIGHUP at a flow's command line."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def run_flow(flow: Flow[..., Any]) -> None:
    """Run `flow` from the command line and end the process.

    The last line of a failed command is the error: a user error prints one sentence and sets the
    exit code.
    """
    arguments, switches = _parse(flow)
    signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, _raise_hung_up)
    last_line, code = "", 0
    try:
        check_proxies()
        require_server()
        overrides = parse_overrides(arguments.override)
        _refuse_secrets(overrides)
        if not PREFECT_API_URL.value():
            _check_values(flow, arguments.conf, overrides)
            start_server()
        parameters: dict[str, Any] = {"conf": arguments.conf, "overrides": overrides}
        flow(**parameters, **{name: getattr(arguments, name) for name in switches})
    except MegacoreError as error:
        stop_requested = isinstance(error, TrainingStoppedError)  # a requested stop is no error
        last_line, code = f"{'' if stop_requested else 'error: '}{error}", error.exit_code
    except KeyboardInterrupt:
        last_line, code = f"stopped; {_RESUME}", 130
    except TerminatedError as end:
        last_line, code = f"stopped by {end.signal.name}; {_RESUME}", -end.signal
    except Exception as error:
        theirs = type(error).__module__.partition(".")[0] in ("prefect", "httpx")
        if theirs and (problem := database_problem()):
            end_process(f"error: {problem}", WorkspaceError.exit_code)
        fault = access_error(error) if isinstance(error, OSError) else None
        if fault is None:
            traceback.print_exc()
        last_line, code = (
            (f"error: {type(error).__name__}: {error}", 1)
            if fault is None
            else (f"error: {fault}", fault.exit_code)
        )
    end_process(last_line, code)


_RESUME = "run the same command to resume from the last complete checkpoint"


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise TerminatedError(number)


def _raise_hung_up(number: int, frame: FrameType | None) -> None:
    """End the flow because its terminal is closed, to which nothing can be written any more."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # both the kernel and the shell send it
    for descriptor in (1, 2):
        with suppress(OSError):  # it may be closed
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
    raise TerminatedError(number)


def _parse(flow: Flow[..., Any]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Return the arguments of the command line, and the flow's switches with their help texts."""
    parser = argparse.ArgumentParser(
        # Run as a program, the flow's own module is called __main__.
        prog=f"python -m flows.{Path(inspect.getfile(inspect.unwrap(flow.fn))).stem}",
        description=flow.fn.__doc__,
    )
    flow_parameters = inspect.signature(flow.fn).parameters
    form = FINE_TUNING if flow.name == "finetune" else PRETRAINING
    parser.add_argument(
        "--conf",
        default=flow_parameters["conf"].default,
        help=OTHERS["conf"][1].format(directory=form.directory),
    )
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="dotted key, such as train.train_iters=50",
    )
    switches = {name: OTHERS[name][1] for name in _SWITCHES if name in flow_parameters}
    for name, text in switches.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=text)
    return parser.parse_args(), switches


def _check_values(flow: Flow[..., Any], conf: str, overrides: dict[str, Any]) -> None:
    """Refuse wrong values before a temporary server starts, which takes seconds.

    With a configured server the flow refuses them, so that Prefect's page shows the refused run.
    """
    if flow.name == "finetune":
        load_finetune_config(conf, overrides, conf_dir=CONF_DIR / "finetune")
    else:
        load_config(conf, overrides, conf_dir=CONF_DIR)


def _refuse_secrets(overrides: dict[str, Any]) -> None:
    """Refuse overrides that hold secrets: Prefect stores and shows a run's parameters."""
    for key, value in overrides.items():
        if redact_values({key: value}) != {key: value}:
            raise ConfigError(
                f"override {key} holds a credential, and Prefect stores a run's parameters: write "
                "it into the file that --conf names, readable only by you"
            )


def require_server() -> None:
    """Refuse to start if the configured server does not answer.

    Without a configured server, the flow starts a temporary one.
    """
    url = PREFECT_API_URL.value()
    if url and not answers(f"{url}/health"):
        raise LaunchError(
            f"the Prefect server at {redact(url)} (from prefect.toml or PREFECT_API_URL) does not "
            "answer: `make server` starts it, `make stop` forgets it"
        )
