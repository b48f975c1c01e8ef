"""Runs that start from another checkpoint's weights: their keys and refusals."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megacore.artifact import Artifact
from megacore.artifact.files import write_json
from megacore.checkpoint.format import Marker
from megacore.config import RunConfig
from megacore.config.spec import ModelSpec, SpecialTokens
from megacore.errors import CheckpointError, ConfigError
from tasks.convert import convert_key
from tasks.index import RunData
from tasks.preflight import check_machine
from tasks.train import check_pretrained, job_of, run_key
from tests.tasks.conftest import make_config

INPUT = Artifact(stage="tokenize", key="ab" * 8, path="somewhere", digest="f" * 64, counts={})


def checkpoint(
    path: Path, config: RunConfig, iteration: int = 0, special: SpecialTokens | None = None
) -> Path:
    """Write the metadata of a checkpoint, without weights."""
    path.mkdir(parents=True)
    spec = ModelSpec.of(config, 500, special)
    write_json(path / "state.json", {"model": spec.model_dump(mode="json")})
    Marker(iteration, None, {}).write(path)
    return path


def config_from(path: Path, **model: Any) -> RunConfig:
    config = make_config()
    return config.model_copy(
        update={
            "train": config.train.model_copy(update={"pretrained_checkpoint": str(path)}),
            "model": config.model.model_copy(update=model),
        }
    )


def key(config: RunConfig) -> str:
    return run_key(config, INPUT, INPUT).key


def tokens_at(directory: Path) -> Artifact:
    """Return token files in `directory`, without content."""
    (directory / "tokens_text_document.idx").touch()
    return INPUT.model_copy(update={"path": str(directory)})


@pytest.mark.parametrize("section", ["train.pretrained_checkpoint", "resume.checkpoint"])
def test_tokens_of_the_continued_model_are_kept(tmp_path: Path, section: str) -> None:
    config = make_config()
    earlier = SpecialTokens(eod=1, bos=0, pad=4, ends=(2, 499, 500))
    path = checkpoint(tmp_path / "iter_0000000", config, special=earlier)
    special = SpecialTokens(eod=2, pad=3)
    counts = {"vocab_size": 500, "special_tokens": special.model_dump(mode="json")}
    tokenizer = INPUT.model_copy(update={"counts": counts})
    tokens = tokens_at(tmp_path)

    def tokens_of(config: RunConfig) -> SpecialTokens:
        job = job_of(
            config, tmp_path / "run", RunData(tokens, tokenizer, INPUT), ranks=1, threads=1
        )
        return job.special_tokens

    assert tokens_of(config) == special
    name, field = section.split(".")
    changed = getattr(config, name).model_copy(update={field: str(path)})
    continued = tokens_of(config.model_copy(update={name: changed}))
    assert continued == special.model_copy(update={"bos": 0, "ends": (1, 499)})


def test_an_export_runs_again_only_if_it_names_other_tokens_than_an_end(tmp_path: Path) -> None:
    tokens, counts = tokens_at(tmp_path), {"vocab_size": 500, "special_tokens": {"eod": 1}}
    evaluation = INPUT.model_copy(update={"counts": {"best": "iter_0000001"}})

    def parameters(config: RunConfig, settings: dict[str, Any]) -> dict[str, Any]:
        write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<e>", **settings})
        tokenizer = tokens.model_copy(update={"counts": counts})
        return convert_key(config, INPUT, evaluation, RunData(tokens, tokenizer, INPUT)).parameters

    vocabulary = {"<b>": 0, "<e>": 1}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<e>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    config = make_config()
    plain = parameters(config, {})
    assert plain["checkpoint"] == "iter_0000001"
    assert not {"bos", "ends"} & plain.keys()
    assert parameters(config, {"bos_token": "<e>"}) == plain
    assert parameters(config, {"bos_token": "<b>"}) == plain | {"bos": 0}
    for number, (earlier, expected) in enumerate(
        [
            (SpecialTokens(eod=1), {}),
            (SpecialTokens(eod=1, bos=7), {"bos": 7}),
            (SpecialTokens(eod=1, bos=7, ends=(2, 3)), {"bos": 7, "ends": [2, 3]}),
            (SpecialTokens(eod=1, pad=9), {"pad": 9}),
            (SpecialTokens(eod=1, pad=500), {}),
        ]
    ):
        path = checkpoint(tmp_path / str(number) / "iter_0000000", config, special=earlier)
        assert parameters(config_from(path), {}) == plain | expected


def test_key_depends_on_the_initial_checkpoint_and_not_its_path(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "iter_0000000", make_config())
    other = checkpoint(tmp_path / "other/iter_0000010", make_config(), iteration=10)
    moved = tmp_path / "moved/iter_0000000"
    shutil.copytree(first, moved)
    keys = {key(make_config()), key(config_from(first)), key(config_from(other))}
    assert len(keys) == 3
    assert key(config_from(moved)) == key(config_from(first))


@pytest.mark.parametrize("refuse", [key, check_pretrained, check_machine])
def test_incomplete_checkpoint_is_refused_before_the_start(tmp_path: Path, refuse: Any) -> None:
    (tmp_path / "iter_0000001").mkdir()
    with pytest.raises(
        ConfigError,
        match=r"pretrained_checkpoint is .*iter_0000001, which has no complete\.json: give",
    ):
        refuse(config_from(tmp_path / "iter_0000001"))


def test_another_architecture_is_refused_before_the_start(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "iter_0000000", make_config())
    check_pretrained(config_from(path, hidden_dropout=0.3))
    with pytest.raises(
        CheckpointError, match=r"another model: model\.activation is gelu_tanh there and relu here"
    ):
        check_machine(config_from(path, activation="relu"))


@pytest.mark.parametrize("refuse", [check_pretrained, check_machine])
def test_a_longer_table_of_positions_is_refused_before_the_start(
    tmp_path: Path, refuse: Any
) -> None:
    path = checkpoint(tmp_path / "iter_0000000", make_config())
    longer = config_from(path)
    longer = longer.model_copy(update={"data": longer.data.model_copy(update={"seq_length": 64})})
    with pytest.raises(
        CheckpointError,
        match=r"learned table of 16 positions, which cannot be extended to the 64 of this run: set",
    ):
        refuse(longer)
