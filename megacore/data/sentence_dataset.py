"""Data sets of whole sentences for BERT and T5, read through sentence maps.

A sample depends only on the seed and its number; reading order, ranks and resuming change nothing.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from megacore.config.data import (
    MASKED_LM_SPECIAL_TOKENS,
    T5_SPECIAL_TOKENS,
    MaskedLmConfig,
    SpanCorruptionConfig,
)
from megacore.data._compiled import BertSampler, MaskingRules, T5Sampler
from megacore.data.index_directory import SENTENCE_MAP_NAME, map_path
from megacore.data.samples import MappedDataset
from megacore.data.sentence_maps import load_sentence_map
from megacore.errors import DataFormatError
from megacore.tokenizer.vocabulary import Vocabulary

_MOST_WORDS = 10
_PROBABILITY = 0.2
"""Probability that a span ends after a word (Joshi et al. 2019)."""
_NONE = -1


class SentenceDataset(MappedDataset):
    """Base class of data sets of samples of whole sentences of one split.

    All files are memory-mapped and checked on opening. Raises DataFormatError for maps that are
    missing, damaged, or built for other sentences or another seq_length.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        *,
        seq_length: int,
        width: int,
        special_tokens: int,
    ) -> None:
        """Open the sentences of `prefix` and the split's map in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx, a sequence per sentence.
            index_directory: directory of the map.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            width: number of ids of a row.
            special_tokens: number of special tokens of a sample.
        """
        path = map_path(index_directory, split_name, SENTENCE_MAP_NAME)
        super().__init__(prefix, path, seq_length=seq_length, width=width)
        self._rows = load_sentence_map(
            index_directory, split_name, self.tokens, seq_length - special_tokens
        )

    def __len__(self) -> int:
        return len(self._rows)

    def _unreadable(self, sample: int) -> str:
        return (
            f"{self._path}: sample {sample} cannot be read from {self.tokens.prefix}: it has too "
            "few sentences, or token ids that the vocabulary does not have; use the tokenizer that "
            "the tokens were made with, or build the index maps again"
        )


