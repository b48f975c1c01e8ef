from typing import Any

import numpy as np
import numpy.typing as npt

def pack_until_overflow_int32(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int, extra: int
) -> npt.NDArray[np.int32]: ...
def pack_until_overflow_int64(
    lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int, extra: int
) -> npt.NDArray[np.int64]: ...

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
    ) -> None: ...
    def gather(
        self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
    ) -> int: ...
