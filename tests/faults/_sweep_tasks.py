"""Stages of the sweep that are tasks of the flows: data, scores, reports and publication.

Each runs in one process: without Prefect's server, and with the work of the ranks in place of their
start.
"""

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from megacore.artifact import Artifact, Manifest, StageKey, Workspace, open_artifact
from megacore.artifact.build import build_artifact, seal
from megacore.artifact.files import access_errors, read_object
from megacore.artifact.manifest import file_digest
from megacore.artifact.workspace import FOLDERS, RESULT_FILE
from megacore.checkpoint.format import complete_checkpoints
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import MODEL_KEY
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.corpus.documents import CorpusWriter
from megacore.data.index_maps import IndexOptions, Mixture, build_index_maps
from megacore.errors import ArtifactError, MegacoreError
from megacore.launch import supervise
from megacore.ranks import stages
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.tokenizer import load_tokenizer
from megacore.tokenizer.build import build_tokenizer
from tests.convert._tiny import documents, random_model, tiny_config
from tests.corpus._server import Site, serve
from tests.faults import _data, _training
from tests.faults.sweep import Stage
from tests.tasks.events import EventLog
from tests.zeroshot import _texts

RUN = "0123456789abcdef"
ITERATIONS = (5, 10)


def _begin(place: Path) -> None:
    """Make the tasks use `place` as the workspace, and Python's log instead of Prefect's."""
    import tasks.compare
    import tasks.curate
    import tasks.finetune_export
    import tasks.finetune_publish
    import tasks.lm_eval
    import tasks.publish

    os.environ["MEGACORE_WORKSPACE"] = str(place)
    for name, module in list(sys.modules.items()):
        if name.startswith("tasks.") and hasattr(module, "get_run_logger"):
            module.get_run_logger = lambda: logging.getLogger("sweep")
    for module in (tasks.compare, tasks.curate):
        for name in ("create_table_artifact", "create_markdown_artifact"):
            if hasattr(module, name):
                setattr(module, name, lambda *arguments, **values: None)


def _started(job: Any, scratch: Path) -> None:
    """Write what the start of ranks writes."""
    job.write(scratch / "job.json")
    supervise._prepare(scratch / "ranks.log", Path(job.exit_directory))


def _artifacts(place: Path) -> Iterator[Path]:
    """Yield the directories in a workspace that a reader accepts as artifacts."""
    for folder in sorted(set(FOLDERS.values()) - {"runs", "finetuned"}):
        for path in sorted((place / folder).glob("*")):
            if path.is_dir() and not path.name.startswith(".") and ".tmp-" not in path.name:
                yield path


def _visible(inputs: Path, place: Path) -> list[str]:
    """Return the problems of artifacts that are not complete, and of a run that is lost."""
    problems = []
    for path in _artifacts(place):
        try:
            open_artifact(path, "full")
        except ArtifactError as error:
            problems.append(str(error))
    for path in (inputs / "start").rglob("*"):
        kept = place / path.relative_to(inputs / "start")
        if path.is_file() and not kept.is_file():
            problems.append(f"{kept} was lost")
    return problems


def _result(inputs: Path, place: Path) -> Any:
    """Return the digests of the files of all artifacts, and the names of temporaries."""
    return {
        f"{path.parent.name}/{name}": entry.sha256
        for path in _artifacts(place)
        for name, entry in Manifest.read(path).files.items()
    } | {"temporaries": _temporaries(place)}


def _temporaries(place: Path) -> list[str]:
    """Return the names of temporaries, without those that `megacore clean` removes."""
    return sorted(path.name for path in place.rglob("*.tmp-*") if path.parent != place)


# download, curate


def _prepare_download(inputs: Path) -> None:
    with open(inputs / "text.jsonl", "w", encoding="utf-8") as file:
        for text in _data.texts(40, 60):
            file.write(json.dumps({"text": text}) + "\n")
    with _serve(inputs):  # keeps the port that it gets
        pass


