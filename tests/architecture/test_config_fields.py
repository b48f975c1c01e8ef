"""Rules of configuration fields: each states its meaning, its unit and the keys it enters."""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel

from megacore.config import FinetuneConfig, RunConfig
from megacore.config.base import Section, unkeyed
from megacore.config.keys import Declaration, declaration
from megacore.jobs import finetune as finetune_job
from megacore.jobs import run as job


class Field(NamedTuple):
    """A field at its place in a configuration."""

    section: type[BaseModel]
    name: str
    declared: Declaration | None
    """Declaration of the keys; None if neither the field nor a section around it names a stage."""
    holds_sections: bool
    within: Declaration | None
    """Declaration of the field around it."""

    def __str__(self) -> str:
        return f"{self.section.__name__}.{self.name}"


def sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type mentions, without nested ones."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from sections(part)


def fields(section: type[BaseModel], within: Declaration | None = None) -> Iterator[Field]:
    """Yield every field of a section and of its nested sections.

    Raises:
        TypeError: a field declares nothing.
    """
    for name, info in section.model_fields.items():
        inner = list(sections(info.annotation))
        declared = declaration(section, name, within)
        yield Field(section, name, declared, bool(inner), within)
        for nested in inner:
            yield from fields(nested, declared)


@cache
def all_fields() -> list[Field]:
    """Return every field of both configurations."""
    return [*fields(RunConfig), *fields(FinetuneConfig)]


