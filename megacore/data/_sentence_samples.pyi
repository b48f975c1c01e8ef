from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

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
        self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
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
        self, indices: npt.NDArray[np.int64], out: npt.NDArray[np.int64], rows: npt.NDArray[np.int64] | None = None
    ) -> int: ...
