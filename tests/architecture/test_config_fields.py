"""Every configuration value says what it is, in which unit, and whether it is part of a stage's key."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from megacore.config import FinetuneConfig, RunConfig
from megacore.config.base import Section, is_keyed
from megacore.finetune import job as finetune_job
from megacore.launch import job


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from sections(field.annotation)
    for part in getattr(annotation, "__args__", ()):
        yield from sections(part)


SECTIONS = sorted({*sections(RunConfig), *sections(FinetuneConfig)}, key=lambda section: section.__name__)


def test_every_section_is_found() -> None:
    names = {section.__name__ for section in SECTIONS}
    assert {"RunConfig", "HubSource", "PrefixSource", "Gpt2BpeTokenizer", "LossScaleConfig", "TrackingConfig"} <= names
    assert {"FinetuneConfig", "HubRows", "FileRows", "Seq2SeqConfig", "CausalLmConfig", "FinetuneLaunchConfig"} <= names
    assert len(names) == len(SECTIONS)  # each name says which section is meant


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_fields_say_whether_they_are_keyed_and_what_they_are(section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    assert section.model_config["frozen"]
    assert section.model_config["extra"] == "forbid"
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert is_keyed(section, name) in (True, False)
        assert field.description, f"{section.__name__}.{name} has no docstring"
        assert field.description.endswith("."), f"{section.__name__}.{name}: {field.description!r}"


def test_job_fields_are_documented() -> None:
    fine_tuning = (finetune_job.FinetuneJob, finetune_job.FinetuneExportJob, finetune_job.ProbeJob)
    for section in (job.TrainJob, job.EvaluateJob, job.ConvertJob, *fine_tuning):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


def test_what_may_change_on_resume_is_not_keyed() -> None:
    sections_by_name = {section.__name__: section for section in SECTIONS}
    for name, fields in {
        "TrainConfig": ("train_iters", "recompute", "log_interval", "eval_interval", "eval_iters"),
        "DataConfig": ("workers",),
        "LaunchConfig": tuple(sections_by_name["LaunchConfig"].model_fields),
        "ParallelConfig": tuple(sections_by_name["ParallelConfig"].model_fields),
        "CheckpointConfig": tuple(sections_by_name["CheckpointConfig"].model_fields),
        "TrackingConfig": tuple(sections_by_name["TrackingConfig"].model_fields),
        "FinetuneTrainConfig": ("eval_batch_size", "gradient_checkpointing", "log_interval", "exit_duration_minutes"),
        "FinetuneDataConfig": ("workers",),
        "FinetuneCheckpointConfig": tuple(sections_by_name["FinetuneCheckpointConfig"].model_fields),
        # What the ranks divide is added to the key by itself: it follows from files too.
        "FinetuneLaunchConfig": tuple(sections_by_name["FinetuneLaunchConfig"].model_fields),
        "FindBatchSizeConfig": tuple(sections_by_name["FindBatchSizeConfig"].model_fields),
    }.items():
        for field in fields:
            assert not is_keyed(sections_by_name[name], field), f"{name}.{field}"


def test_what_a_fine_tuning_computes_is_keyed() -> None:
    sections_by_name = {section.__name__: section for section in SECTIONS}
    everything = ("ClassificationConfig", "Seq2SeqConfig", "CausalLmConfig", "FinetuneOptimConfig")
    for name, fields in {
        **{name: tuple(sections_by_name[name].model_fields) for name in everything},
        "FinetuneTrainConfig": (
            "num_epochs",
            "max_steps",
            "micro_batch_size",
            "gradient_accumulation_steps",
            "precision",
        ),
        "PretrainedConfig": ("random_weights", "pad_token"),
        "FinetuneConfig": ("seed",),
    }.items():
        for field in fields:
            assert is_keyed(sections_by_name[name], field), f"{name}.{field}"
