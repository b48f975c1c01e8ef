import numpy as np
import numpy.typing as npt

class RandomState:
    def __init__(self, seed: int, portable: bool = False) -> None: ...
    def shuffle(self, values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]) -> None: ...

def build_sample_index_int32(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
    partial: bool = False,
) -> npt.NDArray[np.int32]: ...
def build_sample_index_int64(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
    partial: bool = False,
) -> npt.NDArray[np.int64]: ...
def build_blend(
    weights: npt.NDArray[np.float64], size: int, portable: bool = False
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...
def build_exhaustive_blend(
    sizes: npt.NDArray[np.int64], portable: bool = False
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]: ...
def build_sentence_map_uint32(
    document_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    max_samples: int,
    max_epochs: int,
    max_length: int,
    short_probability: float,
    min_sentences: int,
    seed: int,
) -> npt.NDArray[np.uint32]: ...
def build_sentence_map_uint64(
    document_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    max_samples: int,
    max_epochs: int,
    max_length: int,
    short_probability: float,
    min_sentences: int,
    seed: int,
) -> npt.NDArray[np.uint64]: ...
def count_sentence_map(
    document_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    max_samples: int,
    max_epochs: int,
    max_length: int,
    short_probability: float,
    min_sentences: int,
    seed: int,
) -> tuple[int, int]: ...