@contextmanager
def _serve(inputs: Path) -> Iterator[None]:
    """Serve the input over HTTP from this process, always on the same port."""
    files = {"/text.jsonl": (inputs / "text.jsonl").read_bytes()}
    port = inputs / "port"
    number = int(port.read_text(encoding="ascii")) if port.exists() else 0
    with serve(Site(files), port=number) as site:
        port.write_text(site.url.rpartition(":")[2], encoding="ascii")
        (inputs / "url").write_text(f"{site.url}/text.jsonl", encoding="ascii")
        yield


def _download(inputs: Path, place: Path) -> None:
    from tasks.collect import collect

    _begin(place)
    config = _with(data={"source": _data._source(inputs).model_dump(mode="json")})
    with _serve(inputs):
        collect.fn(config, config.data.sources[0])


def _visible_download(inputs: Path, place: Path) -> list[str]:
    return _visible(inputs, place) + _data._visible_download(inputs, place)


def _prepare_curate(inputs: Path) -> None:
    def fill(directory: Path) -> dict[str, Any]:
        with CorpusWriter(directory) as writer:
            for number, text in enumerate(_data.texts(60, 60)):
                writer.add(text, f"document {number}")
        size = sum(path.stat().st_size for path in directory.iterdir())
        return {"documents": 60, "bytes": size}

    build_artifact(inputs / "corpora", StageKey("collect", 1, {}, {}), fill)


def _curate(inputs: Path, place: Path) -> None:
    from tasks.curate import curate

    _begin(place)
    (corpus,) = (path for path in (inputs / "corpora").iterdir() if path.is_dir())
    config = _with(
        data={
            "curate": [{"step": "exact_dedup"}],
            "curate_workers": 1,
        }
    )
    curate.fn(config, open_artifact(corpus))


# scores of checkpoints


def _with(**sections: dict[str, Any]) -> RunConfig:
    """Return the configuration of the runs with other values in some sections."""
    values = tiny_config(max_position_embeddings=64).model_dump(mode="json")
    values["launch"] = values["launch"] | {"nproc_per_node": 1, "threads_per_rank": 1}
    values["train"] = values["train"] | {"precision": "fp32", "train_iters": ITERATIONS[-1]}
    for name, section in sections.items():
        values[name] = values[name] | section
    values["data"] = {name: value for name, value in values["data"].items() if value is not None}
    return parse_config(values, origin="sweep")


def _sealed(directory: Path, stage: str, counts: dict[str, Any], **values: Any) -> Artifact:
    seal(directory, StageKey(stage, 1, {}, {}), counts, 0.0, **values)
    return open_artifact(directory)


def _prepare_run(inputs: Path) -> None:
    """Write the data of a run, the run with two checkpoints, texts and an empty MLflow store."""
    from tasks._mlflow import Tracking
    from tasks.train import SEALED

    config = _with()
    for name in ("corpus", "tokenizer", "tokens", "index"):
        (inputs / name).mkdir()
    with CorpusWriter(inputs / "corpus") as corpus:
        for number, text in enumerate(documents()):
            corpus.add(text, f"document {number}")
    counts = build_tokenizer(config.data.tokenizer, inputs / "corpus", inputs / "tokenizer")
    _sealed(inputs / "tokenizer", "tokenizer", counts)
    tokenizer = load_tokenizer(inputs / "tokenizer")
    prefix = inputs / "tokens" / "tokens_text_document"
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for ids in tokenizer.encode_batch(documents()):
            writer.add_document([*ids.tolist(), tokenizer.eod_id])
    _sealed(inputs / "tokens", "tokenize", {"tokens": 1000})
    options = IndexOptions(
        split=config.data.split_weights, seq_length=config.data.seq_length, seed=config.seed
    )
    maps = build_index_maps(Mixture.single(str(prefix)), inputs / "index", options, (40, 8, None))
    _sealed(inputs / "index", "index", dict(maps))
    run = inputs / "start" / "runs" / RUN
    spec = ModelSpec.of(config, counts["vocab_size"], SpecialTokens(**counts["special_tokens"]))
    model = random_model(config, counts["vocab_size"])
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    state = {MODEL_KEY: spec.model_dump(mode="json")}
    log = EventLog(run / "events.jsonl")
    run.mkdir(parents=True)
    log.start()
    for iteration in ITERATIONS:
        save_checkpoint(run / "checkpoints", iteration, tensors, {"iteration": iteration, **state})
        log.step(iteration)
        log.checkpoint(iteration, 3.0)
    _sealed(run, "train", {"iterations": ITERATIONS[-1], "checkpoints": []}, pattern=SEALED)
    _texts.write_wikitext(inputs / "wikitext", 300)
    assert Tracking(Workspace(inputs / "start"), "test").client.search_experiments()


