"""Export of a fine-tuned model: its gate and the files next to the model."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.artifact.files import write_json
from megacore.checkpoint.format import FileRecord, Marker
from megacore.errors import (
    CheckpointError,
    ConversionError,
    TransientFileError,
    WorkspaceError,
)
from megacore.finetune.export import (
    Exported,
    _name_inputs,
    _usage,
    compare_losses,
    export_best,
    load_exported,
)
from megacore.finetune.task import build_task
from megacore.jobs.finetune import FinetuneExportJob
from tests.finetune._tiny_models import (
    prepare,
    tiny_config,
    write_export,
    write_model,
    write_rows,
)
from tests.finetune._tiny_task import TinyTask, config, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def best(tiny_root: Path) -> Path:
    done = run(
        config(train={"micro_batch_size": 8, "num_epochs": 1}),
        TinyTask(tiny_root / "model"),
        tiny_root / "best",
    )
    (path,) = (done.directory / "best").glob("iter_*")
    return path


@pytest.fixture
def task(tiny_root: Path) -> TinyTask:
    return TinyTask(tiny_root / "model")


def job(best: Path, output: Path, **values: Any) -> FinetuneExportJob:
    return FinetuneExportJob(
        config=config(),
        pretrained_directory="none",
        examples_directory="none",
        run_directory=str(best.parent.parent),
        exit_directory=str(output / "exit"),
        ranks=1,
        threads_per_rank=1,
        best=str(best),
        output_directory=str(output),
        card={"Data": "numbers | steps", "Parent": "https://user:secret@host/model"},
        **values,
    )


def changed_copy(
    best: Path, target: Path, change: Callable[[dict[str, torch.Tensor], Path], None]
) -> Path:
    """Copy the best model with other weights or files and a valid marker."""
    from safetensors.torch import load_file, save_file

    path = target / best.name
    shutil.copytree(best, path)
    file = path / "model" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, path / "model")
    save_file(tensors, file, {"format": "pt"})
    (path / "complete.json").unlink()
    names = [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    Marker(int(best.name[5:]), None, {name: FileRecord.of(path / name) for name in names}).write(
        path
    )
    return path


def test_exported_model_is_the_trained_one(best: Path, task: TinyTask, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = export_best(job(best, tmp_path), task, CPU)
    assert report["passed"]
    assert report["samples"] == 7
    assert report["relative_difference"] < 1e-5
    assert json.loads((tmp_path / "parity.json").read_text()) == report
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.transformer.wte.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w3 w4")["input_ids"] == [3, 4]
    sample = (tmp_path / "sample.txt").read_text()
    assert sample.count("prediction: w") == sample.count("target: w") == 5
    card = (tmp_path / "model" / "README.md").read_text()
    recorded = json.loads((best / "metrics.json").read_text())
    before, after = recorded["start_metrics"]["loss"], recorded["metrics"]["loss"]
    assert f"| loss | {before:.4f} | {after:.4f} | - |" in card
    assert "| Data | numbers \\| steps |" in card
    assert "secret" not in card
    assert card.startswith("---\nmodel_name: tiny\n")
    assert "max_new_tokens=6)" in card, "64 new tokens do not fit into 12 positions"


def empty_weight(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    tensors["transformer.h.0.mlp.c_fc.weight"] = torch.empty(0)


def nan_weight(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    tensors["transformer.h.1.mlp.c_fc.bias"][0] = torch.nan


def missing_weight(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    del tensors["transformer.h.1.ln_1.weight"]


def unexpected_weight(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    tensors["transformer.h.7.ln_1.weight"] = torch.ones(16)


def untied_head(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    tensors["lm_head.weight"] = torch.randn(tensors["transformer.wte.weight"].shape)


def other_weight(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    tensors["transformer.h.0.attn.c_attn.weight"] *= -1.0


def other_vocabulary(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"w3"', '"x3"'))


def untied_config(tensors: dict[str, torch.Tensor], directory: Path) -> None:
    path = directory / "config.json"
    write_json(path, json.loads(path.read_text()) | {"tie_word_embeddings": False})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (empty_weight, "cannot be loaded as AutoModelForCausalLM|mismatched|empty tensor"),
        (nan_weight, r"values in transformer\.h\.1\.mlp\.c_fc\.bias that are not finite"),
        (missing_weight, r"1 missing keys, transformer\.h\.1\.ln_1\.weight first"),
        (unexpected_weight, r"1 unexpected keys, transformer\.h\.7\.ln_1\.weight first"),
        (untied_head, "unexpected keys|head is tied|differ|a difference of"),
        (other_weight, "a difference of .*, beyond the 0.001 that precision explains"),
        (other_vocabulary, "not those of the training's"),
        (untied_config, "missing keys, lm_head.weight first"),
    ],
)
def test_changed_model_is_refused(
    best: Path,
    task: TinyTask,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor], Path], None],
    message: str,
) -> None:
    with pytest.raises(ConversionError, match=message):
        export_best(job(changed_copy(best, tmp_path / "best", change), tmp_path / "out"), task, CPU)
    assert not (tmp_path / "out" / "parity.json").exists()


def test_damaged_best_model_is_refused(best: Path, task: TinyTask, tmp_path: Path) -> None:
    path = tmp_path / best.name
    shutil.copytree(best, path)
    file = path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match="other content than when it was written"):
        export_best(job(path, tmp_path / "out"), task, CPU)


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("shutil.copy2", errno.ENOSPC, WorkspaceError),
        ("transformers.AutoTokenizer.from_pretrained", errno.EIO, TransientFileError),
    ],
)
def test_a_failing_disk_is_no_fault_of_the_model(
    best: Path,
    task: TinyTask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    kind: type[Exception],
) -> None:
    def refuse(path: object, *arguments: object, **values: object) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(name, refuse)
    with pytest.raises(kind, match=os.strerror(code)):
        export_best(job(best, tmp_path), task, CPU)


def test_rounding_of_16_bits_is_tolerated(best: Path, task: TinyTask) -> None:
    exported = load_exported(best / "model", "causal_lm")
    recorded = json.loads((best / "metrics.json").read_text())
    rounded = [loss * 1.02 for loss in recorded["sample_losses"]]
    with pytest.raises(ConversionError, match=r"beyond the 0\.001"):
        compare_losses(exported, task, recorded | {"sample_losses": rounded}, best)
    report = compare_losses(
        exported, task, recorded | {"sample_losses": rounded, "precision": "bf16"}, best
    )
    assert 0.01 < report["relative_difference"] < report["tolerance"]


def test_model_card_contains_no_secrets(best: Path, tmp_path: Path) -> None:
    job(best, tmp_path).write(tmp_path / "job.json")
    assert "secret" not in (tmp_path / "job.json").read_text()


@pytest.mark.parametrize("kind", ["bert", "export of bert", "export of t5", "gpt2"])
def test_model_is_used_with_the_inputs_of_its_samples(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    exported = kind.startswith("export of ")
    source = (
        write_export(tmp_path / "export", kind.removeprefix("export of "))
        if exported
        else write_model(tmp_path / "source", kind)
    )
    for split in ("train", "valid"):
        rows = [{"sentence1": "A text.", "sentence2": "Another one.", "label": n} for n in (0, 1)]
        write_rows(tmp_path / f"data/{split}.jsonl", rows)
    model = {"path": str(source), "pad_token": "<|endoftext|>"} if kind == "gpt2" else {}
    configuration = tiny_config(
        source, tmp_path / "data", "classification", model=model, task={"max_length": 32}
    )
    task = build_task(configuration, *prepare(configuration, tmp_path / "work"))
    task.tokenizer.save_pretrained(tmp_path / "model")
    trained: Any = task.build_model()
    usage = _usage(configuration, Exported(trained, task.tokenizer))
    texts = json.loads(usage.split("classifier(")[-1].removesuffix("))"))
    sample = task.collate(list(task.split("train") or [])[:1])
    del sample["labels"]
    path = tmp_path / "model" / "tokenizer_config.json"
    for earlier in (False, True):
        if earlier:
            values = json.loads(path.read_text())
            values.pop("model_input_names", None)
            write_json(path, values)
            _name_inputs(path.parent, task)
        inputs = AutoTokenizer.from_pretrained(path.parent)(**texts, return_tensors="pt")
        assert {name: ids.tolist() for name, ids in inputs.items()} == {
            name: ids.tolist() for name, ids in sample.items()
        }
