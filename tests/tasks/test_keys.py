"""Effect of each configuration field on the keys of the stages it declares."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from megacore.artifact import Artifact, StageKey
from megacore.cluster.hosts import hardware
from megacore.config import FinetuneConfig, RunConfig, load_config
from megacore.config.base import FinetuneStage, PretrainStage, Section
from megacore.config.load import parse_finetune_config
from megacore.config.spec import ModelSpec
from megacore.corpus.segments import Segment
from megacore.errors import MegacoreError
from megacore.hardware import Hardware
from megacore.token_files.indexed_dataset import write_members
from tasks import finetune_export, finetune_publish
from tasks.collect import collect_key, punkt_key
from tasks.contamination import contamination_key, decontaminate_key, search_key
from tasks.convert import convert_key
from tasks.curate import curate_key
from tasks.evaluate import Target, score_key
from tasks.find_batch_size import find_batch_size_key
from tasks.finetune import finetune_key
from tasks.finetune_data import dataset_key, examples_key, pretrained_key
from tasks.index import RunData, index_key
from tasks.lm_eval import lm_eval_key
from tasks.publish import publish_key
from tasks.push import push_key
from tasks.tokenize import blend_key, shard_key, tokenize_key, tokenizer_key
from tasks.train import run_key, train_key
from tasks.zeroshot import zeroshot_key
from tests.config._finetune import minimal
from tests.data._sentences import write_lengths
from tests.tasks._key_bases import PRETRAIN_BASES, SMALL
from tests.tasks._other_values import changed, other_values, places, section_classes

Keys = dict[str, Any]
CHECKPOINT = Target("iter_0000001", "/", "digest")
CONTAINERS = {"DataConfig.source", "DataConfig.blend", "DataConfig.split_blends"}
"""Alternative sources of documents, changed through their fields."""


@dataclass
class Files:
    """Two different files of each kind that values name, and artifacts of earlier stages."""

    directory: Path
    tokens: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = '{"text": "a", "label": 0}\n'
        model = ModelSpec.of(load_config("gpt2-tiny"), 512).model_dump(mode="json")
        self.write("model/config.json", "{}")
        for name in "ab":
            self.write(f"{name}/checkpoint/state.json", json.dumps({"model": model}))
            for file in (
                "rows.jsonl",
                "words.txt",
                "vocab.json",
                "checkpoint/complete.json",
                "tree/code.py",
                "hosts",
            ):
                self.write(f"{name}/{file}", rows * (1 + "ab".index(name)))
            self.write(f"{name}/tree/note.txt", name)
            self.write(f"{name}/functions.py", f"def keep(document):\n    return {name == 'a'}\n")
            for file in ("config.json", "tokenizer.json", "model.safetensors"):
                self.write(f"{name}/pretrained/{file}", f'{{"name": "{name}"}}')
            self.write(
                f"{name}/hosts",
                "one slots=1\ntwo slots=2\n" if name == "a" else "one slots=4\ntwo slots=1\n",
            )
        for name in "abcd":
            prefix = self.directory / name / "tokens" / "tokens_text_document"
            prefix.parent.mkdir(parents=True)
            write_lengths(
                prefix, [[4, 5, 3, 6, 2], [7, 8], [], [3, 3, 3]] * (12 + "abcd".index(name))
            )
            self.tokens.append(prefix.parent)

    def blend(self, members: int) -> Path:
        """Return a directory with the token files of several sources."""
        directory = self.directory / f"blend-{members}"
        directory.mkdir(exist_ok=True)
        write_members(directory, self.tokens[:members])
        return directory

    def write(self, name: str, text: str) -> None:
        """Write a file below the directory."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def __call__(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.directory / name)

    def artifact(self, stage: str, directory: Path | None = None, **counts: Any) -> Artifact:
        """Return an artifact of an earlier stage, always the same one."""
        return Artifact(
            stage=stage,
            key=stage,
            path=str(directory or self.directory),
            digest=stage,
            counts=counts,
        )


