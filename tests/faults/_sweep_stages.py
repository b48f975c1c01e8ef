"""Stages of the sweep over system calls, with small inputs."""

import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from megacore.artifact import Workspace
from megacore.artifact.files import read_object
from megacore.artifact.manifest import file_digest
from megacore.checkpoint.format import complete_checkpoints, latest_complete
from megacore.checkpoint.retain import unnamed_saves
from megacore.config.data import (
    SourceTreeSource,
    TrainBpeTokenizer,
)
from megacore.corpus.collect import collect
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.launch import supervise
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.tokenize import TokenizeOptions, tokenize_corpus
from tests.faults import _data, _sweep_tasks, _training
from tests.faults.sweep import Stage
from tests.tasks.events import EventLog
from tests.train import _runs


def _prepare_tree(inputs: Path) -> None:
    (inputs / "tree").mkdir()
    for number, text in enumerate(_data.texts(12, 60)):
        (inputs / "tree" / f"module_{number}.py").write_text(text, encoding="utf-8")


def _collect(inputs: Path, place: Path) -> None:
    source = SourceTreeSource(kind="source_tree", path=str(inputs / "tree"))
    _data.build(place, "collect", lambda directory: collect(source, directory))


def _prepare_corpus(inputs: Path) -> None:
    _data.write_corpus(inputs / "corpus", 40, 60)
    (inputs / "tokenizer").mkdir()
    build_tokenizer(_BPE, inputs / "corpus", inputs / "tokenizer")


_BPE = TrainBpeTokenizer(kind="train-bpe", vocab_size=270)


def _train_tokenizer(inputs: Path, place: Path) -> None:
    _data.build(
        place, "tokenizer", lambda directory: build_tokenizer(_BPE, inputs / "corpus", directory)
    )


def _tokenize(inputs: Path, place: Path) -> None:
    options = TokenizeOptions(shuffle_seed=7)
    _data.build(
        place,
        "tokenize",
        lambda directory: tokenize_corpus(
            inputs / "corpus", inputs / "tokenizer", directory, options, workers=1
        ),
    )


def _prepare_overwrite(inputs: Path) -> None:
    """Write token files of fewer documents than the input then has."""
    _prepare_corpus(inputs)
    for count in (10, 40):
        lines = [json.dumps({"text": text}) + "\n" for text in _data.texts(count, 60)]
        (inputs / "text.jsonl").write_text("".join(lines), encoding="utf-8")
        if not (inputs / "start").exists():
            _overwrite(inputs, inputs / "start")


def _overwrite(inputs: Path, place: Path) -> None:
    """Run `megacore tokenize --overwrite`."""
    from megacore.cli.tokenize import tokenize

    tokenize(
        [str(inputs / "text.jsonl")],
        str(place / "out"),
        "hf",
        tokenizer_file=str(inputs / "tokenizer" / "tokenizer.json"),
        workers=1,
        overwrite=True,
    )


def _overwritten(inputs: Path, place: Path) -> Any:
    """Return the digests of the files, without the manifest, which has times.

    What a failed deletion leaves is removed by the next command.
    """
    files = _files(inputs, place).items()
    return {name: "manifest" in name or digest for name, digest in files if ".tmp-" not in name}


def _whole_tokens(inputs: Path, place: Path) -> list[str]:
    """Return the files that do not belong to the manifest, if there is an index."""
    if not (place / "out_text_document.idx").exists():
        return []
    files = read_object(place / "out_text_document.manifest.json")["files"]
    return [
        f"{name} is that of other token files"
        for name, entry in files.items()
        if file_digest(place / name) != entry["sha256"]
    ]


def _prepare_tokens(inputs: Path) -> None:
    for number in range(2):
        _data.write_tokens(inputs / f"tokens-{number}" / "tokens_text_document", 60, 40, number)


def _blend(inputs: Path, place: Path) -> None:
    members = [inputs / f"tokens-{number}" for number in range(2)]

    def fill(directory: Path) -> dict[str, int]:
        _data.write_members(directory, members)
        return {"members": 2}

    _data.build(place, "blend", fill)


def _index(inputs: Path, place: Path) -> None:
    mixture = Mixture.blend(
        [Member(str(inputs / f"tokens-{n}" / "tokens_text_document"), n + 1) for n in range(2)]
    )
    options = IndexOptions(split="90,5,5", seq_length=16, seed=3)
    _data.build(
        place,
        "index",
        lambda directory: build_index_maps(mixture, directory, options, (400, 8, 8)),
    )


# train


def _prepare_save(inputs: Path) -> None:
    _training.SAVED_NUMBERS = 1000
    _training.save_checkpoint(
        inputs / "start" / "checkpoints", 1, _training._tensors(1), {"iteration": 1}
    )


def _save(inputs: Path, place: Path, *, background: bool) -> None:
    _training.SAVED_NUMBERS, _training.SAVES = 1000, 3
    (_training._save_in_background if background else _training._save)(inputs, place, 1)


