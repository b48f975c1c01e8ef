"""Floating-point operations of a training step, and peak rates of devices."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megacore.config.run import RunConfig
from megacore.config.train import Recompute

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TransformerShape:
    """The sizes of a model that determine its operation count."""

    num_layers: int
    """Number of layers; for T5, of the encoder."""
    hidden_size: int
    ffn_size: int
    seq_length: int
    """Tokens per sample; for T5, of the encoder."""
    vocab_size: int
    """Size of the vocabulary, including padding."""
    key_value_size: int | None = None
    """Width of the keys of all key-value heads (g x d); None means the width of the queries."""
    query_size: int | None = None
    """Width of the queries of all heads (n x d); None means hidden_size."""
    mlp_matrices: int = 2
    """Weight matrices per MLP: 2, or 3 if gated."""
    decoder_layers: int = 0
    """Number of T5's decoder layers."""
    decoder_seq_length: int = 0
    """Tokens per sample of T5's decoder; 0 without a decoder."""
    head_layers: int = 0
    """Square linear layers before the output layer; BERT's head has one."""

    @classmethod
    def of(cls, config: RunConfig, padded_vocab_size: int) -> "TransformerShape":
        """Return the shape of a configuration's model."""
        model, t5 = config.model, config.family == "t5"
        return cls(
            model.num_layers,
            model.hidden_size,
            model.ffn_size,
            config.data.seq_length,
            padded_vocab_size,
            model.query_groups * model.head_dim,
            query_size=None if model.attention_size == model.hidden_size else model.attention_size,
            mlp_matrices=3 if model.gated else 2,
            decoder_layers=model.decoder_layers if t5 else 0,
            decoder_seq_length=config.data.span_corruption.decoder_seq_length if t5 else 0,
            head_layers=int(config.family == "bert"),
        )

    def part(self, layers: int, decoder_layers: int, *, head: bool) -> "TransformerShape":
        """Return the shape of a part of the model, with or without its head."""
        return replace(
            self,
            num_layers=layers,
            decoder_layers=decoder_layers,
            vocab_size=self.vocab_size if head else 0,
            head_layers=self.head_layers if head else 0,
        )

    @property
    def layer_forward(self) -> int:
        """Forward operations of one layer's matrix products, for one sample of s tokens.

        For T5 this is a layer of the encoder.
        """
        s, h, q = self.seq_length, self.hidden_size, self._query_size
        key_value = q if self.key_value_size is None else self.key_value_size
        return 4 * s * h * (q + key_value) + self._mlp_forward(s) + self.attention_forward

    @property
    def attention_forward(self) -> int:
        """Forward operations of one layer's attention core: from q, k, v to its output."""
        return 4 * self.seq_length**2 * self._query_size

    @property
    def decoder_layer_forward(self) -> int:
        """Forward operations of one layer of T5's decoder, for one sample."""
        s, d, h, q = self.seq_length, self.decoder_seq_length, self.hidden_size, self._query_size
        self_attention, inter_attention = 8 * d * h * q, 4 * (d + s) * h * q
        return (
            self_attention + inter_attention + self._mlp_forward(d) + self.decoder_attention_forward
        )

    @property
    def decoder_attention_forward(self) -> int:
        """Forward operations of a decoder layer's two attention cores, for one sample."""
        return (
            4
            * self.decoder_seq_length
            * (self.decoder_seq_length + self.seq_length)
            * self._query_size
        )

    @property
    def logits_forward(self) -> int:
        """Forward operations of the head, for one sample."""
        s, h = self.decoder_seq_length or self.seq_length, self.hidden_size
        return 2 * s * h * (self.vocab_size + self.head_layers * h)

    @property
    def _query_size(self) -> int:
        return self.hidden_size if self.query_size is None else self.query_size

    def _mlp_forward(self, tokens: int) -> int:
        return 2 * self.mlp_matrices * tokens * self.hidden_size * self.ffn_size


