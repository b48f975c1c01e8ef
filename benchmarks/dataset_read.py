"""Samples per second that one process reads at random, from tokens in the page cache.

    python -m benchmarks.dataset_read [--megabytes 400] [--micro-batch-size 8] [--rounds 5]
        [--megatron DIR]

All readers take turns on the same samples, and the best round of each is printed, because other
processes only ever slow a round down. The readers are `gather` (one micro batch into one array),
the iterator that training uses (a thread reads ahead), one sample at a time, a loop over
memory-mapped arrays in NumPy, and, if DIR is a checkout of Megatron-LM with a compiled
megatron/core/datasets/helpers.cpp, its GPTDataset. Ratios refer to the last reader in the table.
"""

import argparse
import importlib
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._verdict import Check, verdict
from megacore.config.batch_schedule import BatchSchedule
from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import MAP_NAMES, map_path
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.data.sampler import PrefetchingIterator, micro_batches
from megacore.data.samples import empty_batch
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter

SEED = 1234
VOCAB_SIZE = 50257
SPLIT = "1,0,0"
SLOW_SAMPLES = 40_000
"""Samples of a round for readers of one sample at a time."""
GOALS = {"gather": 500_000.0, "iterator": 200_000.0, "one by one": 45_000.0}
"""Samples per second, at sequences of 1024 tokens."""


@dataclass
class Contestant:
    """One way to read samples."""

    name: str
    read: Callable[[], int]
    """Function that reads some samples and returns their number."""
    rate: float = 0.0
    """Samples per second in the best round."""
    processor_rate: float = 0.0
    """Samples per second of processor time, summed over all threads, in its best round."""

    def run(self) -> None:
        """Run one round."""
        wall, processor = time.perf_counter(), time.process_time()
        samples = self.read()
        self.processor_rate = max(self.processor_rate, samples / (time.process_time() - processor))
        self.rate = max(self.rate, samples / (time.perf_counter() - wall))


def write(directory: Path, megabytes: int, document: int, seq_length: int) -> None:
    """Write tokens (u16) in documents of `document` tokens on average, and maps of one epoch."""
    random = np.random.default_rng(SEED)
    with IndexedDatasetWriter(directory / "tokens", np.uint16) as writer:
        while writer.tokens * 2 < megabytes * 1_000_000:
            ids = random.integers(0, VOCAB_SIZE, random.integers(1, 2 * document), dtype=np.uint16)
            writer.add_document(ids)
    options = IndexOptions(split=SPLIT, seq_length=seq_length, seed=SEED)
    build_index_maps(Mixture.single(str(directory / "tokens")), directory, options, (None, 0, 0))


def ours(dataset: GPTDataset, size: int) -> list[Contestant]:
    """Return megacore's readers."""
    count = len(dataset) // size * size
    batches = [np.arange(first, first + size) for first in range(0, count, size)]
    out = empty_batch(size, dataset.width)

    def gather() -> int:
        for indices in batches:
            dataset.gather(indices, out)
        return count

    def iterate() -> int:
        upcoming = micro_batches(
            0,
            micro_batch_size=size,
            schedule=BatchSchedule(size, size),
            dp_rank=0,
            dp_size=1,
            steps=count // size,
        )
        with PrefetchingIterator(dataset.gather, upcoming) as read:
            return sum(len(batch) for batch in read)

    return [
        Contestant(f"gather, micro batches of {size}", gather),
        Contestant(f"iterator, micro batches of {size}", iterate),
        Contestant("one by one", _one_by_one(dataset, len(dataset))),
    ]


