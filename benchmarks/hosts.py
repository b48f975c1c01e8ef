"""Training on two hosts: speed compared with one host, and recovery from the loss of one.

The hosts are simulated by network namespaces on this machine.

    python -m benchmarks.hosts [--parts speed loss]

speed   tokens/s of data-parallel training with one rank on one host, two ranks on one host, and one
        rank on each of two hosts; all use the same cores, so the last two differ only by the
        network between the hosts
loss    one of two hosts is killed, frozen or cut off during a training, with the default
        `launch.host_timeout`: seconds until the run has ended with the host's name, until no rank
        is left on either host, and, once the host is back, from the start of the next attempt to
        its first step

Needs root, iproute2, OpenSSH's server and rsync. If one is missing, it is named and nothing is
measured.
"""

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._verdict import Check, table, verdict
from megacore.jobs.run import TrainJob
from tests.hosts import _jobs
from tests.hosts._rig import Rig, hosts, rig_problem
from tests.train import _runs

PARTS = ("speed", "loss")
ACROSS_GOAL = 0.9
"""Least rate of two hosts, relative to two ranks on one host."""
END_GOAL = 60.0
"""Seconds within which the run must have ended on every host that can still run."""
RESUME_GOAL = 60.0
"""Seconds within which the next attempt must have made a step."""
ITERATIONS, WARM = 40, 10
ENDLESS = 2000
"""Number of iterations that no part reaches."""
BATCH = 8
MODEL = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4}
SEQ_LENGTH = 128


def training(
    rig: Rig, name: str, slots: dict[str, int], iterations: int, attempt: int = 1
) -> TrainJob:
    """Return a run of `iterations` on `slots`, a rank with one thread each; host a has its data."""
    hostfile = rig.directory / f"hostfile-{name}"
    hostfile.write_text("".join(f"{host} slots={count}\n" for host, count in slots.items()))
    config = _jobs.config(
        rig,
        data={"seq_length": SEQ_LENGTH},
        model=MODEL,
        train={
            "micro_batch_size": 4,
            "global_batch_size": BATCH * sum(slots.values()) if name.startswith("speed") else BATCH,
            "train_iters": iterations,
            "eval_interval": ENDLESS,
        },
        checkpoint={"save_interval": 10 if iterations == ENDLESS else ENDLESS, "keep_last": 1},
        launch={"hostfile": str(hostfile), "host_timeout": 20.0},
    )
    return _jobs.job(rig, config, name, ranks=sum(slots.values()), attempt=attempt)


def steps(run: Path) -> list[dict[str, Any]]:
    """Return the events of a run's iterations."""
    return [event for event in _jobs.events(run) if event["kind"] == "step"]


def speed(rig: Rig, logs: Path) -> list[Check]:
    """Measure the rate on one host and on two."""
    rows, rates = [], {}
    cases: dict[str, dict[str, int]] = {
        "1 host, 1 rank": {"a": 1},
        "1 host, 2 ranks": {"a": 2},
        "2 hosts": {"a": 1, "b": 1},
    }
    for number, (label, slots) in enumerate(cases.items()):
        (logs / f"speed{number}").mkdir()
        attempt = _jobs.Attempt(
            rig, training(rig, f"speed{number}", slots, ITERATIONS), logs / f"speed{number}"
        )
        outcome = attempt.outcome(300)
        if outcome["error"]:
            raise SystemExit(f"{label}: {outcome['error']}: {outcome['message']}")
        measured = steps(attempt.run)[WARM:]
        rates[label] = statistics.median(event["tokens_per_second"] for event in measured)
        exposed = statistics.median(event["exposed_communication_ms"] for event in measured)
        rows.append(
            [
                label,
                f"{rates[label]:,.0f}",
                f"{rates[label] / rates['1 host, 1 rank']:.2f}",
                f"{exposed:.1f}",
            ]
        )
    _show(
        f"{BATCH} samples of {SEQ_LENGTH} tokens on each rank of one thread, median of "
        f"{ITERATIONS - WARM} steps",
        ["where", "tokens/s", "of one rank", "exposed (ms)"],
        rows,
    )
    return [
        Check(
            "2 hosts",
            rates["2 hosts"] / rates["1 host, 2 ranks"],
            ACROSS_GOAL,
            unit="of 2 ranks on one",
        )
    ]


