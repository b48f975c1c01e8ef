import numpy as np
import numpy.typing as npt

class RandomState:
    def __init__(self, seed: int) -> None: ...
    def shuffle(self, values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]) -> None: ...

def build_sample_index_int32(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
) -> npt.NDArray[np.int32]: ...
def build_sample_index_int64(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    extra: int,
) -> npt.NDArray[np.int64]: ...
