"""The model and the tokenizer that a path names."""

import shutil
from pathlib import Path

import pytest

from megacore.convert.model_source import find_model, find_tokenizer, require_family
from megacore.convert.ungated_export import export_hf, open_source
from megacore.errors import CheckpointError, ConfigError, DataFormatError
from megacore.jobs.model import ModelSource
from tests.generate import _tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run directory with two checkpoints, and tokenizers of three sizes (read-only)."""
    directory = tmp_path_factory.mktemp("source")
    for name, size in (("own", 300), ("other", 310), ("smaller", 290)):
        _tiny.write_tokenizer(directory / name, size)
    spec = _tiny.spec(300, tokenizer=directory / "own")
    for iteration in (5, 10):
        _tiny.write_checkpoint(
            directory / "run" / "checkpoints", spec, _tiny.random_model(spec), iteration
        )
    return directory


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("run", "iter_0000010"),
        ("run/checkpoints", "iter_0000010"),
        ("run/checkpoints/iter_0000005", "iter_0000005"),
    ],
)
def test_a_path_names_a_checkpoint_or_the_newest_of_several(
    root: Path, path: str, name: str
) -> None:
    source = find_model(root / path)
    assert (Path(source.directory).name, source.exported, source.spec.vocab_size) == (
        name,
        False,
        300,
    )


def test_damaged_checkpoints_are_passed_over_or_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "run", tmp_path / "run")
    newest = tmp_path / "run/checkpoints/iter_0000010"
    (newest / "__0_0.distcp").write_bytes(b"cut")
    assert Path(find_model(tmp_path / "run").directory).name == "iter_0000005"
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp has 3 bytes instead of"):
        find_model(newest)
    (tmp_path / "run/checkpoints/iter_0000005/complete.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"is complete; of the newest: .*__0_0\.distcp has 3 bytes instead of"
    ):
        find_model(tmp_path / "run")


def test_a_checkpoint_of_megatron_is_refused_with_the_import_command(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(
        CheckpointError,
        match="is a checkpoint of Megatron-LM: make one of it with `megacore import`",
    ):
        find_model(tmp_path / "megatron")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "is no directory"),
        ("own", "has no complete.json, so it is not complete: use another"),
    ],
)
def test_a_path_without_a_model_is_refused(root: Path, path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_model(root / path)


def test_an_unsupported_family_is_refused_by_name(root: Path) -> None:
    source = find_model(root / "run")
    require_family(source, ("gpt", "t5"), "megacore generate")
    bert = source.model_copy(update={"spec": source.spec.model_copy(update={"family": "bert"})})
    with pytest.raises(
        ConfigError,
        match=(
            "family bert, which fills in masked words: megacore generate needs one of family gpt "
            "or t5"
        ),
    ):
        require_family(bert, ("gpt", "t5"), "megacore generate")


def with_tokenizer(root: Path, directory: str | None) -> ModelSource:
    """Return the model with `directory` as its tokenizer's directory."""
    source = find_model(root / "run")
    spec = source.spec.model_copy(update={"tokenizer_directory": directory})
    return source.model_copy(update={"spec": spec})


def test_a_checkpoint_names_its_tokenizer(root: Path) -> None:
    assert find_tokenizer(find_model(root / "run"), None).vocab_size == 300
    assert find_tokenizer(with_tokenizer(root, None), root / "own").vocab_size == 300


def test_a_tokenizer_of_another_size_is_refused_with_both_sizes(root: Path) -> None:
    source = find_model(root / "run")
    for name, size in (("other", 310), ("smaller", 290)):
        with pytest.raises(
            ConfigError, match=f"a vocabulary of {size} entries and the model in .* one of 300"
        ):
            find_tokenizer(source, root / name)


def test_a_model_without_megacores_tokenizer_may_have_spare_rows(root: Path) -> None:
    assert find_tokenizer(with_tokenizer(root, None), root / "smaller").vocab_size == 290
    named = with_tokenizer(root, str(root / "smaller"))
    assert find_tokenizer(named, None).vocab_size == 290
    assert find_tokenizer(named, root / "smaller").vocab_size == 290
    assert (
        find_tokenizer(with_tokenizer(root, str(root / "gone")), root / "smaller").vocab_size == 290
    )
    with pytest.raises(
        ConfigError, match=r"a vocabulary of 310 entries and the model in .* one of 300"
    ):
        find_tokenizer(with_tokenizer(root, None), root / "other")


def test_the_tokenizer_of_a_moved_workspace_is_found(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    _tiny.write_tokenizer(before / "tokenizers" / "0a1b", 300)
    spec = _tiny.spec(300, tokenizer=before / "tokenizers" / "0a1b")
    model = _tiny.random_model(spec)
    _tiny.write_checkpoint(before / "runs" / "2c3d" / "checkpoints", spec, model, 5)
    before.rename(after)
    source = find_model(after / "runs" / "2c3d")
    assert source.spec.tokenizer_directory == str(after / "tokenizers" / "0a1b")
    assert find_tokenizer(source, None).vocab_size == 300


def test_an_imported_model_has_the_tokenizer_next_to_it_when_another_is_at_its_path(
    tmp_path: Path,
) -> None:
    path = tmp_path / "imported"
    for size in (300, 310):
        _tiny.write_tokenizer(path / "tokenizer", size)
        spec = _tiny.spec(size, tokenizer=path / "tokenizer")
        _tiny.write_checkpoint(path, spec, _tiny.random_model(spec), 0)
        if size == 300:
            path.rename(tmp_path / "moved")
    assert find_tokenizer(find_model(tmp_path / "moved"), None).vocab_size == 300
    assert open_source(tmp_path / "moved").tokenizer == tmp_path / "moved" / "tokenizer"


def test_an_export_refuses_a_larger_tokenizer_at_the_named_path(tmp_path: Path) -> None:
    spec = _tiny.spec(300, tokenizer=tmp_path / "named")
    _tiny.write_checkpoint(tmp_path / "run", spec, _tiny.random_model(spec), 0)
    assert open_source(tmp_path / "run").tokenizer is None
    _tiny.write_tokenizer(tmp_path / "named", 310)
    with pytest.raises(ConfigError, match=r"of 310 entries and the model in .* one of 300"):
        open_source(tmp_path / "run")


@pytest.mark.parametrize(("biases", "replaced"), [(True, True), (False, False)])
def test_an_export_remarks_a_tokenizer_that_transformers_replaces(
    tmp_path: Path, biases: bool, replaced: bool
) -> None:
    tokenizer = tmp_path / "tokenizers" / "bpe"
    _tiny.write_tokenizer(tokenizer, 300)
    spec = _tiny.spec(300, tokenizer=tokenizer, **_tiny.LLAMA, add_qkv_bias=biases)
    _tiny.write_checkpoint(tmp_path / "run", spec, _tiny.random_model(spec), 0)
    remark = export_hf(open_source(tmp_path / "run"), tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text(encoding="utf-8")
    assert (remark is not None) == ("this Qwen2ForCausalLM as another one" in card) == replaced


def test_missing_tokenizers_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="came without a tokenizer: give --tokenizer"):
        find_tokenizer(with_tokenizer(root, None), None)
    with pytest.raises(
        DataFormatError, match=r"names the tokenizer in .*gone, where there is none"
    ):
        find_tokenizer(with_tokenizer(root, str(root / "gone")), None)
    with pytest.raises(DataFormatError, match=r"the tokenizer .*gone is no directory"):
        find_tokenizer(find_model(root / "run"), root / "gone")