def all_sections(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the sections that a type mentions, and nested ones."""
    for section in sections(annotation):
        yield section
        for info in section.model_fields.values():
            yield from all_sections(info.annotation)


SECTIONS = sorted(
    {*all_sections(RunConfig), *all_sections(FinetuneConfig)}, key=lambda section: section.__name__
)


def test_sections_of_both_configurations_are_listed() -> None:
    names = {section.__name__ for section in SECTIONS}
    assert {
        "RunConfig",
        "HubSource",
        "PrefixSource",
        "Gpt2BpeTokenizer",
        "LossScaleConfig",
        "TrackingConfig",
    } <= names
    assert {
        "FinetuneConfig",
        "HubRows",
        "FileRows",
        "Seq2SeqConfig",
        "CausalLmConfig",
        "FinetuneLaunchConfig",
    } <= names
    assert len(names) == len(SECTIONS)  # no two sections have the same name


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_sections_are_frozen_and_their_fields_are_documented(section: type[BaseModel]) -> None:
    assert issubclass(section, Section)
    assert section.model_config["frozen"]
    assert section.model_config["extra"] == "forbid"
    assert section.__doc__
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no docstring"
        assert field.description.endswith("."), f"{section.__name__}.{name}: {field.description!r}"


def test_job_fields_are_documented() -> None:
    fine_tuning = (finetune_job.FinetuneJob, finetune_job.FinetuneExportJob, finetune_job.ProbeJob)
    for section in (job.TrainJob, job.EvaluateJob, job.ConvertJob, *fine_tuning):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"


def test_fields_declare_the_keys_they_enter() -> None:
    silent = [
        str(field) for field in all_fields() if field.declared is None and not field.holds_sections
    ]
    assert not silent, (
        f"{silent} are keyed(), and neither they nor their sections name a stage: give key=..."
    )
    no_stages = Declaration(frozenset())
    for field in all_fields():
        declaration_in_schema = field.section.model_fields[field.name].json_schema_extra
        contradicts = (
            field.within == no_stages
            and field.declared == no_stages
            and declaration_in_schema != unkeyed().json_schema_extra
        )
        assert not contradicts, (
            f"{field} is keyed() in a section that is unkeyed(): name its stages, or say unkeyed()"
        )


def stages_of(section: str) -> dict[str, frozenset[str]]:
    """Return the stages that each field of a section enters, wherever the section is."""
    return {
        field.name: frozenset(field.declared.stages)
        for field in all_fields()
        if field.section.__name__ == section and field.declared is not None
    }


RANKS = {"hostfile", "include", "exclude", "nnodes", "nproc_per_node"}
"""Fields that determine the number of ranks of a fine-tuning's checkpoints."""
MAY_CHANGE = {
    "RunConfig": {
        "name",
        "verify",
        "engine",
        "parallel",
        "deepspeed",
        "launch",
        "checkpoint",
        "evaluate",
        "export",
    }
    | {"resume", "tracking"},
    "HttpSource": {"max_file_gb"},
    "HubSource": {"streaming"},
    "WeightedSource": {"name", "max_epochs"},
    # within the samples that are still to come
    "BlendStep": {"samples", "tokens", "weights"},
    "DataConfig": {
        "blend_schedule",
        "curate_executor",
        "curate_workers",
        "max_document_mb",
        "workers",
        "shard_mb",
        "shard_runner",
        "shard_workers",
        "dask_address",
    },
    "TrainConfig": {
        "micro_batch_size",
        "train_iters",
        "skip_samples",
        "kernels",
        "compile",
        "cuda_graphs",
        "deterministic",
        "recompute",
    }
    | {
        "recompute_num_layers",
        "loss_spike_factor",
        "loss_spike_action",
        "nonfinite_action",
        "exit_interval",
        "exit_duration_minutes",
    }
    | {"log_interval", "eval_interval", "eval_iters", "profile"},
    "ResumeConfig": {"override"},
    "FinetuneConfig": {"name", "verify", "checkpoint", "launch", "find_batch_size"}
    | {"export", "tracking"},
    "FinetuneDataConfig": {"workers"},
    "FinetuneTrainConfig": {
        "eval_batch_size",
        "gradient_checkpointing",
        "log_interval",
        "exit_duration_minutes",
    },
}
"""Fields that may change when a run resumes, of sections that decide what it computes."""
ALL_MAY_CHANGE = (
    *(
        "ParallelConfig",
        "DeepSpeedConfig",
        "LaunchConfig",
        "SlurmConfig",
        "KubernetesConfig",
        "CheckpointConfig",
        "KernelsConfig",
    ),
    *("LocalExecutor", "SlurmExecutor", "RayExecutor"),
    *("ProfileConfig", "EvaluateConfig", "ZeroShotConfig", "PasskeyConfig"),
    *("ExportConfig", "TrackingConfig"),
    *("LmEvalConfig", "WandbConfig", "HubConfig"),
    *("FinetuneLaunchConfig", "FinetuneCheckpointConfig", "FindBatchSizeConfig"),
)
RUN_AND_INPUTS = frozenset(
    [
        "collect",
        "curate",
        "tokenizer",
        "punkt",
        "tokenize",
        "run",
        "pretrained",
        "dataset",
        "examples",
        "finetune",
    ]
)
"""The runs, and the stages that produce their inputs."""


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_only_the_listed_fields_may_change_on_resume(section: type[BaseModel]) -> None:
    name, stages = section.__name__, stages_of(section.__name__)
    free = {field for field, entered in stages.items() if not entered & RUN_AND_INPUTS}
    if name in ALL_MAY_CHANGE:
        launched = {
            "FinetuneLaunchConfig": RANKS | {"distributed", "deepspeed_config"},
            "LaunchConfig": RANKS,
        }
        assert free == set(stages) - launched.get(name, set())
    else:
        assert free == MAY_CHANGE.get(name, set())


def test_fields_that_decide_what_a_fine_tuning_computes_are_in_its_key() -> None:
    sections_with_all_fields = (
        "ClassificationConfig",
        "Seq2SeqConfig",
        "CausalLmConfig",
        "FinetuneOptimConfig",
    )
    schedule = (
        "num_epochs",
        "max_steps",
        "micro_batch_size",
        "gradient_accumulation_steps",
        "precision",
    )
    for section, names in {
        **dict.fromkeys(sections_with_all_fields, ()),
        "FinetuneTrainConfig": schedule,
        "PretrainedConfig": ("random_weights", "pad_token"),
        "FinetuneConfig": ("seed",),
        "FinetuneLaunchConfig": ("distributed", "deepspeed_config", *RANKS),
    }.items():
        stages = stages_of(section)
        for name in names or stages:
            assert "finetune" in stages[name], f"{section}.{name}"