def _save_again(inputs: Path, place: Path) -> None:
    """Replace the only checkpoint."""
    _training.SAVED_NUMBERS = 1000
    root = place / "checkpoints"
    _training._remove_remains(root)
    _training.save_checkpoint(root, 1, _training._tensors(2), {"iteration": 1})


def _visible_again(inputs: Path, place: Path) -> list[str]:
    """Return problems; a checkpoint that the next start gives its name is not lost."""
    if unnamed_saves(place / "checkpoints"):
        return _training.visible(inputs, place)
    return _visible_checkpoints(inputs, place)


def _visible_checkpoints(inputs: Path, place: Path) -> list[str]:
    lost = [] if complete_checkpoints(place / "checkpoints", "full") else ["no checkpoint is left"]
    return lost + _training.visible(inputs, place)


def _train(inputs: Path, place: Path) -> None:
    _training.ITERATIONS = 4
    config = _runs.config(
        optim={"lr_decay_iters": 4},
        train={"train_iters": 4, "eval_interval": 4, "eval_iters": 1},
        checkpoint={"save_interval": 2, "keep_last": 1},
        launch={"nproc_per_node": 1, "stop_grace": 2.0, "retries": 0},
    )
    job = _runs.job(config, inputs / "data", place)
    supervise._prepare(place / "train.log", Path(job.exit_directory))
    job.write(place / "run.json")
    _training.pretrain(job)


def _trained(inputs: Path, place: Path) -> Any:
    _training.ITERATIONS = 4
    return _training.trained(inputs, place)


# conversion


def _prepare_import(inputs: Path) -> None:
    """Write a transformers directory, and a checkpoint that names its model."""
    from megacore.cli.convert import import_

    _training._prepare_export(inputs)
    _export(inputs, inputs)
    (directory,) = _data.artifacts(inputs)
    (directory / "model").rename(inputs / "hf")
    import_(inputs / "checkpoint", inputs / "hf", None, None, None)


def _export(inputs: Path, place: Path) -> None:
    _training._export(inputs, place, 1)


def _prepare_export_again(inputs: Path) -> None:
    """Write a checkpoint, and an export of it that was damaged."""
    _training._prepare_export(inputs)
    _export(inputs, inputs / "start")
    (directory,) = _data.artifacts(inputs / "start")
    weights = directory / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")


def _export_files(inputs: Path, place: Path) -> None:
    """Run `megacore export`, without the comparison; a complete output is left."""
    from megacore.cli.convert import export

    if not (place / "out").exists():
        export(inputs / "checkpoint", place / "out", "hf", None, None, None, None)


def _import(inputs: Path, place: Path) -> None:
    """Run `megacore import`; a complete output is left, like the command leaves it."""
    from megacore.cli.convert import import_

    if not (place / "out").exists():
        import_(place / "out", inputs / "hf", None, None, None)


def _files(inputs: Path, place: Path) -> dict[str, str]:
    return {
        str(path.relative_to(place)): "" if path.is_dir() else file_digest(path)
        for path in sorted(place.rglob("*"))
    }


def _imported(inputs: Path, place: Path) -> Any:
    return _files(inputs, place)


def _whole_import(inputs: Path, place: Path) -> list[str]:
    if not (place / "out").exists():
        return []
    complete = latest_complete(place / "out", log=lambda _: None)
    return [] if complete and (place / "out" / "import.json").exists() else ["a partial import"]


def _whole_export(inputs: Path, place: Path) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (place / "out").exists():
        AutoModelForCausalLM.from_pretrained(place / "out")
        AutoTokenizer.from_pretrained(place / "out")
    return []


# clean


def _prepare_clean(inputs: Path) -> None:
    workspace = Workspace(inputs / "start")
    folder = workspace.folder("tokenize")
    for number in range(2):
        temporary = folder / f"aaaa{number}.tmp-1"
        temporary.mkdir(parents=True)
        (temporary / "file").write_text("partial")
    saving = workspace.folder("train") / "cccc" / "checkpoints" / "iter_0000010.tmp-0"
    saving.mkdir(parents=True)
    (saving / "file").write_text("partial")
    for number in range(2):
        artifact, _ = _data.build_artifact(
            workspace.folder("collect"), _data.StageKey("collect", 1, {"n": number}, {}), _one_file
        )
        if number:
            moment = time.time() - 30 * 86400
            os.utime(artifact.directory, (moment, moment))


def _one_file(directory: Path) -> dict[str, int]:
    (directory / "file").write_text("content")
    return {}


def _clean(inputs: Path, place: Path) -> None:
    from megacore.cli.workspace import clean

    clean(place, 7.0, False)


def _visible_clean(inputs: Path, place: Path) -> list[str]:
    folder = Workspace(place).folder("collect")
    problems = []
    for path in folder.iterdir():
        if ".tmp-" not in path.name and not path.name.startswith("."):
            try:
                _data.open_artifact(path, "full")
            except _data.ArtifactError as error:
                problems.append(str(error))
    return problems


