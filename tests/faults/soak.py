"""Soak test of kills, full disks, damaged files and lost servers, with a table at the end.

    python -m tests.faults.soak --kills 500 --seed 1 --out report.json
    python -m tests.faults.soak --case launcher-100003          repeat one case
    python -m tests.faults.soak --markdown report.json          print a report as tables

Exits with 1 if any case has a fault. Each case has a deadline: a hang is a fault, reported with the
stacks of its threads.
"""
# ruff: noqa: T201 - a program that prints

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.faults._cases import Bench, Outcome
from tests.faults._kinds import KINDS
from tests.faults._matrix import DISK, SOAK_WEIGHTS, Case, run_case, soak_cases
from tests.faults._mutations import run_forms
from tests.faults._processes import ROOT, Nursery

FORMS = "tests.faults._forms:FORMS"
DISKS = [kind.name for kind in KINDS.values() if kind.ranks == 1 and kind.same_as is None]
DISKS_PER_KIND = 3
OUTAGES = {"mlflow": 4, "prefect": 3}
MUTATION_FACTOR = 10.0
"""Damaged files; continuous integration has a factor of 0.5."""
MUTATION_LIMIT = 1800.0
_LONGEST_FIRST = ("flow", "prefect", "mlflow", "launcher")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, print and write the report; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.soak", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=500, help="SIGKILLs of all kinds together")
    parser.add_argument("--seed", type=int, default=1, help="another one draws other moments")
    parser.add_argument("--out", type=Path, help="JSON file for the report")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[*SOAK_WEIGHTS],
        help="only kills of these kinds",
    )
    parser.add_argument(
        "--case", action="append", default=[], metavar="KIND-SEED", help="only these cases"
    )
    parser.add_argument(
        "--markdown", type=Path, metavar="REPORT", help="print a report as a table, run nothing"
    )
    options = parser.parse_args(arguments)
    if options.markdown:
        print(markdown(json.loads(options.markdown.read_text(encoding="utf-8"))))
        return 0
    cases = [_case(name) for name in options.case] or _cases(
        options.kills, options.seed, options.only
    )
    directory = Path(tempfile.mkdtemp(prefix="megacore-soak-"))
    started = time.monotonic()
    bench = Bench(directory, Nursery(directory / "logs"), KINDS)
    try:
        outcomes = _run(bench, cases, options.jobs)
        mutations = [] if options.case or options.only else _damage(bench, options.seed)
    finally:
        bench.close()
    report = _report(options.kills, options.seed, outcomes, mutations, time.monotonic() - started)
    print(markdown(report))
    faults = [
        *(
            f"{outcome['kind']}-{outcome['seed']}: {fault}"
            for outcome in report["outcomes"]
            for fault in outcome["faults"]
        )
    ]
    faults += [finding for form in mutations for finding in form["findings"]]
    print("\n".join(["", f"{len(faults)} faults", *faults]))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if faults:
        print(f"what the cases left is in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


def _case(name: str) -> Case:
    kind, _, seed = name.rpartition("-")
    return Case(kind, int(seed))


def _cases(kills: int, seed: int, only: Sequence[str]) -> list[Case]:
    cases = soak_cases(kills, seed, only)
    if not only:
        first = seed * 100_000
        cases += [
            Case(kind, first + number) for kind, count in OUTAGES.items() for number in range(count)
        ]
        cases += [
            Case(f"{DISK}{kind}", first + number)
            for kind in DISKS
            for number in range(DISKS_PER_KIND)
        ]
    return sorted(
        cases,
        key=lambda case: (
            _LONGEST_FIRST.index(case.kind) if case.kind in _LONGEST_FIRST else len(_LONGEST_FIRST)
        ),
    )


def _run(bench: Bench, cases: Sequence[Case], jobs: int) -> list[Outcome]:
    """Run all cases; an exception of a case is a fault too."""
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run_case, bench, case): case for case in cases}
        for number, future in enumerate(as_completed(futures), 1):
            case = futures[future]
            try:
                case_outcomes = future.result()
            except Exception as error:
                case_outcomes = [
                    Outcome(
                        case.kind, case.seed, 0.0, "", faults=[f"{type(error).__name__}: {error}"]
                    )
                ]
            outcomes += case_outcomes
            faults = sum(len(outcome.faults) for outcome in case_outcomes)
            verdict = f"{faults} FAULTS" if faults else "ok"
            seconds = sum(outcome.seconds for outcome in case_outcomes)
            print(f"[{number}/{len(cases)}] {case} {verdict} {seconds:.1f} s", flush=True)
            for outcome in case_outcomes:
                for fault in outcome.faults:
                    print(f"    {fault}", flush=True)
    return outcomes


