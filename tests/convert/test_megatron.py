"""Files written in Megatron-LM's form, and their bit-identical round trip."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.convert.megatron.args import args_of, spec_of
from megacore.convert.megatron.checkpoint import open_megatron, write_megatron
from megacore.convert.megatron.table import slots
from megacore.errors import ConfigError, ConversionError, ParallelLayoutError, WorkspaceError
from tests.convert._megatron import ITERATION, MODELS, load, megatron_spec, weights, written

LAYOUTS = [(1, 1), (1, 2), (2, 1), (2, 2)]
_LAYER_KEY = re.compile(r"layers\.(\d+)\.([a-z0-9_.]+)\.([a-z]+)")


@pytest.mark.parametrize("name", MODELS)
def test_the_table_names_every_parameter_of_the_model(name: str) -> None:
    spec = megatron_spec(name)
    named = {
        ours: shape
        for slot in slots(spec)
        for ours, shape in zip(slot.ours, slot.shapes, strict=True)
    }
    assert named == {name: tuple(tensor.shape) for name, tensor in weights(spec).items()}


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_identical_and_keeps_the_spec(
    tmp_path: Path, name: str, tensor: int, pipeline: int
) -> None:
    _, tensors = written(tmp_path / "out", name, tensor=tensor, pipeline=pipeline)
    read = open_megatron(tmp_path / "out")
    assert (read.spec, read.iteration, read.remarks) == (megatron_spec(name), ITERATION, ())
    assert read.tensors.keys() == tensors.keys()
    assert len(read.tensors) == len(tensors)
    assert all(torch.equal(read.tensors[key], value) for key, value in tensors.items())


def walk_checkpoint(
    iteration: Path, tensor: int, pipeline: int, layers: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and whole tensors the way public converters find them.

    They go by order, ends of names, and sizes.
    """
    for stage in range(pipeline):
        suffix = f"_{stage:03d}" if pipeline > 1 else ""
        models = [
            load(iteration / f"mp_rank_{rank:02d}{suffix}")["model"] for rank in range(tensor)
        ]
        encoders: list[Mapping[str, Tensor]] = [
            model["language_model"]["encoder"] for model in models
        ]
        for key in encoders[0]:
            match = _LAYER_KEY.match(key)
            if match is None:
                break
            layer, name, kind = int(match[1]) + stage * layers // pipeline, match[2], match[3]
            parts = [encoder[key] for encoder in encoders]
            if f"{name}.{kind}" in {"self_attention.dense.weight", "mlp.dense_4h_to_h.weight"}:
                joined = torch.cat(parts, 1)
            elif name in {"self_attention.query_key_value", "mlp.dense_h_to_4h"}:
                joined = torch.cat(parts)
            else:
                joined = parts[0]
            yield f"encoder.layers.{layer}.{name}.{kind}", joined
        if stage == 0:
            embedding = [model["language_model"]["embedding"] for model in models]
            yield (
                "embedding.word_embeddings.weight",
                torch.cat([e["word_embeddings"]["weight"] for e in embedding]),
            )
            yield (
                "embedding.position_embeddings.weight",
                embedding[0]["position_embeddings"]["weight"],
            )
    for kind in ("weight", "bias"):
        yield f"encoder.final_layernorm.{kind}", encoders[0][f"final_layernorm.{kind}"]


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_public_converters_would_find_every_tensor_of_gpt(
    tmp_path: Path, tensor: int, pipeline: int
) -> None:
    iteration, tensors = written(tmp_path / "out", tensor=tensor, pipeline=pipeline)
    converted = dict(walk_checkpoint(iteration, tensor, pipeline, 4))
    assert converted.keys() == tensors.keys()
    assert all(torch.equal(converted[name], value) for name, value in tensors.items())


