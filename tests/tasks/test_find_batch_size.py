"""Keys of the batch size search and the table of its results."""

from pathlib import Path
from typing import Any

import pytest
from prefect.logging import disable_run_logger

from megacore.artifact import Artifact
from megacore.artifact.files import read_object
from megacore.config.finetune import FinetuneConfig
from megacore.hardware import Gpu, Hardware
from megacore.ranks.batch_size_search import as_markdown, notes, table_rows
from tasks import find_batch_size as stage
from tasks.find_batch_size import counts_of, find_batch_size_key
from tests.finetune._tiny_models import tiny_config


def artifact(name: str, digest: str = "d") -> Artifact:
    return Artifact(stage=name, key="k", path=name, digest=digest, counts={"train": 10})


def key(config: FinetuneConfig, method: Any = "zero2", digest: str = "d") -> str:
    return find_batch_size_key(
        config, method, artifact("pretrained"), artifact("examples", digest)
    ).key


def config(**sections: Any) -> FinetuneConfig:
    return tiny_config("model", Path("data"), "classification", **sections)


JSON = {"zero_optimization": {"stage": 2, "overlap_comm": False}}


@pytest.mark.parametrize(
    ("sections", "method"),
    [
        ({"train": {"micro_batch_size": 16}}, "zero2"),
        ({"train": {"num_epochs": 9, "max_steps": 4, "log_interval": 3}}, "zero2"),
        ({"launch": {"distributed": "zero3"}}, "zero2"),
        (
            {
                "launch": {
                    "distributed": "zero3",
                    "deepspeed_config": {"zero_optimization": {"stage": 3}},
                }
            },
            "zero2",
        ),
        ({"find_batch_size": {"methods": ["zero2"]}}, "zero2"),
        ({"launch": {"stall_limit": 5}, "checkpoint": {"keep_last": 3}}, "zero2"),
    ],
)
def test_key_ignores_searched_and_operational_options(
    sections: dict[str, Any], method: str
) -> None:
    assert key(config(**sections), method) == key(config(), method)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"gradient_accumulation_steps": 2}},
        {"train": {"gradient_checkpointing": True}},
        {"train": {"eval_batch_size": 9}},
        {"train": {"precision": "bf16"}},
        {"task": {"max_length": 12}},
        {"model": {"random_weights": True}},
        {"optim": {"lr": 1e-5}},
        {"seed": 5},
        {"launch": {"nproc_per_node": 2}},
        {"launch": {"distributed": "zero2", "deepspeed_config": JSON}},
        {"find_batch_size": {"memory_limit_gb": 1.0}},
        {"find_batch_size": {"max_batch": 64}},
        {"find_batch_size": {"steps": 2}},
    ],
)
def test_key_contains_options_that_affect_memory_time_and_metrics(sections: dict[str, Any]) -> None:
    seed = sections.get("seed")
    other = config().model_copy(update={"seed": seed}) if seed else config(**sections)
    assert key(other) != key(config())


def test_key_contains_method_samples_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {key(config()), key(config(), "ddp"), key(config(), digest="e")}
    for gpus in ((Gpu("small", 10**10),), (Gpu("large", 10**10),), (Gpu("large", 8 * 10**10),)):
        monkeypatch.setattr(
            stage.Hardware, "detect", staticmethod(lambda gpus=gpus: Hardware(4, 10**10, gpus))
        )
        keys.add(key(config()))
    monkeypatch.setattr(stage, "installed_version", lambda name: "0")
    keys.add(key(config()))
    assert len(keys) == 7


def report(method: str, batch: int, seconds: float | None, **changed: Any) -> dict[str, Any]:
    epoch = {
        "train_seconds_per_epoch": seconds,
        "evaluation_seconds": 1.25,
        "metric": "f1",
        "value": 0.5,
    }
    return {
        "method": method,
        "ranks": 2,
        "precision": "bf16",
        "samples": 3668,
        "memory_limit": 8 * 10**9,
        "limit": 64,
        "batch": batch,
        "peak_memory": 7_500_000_000 if batch else None,
        "reason": f"rank 0: out of memory with a micro batch of {batch + 1}",
        "tried": {},
        "epoch": None
        if seconds is None
        else epoch | {"metrics": {"loss": 0.7, "accuracy": 0.75, "f1": 0.5}},
        "epoch_failure": None,
    } | changed


REPORTS = [
    report("ddp", 0, None),
    report("zero2", 40, 108.5),
    report("zero3", 64, 90.25, reason=None, memory_limit=6 * 10**9),
    report("zero3-offload", 48, None, epoch_failure="rank 1: in an evaluation"),
]


def test_table_has_one_row_per_method() -> None:
    assert as_markdown(table_rows(REPORTS)).splitlines() == [
        (
            "| method | largest batch per rank | peak memory of a rank (GB) | time per epoch (s) | "
            "evaluation (s) | accuracy | f1 |"
        ),
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| ddp | - | - | - | - | - | - |",
        "| zero2 | 40 | 7.50 | 108.5 | 1.2 | 0.7500 | 0.5000 |",
        "| zero3 | 64 | 7.50 | 90.2 | 1.2 | 0.7500 | 0.5000 |",
        "| zero3-offload | 48 | 7.50 | - | - | - | - |",
    ]


def test_notes_explain_limits_and_recommend_settings() -> None:
    text = notes(REPORTS)
    assert "2 ranks in bf16, 6.00 GB of memory each; epochs of 3,668 samples." in text
    assert "- ddp: 1 does not fit: rank 0: out of memory with a micro batch of 1\n" in text
    assert "- zero2: 41 does not fit: " in text
    assert "- zero3: 64 is the most that was tried" in text
    assert (
        "- zero3-offload: 48 fits for some steps, and the epoch did not: rank 1: in an evaluation\n"
        in text
    )
    assert text.endswith("`launch.distributed=zero3 train.micro_batch_size=64`.\n")


def test_notes_without_epochs_recommend_nothing() -> None:
    text = notes([report("ddp", 0, None, memory_limit=None)])
    assert "95 % of each GPU" in text
    assert "launch.distributed=" not in text


def test_artifact_counts_contain_the_result() -> None:
    assert counts_of(REPORTS[1]) == {
        "method": "zero2",
        "batch": 40,
        "epoch_seconds": 108.5,
        "f1": 0.5,
    }
    assert counts_of(REPORTS[0]) == {"method": "ddp", "batch": 0}


def test_reasons_name_the_logs_where_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGACORE_WORKSPACE", str(tmp_path))

    def compare(*arguments: Any, scratch: Path, **options: Any) -> dict[str, Any]:
        log = scratch / "probe-00041" / "probe.log"
        log.parent.mkdir()
        log.write_text("std::bad_alloc", encoding="utf-8")
        tried = {"41": {"reason": f"std::bad_alloc: see {log}"}}
        return report("ddp", 40, 1.5, reason=f"std::bad_alloc: see {log}", tried=tried)

    monkeypatch.setattr(stage, "compare", compare)
    with disable_run_logger():
        result = stage.find_batch_size.fn(
            config(), "ddp", artifact("pretrained"), artifact("examples")
        )
    written = read_object(result.artifact.directory / stage.REPORT)
    for reason in (written["reason"], written["tried"]["41"]["reason"]):
        assert Path(reason.partition("see ")[2]).read_text(encoding="utf-8") == "std::bad_alloc"
