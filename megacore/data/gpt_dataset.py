"""Data set of samples for a causal language model, read from tokens through index maps."""

from pathlib import Path
from typing import Any

import numpy.typing as npt

from megacore.config.data import Packing
from megacore.data._compiled import Gatherer
from megacore.data.index_directory import MAP_NAMES, check_form, check_range, load_map, map_path
from megacore.data.samples import MappedDataset
from megacore.errors import DataFormatError


class GPTDataset(MappedDataset):
    """Samples of one split: s + 1 tokens, that is s inputs and their labels shifted by one.

    Shorter samples are padded with -1: the last position without `add_extra_token`, the rest of a
    sample of whole documents, and the end of the last sample with `keeps_partial`. All files are
    memory-mapped and checked on opening. Raises DataFormatError for maps that are missing, damaged,
    or built for other tokens or another seq_length.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        seq_length: int,
        *,
        packing: Packing = "packed",
        add_extra_token: bool = True,
        keeps_partial: bool = False,
    ) -> None:
        """Open the tokens of `prefix` and the split's maps in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx.
            index_directory: directory of the maps.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            packing: division of documents into samples, see `megacore.data.index_plans`.
            add_extra_token: True if a sample has a token beyond s as its last label.
            keeps_partial: True if the last sample may be shorter.
        """
        self._paths = [map_path(index_directory, split_name, name) for name in MAP_NAMES]
        super().__init__(prefix, self._paths[2], seq_length=seq_length, width=seq_length + 1)
        self._length = f"{seq_length} + {int(add_extra_token)}"
        document_index, sample_index, self._shuffle_index = maps = [
            load_map(path) for path in self._paths
        ]
        self._check(maps, whole_documents=packing != "packed")
        self._sampler = Gatherer(
            tokens=self.tokens.tokens,
            pointers=self.tokens.pointers,
            document_index=document_index,
            sample_index=sample_index,
            shuffle_index=self._shuffle_index,
            seq_length=seq_length,
            extra=int(add_extra_token),
            whole_documents=packing != "packed",
            short_last=keeps_partial,
            best_fit=packing == "best_fit",
        )

    def __len__(self) -> int:
        return len(self._shuffle_index)

    def _unreadable(self, sample: int) -> str:
        return (
            f"{self._paths[1]}: sample {sample} does not have {self._length} tokens: the maps were "
            "built for another data.seq_length or other tokens; build them again"
        )

    def _check(self, maps: list[npt.NDArray[Any]], *, whole_documents: bool) -> None:
        """Check types, shapes and value ranges of the maps.

        Raises DataFormatError.
        """
        document, sample, shuffle = maps
        for path, values, dimensions in zip(self._paths, maps, (1, 2, 1), strict=True):
            check_form(path, values, dimensions)
        if sample.shape != (len(shuffle) + 1, 2):
            raise DataFormatError(
                f"{self._paths[1]} has shape {sample.shape}, but {self._paths[2].name} has "
                f"{len(shuffle)} samples: build the index maps again"
            )
        # Samples of whole documents end at the start of the next document. For the last sample that
        # is one past the last document.
        positions = max(len(document) + whole_documents, 1)
        limits = (len(self.tokens), positions, len(shuffle))
        for path, values, limit in zip(
            self._paths, (document, sample[:, 0], shuffle), limits, strict=True
        ):
            check_range(path, values, limit, f"it was not built for {self.tokens.prefix}")
