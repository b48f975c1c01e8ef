"""Which machines an attempt runs on.

All of the hostfile, or of an elastic run those that answer.
"""

import logging

from megacore.cluster.hosts.ssh import Ssh, check_ssh, run_on_hosts
from megacore.cluster.start import ssh_of
from megacore.config.hostfile import hosts_of, is_this_machine, slots_of
from megacore.config.run import RunConfig
from megacore.errors import HostLostError, LaunchError, ParallelLayoutError
from megacore.plan.layouts import layout_of

ANSWER_LIMIT = 15.0
"""Seconds in which a machine must have answered to be taken."""

_log = logging.getLogger(__name__)


def choose_hosts(
    config: RunConfig, vocab_size: int | None = None, *, attempt: int = 1
) -> dict[str, int]:
    """Hosts of the next attempt and each one's ranks, in the hostfile's order; or {}.

    It is {} without a hostfile.

    Of an elastic run these are the first ones that answer, at most the largest number of
    `launch.nnodes`, and fewer of them, down to its least, where the model and its batch do not
    divide by the ranks of more. The batch and the order of the samples stay.

    Args:
        config: the run.
        vocab_size: of the tokenizer, None where it is not known.
        attempt: 1, or a later one, before which the machines were there.

    Raises:
        ParallelLayoutError: no number of machines that may be taken divides the model and its
            batch.
        LaunchError: fewer answer than must; names those that do not. HostLostError of a later
            attempt.
    """
    launch = config.launch
    if launch.hostfile is None or not launch.elastic:
        return hosts_of(launch)
    least, most = launch.node_range or (1, 1)
    listed = {host: len(slots) for host, slots in slots_of(launch, limited=False).items()}
    check_ssh(listed)
    silent = _silent(ssh_of(launch), [*listed])
    answering = [host for host in listed if host not in silent]
    missing = "; ".join(f"{host}: {why}" for host, why in silent.items())
    if len(answering) < least:
        text = (
            f"launch.nnodes is {launch.nnodes} and {len(answering)} of {len(listed)} hosts can "
            f"take part ({missing})"
        )
        raise (
            HostLostError(text)
            if attempt > 1
            else LaunchError(f"{text}: correct launch.hostfile or ssh")
        )
    chosen = _dividing(config, {host: listed[host] for host in answering[:most]}, least, vocab_size)
    left_out = [host for host in answering if host not in chosen]
    _log.log(
        logging.WARNING if silent else logging.INFO,
        "hosts of this attempt: %s%s%s",
        ", ".join(
            f"{host} ({ranks} rank{'s' if ranks > 1 else ''})" for host, ranks in chosen.items()
        ),
        f"; not needed: {', '.join(left_out)}" if left_out else "",
        f"; cannot take part: {missing}" if silent else "",
    )
    return chosen


def _silent(ssh: Ssh, hosts: list[str]) -> dict[str, str]:
    """Why a host cannot take part, of those that cannot."""
    others = [host for host in hosts if not is_this_machine(host)]
    results = run_on_hosts(ssh, others, ["true"], timeout=ANSWER_LIMIT)
    return {result.host: result.problem for result in results if result.problem is not None}


def _dividing(
    config: RunConfig, hosts: dict[str, int], least: int, vocab_size: int | None
) -> dict[str, int]:
    """The most of `hosts`, from the first on, whose ranks the model and its batch divide by."""
    refused: ParallelLayoutError | None = None
    for number in range(len(hosts), least - 1, -1):
        taken = dict(list(hosts.items())[:number])
        try:
            layout_of(config, sum(taken.values()), vocab_size)
        except ParallelLayoutError as error:
            refused = refused or error
        else:
            return taken
    raise refused or ParallelLayoutError(
        f"launch.nnodes is {config.launch.nnodes}: no machine is left"
    )
