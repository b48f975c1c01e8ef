"""Scores of a run on a blend whose documents are separated by masks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megacore.checkpoint.format import STATE_NAME, FileRecord, Marker
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.data.build import open_split
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.data.one_epoch import one_epoch
from megacore.engine.native import NativeEngine
from megacore.jobs.run import EvaluateJob
from megacore.models.build import build_model
from megacore.models.gpt import GPTModel
from megacore.models.stage import Stage
from megacore.observe.recorder import Recorder
from megacore.parallel.mesh import ProcessMesh
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from megacore.train.loop import Datasets, Trainer
from megacore.train.score import CheckpointScorer
from tests._loss import loss_of
from tests.train import _runs

SPLIT = "60,20,20"
MASKS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
DATA: dict[str, dict[str, object]] = {
    "packed": {"split": SPLIT, **MASKS},
    "whole documents": {"split": SPLIT, **MASKS, "packing": "pack_until_overflow"},
    "best fit": {"split": SPLIT, **MASKS, "packing": "best_fit"},
}
NAMES, WEIGHTS = ("a", "b"), (0.7, 0.3)


def write(directory: Path, run: RunConfig) -> list[str]:
    """Write two pairs of token files with terminated documents and the blended index maps."""
    random = np.random.RandomState(4)
    prefixes = [str(directory / name) for name in NAMES]
    for prefix, documents in zip(prefixes, (60, 30), strict=True):
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(documents):
                start, length = random.randint(0, 60), random.randint(1, 40)
                writer.add_document(
                    [*(1 + (start + 3 * np.arange(length)) % 60).tolist(), _runs.EOD_ID]
                )
    data = run.data
    options = IndexOptions(
        split=SPLIT, seq_length=data.seq_length, seed=run.seed, packing=data.packing
    )
    members = [Member(prefix, weight) for prefix, weight in zip(prefixes, WEIGHTS, strict=True)]
    (directory / "index").mkdir()
    build_index_maps(Mixture.blend(members), directory / "index", options, (60, 8, None))
    return prefixes


@pytest.fixture(params=list(DATA))
def job(request: pytest.FixtureRequest, tmp_path: Path) -> EvaluateJob:
    """Provide a run of a few iterations and the job that scores it."""
    sources = [{"kind": "prefix", "prefix": str(tmp_path / name)} for name in NAMES]
    blend = [
        {"weight": weight, "source": source}
        for weight, source in zip(WEIGHTS, sources, strict=True)
    ]
    run = _runs.config(data=DATA[request.param] | {"source": None, "blend": blend})
    prefixes = write(tmp_path, run)
    mesh = ProcessMesh.serial()
    engine = NativeEngine(
        Stage(run, _runs.VOCAB_SIZE, mesh, special_tokens=_runs.TOKENS), run, "fp32"
    )
    train, valid = (
        open_split(prefixes, tmp_path / "index", name, run, tokenizer_directory=tmp_path)
        for name in ("train", "valid")
    )
    valid_pass = one_epoch(
        prefixes, tmp_path / "index", "valid", run, tmp_path, tokenizer_directory=tmp_path
    )
    data = Datasets(train, valid, valid_pass)
    with Recorder(tmp_path / "run", attempt=1, rank=0, tensorboard=False) as recorder:
        spec = ModelSpec.of(run, _runs.VOCAB_SIZE, _runs.TOKENS)
        Trainer(run, engine, mesh, data, recorder, tmp_path / "run", spec=spec).run()
    job = _runs.job(run, tmp_path, tmp_path / "run", token_prefixes=prefixes)
    values = job.model_dump(exclude={"planned_samples"})
    Path(values["exit_directory"]).mkdir(exist_ok=True)
    checkpoint = str(tmp_path / "run/checkpoints/iter_0000006")
    return EvaluateJob(**values, checkpoints=(checkpoint,), unigram=True, output=str(tmp_path))


def documents_of(job: EvaluateJob, name: str) -> list[list[int]]:
    """Return each piece of a document in one epoch of a split.

    A piece includes the label after its last token.
    """
    options = IndexOptions(
        split=SPLIT,
        seq_length=job.config.data.seq_length,
        seed=job.config.seed,
        packing=job.config.data.packing,
    )
    pieces = []
    for prefix in job.token_prefixes:
        directory = Path(job.run_directory, "one", Path(prefix).name)
        directory.mkdir(parents=True, exist_ok=True)
        build_index_maps(Mixture.single(prefix), directory, options, (0, None, None))
        dataset = open_split([prefix], directory, name, job.config, tokenizer_directory=directory)
        for sample in dataset.gather(range(len(dataset))).tolist():
            tokens = [token for token in sample if token >= 0]
            while tokens:
                end = tokens.index(_runs.EOD_ID) + 1 if _runs.EOD_ID in tokens else len(tokens)
                pieces.append(tokens[:end])
                tokens = tokens[end:]
    return pieces


def losses(model: GPTModel, document: list[int]) -> Tensor:
    """Return the loss of each label of a document read separately."""
    ids = torch.tensor([document])
    with torch.no_grad():
        return loss_of(model, ids[:, :-1], ids[:, 1:]).flatten().double()


def test_scores_equal_those_of_separate_documents(job: EvaluateJob) -> None:
    from tests.checkpoint._read import read_tensors

    scorer = CheckpointScorer(job, ProcessMesh.serial(), torch.device("cpu"))
    scores = scorer.score(Path(job.checkpoints[0]))
    model = build_model(job.config, _runs.VOCAB_SIZE, ProcessMesh.serial()).eval()
    weights = read_tensors(Path(job.checkpoints[0]), prefix="model.")
    model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
    for name in ("test", "valid"):
        documents = [document for document in documents_of(job, name) if len(document) > 1]
        expected = float(torch.cat([losses(model, document) for document in documents]).mean())
        assert scores[f"{name}_loss"] == pytest.approx(expected, rel=1e-6)
        assert scores[f"{name}_ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
        rows = scores[f"{name}_by_position"]
        total = sum(row["loss"] * row["tokens"] for row in rows)
        assert total / sum(row["tokens"] for row in rows) == pytest.approx(expected, rel=1e-6)
        assert len(rows) > 1
    events = Path(job.run_directory, "events.jsonl").read_text(encoding="utf-8").splitlines()
    trained = [event for event in map(json.loads, events) if event["kind"] == "perplexity"][-1]
    for row, other in zip(scores["valid_by_position"], trained["by_position"], strict=True):
        assert row == pytest.approx(other, rel=1e-6)


def test_unigram_perplexity_uses_frequencies_of_the_train_split(
    job: EvaluateJob,
) -> None:
    counts = np.ones(_runs.VOCAB_SIZE)
    for prefix, documents in zip(job.token_prefixes, (60, 30), strict=True):
        lengths = np.fromfile(f"{prefix}.idx", "<i4", documents, offset=34)
        train = lengths[: round(0.6 * documents)].sum()
        counts += np.bincount(
            np.fromfile(f"{prefix}.bin", "<u2", train), minlength=_runs.VOCAB_SIZE
        )
    log_probability = np.log(counts / counts.sum())
    perplexities = CheckpointScorer(job, ProcessMesh.serial(), torch.device("cpu")).unigram()
    for name in ("test", "valid"):
        labels = [token for document in documents_of(job, name) for token in document[1:]]
        assert perplexities[name] == pytest.approx(
            math.exp(-log_probability[labels].mean()), rel=1e-9
        )


def test_score_agrees_with_the_perplexity_of_training(job: EvaluateJob) -> None:
    scorer = CheckpointScorer(job, ProcessMesh.serial(), torch.device("cpu"))
    scores = scorer.score(Path(job.checkpoints[0]))
    measured = _runs.events(Path(job.run_directory), "perplexity")[-1]
    assert (measured["iteration"], measured["samples"]) == (6, scores["valid_samples"])
    assert measured["valid_ppl"] == pytest.approx(scores["valid_ppl"], rel=1e-6)
    assert scores["disagreement"] is None


def test_score_reports_a_disagreement_with_training(job: EvaluateJob) -> None:
    checkpoint = Path(job.checkpoints[0])
    state = json.loads((checkpoint / STATE_NAME).read_text())
    state["validation"]["loss"] += 2e-4
    (checkpoint / STATE_NAME).write_text(json.dumps(state))
    marker = Marker.read(checkpoint)
    record = FileRecord.of(checkpoint / STATE_NAME)
    replace(marker, files=marker.files | {STATE_NAME: record}).write(checkpoint)
    scores = CheckpointScorer(job, ProcessMesh.serial(), torch.device("cpu")).score(checkpoint)
    assert "valid_ppl of iter_0000006 is" in scores["disagreement"]
    assert "difference of 2.0e-04" in scores["disagreement"]
    limited = job.config.evaluate.model_copy(update={"max_samples": 2})
    config = job.config.model_copy(update={"evaluate": limited})
    scorer = CheckpointScorer(
        job.model_copy(update={"config": config}), ProcessMesh.serial(), torch.device("cpu")
    )
    assert scorer.score(checkpoint)["disagreement"] is None
