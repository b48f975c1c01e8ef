"""Files of artifacts, runs, checkpoints and configurations, and their readers."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from megacore.artifact import Manifest, StageKey, build_artifact, open_artifact
from megacore.artifact.manifest import MANIFEST_NAME
from megacore.checkpoint.format import latest_complete, read_state, verify
from megacore.checkpoint.save import save_checkpoint
from megacore.checkpoint.spec import MODEL_KEY, read_spec
from megacore.config.hostfile import read_hostfile
from megacore.config.load import load_config, read_config
from megacore.config.spec import ModelSpec
from megacore.errors import DataFormatError
from megacore.jobs.run import TrainJob
from megacore.launch.exit_reason import read_reasons, write_reason
from megacore.observe.events import EventReader, EventWriter
from megacore.observe.recorder import Recorder
from megacore.observe.runs import runs
from megacore.ranks.stages import next_attempt
from tests._tiny import tiny_config
from tests.checkpoint._read import read_tensors
from tests.faults._mutations import Form, digest_of
from tests.train import _runs

ROOT = Path(__file__).parents[2]


# artifacts and runs

KEY = StageKey("tokenize", 1, {"seed": 3}, {"corpus": "ab" * 32})


def make_artifact(directory: Path) -> Sequence[Path]:
    def fill(target: Path) -> dict[str, Any]:
        (target / "a.bin").write_bytes(np.arange(2000, dtype="<u2").tobytes())
        (target / "part").mkdir()
        (target / "part" / "b.json").write_text('{"value": [1, 2, 3]}', encoding="utf-8")
        return {"tokens": 2000}

    build_artifact(directory, KEY, fill)
    return [directory / KEY.key / "a.bin", directory / KEY.key / "part" / "b.json"]


def make_manifest(directory: Path) -> Sequence[Path]:
    make_artifact(directory)
    return [directory / KEY.key / MANIFEST_NAME]


def read_artifact(directory: Path) -> Any:
    return open_artifact(directory / KEY.key, "full").model_dump()


def make_run(directory: Path) -> Sequence[Path]:
    folder = directory / "runs" / "0123456789abcdef"
    folder.mkdir(parents=True)
    make_events(folder)
    _runs.job(_runs.config(), directory / "data", folder).write(folder / "run.json")
    Manifest("train", 1, "0123456789abcdef", {}, {}, {}, {"iterations": 3}, 1.0).write(folder)
    return [folder / "run.json", folder / "events.jsonl", folder / MANIFEST_NAME]


def read_runs(directory: Path) -> Any:
    from megacore.artifact import Workspace

    listed = runs(Workspace(directory))
    return [{name: value for name, value in run.items() if name != "size_bytes"} for run in listed]


def make_job(directory: Path) -> Sequence[Path]:
    _runs.job(_runs.config(), directory / "data", directory).write(directory / "run.json")
    return [directory / "run.json"]


def read_job(directory: Path) -> Any:
    next_attempt(directory)
    return TrainJob.read(directory / "run.json").model_dump(mode="json")


def make_config_json(directory: Path) -> Sequence[Path]:
    (directory / "config.json").write_text(_runs.config().model_dump_json(), encoding="utf-8")
    return [directory / "config.json"]


def read_config_json(directory: Path) -> Any:
    return read_config(directory / "config.json").model_dump(mode="json")


def make_events(directory: Path) -> Sequence[Path]:
    path = directory / "events.jsonl"
    with EventWriter(path, 1) as writer:
        for iteration in range(1, 9):
            common = {"iteration": iteration, "consumed_tokens": 32 * iteration}
            writer.write("step", **common, lm_loss=5.0 / iteration, lr=1e-3, grad_norm=None)
            if iteration % 4 == 0:
                writer.write("evaluation", **common, lm_loss=5.0, ppl=148.4)
                name = f"checkpoints/iter_{iteration:07d}"
                writer.write(
                    "checkpoint", **common, path=name, size_bytes=1000, validation_loss=5.0
                )
        writer.write("checkpoint_deleted", iteration=4, path="checkpoints/iter_0000004")
        writer.write("exit", iteration=8, reason="finished")
    return [path]


def read_events(directory: Path) -> Any:
    """Read the events like the forwarder, the trainer and the monitor."""
    from tasks._mlflow_events import next_batch

    path = directory / "events.jsonl"
    batch = next_batch(path, 0, set())
    copy = directory / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copy(path, copy / path.name)
    with Recorder(copy, attempt=2, rank=0, tensorboard=False) as recorder:
        reported = recorder.reported_checkpoints()
    return (
        repr((batch.points, batch.checkpoints)),
        reported,
        [event for event, _ in EventReader(path)],
    )


def make_tracking(directory: Path) -> Sequence[Path]:
    make_events(directory)
    (directory / "mlflow_offset.json").write_text(
        json.dumps({"run_id": "ab" * 16, "offset": 0}), encoding="utf-8"
    )
    (directory / "mlflow.json").write_text(
        json.dumps({"token": "cd" * 16, "run_id": "ab" * 16}), encoding="utf-8"
    )
    return [directory / "mlflow_offset.json", directory / "mlflow.json"]


def read_tracking(directory: Path) -> Any:
    from tasks._mlflow import RUN_ID_FILE, _read_state
    from tasks._mlflow_events import Forwarder

    forwarder = Forwarder(None, directory, None, None)  # type: ignore[arg-type]
    return forwarder._committed_offset("ab" * 16), _read_state(directory / RUN_ID_FILE)["run_id"]


def make_reasons(directory: Path) -> Sequence[Path]:
    write_reason(directory, 0, DataFormatError("a.bin is damaged"))
    return [directory / "rank_0.json"]


def read_exit_reasons(directory: Path) -> Any:
    reasons = read_reasons(directory)
    return [str(reason.exception()) for reason in reasons]


def make_beat(directory: Path) -> Sequence[Path]:
    from megacore.observe.heartbeat import Heartbeat, beat_path

    heartbeat = Heartbeat(beat_path(directory, 0))
    heartbeat.beat("forward", 3)
    heartbeat.beat("gradient wait")
    return [beat_path(directory, 0)]


def read_beat(directory: Path) -> Any:
    from megacore.observe.heartbeat import beat_path, read_heartbeat

    beat = read_heartbeat(beat_path(directory, 0))
    return None if beat is None else (repr(beat), beat.here, beat.waits, beat.alive)


# checkpoints


def _write_checkpoints(root: Path) -> None:
    spec = ModelSpec.of(tiny_config(), 61)
    for iteration in (10, 20):
        generator = torch.Generator().manual_seed(iteration)
        tensors = {f"model.part_{n}": torch.rand(40, 7, generator=generator) for n in range(3)}
        state = {"iteration": iteration, MODEL_KEY: spec.model_dump(mode="json")}
        save_checkpoint(root, iteration, tensors, state, validation_loss=1.0)


def make_checkpoint(directory: Path) -> Sequence[Path]:
    _write_checkpoints(directory)
    newest = directory / "iter_0000020"
    return [path for path in sorted(newest.iterdir()) if path.name != "complete.json"]


def read_verified(directory: Path) -> Any:
    return repr(verify(directory / "iter_0000020", "full"))


def make_marker(directory: Path) -> Sequence[Path]:
    _write_checkpoints(directory)
    return [directory / "iter_0000020" / "complete.json"]


def read_unverified(directory: Path) -> Any:
    newest = directory / "iter_0000020"
    return (
        digest_of(read_tensors(newest)),
        read_state(newest).get("iteration"),
        repr(read_spec(newest)),
    )


def make_root(directory: Path) -> Sequence[Path]:
    _write_checkpoints(directory)
    return [
        *sorted((directory / "iter_0000020").iterdir()),
        directory / "latest_checkpointed_iteration.txt",
    ]


def read_latest(directory: Path) -> Any:
    """Return True if the chosen checkpoint has its original content.

    The newest or the previous one may be chosen, but it must be complete.
    """
    chosen = latest_complete(directory, log=lambda message: None)
    assert chosen is not None, "nothing was found where the older checkpoint is whole"
    verify(chosen, "full")
    number = int(chosen.name.removeprefix("iter_"))
    return digest_of(read_tensors(chosen)) == _expected(number)


def _expected(iteration: int) -> str:
    generator = torch.Generator().manual_seed(iteration)
    return digest_of({f"model.part_{n}": torch.rand(40, 7, generator=generator) for n in range(3)})


# configuration


def make_conf(directory: Path) -> Sequence[Path]:
    names = ("gpt2-tiny", "t5-tiny", "gpt2-345m-zero2")
    for name in names:
        values = (ROOT / "conf" / f"{name}.yaml").read_text(encoding="utf-8")
        (directory / f"{name}.yaml").write_text(
            values.replace("conf/ds/", f"{ROOT}/conf/ds/"), encoding="utf-8"
        )
    return [directory / f"{name}.yaml" for name in names]


def read_conf(directory: Path) -> Any:
    return [
        load_config(str(path)).model_dump(mode="json") for path in sorted(directory.glob("*.yaml"))
    ]


def make_deepspeed_json(directory: Path) -> Sequence[Path]:
    shutil.copy(ROOT / "conf" / "ds" / "zero2.json", directory / "zero2.json")
    values = yaml.safe_load((ROOT / "conf" / "gpt2-345m-zero2.yaml").read_text(encoding="utf-8"))
    values["deepspeed"]["config"] = str(directory / "zero2.json")
    (directory / "run.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return [directory / "zero2.json"]


def read_deepspeed_json(directory: Path) -> Any:
    return load_config(str(directory / "run.yaml")).model_dump(mode="json")


def make_hostfile(directory: Path) -> Sequence[Path]:
    (directory / "hostfile").write_text(
        "# two nodes\nnode-a slots=8\nnode-b.local slots=8\n", encoding="utf-8"
    )
    return [directory / "hostfile"]


def read_hosts(directory: Path) -> Any:
    return read_hostfile(directory / "hostfile")


RUN_FORMS = (
    Form("artifact's files", make_artifact, read_artifact, 80, covered=True),
    Form("manifest.json", make_manifest, read_artifact, 60),
    Form("run directory", make_run, read_runs, 60),
    Form("run.json", make_job, read_job, 60),
    Form("configuration as JSON", make_config_json, read_config_json, 30),
    Form("events.jsonl", make_events, read_events, 80),
    Form("mlflow_offset.json, mlflow.json", make_tracking, read_tracking, 50),
    Form("exit reason", make_reasons, read_exit_reasons, 30),
    Form("heartbeat", make_beat, read_beat, 30),
    Form("checkpoint", make_checkpoint, read_verified, 100, covered=True),
    Form("checkpoint, not verified", make_checkpoint, read_unverified, 100, also=("iter_0000020",)),
    Form("complete.json", make_marker, read_verified, 60),
    Form("newest checkpoint", make_root, read_latest, 60, heals=True),
    Form("conf YAML", make_conf, read_conf, 60, also=("deepspeed.config is",)),
    Form(
        "DeepSpeed JSON", make_deepspeed_json, read_deepspeed_json, 50, also=("deepspeed.config",)
    ),
    Form("hostfile", make_hostfile, read_hosts, 40),
)
