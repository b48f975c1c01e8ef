"""Refusal of data that BERT and T5 cannot use, and of options of another family."""

from typing import Any

import pytest

from megacore.config.checks import most_noise, most_spans
from megacore.config.data import DataConfig
from megacore.config.load import parse_config
from megacore.config.run import RunConfig
from megacore.errors import ConfigError

WORDPIECE = {"kind": "train-wordpiece", "vocab_extra_ids": 5}
T5 = {
    "position_embedding_type": "relative",
    "normalization": "rmsnorm",
    "add_bias_linear": False,
}


def make(family: str, model: dict[str, Any] | None = None, **data: Any) -> RunConfig:
    values: dict[str, Any] = {
        "source": {"kind": "source_tree"},
        "tokenizer": WORDPIECE,
        "seq_length": 64,
        "split_sentences": family != "gpt",
        "append_eod": family == "gpt",
    }
    sections = {
        "name": "small",
        "family": family,
        "data": values | data,
        "model": {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
        | (T5 if family == "t5" else {})
        | (model or {}),
        "optim": {"lr": 1e-3},
        "train": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 100},
        "checkpoint": {"save_interval": 5},
    }
    return parse_config(sections, origin="test")


@pytest.mark.parametrize("family", ["gpt", "bert", "t5"])
def test_suitable_data_is_accepted(family: str) -> None:
    assert make(family).family == family


@pytest.mark.parametrize(
    ("family", "data", "sentence"),
    [
        (
            "gpt",
            {"masked_lm": {"masked_lm_prob": 0.2}},
            "data.masked_lm is given but family is gpt",
        ),
        ("t5", {"masked_lm": {"masked_lm_prob": 0.2}}, "data.masked_lm is given but family is t5"),
        (
            "bert",
            {"span_corruption": {"noise_density": 0.2}},
            "data.span_corruption is given but family is bert",
        ),
        (
            "bert",
            {"split_sentences": False},
            "data.split_sentences is false but family bert reads sentences",
        ),
        (
            "t5",
            {"append_eod": True},
            "data.append_eod is true but samples of family t5 have special tokens of their",
        ),
        ("bert", {"add_extra_token": False}, "data.add_extra_token is given but family is bert"),
        *(
            (family, data, f"data.{next(iter(data))} is given but family is {family}: it is for")
            for family in ("bert", "t5")
            for data in ({"packing": "best_fit"}, {"reset_attention_mask": True})
        ),
        ("bert", {"fim": {}}, "data.fim is given but family is bert"),
        ("bert", {"index_style": "neox"}, "data.index_style is given but family is bert"),
        (
            "bert",
            {"seq_length": 7},
            "data.seq_length is 7: a sample of family bert takes 8 tokens or more",
        ),
        (
            "bert",
            {"masked_lm": {"short_seq_prob": 1e-7}},
            "data.masked_lm.short_seq_prob is 1e-07: give 0, or at least 0.000001",
        ),
        (
            "bert",
            {"masked_lm": {"masked_lm_prob": 0.016}},
            (
                "data.masked_lm.masked_lm_prob 0.016 of the 61 tokens of a sample of "
                "data.seq_length 64 is less than one, so that no token would be predicted"
            ),
        ),
        (
            "bert",
            {"tokenizer": {"kind": "gpt2-bpe", "vocab_file": "a", "merge_file": "b"}},
            (
                "data.tokenizer.kind is gpt2-bpe, whose vocabularies have no [CLS], [SEP], [MASK], "
                "[PAD]: take"
            ),
        ),
        (
            "bert",
            {"tokenizer": {"kind": "train-bpe", "special_tokens": ["[CLS]", "[PAD]"]}},
            "family bert needs the tokens [SEP], [MASK]: add them to data.tokenizer.special_tokens",
        ),
        (
            "t5",
            {"tokenizer": {"kind": "train-bpe", "vocab_extra_ids": 9}},
            "family t5 needs a padding token: add <pad>",
        ),
        (
            "t5",
            {"tokenizer": {"kind": "gpt2-bpe", "vocab_file": "a", "merge_file": "b"}},
            "whose vocabularies have no padding token: take another for family t5",
        ),
        (
            "t5",
            {"tokenizer": {"kind": "train-wordpiece", "vocab_extra_ids": 2}},
            (
                "data.tokenizer.vocab_extra_ids is 2, but a sample of data.seq_length 64 may have "
                "3 spans, each with a sentinel: raise it to at least 3"
            ),
        ),
        (
            "t5",
            {"span_corruption": {"decoder_seq_length": 12}},
            (
                "data.span_corruption.decoder_seq_length is 12, but the 9 tokens of the spans of a "
                "sample of data.seq_length 64, with their sentinels and an end, take 13: raise it "
                "to at least 13"
            ),
        ),
    ],
)
def test_unsuitable_data_is_refused(family: str, data: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(family, **data)
    assert sentence in str(caught.value)


def test_a_sentence_task_without_a_binary_head_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"sentence_task is nsp but model\.bert_binary_head is false"
    ):
        make("bert", {"bert_binary_head": False}, masked_lm={"sentence_task": "nsp"})
    assert make("bert", {"bert_binary_head": False}).data.masked_lm.sentence_task == "sop"


@pytest.mark.parametrize(
    ("corruption", "noise", "spans"),
    [
        ({}, 76, 25),
        ({"mean_span_length": None}, 76, 63),
        ({"mean_span_length": None, "noise_density": 0.05}, 26, 26),
    ],
)
def test_most_noise_and_spans_follow_from_the_sequence_length(
    corruption: dict[str, Any], noise: int, spans: int
) -> None:
    data = DataConfig.model_validate(
        {
            "source": {"kind": "source_tree"},
            "tokenizer": WORDPIECE,
            "seq_length": 512,
            "span_corruption": corruption,
        }
    )
    assert (most_noise(data), most_spans(data)) == (noise, spans)
