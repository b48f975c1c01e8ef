"""Run benchmarks one after another and write their results into BENCHMARKS.md.

    make bench [BENCH="step scaling"] [ARGS="--all"]
    python -m benchmarks [NAME ...] [--all] [--list] [--dry-run] [--output BENCHMARKS.md]

A result stands between the markers `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`; everything
else is left alone. A benchmark ends within 10 minutes or is ended. The exit status is 0 when every
goal is met.
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
    """Exit status and what was printed; None where it was ended for its time."""
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
    """Whether a benchmark came to its end: with a verdict, or without one and well."""
    lines = output.strip().splitlines()
    return bool(lines) and (lines[-1].startswith(VERDICTS) or status == 0)


def write(path: Path, text: str) -> None:
    """Replace a file at once."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def bench(name: str, entry: Entry, path: Path | None) -> bool:
    """Run one and write its block; whether all its goals are met."""
    progress(f"{name}: {entry.command}")
    state, began = f"{commit(ROOT)}, {time.strftime('%Y-%m-%d')}", time.monotonic()
    status, output = run(entry)
    seconds = time.monotonic() - began
    if not is_result(status, output):
        why = f"did not end within {LIMIT:.0f} s" if status is None else f"ended with {status}"
        progress(f"{name} {why} and has no result: BENCHMARKS.md stays as it is")
        return False
    sys.stdout.write(f"{output.strip()}\n\n")
    sys.stdout.flush()
    if path is not None:
        text = path.read_text(encoding="utf-8") if path.exists() else "# Benchmarks\n"
        write(path, with_block(text, name, entry.title, block(entry, output, state, seconds)))
    return status == 0


def main() -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="of entries, or what several begin with")
    parser.add_argument("--all", action="store_true", help="the slow ones too")
    parser.add_argument("--list", action="store_true", help="say what there is, and run nothing")
    parser.add_argument("--dry-run", action="store_true", help="run, but write nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "BENCHMARKS.md")
    options = parser.parse_args()
    if options.list:
        for name, entry in ENTRIES.items():
            sys.stdout.write(f"{name:16} {entry.command}{' (slow)' if entry.slow else ''}\n")
        return 0
    entries = chosen(options.names, everything=options.all, has_gpu=bool(gpus()))
    met = {
        name: bench(name, entry, None if options.dry_run else options.output)
        for name, entry in entries.items()
    }
    missed = [name for name, good in met.items() if not good]
    sys.stdout.write(
        f"{'MISS' if missed else 'PASS'}: {len(met) - len(missed)} of {len(met)} benchmarks"
    )
    sys.stdout.write(f"; not {', '.join(missed)}\n" if missed else "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
