"""Two machines: their speed beside one, and what the loss of one costs.

Stand-ins: network namespaces on this machine.

    python -m benchmarks.hosts [--parts speed loss]

speed   tokens/s of data-parallel training with one rank on one host, two on one, and one on each of
        two: the same cores do the work, so the last two differ by what lies between the hosts
loss    one of two hosts is killed, frozen or cut off in the middle of a training, with
        `launch.host_timeout` as it is: seconds until the run has ended with the host's name, until
        no rank is left on either, and, once the host is back, from the start of the next attempt to
        its first step

Needs root, iproute2, OpenSSH's server and rsync; says which of them is missing, and measures
nothing then.
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
"""Rate of two hosts beside that of two ranks on one."""
END_GOAL = 60.0
"""Seconds within which the run must have ended on every host that can still run."""
RESUME_GOAL = 60.0
"""Seconds within which the next attempt must have done a step."""
ITERATIONS, WARM = 40, 10
ENDLESS = 2000
"""Iterations that no part reaches."""
BATCH = 8
MODEL = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 4}
SEQ_LENGTH = 128


def training(
    rig: Rig, name: str, slots: dict[str, int], iterations: int, attempt: int = 1
) -> TrainJob:
    """A run of ITERATIONS on `slots`, a rank with one thread each; its data lie on host a."""
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
    """Events of its iterations."""
    return [event for event in _jobs.events(run) if event["kind"] == "step"]


def speed(rig: Rig, logs: Path) -> list[Check]:
    """Rate on one host and on two."""
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
        said = attempt.outcome(300)
        if said["error"]:
            raise SystemExit(f"{label}: {said['error']}: {said['message']}")
        done = steps(attempt.run)[WARM:]
        rates[label] = statistics.median(event["tokens_per_second"] for event in done)
        exposed = statistics.median(event["exposed_communication_ms"] for event in done)
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
    """Kill, freeze and cut, each followed by the next attempt of the same run."""
    rows, ends, resumes = [], [], []
    attempt = _attempt(rig, logs, 1)
    for number, how in enumerate(("kill", "freeze", "cut"), start=2):
        attempt.until_saved()
        began = time.time()
        getattr(rig, how)("b")
        # frozen ranks end when they go on
        gone = _until_no_rank(rig, "a" if how == "freeze" else "ab", began)
        said = attempt.outcome(2 * END_GOAL)
        if said["error"] != "HostLostError" or "host b" not in said["message"]:
            raise SystemExit(f"{how}: {said['error']}: {said['message']}")
        ends += [said["at"] - began, *gone.values()]
        thawed = time.time()
        rig.restore("b")
        after = _until_no_rank(rig, "b", thawed)["b"]
        itself = f"{gone['b']:.1f}" if how != "freeze" else f"{after:.1f} after it went on"
        before, again = len(steps(attempt.run)), time.time()
        attempt = _attempt(rig, logs, number)
        _until_steps(attempt.run, before)
        resumes.append(time.time() - again)
        rows.append(
            [how, f"{said['at'] - began:.1f}", f"{gone['a']:.1f}", itself, f"{resumes[-1]:.1f}"]
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


def _until_no_rank(rig: Rig, names: str, began: float) -> dict[str, float]:
    """Seconds since `began` when no rank was left on each host."""
    found: dict[str, float] = {}

    def all_gone() -> bool:
        found.update(
            {
                host: time.time() - began
                for host in names
                if host not in found and not rig.ranks(host)
            }
        )
        return len(found) == len(names)

    _jobs.wait_for(all_gone, 2 * END_GOAL, f"the end of the ranks on {names}")
    return found


@contextlib.contextmanager
def prepared() -> Iterator[Rig]:
    """Two hosts, the first with data for every part."""
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
    """Measure what is asked for."""
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