def _data_of(inputs: Path) -> Any:
    """Return tokens, tokenizer and index maps."""
    from tasks.index import RunData

    tokens, tokenizer, index = (
        open_artifact(inputs / name) for name in ("tokens", "tokenizer", "index")
    )
    return RunData(tokens, tokenizer, index)


def _evaluate(inputs: Path, place: Path) -> None:
    """Score both checkpoints and the unigram model, and write the report."""
    from megacore.ranks.evaluate import UNIGRAM, evaluate_checkpoints
    from tasks import evaluate as module

    def run_ranks(job: Any, scratch: Path, on_poll: Callable[[], None]) -> None:
        _started(job, scratch)
        evaluate_checkpoints(job)

    _begin(place)
    stages.evaluate = run_ranks
    config, run = _with(), place / "runs" / RUN
    data = _data_of(inputs)
    with module.kept_checkpoints(run) as kept:
        targets = (*kept, module.Target(UNIGRAM))
        with module.Scoring(config, run, targets, data) as scoring:
            rows = [
                module.evaluate_checkpoint.fn(config, data.index, target, scoring).artifact
                for target in targets
            ]
    module.evaluate.fn(config, open_artifact(run), rows[-1], tuple(rows[:-1]))


def _here(run_rank: Callable[[Any], None]) -> Callable[..., dict[str, Any]]:
    """Return a function in place of `run_job` that does the work of the rank."""

    def run_job(module: str, job: Any, scratch: Path, **values: Any) -> dict[str, Any]:
        _started(job, scratch)
        run_rank(job)
        return read_object(Path(job.output))

    return run_job


def _scored_run(inputs: Path, place: Path) -> Any:
    from tasks.zeroshot import ScoredRun

    return ScoredRun(place / "runs" / RUN, True, _data_of(inputs))


def _zeroshot(inputs: Path, place: Path) -> None:
    from megacore.ranks.zeroshot import evaluate_zero_shot
    from tasks import evaluate, zeroshot

    _begin(place)
    zeroshot.run_job = _here(evaluate_zero_shot)
    config = _with(evaluate={"zero_shot": {"wikitext": str(inputs / "wikitext")}})
    with evaluate.kept_checkpoints(place / "runs" / RUN) as kept:
        zeroshot.zeroshot_checkpoint.fn(
            config, open_artifact(inputs / "tokenizer"), kept[-1], _scored_run(inputs, place)
        )


def _prepare_lm_eval(inputs: Path) -> None:
    from tests.zeroshot.test_harness import write_model, write_task

    _prepare_run(inputs)
    write_model(inputs / "export" / "model")
    _sealed(inputs / "export", "convert", {"checkpoint": "iter_0000010", "iteration": 10})
    write_task(inputs / "tasks")


def _lm_eval(inputs: Path, place: Path) -> None:
    from megacore.ranks.lm_eval import score_export
    from tasks import lm_eval

    _begin(place)
    lm_eval.run_job = _here(score_export)
    harness = {"tasks": ["colours"], "include_path": str(inputs / "tasks")}
    config = _with(evaluate={"lm_eval": harness})
    lm_eval.lm_eval.fn(config, open_artifact(inputs / "export"), _scored_run(inputs, place))


