"""What `make bench` runs, and the blocks of BENCHMARKS.md that it writes."""

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "prefect")
_GIB = 1 << 30


@dataclass(frozen=True)
class Entry:
    """One benchmark with the arguments that its figures have."""

    arguments: tuple[str, ...]
    """Of `python -m`."""
    title: str
    slow: bool = False
    """Whether it takes so long, or needs so much, that only `--all` runs it."""
    gpu: bool = False
    packages: tuple[str, ...] = ("torch",)
    """Whose versions shape the figures."""

    @property
    def command(self) -> str:
        """As a user types it."""
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
    "step-losses": Entry(("benchmarks.step", "--losses", "50"), "Losses in bf16 beside fp32"),
    "kernels-bf16": Entry(("benchmarks.kernels",), "What each kernel brings, bf16"),
    "kernels-fp32": Entry(
        ("benchmarks.kernels", "--precision", "fp32"), "What each kernel brings, fp32"
    ),
    "layouts": Entry(("benchmarks.layouts", "--rounds", "6"), "One step in several layouts"),
    "scaling": Entry(("benchmarks.scaling",), "Scaling"),
    "orchestration": Entry(
        ("benchmarks.orchestration",), "Orchestration", packages=("torch", "prefect")
    ),
    "hosts": Entry(("benchmarks.hosts",), "Two machines"),
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
    "generate": Entry(
        ("benchmarks.generate", "--rounds", "3"), "Generation, as measured last", slow=True
    ),
    "zero": Entry(
        ("benchmarks.zero", "state", "--rounds", "2", "--steps", "2"),
        "ZeRO and offload, as measured last",
        slow=True,
        packages=("torch", "deepspeed"),
    ),
}
"""By the name of the block in BENCHMARKS.md."""


def chosen(names: list[str], *, everything: bool, has_gpu: bool) -> dict[str, Entry]:
    """The entries of these names, where `step` names all that begin with `step-`; without names the
    quick ones."""
    if not names:
        return {
            name: entry
            for name, entry in ENTRIES.items()
            if (everything or not entry.slow) and (has_gpu or not entry.gpu)
        }
    found: dict[str, Entry] = {}
    for wanted in names:
        matching = {
            name: entry
            for name, entry in ENTRIES.items()
            if name == wanted or name.startswith(f"{wanted}-")
        }
        if not matching:
            raise SystemExit(f"there is no benchmark {wanted!r}: known are {', '.join(ENTRIES)}")
        found |= matching
    return found


def with_block(text: str, name: str, title: str, block: str) -> str:
    """The text with the block between its markers, or at the end under a heading of its own.

    All else stays.

    Raises ValueError when a marker is there without the other, or twice.
    """
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    written = f"{begin}\n{block.strip()}\n{end}"
    counts = text.count(begin), text.count(end)
    if counts == (0, 0):
        return f"{text.rstrip()}\n\n## {title}\n\n{written}\n"
    if counts != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(
            f"the text has {counts[0]} x {begin} and {counts[1]} x {end}: leave one of each, in "
            "this order"
        )
    before, rest = text.split(begin)
    return before + written + rest.split(end)[1]


def block(entry: Entry, output: str, state: str, seconds: float) -> str:
    """What is written of a run: command, commit, machine and versions, then what it printed."""
    versions = ", ".join(f"{name} {_version(name)}" for name in entry.packages)
    minutes = f"{seconds / 60:.1f} min"
    here = f"{machine(gpu=entry.gpu)}; Python {platform.python_version()}, {versions}"
    return f"`{entry.command}`, {state}, {minutes}: {here}.\n\n{output.strip()}"


def commit(root: Path) -> str:
    """The commit that is checked out, and whether files differ from it, BENCHMARKS.md left
    aside."""
    try:
        changes = _git(
            root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!BENCHMARKS.md"
        )
    except (OSError, subprocess.CalledProcessError):
        return "no commit"
    return (
        f"commit {_git(root, 'rev-parse', '--short', 'HEAD')}"
        f"{' with uncommitted changes' if changes else ''}"
    )


def machine(*, gpu: bool) -> str:
    """Processor, cores and memory, or the GPU."""
    if gpu:
        return ", ".join(gpus()) or "no GPU"
    text = (
        Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    )
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    special = [
        label
        for flag, label in (("avx512f", "AVX-512"), ("avx512_bf16", "bf16"))
        if f" {flag}" in text
    ]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB
    extras = f" ({', '.join(special)})" if special else ""
    return f"{len(os.sched_getaffinity(0))} cores of {name}{extras}, {memory:.0f} GiB"


def gpus() -> list[str]:
    """Names of this machine's GPUs."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