def pretrain_keys(config: RunConfig, files: Files) -> dict[str, Callable[[], Any]]:
    """Return a function for the key of each stage: those that the tasks call."""
    sources, artifact = config.data.sources, files.artifact
    tokens = artifact(
        "tokenize", files.tokens[0] if len(sources) == 1 else files.blend(len(sources))
    )
    corpus, tokenizer, index = (
        artifact("collect"),
        artifact("tokenizer", vocab_size=512, special_tokens={}),
        artifact("index"),
    )
    trained, evaluation = artifact("train"), artifact("evaluate", best="iter_0000001")
    data = RunData(tokens, tokenizer, index)
    shard = (Segment(str(Path(corpus.path, "a.jsonl")), "text", 0, 100),)
    return {
        "collect": lambda: [collect_key(config, source).key for source in sources],
        "curate": lambda: curate_key(config, corpus),
        "search": lambda: search_key(config, corpus),
        "decontaminate": lambda: decontaminate_key(config, corpus, (artifact("search"),), 0),
        "tokenizer": lambda: tokenizer_key(config, (corpus,)),
        "punkt": lambda: punkt_key(config),
        "tokenize": lambda: tokenize_key(config, corpus, tokenizer),
        "tokenize-shard": lambda: shard_key(config, corpus, tokenizer, None, shard),
        "blend": lambda: blend_key(config, (tokens, tokens)),
        "index": lambda: index_key(config, tokens, None),
        "contamination": lambda: contamination_key(config, (artifact("search"),), tokens, index),
        "run": lambda: run_key(config, tokens, tokenizer),
        "train": lambda: train_key(config, data),
        "evaluate": lambda: score_key(config, index, CHECKPOINT),
        "zeroshot": lambda: zeroshot_key(config, tokenizer, CHECKPOINT),
        "convert": lambda: convert_key(config, trained, evaluation, data),
        "lm-eval": lambda: lm_eval_key(config, artifact("convert")),
        "publish": lambda: publish_key(config, trained, evaluation, artifact("convert"), data),
        "push": lambda: push_key(config, trained, artifact("convert"), artifact("publish")),
    }


def finetune_keys(config: FinetuneConfig, files: Files) -> dict[str, Callable[[], Any]]:
    """Return the functions for a fine-tuning, with two methods of the batch size search."""
    pretrained, rows, samples = map(files.artifact, ("pretrained", "dataset", "examples"))
    tuned, exported = files.artifact("finetune", best="best/1"), files.artifact("finetune-export")
    return {
        "pretrained": lambda: pretrained_key(config),
        "dataset": lambda: dataset_key(config),
        "examples": lambda: examples_key(config, pretrained, rows),
        "finetune": lambda: finetune_key(config, pretrained, samples),
        "finetune-export": lambda: finetune_export.export_key(config, tuned, pretrained, samples),
        "finetune-publish": lambda: finetune_publish.publish_key(
            config, pretrained, samples, tuned, exported
        ),
        "push": lambda: push_key(config, tuned, exported, files.artifact("finetune-publish")),
        "find-batch-size": lambda: [
            find_batch_size_key(config, method, pretrained, samples).key
            for method in ("ddp", "zero2")
        ],
    }


def computed(functions: Mapping[str, Callable[[], Any]]) -> Keys:
    """Return the keys, in hex digits."""
    return {
        stage: key.key if isinstance(key, StageKey) else key
        for stage, key in ((stage, function()) for stage, function in functions.items())
    }


