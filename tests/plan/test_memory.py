import pytest
import torch

from megacore.config import RunConfig, load_config
from megacore.models.build import build_model
from megacore.models.gpt import parameter_count as count_by_model
from megacore.parallel.mesh import ProcessMesh
from megacore.plan.memory import estimate_memory, layer_activation_bytes, padded_vocab_size, parameter_count

VOCAB_SIZE = 2000
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tiny(dropout: float = 0.0, recompute: str = "none", **overrides: object) -> RunConfig:
    values = {
        "model.num_layers": 3,
        "model.hidden_dropout": dropout,
        "model.attention_dropout": dropout,
        "data.seq_length": 128,
        "train.micro_batch_size": 4,
        "train.recompute": recompute,
    }
    return load_config("gpt2-tiny", {**values, **overrides})


def saved_bytes(config: RunConfig, precision: str) -> int:
    """What autograd really keeps after a forward pass, parameters excluded; the logits are not saved by autograd."""
    model = build_model(config, VOCAB_SIZE, ProcessMesh.serial()).to(DTYPES[precision]).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(config.train.micro_batch_size, config.data.seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model.loss(tokens, tokens)
    assert loss.isfinite().all()
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in parameters)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_activations_are_what_autograd_keeps(precision: str, dropout: float, recompute: str) -> None:
    config = tiny(dropout, recompute)
    estimate = estimate_memory(config, VOCAB_SIZE, precision, "cpu").activations
    if recompute == "full":  # the one layer that is run again keeps its own only then
        estimate -= layer_activation_bytes(config, DTYPES[precision].itemsize, "cpu")
    assert estimate == pytest.approx(saved_bytes(config, precision), rel=0.1)


def test_a_layer_on_a_gpu_keeps_the_papers_34_sbh() -> None:
    config = tiny(0.1)
    tokens = config.train.micro_batch_size * config.data.seq_length
    assert layer_activation_bytes(config, 2, "cuda") == 34 * tokens * config.model.hidden_size


@pytest.mark.parametrize("overrides", [{}, {"model.ffn_hidden_size": 300, "model.max_position_embeddings": 512}])
def test_parameter_count_is_the_models(overrides: dict[str, object]) -> None:
    config = tiny(**overrides)
    model = build_model(config, VOCAB_SIZE, ProcessMesh.serial())
    assert parameter_count(config, VOCAB_SIZE) == sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(config, VOCAB_SIZE) == count_by_model(config, VOCAB_SIZE)


def test_345m() -> None:
    config = load_config("gpt2-345m")
    assert padded_vocab_size(config, 50_257) == 50_304
    assert parameter_count(config, 50_257) == 354_871_296


def test_bytes_per_parameter() -> None:
    config = load_config("gpt2-345m")
    count = parameter_count(config, 50_257)
    for precision, expected in (("fp32", 16), ("bf16", 18), ("fp16", 18)):
        estimate = estimate_memory(config, 50_257, precision, "cuda")
        assert estimate.weights + estimate.gradients + estimate.optimizer == expected * count
        assert estimate.total > expected * count


def test_recomputation_saves_memory() -> None:
    kept = estimate_memory(tiny(recompute="none"), VOCAB_SIZE, "fp32", "cpu").activations
    recomputed = estimate_memory(tiny(recompute="full"), VOCAB_SIZE, "fp32", "cpu").activations
    assert recomputed < kept / 2
