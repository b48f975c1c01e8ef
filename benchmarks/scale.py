"""Time, memory and disk of `prepare-data` over the size of the corpus.

    python -m benchmarks.scale [--gb 0.1 1 10] [--steps exact | minhash] [--folder DIR]
        [--plot FILE]

A corpus consists of documents of 40 lines, drawn at random from this host's Python sources, in JSON
Lines files of 256 MB; every tenth document occurs twice. The flow collects them, removes duplicates
(`exact`: exact ones; `minhash`: also near ones, after Gopher's rules on repetition), tokenizes with
a byte-level BPE of 32,000 that was trained on 20 MB, and builds index maps of one epoch. Each size
runs once, in a new workspace below --folder, which needs 4 times the largest size of free disk.

Memory is the proportional set size of all processes of the flow, disk what the file system holds
more than before; both are read twice a second.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import yaml

from benchmarks._verdict import Check, table, verdict
from benchmarks.orchestration import started
from benchmarks.tokenize import sources, train

GB = 1_000_000_000
PART_BYTES = 256_000_000
LINES = 40
"""Lines per document."""
REPEATED = 10
"""Every document with a number divisible by this one is written twice."""
STAGES = ("collect", "curate", "tokenize", "index")
STEPS: dict[str, list[dict[str, Any]]] = {
    "exact": [{"step": "exact_dedup"}],
    "minhash": [
        {"step": "gopher_repetition"},
        {"step": "exact_dedup"},
        {"step": "minhash_dedup"},
    ],
}
GROWTH = 1.15
"""Most time per byte at one size, as a multiple of that at the size before, from 1 GB on."""
BATCH = 512


@dataclass
class Measured:
    """Figures of one run of the flow."""

    size: int
    """Bytes of the corpus."""
    seconds: float
    stages: dict[str, float]
    """Seconds by stage, from the manifests."""
    tokens: int
    memory: int
    """Peak in bytes of all processes together."""
    disk: int
    """Peak in bytes on disk, in addition to the corpus."""
    kept: int
    """Bytes on disk at the end, in addition to the corpus."""


@dataclass
class Watch:
    """Thread that reads the memory of a process with its children, and the use of a disk."""

    process: psutil.Process
    folder: Path
    memory: int = 0
    disk: int = 0
    _end: Event = field(default_factory=Event)

    def __enter__(self) -> "Watch":
        self._base = shutil.disk_usage(self.folder).used
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def used(self) -> int:
        """Return the bytes that the disk holds more than at the start."""
        return shutil.disk_usage(self.folder).used - self._base

    def _run(self) -> None:
        while not self._end.wait(0.5):
            self.memory = max(self.memory, sum(map(_proportional, self._processes())))
            self.disk = max(self.disk, self.used())

    def _processes(self) -> list[psutil.Process]:
        try:
            return [self.process, *self.process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:  # it has ended
        return 0


def make_corpus(folder: Path, size: int) -> None:
    """Write JSON Lines files of together at least `size` bytes; the same ones on the same host."""
    lines: list[bytes] = []
    for source in sources([]):
        try:
            text = source.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        lines += [json.dumps(line)[1:-1].encode() for line in text.splitlines() if line.strip()]
    chosen, written, number = random.Random(0), 0, 0
    folder.mkdir()
    while written < size:
        room = min(PART_BYTES, size - written)
        with open(folder / f"part-{written // PART_BYTES:04d}.jsonl", "wb") as file:
            while file.tell() < room:
                line = b'{"text":"%b"}\n' % b"\\n".join(chosen.choices(lines, k=LINES))
                number += 1
                file.write(line * (2 if number % REPEATED == 0 else 1))
            written += file.tell()


def configuration(corpus: Path, size: int, steps: str, vocab: Path, merges: Path) -> dict[str, Any]:
    """Return the configuration of a run whose data stages are measured."""
    return {
        "name": "scale",
        "data": {
            "source": {"kind": "jsonl", "files": [str(corpus / "*.jsonl")]},
            "curate": STEPS[steps],
            "tokenizer": {
                "kind": "gpt2-bpe",
                "vocab_file": str(vocab),
                "merge_file": str(merges),
            },
            "seq_length": 1024,
        },
        "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
        "train": {
            "micro_batch_size": 8,
            "global_batch_size": BATCH,
            "train_iters": max(1, size // 4 // 1024 // BATCH),  # about 4 bytes of text per token
            "eval_iters": 1,
        },
    }


def measure(folder: Path, size: int, steps: str, vocab: Path, merges: Path) -> Measured:
    """Prepare a corpus of `size` bytes in a new workspace, and remove both."""
    corpus, workspace, conf = folder / "corpus", folder / "workspace", folder / "scale.yaml"
    make_corpus(corpus, size)
    os.sync()
    conf.write_text(yaml.safe_dump(configuration(corpus, size, steps, vocab, merges)))
    start = time.monotonic()
    with (
        started("flows.prepare_data", conf, workspace) as flow,
        Watch(psutil.Process(flow.pid), folder) as watch,
    ):
        output, _ = flow.communicate()
        seconds = time.monotonic() - start
        kept = watch.used()
    if flow.returncode:
        raise SystemExit(f"the flow ended with {flow.returncode}:\n{output[-3000:]}")
    manifests = [
        json.loads(path.read_text(encoding="utf-8")) for path in workspace.glob("*/*/manifest.json")
    ]
    stages = {each["stage"]: float(each["duration"]) for each in manifests}
    tokens = next(each["counts"]["tokens"] for each in manifests if each["stage"] == "tokenize")
    shutil.rmtree(corpus)
    shutil.rmtree(workspace)
    return Measured(size, seconds, stages, tokens, watch.memory, watch.disk, kept)


def rows(results: list[Measured]) -> list[list[str]]:
    """Return the rows of the table."""
    return [
        [
            f"{each.size / GB:g}",
            f"{each.seconds:.0f}",
            *(f"{each.stages.get(stage, 0.0):.1f}" for stage in STAGES),
            f"{each.size / 1e6 / each.seconds:.1f}",
            f"{each.tokens / 1e6:,.0f}",
            f"{each.memory / 1e6:,.0f}",
            f"{each.disk / each.size:.2f}",
            f"{each.kept / each.size:.2f}",
        ]
        for each in results
    ]


def plot(results: list[Measured], path: Path) -> None:
    """Draw time and memory over the size of the corpus."""
    import matplotlib.pyplot as plt

    sizes = [each.size / GB for each in results]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.loglog(sizes, [each.seconds for each in results], "o-", label="flow")
    for stage in STAGES:
        left.loglog(sizes, [each.stages.get(stage, 0.0) for each in results], "o--", label=stage)
    highest = max(each.seconds for each in results)
    left.set(xlabel="corpus in GB", ylabel="seconds", ylim=(None, 30 * highest))
    left.legend(loc="upper left", ncols=3)
    right.semilogx(sizes, [each.memory / 1e6 for each in results], "o-")
    top = 1.1 * max(each.memory / 1e6 for each in results)
    right.set(xlabel="corpus in GB", ylabel="peak memory of all processes in MB", ylim=(0, top))
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measure each size, print the table, draw the plot, and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0, 10.0])
    parser.add_argument("--steps", choices=tuple(STEPS), default="exact")
    parser.add_argument("--folder", help="where to write: a directory of a real disk")
    parser.add_argument("--plot", type=Path, help="image of time and memory to write")
    options = parser.parse_args()
    results: list[Measured] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_corpus(folder / "vocabulary", 20_000_000)
        vocab, merges = train(folder / "vocabulary" / "part-0000.jsonl", folder)
        for size in sorted(options.gb):
            results.append(measure(folder, int(size * GB), options.steps, vocab, merges))
            sys.stderr.write(f"{size:g} GB: {results[-1].seconds:.0f} s\n")
    header = ["GB", "seconds", *STAGES, "MB/s", "M tokens", "peak MB", "disk", "kept"]
    sys.stdout.write(table(header, rows(results)))
    sys.stdout.write(
        "\nSeconds of the flow and of its stages; peak memory of all processes; disk at the peak "
        "and at the end as multiples of the corpus.\n"
    )
    if options.plot:
        plot(results, options.plot)
    pairs = [(a, b) for a, b in pairwise(results) if a.size >= GB]
    checks = [
        Check(
            f"time per byte at {b.size / GB:g} GB over {a.size / GB:g} GB",
            b.seconds / b.size / (a.seconds / a.size),
            GROWTH,
            at_most=True,
        )
        for a, b in pairs
    ]
    return verdict("scale", checks)


if __name__ == "__main__":
    sys.exit(main())
