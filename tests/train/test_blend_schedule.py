"""A step of a blend's weights that is added to a run when it resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.config.blend_schedule import blend_steps
from megacore.config.run import RunConfig
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Member, Mixture, WeightStep
from megacore.errors import ConfigError
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.train import _runs
from tests.train.test_loop import assert_same_run

STEP = {"samples": 30, "weights": [0.0, 1.0]}
"""Within the fourth global batch of 8 samples."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write two sources, of which the second repeats few tokens."""
    directory, random = tmp_path_factory.mktemp("tokens"), np.random.RandomState(0)
    prefixes = []
    for name, size, documents in (("web", _runs.VOCAB_SIZE, 60), ("code", 5, 12)):
        prefixes.append(str(directory / name))
        with IndexedDatasetWriter(directory / name, np.uint16) as writer:
            for _ in range(documents):
                writer.add_document(random.randint(0, size, random.randint(40, 120)))
    return prefixes


def run(tokens: list[str], train_iters: int, *steps: dict[str, Any], **train: Any) -> RunConfig:
    blend = [
        {
            "weight": weight,
            "name": Path(prefix).name,
            "source": {"kind": "prefix", "prefix": prefix},
        }
        for prefix, weight in zip(tokens, (3.0, 1.0), strict=True)
    ]
    data = {"source": None, "blend": blend, "blend_schedule": steps or None}
    defaults = _runs.config().train.model_dump()
    return _runs.config(
        data=data,
        train=defaults | {"train_iters": train_iters, "micro_batch_size": 1} | train,
        checkpoint={"save_interval": 3, "keep_last": 9},
    )


def maps(config: RunConfig, tokens: list[str], data: Path) -> Path:
    """Build the index maps of a training of 12 iterations, as the stage `index` does."""
    members = [
        Member(prefix, member.weight)
        for prefix, member in zip(tokens, config.data.train_blend, strict=True)
    ]
    steps = tuple(WeightStep(*step) for step in blend_steps(config.data))
    options = IndexOptions(
        split=config.data.split_weights, seq_length=_runs.SEQ_LENGTH, seed=config.seed
    )
    (data / "index").mkdir(parents=True)
    build_index_maps(Mixture.blend(members, steps), data / "index", options, (96, 16, None))
    return data


def test_a_step_added_on_resume_continues_as_if_it_had_always_been_there(
    tokens: list[str], tmp_path: Path
) -> None:
    intervals = {"log_interval": 4, "eval_interval": 6}
    before, after = run(tokens, 3, **intervals), run(tokens, 12, STEP, **intervals)
    plain, stepped = maps(before, tokens, tmp_path / "a"), maps(after, tokens, tmp_path / "b")
    _runs.train(after, stepped, tmp_path / "whole")
    _runs.train(before, plain, tmp_path / "half")
    _runs.train(after, stepped, tmp_path / "half", attempt=2)
    assert_same_run(tmp_path / "whole", tmp_path / "half", 12)
    changes = _runs.events(tmp_path / "half", "start")[-1]["changes"]
    assert any(change.startswith("data.blend_schedule: null -> ") for change in changes)
    # Now sample 30 is in the past.
    for steps, sample in (((), 30), (({"samples": 20, "weights": [1.0, 1.0]}, STEP), 20)):
        with pytest.raises(ConfigError, match=f"trained on 96 samples, .* at sample {sample}"):
            _runs.train(run(tokens, 12, *steps), stepped, tmp_path / "half", attempt=3)
    _check_losses_by_source(tmp_path / "whole")


def _check_losses_by_source(directory: Path) -> None:
    """Check validation's losses by source, and that training has an estimate of both."""
    for kind, name in (("evaluation", "lm_loss"), ("perplexity", "valid_loss")):
        events = _runs.events(directory, kind)
        assert events
        for event in events:
            rows = event["by_source"]
            assert [row["source"] for row in rows] == ["web", "code"]
            tokens = sum(row["tokens"] for row in rows)
            mean = sum(row["loss"] * row["tokens"] for row in rows) / tokens
            assert mean == pytest.approx(event[name], rel=1e-9)
    first, *_, last = _runs.events(directory, "step")
    assert [row["source"] for row in first["by_source"]] == ["web", "code"]
    # In the last interval all samples are of the second source, and one per micro batch.
    (code,) = last["by_source"]
    assert (code["source"], code["samples"]) == ("code", 32)
    assert code["loss"] == pytest.approx(last["lm_loss"], rel=1e-6)
