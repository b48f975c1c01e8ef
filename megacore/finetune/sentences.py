"""The sentences that rougeLsum compares: by the data pipeline's own splitters."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from megacore.artifact.files import workspace_errors
from megacore.errors import DownloadError
from megacore.tokenizer.sentences import SplitterChoice, download_punkt, find_punkt, make_splitter, model_directory

PUNKT = "punkt"
"""Directory of nltk's models, below the artifact of the stage `examples`: no rank downloads anything."""
_LANGUAGE = "english"


def sentence_splitter(kind: Literal["punkt", "rules"], punkt: Path) -> Callable[[str], list[str]]:
    """What divides a text; `punkt` holds nltk's models. Raises DataFormatError when they are damaged."""
    return make_splitter(SplitterChoice(kind, _LANGUAGE, data=str(punkt)))


def store_punkt(directory: Path) -> None:
    """Fill the new `directory` with nltk's models, of this machine or downloaded. Raises DownloadError."""
    found = find_punkt(_LANGUAGE)
    with workspace_errors(directory):
        directory.mkdir()
        if found is not None:
            source = model_directory(found, _LANGUAGE)
            shutil.copytree(source, directory / source.relative_to(found))
            return
    try:
        download_punkt(directory, _LANGUAGE)
    except DownloadError as error:
        raise DownloadError(
            f"task.sentence_splitter is punkt: {str(error).replace('data.sentence_splitter', 'task.sentence_splitter')}"
        ) from error