def step_flops(
    shape: TransformerShape,
    samples: int,
    recompute: Recompute,
    recomputed_layers: int | None = None,
    recomputed_decoder_layers: int | None = None,
) -> int:
    """Return the number of operations that the hardware performs for `samples` samples.

    See Narayanan et al. 2021, appendix; arXiv:2104.04473.

    The backward pass costs twice the forward pass. Full recomputation repeats the forward pass of
    the layers, which gives the paper's 96 B s l h^2 (1 + s/6h + V/16lh). Selective recomputation
    repeats only attention (Korthikanti et al. 2022). With "none" the result is the model's
    operations, which MFU counts.

    Args:
        shape: shape of the model.
        samples: number of samples of s tokens each.
        recompute: part that is recomputed in the backward pass.
        recomputed_layers: number of recomputed layers of the whole model (T5: of the encoder); None
            means all.
        recomputed_decoder_layers: number of recomputed layers of T5's decoder; None means all.
    """
    layer_recompute = {
        "none": 0,
        "selective": shape.attention_forward,
        "full": shape.layer_forward,
    }[recompute]
    decoder_layer_recompute = {
        "none": 0,
        "selective": shape.decoder_attention_forward,
        "full": shape.decoder_layer_forward,
    }[recompute]
    layers = shape.num_layers if recomputed_layers is None else recomputed_layers
    decoder_layers = (
        shape.decoder_layers if recomputed_decoder_layers is None else recomputed_decoder_layers
    )
    forward = (
        shape.num_layers * shape.layer_forward
        + shape.decoder_layers * shape.decoder_layer_forward
        + shape.logits_forward
    )
    return samples * (
        3 * forward + layers * layer_recompute + decoder_layers * decoder_layer_recompute
    )


LARGE, WIDE = 512, 2
"""Rows, and ratio of columns to rows, from which `megacore.optim.muon` treats a matrix as large and
as wide."""


class MatrixProducts(NamedTuple):
    """Products [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int
    times: int
    """Number of these products."""
    symmetric: bool
    """True if the results are symmetric, of which a CPU computes little more than a half."""

    @property
    def flops(self) -> float:
        """Operations of complete products."""
        return 2.0 * self.rows * self.inner * self.columns * self.times


def newton_schulz_products(rows: int, columns: int) -> tuple[MatrixProducts, ...]:
    """Return the products of `megacore.optim.muon.newton_schulz` of one matrix."""
    short, long = sorted((rows, columns))
    outer, inner = (2, 14) if short >= LARGE and long >= WIDE * short else (5, 5)
    return (
        MatrixProducts(short, long, short, outer, symmetric=True),
        MatrixProducts(short, short, short, inner, symmetric=True),
        MatrixProducts(short, short, long, outer, symmetric=False),
    )


@dataclass(frozen=True)
class PeakRate:
    """Peak rates of one device for dense matrix products (no sparsity), in TFLOP/s."""

    low: float
    """Rate in bf16 or fp16 with fp32 accumulation."""
    fp32: float
    """Rate in fp32 without TF32."""
    has_bf16: bool = True
    """True if the tensor cores support bf16; before Ampere they only support fp16."""
    multiprocessors: int | None = None
    """Number of multiprocessors of the whole card, for the share of a MIG slice; None if there are
    no slices or the number is not published."""


PEAK_TFLOPS: dict[str, PeakRate] = {
    "GB300": PeakRate(2500.0, 80.0),
    "B300": PeakRate(2250.0, 75.0),
    "GB200": PeakRate(2500.0, 80.0),
    "B200": PeakRate(2250.0, 75.0, multiprocessors=148),
    "GH200": PeakRate(989.4, 66.9, multiprocessors=132),
    "H200 NVL": PeakRate(835.5, 60.0, multiprocessors=132),
    "H200": PeakRate(989.4, 66.9, multiprocessors=132),
    "H100 PCIe": PeakRate(756.5, 51.2, multiprocessors=114),
    "H100 NVL": PeakRate(835.5, 60.0, multiprocessors=132),
    "H100": PeakRate(989.4, 66.9, multiprocessors=132),
    "H800 PCIe": PeakRate(756.5, 51.2, multiprocessors=114),
    "H800": PeakRate(989.4, 66.9, multiprocessors=132),
    "H20": PeakRate(148.0, 44.0, multiprocessors=78),
    "A100": PeakRate(312.0, 19.5, multiprocessors=108),
    "A800": PeakRate(312.0, 19.5, multiprocessors=108),
    "A40": PeakRate(149.7, 37.4),
    "A30": PeakRate(165.0, 10.3, multiprocessors=56),
    "A10": PeakRate(125.0, 31.2),
    "V100S": PeakRate(130.0, 16.4, has_bf16=False),
    "V100 PCIE": PeakRate(112.0, 14.0, has_bf16=False),
    "V100": PeakRate(125.0, 15.7, has_bf16=False),
    "T4": PeakRate(65.0, 8.1, has_bf16=False),
    "L40S": PeakRate(362.0, 91.6),
    "L40": PeakRate(181.0, 90.5),
    "L4": PeakRate(121.0, 30.3),
    "RTX PRO 6000 Blackwell Workstation": PeakRate(503.8, 126.0, multiprocessors=188),
    "RTX 6000 Ada": PeakRate(364.2, 91.1),
    "RTX A6000": PeakRate(154.8, 38.7),
    "RTX 5090": PeakRate(209.5, 104.8),
    "RTX 5080": PeakRate(112.6, 56.3),
    "RTX 4090": PeakRate(165.2, 82.6),
    "RTX 4080": PeakRate(97.5, 48.7),
    "RTX 3090 Ti": PeakRate(80.0, 40.0),
    "RTX 3090": PeakRate(71.2, 35.6),
    "RTX 3080": PeakRate(59.5, 29.8),
}
"""Peak rates by words of the device's name. The first entry that matches counts.

