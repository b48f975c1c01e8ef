from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

_Index = TypeVar("_Index", bound=np.generic, covariant=True)
_Result = TypeVar("_Result", covariant=True)

# gather
def pack_until_overflow_int32(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    extra: int,
) -> npt.NDArray[np.int32]: ...
def pack_until_overflow_int64(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    extra: int,
) -> npt.NDArray[np.int64]: ...
def count_best_fit(
    lengths: npt.NDArray[np.int32], seq_length: int, extra: int
) -> tuple[int, int]: ...

class _BestFit(Protocol):
    def __call__(
        self,
        lengths: npt.NDArray[np.int32],
        order: npt.NDArray[np.int32],
        seq_length: int,
        extra: int,
        first: int,
        entries: npt.NDArray[np.int32],
        rows: npt.NDArray[Any],
    ) -> None: ...

pack_best_fit_int32: _BestFit
pack_best_fit_int64: _BestFit

class Gatherer:
    def __init__(
        self,
        *,
        tokens: npt.NDArray[Any],
        pointers: npt.NDArray[np.int64],
        document_index: npt.NDArray[Any],
        sample_index: npt.NDArray[Any],
        shuffle_index: npt.NDArray[Any],
        seq_length: int,
        extra: int,
        whole_documents: bool,
        short_last: bool,
        best_fit: bool = False,
    ) -> None: ...
    def gather(
        self,
        indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64] | None = None,
    ) -> int: ...

# index_helpers
class RandomState:
    def __init__(self, seed: int, portable: bool = False) -> None: ...
    def shuffle(
        self, values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]
    ) -> None: ...

class _SampleIndex(Protocol[_Index]):
    def __call__(
        self,
        lengths: npt.NDArray[np.int32],
        document_index: npt.NDArray[np.int32],
        seq_length: int,
        num_samples: int,
        extra: int,
        partial: bool = False,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[_Index]: ...

class _SentenceMap(Protocol[_Result]):
    def __call__(
        self,
        document_starts: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int32],
        max_samples: int,
        max_epochs: int,
        max_length: int,
        short_probability: float,
        min_sentences: int,
        seed: int,
    ) -> _Result: ...

def build_blend(
    weights: npt.NDArray[np.float64],
    size: int,
    portable: bool = False,
    surplus: Sequence[float] = (),
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...
def build_exhaustive_blend(
    sizes: npt.NDArray[np.int64], portable: bool = False
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...

build_sample_index_int32: _SampleIndex[np.int32]
build_sample_index_int64: _SampleIndex[np.int64]
build_sentence_map_uint32: _SentenceMap[npt.NDArray[np.uint32]]
build_sentence_map_uint64: _SentenceMap[npt.NDArray[np.uint64]]
count_sentence_map: _SentenceMap[tuple[int, int]]

# sentence_samples
class MaskingRules:
    def __init__(
        self,
        *,
        share: float,
        whole_words: bool,
        length_cumulative: Sequence[float],
        length_probability: float = 0.0,
    ) -> None: ...

class BertSampler:
    def __init__(
        self,
        *,
        tokens: npt.NDArray[Any],
        pointers: npt.NDArray[np.int64],
        documents: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        continues: npt.NDArray[np.uint8],
        seq_length: int,
        seed: int,
        cls: int,
        sep: int,
        mask: int,
        task: Literal["none", "sop", "nsp"],
        rules: MaskingRules,
    ) -> None: ...
    def gather(
        self,
        indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64] | None = None,
    ) -> int: ...

class T5Sampler:
    def __init__(
        self,
        *,
        tokens: npt.NDArray[Any],
        pointers: npt.NDArray[np.int64],
        rows: npt.NDArray[Any],
        continues: npt.NDArray[np.uint8],
        seq_length: int,
        decoder_seq_length: int,
        seed: int,
        cls: int,
        sep: int,
        end: int,
        sentinels: Sequence[int],
        rules: MaskingRules,
        mean_length: float = 0.0,
    ) -> None: ...
    def gather(
        self,
        indices: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64] | None = None,
    ) -> int: ...
