"""Checks of models that read whole sentences (BERT, T5); each raises ValueError with one sentence."""

from typing import TYPE_CHECKING

from megacore.config.data import DataConfig, MaskedLmConfig, SpanCorruptionConfig
from megacore.config.tokenizer import Gpt2BpeTokenizer, HfTokenizer, SentencePieceTokenizer, TrainBpeTokenizer

if TYPE_CHECKING:
    from megacore.config.run import RunConfig

_TOKENS_ALONE = {
    "packing": "packed",
    "index_style": "megatron",
    "add_extra_token": True,
    "drop_last_partial": True,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "fim": None,
}
"""Fields of samples that are cut from documents, and what they are where samples are made of sentences."""
_BERT_TOKENS = ("[CLS]", "[SEP]", "[MASK]", "[PAD]")
_PADDING = ("[PAD]", "<pad>")
_SPAN_WITHOUT_MEAN = 3.0
"""Tokens of a span that the decoder must have room for where data.span_corruption gives no mean."""


def most_noise(data: DataConfig) -> int:
    """Tokens that the spans of a T5 sample hold at most."""
    return max(1, round((data.seq_length - 2) * data.span_corruption.noise_density))


def most_spans(data: DataConfig) -> int:
    """Sentinels that a T5 sample may take."""
    corruption = data.span_corruption
    if corruption.mean_span_length is not None:
        return max(1, round(most_noise(data) / corruption.mean_span_length))
    return min(most_noise(data), (corruption.decoder_seq_length - 1) // 2)


def check_sentences(config: "RunConfig") -> None:
    """Raise ValueError for data that a family's samples cannot be made of, and for options of another family."""
    family, data = config.family, config.data
    if family != "bert" and data.masked_lm != MaskedLmConfig():
        raise ValueError(f"data.masked_lm is given but family is {family}: it is for bert alone; remove it")
    if family != "t5" and data.span_corruption != SpanCorruptionConfig():
        raise ValueError(f"data.span_corruption is given but family is {family}: it is for t5 alone; remove it")
    if family == "gpt":
        return
    _check_reading(config)
    if family == "bert":
        _check_bert(config)
    else:
        _check_t5(data)


def _check_reading(config: "RunConfig") -> None:
    family, data = config.family, config.data
    if not data.split_sentences:
        raise ValueError(f"data.split_sentences is false but family {family} reads sentences: set it to true")
    if data.append_eod:
        raise ValueError(
            f"data.append_eod is true but samples of family {family} have special tokens of their own: set it to false"
        )
    for name, default in _TOKENS_ALONE.items():
        if getattr(data, name) != default:
            raise ValueError(
                f"data.{name} is given but family is {family}: it is for samples of gpt, which are cut from documents; "
                "remove it"
            )
    if data.seq_length < 8:
        raise ValueError(f"data.seq_length is {data.seq_length}: a sample of family {family} takes 8 tokens or more")
    section = data.masked_lm if family == "bert" else data.span_corruption
    if 0 < section.short_seq_prob < 1e-6:
        raise ValueError(f"short_seq_prob is {section.short_seq_prob}: give 0, or at least 0.000001")


def _check_bert(config: "RunConfig") -> None:
    data = config.data
    if not config.model.bert_binary_head and data.masked_lm.sentence_task != "sop":
        raise ValueError(
            f"data.masked_lm.sentence_task is {data.masked_lm.sentence_task} but model.bert_binary_head is false: set "
            "the latter to true, or remove the former"
        )
    tokenizer = data.tokenizer
    if isinstance(tokenizer, Gpt2BpeTokenizer | SentencePieceTokenizer):
        raise ValueError(
            f"data.tokenizer.kind is {tokenizer.kind}, whose vocabularies have no {', '.join(_BERT_TOKENS)}: take "
            "bert-wordpiece, train-wordpiece, or hf for family bert"
        )
    if isinstance(tokenizer, TrainBpeTokenizer):
        missing = [token for token in _BERT_TOKENS if token not in tokenizer.special_tokens]
        if missing:
            raise ValueError(
                f"family bert needs the tokens {', '.join(missing)}: add them to data.tokenizer.special_tokens"
            )


def _check_t5(data: DataConfig) -> None:
    tokenizer, room = data.tokenizer, data.span_corruption.decoder_seq_length
    if isinstance(tokenizer, Gpt2BpeTokenizer):
        raise ValueError(
            "data.tokenizer.kind is gpt2-bpe, whose vocabularies have no padding token: take another for family t5"
        )
    if isinstance(tokenizer, TrainBpeTokenizer) and not set(_PADDING) & set(tokenizer.special_tokens):
        raise ValueError("family t5 needs a padding token: add <pad> to data.tokenizer.special_tokens")
    spans = most_spans(data)
    if not isinstance(tokenizer, HfTokenizer | SentencePieceTokenizer) and tokenizer.vocab_extra_ids < spans:
        raise ValueError(
            f"data.tokenizer.vocab_extra_ids is {tokenizer.vocab_extra_ids}, but a sample of data.seq_length "
            f"{data.seq_length} may have {spans} spans, each with a sentinel: raise it to at least {spans}"
        )
    noise = most_noise(data)
    needed = noise + max(1, round(noise / (data.span_corruption.mean_span_length or _SPAN_WITHOUT_MEAN))) + 1
    if needed > room:
        raise ValueError(
            f"data.span_corruption.decoder_seq_length is {room}, but the {noise} tokens of the spans of a sample of "
            f"data.seq_length {data.seq_length}, with their sentinels and an end, take {needed}: raise it to at least "
            f"{needed}, or lower noise_density"
        )