def _cleaned(inputs: Path, place: Path) -> Any:
    return [name for name in _files(inputs, place) if not Path(name).name.startswith(".")]


# publish


def _prepare_publish(inputs: Path) -> None:
    """Write an export, a training's events and an empty MLflow store."""
    from tasks._mlflow import Tracking

    _training._prepare_export(inputs)
    _export(inputs, inputs)
    run = inputs / "start" / "runs" / RUN
    run.mkdir(parents=True)
    log = EventLog(run / "events.jsonl")
    log.start()
    for iteration in (1, 2):
        log.step(iteration)
    log.evaluation(2)
    assert Tracking(Workspace(inputs / "start"), "test").client.search_experiments()


RUN = "0123456789abcdef"


def _publish(inputs: Path, place: Path) -> None:
    """Send the run and the export to MLflow and write the receipt, without Prefect's logger."""
    from tasks import _cache, _publication, _registry
    from tasks._mlflow import RunFacts, Tracking
    from tests.tasks.conftest import make_config

    os.environ["MEGACORE_WORKSPACE"] = str(place)
    for module in (_cache, _publication):
        module.get_run_logger = lambda: logging.getLogger("publish")
    config = make_config()
    (export,) = _data.artifacts(inputs)

    def send(tracking: Tracking, run_id: str) -> dict[str, str]:
        return _registry.publish_model(
            tracking,
            run_id,
            export,
            config.registered_model,
            digest="d" * 64,
            iteration=2,
            metrics={"test_ppl": 99.5},
            tags={"run": RUN},
        )

    key = _data.StageKey("publish", 1, {}, {})
    facts = RunFacts(RUN, {}, {})
    _publication.build_publication(config, key, place / "runs" / RUN, lambda: facts, send)


def _published(inputs: Path, place: Path) -> Any:
    """Return what the store has, without its random ids and times."""
    from tasks._mlflow import Tracking

    client = Tracking(Workspace(place), "pretrain").client
    (version,) = client.search_model_versions("name = 'gpt2-test.v1'")
    (run,) = client.search_runs([client.get_experiment_by_name("pretrain").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/lm_loss")
    (receipt,) = place.glob(f"{Workspace(place).folder('publish').name}/*/receipt.json")
    hidden = ("MLmodel", ".artifact.uploading.")  # ids and times; what a killed MLflow leaves
    return {
        "points": [(point.step, point.value) for point in history],
        "metrics": run.data.metrics,
        "status": run.info.status,
        "receipt": json.loads(receipt.read_text())["version"],
        "digest": version.tags["model_digest"],
        "files": sorted(
            f"{path.name} {file_digest(path)}"
            for path in Workspace(place).mlflow_artifacts.rglob("*")
            if path.is_file() and not path.name.startswith(hidden)
        ),
        "temporaries": [  # `megacore clean` removes those in the root
            path.name for path in place.rglob("*.tmp-*") if path.parent != place
        ],
    }


def _whole_publication(inputs: Path, place: Path) -> list[str]:
    return [
        f"{path} was lost"
        for path in (place / "runs" / RUN / "events.jsonl", place / "mlflow.db")
        if not path.exists()
    ]


STAGES = (
    Stage("collect", _prepare_tree, _collect, _data.result, _data.visible),
    Stage("tokenizer", _prepare_corpus, _train_tokenizer, _data.result, _data.visible),
    Stage("tokenize", _prepare_corpus, _tokenize, _data.result, _data.visible),
    Stage("tokenize-overwrite", _prepare_overwrite, _overwrite, _overwritten, _whole_tokens),
    Stage("blend", _prepare_tokens, _blend, _data.result, _data.visible),
    Stage("index", _prepare_tokens, _index, _data.result, _data.visible),
    Stage(
        "save",
        _prepare_save,
        partial(_save, background=False),
        _training._saved,
        _visible_checkpoints,
    ),
    Stage(
        "save-async",
        _prepare_save,
        partial(_save, background=True),
        _training._saved,
        _visible_checkpoints,
    ),
    Stage("save-again", _prepare_save, _save_again, _training._saved, _visible_again),
    Stage("train", _training._prepare, _train, _trained, _training.visible),
    Stage("export", _training._prepare_export, _export, _training._exported, _data.visible),
    Stage(
        "export-again",
        _prepare_export_again,
        _export,
        _training._exported,
        partial(_data.new_problems, _data.visible),
    ),
    Stage("export-files", _prepare_import, _export_files, _files, _whole_export),
    Stage("import", _prepare_import, _import, _imported, _whole_import),
    Stage("publish", _prepare_publish, _publish, _published, _whole_publication, "mlflow.db"),
    Stage("publish-store", _prepare_publish, _publish, _published, _whole_publication),
    Stage("clean", _prepare_clean, _clean, _cleaned, _visible_clean),
    *_sweep_tasks.STAGES,
)