def _damage(bench: Bench, seed: int) -> list[dict[str, Any]]:
    """Read damaged files in one process.

    If it dies or hangs, this is a finding at the current file.
    """
    progress = bench.directory / "mutations"
    child = bench.nursery.start(
        run_forms, FORMS, bench.directory / "forms", seed * 1_000_000, MUTATION_FACTOR, progress
    )
    try:
        answer = child.finish(MUTATION_LIMIT)
    except AssertionError as error:
        answer = {"message": str(error)}
    if "value" in answer:
        reports: list[dict[str, Any]] = answer["value"]
        return reports
    done = progress.with_suffix(".jsonl")
    reports = (
        [json.loads(line) for line in done.read_text(encoding="utf-8").splitlines()]
        if done.exists()
        else []
    )
    current = progress.read_text(encoding="utf-8").strip() if progress.exists() else "the start"
    return [
        *reports,
        {
            "form": "(ended)",
            "counts": {},
            "findings": [f"{current}: the process ended: {answer['message']}"],
        },
    ]


def _report(
    kills: int, seed: int, outcomes: list[Outcome], mutations: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    return {
        "command": f"make soak KILLS={kills} SEED={seed}",
        "commit": _commit(),
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "seconds": round(seconds),
        "outcomes": [asdict(outcome) for outcome in outcomes],
        "mutations": mutations,
    }


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    return completed.stdout.strip() or "unknown"


def markdown(report: dict[str, Any]) -> str:
    """Return the tables of a report."""
    lines = [
        f"`{report['command']}` at {report['commit']}, {report['machine']}, {report['seconds']} s.",
        "",
        "| killed | cases | died of it | ended before | faults |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for outcome in report["outcomes"]:
        kinds.setdefault(outcome["kind"], []).append(outcome)
    killed = {kind: cases for kind, cases in kinds.items() if kind in SOAK_WEIGHTS}
    others = {kind: cases for kind, cases in kinds.items() if kind not in SOAK_WEIGHTS}
    all_killed = [outcome for cases in killed.values() for outcome in cases]
    for kind, cases in [*killed.items(), ("all", all_killed)]:
        hits = sum(outcome["hit"] for outcome in cases)
        lines.append(f"| {kind} | {len(cases)} | {hits} | {len(cases) - hits} | {_faults(cases)} |")
    if others:
        lines += [
            "",
            "| full disk, or a server killed and started again | cases | faults |",
            "| --- | ---: | ---: |",
        ]
        lines += [f"| {kind} | {len(cases)} | {_faults(cases)} |" for kind, cases in others.items()]
    if report["mutations"]:
        names = ("refused", "right", "other")
        lines += [
            "",
            "| damaged file | mutations | refused | read as whole | another valid value | faults |",
        ]
        lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
        total = {
            "form": "all",
            "counts": {},
            "findings": [f for form in report["mutations"] for f in form["findings"]],
        }
        for form in report["mutations"]:
            for result, count in form["counts"].items():
                total["counts"][result] = total["counts"].get(result, 0) + count
        for form in [*report["mutations"], total]:
            counts = {result: count for result, count in form["counts"].items() if result != "same"}
            columns = " | ".join(str(counts.get(name, 0)) for name in names)
            lines.append(
                f"| {form['form']} | {sum(counts.values())} | {columns} | {len(form['findings'])} |"
            )
    return "\n".join(lines)


def _faults(outcomes: list[dict[str, Any]]) -> int:
    return sum(bool(outcome["faults"]) for outcome in outcomes)


if __name__ == "__main__":
    sys.exit(main())
