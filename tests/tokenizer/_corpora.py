"""Small corpora, tokenizers and Punkt models for the tests of this package."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from megacore.config.data import TrainBpeTokenizer
from megacore.corpus.documents import CorpusWriter
from megacore.token_files.indexed_dataset import IndexedDataset
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.tokenize import TokenizeOptions, tokens_prefix

TEXTS = [
    "",
    "first " * 9,
    "größe 💡",
    "a<|endoftext|>b",
    *(f"value_{i} = {i}\n" * (i % 7) for i in range(60)),
]
STORY = (
    "Mr. Smith went to Washington. He met Dr. Jones there. They talked about the U.S. economy for "
    "hours! Was it useful? Nobody knows.\nThe next day Mr. Smith left. Dr. Jones stayed with Mrs. "
    "Jones.\n\n"
)


def write_corpus(directory: Path, texts: Sequence[str]) -> Path:
    directory.mkdir()
    with CorpusWriter(directory) as writer:
        for text in texts:
            writer.add(text, "test")
    return directory


def train_tokenizer(directory: Path, corpus: Path, vocab_size: int = 280) -> Path:
    directory.mkdir()
    build_tokenizer(TrainBpeTokenizer(kind="train-bpe", vocab_size=vocab_size), [corpus], directory)
    return directory


def documents(directory: Path, options: TokenizeOptions | None = None) -> list[list[list[int]]]:
    """Return the sequences of each stored document."""
    dataset = IndexedDataset(tokens_prefix(directory, options))
    bounds = dataset.document_indices.tolist()
    return [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(bounds)]


def contents(directory: Path) -> dict[str, bytes]:
    """Return the content of all files except documents.json, which contains paths."""
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in (".bin", ".idx")
    }


def train_punkt(directory: Path, language: str = "english") -> Path:
    """Train a Punkt model on a few sentences and write it in the format of nltk's data."""
    from nltk.tabdata import TabEncoder
    from nltk.tokenize.punkt import PunktTrainer

    trainer = PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    trainer.train(STORY * 30)
    parameters, encoder = trainer.get_params(), TabEncoder()
    parameters.abbrev_types |= {"mr", "mrs", "dr", "u.s"}
    folder = directory / "tokenizers" / "punkt_tab" / language
    folder.mkdir(parents=True)
    for name, content in {
        "collocations.tab": encoder.tups2tab(parameters.collocations),
        "sent_starters.txt": encoder.set2txt(parameters.sent_starters),
        "abbrev_types.txt": encoder.set2txt(parameters.abbrev_types),
        "ortho_context.tab": encoder.ivdict2tab(parameters.ortho_context),
    }.items():
        (folder / name).write_text(content, encoding="utf-8")
    return directory
