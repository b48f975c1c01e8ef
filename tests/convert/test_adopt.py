"""Tokenizers of transformers directories with different sets of files."""

import json
from pathlib import Path

import pytest

from megacore.convert.tokenizers import adopt_tokenizer, missing_end, with_special_tokens
from megacore.errors import ConversionError
from megacore.tokenizer.build import train_bpe
from megacore.tokenizer.load import JsonTokenizer, load_tokenizer
from megacore.tokenizer.wordpiece import read_wordpiece
from tests.convert._models import tiny_spec

TEXT = "the quick brown fox jumps over the lazy dog"


def byte_level() -> JsonTokenizer:
    return JsonTokenizer(train_bpe([TEXT] * 9, 270), "<|endoftext|>")


def adopt(source: Path, target: Path, name: str = "gpt2") -> JsonTokenizer:
    target.mkdir()
    assert adopt_tokenizer(source, target, tiny_spec(name)) is not None
    loaded = load_tokenizer(target)
    assert isinstance(loaded, JsonTokenizer)
    return loaded


def test_a_directory_without_tokenizer_gives_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert adopt_tokenizer(tmp_path, tmp_path, tiny_spec("gpt2")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_tokenizer_saved_by_transformers_is_adopted(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = byte_level()
    saved = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    saved.save_pretrained(tmp_path / "hf")
    loaded = adopt(tmp_path / "hf", tmp_path / "own")
    assert loaded.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    assert loaded.eod_id == ours.eod_id
    settings = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["bos_token"] == "<|endoftext|>"


def test_the_end_of_document_is_the_eos_or_the_sep_token(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "lstrip": False}}))
    assert adopt(tmp_path, tmp_path / "own").eod_token == "<|endoftext|>"
    path.write_text(json.dumps({"sep_token": "q"}))
    assert adopt(tmp_path, tmp_path / "sep").eod_token == "q"


@pytest.mark.parametrize(
    ("template", "expected"),
    [("$A", 2), ("$A </s>", None), ("<s> $A </s>", None), ("$A </s> <en>", None), ("</s> $A", 2)],
)
def test_a_source_lacks_the_end_that_its_tokenizer_does_not_add(
    template: str, expected: int | None
) -> None:
    import tokenizers
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "a": 1, "</s>": 2, "<en>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=list(vocabulary.items())
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    for end in (2, [2, 3], None):
        model = PretrainedConfig(is_encoder_decoder=True, eos_token_id=end)
        assert missing_end(tokenizer, model) == expected
    assert missing_end(tokenizer, PretrainedConfig(eos_token_id=2)) is None


def test_a_tokenizer_without_a_token_for_the_text_adds_the_end_as_the_only_id() -> None:
    import tokenizers
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"x": 0, "</s>": 1}, []))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("a")["input_ids"] == [1]
    model = PretrainedConfig(is_encoder_decoder=True, eos_token_id=1)
    assert missing_end(tokenizer, model) is None


@pytest.mark.parametrize(("name", "end"), [("gpt2", "<|endoftext|>"), ("bert", "[SEP]")])
def test_a_published_directory_whose_settings_name_no_end_has_that_of_its_class(
    tmp_path: Path, name: str, end: str
) -> None:
    from transformers import AutoTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick"]
    if name == "gpt2":
        byte_level().save(tmp_path)
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(words))
        backend = read_wordpiece(tmp_path / "vocab.txt", lower_case=True)
        JsonTokenizer(backend, "[SEP]").save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 512}')
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    loaded = adopt(tmp_path, tmp_path / "own", name)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.eod_token == (theirs.eos_token or theirs.sep_token) == end


