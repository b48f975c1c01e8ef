"""Fill-in-the-middle (Bavarian et al. 2022, arXiv:2207.14255): rearranged documents in samples.

As in Megatron-LM (https://github.com/NVIDIA/Megatron-LM, fim_dataset.py), each segment between two
ends of documents is rearranged with probability `rate`: its text is cut at two characters into
prefix, middle and suffix, each part is tokenized separately, and the result is
`P prefix S suffix M middle` or, with probability `spm_rate`, `P S suffix M prefix middle`. The
sample is then cut to its length. Differences from Megatron-LM:

* the result for a sample depends only on the seed and the sample's number, so that reading order,
  ranks and resuming change nothing;
* an empty document keeps its end, and a sample that became shorter is padded with -1, which counts
  in no loss;
* if the edge of a sample divides the bytes of a character, a rearranged segment omits the
  incomplete character.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megacore.config.data import FimConfig
from megacore.data.samples import Batch, Dataset, Indices, as_array
from megacore.errors import ConfigError
from megacore.tokenizer import Tokenizer

Ids = npt.NDArray[np.integer]
_REPLACEMENT = "\ufffd"
"""Result of decoding bytes that are not a complete character."""


@dataclass
class _Segment:
    """Tokens between two ends of documents."""

    ids: Ids
    texts: tuple[str, str, str] | None = None
    """Prefix, middle and suffix; None if the segment is not rearranged."""
    suffix_first: bool = False


@dataclass
class _Sample:
    """A sample divided into segments."""

    row: int
    segments: list[_Segment] = field(default_factory=list)


class FimDataset:
    """Data set that applies fill-in-the-middle to the samples of another data set."""

    def __init__(
        self, dataset: Dataset, tokenizer: Tokenizer, fim: FimConfig, *, seed: int, capacity: int
    ) -> None:
        """Wrap `dataset` and look up the special tokens.

        Args:
            dataset: data set with the original samples.
            tokenizer: tokenizer that produced the tokens.
            fim: rates and names of the special tokens.
            seed: seed of the run.
            capacity: maximum number of tokens of a sample: seq_length, plus one with
                data.add_extra_token.

        Raises:
            ConfigError: if the vocabulary lacks one of the special tokens.
        """
        self.seq_length = dataset.seq_length
        self.width = dataset.width
        self.sources, self.source_places = dataset.sources, dataset.source_places
        self._dataset, self._tokenizer, self._fim = dataset, tokenizer, fim
        self._seed, self._capacity = seed, capacity
        self._prefix, self._middle, self._suffix = special_ids(tokenizer, fim)

    def __len__(self) -> int:
        return len(self._dataset)

    def gather(self, indices: Indices, out: Batch | None = None) -> Batch:
        """Read samples into a batch [b, s + 1]; into `out` if it is not None.

        Raises IndexError, DataFormatError.
        """
        positions = as_array(indices)
        batch = self._dataset.gather(positions, out)
        samples = [
            self._cut(row, batch[row], index) for row, index in enumerate(positions.tolist())
        ]
        changed = [
            sample for sample in samples if any(segment.texts for segment in sample.segments)
        ]
        texts = [
            text
            for sample in changed
            for segment in sample.segments
            for text in segment.texts or ()
        ]
        encoded = iter(self._tokenizer.encode_batch(texts) if texts else ())
        for sample in changed:
            parts = [
                self._rearrange(part, [next(encoded) for _ in part.texts or ()])
                for part in sample.segments
            ]
            ids = np.concatenate(parts)[: self._capacity]
            batch[sample.row, : len(ids)] = ids
            batch[sample.row, len(ids) :] = -1
        return batch

    def _cut(self, number: int, row: npt.NDArray[np.int64], index: int) -> _Sample:
        """Divide a sample at the ends of documents, and rearranged segments at two characters."""
        # Philox (Salmon et al. 2011) is keyed by seed and sample, so samples share no state.
        random = np.random.Generator(np.random.Philox(key=[self._seed, index]))
        tokens = row[row >= 0]
        ends = np.flatnonzero(tokens == self._tokenizer.eod_id)
        sample = _Sample(number)
        for part in np.split(tokens, np.stack([ends, ends + 1], axis=1).reshape(-1)):
            segment = _Segment(part)
            sample.segments.append(segment)
            if (
                not len(part)
                or part[0] == self._tokenizer.eod_id
                or random.random() >= self._fim.rate
            ):
                continue
            segment.suffix_first = random.random() < self._fim.spm_rate
            text = self._tokenizer.decode(part).strip(_REPLACEMENT)
            first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
            segment.texts = text[:first], text[first:second], text[second:]
        return sample

    def _rearrange(self, segment: _Segment, encoded: Sequence[Ids]) -> Ids:
        """Return the segment's ids, rearranged if `encoded` has prefix, middle and suffix."""
        if not encoded:
            return segment.ids
        prefix, middle, suffix = encoded
        if segment.suffix_first:
            return np.concatenate(
                [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
            )
        return np.concatenate([self._prefix, prefix, self._suffix, suffix, self._middle, middle])


def special_ids(tokenizer: Tokenizer, fim: FimConfig) -> list[Ids]:
    """Return the ids of the prefix, middle and suffix tokens, each as an array.

    Raises ConfigError.
    """
    ids = {
        name: tokenizer.token_id(name)
        for name in (fim.prefix_token, fim.middle_token, fim.suffix_token)
    }
    missing = [name for name, token in ids.items() if token is None]
    if missing:
        raise ConfigError(
            f"data.fim needs the tokens {', '.join(missing)}, which the vocabulary lacks: add them "
            "to data.tokenizer.special_tokens where a tokenizer is trained, or name tokens that "
            "the vocabulary has (data.fim.prefix_token, middle_token and suffix_token)"
        )
    return [np.array([token], np.int64) for token in ids.values()]
