"""A tokenizer.json from the Hugging Face hub."""

from pathlib import Path

from megacore.config.tokenizer import HfTokenizer
from megacore.errors import DataFormatError, DownloadError
from megacore.tokenizer.load import TOKENIZER_NAME


def download_tokenizer(choice: HfTokenizer, cache_directory: Path) -> Path:
    """Its file in `cache_directory`, fetched unless it is there. Raises DataFormatError, DownloadError."""
    # Imported here: only a tokenizer of the hub needs it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = choice.name if choice.revision is None else f"{choice.name} at {choice.revision}"
    try:
        return Path(
            hf_hub_download(choice.name, TOKENIZER_NAME, revision=choice.revision, cache_dir=str(cache_directory))
        )
    except LocalEntryNotFoundError as error:
        raise DownloadError(
            f"{TOKENIZER_NAME} of {name} cannot be downloaded: the hub cannot be reached: check the network, or give "
            "a local file as data.tokenizer.name"
        ) from error
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise DataFormatError(
            f"data.tokenizer.name {name} is neither a local file nor a repository of the hub with a {TOKENIZER_NAME}"
        ) from error
    except OSError as error:
        raise DownloadError(f"{TOKENIZER_NAME} of {name} cannot be downloaded: {error}: try again") from error