def test_settings_without_an_end_of_document_are_refused(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    (tmp_path / "vocab.json").unlink()
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{}")
    with pytest.raises(
        ConversionError, match=r"no file next to .* says which token ends a document"
    ):
        adopt_tokenizer(tmp_path, tmp_path, tiny_spec("gpt2"))
    path.write_text("{torn")
    with pytest.raises(ConversionError, match=r"tokenizer_config\.json cannot be read"):
        adopt_tokenizer(tmp_path, tmp_path, tiny_spec("gpt2"))
    path.write_text("[]")
    with pytest.raises(ConversionError, match=r"tokenizer_config\.json holds list, not an object"):
        adopt_tokenizer(tmp_path, tmp_path, tiny_spec("gpt2"))


def test_vocabulary_and_merges_of_gpt2_are_adopted(tmp_path: Path) -> None:
    ours = byte_level()
    ours.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    loaded = adopt(tmp_path, tmp_path / "own")
    assert loaded.encode(TEXT).tolist() == ours.encode(TEXT).tolist()


def test_a_vocabulary_of_bert_is_adopted(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    loaded = adopt(tmp_path, tmp_path / "own", "bert")
    assert loaded.encode("The foxes").tolist() == [5, 7, 8]
    assert loaded.eod_id == 3
    spec = with_special_tokens(tiny_spec("bert"), loaded, tmp_path / "own")
    assert (spec.special_tokens.mask, spec.special_tokens.cls) == (4, 2)
    assert spec.tokenizer_directory == str(tmp_path / "own")


def test_config_json_takes_precedence_over_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = byte_level()
    spec = tiny_spec("gpt2").model_copy(update={"vocab_size": 300})
    assert with_special_tokens(spec, tokenizer, tmp_path).special_tokens.eod == 2
    with pytest.raises(ConversionError, match="has 270 entries and the model's vocabulary 100"):
        with_special_tokens(tiny_spec("gpt2"), tokenizer, tmp_path)
    roles = spec.special_tokens.model_copy(update={"eod": 290})
    with pytest.raises(
        ConversionError, match="has 270 entries, and the model ends a text with token 290"
    ):
        with_special_tokens(spec.model_copy(update={"special_tokens": roles}), tokenizer, tmp_path)


BYTE_LEVEL = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
WORDPIECE = {"tokenizer_class": "BertTokenizer", "sep_token": "[SEP]"}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] The the Élan élan elan brown fox"


@pytest.mark.parametrize(
    ("in_file", "settings"),
    [
        (False, BYTE_LEVEL | {"add_prefix_space": True}),
        (True, BYTE_LEVEL),
        (True, BYTE_LEVEL | {"tokenizer_class": "PreTrainedTokenizerFast"}),
        (True, WORDPIECE | {"do_lower_case": False}),
        (False, WORDPIECE),
        (True, WORDPIECE | {"strip_accents": False}),
    ],
)
def test_options_of_the_class_replace_those_of_tokenizer_json(
    in_file: bool, settings: dict[str, object], tmp_path: Path
) -> None:
    """Check settings against a tokenizer.json with a prefix space or lower case if `in_file`."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    hf = tmp_path / "hf"
    hf.mkdir()
    if "sep_token" in settings:
        vocabulary = tmp_path / "words"
        vocabulary.write_text("\n".join(WORDS.split()), encoding="utf-8")
        JsonTokenizer(read_wordpiece(vocabulary, lower_case=in_file), "[SEP]").save(hf)
    else:
        ours = byte_level()
        ours.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=in_file)
        ours.save(hf)
    (hf / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    text = "The Élan brown fox"
    ids = AutoTokenizer.from_pretrained(hf)(text, add_special_tokens=False)["input_ids"]
    assert adopt(hf, tmp_path / "own").encode(text).tolist() == ids


def test_a_prefix_space_of_vocabulary_and_merges_is_followed(tmp_path: Path) -> None:
    ours = byte_level()
    ours.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    settings = BYTE_LEVEL | {"add_prefix_space": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    loaded = adopt(tmp_path, tmp_path / "own")
    assert loaded.encode("the fox").tolist() == ours.encode(" the fox").tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"additional_special_tokens": ["<|im_start|>"]},
        {"extra_special_tokens": ["<|im_start|>"]},
        {"added_tokens_decoder": {"270": {"content": "<|im_start|>", "special": True}}},
    ],
)
def test_a_tokenizer_json_without_an_added_token_is_refused(
    settings: dict[str, object], tmp_path: Path
) -> None:
    byte_level().save(tmp_path)
    settings["eos_token"] = "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    with pytest.raises(
        ConversionError, match=r"a tokenizer\.json, but its vocabulary lacks .*<\|im_start\|>"
    ):
        adopt_tokenizer(tmp_path, tmp_path, tiny_spec("gpt2"))
