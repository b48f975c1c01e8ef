"""One tiny model as a checkpoint and as a transformers directory, for the commands on models."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from megacore.cli import app
from tests.generate import _tiny
from tests.zeroshot import _texts

VOCAB = 300


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def output(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


@dataclass(frozen=True)
class Files:
    """Paths of the models, tokenizers and texts."""

    checkpoint: Path
    export: Path
    bert: Path
    tokenizer: Path
    other_tokenizer: Path
    wikitext: Path
    lambada: Path


def write_files(root: Path) -> Files:
    """Write a GPT-NeoX saved by transformers and a checkpoint with the same weights."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    from megacore.convert.model_source import find_model
    from megacore.generate.weights import load_model
    from megacore.parallel.mesh import ProcessMesh

    _tiny.write_tokenizer(root / "tokenizer", VOCAB)
    _tiny.write_tokenizer(root / "other", VOCAB + 10)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "max_position_embeddings": _tiny.POSITIONS,
    }
    roles = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPTNeoXConfig(
        **sizes, **roles, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3
    )
    torch.manual_seed(5)
    GPTNeoXForCausalLM(config).save_pretrained(root / "export")
    for path in (root / "tokenizer").iterdir():
        shutil.copy(path, root / "export")
    source = find_model(root / "export")
    model = load_model(
        source, ProcessMesh.serial(), device=torch.device("cpu"), dtype=torch.float32
    )
    spec = source.spec.model_copy(update={"tokenizer_directory": str(root / "tokenizer")})
    checkpoint = _tiny.write_checkpoint(root / "checkpoints", spec, model)
    return Files(
        checkpoint=checkpoint,
        export=root / "export",
        bert=_tiny.write_checkpoint(
            root / "bert", spec.model_copy(update={"family": "bert"}), model
        ),
        tokenizer=root / "tokenizer",
        other_tokenizer=root / "other",
        wikitext=_texts.write_wikitext(root / "wiki.txt"),
        lambada=_texts.write_lambada(root / "lambada.jsonl"),
    )
