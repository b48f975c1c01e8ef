"""Stage `push`: the exported model as a repository on the Hugging Face hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_link_artifact

import megacore
from megacore.artifact import Artifact, StageKey
from megacore.artifact.files import read_object, write_json
from megacore.artifact.workspace import MODEL_DIRECTORY
from megacore.config import FinetuneConfig, RunConfig
from megacore.config.keys import key_parameters
from megacore.config.train import HubConfig
from megacore.corpus.fetch import first_sentence
from megacore.corpus.hub import broken_connections
from megacore.errors import ConfigError, HubError, one_line
from tasks._cache import StageResult, build, stage_task
from tasks._logging import shown_in_prefect
from tasks._mlflow import Tracking
from tasks._publication import RECEIPT, read_receipt
from tasks._run_page import show_pushed
from tasks._stage_runner import StageRunner

VERSION = 1
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
"""Files of an earlier upload that are deleted if the new one lacks them: weights in other files."""
_PASSING = (408, 409, 412, 425, 429)
"""Status codes below 500 of answers that a retry may change."""


def check_push(hub: HubConfig) -> None:
    """Refuse an upload that cannot succeed, without asking the hub.

    Raises ConfigError without a token and in offline mode.
    """
    if hub.push_to_hub is None:
        return
    from huggingface_hub import constants, get_token

    request = f"export.push_to_hub is {hub.push_to_hub}, "
    if constants.is_offline_mode():
        raise ConfigError(
            f"{request}but HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, which forbids uploads: "
            "unset it, or set export.push_to_hub to null"
        )
    if not get_token():
        raise ConfigError(
            f"{request}but there is no token for {constants.ENDPOINT}: set HF_TOKEN to a token "
            "with write access, or run `hf auth login`"
        )


def push_key(
    config: RunConfig | FinetuneConfig, trained: Artifact, exported: Artifact, published: Artifact
) -> StageKey:
    """Return the key of an upload: the repository, the export and its version in MLflow."""
    parameters = key_parameters(config, "push")
    return StageKey.of("push", VERSION, parameters, exported=exported, published=published)


@stage_task("push", push_key)
def push(
    config: RunConfig | FinetuneConfig, trained: Artifact, exported: Artifact, published: Artifact
) -> StageResult:
    """Upload the files that the repository lacks, and record its commit in MLflow."""
    check_push(config.export)
    repository = config.export.push_to_hub
    assert repository is not None, "the flows push only to a repository"
    iteration = (trained if isinstance(config, FinetuneConfig) else exported).counts[
        "best_iteration" if isinstance(config, FinetuneConfig) else "iteration"
    ]

    def fill(directory: Path) -> dict[str, Any]:
        receipt = upload(
            exported.directory / MODEL_DIRECTORY,
            repository,
            private=config.export.hub_private,
            message=f"Upload {config.name}: run {trained.directory.name}, iteration {iteration}",
        )
        show_pushed(Tracking.of(config), read_receipt(published.directory), receipt["address"])
        get_run_logger().info("uploaded to %s", receipt["address"])
        write_json(directory / RECEIPT, receipt)
        return receipt

    return build(config, push_key(config, trained, exported, published), fill)


def push_stage(
    pipeline: StageRunner[Any], trained: Artifact, exported: Artifact, published: Artifact
) -> None:
    """Run the stage if the configuration names a repository, and add it to the summary."""
    if pipeline.config.export.push_to_hub is None:
        return
    pipeline.report(_show_commit, pipeline.stage(push, trained, exported, published))


def _show_commit(config: RunConfig | FinetuneConfig, pushed: Artifact) -> str:
    """Link the uploaded commit in the flow run, and return its line of the summary."""
    receipt = read_object(pushed.directory / RECEIPT)
    with shown_in_prefect("the link to the Hugging Face hub"):
        create_link_artifact(
            link=receipt["address"], link_text=receipt["repository"], key="hugging-face-hub"
        )
    return (
        f"\n- Hugging Face hub: [{receipt['repository']}]({receipt['url']}), commit "
        f"[{receipt['commit'][:8]}]({receipt['address']})\n"
    )


def upload(directory: Path, repository: str, *, private: bool, message: str) -> dict[str, str]:
    """Upload a transformers directory to a repository, which is created if absent.

    Unchanged files are not sent again; without a change there is no new commit. A public repository
    is refused if `private` is true. Returns repository, url, commit and address of the commit.

    Raises:
        ConfigError: the token is invalid or has no write access, or the hub refuses the files.
        HubError: the hub did not answer, or failed.
    """
    from huggingface_hub import HfApi

    api = HfApi(library_name="megacore", library_version=megacore.__version__)
    with _hub_errors(repository, api.endpoint):
        url = str(api.create_repo(repository, private=private, exist_ok=True))
        if private and not api.model_info(repository).private:
            raise ConfigError(
                f"{url} is public and export.hub_private is true: make the repository private on "
                "the hub, or set export.hub_private to false"
            )
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=directory,
            commit_message=message,
            commit_description=f"By megacore {megacore.__version__}.",
            delete_patterns=list(_WEIGHTS),
        )
    return {
        "repository": repository,
        "url": url,
        "commit": commit.oid,
        "address": f"{url}/tree/{commit.oid}",
    }


@contextmanager
def _hub_errors(repository: str, endpoint: str) -> Iterator[None]:
    """Translate errors of the hub's client. Raises ConfigError, HubError."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    subject = f"export.push_to_hub is {repository}, but the hub at {endpoint}"
    lost = broken_connections()
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise ConfigError(
            f"{subject} needs a token: set HF_TOKEN, or run `hf auth login`"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = one_line(error.server_message or first_sentence(error)).rstrip(". ")
        if status >= 500 or status in _PASSING:
            raise HubError(f"{subject} answered {status} ({reason}): start again later") from error
        advice = {
            401: "the token is invalid: set HF_TOKEN to a valid one, or run `hf auth login`",
            403: "the token has no write access there: give it this permission, or name another "
            "repository",
        }.get(status, "check the repository's name, its settings and the account's limits")
        raise ConfigError(f"{subject} refused the upload with {status} ({reason}): {advice}") from (
            error
        )
    except lost as error:
        raise HubError(
            f"{subject} cannot be reached ({first_sentence(error)}): start again, which continues "
            "with the upload"
        ) from error
    except RuntimeError as error:  # the client's for a large file, whose cause is any error
        raise HubError(
            f"{subject} did not take the weights ({one_line(error.__cause__ or error, 300)}): "
            "start again, which continues with the upload"
        ) from error