def numpy_loop(directory: Path, seq_length: int) -> Contestant:
    """Return a reader in Python: three memory maps, then a view per document, concatenated."""
    documents, rows, order = (
        np.load(map_path(directory, "train", name), mmap_mode="r") for name in MAP_NAMES
    )
    tokens = np.memmap(directory / "tokens.bin", np.uint16, mode="r")
    index = np.fromfile(directory / "tokens.idx", np.uint8)
    sequences = int(index[18:26].view("<u8")[0])
    lengths = index[34 : 34 + 4 * sequences].view("<i4")
    starts = index[34 + 4 * sequences : 34 + 12 * sequences].view("<i8") // 2

    class Samples:
        def __getitem__(self, number: int) -> Any:
            sample = order[number]
            (first, offset), (last, end) = rows[sample : sample + 2].tolist()
            parts = []
            for position in range(first, last + 1):
                document = documents[position]
                stop = end + 1 if position == last else lengths[document]
                parts.append(tokens[starts[document] + offset : starts[document] + stop])
                offset = 0
            return np.concatenate(parts).astype(np.int64)

    assert len(Samples()[0]) == seq_length + 1
    return Contestant("loop over memory-mapped arrays in NumPy", _one_by_one(Samples(), len(order)))


def megatron(checkout: Path, directory: Path, seq_length: int) -> Contestant:
    """Return Megatron core's data set over the same tokens."""
    # Megatron's packages import GPU libraries in __init__, which its data sets do not need.
    for name in ("megatron", "megatron.core"):
        module = types.ModuleType(name)
        module.__path__ = [str(checkout / name.replace(".", "/"))]
        sys.modules[name] = module
    importlib.import_module("megatron.core.parallel_state")
    core = importlib.import_module("megatron.core.datasets.gpt_dataset")
    split = importlib.import_module("megatron.core.datasets.utils").Split.train
    tokenizer = types.SimpleNamespace(
        vocab_size=VOCAB_SIZE, eod=VOCAB_SIZE - 1, pad=-1, unique_identifiers={}
    )
    config = core.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=seq_length,
        split=SPLIT,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=tokenizer,
        path_to_cache=str(directory / "megatron"),
    )
    tokens = core.GPTDataset.build_low_level_dataset(str(directory / "tokens"), config)
    indices = np.arange(core.GPTDataset.numel_low_level_dataset(tokens), dtype=np.int32)
    dataset = core.GPTDataset(tokens, str(directory / "tokens"), indices, None, split, config)
    ours = GPTDataset(directory / "tokens", directory, "train", seq_length)
    for number in range(100):
        same = np.array_equal(dataset[number]["tokens"], ours[number][:-1])
        assert same, f"sample {number} is not Megatron's"
    return Contestant("Megatron core's GPTDataset", _one_by_one(dataset, len(dataset)))


def table(contestants: list[Contestant]) -> list[str]:
    """Return the rows of a Markdown table."""
    reference = contestants[-1]
    return [
        f"| way to read | samples/s | samples/s of processor time | to {reference.name} |",
        "| --- | ---: | ---: | ---: |",
        *(
            (
                f"| {each.name} | {each.rate:,.0f} | {each.processor_rate:,.0f} | "
                f"{each.rate / reference.rate:.1f} |"
            )
            for each in contestants
        ),
    ]


def checks(contestants: list[Contestant]) -> list[Check]:
    """Return the figures and goals of megacore's readers."""
    return [
        Check(each.name, each.rate, goal, unit="samples/s")
        for each in contestants
        for name, goal in GOALS.items()
        if each.name.startswith(name)
    ]


def main() -> int:
    """Write the data, take turns, print the table and give the verdict."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=400, help="of tokens, at 2 bytes each")
    parser.add_argument("--document", type=int, default=800, help="tokens of a document on average")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megatron", type=Path, help="checkout of Megatron-LM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write(directory, options.megabytes, options.document, options.seq_length)
        dataset = GPTDataset(directory / "tokens", directory, "train", options.seq_length)
        int(dataset.tokens.tokens.sum(dtype=np.int64))  # loads every page into memory
        contestants = [
            *ours(dataset, options.micro_batch_size),
            numpy_loop(directory, options.seq_length),
        ]
        if options.megatron:
            contestants.append(megatron(options.megatron, directory, options.seq_length))
        for _ in range(options.rounds):
            for each in contestants:
                each.run()
        sys.stdout.write("\n".join(table(contestants)) + "\n")
    return verdict("dataset_read", checks(contestants))


def _one_by_one(samples: Any, count: int) -> Callable[[], int]:
    read = min(count, SLOW_SAMPLES)

    def loop() -> int:
        for number in range(read):
            samples[number]
        return read

    return loop


if __name__ == "__main__":
    sys.exit(main())