def _scored(inputs: Path, place: Path) -> Any:
    """Return the artifacts, and the scores in MLflow."""
    from tasks._mlflow import Tracking

    client = Tracking(Workspace(place), "pretrain").client
    (run,) = client.search_runs([client.get_experiment_by_name("pretrain").experiment_id])
    return _result(inputs, place) | {"metrics": run.data.metrics, "status": run.info.status}


# report


def _prepare_report(inputs: Path) -> None:
    _prepare_run(inputs)
    score = {"checkpoints": [], "unigram": {"valid": 812.4, "test": 833.1}}
    for iteration in ITERATIONS:
        row = {"checkpoint": f"iter_{iteration:07d}", "iteration": iteration}
        score["checkpoints"].append(row | {"valid_ppl": 90.25, "test_ppl": 91.5})
    counts = {"iteration": ITERATIONS[-1], "test_ppl": 91.5}
    for name, file, content in (
        ("evaluation", "evaluation.json", json.dumps(score)),
        ("export", "sample.txt", "def f(x):\n"),
    ):
        (inputs / name).mkdir()
        (inputs / name / file).write_text(content, encoding="utf-8")
        _sealed(inputs / name, "evaluate", counts)


def _report(inputs: Path, place: Path) -> None:
    """Draw the pictures and write the report, as the publication does before it sends them."""
    from tasks import publish

    _begin(place)
    publish._log_evaluation = lambda *arguments: None
    publish.publish_model = lambda *arguments, pictures, report, **values: {
        "pictures": [path.name for path in pictures],
        "report": report.name,
    }
    config, run = _with(), open_artifact(place / "runs" / RUN)
    evaluation, export = (open_artifact(inputs / name) for name in ("evaluation", "export"))

    def fill(directory: Path) -> dict[str, Any]:
        artifacts = publish._Inputs(run, evaluation, export, _data_of(inputs), (), None)
        sent = publish._send(config, None, "run", artifacts)
        (directory / "sent.json").write_text(json.dumps(sent), encoding="utf-8")
        return {}

    build_artifact(place / "published", StageKey("publish", 1, {}, {}), fill, verify="full")


def _reported(inputs: Path, place: Path) -> Any:
    """Return the artifacts, and True if the whole page is there."""
    page = (place / "runs" / RUN / "report.html").read_text(encoding="utf-8")
    return _result(inputs, place) | {"page": page.rstrip().endswith("</html>")}


# compare


def _prepare_records(inputs: Path) -> None:
    from tests.compare._runs import Written, since, write

    write(inputs / "a", Written(), inputs / "data")
    write(inputs / "b", Written({"seed": 7}, noise=since(1)), inputs / "data")


def _prepare_compare(inputs: Path) -> None:
    from tasks._mlflow import Tracking

    _prepare_records(inputs)
    assert Tracking(Workspace(inputs / "start"), "test").client.search_experiments()


def _compare(inputs: Path, place: Path) -> None:
    from tasks import compare

    _begin(place)
    compare.prepare_environment = lambda: None
    compare.compare.fn(str(inputs / "a"), str(inputs / "b"))


def _compared(inputs: Path, place: Path) -> Any:
    """Return True if MLflow has a finished run with the whole report.

    A run that was stopped stays there, too: each comparison is a run.
    """
    from tasks._mlflow import Tracking
    from tasks.compare import EXPERIMENT, REPORT

    client = Tracking(Workspace(place), EXPERIMENT).client
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    whole = [
        json.loads(Path(client.download_artifacts(run.info.run_id, REPORT)).read_text())["causes"]
        for run in runs
        if run.info.status == "FINISHED"
    ]
    return {"causes": whole[0], "temporaries": _temporaries(place)}


