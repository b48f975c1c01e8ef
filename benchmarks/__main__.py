"""Run benchmarks one after another and write their results into docs/benchmarks.md.

    make bench [BENCH="step scaling"] [ARGS="--all"]
    python -m benchmarks [NAME ...] [--all] [--list] [--dry-run] [--output docs/benchmarks.md]

A result is written between the markers `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; the rest
of the file stays. A benchmark that runs longer than 10 minutes is killed. The exit status is 0 when
every goal is met.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks._entries import ENTRIES, Entry, block, chosen, commit, gpus, with_block
from benchmarks._turns import progress

ROOT = Path(__file__).parents[1]
LIMIT = 600.0
VERDICTS = ("PASS", "MISS")


def run(entry: Entry, limit: float = LIMIT) -> tuple[int | None, str]:
    """Return a benchmark's exit status and output; the status is None if it exceeded its time."""
    command = [sys.executable, "-m", *entry.arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def is_result(status: int | None, output: str) -> bool:
    """Return True if a benchmark finished: with a verdict, or without one and with status 0."""
    lines = output.strip().splitlines()
    return bool(lines) and (lines[-1].startswith(VERDICTS) or status == 0)


def write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def bench(name: str, entry: Entry, path: Path | None) -> bool:
    """Run one benchmark and write its block; return True if all its goals are met."""
    progress(f"{name}: {entry.command}")
    revision, start = f"{commit(ROOT)}, {time.strftime('%Y-%m-%d')}", time.monotonic()
    status, output = run(entry)
    seconds = time.monotonic() - start
    if not is_result(status, output):
        problem = f"did not end within {LIMIT:.0f} s" if status is None else f"ended with {status}"
        progress(f"{name} {problem} and has no result: docs/benchmarks.md stays as it is")
        return False
    sys.stdout.write(f"{output.strip()}\n\n")
    sys.stdout.flush()
    if path is not None:
        text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
        write(path, with_block(text, name, entry.title, block(entry, output, revision, seconds)))
    return status == 0


def main() -> int:
    """Run the requested benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="names of entries, or a prefix of several")
    parser.add_argument("--all", action="store_true", help="the slow ones too")
    parser.add_argument("--list", action="store_true", help="list the entries and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="run, but write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    if options.list:
        for name, entry in ENTRIES.items():
            sys.stdout.write(f"{name:16} {entry.command}{' (slow)' if entry.slow else ''}\n")
        return 0
    entries = chosen(options.names, everything=options.all, has_gpu=bool(gpus()))
    results = {
        name: bench(name, entry, None if options.dry_run else options.output)
        for name, entry in entries.items()
    }
    missed = [name for name, met in results.items() if not met]
    sys.stdout.write(
        f"{'MISS' if missed else 'PASS'}: {len(results) - len(missed)} of {len(results)} benchmarks"
    )
    sys.stdout.write(f"; not {', '.join(missed)}\n" if missed else "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
