"""Data sets of whole sentences: BERT's and T5's, by a map of the sentences of each sample.

A sample is a function of the seed and its number alone: reading order, ranks and resumption change
nothing.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from megacore.config.data import MaskedLmConfig, SpanCorruptionConfig
from megacore.data._compiled import BertSampler, MaskingRules, T5Sampler
from megacore.data.index_directory import SENTENCE_MAP_NAME, map_path
from megacore.data.samples import MappedDataset
from megacore.data.sentence_maps import load_sentence_map
from megacore.errors import DataFormatError
from megacore.tokenizer.vocabulary import Vocabulary

MASKED_LM_SPECIAL_TOKENS = 3
"""[CLS] and two [SEP]."""
T5_SPECIAL_TOKENS = 2
"""For which Megatron core leaves room."""
_MOST_WORDS = 10
_PROBABILITY = 0.2
"""Of a span to end after a word (Joshi et al. 2019)."""
_NONE = -1


class SentenceDataset(MappedDataset):
    """One split as an array of samples; what these are, subclasses say.

    Everything is memory-mapped and checked when it is opened. Raises DataFormatError for maps that
    are missing, damaged, or made for other sentences or another seq_length.
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
            index_directory: where the map is.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            width: ids of a row.
            special_tokens: how many of these a sample has besides its sentences.
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
    """One split as rows of 3 s + 1 ids.

    A row has tokens [s], labels [s] (-1: not predicted), segments [s], sentence label.

    `[CLS] A [SEP] B [SEP]`; the segment is 0 up to the first [SEP] and then 1. Of the predicted
    tokens 80 % are [MASK], 10 % a random token, and 10 % what they were. The sentence label is 1
    where B does not follow A. -1 is padding.

    Samples are BERT's (Devlin et al. 2018) as Megatron core makes them, token by token
    (https://github.com/NVIDIA/Megatron-LM, core/datasets/bert_dataset.py, masked_dataset.py): the
    sentences of a sample are cut in two at random, the halves change places with probability 1/2,
    tokens are taken from either end of the longer one until both fit, and words are drawn until
    `masked_lm_prob` of the tokens are reached; a draw takes up to `max_ngram` words. Otherwise than
    there, the sentence task may be the paper's own, whose second segment is, with probability 1/2,
    a random sample of another document.
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
            index_directory: where the map is.
            split_name: "train", "valid" or "test".
            seq_length: s, in tokens.
            vocabulary: that the sentences were tokenized with.
            config: how tokens are drawn.
            seed: of the run; sample i draws from RandomState(seed + i).
            binary_head: whether there are two segments, the relation of which is predicted.
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
        """Raise DataFormatError unless there is another document for every sample."""
        if len(self) == 0:
            return
        ends = self._rows[:, 0].min(), self._rows[:, 0].max()
        first, last = np.searchsorted(self.tokens.document_indices, ends, side="right")
        if first == last:
            raise DataFormatError(
                f"{self._path} has samples of one document alone, and data.masked_lm.sentence_task "
                "nsp takes sentences of another: use more text, or set it to sop"
            )


def masking_rules(config: MaskedLmConfig) -> MaskingRules:
    """How the compiled part draws words.

    The distribution of their number is what NumPy's `choice` makes of it.
    """
    share = 1.0 / np.arange(1, config.max_ngram + 1)
    share = share / share.sum()
    cumulative = (share / share.sum()).cumsum()
    return MaskingRules(
        share=config.masked_lm_prob,
        whole_words=config.whole_word_masking,
        length_cumulative=(cumulative / cumulative[-1]).tolist(),
    )


class T5Dataset(SentenceDataset):
    """One split as rows of s + s_d ids: the encoder's tokens [s] and the decoder's labels [s_d].

    -1 is padding.

    The n-th span of the text is replaced by the sentinel <extra_id_n>; the labels are each sentinel
    with the tokens that it stands for, and the end of the sequence.

    Spans are T5's own (Raffel et al. 2019), of random lengths with a mean
    (`random_spans_noise_mask` in
    https://github.com/google-research/text-to-text-transfer-transformer), or Megatron core's, token
    by token (https://github.com/NVIDIA/Megatron-LM, core/datasets/t5_dataset.py and
    masked_dataset.py): 1 to 10 whole words by a geometric distribution, until the share of tokens
    is reached. Where the decoder has no room for all spans, over which Megatron core stops, those
    at the end of the text stay as they are.
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
            index_directory: where the map is.
            split_name: "train", "valid" or "test".
            seq_length: s, of the encoder, in tokens.
            vocabulary: that the sentences were tokenized with.
            config: how spans are drawn, and s_d.
            seed: of the run; sample i draws from RandomState(seed + i).
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
