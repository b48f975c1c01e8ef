"""Tokenization of a JSON Lines corpus with a byte-level BPE, compared with other tools.

Each tool is measured as a whole process, from start to exit.

    python -m benchmarks.tokenize [--input FILE] [--size-mb 300] [--rounds 5] [--workers 2]
        [--vocab-file V --merge-file M] [--text FILE ...]
        [--contestants megacore loop hf megatron --megatron DIR]

Without --input, the corpus consists of the Python sources of this host (standard library, then
site-packages, sorted by path) and of the --text files, one document each, until it has --size-mb;
it is always the same on the same host. Without GPT-2's two files, a vocabulary of 32,000 is trained
on 20 MB of the corpus.

megacore is the command `megacore tokenize --append-eod`, including oracle, hashes and fsync. loop
is orjson, gigatoken on 32 MB blocks and one write. hf is `encode_batch_fast` of `tokenizers`, and
megatron is its tools/preprocess_data.py; both use only the first 8 MB. Contestants take turns; MB/s
is the median over the rounds, with the best in brackets.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._verdict import Check, verdict

MB = 1_000_000
SLICE_MB = 8
CONTESTANTS = ("megacore", "loop", "hf", "megatron")
PHASES = ("start to first byte", "tokenizers and oracle", "encode and write", "sync and publish")


@dataclass
class Contestant:
    """A command, the size of its input in bytes, and the measurements of each run."""

    name: str
    command: list[str]
    size: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peak_mb: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def run(self) -> None:
        """Run the command once, from start to exit."""
        environment = {**os.environ, "BENCHMARK_STARTED": repr(time.time())}
        started = time.perf_counter()
        process = subprocess.Popen(
            self.command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        output = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        self.seconds.append(time.perf_counter() - started)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{self.name} failed:\n{output}")
        self.cpu.append(usage.ru_utime + usage.ru_stime)
        self.peak_mb.append(usage.ru_maxrss * 1024 / MB)
        phases = [line for line in output.splitlines() if line.startswith("phases ")]
        self.phases += [json.loads(line.removeprefix("phases ")) for line in phases]


def sources(texts: list[str]) -> Iterator[Path]:
    """Yield every text of this host, in a fixed order."""
    yield from map(Path, texts)
    for name in ("stdlib", "purelib"):
        yield from sorted(Path(sysconfig.get_path(name)).rglob("*.py"))


def make_corpus(path: Path, size: int, texts: list[str]) -> None:
    """Write JSON Lines of at least `size` bytes."""
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            before = written
            for source in sources(texts):
                try:
                    written += file.write(
                        json.dumps({"text": source.read_text(encoding="utf-8")}) + "\n"
                    )
                except (OSError, UnicodeDecodeError):
                    continue
                if written >= size:
                    return
            if written == before:
                raise SystemExit("this machine has no Python sources: give --input or --text")


def cut(corpus: Path, target: Path, size: int) -> Path:
    """Write the first lines of the corpus, about `size` bytes, to `target`."""
    with open(corpus, "rb") as file:
        data = file.read(size)
        target.write_bytes(data + file.readline())
    return target


def train(corpus: Path, folder: Path) -> tuple[Path, Path]:
    """Train a vocabulary on the beginning of the corpus; return its vocab.json and merges.txt."""
    from megacore.tokenizer.build import train_bpe

    lines = cut(corpus, folder / "training.jsonl", 20 * MB).read_bytes().splitlines()
    train_bpe((json.loads(line)["text"] for line in lines), 32_000).model.save(str(folder))
    return folder / "vocab.json", folder / "merges.txt"


def contestants(options: argparse.Namespace, corpus: Path, folder: Path) -> list[Contestant]:
    """Return the commands that are compared."""
    vocab, merges = options.vocab_file, options.merge_file
    if vocab is None or merges is None:
        vocab, merges = train(corpus, folder)
    files = ["--vocab-file", str(vocab), "--merge-file", str(merges)]
    part = cut(corpus, folder / "slice.jsonl", SLICE_MB * MB)
    peer = [sys.executable, "-m", "benchmarks._tokenize_peers"]
    target = [
        "--output-prefix",
        str(folder / "out"),
        "--append-eod",
        "--workers",
        str(options.workers),
    ]
    commands = {
        "megacore": (
            [*peer, "megacore", "tokenize", *files, *target, "--overwrite", "--input", str(corpus)],
            corpus,
        ),
        "loop": (
            [*peer, "loop", str(corpus), str(vocab), str(merges), str(folder / "loop.bin")],
            corpus,
        ),
        "hf": ([*peer, "hf", str(part), str(vocab), str(merges), str(folder / "hf.bin")], part),
    }
    if options.megatron is not None:
        script = [sys.executable, str(Path(options.megatron, "tools", "preprocess_data.py"))]
        kind = ["--tokenizer-type", "GPT2BPETokenizer"]
        commands["megatron"] = ([*script, *kind, *files, *target, "--input", str(part)], part)
    return [
        Contestant(name, command, source.stat().st_size)
        for name, (command, source) in commands.items()
        if name in options.contestants
    ]


def table(entrants: list[Contestant]) -> list[str]:
    """Return the rows of a Markdown table."""
    rows = [
        "| contestant | MB | seconds | MB/s (best) | CPU seconds | peak MB |",
        "| --- |" + " ---: |" * 5,
    ]
    for each in entrants:
        seconds = statistics.median(each.seconds)
        size = each.size / MB
        rows.append(
            f"| {each.name} | {size:.0f} | {seconds:.2f} | {size / seconds:.1f} "
            f"({size / min(each.seconds):.1f}) | {statistics.median(each.cpu):.2f} | "
            f"{max(each.peak_mb):.0f} |"
        )
    for each in entrants:
        if each.phases:
            rows += ["", f"| phase of {each.name} | seconds |", "| --- | ---: |"]
            for phase in PHASES:
                rows.append(
                    f"| {phase} | {statistics.median(run[phase] for run in each.phases):.2f} |"
                )
    return rows


def checks(entrants: list[Contestant]) -> list[Check]:
    """Return the figures and goals of the command."""
    megacore = next((each for each in entrants if each.name == CONTESTANTS[0]), None)
    if megacore is None:
        return []
    return [
        Check(
            "MB per second",
            megacore.size / MB / statistics.median(megacore.seconds),
            150.0,
            unit="MB/s",
        ),
        Check("peak", max(megacore.peak_mb), 700.0, at_most=True, unit="MB"),
    ]


def main() -> int:
    """Write the corpus, take turns, print the table and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path, help="JSON Lines with the key text")
    parser.add_argument(
        "--text", nargs="+", default=[], help="text files that the corpus begins with"
    )
    parser.add_argument("--size-mb", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vocab-file", type=Path)
    parser.add_argument("--merge-file", type=Path)
    parser.add_argument(
        "--contestants", nargs="+", choices=CONTESTANTS, default=["megacore", "loop", "hf"]
    )
    parser.add_argument("--megatron", help="a checkout of Megatron-LM that can be run")
    parser.add_argument("--folder", help="where to write: a directory of a real disk")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        corpus = options.input or folder / "corpus.jsonl"
        if options.input is None:
            make_corpus(corpus, options.size_mb * MB, options.text)
        entrants = contestants(options, corpus, folder)
        for _ in range(options.rounds):
            for each in entrants:
                each.run()
        sys.stdout.write("\n".join(table(entrants)) + "\n")
    return verdict("tokenize", checks(entrants))


if __name__ == "__main__":
    sys.exit(main())
