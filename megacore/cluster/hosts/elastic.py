"""Choice of an attempt's hosts: all of the hostfile or, in an elastic run, those that are fit."""

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

from megacore.cluster.hosts.hardware import ANSWER_LIMIT
from megacore.cluster.hosts.ssh import Ssh, check_ssh, python, run_on_hosts
from megacore.config.hostfile import hosts_of, is_this_machine, slots_of
from megacore.config.run import RunConfig
from megacore.errors import HostLostError, LaunchError
from megacore.plan.layouts import dividing_hosts

_log = logging.getLogger(__name__)


def choose_hosts(
    config: RunConfig, vocab_size: int | None = None, *, attempt: int = 1
) -> dict[str, int]:
    """Choose the hosts of the next attempt and return their ranks, in the order of the hostfile.

    An elastic run takes the first hosts that answer and have a GPU for each slot, if any of them
    has GPUs, at most the maximum of `launch.nnodes`. It takes fewer, down to the minimum, if the
    model and its batch are not divisible by the ranks of more hosts. The batch size and the order
    of the samples do not change. Without a hostfile there are no hosts.

    Raises:
        ParallelLayoutError: the model and its batch are not divisible by the ranks of any permitted
            number of hosts.
        LaunchError: fewer hosts than the minimum answer; the message names the others.
        HostLostError: the same in a later attempt, when the hosts were reachable before.
    """
    launch = config.launch
    if launch.hostfile is None or not launch.elastic:
        return hosts_of(launch)
    minimum, maximum = launch.node_range or (1, 1)
    slots = slots_of(launch, limited=False)
    listed = {host: len(numbers) for host, numbers in slots.items()}
    check_ssh(listed)
    unfit = _unfit(Ssh.of(launch), slots)
    fit = [host for host in listed if host not in unfit]
    missing = "; ".join(f"{host}: {why}" for host, why in unfit.items())
    if len(fit) < minimum:
        message = (
            f"launch.nnodes is {launch.nnodes} and {len(fit)} of {len(listed)} hosts can "
            f"take part ({missing})"
        )
        raise (
            HostLostError(message)
            if attempt > 1
            else LaunchError(f"{message}: correct launch.hostfile or ssh")
        )
    possible = [listed[host] for host in fit[:maximum]]
    count = dividing_hosts(config, possible, minimum, vocab_size)
    chosen = {host: listed[host] for host in fit[:count]}
    left_out = [host for host in fit if host not in chosen]
    _log.log(
        logging.WARNING if unfit else logging.INFO,
        "hosts of this attempt: %s%s%s",
        ", ".join(
            f"{host} ({ranks} rank{'s' if ranks > 1 else ''})" for host, ranks in chosen.items()
        ),
        f"; not needed: {', '.join(left_out)}" if left_out else "",
        f"; cannot take part: {missing}" if unfit else "",
    )
    return chosen


def _unfit(ssh: Ssh, slots: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the hosts that do not answer, or lost a GPU, each with the reason.

    The driver no longer shows a GPU that fell off the bus, also on this host, where a new process
    asks it.
    """
    unfit: dict[str, str] = {}
    gpus: dict[str, int] = {}
    for result in run_on_hosts(ssh, [*slots], python("megacore.hardware"), timeout=ANSWER_LIMIT):
        if result.problem is not None:
            unfit[result.host] = result.problem
        else:
            with suppress(KeyError, TypeError, ValueError):  # the start names it
                gpus[result.host] = len(result.answer()["gpus"])
    if any(gpus.values()):
        usable = {host: _usable(host, slots[host], count) for host, count in gpus.items()}
        unfit |= {
            host: f"{count} of the GPUs of its {len(slots[host])} slots can be used"
            for host, count in usable.items()
            if count < len(slots[host])
        }
    return unfit


def _usable(host: str, slots: Sequence[int], gpus: int) -> int:
    """Return how many of a host's slots have a GPU if it shows `gpus`, which it counts from 0."""
    if is_this_machine(host) and os.environ.get("CUDA_VISIBLE_DEVICES"):
        return gpus  # only those of the variable, whatever their numbers
    return sum(slot < gpus for slot in slots)
