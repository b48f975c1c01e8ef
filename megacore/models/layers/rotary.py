"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), on halves of a head as GPT-NeoX and Llama have it."""

import torch
from torch import Tensor


def rotary_tables(position_ids: Tensor, size: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of each position.

    Args:
        position_ids: [b or 1, s].
        size: elements of a head that are rotated, even.
        base: of the frequencies.
        dtype: of the result; the angles are fp32.

    Returns:
        Two tensors [b or 1, 1, s, size], whose second half of the last dimension repeats the first.
    """
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=position_ids.device) / size
    frequencies = 1.0 / torch.pow(torch.tensor(base, dtype=torch.float32, device=position_ids.device), exponents)
    angles = position_ids[:, None, :, None].float() * frequencies
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
