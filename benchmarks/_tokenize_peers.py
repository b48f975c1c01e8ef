"""Processes of benchmarks.tokenize: `megacore` with timestamps of its phases, and its peers.

python -m benchmarks._tokenize_peers megacore tokenize ...
python -m benchmarks._tokenize_peers loop|hf CORPUS VOCAB MERGES OUTPUT
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

BLOCK = 32 << 20


def megacore(arguments: list[str]) -> None:
    """Run the command, then print the seconds of its phases since BENCHMARK_STARTED."""
    times = {"start": float(os.environ["BENCHMARK_STARTED"])}
    from megacore import cli
    from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
    from megacore.tokenizer import files, tokenize

    def clocked(
        function: Callable[..., Any], before: str | None, after: str | None
    ) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if before:
                times.setdefault(before, time.time())
            result = function(*args, **options)
            if after:
                times[after] = time.time()
            return result

        return call

    used = vars(tokenize)
    used["read_blocks"] = clocked(used["read_blocks"], "first byte", None)
    used["choose_encoder"] = clocked(used["choose_encoder"], None, "encoder")
    IndexedDatasetWriter._finish = clocked(  # type: ignore[method-assign]
        IndexedDatasetWriter._finish, "encoded", None
    )
    files._publish = clocked(files._publish, None, "published")
    leave = cli._leave

    def report() -> NoReturn:
        from benchmarks.tokenize import PHASES

        points = [
            times[name] for name in ("start", "first byte", "encoder", "encoded", "published")
        ]
        spent = [after - before for before, after in itertools.pairwise(points)]
        sys.stdout.write(f"phases {json.dumps(dict(zip(PHASES, spent, strict=True)))}\n")
        leave()

    cli._leave = report  # ends the process
    sys.argv = ["megacore", *arguments]
    cli.main()


def loop(corpus: str, vocab: str, merges: str, output: str) -> None:
    """Tokenize with a plain loop: parse, encode, write."""
    import gigatoken
    import numpy as np

    tokenizer = gigatoken.Tokenizer.from_json(_backend(vocab, merges).to_str())
    with open(output, "wb") as out:
        for texts in _texts(corpus):
            content = tokenizer.encode_batch(texts).layout.content.data
            out.write(content.astype(np.uint16).data)


def hf(corpus: str, vocab: str, merges: str, output: str) -> None:
    """Tokenize with the library `tokenizers`."""
    import numpy as np

    backend = _backend(vocab, merges)
    with open(output, "wb") as out:
        for texts in _texts(corpus, 1 << 20):
            for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
                out.write(np.array(encoding.ids, np.uint16).data)


def _backend(vocab: str, merges: str) -> Any:
    from megacore.tokenizer.build import read_gpt2_bpe

    return read_gpt2_bpe(Path(vocab), Path(merges))


def _texts(corpus: str, size: int = BLOCK) -> Iterator[list[str]]:
    import orjson

    with open(corpus, "rb") as file:
        while data := file.read(size):
            data += file.readline()
            yield [orjson.loads(line)["text"] for line in data.splitlines()]


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    if kind == "megacore":
        megacore(rest)
    else:
        {"loop": loop, "hf": hf}[kind](*rest)
