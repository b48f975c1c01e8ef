"""The export stage: files of the directory, refusals, and nothing published if the gate fails."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megacore.artifact import StageKey, build_artifact
from megacore.config.spec import ModelSpec
from megacore.convert.export import _device, export, samples_of, validation_rows, write_export
from megacore.convert.hf import write
from megacore.convert.source import CheckpointTensors, load_weights
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.errors import CheckpointError, ConversionError, DataFormatError, WorkspaceError
from megacore.models.parameters import parameter_count
from megacore.tokenizer import load_tokenizer
from tests._loss import loss_of
from tests.convert._tiny import VOCAB_SIZE, tiny_config
from tests.convert.conftest import POSITIONS, Exported

FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
}


def test_the_export_contains_every_file_and_a_card(original: Exported) -> None:
    assert {path.name for path in original.directory.iterdir()} == FILES
    assert {path.name for path in Path(original.job.output_directory).iterdir()} == {
        "model",
        "parity.json",
        "sample.txt",
    }
    card = (original.directory / "README.md").read_text(encoding="utf-8")
    assert "| test PPL | 12.34 |" in card
    parameters = sum(p.numel() for p in original.model.parameters()) - 32 * (
        original.model.padded_vocab_size - VOCAB_SIZE
    )
    assert f"{parameters:,} parameters" in card


def test_weights_are_float32_and_a_tied_head_is_written_once(original: Exported) -> None:
    from safetensors import safe_open

    with safe_open(original.directory / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
        assert file.get_slice("transformer.wte.weight").get_shape() == [VOCAB_SIZE, 32]
    assert names == set(original.table.their_shapes)
    assert dtypes == {"F32"}


def test_the_parity_report_is_written(original: Exported) -> None:
    report = json.loads(
        (Path(original.job.output_directory) / "parity.json").read_text(encoding="utf-8")
    )
    assert report == original.report.to_json()
    assert report["passed"] is True
    assert report["samples"] == 3
    assert report["tokens"] == 3 * 48
    assert 0 < report["max_abs_logit_difference"] <= 1e-4
    assert report["perplexity_ours"] == pytest.approx(report["perplexity_exported"], rel=1e-5)
    assert report["perplexity_with_padding"] > report["perplexity_ours"]
    assert report["greedy_tokens"] > 3
    assert report["tokenizer_tokens"] > 100


def test_the_perplexity_equals_the_models_loss(original: Exported) -> None:
    losses = []
    with torch.inference_mode():
        for micro_batch in samples_of(original.job, "cpu").batches():
            losses.append(loss_of(original.model, micro_batch.tokens, micro_batch.labels).flatten())
    total = torch.cat(losses)
    assert original.report.perplexity_split == "test"
    assert (
        original.report.perplexity_tokens == len(total) == 48 * original.report.perplexity_samples
    )
    assert original.report.perplexity_samples > 3
    assert original.report.perplexity_with_padding == pytest.approx(
        float(total.mean().exp()), rel=1e-5
    )


def test_max_test_samples_limits_the_scored_samples(original: Exported, tmp_path: Path) -> None:
    config = original.job.config
    capped = config.model_copy(
        update={"export": config.export.model_copy(update={"max_test_samples": 2})}
    )
    job = original.job.model_copy(
        update={"config": capped, "output_directory": str(tmp_path / "export")}
    )
    assert export(job).perplexity_samples == 2


def test_the_export_generates_text_with_transformers_pipeline(original: Exported) -> None:
    from transformers import pipeline

    generator = pipeline("text-generation", str(original.directory))
    assert type(generator.model).__name__ == "GPT2LMHeadModel"
    assert generator.tokenizer.model_max_length == POSITIONS
    assert generator.model.generation_config.do_sample is True
    (result,) = generator("def step", max_new_tokens=8)
    assert result["generated_text"].startswith("def step")
    assert len(result["generated_text"]) > len("def step")


def test_the_sample_starts_with_the_prompt_and_continues(original: Exported) -> None:
    text = (Path(original.job.output_directory) / "sample.txt").read_text(encoding="utf-8")
    assert text.startswith("def ")
    assert len(text) > len("def ") + 20


def test_checkpoint_tensors_contain_only_parameters(original: Exported) -> None:
    tensors = CheckpointTensors(Path(original.job.checkpoint))
    parameters = dict(original.model.named_parameters())
    assert set(tensors) == set(parameters)
    assert len(tensors) == len(parameters)
    assert all(torch.equal(tensors[name], parameters[name]) for name in tensors)
    with pytest.raises(KeyError):
        tensors["optimizer.exp_avg.encoder.final_layernorm.bias"]


def test_the_files_name_the_begin_token_of_the_tokenizer(
    original: Exported, tmp_path: Path
) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(original.job.tokenizer_directory, tokenizer)
    path = tokenizer / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(settings | {"bos_token": "def"}), encoding="utf-8")
    job = original.job.model_copy(update={"tokenizer_directory": str(tokenizer)})
    write_export(tmp_path / "model", job, CheckpointTensors(Path(job.checkpoint)))
    begin, end = load_tokenizer(tokenizer).token_id("def"), job.special_tokens.eod
    assert begin not in (None, end)
    for name in ("config.json", "generation_config.json"):
        values = json.loads((tmp_path / "model" / name).read_text(encoding="utf-8"))
        assert (values["bos_token_id"], values["eos_token_id"]) == (begin, end)
        before = json.loads((original.directory / name).read_text(encoding="utf-8"))
        assert values | {"bos_token_id": end} == before


def test_a_checkpoint_of_another_model_is_refused(original: Exported, tmp_path: Path) -> None:
    job = original.job.model_copy(
        update={"config": tiny_config(num_layers=4), "output_directory": str(tmp_path / "export")}
    )
    with pytest.raises(
        ConversionError, match=r"it lacks encoder\.layers\.3\.input_layernorm\.weight"
    ):
        export(job)
    narrow = ModelSpec.of(tiny_config(hidden_size=16), VOCAB_SIZE)
    with pytest.raises(ConversionError, match="of another model"):
        load_weights(narrow, CheckpointTensors(Path(original.job.checkpoint)))


def test_missing_inputs_are_refused(original: Exported, tmp_path: Path) -> None:
    job = original.job.model_copy(update={"output_directory": str(tmp_path / "export")})
    with pytest.raises(CheckpointError, match="is not complete: use another checkpoint"):
        export(job.model_copy(update={"checkpoint": str(tmp_path)}))
    with pytest.raises(ConversionError, match=r"tokenizer_config\.json cannot be read"):
        export(job.model_copy(update={"tokenizer_directory": str(tmp_path)}))
    with pytest.raises(DataFormatError, match=r"index\.json does not exist"):
        export(job.model_copy(update={"index_directory": str(tmp_path)}))


@pytest.mark.parametrize(("dtype", "models"), [("float32", 8), ("bfloat16", 10)])
def test_the_gate_takes_a_gpu_on_which_its_models_fit(
    dtype: str, models: int, original: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = original.job.config
    job = original.job.model_copy(
        update={
            "config": config.model_copy(
                update={"export": config.export.model_copy(update={"dtype": dtype})}
            )
        }
    )
    assert _device(job).type == "cpu"
    needed = models * parameter_count(job.spec)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, device in ((2 * needed, "cuda"), (needed, "cpu")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 10 * needed))
        assert _device(job).type == device


def test_a_padded_position_has_a_token_but_no_loss(original: Exported, tmp_path: Path) -> None:
    config = original.job.config
    options = IndexOptions(
        split=config.data.split_weights,
        seq_length=config.data.seq_length,
        seed=1,
        add_extra_token=False,
    )
    build_index_maps(
        Mixture.single(original.job.token_prefixes[0]), tmp_path, options, (None, None, None)
    )
    data = config.data.model_copy(update={"add_extra_token": False})
    job = original.job.model_copy(
        update={
            "config": config.model_copy(update={"data": data}),
            "index_directory": str(tmp_path),
        }
    )
    rows = validation_rows(job)
    assert rows.shape[1] == config.data.seq_length + 1
    assert (rows[:, -1] == -1).all()
    validation = samples_of(job, "cpu").validation
    assert (validation.tokens >= 0).all()
    assert validation.loss_mask is not None
    assert not validation.loss_mask[:, -1].any()
    assert validation.loss_mask[:, :-1].all()


def test_an_output_directory_that_is_a_file_is_a_workspace_error(
    original: Exported, tmp_path: Path
) -> None:
    (tmp_path / "export").write_text("in the way")
    with pytest.raises(WorkspaceError, match="Not a directory"):
        export(original.job.model_copy(update={"output_directory": str(tmp_path / "export")}))


def test_a_failing_gate_publishes_nothing(
    original: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = write.model_config
    monkeypatch.setattr(
        write, "model_config", lambda *values: {**real(*values), "activation_function": "relu"}
    )
    exits = tmp_path / "exit"

    def build(directory: Path) -> dict[str, object]:
        paths = {"output_directory": str(directory), "exit_directory": str(exits)}
        return export(original.job.model_copy(update=paths)).to_json()

    folder = tmp_path / "exports"
    with pytest.raises(ConversionError, match=r"first differing layer: encoder\.layers\.0\.mlp;"):
        build_artifact(folder, StageKey("convert", 1, {}, {}), build)
    assert [path.name for path in folder.iterdir() if not path.name.startswith(".")] == []
    parity = json.loads((exits / "parity.json").read_text(encoding="utf-8"))
    assert parity["passed"] is False
    assert parity["first_differing_layer"] == "encoder.layers.0.mlp"
    monkeypatch.undo()
    artifact, ran = build_artifact(folder, StageKey("convert", 1, {}, {}), build)
    assert ran
    assert artifact.counts["passed"] is True
