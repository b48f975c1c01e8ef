"""A model of the Hugging Face hub: only the files that are used."""

from pathlib import Path

from megacore.config.finetune import PretrainedConfig
from megacore.corpus.hub import broken_connections, disk_errors, first_sentence
from megacore.errors import ConfigError, DownloadError


def download_model(model: PretrainedConfig, cache_directory: Path) -> tuple[Path, str]:
    """The directory with the files of a model that are used, and its commit.

    Raises ConfigError for a model that does not exist, is closed to us, or has no weights that torch reads;
    DownloadError for a lost connection.
    """
    # Imported here: only a model of the hub needs it.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    from megacore.finetune.pretrained import require_weights, used_files

    lost: tuple[type[Exception], ...] = (LocalEntryNotFoundError, HfHubHTTPError, *broken_connections())
    name = model.path if model.revision is None else f"{model.path} at {model.revision}"
    try:
        with disk_errors(cache_directory):
            found = HfApi().model_info(model.path, revision=model.revision)
            names = [file.rfilename for file in found.siblings or ()]
            if not model.random_weights:
                require_weights(model.path, names)
            commit = str(found.sha)
            used = used_files(names, weights=not model.random_weights)
            directory = snapshot_download(
                model.path, revision=commit, allow_patterns=used, cache_dir=str(cache_directory)
            )
        return Path(directory), commit
    except GatedRepoError as error:
        raise ConfigError(
            f"model.path {name} is closed on the hub: accept its terms there and set HF_TOKEN, or give a local "
            "directory"
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"model.revision {model.revision} is none of model.path {model.path} on the hub") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(
            f"model.path {name} is neither a local directory nor a model on the hub (or it is private: set HF_TOKEN)"
        ) from error
    except lost as error:
        raise DownloadError(
            f"model.path {name} cannot be downloaded: {first_sentence(error)}: check the network, or give a local "
            "directory"
        ) from error
    except OSError as error:
        raise DownloadError(f"model.path {name} cannot be downloaded: {first_sentence(error)}: try again") from error
