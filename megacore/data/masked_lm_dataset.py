"""BERT's samples (Devlin et al. 2018): two segments of whole sentences, and words of them that are to be predicted.

They are Megatron core's (https://github.com/NVIDIA/Megatron-LM, core/datasets/bert_dataset.py, masked_dataset.py),
token by token: the sentences of a sample are cut in two at random, the halves change places with probability 1/2,
tokens are taken from either end of the longer one until both fit, and words are drawn until `masked_lm_prob` of the
tokens are reached; a draw takes up to `max_ngram` words. Otherwise than there, the sentence task may be the paper's
own, whose second segment is, with probability 1/2, a random sample of another document.
"""

from pathlib import Path
from typing import Literal

import numpy as np

from megacore.config.data import MaskedLmConfig
from megacore.data._compiled import BertSampler, MaskingRules
from megacore.data.sentence_dataset import SentenceDataset
from megacore.data.vocabulary import Vocabulary
from megacore.errors import DataFormatError

SPECIAL_TOKENS = 3
"""[CLS] and two [SEP]."""


class MaskedLmDataset(SentenceDataset):
    """One split as rows of 3 s + 1 ids: tokens [s], labels [s] (-1: not predicted), segments [s], sentence label.

    `[CLS] A [SEP] B [SEP]`; the segment is 0 up to the first [SEP] and then 1. Of the predicted tokens 80 % are [MASK],
    10 % a random token, and 10 % what they were. The sentence label is 1 where B does not follow A. -1 is padding.
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
            special_tokens=SPECIAL_TOKENS,
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
                f"{self._path} has samples of one document alone, and data.masked_lm.sentence_task nsp takes sentences "
                "of another: use more text, or set it to sop"
            )


def masking_rules(config: MaskedLmConfig) -> MaskingRules:
    """How the compiled part draws words; the distribution of their number is what NumPy's `choice` makes of it."""
    share = 1.0 / np.arange(1, config.max_ngram + 1)
    share = share / share.sum()
    cumulative = (share / share.sum()).cumsum()
    return MaskingRules(
        share=config.masked_lm_prob,
        whole_words=config.whole_word_masking,
        length_cumulative=(cumulative / cumulative[-1]).tolist(),
    )
