"""Entries of `make bench`, and the blocks of docs/benchmarks.md that it writes."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One benchmark with the arguments of its published figures."""

    arguments: tuple[str, ...]
    """Arguments of `python -m`."""
    title: str
    slow: bool = False
    """True if it takes so much time or memory that only `--all` runs it."""
    gpu: bool = False
    packages: tuple[str, ...] = ("torch",)
    """Packages whose versions affect the figures."""

    @property
    def command(self) -> str:
        """Command line of the benchmark."""
        return f"python -m {' '.join(self.arguments)}"


_STEP = ("torch", "transformers", "accelerate")
_FINETUNE = (*_STEP, "deepspeed")
ENTRIES = {
    "step-tiny-bf16": Entry(
        ("benchmarks.step", "--case", "tiny-bf16"), "Training step, tiny, bf16", packages=_STEP
    ),
    "step-tiny-fp32": Entry(
        ("benchmarks.step", "--case", "tiny-fp32"), "Training step, tiny, fp32", packages=_STEP
    ),
    "step-124m-bf16": Entry(
        ("benchmarks.step", "--case", "124m-bf16"), "Training step, 124M, bf16", packages=_STEP
    ),
    "step-losses": Entry(
        ("benchmarks.step", "--losses", "50"), "Losses in bf16 compared with fp32"
    ),
    "kernels-bf16": Entry(("benchmarks.kernels",), "What each kernel brings, bf16"),
    "kernels-fp32": Entry(
        ("benchmarks.kernels", "--precision", "fp32"), "What each kernel brings, fp32"
    ),
    "masks-bf16": Entry(("benchmarks.masks",), "Separate documents, bf16"),
    "masks-fp32": Entry(("benchmarks.masks", "--precision", "fp32"), "Separate documents, fp32"),
    "layouts": Entry(("benchmarks.layouts", "--rounds", "6"), "One step in several layouts"),
    "scaling": Entry(("benchmarks.scaling",), "Scaling"),
    "orchestration": Entry(
        ("benchmarks.orchestration",), "Orchestration", packages=("torch", "prefect")
    ),
    "hosts": Entry(("benchmarks.hosts",), "Two hosts"),
    "finetune-deberta": Entry(
        ("benchmarks.finetune", "speed", "--model", "deberta"),
        "Fine-tuning, DeBERTa",
        packages=_FINETUNE,
    ),
    "finetune-gpt2": Entry(
        ("benchmarks.finetune", "speed", "--model", "gpt2"),
        "Fine-tuning, GPT-2",
        packages=_FINETUNE,
    ),
    "finetune-batch": Entry(
        ("benchmarks.finetune", "batch", "--model", "deberta"),
        "Largest micro batches",
        slow=True,
        packages=_FINETUNE,
    ),
    "gpu": Entry(("benchmarks.gpu",), "GPT-2 345M on one GPU", gpu=True, packages=_STEP),
    "checkpoint": Entry(
        ("benchmarks.checkpoint", "--rounds", "5"), "Checkpoints, as measured last"
    ),
    "dataset-read": Entry(("benchmarks.dataset_read",), "Reading samples, as measured last"),
    "index-maps": Entry(
        ("benchmarks.index_maps", "--rounds", "3"), "Index maps, as measured last", slow=True
    ),
    "tokenize": Entry(("benchmarks.tokenize",), "Tokenization, as measured last", slow=True),
    "scale": Entry(
        ("benchmarks.scale", "--gb", "0.1", "1"),
        "Preparation of data by size, as measured last",
        slow=True,
        packages=("prefect",),
    ),
    "curation": Entry(
        ("benchmarks.curation", "--plot", "docs/images/curation.png"),
        "Perplexity with and without duplicates",
        slow=True,
    ),
    "generate": Entry(("benchmarks.generate",), "Generation, as measured last", slow=True),
    "calibrated": Entry(
        ("benchmarks.calibrated", "--seconds", "2"),
        "Predicted and measured time of an iteration",
        slow=True,
    ),
    "zero": Entry(
        ("benchmarks.zero", "state", "--rounds", "2", "--steps", "2"),
        "ZeRO and offload, as measured last",
        slow=True,
        packages=("torch", "deepspeed"),
    ),
}
"""Entries by the name of the block in docs/benchmarks.md."""


def chosen(names: list[str], *, everything: bool, has_gpu: bool) -> dict[str, Entry]:
    """Return the entries with these names, or the quick ones if no name is given.

    `step` also selects all names that begin with `step-`.
    """
    if not names:
        return {
            name: entry
            for name, entry in ENTRIES.items()
            if (everything or not entry.slow) and (has_gpu or not entry.gpu)
        }
    selected: dict[str, Entry] = {}
    for requested in names:
        matching = {
            name: entry
            for name, entry in ENTRIES.items()
            if name == requested or name.startswith(f"{requested}-")
        }
        if not matching:
            raise SystemExit(f"there is no benchmark {requested!r}: known are {', '.join(ENTRIES)}")
        selected |= matching
    return selected


def with_block(text: str, name: str, title: str, block: str) -> str:
    """Return the text with the block between its markers, or at the end under a new heading.

    The rest of the text stays.

    Raises ValueError when one marker is missing, or occurs twice.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    marked_block = f"{begin}\n{block.strip()}\n{end}"
    counts = text.count(begin), text.count(end)
    if counts == (0, 0):
        return f"{text.rstrip()}\n\n## {title}\n\n{marked_block}\n"
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(
            f"the text has {counts[0]} x {begin} and {counts[1]} x {end}: leave one of each, in "
            "this order"
        )
    before, rest = text.split(begin)
    return before + marked_block + rest.split(end)[1]


def block(entry: Entry, output: str, state: str, seconds: float) -> str:
    """Return a run's text: command, commit, host and versions, then the printed output."""
    versions = ", ".join(f"{name} {_version(name)}" for name in entry.packages)
    minutes = f"{seconds / 60:.1f} min"
    environment = f"{machine(gpu=entry.gpu)}; Python {platform.python_version()}, {versions}"
    return f"`{entry.command}`, {state}, {minutes}: {environment}.\n\n{output.strip()}"


def commit(root: Path) -> str:
    """Return the checked-out commit, and whether files other than the results differ from it."""
    try:
        changes = _git(
            root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/benchmarks.md"
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return (
        f"commit {_git(root, 'rev-parse', '--short', 'HEAD')}"
        f"{' with uncommitted changes' if changes else ''}"
    )


def machine(*, gpu: bool) -> str:
    """Return processor, cores and memory, or the GPU."""
    if gpu:
        return ", ".join(gpus()) or "no GPU"
    cpuinfo = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    )
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    name = match[1] if match else platform.processor() or platform.machine()
    special = [
        label
        for flag, label in (("avx512f", "AVX-512"), ("avx512_bf16", "bf16"))
        if f" {flag}" in cpuinfo
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    extras = f" ({', '.join(special)})" if special else ""
    return f"{len(os.sched_getaffinity(0))} cores of {name}{extras}, {memory:.0f} GiB"


def gpus() -> list[str]:
    """Return the names of this host's GPUs."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return process.stdout.split("\n")[:-1]


def _git(root: Path, *arguments: str) -> str:
    process = subprocess.run(
        ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return process.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
