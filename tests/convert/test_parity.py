"""The gate can fail: every way in which an export differs from the model is found and named."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.convert import export as export_module
from megacore.convert import parity
from megacore.convert.export import pass_gate, validation_rows
from megacore.convert.hf.forms import hf_form_of
from megacore.convert.hf.write import copy_tokenizer, write_model
from megacore.convert.key_map import Entry, KeyMap
from megacore.convert.parity import (
    compare_tokenizers,
    load_exported,
    load_exported_tokenizer,
)
from megacore.convert.report import ParityReport, same_to_four_digits
from megacore.convert.source import CheckpointTensors
from megacore.convert.tokenizers import read_tokenizer
from megacore.corpus.documents import CorpusWriter
from megacore.errors import ConversionError
from megacore.models.inputs import ModelInput
from megacore.tokenizer.build import build_tokenizer
from megacore.tokenizer.sentencepiece_model import SentencePieceModel
from megacore.tokenizer.vocabulary import special_tokens
from tests.convert.conftest import Exported


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def change_json(path: Path, **values: Any) -> None:
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8"
    )


def gate(exported: Exported) -> ParityReport:
    return pass_gate(exported.job, exported.model)[0]


def failure(exported: Exported) -> tuple[str, dict[str, Any]]:
    """Return the message of a gate that must fail, and the report it left."""
    with pytest.raises(ConversionError) as caught:
        gate(exported)
    message = str(caught.value)
    assert "\n" not in message
    report_path = Path(exported.job.exit_directory) / "parity.json"
    assert str(report_path) in message
    report = json.loads(report_path.read_text(encoding="utf-8"))
    assert report["passed"] is False
    return message, report


def test_an_unchanged_export_passes_the_gate(exported: Exported) -> None:
    assert gate(exported).passed
    assert not Path(exported.job.exit_directory).exists()


@pytest.mark.parametrize(
    ("name", "index", "ours", "layer"),
    [
        ("transformer.wpe.weight", (2, 3), "embedding.position_embeddings.weight", "embedding"),
        (
            "transformer.h.0.ln_1.weight",
            (5,),
            "encoder.layers.0.input_layernorm.weight",
            "input_layernorm",
        ),
        (
            "transformer.h.1.attn.c_attn.weight",
            (3, 70),
            "encoder.layers.1.self_attention.query_key_value.weight",
            "self_attention",
        ),
        (
            "transformer.h.1.attn.c_proj.bias",
            (3,),
            "encoder.layers.1.self_attention.dense.bias",
            "self_attention",
        ),
        (
            "transformer.h.2.ln_2.bias",
            (9,),
            "encoder.layers.2.post_attention_layernorm.bias",
            "post_attention_layernorm",
        ),
        (
            "transformer.h.1.mlp.c_fc.weight",
            (3, 70),
            "encoder.layers.1.mlp.dense_h_to_4h.weight",
            "mlp",
        ),
        (
            "transformer.h.2.mlp.c_proj.weight",
            (70, 3),
            "encoder.layers.2.mlp.dense_4h_to_h.weight",
            "mlp",
        ),
        ("transformer.ln_f.bias", (0,), "encoder.final_layernorm.bias", "encoder.final_layernorm"),
    ],
)
def test_one_changed_weight_fails_the_gate_with_its_layer(
    exported: Exported, name: str, index: tuple[int, ...], ours: str, layer: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][index] += 0.5

    change_weights(exported.directory, change)
    message, report = failure(exported)
    assert report["differing_weights"] == [ours]
    assert ours in message
    number = name.split(".")[2] if ".h." in name else None
    expected = f"encoder.layers.{number}.{layer}" if number else layer
    assert report["first_differing_layer"] == expected
    assert f"first differing layer: {expected};" in message
    assert report["max_abs_logit_difference"] > 1e-4
    assert (
        f"the largest logit difference is {report['max_abs_logit_difference']:.3g} (allowed 0.0001)"
        in message
    )


@pytest.mark.parametrize(("used", "layer"), [(True, "embedding"), (False, "output_layer")])
def test_a_changed_embedding_of_an_unused_token_changes_only_the_output_layer(
    exported: Exported, used: bool, layer: str
) -> None:
    inputs = set(validation_rows(exported.job)[:, :-1].flatten().tolist())
    token = next(token for token in range(300) if (token in inputs) is used)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.wte.weight"][token] += 0.5

    change_weights(exported.directory, change)
    _, report = failure(exported)
    assert report["differing_weights"] == ["embedding.word_embeddings.weight"]
    assert report["first_differing_layer"] == layer


def swapped(blocks: torch.Tensor) -> torch.Tensor:
    """Return the columns of c_attn with query and key exchanged."""
    query, key, value = blocks.chunk(3, dim=-1)
    return torch.cat([key, query, value], dim=-1)


def test_swapped_query_and_key_fail_the_gate(exported: Exported) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight", "bias"):
            name = f"transformer.h.1.attn.c_attn.{part}"
            tensors[name] = swapped(tensors[name])

    change_weights(exported.directory, change)
    message, report = failure(exported)
    assert report["first_differing_layer"] == "encoder.layers.1.self_attention"
    assert "the exported model's logits differ; its perplexity differs" in message


def test_a_wrong_but_consistent_table_fails_the_gate(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(entry: Entry) -> Entry:
        if "query_key_value" not in entry.ours:
            return entry
        return Entry(entry.ours, entry.shape, entry.theirs, entry.layout.then(swapped, swapped))

    table = KeyMap(tuple(wrong(entry) for entry in exported.table.entries))
    write_model(
        exported.directory,
        exported.job.spec,
        CheckpointTensors(Path(exported.job.checkpoint)),
        table=table,
    )
    architecture, form = hf_form_of(exported.job.spec)
    monkeypatch.setattr(
        export_module,
        "hf_form_of",
        lambda spec: (architecture, replace(form, key_map=lambda spec: table)),
    )
    with pytest.raises(
        ConversionError,
        match=r"logits differ.*first differing layer: encoder\.layers\.0\.self_attention",
    ):
        gate(exported)
    report = json.loads(
        (Path(exported.job.exit_directory) / "parity.json").read_text(encoding="utf-8")
    )
    assert report["differing_weights"] == []


@pytest.mark.parametrize(
    ("values", "layer"),
    [
        ({"layer_norm_epsilon": 1e-2}, "encoder.layers.0.input_layernorm"),
        ({"activation_function": "gelu"}, "encoder.layers.0.mlp"),
        ({"n_head": 2}, "encoder.layers.0.self_attention"),
        ({"scale_attn_by_inverse_layer_idx": True}, "encoder.layers.1.self_attention"),
    ],
)
def test_a_wrong_configuration_fails_the_gate(
    exported: Exported, values: dict[str, Any], layer: str
) -> None:
    change_json(exported.directory / "config.json", **values)
    message, report = failure(exported)
    assert report["differing_weights"] == []
    assert report["first_differing_layer"] == layer
    assert "logits differ" in message


def test_a_changed_weight_that_no_sample_uses_fails_the_gate(exported: Exported) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.wpe.weight"][60, 0] += 1e-3

    change_weights(exported.directory, change)
    message, report = failure(exported)
    assert report["differing_weights"] == ["embedding.position_embeddings.weight"]
    assert report["max_abs_logit_difference"] <= 1e-4
    assert report["first_differing_layer"] is None
    assert "its weights differ in embedding.position_embeddings.weight" in message


def test_perplexities_beyond_fp64_are_not_taken_for_equal() -> None:
    losses = {"small": 5.0, "ours": 800.0, "exported": 900.0}
    labels = torch.zeros(1, 1, dtype=torch.long)
    results = parity.perplexities(
        lambda _: [(name, torch.tensor([[[-loss, 0.0]]])) for name, loss in losses.items()],
        [ModelInput(labels, labels)],
    )
    assert results["small"] == pytest.approx(1 + math.exp(5))
    assert results["ours"] == results["exported"] == math.inf
    assert not same_to_four_digits(results["exported"], results["ours"])


def test_nan_fails_the_gate(exported: Exported) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.h.1.ln_2.weight"][0] = float("nan")

    change_weights(exported.directory, change)
    _, report = failure(exported)
    assert report["max_abs_logit_difference"] == "nan"
    assert report["first_differing_layer"] == "encoder.layers.1.post_attention_layernorm"


def test_a_wrong_tokenizer_fails_the_gate(exported: Exported, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("corpus", "tokenizer"):
        (other / name).mkdir(parents=True)
    with CorpusWriter(other / "corpus") as corpus:
        corpus.add(
            "the quick brown fox jumps over the lazy dog, lorem ipsum dolor sit amet consectetur "
            * 9,
            "fox",
        )
    build_tokenizer(exported.job.config.data.tokenizer, other / "corpus", other / "tokenizer")
    copy_tokenizer(other / "tokenizer", exported.directory, exported.job.spec)
    message, report = failure(exported)
    assert "its tokenizer encodes 3 of 3 validation texts to other ids" in message
    assert "its tokenizer decodes 3 of 3 samples to another text" in message
    assert "logits differ" not in message
    assert report["tokenizer_tokens"] == 0
    assert report["first_differing_layer"] is None


@pytest.mark.parametrize("form", ["tokenizer.json", "pieces"])
def test_a_sentencepiece_model_with_bytes_passes_the_gate(
    exported: Exported, tmp_path: Path, form: str
) -> None:
    import sentencepiece

    text = "the quick brown fox\n  jumps over the lazy dog, größe 💡\n"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines() * 40),
        model_prefix=str(tmp_path / "m"),
        vocab_size=320,
        model_type="bpe" if form == "tokenizer.json" else "unigram",
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    ours = SentencePieceModel.read(tmp_path / "m.model")
    ours.save(tmp_path)
    directory = tmp_path / "copied"
    directory.mkdir()
    copy_tokenizer(tmp_path, directory, exported.job.spec)
    assert (directory / "tokenizer.json").exists() == (form == "tokenizer.json")
    # transformers reads the tokenizer of a Mistral without a tokenizer.json with another class
    kind = "mistral" if form == "tokenizer.json" else "llama"
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs = load_exported_tokenizer(directory)
    ids = ours.encode(f"{text} </s>" * 3).tolist()
    assert form == "pieces" or theirs.decode(ids) == f"{text} </s>" * 3
    report = ParityReport(1e-4)
    ids = ours.encode(text * 3).tolist()
    samples = [ids[start : start + 16] for start in range(0, len(ids), 16)]
    compare_tokenizers(report, ours, theirs, special_tokens(ours), samples)
    assert report.problems == []
    assert report.tokenizer_tokens > 50
    read, _ = read_tokenizer(directory)
    assert isinstance(read, SentencePieceModel)
    theirs.decode = lambda ids: "".join(theirs.convert_ids_to_tokens(ids))
    compare_tokenizers(report, ours, theirs, special_tokens(ours), samples)
    assert "samples to another text" in report.problems[0]


def test_a_wrong_end_of_document_fails_the_gate(exported: Exported) -> None:
    change_json(exported.directory / "tokenizer_config.json", eos_token="!")
    message, _ = failure(exported)
    assert "its tokenizer ends documents with id 1, ours with 0" in message


def test_an_added_token_fails_the_gate(exported: Exported) -> None:
    change_json(exported.directory / "tokenizer_config.json", pad_token="<pad>")
    message, _ = failure(exported)
    assert "its tokenizer has a vocabulary of 301, ours of 300" in message


class OtherTokens:
    """The exported model with a different token in one continuation."""

    def __init__(self, model: Any, position: int) -> None:
        self.model, self.position = model, position

    def __call__(self, **values: torch.Tensor) -> Any:
        return self.model(**values)

    def to(self, device: Any) -> "OtherTokens":
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, *values: Any, **options: Any) -> torch.Tensor:
        continued = self.model.generate(*values, **options)
        continued[1, self.position] = (continued[1, self.position] + 1) % 300
        return continued


def test_another_greedy_continuation_fails_the_gate(
    exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_exported(exported.directory)
    # The first generated token: half of a sample is its prompt.
    changed = OtherTokens(model, position=49 - 24)
    monkeypatch.setattr(export_module, "load_exported", lambda directory: changed)
    with pytest.raises(ConversionError, match="its greedy continuation differs on 1 of 3 samples"):
        gate(exported)


def test_choices_closer_than_twice_the_tolerance_are_undecided(exported: Exported) -> None:
    config = exported.job.config
    loose = config.model_copy(
        update={"export": config.export.model_copy(update={"parity_tolerance": 1e3})}
    )
    job = exported.job.model_copy(update={"config": loose})
    report, _ = pass_gate(job, exported.model)
    assert report.passed
    assert (report.greedy_undecided, report.greedy_tokens) == (3, 0)


def test_missing_and_surplus_tensors_are_refused(exported: Exported) -> None:
    change_weights(
        exported.directory, lambda tensors: tensors.__delitem__("transformer.h.1.mlp.c_fc.bias")
    )
    with pytest.raises(ConversionError, match=r"missing_keys.*transformer\.h\.1\.mlp\.c_fc\.bias"):
        load_exported(exported.directory)
    change_weights(
        exported.directory,
        lambda tensors: tensors.update(
            {"transformer.h.1.mlp.c_fc.bias": torch.zeros(128), "transformer.extra": torch.zeros(1)}
        ),
    )
    with pytest.raises(ConversionError, match=r"unexpected_keys.*extra"):
        load_exported(exported.directory)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_directory_that_transformers_cannot_load_is_refused(
    exported: Exported, name: str
) -> None:
    (exported.directory / name).write_bytes(b"{torn")
    load = load_exported_tokenizer if name == "tokenizer.json" else load_exported
    with pytest.raises(ConversionError, match="transformers cannot load the export"):
        load(exported.directory)
    with pytest.raises(ConversionError, match="transformers cannot load the export"):
        gate(exported)


def test_another_vocabulary_size_is_refused(exported: Exported) -> None:
    change_json(exported.directory / "config.json", vocab_size=299)
    with pytest.raises(ConversionError):
        gate(exported)


def test_the_weights_that_transformers_lacks_are_named_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {f"layers.{number}.bias" for number in range(8)}
    monkeypatch.setattr(parity, "_loaded", lambda *_: (None, {"missing_keys": names, "error": []}))
    with pytest.raises(ConversionError) as caught:
        load_exported(tmp_path)
    assert f"with {{'missing_keys': {sorted(names)}}}: every weight" in str(caught.value)
