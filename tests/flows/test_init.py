"""From a text file through `megacore init` and the flow to a registered model."""

import json
import math
import random
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megacore.artifact import Workspace
from megacore.cli import app
from megacore.config import load_config
from tests.flows.conftest import on_report, outcomes

WORDS = """
old young quiet clever tired honest hungry curious cheerful careful proud lonely generous stubborn
farmer teacher ferryman doctor baker painter child gardener miller sailor judge widow shepherd clerk
found carried remembered followed painted sold repaired watched borrowed lost described bought hid
letter boat lantern basket clock bridge window kettle ladder violin blanket mirror candle orchard
river rain harvest road market winter church evening bakery storm journey wedding morning mountain
"""
QUALITIES, PEOPLE, DEEDS, THINGS, OCCASIONS = (line.split() for line in WORDS.strip().splitlines())
SHORT = {
    "train.train_iters": 6,
    "optim.lr_decay_iters": 6,
    "train.global_batch_size": 4,
    "train.micro_batch_size": 2,
    "train.eval_interval": 3,
    "train.eval_iters": 1,
    "checkpoint.save_interval": 6,
    "evaluate.max_samples": 4,
    "export.max_test_samples": 4,
    "export.parity_samples": 2,
    "export.sample_tokens": 8,
    "launch.nproc_per_node": 1,
    "launch.threads_per_rank": 1,
}


def story(characters: int) -> str:
    """Return paragraphs of English sentences."""
    source, paragraphs, length = random.Random(1), [], 0
    while length < characters:
        sentences = (
            f"The {source.choice(QUALITIES)} {source.choice(PEOPLE)} {source.choice(DEEDS)} the "
            f"{source.choice(THINGS)} {source.choice(['before', 'after', 'near'])} the "
            f"{source.choice(OCCASIONS)}."
            for _ in range(source.randint(2, 6))
        )
        paragraphs.append(" ".join(sentences) + "\n\n")
        length += len(paragraphs[-1])
    return "".join(paragraphs)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_text_file_becomes_a_registered_model(
    separate_workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    from flows.pretrain import pretrain

    rows: dict[str, str] = {}
    monkeypatch.chdir(tmp_path)
    Path("Village.txt").write_text(story(80_000), encoding="utf-8")

    started = CliRunner().invoke(app, ["init", "Village.txt", "--minutes", "0.1"])
    assert started.exit_code == 0, started.output
    named = re.search(r"--conf (\S+)$", started.output)
    assert named is not None, started.output
    with on_report(lambda runner: rows.update(outcomes(runner))):
        pretrain(named[1], SHORT)

    assert set(rows.values()) == {"ran"}
    assert list(rows)[-2:] == ["convert", "publish"]
    client = MlflowClient(f"sqlite:///{separate_workspace / 'mlflow.db'}")
    version = client.get_model_version_by_alias("village", "candidate")
    (model,) = Workspace.of().folder("convert").glob("*/model")
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    (directory,) = (path.parent for path in Workspace.of().folder("train").glob("*/run.json"))
    run = client.get_run(json.loads((directory / "mlflow.json").read_text())["run_id"])
    assert version.run_id == run.info.run_id
    vocab_size = load_config(named[1]).data.tokenizer.vocab_size  # type: ignore[union-attr]
    for metric in ("validation/ppl", "test_ppl"):
        assert 1 < run.data.metrics[metric] < 10 * vocab_size, metric
        assert math.isfinite(run.data.metrics[metric])

    listed = CliRunner().invoke(app, ["runs", "--workspace", str(separate_workspace)])
    assert listed.exit_code == 0, listed.output
    (row,) = (line for line in listed.output.splitlines() if "village" in line)
    assert "6/6" in row
    assert f"{run.data.metrics['test_ppl']:,.2f}"[:4] in row
