"""Configurations that could not be exported after training, refused before it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megacore.config.data import HfTokenizer
from megacore.config.run import RunConfig
from megacore.config.spec import ModelSpec
from megacore.convert import counterparts, exportable
from megacore.convert.hf.write import copy_tokenizer
from megacore.errors import ConfigError, ConversionError
from megacore.tokenizer.build import build_tokenizer, train_bpe
from megacore.tokenizer.load import JsonTokenizer, load_tokenizer
from tests._families import LLAMA, OLMO2
from tests._limits import HANG
from tests.convert._family_jobs import family_config
from tests.convert._tiny import tiny_config
from tests.tokenizer.test_sentencepiece_model import train


def with_data(**data: object) -> RunConfig:
    config = tiny_config()
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def check(config: RunConfig) -> None:
    exportable(config.family, config.model, config.data)


def test_a_gpt2_is_exportable() -> None:
    check(tiny_config(ffn_hidden_size=40, hidden_dropout=0.3))


def test_a_family_without_counterpart_is_refused() -> None:
    with pytest.raises(ConversionError, match="family 'rwkv' has no counterpart"):
        check(tiny_config().model_copy(update={"family": "rwkv"}))


def test_grouped_query_attention_is_refused() -> None:
    with pytest.raises(
        ConversionError,
        match=(
            r"nearest, GPT2LMHeadModel, has no model\.num_query_groups 2: set "
            r"model\.num_query_groups to 4, or train"
        ),
    ):
        check(tiny_config(num_query_groups=2))
    check(tiny_config(num_query_groups=4))


@pytest.mark.parametrize("split", ["1", "95,0,5"])
def test_no_validation_split_is_refused(split: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.split '{split}' leaves no validation samples"):
        check(with_data(split=split))


def test_sequences_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.seq_length 1 .* at least 2"):
        check(with_data(seq_length=1))


@pytest.mark.parametrize(
    ("options", "rule", "refusal"),
    [
        (LLAMA, "nmt_nfkc", None),
        (LLAMA | {"sliding_window": 4}, "identity", None),
        (
            LLAMA | {"sliding_window": 4},
            "nmt_nfkc",
            "that no tokenizer.json equals, .* MistralForCausalLM, so",
        ),
        (
            LLAMA | {"rotary_percent": 0.5},
            "nmt_nfkc",
            "that no tokenizer.json equals, .* Phi3ForCausalLM, so",
        ),
        (OLMO2, "nmt_nfkc", "that no tokenizer.json equals, .* Olmo2ForCausalLM, so"),
        (
            LLAMA | {"add_qkv_bias": True},
            "identity",
            "of kind sentencepiece divides texts otherwise than Qwen2's, .* Qwen2ForCausalLM, so",
        ),
    ],
)
def test_a_sentencepiece_model_that_transformers_replaces_is_refused(
    tmp_path: Path, options: dict[str, object], rule: str, refusal: str | None
) -> None:
    model = tiny_config(**options).model
    bpe = train(tmp_path, model_type="bpe", normalization_rule_name=rule)
    config = with_data(tokenizer=bpe).model_copy(update={"model": model})
    if refusal is None:
        check(config)
    else:
        with pytest.raises(ConfigError, match=refusal):
            check(config)


@pytest.mark.parametrize("rule", ["identity", "nmt_nfkc"])
def test_transformers_replaces_the_tokenizers_that_are_refused(tmp_path: Path, rule: str) -> None:
    transformers = pytest.importorskip("transformers")
    source, export = tmp_path / "tokenizer", tmp_path / "export"
    for directory in (source, export):
        directory.mkdir()
    build_tokenizer(train(tmp_path, model_type="bpe", normalization_rule_name=rule), [], source)
    tokenizer = load_tokenizer(source)
    copy_tokenizer(source, export, ModelSpec.of(tiny_config(), tokenizer.vocab_size))
    text = "hello world number größe"
    ids, replaced = tokenizer.encode(text).tolist(), set()
    for kind in {each.model_type for each in counterparts.COUNTERPARTS}:
        (export / "config.json").write_text(json.dumps({"model_type": kind}), encoding="utf-8")
        theirs = transformers.AutoTokenizer.from_pretrained(export)
        if theirs(text, add_special_tokens=False)["input_ids"] != ids:
            replaced.add(kind)
    assert replaced == {"qwen2"} | (counterparts._OWN_TOKENIZER if rule == "nmt_nfkc" else set())


@pytest.mark.parametrize("divided_as_qwen2", [True, False])
def test_a_qwen2_is_exportable_only_with_a_tokenizer_that_divides_texts_as_its_own(
    tmp_path: Path, divided_as_qwen2: bool
) -> None:
    import tokenizers
    from transformers import AutoTokenizer, Qwen2Tokenizer

    text = "in 1984 and 1985 a number"
    backend = train_bpe([text] * 9, 272)
    if divided_as_qwen2:
        theirs = Qwen2Tokenizer().backend_tokenizer
        backend.normalizer, backend.pre_tokenizer = theirs.normalizer, theirs.pre_tokenizer
    tokenizer = JsonTokenizer(tokenizers.Tokenizer.from_str(backend.to_str()), "<|endoftext|>")
    tokenizer.save(tmp_path)
    config = with_data(tokenizer=HfTokenizer(kind="hf", name=str(tmp_path)))
    model = tiny_config(**LLAMA, add_qkv_bias=True).model
    config = config.model_copy(update={"model": model})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    same = theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert same is divided_as_qwen2
    if divided_as_qwen2:
        check(config)
        return
    for choice in (config.data.tokenizer, tiny_config().data.tokenizer):
        data = config.data.model_copy(update={"tokenizer": choice})
        with pytest.raises(ConfigError, match=rf"kind {choice.kind} divides texts otherwise"):
            check(config.model_copy(update={"data": data}))


def test_the_check_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, megacore.convert; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_bert_and_t5_are_exportable(family: str) -> None:
    check(family_config(family))


LLAMA = {
    "position_embedding_type": "rope",
    "normalization": "rmsnorm",
    "activation": "swiglu",
    "add_bias_linear": False,
}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            LLAMA | {"position_embedding_type": "alibi"},
            r"LlamaForCausalLM, has no .* alibi: set .* to rope",
        ),
        (
            LLAMA | {"activation": "relu"},
            r"LlamaForCausalLM, has no model\.activation relu: set .* to swiglu or geglu",
        ),
        (
            LLAMA | {"sliding_window": 8, "add_bias_linear": True},
            r"has no model\.sliding_window 8: set model\.sliding_window to null",
        ),
        (
            {"position_embedding_type": "none", "qk_layernorm": True},
            (
                r"GPT2LMHeadModel, has no model\.position_embedding_type none, "
                r"model\.qk_layernorm true: set model\.position_embedding_type to "
                r"learned_absolute, model\.qk_layernorm to false"
            ),
        ),
        (
            LLAMA | {"norm_position": "sandwich"},
            r"nearest, LlamaForCausalLM, has no model\.norm_position sandwich: set .* to pre",
        ),
        (LLAMA | {"final_logit_softcapping": 30.0}, r"_softcapping 30\.0: set .* to null"),
        (
            LLAMA | {"num_attention_heads": 5, "kv_channels": 8},
            r"LlamaForCausalLM, has no model\.num_attention_heads 5: set .* to 4",
        ),
        (LLAMA | {"scale_embeddings": True}, r"scale_embeddings true: set .* to false"),
        ({"kv_channels": 4}, r"has no model\.kv_channels 4: set model\.kv_channels to 8"),
    ],
)
def test_options_without_counterpart_are_refused_with_the_value_to_set(
    model: dict[str, object], message: str
) -> None:
    with pytest.raises(ConversionError, match=message):
        check(tiny_config(**model))


def test_an_unlisted_field_is_exportable_only_at_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check that a new field is refused until an export form lists it."""
    listed = counterparts.SUPPORTED_FIELDS - {"rotary_base"}
    monkeypatch.setattr(counterparts, "SUPPORTED_FIELDS", listed)
    check(tiny_config(**LLAMA))
    with pytest.raises(ConversionError, match=r"has no model\.rotary_base 5000\.0: set .* 10000"):
        check(tiny_config(**LLAMA, rotary_base=5000.0))
    fields = counterparts.unsupported_fields(tiny_config(**LLAMA, rotary_base=5000.0).model, listed)
    assert "rotary_base" in fields


def test_every_field_of_the_architecture_is_listed() -> None:
    model = tiny_config(**LLAMA).model
    named = {name for entry in counterparts.COUNTERPARTS for name in entry.options}
    assert set(type(model).model_fields) == counterparts.SUPPORTED_FIELDS | named