def _compare_files(inputs: Path, place: Path) -> None:
    """Run `megacore compare --json`, and raise the error that it prints."""
    import typer

    from megacore.cli.compare import NOT_COMPARABLE, compare

    options = (None, None, None, 64, 2, 1234, 1e-4, False, place / "compare.json", place)
    try:
        with redirect_stderr(StringIO()) as printed:
            compare(str(inputs / "a"), str(inputs / "b"), *options)
    except typer.Exit as end:
        if end.exit_code == NOT_COMPARABLE:
            raise MegacoreError(printed.getvalue().rstrip("\n")) from end


def _compared_files(inputs: Path, place: Path) -> Any:
    report = json.loads((place / "compare.json").read_text(encoding="utf-8"))
    return {"causes": report["causes"], "files": sorted(path.name for path in place.iterdir())}


# fine-tuning


def _prepare_finetuned(inputs: Path) -> None:
    """Write a fine-tuned run, the artifacts it was made of, its export and an MLflow store."""
    from tasks._mlflow import Tracking
    from tasks.train import SEALED
    from tests.finetune import _tiny_task

    pretrained, examples = inputs / "pretrained", inputs / "examples"
    _tiny_task.write_model(pretrained / "model")
    _sealed(pretrained, "pretrained", {})
    examples.mkdir()
    (examples / "train").write_text("samples", encoding="utf-8")
    _sealed(examples, "examples", {"train": 22})
    place = inputs / "start" / "finetuned" / RUN
    config = _finetune_config(inputs)
    task = _tiny_task.TinyTask(pretrained / "model")
    _tiny_task.run(config, task, place)
    (best,) = (place / "best").glob("iter_*")
    recorded = json.loads((best / "metrics.json").read_text(encoding="utf-8"))
    counts = {
        "iterations": 12,
        "epochs": 2,
        "best": f"best/{best.name}",
        "best_iteration": int(best.name.removeprefix("iter_")),
        "metric": "loss",
        "value": recorded["metrics"]["loss"],
        "metrics": recorded["metrics"],
        "test_metrics": None,
        "start_metrics": recorded["start_metrics"],
    }
    _sealed(place, "finetune", counts, pattern=SEALED)
    assert Tracking(Workspace(inputs / "start"), "test").client.search_experiments()


def _finetune_config(inputs: Path, **sections: Any) -> Any:
    from tests.finetune import _tiny_task

    return _tiny_task.config(
        model={"path": str(inputs / "pretrained" / "model")},
        train={"num_epochs": 1},
        launch={"nproc_per_node": 1, "threads_per_rank": 1},
        **sections,
    )


def _prepare_finetune(inputs: Path) -> None:
    """Write a fine-tuning whose last checkpoint was damaged and whose best model was lost."""
    from tests.finetune import _tiny_task

    _tiny_task.write_model(inputs / "pretrained" / "model")
    place = inputs / "start"
    _finetune(inputs, place)
    os.truncate(place / "checkpoints" / "iter_0000006" / "checkpoint-6" / "model.safetensors", 9)
    shutil.rmtree(place / "best")
    (place / RESULT_FILE).unlink()


def _finetune(inputs: Path, place: Path) -> None:
    """Take the last step, save it again, keep the best model and write the result."""
    from tests.finetune import _tiny_task

    config = _finetune_config(inputs, checkpoint={"save_interval": 5, "keep_last": 2})
    with access_errors(place):  # like the rank's exit reason
        _tiny_task.run(config, _tiny_task.TinyTask(inputs / "pretrained" / "model"), place)


def _finetuned(inputs: Path, place: Path) -> Any:
    """Return the result without times, the best model and the names of the checkpoints."""
    result = read_object(place / RESULT_FILE)
    model = place / result["best"] / "model"
    return {
        **{name: value for name, value in result.items() if "seconds" not in name},
        **{path.name: file_digest(path) for path in sorted(model.iterdir())},
        "saved": [path.name for path in complete_checkpoints(place / "checkpoints", "full")],
        "temporaries": _temporaries(place),
    }


