"""Tokenized examples of each task, and the models and rows that are refused."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megacore.artifact.manifest import list_files
from megacore.config.finetune import FinetuneConfig
from megacore.errors import ConfigError, DataFormatError, WorkerLostError
from megacore.finetune import examples
from megacore.finetune.dataset import collect_rows, open_split
from megacore.finetune.examples import build_examples, check_fit, check_head, read_task
from megacore.finetune.pretrained import collect_pretrained, read_model_config, read_tokenizer
from tests.finetune._tiny_models import (
    POSITIONS,
    copy_rows,
    pair_rows,
    text_rows,
    tiny_config,
    write_model,
    write_rows,
)

KINDS = ("bert", "deberta", "blenderbot", "t5", "gpt2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Provide artifacts of the stage `pretrained`, by kind of model."""
    root = tmp_path_factory.mktemp("models")
    directories = {}
    for kind in KINDS:
        source = write_model(root / "source" / kind, kind)
        directories[kind] = root / kind
        directories[kind].mkdir()
        model = tiny_config(source, root, "classification").model
        collect_pretrained(model, directories[kind], root / "cache", local=source)
    return directories


def build(
    pretrained: Path,
    root: Path,
    kind: str,
    train: list[dict[str, Any]],
    valid: list[dict[str, Any]] | None = None,
    **sections: dict[str, Any],
) -> tuple[dict[str, Any], Path]:
    """Return counts and directory of the examples; `valid` defaults to the training rows."""
    root.mkdir(parents=True, exist_ok=True)
    write_rows(root / "train.jsonl", train)
    write_rows(root / "valid.jsonl", train if valid is None else valid)
    config = tiny_config(pretrained.name, root, kind, **sections)
    return run(config, pretrained, root)


def run(config: FinetuneConfig, pretrained: Path, root: Path) -> tuple[dict[str, Any], Path]:
    rows, directory = root / "rows", root / "examples"
    rows.mkdir()
    directory.mkdir()
    collect_rows(config.data, rows, root / "cache", seed=config.seed)
    return build_examples(config, rows, pretrained, directory), directory


def _data(root: Path, **values: Any) -> dict[str, Any]:
    """Return the section `data` for the files that `build` writes."""
    source = {
        "kind": "files",
        "train": [str(root / "train.jsonl")],
        "valid": [str(root / "valid.jsonl")],
    }
    return {"source": source, **values}


def check(pretrained: Path, kind: str, **sections: dict[str, Any]) -> None:
    """Run the checks of `build_examples` that need no rows."""
    config = tiny_config(pretrained.name, pretrained, kind, **sections)
    model = read_model_config(config.model, pretrained)
    check_fit(config, model, read_tokenizer(config.model, pretrained))


def samples(directory: Path, split: str = "train") -> list[dict[str, Any]]:
    rows = open_split(directory, split)
    assert rows is not None
    return list(rows)


def test_pairs_have_segments_and_special_tokens(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"sentence1": "the cat", "sentence2": "runs", "label": 1},
        {"sentence1": "the", "sentence2": "", "label": 0},
    ]
    counts, directory = build(models["bert"], tmp_path, "classification", rows)
    the, cat, runs = 4, 12, 20
    assert samples(directory) == [
        {"labels": 1, "input_ids": [2, the, cat, 3, runs, 3], "token_type_ids": [0, 0, 0, 0, 1, 1]},
        {"labels": 0, "input_ids": [2, the, 3, 3], "token_type_ids": [0, 0, 0, 1]},
    ]
    assert counts == {"train": 2, "valid": 2, "tokens": 10, "longest": 6, "num_labels": 2}
    assert read_task(directory)["labels"] == ["0", "1"]
    assert {path.name for path in directory.iterdir()} == {"train", "valid", "task.json"}


def test_model_without_segments_gets_no_segment_ids(
    models: dict[str, Path], tmp_path: Path
) -> None:
    _, directory = build(models["deberta"], tmp_path, "classification", pair_rows(4))
    assert set(samples(directory)[0]) == {"input_ids", "labels"}


def test_pair_of_a_decoder_is_divided_by_a_line_break(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"sentence1": "the cat", "sentence2": "runs", "label": number} for number in (0, 1)]
    padding = {"pad_token": "<|endoftext|>"}
    _, directory = build(
        models["gpt2"], tmp_path, "classification", rows, model={"path": "gpt2", **padding}
    )
    the, cat, runs, line = 1, 9, 17, 41
    assert samples(directory)[0]["input_ids"] == [the, cat, line, runs]