class MaskedLmDataset(SentenceDataset):
    """Samples of one split for BERT, in rows of 3 s + 1 ids.

    A row has tokens [s], labels [s] (-1: not predicted), segments [s], sentence label.

    The tokens are `[CLS] A [SEP] B [SEP]`; the segment is 0 up to the first [SEP] and then 1. Of
    the predicted tokens, 80 % are replaced by [MASK], 10 % by a random token, and 10 % are
    unchanged. The sentence label is 1 if B does not follow A. -1 is padding.

    Samples are those of BERT (Devlin et al. 2018) and equal Megatron core's token by token
    (https://github.com/NVIDIA/Megatron-LM, core/datasets/bert_dataset.py, masked_dataset.py): the
    sentences of a sample are divided in two at random, the halves are swapped with probability 1/2,
    tokens are removed from either end of the longer one until both fit, and words are drawn until
    the fraction `masked_lm_prob` of the tokens is reached; a draw takes up to `max_ngram` words,
    a number proportional to 1 / n or geometric. In contrast to Megatron core, the sentence task may
    also be that of the paper, in which the second segment is, with probability 1/2, a random sample
    of another document.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        *,
        seq_length: int,
        vocabulary: Vocabulary,
        config: MaskedLmConfig,
        seed: int,
        binary_head: bool = True,
    ) -> None:
        """Open the sentences of `prefix` and the split's map in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx, a sequence per sentence.
            index_directory: directory of the map.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            vocabulary: vocabulary of the tokens.
            config: options of masking.
            seed: seed of the run; sample i draws from RandomState(seed + i).
            binary_head: True for two segments whose relation is predicted.
        """
        super().__init__(
            prefix,
            index_directory,
            split_name,
            seq_length=seq_length,
            width=3 * seq_length + 1,
            special_tokens=MASKED_LM_SPECIAL_TOKENS,
        )
        task: Literal["none", "sop", "nsp"] = config.sentence_task if binary_head else "none"
        if task == "nsp":
            self._check_documents()
        special = vocabulary.special
        cls, sep, mask = special.cls, special.sep, special.mask
        assert cls is not None
        assert sep is not None
        assert mask is not None
        self._sampler = BertSampler(
            tokens=self.tokens.tokens,
            pointers=self.tokens.pointers,
            documents=self.tokens.document_indices,
            rows=self._rows,
            continues=vocabulary.continues,
            seq_length=seq_length,
            seed=seed,
            cls=cls,
            sep=sep,
            mask=mask,
            task=task,
            rules=masking_rules(config),
        )

    def _check_documents(self) -> None:
        """Raise DataFormatError if all samples are of the same document."""
        if len(self) == 0:
            return
        ends = self._rows[:, 0].min(), self._rows[:, 0].max()
        first, last = np.searchsorted(self.tokens.document_indices, ends, side="right")
        if first == last:
            raise DataFormatError(
                f"{self._path} has samples of only one document, and data.masked_lm.sentence_task "
                "nsp takes sentences of another: use more text, or set it to sop"
            )


def masking_rules(config: MaskedLmConfig) -> MaskingRules:
    """Return the rules by which the compiled code draws words.

    The cumulative distribution of the number of words is computed as in NumPy's `choice`.
    """
    share = 1.0 / np.arange(1, config.max_ngram + 1)
    share = share / share.sum()
    cumulative = (share / share.sum()).cumsum()
    return MaskingRules(
        share=config.masked_lm_prob,
        whole_words=config.whole_word_masking,
        length_cumulative=(cumulative / cumulative[-1]).tolist(),
        length_probability=_PROBABILITY if config.use_geometric_distribution else 0.0,
    )


class T5Dataset(SentenceDataset):
    """Samples of one split for T5, in rows of encoder tokens [s] and decoder labels [s_d].

    -1 is padding.

    The n-th span of the text is replaced by the sentinel <extra_id_n>; the labels are each sentinel
    followed by the tokens of its span, and the end of the sequence.

    Spans are those of T5 (Raffel et al. 2019), of random lengths with a given mean
    (`random_spans_noise_mask` in
    https://github.com/google-research/text-to-text-transfer-transformer), or equal Megatron core's
    token by token (https://github.com/NVIDIA/Megatron-LM, core/datasets/t5_dataset.py and
    masked_dataset.py): 1 to 10 whole words by a geometric distribution, until the configured
    fraction of tokens is reached. If the decoder has no room for all spans, the spans at the end of
    the text are not replaced; Megatron core stops with an error there.
    """

    def __init__(
        self,
        prefix: str | Path,
        index_directory: str | Path,
        split_name: str,
        *,
        seq_length: int,
        vocabulary: Vocabulary,
        config: SpanCorruptionConfig,
        seed: int,
    ) -> None:
        """Open the sentences of `prefix` and the split's map in `index_directory`.

        Args:
            prefix: path of the token files without .bin/.idx, a sequence per sentence.
            index_directory: directory of the map.
            split_name: "train", "valid" or "test".
            seq_length: s, the sequence length of the encoder in tokens.
            vocabulary: vocabulary of the tokens.
            config: options of spans, and s_d.
            seed: seed of the run; sample i draws from RandomState(seed + i).
        """
        super().__init__(
            prefix,
            index_directory,
            split_name,
            seq_length=seq_length,
            width=seq_length + config.decoder_seq_length,
            special_tokens=T5_SPECIAL_TOKENS,
        )
        special = vocabulary.special
        end = special.eod if special.sep is None else special.sep
        assert end is not None
        self._sampler = T5Sampler(
            tokens=self.tokens.tokens,
            pointers=self.tokens.pointers,
            rows=self._rows,
            continues=vocabulary.continues,
            seq_length=seq_length,
            decoder_seq_length=config.decoder_seq_length,
            seed=seed,
            cls=_NONE if special.cls is None else special.cls,
            sep=_NONE if special.sep is None else special.sep,
            end=end,
            sentinels=special.sentinels,
            rules=MaskingRules(
                share=config.noise_density,
                whole_words=True,
                length_cumulative=[1.0] * _MOST_WORDS,
                length_probability=_PROBABILITY,
            ),
            mean_length=config.mean_span_length or 0.0,
        )
