"""The splits of a data set of the Hugging Face hub, or of a local copy of one."""

from pathlib import Path
from typing import TYPE_CHECKING

from megacore.config.finetune import HubRows
from megacore.corpus.hub import loading
from megacore.errors import DataFormatError

if TYPE_CHECKING:
    from datasets import Dataset

_MATCHED = "validation_matched"
"""What MNLI of GLUE has in the place of one validation split: texts of the genres of the training split."""


def read_hub(source: HubRows, cache_directory: Path) -> "dict[str, Dataset]":
    """The splits by our names: train, valid and test.

    Raises DataFormatError for a data set or split that does not exist, DownloadError for a lost connection.
    """
    import datasets

    parts = [source.dataset, source.config, source.revision]
    name = "the data set " + " ".join(part for part in parts if part)
    with loading(name, cache_directory):
        known = datasets.get_dataset_split_names(
            source.dataset, source.config, revision=source.revision, cache_dir=str(cache_directory / "datasets")
        )
    valid = source.valid
    if valid == "validation" and valid not in known and _MATCHED in known:
        valid = _MATCHED
    wanted = {"train": source.train, "valid": valid, "test": source.test}
    splits = {}
    for ours, split in wanted.items():
        if split is None:
            continue
        if split not in known:
            others = "" if ours == "train" else " or null"
            raise DataFormatError(
                f"{name} has no split {split!r}, only {', '.join(known)}: set data.source.{ours} to one of them{others}"
            )
        with loading(name, cache_directory):
            splits[ours] = datasets.load_dataset(
                source.dataset,
                source.config,
                split=split,
                revision=source.revision,
                cache_dir=str(cache_directory / "datasets"),
            )
    return splits