def test_long_texts_are_truncated(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"sentence1": "the cat " * 20, "sentence2": "runs", "label": number % 2}
        for number in range(2)
    ]
    for kind in ("bert", "t5"):
        counts, directory = build(models[kind], tmp_path / kind, "classification", rows)
        assert counts["longest"] == 16
        assert samples(directory)[0]["input_ids"][-1] == {"bert": 3, "t5": 2}[kind]


def test_targets_have_an_end_token_and_sources_a_prefix(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [{"source": "cat dog bird", "target": "the " * 9}, {"source": "cat", "target": "dog"}]
    task = {"source_prefix": "the ", "max_source_length": 4, "max_target_length": 3}
    counts, directory = build(models["blenderbot"], tmp_path, "seq2seq", rows, task=task)
    the, cat, dog, end = 3, 11, 12, 2
    assert samples(directory) == [
        {"input_ids": [the, cat, dog, end], "labels": [the, the, end]},
        {"input_ids": [the, cat, end], "labels": [dog, end]},
    ]
    assert counts == {"train": 2, "valid": 2, "tokens": 7, "longest": 4}


def test_running_text_is_divided_into_blocks(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacore.finetune import causal_lm

    monkeypatch.setattr(causal_lm, "_ROWS", 3)
    rows = [*text_rows(7), {"text": ""}, *text_rows(4, 2)]
    task = {"append_eos": True}
    counts, directory = build(models["gpt2"], tmp_path, "causal_lm", rows, task=task)
    ids = [
        1 + _word_number(word) if word else 0 for row in rows for word in [*row["text"].split(), ""]
    ]
    assert len(ids) == 11 * 13 + 1
    assert [row["input_ids"] for row in samples(directory)] == [
        ids[start : start + 16] for start in range(0, 144, 16)
    ]
    assert counts == {"train": 9, "valid": 9, "tokens": 144, "longest": 16}


def _word_number(word: str) -> int:
    from tests.finetune._tiny_models import WORDS

    return WORDS.index(word)


def test_sample_limits_take_the_first_rows(models: dict[str, Path], tmp_path: Path) -> None:
    counts, directory = build(
        models["bert"],
        tmp_path,
        "classification",
        pair_rows(20),
        data={"max_train_samples": 7, "max_valid_samples": 99},
    )
    assert (counts["train"], counts["valid"]) == (7, 20)
    assert samples(directory) == samples(directory, "valid")[:7]


def test_number_of_workers_does_not_change_the_files(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_ROWS_PER_WORKER", 5)
    for kind, model, rows in (
        ("classification", "bert", pair_rows(12)),
        ("causal_lm", "gpt2", text_rows(12)),
    ):
        digests = []
        for workers in (1, 2):
            folder = tmp_path / f"{kind}-{workers}"
            _, directory = build(
                models[model], folder, kind, rows, data=_data(folder, workers=workers)
            )
            digests.append({name: entry.sha256 for name, entry in list_files(directory).items()})
        assert digests[0] == digests[1]


def test_killed_worker_is_a_retryable_error(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "_ROWS_PER_WORKER", 5)
    monkeypatch.setattr(examples, "encode_texts", _kill_this_process)
    with pytest.raises(
        WorkerLostError, match=r"a process that tokenized was killed.*set data\.workers to fewer"
    ):
        build(
            models["bert"],
            tmp_path,
            "classification",
            pair_rows(12),
            data=_data(tmp_path, workers=2),
        )


def _kill_this_process(_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def labels(values: list[Any]) -> list[dict[str, Any]]:
    return [{"sentence1": "the cat", "sentence2": "runs", "label": value} for value in values]


def test_class_names_come_from_the_training_split(models: dict[str, Path], tmp_path: Path) -> None:
    _, directory = build(models["bert"], tmp_path, "classification", labels(["yes", "no", "maybe"]))
    assert read_task(directory)["labels"] == ["maybe", "no", "yes"]
    assert [row["labels"] for row in samples(directory)] == [2, 1, 0]


def test_glue_determines_columns_and_classes(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [
        {"question1": "the", "question2": "cat", "label": value}
        for value in ("duplicate", "not_duplicate")
    ]
    task = {
        "kind": "classification",
        "glue": "qqp",
        "sentence1_column": None,
        "sentence2_column": None,
    }
    _, directory = build(models["bert"], tmp_path, "classification", rows, task=task)
    assert read_task(directory)["labels"] == ["not_duplicate", "duplicate"]
    assert [row["labels"] for row in samples(directory)] == [1, 0]


def test_labels_of_a_regression_are_numbers(models: dict[str, Path], tmp_path: Path) -> None:
    _, directory = build(
        models["bert"], tmp_path, "classification", labels([0.5, 4]), task={"regression": True}
    )
    assert [row["labels"] for row in samples(directory)] == [0.5, 4.0]
    assert read_task(directory)["labels"] is None


def test_configured_classes_may_rename_or_reorder_those_of_the_data(
    models: dict[str, Path], tmp_path: Path
) -> None:
    import datasets

    names = datasets.ClassLabel(names=["no", "yes"])
    rows = datasets.Dataset.from_list(labels([0, 1])).cast_column("label", names)
    for folder in ("set", "rows"):
        (tmp_path / folder).mkdir()
    rows.to_parquet(tmp_path / "set/train.parquet")
    rows.to_parquet(tmp_path / "set/validation.parquet")
    source = {"kind": "hub", "dataset": str(tmp_path / "set")}
    config = tiny_config("bert", tmp_path, "classification", data={"source": source})
    collect_rows(config.data, tmp_path / "rows", tmp_path / "cache", seed=1)
    for configured, numbers in (
        (None, [0, 1]),
        (["bad", "good"], [0, 1]),
        (["yes", "no"], [1, 0]),
        (["YES", "NO"], [1, 0]),
        (["no", "maybe"], None),
        (["No", "maybe"], None),
    ):
        config = tiny_config(
            "bert", tmp_path, "classification", data={"source": source}, task={"labels": configured}
        )
        directory = tmp_path / f"examples-{configured}"
        directory.mkdir()
        if numbers is None:
            with pytest.raises(
                DataFormatError, match=r"the classes are [Nn]o, maybe .* column 'label' has no, yes"
            ):
                build_examples(config, tmp_path / "rows", models["bert"], directory)
        else:
            build_examples(config, tmp_path / "rows", models["bert"], directory)
            assert read_task(directory)["labels"] == (configured or ["no", "yes"])
            assert [row["labels"] for row in samples(directory)] == numbers


@pytest.mark.parametrize(
    ("kind", "model", "rows", "task", "message"),
    [
        (
            "classification",
            "bert",
            pair_rows(2),
            {"sentence2_column": "sentence_2"},
            (
                r"task\.sentence2_column is 'sentence_2', but the train split has the columns "
                r"sentence1, sentence2, label \(did you mean sentence2\?\)"
            ),
        ),
        (
            "classification",
            "bert",
            pair_rows(2),
            {"label_column": "x"},
            r"task\.label_column is 'x', but .*: name one",
        ),
        (
            "classification",
            "bert",
            pair_rows(2),
            {"sentence1_column": "label"},
            r"holds int64 in the train split",
        ),
        (
            "classification",
            "bert",
            [*labels([0]), {"sentence1": None, "sentence2": "the", "label": 1}],
            {},
            (
                r"row 1 of the train split has no text in column 'sentence1' "
                r"\(task\.sentence1_column\)"
            ),
        ),
        (
            "seq2seq",
            "blenderbot",
            [*copy_rows(1), {"source": "the", "target": 7}],
            {},
            r"row 1 of the train split has 7 in column 'target' \(task\.target_column\), .*quotes",
        ),
        (
            "causal_lm",
            "gpt2",
            [{"text": " "}] * 3,
            {},
            r"column 'text' .* is empty in every row of the train split",
        ),
        (
            "causal_lm",
            "gpt2",
            text_rows(1),
            {},
            r"the train split has 12 tokens, fewer than the 16 of one block",
        ),
        (
            "causal_lm",
            "gpt2",
            [{"content": "the"}],
            {},
            r"task\.text_column is 'text', but .*columns content",
        ),
        (
            "seq2seq",
            "blenderbot",
            copy_rows(2),
            {"target_column": "targets"},
            r"\(did you mean target\?\)",
        ),
    ],
)
def test_rows_that_do_not_fit_the_task_are_refused(
    kind: str,
    model: str,
    rows: list[dict[str, Any]],
    task: dict[str, Any],
    message: str,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    with pytest.raises(DataFormatError, match=message):
        build(models[model], tmp_path, kind, rows, task=task)


def test_texts_of_all_types_of_parquet_are_read(models: dict[str, Path], tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = ["the cat", "the dog"]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        root = tmp_path / str(kind)
        root.mkdir()
        pq.write_table(pa.table({"text": pa.array(texts, kind)}), root / "rows.parquet")
        files = [str(root / "rows.parquet")]
        source = {"kind": "files", "train": files, "valid": files}
        block = {"block_size": 2}
        config = tiny_config("gpt2", root, "causal_lm", data={"source": source}, task=block)
        assert run(config, models["gpt2"], root)[0]["train"] == 2


def test_bad_row_has_its_number_in_the_source_if_rows_are_held_out(
    models: dict[str, Path], tmp_path: Path
) -> None:
    splits = set()
    for bad in range(8):
        rows = labels([0, 1] * 4)
        rows[bad]["sentence1"] = None
        root = tmp_path / str(bad)
        source = {"kind": "files", "train": [str(root / "train.jsonl")]}
        data = {"source": source, "valid_share": 0.25}
        with pytest.raises(
            DataFormatError,
            match=rf"^row {bad} of data\.source\.train \(row \d of the \w+ split\) has no text in",
        ) as refused:
            build(models["bert"], root, "classification", rows, data=data)
        splits.add(str(refused.value).split()[8])
    assert splits == {"train", "valid"}


def test_text_without_tokens_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"sentence": "the", "label": 0}, {"sentence": "", "label": 1}]
    task = {"sentence1_column": "sentence", "sentence2_column": None}
    model = {"path": "gpt2", "pad_token": "<|endoftext|>"}
    with pytest.raises(
        DataFormatError,
        match=r"row 1 of the train split has no text, and the tokenizer adds nothing",
    ):
        build(models["gpt2"], tmp_path, "classification", rows, task=task, model=model)


def test_rows_with_different_numbers_of_end_tokens_are_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = [*labels([0]), {"sentence1": "the </s> cat", "sentence2": "the", "label": 1}]
    with pytest.raises(
        DataFormatError, match=r"row 1 of the train split has another number of end tokens \(id 2\)"
    ):
        build(models["t5"], tmp_path, "classification", rows)


@pytest.mark.parametrize(
    ("kind", "model", "sections", "message"),
    [
        (
            "seq2seq",
            "gpt2",
            {},
            r"gpt2 is GPT2LMHeadModel, a decoder, but task\.kind seq2seq takes an encoder-decoder",
        ),
        (
            "causal_lm",
            "t5",
            {},
            r"T5ForConditionalGeneration, an encoder-decoder, .*set task\.kind to seq2seq or class",
        ),
        (
            "causal_lm",
            "bert",
            {},
            r"bert is BertForPreTraining, an encoder, .* takes a decoder, such as GPT-2 or Llama",
        ),
        ("causal_lm", "deberta", {}, r"DebertaV2ForMaskedLM, an encoder"),
        (
            "classification",
            "blenderbot",
            {},
            r"BlenderbotForConditionalGeneration, an encoder-decoder, .* to seq2seq",
        ),
        (
            "classification",
            "gpt2",
            {},
            (
                r"the tokenizer of model\.path gpt2 has no padding token.*model\.pad_token, such "
                r"as '<\|endoftext\|>'"
            ),
        ),
        (
            "classification",
            "bert",
            {"model": {"path": "b", "pad_token": "<p>"}},
            r"model\.pad_token is '<p>', which",
        ),
        (
            "classification",
            "bert",
            {"task": {"max_length": POSITIONS + 1}},
            r"task\.max_length is 65, but model\.path bert has 64 positions",
        ),
        (
            "causal_lm",
            "gpt2",
            {"task": {"block_size": 128}},
            r"task\.block_size is 128, but .* has 64 positions",
        ),
        (
            "seq2seq",
            "blenderbot",
            {"task": {"max_target_length": 70}},
            r"task\.max_target_length is 70, but .* 64",
        ),
    ],
)
def test_models_that_do_not_fit_the_task_are_refused(
    kind: str, model: str, sections: dict[str, Any], message: str, models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(models[model], kind, **sections)


def test_relative_positions_have_no_maximum_length(models: dict[str, Path]) -> None:
    check(models["t5"], "seq2seq", task={"max_source_length": 500, "max_target_length": 100})


@pytest.mark.parametrize("kind", ["layoutlmv3", "lilt", "luke", "markuplm", "roberta"])
def test_positions_up_to_the_padding_id_are_not_counted(kind: str) -> None:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](max_position_embeddings=POSITIONS, pad_token_id=1)
    assert examples.positions(config) == POSITIONS - 2


def test_positions_of_sources_and_targets_may_differ() -> None:
    from transformers import LEDConfig

    led = LEDConfig(max_encoder_position_embeddings=64, max_decoder_position_embeddings=32)
    lengths = ("max_source_length", "max_target_length", "max_length")
    assert [examples.positions(led, length) for length in lengths] == [64, 32, 64]


def test_tokenizer_with_more_ids_than_the_model_is_refused(
    models: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "small"
    source = write_model(directory / "model", "gpt2")
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(values | {"vocab_size": 30}))
    with pytest.raises(
        ConfigError, match=r"model\.path small has ids up to 41, but the model's vocabulary has 30"
    ):
        check(directory, "causal_lm")


def test_model_needs_no_embedding_of_the_mask(tmp_path: Path) -> None:
    """facebook/bart-large-cnn has none."""
    from transformers import AutoTokenizer

    pretrained = tmp_path / "blenderbot"
    source = write_model(pretrained / "model", "blenderbot")
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(source)
    counts, _ = build(pretrained, tmp_path / "sound", "seq2seq", copy_rows(4))
    assert counts["train"] == 4
    for column in copy_rows(1)[0]:
        rows = [*copy_rows(2), copy_rows(1)[0] | {column: "the <mask>"}]
        with pytest.raises(
            DataFormatError, match=r"row 2 of the train split has the tokenizer's <mask>"
        ):
            build(pretrained, tmp_path / column, "seq2seq", rows)


@pytest.mark.parametrize(
    ("names", "values", "message"),
    [
        (
            ["a", "b", "c"],
            ["a", "b"],
            r"has a trained head of 3 outputs \(a, b, c\), but the data has 2 classes \(a, b\)",
        ),
        (
            ["b", "a"],
            ["a", "b"],
            (
                r"a trained head with the classes b, a, but the data numbers them a, b: set "
                r"task\.labels to \[b, a\]"
            ),
        ),
        (["B", "A"], ["a", "b"], r"with the classes B, A, .* set task\.labels to \[b, a\]"),
        (["b", "B"], ["B", "b"], r"with the classes b, B, .* set task\.labels to \[b, B\]"),
        (["A", "B"], ["a", "b"], None),
        (["LABEL_0", "LABEL_1"], ["a", "b"], None),
        (["a", "b"], ["a", "b"], None),
    ],
)
def test_trained_head_for_other_labels_is_refused(
    names: list[str],
    values: list[str],
    message: str | None,
    models: dict[str, Path],
    tmp_path: Path,
) -> None:
    config = tiny_config("tuned", tmp_path, "classification")
    model = read_model_config(config.model, models["bert"])
    model.architectures, model.id2label = ["BertForSequenceClassification"], dict(enumerate(names))
    if message is None:
        check_head(config, model, tuple(values))
        return
    with pytest.raises(ConfigError, match=message):
        check_head(config, model, tuple(values))


def test_wikitext_is_read(models: dict[str, Path], tmp_path: Path, shared_data: Path) -> None:
    source = {"kind": "files", "train": [str(shared_data / "data/wikitext2-valid.txt")]}
    config = tiny_config(
        "gpt2", tmp_path, "causal_lm", data={"source": source, "max_train_samples": 200}
    )
    counts, directory = run(config, models["gpt2"], tmp_path)
    assert counts["train"] == counts["tokens"] // 16 > 500
    assert counts["valid"] > 10
    assert all(len(row["input_ids"]) == 16 for row in samples(directory))


def test_lambada_is_read(models: dict[str, Path], tmp_path: Path, shared_data: Path) -> None:
    source = {"kind": "files", "train": [str(shared_data / "data/lambada_test.jsonl")]}
    config = tiny_config(
        "gpt2",
        tmp_path,
        "causal_lm",
        data={"source": source, "valid_share": 0.01, "max_train_samples": 100},
    )
    counts, _ = run(config, models["gpt2"], tmp_path)
    assert counts["train"] > 100
