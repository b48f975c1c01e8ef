"""MLflow models of BERT and T5 exports."""

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.config import RunConfig
from megacore.convert.hf.write import write_model
from tasks._mlflow import RunFacts, Tracking, ensure_run
from tasks._registry import publish_model, task_of
from tests.convert._models import VOCAB_SIZE, our_model, tiny_spec


def export(name: str, directory: Path) -> Path:
    """Write a tiny export with a tokenizer of words, as the convert stage does."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spec = tiny_spec(name)
    write_model(directory / "model", spec, dict(our_model(spec).named_parameters()))
    roles = {
        "pad_token": 0,
        "unk_token": 1,
        "cls_token": 2,
        "sep_token": 3,
        "mask_token": 4,
        "eos_token": 5,
    }
    words = {f"[{role}]": number for role, number in roles.items()}
    words |= {f"w{number}": number for number in range(len(words), VOCAB_SIZE)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[unk_token]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {role: f"[{role}]" for role in roles}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(directory / "model")
    (directory / "parity.json").write_text("{}")
    (directory / "sample.txt").write_text("")
    return directory


def publish(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    directory: Path,
    **options: bool,
) -> str:
    run_id = ensure_run(tracking, run_directory, config, facts)
    receipt = publish_model(
        tracking,
        run_id,
        directory,
        config.registered_model,
        digest=directory.name,
        iteration=1,
        metrics={},
        tags={},
        **options,
    )
    return receipt["uri"]


@pytest.mark.parametrize("name", ["bert", "megatron-bert"])
def test_bert_is_loaded_as_a_fill_mask_pipeline(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow

    uri = publish(tracking, run_directory, config, facts, export(name, tmp_path / name))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    filler = mlflow.transformers.load_model(uri)
    assert type(filler).__name__ == "FillMaskPipeline"
    assert len(filler("w10 [mask_token] w20")) == 5
    assert mlflow.pyfunc.load_model(uri).predict("w10 [mask_token] w20")


def test_t5_is_loaded_as_model_and_tokenizer(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow

    directory = export("t5-v1.1", tmp_path / "t5")
    uri = publish(tracking, run_directory, config, facts, directory)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    loaded = mlflow.transformers.load_model(uri, return_type="components")
    ids = loaded["tokenizer"]("w10 w11", return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids.tolist() == [[10, 11]]
    assert type(loaded["model"]).__name__ == "T5ForConditionalGeneration"
    assert loaded["model"].generate(ids, max_new_tokens=3, min_new_tokens=3).shape == (1, 4)
    with pytest.raises(mlflow.exceptions.MlflowException, match="python_function"):
        mlflow.pyfunc.load_model(uri)


def test_t5_is_served_only_if_transformers_has_its_pipeline(tmp_path: Path) -> None:
    import transformers

    spec = tiny_spec("t5")
    write_model(tmp_path, spec, dict(our_model(spec).named_parameters()))
    task = task_of(tmp_path)
    assert task.served is hasattr(transformers, task.pipeline)


@pytest.mark.parametrize(
    ("values", "name", "options"),
    [
        (
            {"architectures": ["MarianMTModel"], "is_encoder_decoder": True},
            "text2text-generation",
            {},
        ),
        (
            {"architectures": ["BartForSequenceClassification"], "is_encoder_decoder": True},
            "text-classification",
            {},
        ),
        ({"architectures": ["BloomForCausalLM"]}, "text-generation", {"max_new_tokens": 256}),
        (
            {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096},
            "text-generation",
            {"max_new_tokens": 256},
        ),
    ],
)
def test_task_of_other_architectures_follows_from_their_class(
    tmp_path: Path, values: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    task = task_of(tmp_path)
    assert (task.name, task.options, task.served) == (name, options, name != "text2text-generation")


def test_task_follows_from_the_model_class(tmp_path: Path) -> None:
    for name, expected in (
        ("llama", "text-generation"),
        ("bert-masked", "fill-mask"),
        ("t5", "text2text-generation"),
    ):
        spec = tiny_spec(name)
        write_model(tmp_path / name, spec, dict(our_model(spec).named_parameters()))
        task = task_of(tmp_path / name)
        assert task.name == expected
        assert task.options == ({"max_new_tokens": 16} if name == "llama" else {})


@pytest.mark.parametrize("pairs", [False, True])
def test_classifier_is_described_by_the_texts_that_it_reads(
    tracking: Tracking,
    run_directory: Path,
    config: RunConfig,
    facts: RunFacts,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pairs: bool,
) -> None:
    import mlflow
    from transformers import AutoTokenizer, BertForSequenceClassification

    from tests.finetune import _tiny_models

    directory = tmp_path / "classifier"
    files = _tiny_models.write_model(directory / "model", "bert")
    for name in ("parity.json", "sample.txt"):
        (directory / name).write_text("{}")
    model = BertForSequenceClassification.from_pretrained(files, num_labels=2).eval()
    model.classifier.weight.data *= 100
    model.save_pretrained(files)
    publish(tracking, run_directory, config, facts, directory)  # as of one text
    uri = publish(tracking, run_directory, config, facts, directory, pairs=pairs)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)
    served = mlflow.pyfunc.load_model(uri)
    row = {"text": "the cat", "text_pair": "runs"} if pairs else {"text": "the cat"}
    ids = AutoTokenizer.from_pretrained(files)(*row.values(), return_tensors="pt")
    scores = model(**ids).logits[0].softmax(0).tolist()
    answer = served.predict([row] if pairs else row["text"])
    assert answer["score"].tolist() == pytest.approx([max(scores)], rel=1e-5)
    assert served.metadata.get_output_schema().input_names() == list(answer.columns)
    if pairs:
        with pytest.raises(mlflow.exceptions.MlflowException, match="missing inputs"):
            served.predict("the cat")