The sources are NVIDIA's data sheets and architecture papers: DGX and HGX B200 and B300, GB200 and
GB300 NVL72 (figures of a rack divided by its GPUs, those with sparsity halved), H20, H100, H200,
GH200, A100, A30, A40, L4, L40, L40S, V100, T4, and the papers on Ampere, Ada and RTX Blackwell.
GeForce cards accumulate in fp32 at half their advertised rate, which is for accumulation in fp16.
AMD's GPUs are refused (see `hardware`).
"""
_OTHER_CARDS = frozenset({"Laptop", "Mobile", "Max", "SUPER", "Ti", "D", "FHHL", "DGXS", "64GB"})
"""Words that denote a slower or faster variant of a card. An entry of the table without such a word
does not match a device with it."""
_SLICE = "MIG"
"""Word in the name of a part of a card (Multi-Instance GPU), such as "MIG 3g.40gb"."""


@dataclass(frozen=True)
class Peaks:
    """Rates of one device relative to which MFU is reported, in TFLOP/s."""

    measured: float
    """Best measured rate of matrix products."""
    vendor: float | None = None
    """Rate by the vendor's figures; None for a CPU, or if it is unknown."""
    device: str = "a CPU"
    """Name of the device."""

    @classmethod
    def of(
        cls, device: "torch.device", precision: str, measured: float, *, tf32: bool = False
    ) -> "Peaks":
        """Look up the vendor's rate of a device, in addition to the measured one.

        `tf32` is True if matrix products of fp32 are in TF32.
        """
        import torch

        if device.type == "cpu":
            return cls(measured)
        properties = torch.cuda.get_device_properties(device)
        vendor = peak_by_name(
            properties.name, "tf32" if tf32 else precision, properties.multi_processor_count
        )
        return cls(measured, vendor, properties.name)

    @property
    def description(self) -> str:
        """Sentence about the rates, for the log."""
        measured = f"{self.measured:.3g} TFLOP/s, measured in matrix products"
        if self.vendor is not None:
            return (
                f"MFU is relative to {self.vendor:.4g} TFLOP/s, the vendor's peak of "
                f"{self.device}, and to {measured}"
            )
        return f"MFU is relative to {measured}: no vendor's peak of {self.device} is known"


def peak_by_name(
    device_name: str, precision: str, multiprocessors: int | None = None
) -> float | None:
    """Return the peak rate of a GPU by the vendor's figures, in TFLOP/s.

    A MIG slice has the share of its multiprocessors in those of the card. None means that the
    device, by its name from torch or the driver, is not in the table or does not support the
    precision (fp32, tf32, bf16 or fp16), or that the share of a slice is unknown.
    """
    words, rate = _words(device_name), _rate(device_name)
    if rate is None or (precision in ("bf16", "tf32") and not rate.has_bf16):
        return None
    # From Ampere on, all tensor cores multiply TF32 at half the rate of bf16.
    peak = {"fp32": rate.fp32, "tf32": rate.low / 2}.get(precision, rate.low)
    if _SLICE not in words:
        return peak
    if multiprocessors is None or rate.multiprocessors is None:
        return None
    return peak * multiprocessors / rate.multiprocessors


def _rate(device_name: str) -> PeakRate | None:
    """Return the rates of the card with this name; None if it is not in the table."""
    words = _words(device_name)
    for name, rate in PEAK_TFLOPS.items():
        parts = set(name.split())
        if parts <= words and not (words - parts) & _OTHER_CARDS:
            return rate
    return None


def _words(device_name: str) -> set[str]:
    return set(device_name.replace("-", " ").split())
