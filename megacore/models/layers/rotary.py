"""Tables of the rotary position embedding (Su et al. 2021, arXiv:2104.09864), with scaling.

The halves of a head are paired, as in GPT-NeoX and Llama. Scaled frequencies are defined as in
`transformers/modeling_rope_utils.py` of transformers 5.
"""

import math

import torch
from torch import Tensor

from megacore.config.model import ModelConfig
from megacore.config.rope import DynamicRope, LinearRope, Llama3Rope, LongRope, YarnRope


class Rotary:
    """Rotation angles of positions.

    Args:
        model: model configuration, with rotary positions.
    """

    def __init__(self, model: ModelConfig) -> None:
        self._model = model
        self._scaling = model.rope_scaling
        self._frequencies: tuple[Tensor, Tensor] | None = None
        self.scale = self._scaling.scale if isinstance(self._scaling, YarnRope | LongRope) else 1.0
        """Factor on cosines and sines."""

    def tables(
        self, position_ids: Tensor, dtype: torch.dtype, at: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotation angles of each position.

        Frequencies that depend on the length of a sequence follow from the largest position of each
        row, like those of transformers for this sequence by itself.

        Args:
            position_ids: positions [b or 1, s].
            dtype: type of the result; the angles are computed in fp32.
            at: indices of the positions of the result; None means all.

        Returns:
            Two tensors [b or 1, 1, s, rotary_dim]. The second half of the last dimension repeats
            the first.
        """
        local = position_ids if at is None else position_ids.index_select(1, at)
        angles = local[:, None, :, None].float() * self._of(position_ids)
        angles = torch.cat([angles, angles], -1)
        cosines, sines = angles.cos(), angles.sin()
        if self.scale != 1:
            cosines, sines = cosines * self.scale, sines * self.scale
        return cosines.to(dtype), sines.to(dtype)

    def _of(self, position_ids: Tensor) -> Tensor:
        """Return the frequencies [rotary_dim / 2], or [b or 1, 1, 1, rotary_dim / 2]."""
        scaling, size = self._scaling, self._model.rotary_dim
        short, other = self._made(position_ids.device)
        if not isinstance(scaling, DynamicRope | LongRope):
            return short
        length = position_ids.amax(-1)[:, None, None, None] + 1
        original = scaling.original_max_position_embeddings
        if isinstance(scaling, LongRope):
            return torch.where(length > original, other, short)
        growth = scaling.factor * length.clamp(min=original) / original - (scaling.factor - 1)
        base = self._model.rotary_base * growth ** (size / (size - 2))
        return 1.0 / base**other

    def _made(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the frequencies of short sequences, and what those of long ones follow from.

        They are made in the first forward pass, not with the model, which engines build with other
        default types and devices, and kept: copies to a GPU would wait for it in every micro batch.
        """
        if self._frequencies is None or self._frequencies[0].device != device:
            with torch.inference_mode(False):
                self._frequencies = (
                    frequencies(self._model, device),
                    _plain(self._model, device)
                    / torch.tensor(self._scaling.long_factor, dtype=torch.float32, device=device)
                    if isinstance(self._scaling, LongRope)
                    else _exponents(self._model, device),
                )
        return self._frequencies


def frequencies(model: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the rotary frequencies in radians per token, fp32 [rotary_dim / 2].

    For kinds that depend on the length these are the frequencies of short sequences.
    """
    plain = _plain(model, device)
    match model.rope_scaling:
        case LinearRope(factor=factor):
            return plain / factor
        case YarnRope() as scaling:
            return _yarn(plain, scaling, model.rotary_base)
        case Llama3Rope() as scaling:
            return _llama3(plain, scaling)
        case LongRope(short_factor=factors):
            return plain / torch.tensor(factors, dtype=torch.float32, device=device)
        case _:
            return plain


def _exponents(model: ModelConfig, device: torch.device | str) -> Tensor:
    size = model.rotary_dim
    return torch.arange(0, size, 2, dtype=torch.float32, device=device) / size


def _plain(model: ModelConfig, device: torch.device | str) -> Tensor:
    return 1.0 / torch.pow(model.rotary_base, _exponents(model, device))


def _yarn(plain: Tensor, scaling: YarnRope, base: float) -> Tensor:
    size = 2 * len(plain)

    def index(rotations: float) -> float:
        """Return the index of the frequency that rotates so often over the original length."""
        waves = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return size * math.log(waves) / (2 * math.log(base))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    indices = torch.arange(size // 2, dtype=torch.float32, device=plain.device)
    ramp = ((indices - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _llama3(plain: Tensor, scaling: Llama3Rope) -> Tensor:
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = 2 * math.pi / plain
    # 0 from the longest wave that is divided, 1 up to the shortest one that is kept.
    smooth = ((original / waves - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain
