"""What data sets of whole sentences have in common: sentences, and a map of which of them make up each sample.

A sample is a function of the seed and its number alone: reading order, ranks and resumption change nothing.
"""

from pathlib import Path

from megacore.data.index_directory import SENTENCE_MAP_NAME, map_path
from megacore.data.mapped_dataset import MappedDataset
from megacore.data.sentence_maps import load_sentence_map


class SentenceDataset(MappedDataset):
    """One split as an array of samples; what these are, subclasses say.

    Everything is memory-mapped and checked when it is opened. Raises DataFormatError for maps that are missing,
    damaged, or made for other sentences or another seq_length.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        *,
        seq_length: int,
        width: int,
        special_tokens: int,
    ) -> None:
        """Open the sentences of `prefix` and the split's map in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx, a sequence per sentence.
            index_directory: where the map is.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            width: ids of a row.
            special_tokens: how many of these a sample has besides its sentences.
        """
        path = map_path(index_directory, split_name, SENTENCE_MAP_NAME)
        super().__init__(prefix, path, seq_length=seq_length, width=width)
        self._rows = load_sentence_map(index_directory, split_name, self.tokens, seq_length - special_tokens)

    def __len__(self) -> int:
        return len(self._rows)

    def _unreadable(self, sample: int) -> str:
        return (
            f"{self._path}: sample {sample} cannot be read from {self.tokens.prefix}: it has too few sentences, or "
            "token ids that the vocabulary does not have; use the tokenizer that the tokens were made with, or build "
            "the index maps again"
        )