def _finetune_inputs(inputs: Path, place: Path) -> tuple[Artifact, Artifact, Artifact]:
    """Return the fine-tuned run, the initial model and the examples."""
    finetuned = open_artifact(place / "finetuned" / RUN)
    return finetuned, *(open_artifact(inputs / name) for name in ("pretrained", "examples"))


def _finetune_export(inputs: Path, place: Path) -> None:
    import torch

    from megacore.finetune import export
    from tasks.finetune_export import finetune_export
    from tests.finetune._tiny_task import TinyTask

    def run_rank(job: Any, scratch: Path, on_poll: Callable[[], None]) -> dict[str, Any]:
        _started(job, scratch)
        export.export(job, torch.device("cpu"))
        return read_object(Path(job.output_directory) / "parity.json")

    _begin(place)
    export.build_task = lambda *arguments: TinyTask(inputs / "pretrained" / "model")
    stages.convert = run_rank
    finetune_export.fn(_finetune_config(inputs), *_finetune_inputs(inputs, place))


def _prepare_finetune_publish(inputs: Path) -> None:
    _prepare_finetuned(inputs)
    exported = inputs / "exported"
    exported.mkdir()
    _finetune_export(inputs, inputs / "start")
    (directory,) = (path for path in (inputs / "start" / "exports").iterdir() if path.is_dir())
    for path in directory.iterdir():
        path.rename(exported / path.name)
    directory.rmdir()


def _finetune_publish(inputs: Path, place: Path) -> None:
    from tasks.finetune_publish import finetune_publish

    _begin(place)
    finetuned, pretrained, examples = _finetune_inputs(inputs, place)
    finetune_publish.fn(
        _finetune_config(inputs),
        pretrained,
        examples,
        finetuned,
        open_artifact(inputs / "exported"),
    )


def _finetune_published(inputs: Path, place: Path) -> Any:
    """Return what the store has, without its random ids and times."""
    from tasks._mlflow import Tracking

    config = _finetune_config(inputs)
    client = Tracking(Workspace(place), config.tracking.experiment).client
    (version,) = client.search_model_versions(f"name = '{config.registered_model}'")
    experiment = client.get_experiment_by_name(config.tracking.experiment)
    (run,) = client.search_runs([experiment.experiment_id])
    (receipt,) = (place / "published").glob("*/receipt.json")
    return {
        "metrics": run.data.metrics,
        "status": run.info.status,
        "receipt": json.loads(receipt.read_text())["version"],
        "digest": version.tags["model_digest"],
        "temporaries": _temporaries(place),
    }


STAGES = (
    # What it reads of the inputs is the server's.
    Stage("download", _prepare_download, _download, _result, _visible_download, "/inputs/"),
    Stage("curate", _prepare_curate, _curate, _result, _visible),
    Stage("evaluate", _prepare_run, _evaluate, _result, _visible),
    Stage("zeroshot", _prepare_run, _zeroshot, _scored, _visible, "mlflow.db"),
    Stage("lm-eval", _prepare_lm_eval, _lm_eval, _scored, _visible, "mlflow.db"),
    Stage("report", _prepare_report, _report, _reported, _visible),
    Stage("compare", _prepare_compare, _compare, _compared, _visible, "mlflow.db"),
    Stage("compare-files", _prepare_records, _compare_files, _compared_files, _visible),
    Stage(
        "finetune",
        _prepare_finetune,
        _finetune,
        _finetuned,
        partial(_data.new_problems, _training.visible),
        "tmp/",  # of TMPDIR, where torch tries the compiler
    ),
    Stage("finetune-export", _prepare_finetuned, _finetune_export, _result, _visible),
    Stage(
        "finetune-publish",
        _prepare_finetune_publish,
        _finetune_publish,
        _finetune_published,
        _visible,
        "mlflow.db",
    ),
)