def keys(model: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the paths of the tensors in order."""
    paths = []
    for key, value in model.items():
        paths += (
            keys(value, f"{prefix}{key}/") if isinstance(value, Mapping) else [f"{prefix}{key}"]
        )
    return paths


def weight_and_bias(*names: str) -> list[str]:
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


def layer_keys(layer: int) -> list[str]:
    names = weight_and_bias(
        "input_layernorm",
        "self_attention.query_key_value",
        "self_attention.dense",
        "post_attention_layernorm",
        "mlp.dense_h_to_4h",
        "mlp.dense_4h_to_h",
    )
    return [f"language_model/encoder/layers.{layer}.{name}" for name in names]


def test_bert_is_nested_and_ordered_for_the_public_converter(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path / "out", "bert")
    assert [path.name for path in iteration.iterdir()] == ["mp_rank_00"]
    assert [path.name for path in (iteration / "mp_rank_00").iterdir()] == ["model_optim_rng.pt"]
    assert keys(load(iteration / "mp_rank_00")["model"]) == [
        "language_model/embedding/word_embeddings/weight",
        "language_model/embedding/position_embeddings/weight",
        "language_model/embedding/tokentype_embeddings/weight",
        *(key for layer in range(4) for key in layer_keys(layer)),
        *(f"language_model/encoder/{key}" for key in weight_and_bias("final_layernorm")),
        *(f"language_model/pooler/{key}" for key in weight_and_bias("dense")),
        *(f"lm_head/{key}" for key in ("bias", *weight_and_bias("dense", "layernorm"))),
        *(f"binary_head/{key}" for key in ("weight", "bias")),
    ]


def test_pipeline_stages_number_layers_from_0_and_contain_their_own_tensors(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path / "out", tensor=2, pipeline=2)
    names = sorted(path.name for path in iteration.iterdir())
    assert names == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    first, last = (load(iteration / f"mp_rank_01_00{stage}")["model"] for stage in (0, 1))
    layers = [*layer_keys(0), *layer_keys(1)]
    assert keys(first) == [
        "language_model/embedding/word_embeddings/weight",
        "language_model/embedding/position_embeddings/weight",
        *layers,
    ]
    final = [f"language_model/encoder/{key}" for key in weight_and_bias("final_layernorm")]
    assert keys(last) == [*layers, *final, "word_embeddings_for_head/weight"]
    half = tensors["embedding.word_embeddings.weight"][152:]
    assert torch.equal(first["language_model"]["embedding"]["word_embeddings"]["weight"], half)
    assert torch.equal(last["word_embeddings_for_head"]["weight"], half)
    bias = last["language_model"]["encoder"]["layers.1.self_attention.dense.bias"]
    assert torch.equal(bias, tensors["encoder.layers.3.self_attention.dense.bias"])


def test_grouped_queries_and_gated_halves_are_joined_per_rank(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path / "out", "llama", tensor=2)
    prefix = "encoder.layers.2"
    query, key_value = (
        tensors[f"{prefix}.self_attention.{name}.weight"] for name in ("query", "key_value")
    )
    gate, up = (tensors[f"{prefix}.mlp.dense_h_to_4h{end}.weight"] for end in ("_gate", ""))
    for rank in (0, 1):
        model = load(iteration / f"mp_rank_{rank:02d}")["model"]["language_model"]
        encoder = model["encoder"]
        # One group of two heads of 8 on each rank: its queries, then its keys and values.
        rows = torch.cat([query[16 * rank : 16 * rank + 16], key_value[16 * rank : 16 * rank + 16]])
        assert torch.equal(encoder["layers.2.self_attention.query_key_value.weight"], rows)
        halves = torch.cat([gate[64 * rank : 64 * rank + 64], up[64 * rank : 64 * rank + 64]])
        assert torch.equal(encoder["layers.2.mlp.dense_h_to_4h.weight"], halves)
        assert torch.equal(
            model["output_layer"]["weight"], tensors["output_layer.weight"][152 * rank :][:152]
        )
        assert model["embedding"].keys() == {"word_embeddings"}


def test_files_load_with_weights_only_and_have_args_as_attributes_and_items(tmp_path: Path) -> None:
    iteration, _ = written(tmp_path / "out", "bert", tensor=2, pipeline=2)
    state = load(iteration / "mp_rank_01_001")
    args = state["args"]
    assert type(args) is OrderedDict
    assert vars(args) == dict(args)
    assert "ffn_hidden_size" in args
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, ITERATION)
    assert (args.num_layers, args.hidden_size, args.num_attention_heads, args.ffn_hidden_size) == (
        4,
        32,
        4,
        128,
    )
    assert (args.orig_vocab_size, args.padded_vocab_size, args.max_position_embeddings) == (
        300,
        304,
        24,
    )
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.bias_gelu_fusion, args.openai_gelu, args.params_dtype) == (
        False,
        False,
        torch.float32,
    )
    assert (args.tokenizer_type, args.tokenizer_name_or_path) == ("NullTokenizer", None)
    # Megatron-LM pads 300 to a multiple of this times 2.
    assert args.make_vocab_size_divisible_by == 152
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == f"{ITERATION}\n"


def test_args_name_the_tokenizer_and_the_approximate_gelu(tmp_path: Path) -> None:
    spec = megatron_spec("gpt").model_copy(update={"tokenizer_directory": str(tmp_path)})
    write_megatron(spec, weights(spec), tmp_path / "out", iteration=5)
    args = load(tmp_path / "out" / "iter_0000005" / "mp_rank_00")["args"]
    assert (args.tokenizer_type, args.tokenizer_name_or_path) == ("PretrainedFromHF", str(tmp_path))
    assert (args.openai_gelu, args.bias_gelu_fusion, args.make_vocab_size_divisible_by) == (
        True,
        False,
        16,
    )
    assert open_megatron(tmp_path / "out").spec == spec


def test_a_tokenizer_that_args_name_by_a_relative_path_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer").mkdir()
    monkeypatch.chdir(tmp_path)
    spec = megatron_spec("gpt").model_copy(update={"tokenizer_directory": None})
    args = args_of(spec, iteration=1, tensor=1, pipeline=1)
    named = {"tokenizer_type": "PretrainedFromHF", "tokenizer_name_or_path": "tokenizer"}
    layers, rows = spec.model.num_layers, spec.padded_vocab_size
    read = spec_of({**args, **named}, "gpt", layers, rows, tmp_path)
    assert read.tokenizer_directory == str(tmp_path / "tokenizer")


def test_a_file_contains_only_its_ranks_tensors(tmp_path: Path) -> None:
    iteration, tensors = written(tmp_path / "out", "bert", tensor=2, pipeline=2)
    total = sum(path.stat().st_size for path in iteration.glob("*/*"))
    assert total < 4 * 2**16 + 4 * (
        sum(tensor.numel() for tensor in tensors.values()) * 1.2 + 304 * 32
    )


def test_weights_of_other_dtypes_are_written_in_float32(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = {name: (tensor % 100).bfloat16() for name, tensor in weights(spec).items()}
    write_megatron(spec, tensors, tmp_path / "out", iteration=5)
    model = load(tmp_path / "out" / "iter_0000005" / "mp_rank_00")["model"]
    table = model["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert table.dtype == torch.float32
    assert torch.equal(table, tensors["embedding.word_embeddings.weight"].float())


@pytest.mark.parametrize(
    ("model", "tensor", "pipeline", "sentence"),
    [
        (
            {},
            3,
            1,
            r"model\.num_attention_heads 4 cannot be divided over a tensor parallel size of 3",
        ),
        (
            {"num_query_groups": 1},
            2,
            1,
            r"model\.num_query_groups 1 cannot .* tensor parallel size of 2",
        ),
        ({"ffn_hidden_size": 41}, 2, 1, r"model\.ffn_hidden_size 41 cannot"),
        (
            {"make_vocab_size_divisible_by": 1, "num_attention_heads": 8},
            8,
            1,
            "padded vocabulary of 300 cannot",
        ),
        ({}, 1, 3, r"model\.num_layers 4 cannot be divided over a pipeline parallel size of 3"),
        ({}, 0, 1, "tensor parallel size of 0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(
    tmp_path: Path, model: dict[str, Any], tensor: int, pipeline: int, sentence: str
) -> None:
    spec = megatron_spec("gpt", **model)
    with pytest.raises(ParallelLayoutError, match=sentence):
        write_megatron(spec, {}, tmp_path / "out", iteration=5, tensor=tensor, pipeline=pipeline)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "model", "sentence"),
    [
        (
            "gpt",
            {"parallel_residual": True},
            r"of gpt has no place for model\.parallel_residual True: ",
        ),
        ("gpt", {"position_embedding_type": "alibi"}, r"model\.position_embedding_type 'alibi'"),
        (
            "gpt",
            {"activation": "relu", "sliding_window": 8},
            r"activation 'relu', model\.sliding_window 8",
        ),
        ("gpt", {"activation": "geglu_tanh"}, "'geglu_tanh'"),
        ("gpt", {"qk_layernorm": True}, "qk_layernorm True"),
        (
            "gpt",
            {"norm_position": "sandwich", "attn_logit_softcapping": 50.0},
            r"norm_position 'sandwich', .*attn_logit_softcapping 50\.0",
        ),
        ("gpt", {"apply_layernorm_1p": True, "scale_embeddings": True}, "1p True, .*ings True"),
        ("llama", {"rotary_percent": 0.4}, r"rotary_percent 0\.4"),
        ("llama", {"rope_scaling": {"kind": "linear", "factor": 2.5}}, "rope_scaling LinearRope"),
        (
            "llama",
            {"rope_scaling": {"kind": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rope_scaling Llama3Rope",
        ),
        (
            "bert",
            {"norm_position": "post"},
            r"of bert has no place for model\.norm_position 'post'",
        ),
        (
            "bert",
            {"normalization": "rmsnorm", "add_bias_linear": False},
            "normalization 'rmsnorm', .*_linear False",
        ),
        ("bert", {"activation": "swiglu"}, "'swiglu'"),
        ("bert", {"num_query_groups": 2}, "num_query_groups 2"),
    ],
)
def test_options_without_counterpart_are_refused_by_name(
    tmp_path: Path, name: str, model: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConversionError, match=sentence):
        write_megatron(megatron_spec(name, **model), {}, tmp_path / "out", iteration=5)
    assert not (tmp_path / "out").exists()


def test_t5_is_refused_by_name(tmp_path: Path) -> None:
    spec = megatron_spec("gpt").model_copy(update={"family": "t5"})
    with pytest.raises(
        ConversionError, match="family 't5' has no counterpart in Megatron's file form"
    ):
        write_megatron(spec, {}, tmp_path / "out", iteration=5)


def test_weights_of_another_model_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = weights(spec)
    short = {name: tensor for name, tensor in tensors.items() if "final" not in name}
    with pytest.raises(
        ConversionError,
        match=r"lacks encoder\.final_layernorm\.weight, encoder\.final_layernorm\.bias: give",
    ):
        write_megatron(spec, short, tmp_path / "out", iteration=5)
    with pytest.raises(ConversionError, match=r"it has no place for stray\.bias: give"):
        write_megatron(
            spec, {**tensors, "stray.bias": torch.zeros(1)}, tmp_path / "out", iteration=5
        )
    assert not (tmp_path / "out").exists()


class Failing(dict[str, Tensor]):
    """Weights whose last tensor raises an error, after files of other ranks were written."""

    def __getitem__(self, name: str) -> Tensor:
        if name == "encoder.final_layernorm.bias":
            raise OSError(28, "No space left on device")
        return super().__getitem__(name)


def test_a_failed_write_leaves_nothing_and_an_unchanged_tracker(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = weights(spec)
    fresh, used = tmp_path / "a" / "b", tmp_path / "used"
    write_megatron(spec, tensors, used, iteration=5)
    for root in (fresh, used):
        with pytest.raises(WorkspaceError, match="No space left on device"):
            write_megatron(spec, Failing(tensors), root, iteration=6, tensor=2, pipeline=2)
    assert not (tmp_path / "a").exists()
    assert sorted(path.name for path in used.iterdir()) == [
        "iter_0000005",
        "latest_checkpointed_iteration.txt",
    ]
    assert (used / "latest_checkpointed_iteration.txt").read_text() == "5\n"


def test_an_existing_output_is_refused(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = weights(spec)
    write_megatron(spec, tensors, tmp_path / "out", iteration=5)
    with pytest.raises(ConfigError, match="iter_0000005 is not empty: give another"):
        write_megatron(spec, tensors, tmp_path / "out", iteration=5)
    (tmp_path / "file").write_text("here")
    with pytest.raises(ConfigError, match="file is a file"):
        write_megatron(spec, tensors, tmp_path / "file", iteration=5)
    assert (tmp_path / "file").read_text() == "here"


def test_a_wrong_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    spec = megatron_spec("gpt")
    tensors = {**weights(spec), "encoder.final_layernorm.bias": torch.zeros(31)}
    with pytest.raises(
        ConversionError, match=r"final_layernorm\.bias has shape \(31,\) where .* says \(32,\)"
    ):
        write_megatron(spec, tensors, tmp_path / "out", iteration=5)
    assert not (tmp_path / "out").exists()
