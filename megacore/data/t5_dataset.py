"""T5's samples (Raffel et al. 2019): sentences whose spans are replaced by sentinels, and the spans spelled out.

Spans are T5's own, of random lengths with a mean (`random_spans_noise_mask` in
https://github.com/google-research/text-to-text-transfer-transformer), or Megatron core's, token by token
(https://github.com/NVIDIA/Megatron-LM, core/datasets/t5_dataset.py and masked_dataset.py): 1 to 10 whole words by a
geometric distribution, until the share of tokens is reached. Where the decoder has no room for all spans, over which
Megatron core stops, those at the end of the text stay as they are.
"""

from pathlib import Path

from megacore.config.data import SpanCorruptionConfig
from megacore.data._compiled import MaskingRules, T5Sampler
from megacore.data.sentence_dataset import SentenceDataset
from megacore.data.vocabulary import Vocabulary

SPECIAL_TOKENS = 2
"""For which Megatron core leaves room."""
_MOST_WORDS = 10
_PROBABILITY = 0.2
"""Of a span to end after a word (Joshi et al. 2019)."""
_NONE = -1


class T5Dataset(SentenceDataset):
    """One split as rows of s + s_d ids: the encoder's tokens [s] and the decoder's labels [s_d]; -1 is padding.

    The n-th span of the text is replaced by the sentinel <extra_id_n>; the labels are each sentinel with the tokens
    that it stands for, and the end of the sequence.
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
            special_tokens=SPECIAL_TOKENS,
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
