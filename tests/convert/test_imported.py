"""Imports from transformers and exports back: the files, and every refusal."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.checkpoint.spec import read_spec
from megacore.compare.models import config_token_findings
from megacore.compare.side import open_side, open_sides
from megacore.convert import load_model, open_export
from megacore.convert.hf import directory as hf_directory
from megacore.convert.hf.directory import HfTensors, open_hf
from megacore.convert.hf.forms import FORMS
from megacore.convert.hf.write import copy_tokenizer
from megacore.convert.imported import import_model
from megacore.convert.outputs import meaningful, our_outputs, their_outputs
from megacore.convert.parity import load_exported
from megacore.convert.source import CheckpointTensors
from megacore.convert.tokenizers import adopt_tokenizer, read_tokenizer
from megacore.convert.ungated_export import export_hf, open_source
from megacore.errors import (
    CheckpointError,
    ConfigError,
    ConversionError,
    MegacoreError,
    WorkspaceError,
)
from tests.convert._models import MODELS, on_disk, samples, their_model, tiny_spec
from tests.tokenizer.test_sentencepiece_model import train

CLASSES = (
    "gpt2-untied",
    "llama-grouped",
    "mistral",
    "neox",
    "bert",
    "megatron-bert-masked",
    "t5",
    "t5-v1.1",
)
"""One class for each way of naming and tying."""


def save_theirs(
    name: str, directory: Path, *, shard: str = "40KB", dtype: torch.dtype = torch.float32
) -> Any:
    """Return a model of transformers after saving it in several files."""
    model = their_model(tiny_spec(name)).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a saved GPT-2 of several files; tests only read it."""
    directory = tmp_path_factory.mktemp("gpt2") / "hf"
    save_theirs("gpt2", directory)
    return directory


@pytest.fixture
def gpt2_copy(gpt2: Path, tmp_path: Path) -> Path:
    """Return a copy of the saved GPT-2 that a test may damage."""
    target = tmp_path / "copied"
    target.mkdir()
    for path in gpt2.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("name", CLASSES)
def test_an_import_and_an_export_return_the_same_model(name: str, tmp_path: Path) -> None:
    source, spec = tmp_path / "hf", tiny_spec(name)
    theirs = save_theirs(name, source)
    assert len(list(source.glob("*.safetensors"))) > 1
    checkpoint = import_model(open_hf(source), source, tmp_path / "imported")
    assert checkpoint == tmp_path / "imported" / "iter_0000000"
    read = read_spec(checkpoint)
    assert (read.family, read.vocab_size, read.padded_vocab_size) == (spec.family, 100, 128)
    assert read.tokenizer_directory is None
    record = json.loads((tmp_path / "imported" / "import.json").read_text(encoding="utf-8"))
    assert record["class"] == MODELS[name][1]
    assert record["tokenizer"] is None
    assert record["gate"] is None
    assert set(record["files"]) == {path.name for path in source.iterdir()}

    export_hf(open_source(tmp_path / "imported"), tmp_path / "again")
    record = json.loads((tmp_path / "again" / "export.json").read_text(encoding="utf-8"))
    assert (record["class"], record["dtype"], record["gate"]) == (MODELS[name][1], "float32", None)
    again = load_exported(tmp_path / "again")
    assert type(again).__name__ == MODELS[name][1]
    for key, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key

    opened, tensors = open_export(tmp_path / "again")
    micro_batch = samples(spec)
    with torch.inference_mode():
        our_logits = our_outputs(
            spec.family, load_model(opened, tensors, "cpu"), micro_batch
        ).logits[..., :100]
        their_logits = their_outputs(theirs, micro_batch).logits
    assert (our_logits - their_logits)[meaningful(micro_batch)].abs().max() <= 2e-5


WORDS = ("<begin>", "<end>", "<turn>", "one", "two")
"""Vocabulary of a tokenizer; its ids are below those of the models."""