def loss(rig: Rig, logs: Path) -> list[Check]:
    """Kill, freeze and cut off a host, each followed by the next attempt of the same run."""
    rows, ends, resumes = [], [], []
    attempt = _attempt(rig, logs, 1)
    for number, failure in enumerate(("kill", "freeze", "cut"), start=2):
        attempt.until_saved()
        lost_at = time.time()
        getattr(rig, failure)("b")
        # frozen ranks end only after they are thawed
        gone = _until_no_rank(rig, "a" if failure == "freeze" else "ab", lost_at)
        outcome = attempt.outcome(2 * END_GOAL)
        if outcome["error"] != "HostLostError" or "host b" not in outcome["message"]:
            raise SystemExit(f"{failure}: {outcome['error']}: {outcome['message']}")
        ends += [outcome["at"] - lost_at, *gone.values()]
        thawed = time.time()
        rig.restore("b")
        after = _until_no_rank(rig, "b", thawed)["b"]
        lost_host_end = (
            f"{gone['b']:.1f}" if failure != "freeze" else f"{after:.1f} after it resumed"
        )
        before, restarted = len(steps(attempt.run)), time.time()
        attempt = _attempt(rig, logs, number)
        _until_steps(attempt.run, before)
        resumes.append(time.time() - restarted)
        rows.append(
            [
                failure,
                f"{outcome['at'] - lost_at:.1f}",
                f"{gone['a']:.1f}",
                lost_host_end,
                f"{resumes[-1]:.1f}",
            ]
        )
    _show(
        "Seconds from the loss of one of two hosts, launch.host_timeout 20 s",
        [
            "how",
            "error that names it",
            "no rank on the other",
            "no rank on itself",
            "next attempt's first step",
        ],
        rows,
    )
    return [
        Check("end everywhere", max(ends), END_GOAL, at_most=True, unit="s"),
        Check("first step again", max(resumes), RESUME_GOAL, at_most=True, unit="s"),
    ]


def _attempt(rig: Rig, logs: Path, number: int) -> _jobs.Attempt:
    return _jobs.Attempt(rig, training(rig, "loss", {"a": 1, "b": 1}, ENDLESS, number), logs)


def _until_steps(run: Path, before: int) -> None:
    _jobs.wait_for(lambda: len(steps(run)) > before, 2 * RESUME_GOAL, "a step of the next attempt")


def _until_no_rank(rig: Rig, names: str, since: float) -> dict[str, float]:
    """Return the seconds after `since` at which each host had no rank left."""
    seconds_by_host: dict[str, float] = {}

    def all_gone() -> bool:
        seconds_by_host.update(
            {
                host: time.time() - since
                for host in names
                if host not in seconds_by_host and not rig.ranks(host)
            }
        )
        return len(seconds_by_host) == len(names)

    _jobs.wait_for(all_gone, 2 * END_GOAL, f"the end of the ranks on {names}")
    return seconds_by_host


@contextlib.contextmanager
def prepared() -> Iterator[Rig]:
    """Yield two hosts, the first with the data of every part."""
    with (
        tempfile.TemporaryDirectory(prefix="megacore-hosts-") as folder,
        hosts(Path(folder) / "rig") as rig,
    ):
        _runs.SAMPLES, _runs.SEQ_LENGTH = ENDLESS * BATCH, SEQ_LENGTH
        _jobs.write_data(rig.disk("a"))
        yield rig


def _show(title: str, header: list[str], rows: list[list[str]]) -> None:
    sys.stdout.write(f"{title}:\n\n{table(header, rows)}\n")
    sys.stdout.flush()


def main() -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    problem = rig_problem()
    if problem is not None:
        raise SystemExit(f"nothing is measured: {problem}")
    checks: list[Check] = []
    with prepared() as rig, tempfile.TemporaryDirectory(prefix="megacore-logs-") as logs:
        for part in PARTS:
            if part in options.parts:
                checks += {"speed": speed, "loss": loss}[part](rig, Path(logs))
    return verdict("hosts", checks)


if __name__ == "__main__":
    sys.exit(main())