def special_values(files: Files) -> dict[str, list[Any]]:
    """Return other values for fields whose type does not suffice to find one."""
    rows, words = files("b/rows.jsonl"), files("b/words.txt")
    return {
        "JsonlSource.files": [[rows]],
        "ParquetSource.files": [[rows]],
        "WarcSource.files": [[rows]],
        "RemoteFile.url": ["https://host/b.jsonl"],
        "RemoteFile.sha256": ["0" * 64],
        "SourceTreeSource.path": [files("b/tree")],
        "SourceTreeSource.pattern": ["*.txt"],
        "TextSource.files": [[files("b/words.txt")]],
        "TextSource.document_characters": [16],
        "LanguageStep.model": [words],
        "PythonStep.function": [f"{files('b/functions.py')}:keep"],
        **{
            f"UrlStep.{name}": [words]
            for name in ("extra_domains", "extra_urls", "banned_words", "banned_subwords")
        },
        "UrlStep.soft_banned_words": [words],
        "PrefixSource.prefix": [files("b/tokens/tokens_text_document")],
        "Gpt2BpeTokenizer.vocab_file": [words],
        "Gpt2BpeTokenizer.merge_file": [rows],
        "BertWordPieceTokenizer.vocab_file": [words],
        "SentencePieceTokenizer.model_file": [words],
        "DataConfig.curate": [[{"step": "pii"}]],
        "DataConfig.split": ["5,3,2"],
        "DataConfig.fim": [{"rate": 0.3}],
        "DataConfig.seq_length_schedule": [[{"samples": 0, "seq_length": 32}]],
        "SequencePhase.samples": [96],
        "SequencePhase.seq_length": [32],
        "ModelConfig.max_position_embeddings": [4096],
        "ModelConfig.rope_scaling": [{"kind": "linear", "factor": 2.0}],
        "LongRope.short_factor": [[2.0] * 16],
        "LongRope.long_factor": [[2.0] * 16],
        **{f"FimConfig.{name}_token": ["<x>"] for name in ("prefix", "middle", "suffix")},
        "TrainConfig.pretrained_checkpoint": [files("b/checkpoint")],
        "TrainConfig.profile": [{"from": 1, "to": 2}],
        "TrainConfig.rampup_batch_size": [{"start": 4, "increment": 4, "samples": 60}],
        "TrainConfig.skip_samples": [["4"]],
        "DataConfig.blend_schedule": [[{"samples": 9, "weights": [1, 1]}]],
        "WeightedSource.name": ["other"],
        "WeightedSource.max_epochs": [1e9],
        "BlendStep.samples": [7],
        "BlendStep.tokens": [20_000],
        "BlendStep.weights": [[1, 3]],
        "TrackingConfig.wandb": [{}],
        "WandbConfig.tags": [["tag"]],
        "ResumeConfig.checkpoint": [files("b/checkpoint")],
        "ResumeConfig.override": [["optim.lr"]],
        "ZeroShotConfig.wikitext": [words],
        "LmEvalConfig.tasks": [["arc_easy"]],
        "LmEvalConfig.include_path": [files("b/tree")],
        "ZeroShotConfig.lambada": [words],
        **{
            f"{name}.hostfile": [files("b/hosts")]
            for name in ("LaunchConfig", "FinetuneLaunchConfig")
        },
        **{
            f"{name}.{field}": [["two"]]
            for name in ("LaunchConfig", "FinetuneLaunchConfig")
            for field in ("include", "exclude")
        },
        **{f"{name}.push_to_hub": ["some/repository"] for name in ("ExportConfig", "HubConfig")},
        "PretrainedConfig.path": [files("b/pretrained"), "some/other"],
        "FileRows.train": [[rows]],
        "FileRows.valid": [[rows], []],
        "FileRows.test": [[rows]],
        "ClassificationConfig.labels": [["no", "yes"]],
        "MultipleChoiceConfig.choices_columns": [["first", "second"]],
        "FinetuneTrainConfig.best_metric": ["loss"],
        "FinetuneLaunchConfig.accelerate_config": [
            {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO"}
        ],
        "FindBatchSizeConfig.methods": [["ddp"]],
    }


def kinds(files: Files) -> list[dict[str, Any]]:
    """Return a section of each kind, for fields that hold one of several."""
    rows = [files("b/rows.jsonl")]
    return [
        {"kind": "jsonl", "files": rows},
        {"kind": "http", "files": [{"url": "https://host/b.jsonl"}]},
        {"kind": "train-wordpiece"},
        {"kind": "train-wordpiece", "vocab_extra_ids": 200},
        {"kind": "hf", "name": "some/other"},
        {"kind": "linear", "factor": 3.0},
        {"kind": "llama3", "factor": 3.0},
        {"kind": "files", "train": rows},
        {"kind": "hub", "dataset": "some/others"},
        {"kind": "causal_lm"},
        {"kind": "multiple_choice"},
        {"kind": "seq2seq", "source_column": "a", "target_column": "b"},
        {"kind": "slurm"},
        {"kind": "ray"},
        {"step": "exact_dedup"},
        {"step": "pii"},
    ]


@dataclass
class Effect:
    """Changes of keys when a field changed."""

    declared: set[str]
    differing: set[str] = field(default_factory=set)
    tried: bool = False


def sweep(
    config: Section,
    sections: str,
    keys_of: Callable[[dict[str, Any]], Keys],
    files: Files,
    effects: dict[str, Effect],
) -> None:
    """Change each field of some sections (none named: all) and note which keys change.

    Only keys that the field declares may change.
    """
    values = config.model_dump(mode="json")
    before, special = keys_of(values), special_values(files)
    for place in places(config):
        if place.field in CONTAINERS or (sections and place.path[0] not in sections.split()):
            continue
        present = values_at(values, place.path)
        path = place.path
        others = special.get(place.field) or other_values(place.annotation, present)
        if get_args(place.annotation) == (present,):  # kind of one of several sections
            path, others = (
                path[:-1],
                [other for other in kinds(files) if other.get(place.name, present) != present],
            )
        assert place.declared is not None, (
            f"{place.field} is keyed(), and neither it nor its section names a stage: give key=..."
        )
        effect = effects.setdefault(place.field, Effect(place.declared.stages & before.keys()))
        for other in others:
            try:
                after = keys_of(changed(values, path, other))
            except (ValidationError, MegacoreError):
                continue  # not a valid configuration, or its inputs are missing
            differing = {stage for stage in before if before[stage] != after[stage]}
            assert differing <= effect.declared, (
                f"{place.field} declares {sorted(effect.declared)}, and {present!r} -> {other!r} "
                f"changes the keys of {sorted(differing)}"
            )
            effect.differing |= differing
            effect.tried = True
            if differing == effect.declared:
                break


def check(
    schema: type[Section], effects: Mapping[str, Effect], without: tuple[str, ...] = ()
) -> None:
    """Assert that each field was changed and changes all keys it declares.

    Fields in `without` have a single valid value.
    """
    fields = {
        f"{section.__name__}.{name}"
        for section in section_classes(schema)
        for name, info in section.model_fields.items()
        if not any(True for _ in section_classes(info.annotation))
    }
    untried = sorted(
        name for name in fields | effects.keys() if name not in effects or not effects[name].tried
    )
    assert untried == sorted(without), (
        f"no other valid value is known of {untried}: give one in special_values, or add a base"
    )
    wrong = {
        name: f"declares {sorted(effect.declared)}, changes {sorted(effect.differing)}"
        for name, effect in effects.items()
        if effect.differing != effect.declared and name not in without
    }
    assert not wrong, "\n".join(f"{name} {effect}" for name, effect in wrong.items())


def values_at(values: Any, path: tuple[str | int, ...]) -> Any:
    """Return the plain value at a path."""
    for part in path:
        if isinstance(values, str):  # one word for all fields of a section
            return values
        values = values[part]
    return values


def located(value: Any, files: Files) -> Any:
    """Return a value of a configuration with the paths of its files."""
    match value:
        case str() if value.startswith("a/"):
            return files(value)
        case list():
            return [located(each, files) for each in value]
        case dict():
            return {key: located(each, files) for key, each in value.items()}
    return value


def pretrain_bases(files: Files) -> Iterator[tuple[RunConfig, str]]:
    """Yield configurations and the sections to change there."""
    for name, sections, changes in PRETRAIN_BASES:
        yield load_config(name, located(SMALL | changes, files)), sections


def finetune_bases(files: Files) -> Iterator[tuple[FinetuneConfig, str]]:
    """Yield the same for fine-tunings."""
    local = {"path": files("a/pretrained")}
    classes = {"kind": "classification", "sentence1_column": "text"}
    pairs = {
        "kind": "seq2seq",
        "source_column": "text",
        "target_column": "label",
        "metrics": ["rougeLsum"],
    }
    held_out = {"source": {"kind": "files", "train": [files("a/rows.jsonl")]}}
    rows = {
        "source": {
            "kind": "files",
            **{split: [files("a/rows.jsonl")] for split in ("train", "valid", "test")},
        }
    }
    zero2 = {
        "distributed": "zero2",
        "deepspeed_config": {"zero_optimization": {"stage": 2}},
        "allow_cpu": True,
    }
    for sections, names in (
        ({"model": local, "data": held_out, "task": classes}, ""),
        ({"model": local, "data": rows, "task": pairs, "launch": zero2}, "data task launch"),
        ({"data": {"source": {"kind": "hub", "dataset": "some/rows"}}}, "model data task"),
        ({"data": held_out, "task": {"kind": "multiple_choice"}}, "task"),
        ({"data": held_out, "launch": {"hostfile": files("a/hosts")}}, "launch"),
        ({"data": held_out, "tracking": {"wandb": {}}}, "tracking"),
    ):
        yield parse_finetune_config(minimal() | sections, origin="test"), names


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """Provide files for all tests of this module, on a machine with fixed hardware."""
    directory = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Hardware, "detect", classmethod(lambda cls: Hardware(4, 2**33)))
        patch.setattr(hardware, "hosts_of", lambda launch: {})  # whatever hosts a hostfile names
        patch.setenv("MEGACORE_WORKSPACE", str(directory / "workspace"))
        yield Files(directory)


def test_pretraining_fields_change_exactly_the_keys_they_declare(files: Files) -> None:
    effects: dict[str, Effect] = {}

    def keys_of(values: dict[str, Any]) -> Keys:
        return computed(pretrain_keys(RunConfig.model_validate(values), files))

    for config, sections in pretrain_bases(files):
        assert set(pretrain_keys(config, files)) == set(get_args(PretrainStage))
        sweep(config, sections, keys_of, files, effects)
    check(RunConfig, effects)


def test_fine_tuning_fields_change_exactly_the_keys_they_declare(files: Files) -> None:
    effects: dict[str, Effect] = {}

    def keys_of(values: dict[str, Any]) -> Keys:
        return computed(finetune_keys(FinetuneConfig.model_validate(values), files))

    for config, sections in finetune_bases(files):
        assert set(finetune_keys(config, files)) == set(get_args(FinetuneStage))
        sweep(config, sections, keys_of, files, effects)
    check(
        FinetuneConfig,
        effects,
        without=("FinetuneLaunchConfig.data_placement", "TrackingConfig.tensorboard"),
    )