def save_llama(
    directory: Path, *, bos: int | None, generation: dict[str, Any] | None, begin: str | None
) -> None:
    """Save a Llama that ends a text with id 1, and a tokenizer with `begin` as its bos_token."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    save_theirs("llama", directory)
    config(bos_token_id=bos, eos_token_id=1)(directory)
    path = directory / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation), encoding="utf-8")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="one"))
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", bos_token=begin
    ).save_pretrained(directory)


def ids_of(directory: Path, file: str) -> dict[str, Any]:
    values = json.loads((directory / file).read_text(encoding="utf-8"))
    return {key: values.get(f"{key}_token_id") for key in ("bos", "eos")}


@pytest.mark.parametrize(
    ("name", "pad", "expected"),
    [
        ("gpt2", 3, 3),
        ("neox", 3, 3),
        ("llama", 3, 3),
        ("llama", None, None),
        pytest.param("llama", 100, None, id="outside the vocabulary"),
    ],
)
def test_the_padding_of_a_model_returns(
    name: str, pad: int | None, expected: int | None, tmp_path: Path
) -> None:
    source, again = tmp_path / "hf", tmp_path / "again"
    save_theirs(name, source)
    config(pad_token_id=pad, bos_token_id=0, eos_token_id=1)(source)
    import_model(open_hf(source), source, tmp_path / "imported")
    export_hf(open_source(tmp_path / "imported"), again)
    exported = load_exported(again)
    assert exported.config.pad_token_id == expected
    assert exported.generation_config.pad_token_id == (1 if expected is None else expected)


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (3, (3, 3)),
        pytest.param(1, (None, 1), id="the end, which an export names without a padding"),
        pytest.param(100, (None, 1), id="outside the vocabulary"),
    ],
)
def test_a_padding_only_in_generation_config_returns(
    pad: int, expected: tuple[int | None, int], tmp_path: Path
) -> None:
    source, again = tmp_path / "hf", tmp_path / "again"
    save_llama(source, bos=0, generation={"pad_token_id": pad}, begin="<begin>")
    import_model(open_hf(source), source, tmp_path / "imported")
    export_hf(open_source(tmp_path / "imported"), again)
    written = [
        json.loads((again / file).read_text(encoding="utf-8")).get("pad_token_id")
        for file in ("config.json", "generation_config.json")
    ]
    assert tuple(written) == expected


@pytest.mark.parametrize(
    ("bos", "begin", "ends", "expected"),
    [
        pytest.param(0, "<begin>", [1, 2], {"bos": 0, "eos": [1, 2]}, id="all in all files"),
        pytest.param(0, "<begin>", [2, 1], {"bos": 0, "eos": [1, 2]}, id="another order"),
        pytest.param(0, None, 1, {"bos": 0, "eos": 1}, id="begin only in config.json"),
        pytest.param(None, "<begin>", 1, {"bos": 0, "eos": 1}, id="begin only in the tokenizer"),
        pytest.param(3, "<begin>", 1, {"bos": 0, "eos": 1}, id="the tokenizer decides"),
        pytest.param(None, None, 1, {"bos": 1, "eos": 1}, id="no begin"),
        pytest.param(100, None, [1, 100], {"bos": 1, "eos": 1}, id="outside the vocabulary"),
        pytest.param(0, "<begin>", None, {"bos": 0, "eos": 1}, id="no generation_config.json"),
    ],
)
def test_begin_and_ends_of_a_text_return(
    bos: int | None, begin: str | None, ends: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    source, again = tmp_path / "hf", tmp_path / "again"
    generation = None if ends is None else {"eos_token_id": ends}
    save_llama(source, bos=bos, generation=generation, begin=begin)
    import_model(open_hf(source), source, tmp_path / "imported")
    export_hf(open_source(tmp_path / "imported"), again)
    for file in ("config.json", "generation_config.json"):
        assert ids_of(again, file) == expected
    with ExitStack() as held:
        findings = config_token_findings(*open_sides(source, again, held))
    assert "eos_token_id" not in {name for finding in findings for name in finding.where}
    tokenizer = AutoTokenizer.from_pretrained(again)
    assert tokenizer.eos_token_id == 1
    assert tokenizer.bos_token_id == (None if expected["bos"] == 1 else 0)
    assert tokenizer("one")["input_ids"] == [3]
    assert load_exported(again).generation_config.eos_token_id == expected["eos"]


def write_given_tokenizer(directory: Path, form: str) -> None:
    """Write a transformers tokenizer with begin <begin> = 0 and end <end> = 1 in one of its forms.

    None of the forms is that of `load_tokenizer`.
    """
    import tokenizers

    directory.mkdir()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(("<begin>", "<end>", "a", *alphabet, "<|endoftext|>"))
    vocabulary = {word: number for number, word in enumerate(words)}
    roles: dict[str, Any] = {"bos_token": "<begin>", "eos_token": "<end>"}
    settings: dict[str, Any] = roles
    if form == "vocab.json":
        (directory / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
        (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    else:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
        backend.save(str(directory / "tokenizer.json"))
    if form == "objects":
        settings = {
            role: {"__type": "AddedToken", "content": token, "special": True}
            for role, token in roles.items()
        }
    elif form == "special_tokens_map.json":
        settings = {}
        (directory / form).write_text(json.dumps(roles), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.parametrize("form", ["vocab.json", "objects", "special_tokens_map.json"])
@pytest.mark.parametrize("begin", [True, False], ids=["begin", "begin of config.json"])
def test_an_export_takes_the_begin_of_a_given_transformers_tokenizer(
    form: str, begin: bool, tmp_path: Path
) -> None:
    given, again = tmp_path / "given", tmp_path / "again"
    write_given_tokenizer(given, form)
    if not begin:
        for path in (given / "special_tokens_map.json", given / "tokenizer_config.json"):
            if path.is_file():
                values = json.loads(path.read_text(encoding="utf-8"))
                values.pop("bos_token", None)
                path.write_text(json.dumps(values), encoding="utf-8")
    model = their_model(tiny_spec("llama").model_copy(update={"vocab_size": 300}))
    model.save_pretrained(tmp_path / "hf")
    config(bos_token_id=2, eos_token_id=1)(tmp_path / "hf")
    import_model(open_hf(tmp_path / "hf"), tmp_path / "hf", tmp_path / "imported")
    export_hf(open_source(tmp_path / "imported", given), again)
    assert ids_of(again, "config.json")["bos"] == (0 if begin else 2)
    before = json.loads((given / "tokenizer_config.json").read_text(encoding="utf-8"))
    after = json.loads((again / "tokenizer_config.json").read_text(encoding="utf-8"))
    expected = before | ({} if begin else {"bos_token": "a"})
    assert after == expected | {"model_max_length": after["model_max_length"]}


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_an_export_has_every_file_of_a_given_transformers_tokenizer(
    kind: str, name: str, tmp_path: Path
) -> None:
    from megacore.tokenizer.sentencepiece_model import SentencePieceModel

    given, again = tmp_path / "given", tmp_path / "again"
    for directory in (given, again):
        directory.mkdir()
    model = train(tmp_path, model_type=kind, normalization_rule_name="identity").model_file
    files = {
        name: Path(model).read_bytes(),
        "tokenizer_config.json": b'{"eos_token": "</s>", "pad_token": "[PAD]"}',
        "added_tokens.json": b'{"[PAD]": 32}',
        "chat_template.jinja": b"{{ messages }}",
    }
    for file, content in files.items():
        (given / file).write_bytes(content)
    copy_tokenizer(given, again, tiny_spec("llama"))
    for file in files.keys() - {"tokenizer_config.json"}:
        assert (again / file).read_bytes() == files[file]
    assert (again / "tokenizer.json").is_file() == (kind == "bpe")
    read = read_tokenizer(again)[0]
    assert isinstance(read, SentencePieceModel)
    assert read.tokens() == SentencePieceModel.read(Path(model)).tokens()


def test_an_impossible_number_of_sentinels_is_refused(tmp_path: Path) -> None:
    Path(train(tmp_path).model_file).rename(tmp_path / "spiece.model")
    for count in ("100", -1, 10**12):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": count}))
        reason = rf"tokenizer_config\.json has extra_ids {count!r}: .* at most the 100 rows"
        with pytest.raises(ConversionError, match=reason):
            adopt_tokenizer(tmp_path, tmp_path, tiny_spec("t5"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("added_tokens.json", {"<|im_start|>": 258}),
        (
            "tokenizer_config.json",
            {"eos_token": "<end>", "added_tokens_decoder": {"258": {"content": "<|im_start|>"}}},
        ),
        (
            "special_tokens_map.json",
            {"additional_special_tokens": ["<end>", "<|im_start|>"]},
        ),
        ("tokenizer_config.json", {"eos_token": "<end>", "tokenizer_class": "Qwen2Tokenizer"}),
    ],
)
def test_a_vocabulary_that_transformers_reads_otherwise_is_refused(
    tmp_path: Path, file: str, content: dict[str, Any]
) -> None:
    write_given_tokenizer(tmp_path / "given", "vocab.json")
    assert read_tokenizer(tmp_path / "given")[0] is not None
    (tmp_path / "given" / file).write_text(json.dumps(content), encoding="utf-8")
    reason = "added tokens <|im_start|>" if "im_start" in str(content) else "a Qwen2Tokenizer"
    with pytest.raises(ConversionError, match=rf"{re.escape(reason)}.*: write one with Auto"):
        read_tokenizer(tmp_path / "given")


def test_a_vocabulary_without_its_padding_token_is_read(tmp_path: Path) -> None:
    write_given_tokenizer(tmp_path / "given", "vocab.json")
    (tmp_path / "given/added_tokens.json").write_text('{"[PAD]": 258}')
    (tmp_path / "given/special_tokens_map.json").write_text('{"pad_token": "[PAD]"}')
    assert read_tokenizer(tmp_path / "given")[0] is not None


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({}, [5, 7, 8]),
        ({"strip_accents": False}, [6, 7, 8]),
        ({"tokenize_chinese_chars": False}, [5, 9]),
        ({"do_lower_case": False, "strip_accents": True}, [5, 7, 8]),
    ],
)
def test_a_vocabulary_of_bert_is_read_with_its_settings(
    tmp_path: Path, settings: dict[str, bool], ids: list[int]
) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cafe", "café", "中", "国", "中国"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer = read_tokenizer(tmp_path)[0]
    assert tokenizer is not None
    assert tokenizer.encode("café 中国").tolist() == ids


def test_a_damaged_generation_config_is_refused(gpt2_copy: Path) -> None:
    (gpt2_copy / "generation_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConversionError, match=r"generation_config\.json is not JSON .*: copy it"):
        open_hf(gpt2_copy)


def test_a_bfloat16_round_trip_is_bit_identical(tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "hf", dtype=torch.bfloat16)
    import_model(open_hf(tmp_path / "hf"), tmp_path / "hf", tmp_path / "imported")
    export_hf(open_source(tmp_path / "imported"), tmp_path / "again", dtype="bfloat16")
    config = json.loads((tmp_path / "again" / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16"
    again = load_exported(tmp_path / "again", torch.bfloat16)
    expected = on_disk(tiny_spec("llama"), theirs)
    assert all(
        torch.equal(value, expected[key])
        for key, value in on_disk(tiny_spec("llama"), again).items()
    )


def test_padding_of_the_imported_vocabulary_is_zero(gpt2: Path, tmp_path: Path) -> None:
    checkpoint = import_model(open_hf(gpt2), gpt2, tmp_path / "imported")
    table = CheckpointTensors(checkpoint)["embedding.word_embeddings.weight"]
    assert table.shape == (128, 32)
    assert table[:100].abs().sum(1).min() > 0
    assert not table[100:].any()


def test_names_without_prefix_masks_and_a_copy_of_the_head_are_read(
    gpt2_copy: Path, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    before = open_hf(gpt2_copy)
    theirs = on_disk(tiny_spec("gpt2"), their_model(tiny_spec("gpt2")))
    bare = {key.removeprefix("transformer."): value.contiguous() for key, value in theirs.items()}
    bare |= {
        "h.0.attn.bias": torch.ones(1, 1, 32, 32),
        "lm_head.weight": theirs["transformer.wte.weight"].clone(),
    }
    for path in gpt2_copy.glob("*.safetensors*"):
        path.unlink()
    save_file(bare, gpt2_copy / "model.safetensors")
    bare_names = open_hf(gpt2_copy)
    assert bare_names.spec == before.spec
    assert all(
        torch.equal(bare_names.tensors[name], before.tensors[name]) for name in before.tensors
    )
    bare["lm_head.weight"][3] += 1
    save_file(bare, gpt2_copy / "model.safetensors")
    with pytest.raises(
        ConversionError, match=r"lm_head\.weight and transformer\.wte\.weight with different values"
    ):
        open_hf(gpt2_copy)


@pytest.mark.parametrize("name", ["bert", "megatron-bert"])
def test_a_masked_lm_keeps_the_binary_head_of_its_files(name: str, tmp_path: Path) -> None:
    theirs = save_theirs(name, tmp_path / "hf")
    masked = MODELS[f"{name}-masked"][1]
    config(architectures=[masked])(tmp_path / "hf")
    opened = open_hf(tmp_path / "hf")
    assert (opened.kind, opened.spec.model.bert_binary_head) == (MODELS[name][1], True)
    assert torch.equal(opened.tensors["binary_head.bias"], theirs.cls.seq_relationship.bias)
    with ExitStack() as held:
        assert open_side(tmp_path / "hf", held).spec == opened.spec
    save_theirs(f"{name}-masked", tmp_path / "masked")
    assert open_hf(tmp_path / "masked").kind == masked


def test_the_record_of_an_import_names_the_files_that_were_read(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    theirs = on_disk(tiny_spec("gpt2"), save_theirs("gpt2", source, shard="1GB"))
    (source / "model.fp16.safetensors").write_bytes(b"another variant")
    (source / "pytorch_model.bin").write_bytes(b"another form")
    described = {"config.json", "generation_config.json"}
    assert {path.name for path in open_hf(source).files} == {*described, "model.safetensors"}
    (source / "model.safetensors").rename(source / "weights.safetensors")
    index = {"weight_map": dict.fromkeys(theirs, "weights.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    names = {path.name for path in open_hf(source).files}
    assert names == {*described, "model.safetensors.index.json", "weights.safetensors"}


def test_pickles_of_tensors_are_read(gpt2_copy: Path, gpt2: Path) -> None:
    theirs = their_model(tiny_spec("gpt2"))
    for path in gpt2_copy.glob("*.safetensors*"):
        path.unlink()
    torch.save(theirs.state_dict(), gpt2_copy / "pytorch_model.bin")
    opened, expected = open_hf(gpt2_copy), open_hf(gpt2)
    assert all(
        torch.equal(opened.tensors[name], expected.tensors[name]) for name in expected.tensors
    )
    torch.save(
        theirs.state_dict(), gpt2_copy / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    opened = open_hf(gpt2_copy)
    assert all(
        torch.equal(opened.tensors[name], expected.tensors[name]) for name in expected.tensors
    )


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_weight_without_a_number_is_refused_by_name(
    value: float, gpt2: Path, tmp_path: Path
) -> None:
    opened = open_hf(gpt2)
    tensors = dict(opened.tensors)
    name = "encoder.layers.1.mlp.dense_h_to_4h.bias"
    tensors[name][5] = value
    with pytest.raises(ConversionError, match=rf"{re.escape(name)} has .* \(1 of 128\): "):
        import_model(replace(opened, tensors=tensors), gpt2, tmp_path / "imported")
    assert not list(tmp_path.iterdir())
    tensors[name][5] = torch.finfo(torch.float32).max
    import_model(replace(opened, tensors=tensors), gpt2, tmp_path / "imported")


def test_other_pickles_are_refused(gpt2_copy: Path) -> None:
    remove_all_weights(gpt2_copy)
    torch.save({"model": Path("/")}, gpt2_copy / "pytorch_model.bin")
    with pytest.raises(
        ConversionError,
        match=r"asks for pathlib\S*, which is no tensor: nothing of it was run",
    ):
        open_hf(gpt2_copy)
    (gpt2_copy / "pytorch_model.bin").write_bytes(b"hello")
    with pytest.raises(
        ConversionError,
        match=r"\(5 bytes\) cannot be read as tensors only .* damaged or cut short",
    ):
        open_hf(gpt2_copy)


def remove_a_shard(directory: Path) -> None:
    next(iter(sorted(directory.glob("model-*.safetensors")))).unlink()


def cut_a_shard(directory: Path) -> None:
    path = sorted(directory.glob("model-*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])


def remove_all_weights(directory: Path) -> None:
    for path in directory.glob("*.safetensors*"):
        path.unlink()


def name_a_file_outside(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"]["transformer.wte.weight"] = "../elsewhere.safetensors"
    path.write_text(json.dumps(index), encoding="utf-8")


def config(**values: Any) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}), encoding="utf-8"
        )

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            remove_a_shard,
            (
                r"index\.json names \d+ files, of which 1 are missing, "
                r"model-00001-of-\d+\.safetensors first"
            ),
        ),
        (cut_a_shard, r"model-00002-of-\d+\.safetensors \([\d,]+ bytes\) is damaged or cut short"),
        (remove_all_weights, r"has no weights: none of model\.safetensors, .*pytorch_model\.bin"),
        (name_a_file_outside, r"names files outside of"),
        (config(n_embd=64), r"has shape \(32, 96\) where the configuration says \(64, 192\)"),
        (
            config(vocab_size=99),
            r"wte\.weight has shape \(100, 32\) where the configuration says \(99, 32\)",
        ),
        (config(n_layer=4), r"it lacks transformer\.h\.3\.ln_1\.weight"),
        (config(n_layer=2), r"it has no place for transformer\.h\.2\."),
        (
            config(activation_function="silu"),
            r"has activation_function 'silu', which models here lack: only gelu_new",
        ),
        (
            config(scale_attn_by_inverse_layer_idx=True),
            r"has scale_attn_by_inverse_layer_idx True, which models",
        ),
        (config(n_head="4"), r"has n_head '4' where a value of type int belongs"),
        (config(n_layer=None), r"config\.json has no n_layer"),
        (
            config(architectures=["RwkvForCausalLM"], model_type="rwkv"),
            r"architectures \['RwkvForCausalLM'\]",
        ),
        (
            config(architectures=["GPT2ForSequenceClassification"]),
            r"only GPT2LMHeadModel, ",
        ),
    ],
)
def test_damaged_directories_are_refused_in_one_sentence(
    gpt2_copy: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(gpt2_copy)
    with pytest.raises(ConversionError, match=message) as caught:
        import_model(open_hf(gpt2_copy), gpt2_copy, tmp_path / "imported")
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copied"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "rope_parameters has no low_freq_factor",
        ),
        (
            "llama",
            {"rope_parameters": None, "rope_scaling": {"type": "mrope", "factor": 2.0}},
            "rope_scaling is of type 'mrope'",
        ),
        ("llama", {"mlp_bias": True}, "mlp_bias True"),
        ("llama", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("qwen3-window", {"max_window_layers": 1}, "max_window_layers 1"),
        ("neox", {"attention_bias": False}, "attention_bias False"),
        ("bert", {"type_vocab_size": 3}, "type_vocab_size 3"),
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type 'relative_key'",
        ),
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj 'relu'"),
    ],
)
def test_unsupported_options_are_refused_by_key_and_value(
    name: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from megacore.convert.hf.forms import model_config

    (tmp_path / "config.json").write_text(
        json.dumps(model_config(tiny_spec(name), "float32") | values)
    )
    with pytest.raises(ConversionError, match=message):
        open_hf(tmp_path)


def test_the_rotary_base_of_transformers_4_is_read(tmp_path: Path) -> None:
    from megacore.convert.hf.config import HfConfig
    from megacore.convert.hf.forms import model_config, read_spec

    values = model_config(tiny_spec("llama-grouped"), "float32")
    del values["rope_parameters"]
    assert read_spec(HfConfig(values, "config.json"))[1].model.rotary_base == 5e5
    values = model_config(tiny_spec("neox"), "float32")
    del values["rope_parameters"]
    model = read_spec(HfConfig(values | {"rotary_emb_base": 77}, "config.json"))[1].model
    assert (model.rotary_base, model.rotary_percent) == (77.0, 0.25)


def test_an_output_that_is_not_empty_is_refused(gpt2: Path, tmp_path: Path) -> None:
    foreign = open_hf(gpt2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for output, message in (
        ("full", "is not empty"),
        ("file", "is a file"),
        ("file/below", "is a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            import_model(foreign, gpt2, tmp_path / output)
    (tmp_path / "empty").mkdir()
    assert import_model(foreign, gpt2, tmp_path / "empty").is_dir()


def test_a_missing_or_larger_tokenizer_is_refused(gpt2: Path, tmp_path: Path) -> None:
    from megacore.tokenizer.build import train_bpe
    from megacore.tokenizer.load import JsonTokenizer

    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"--tokenizer .* holds no tokenizer"):
        import_model(open_hf(gpt2), gpt2, tmp_path / "imported", tmp_path / "none")
    (tmp_path / "large").mkdir()
    JsonTokenizer(train_bpe(["a b c"], 257), "<|endoftext|>").save(tmp_path / "large")
    with pytest.raises(
        ConversionError,
        match=r"tokenizer in .*large has 257 entries and the model's vocabulary 100",
    ):
        import_model(open_hf(gpt2), gpt2, tmp_path / "imported", tmp_path / "large")
    assert not (tmp_path / "imported").exists()


def test_an_unreadable_file_is_refused_with_its_reason(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    key_map = FORMS["gpt2"].key_map(tiny_spec("gpt2"))
    index = json.loads((gpt2 / "model.safetensors.index.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: json.dumps(index))
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(
        ConversionError, match=r"safetensors cannot be read \(Permission denied\): make it readable"
    ):
        HfTensors(gpt2, FORMS["gpt2"], key_map)


def test_scales_of_quantized_weights_are_refused_as_such(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = "transformer.h.0.mlp.c_fc.weight_scale_inv"
    monkeypatch.setattr(hf_directory, "tensor_readers", lambda _: {scale: lambda: torch.ones(1)})
    with pytest.raises(ConversionError, match=r"weight_scale_inv: its weights are quantized"):
        HfTensors(gpt2, FORMS["gpt2"], FORMS["gpt2"].key_map(tiny_spec("gpt2")))


def test_an_output_that_cannot_be_created_is_refused(gpt2: Path) -> None:
    foreign = open_hf(gpt2)
    with pytest.raises(
        WorkspaceError,
        match=r"--output /proc/new/output cannot be made \(No such file or directory\)",
    ):
        import_model(foreign, gpt2, Path("/proc/new/output"))


def test_an_export_refuses_a_tokenizer_of_another_vocabulary(gpt2: Path, tmp_path: Path) -> None:
    from megacore.tokenizer.build import train_bpe
    from megacore.tokenizer.load import JsonTokenizer

    checkpoint = import_model(open_hf(gpt2), gpt2, tmp_path / "imported")
    (tmp_path / "large").mkdir()
    JsonTokenizer(train_bpe(["a b c"], 257), "<|endoftext|>").save(tmp_path / "large")
    with pytest.raises(
        ConfigError, match=r"a vocabulary of 257 entries and the model in .* one of 100"
    ):
        open_source(checkpoint, tmp_path / "large")


def test_invalid_sources_of_an_export_are_refused(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="is a transformers directory already"):
        open_source(gpt2)
    with pytest.raises(CheckpointError):
        open_source(tmp_path)
    checkpoint = import_model(open_hf(gpt2), gpt2, tmp_path / "imported")
    (tmp_path / "none").mkdir()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"--tokenizer .*none has no tokenizer: give a dir"):
            open_source(checkpoint, tmp_path / "none")
        (tmp_path / "none" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    part = next(checkpoint.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(MegacoreError, match="bytes instead of"):
        open_source(checkpoint)


def test_a_model_without_counterpart_leaves_nothing(tmp_path: Path) -> None:
    from megacore.checkpoint.save import save_checkpoint

    spec = tiny_spec("llama", position_embedding_type="alibi")
    checkpoint = save_checkpoint(
        tmp_path / "run", 7, {"model.x": torch.zeros(1)}, {"model": spec.model_dump(mode="json")}
    )
    with pytest.raises(
        ConversionError, match=r"LlamaForCausalLM, has no model\.position_embedding_type alibi: set"
    ):
        export_hf(open_source(checkpoint), tmp_path / "exported")
    rope = tiny_spec("llama")
    save_checkpoint(
        tmp_path / "run", 8, {"model.x": torch.zeros(1)}, {"model": rope.model_dump(mode="json")}
    )
    with pytest.raises(ConversionError, match="it lacks embedding"):
        export_hf(open_source(tmp_path / "run"), tmp_path / "exported")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
