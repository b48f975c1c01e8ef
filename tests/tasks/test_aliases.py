"""Identity of the test data, by which versions of a model are comparable."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.artifact import Artifact, StageKey
from megacore.artifact.build import open_artifact, seal
from megacore.config.finetune import FinetuneConfig
from tasks.evaluate import measured_data
from tasks.finetune_publish import measurement
from tests.finetune._tiny_models import tiny_config
from tests.tasks.conftest import make_config

COUNTS = {"test_metrics": {"accuracy": 0.75, "f1": 0.5, "loss": 0.7}}

Write = Callable[..., Artifact]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes an artifact with the given files."""

    def artifact(stage: str, **files: str) -> Artifact:
        key = StageKey(stage, 1, files, {})
        directory = tmp_path / key.key
        for name, text in files.items():
            path = directory / name.replace("__", "/").replace("_idx", ".idx")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        seal(directory, key, {}, 0.0)
        return open_artifact(directory)

    return artifact


def test_only_what_determines_the_test_samples_counts(write: Write) -> None:
    config = make_config()
    books, web = (write("tokenize", tokens_text_document_idx=text) for text in ("books", "web"))
    words, bytes_ = (write("tokenizer", vocabulary=text) for text in ("words", "bytes"))
    data = measured_data(config, books, words)
    for other in (
        make_config(train_iters=200, global_batch_size=4),
        config.model_copy(update={"model": config.model.model_copy(update={"num_layers": 4})}),
    ):
        assert measured_data(other, books, words) == data
    few = config.evaluate.model_copy(update={"max_samples": 6})
    longer = config.data.model_copy(update={"seq_length": 32})
    other_data = [
        measured_data(config, web, words),
        measured_data(config, books, bytes_),
        measured_data(config.model_copy(update={"evaluate": few}), books, words),
        measured_data(config.model_copy(update={"data": longer}), books, words),
        measured_data(config.model_copy(update={"seed": 1}), books, words),
    ]
    assert data not in other_data


def test_fine_tunings_are_compared_by_their_metric_on_the_same_test_split(write: Write) -> None:
    def config(metric: str = "accuracy") -> FinetuneConfig:
        return tiny_config("model", Path("data"), "classification", train={"best_metric": metric})

    examples = write("examples", train__a="a", test__a="a")
    first = measurement(config(), examples, COUNTS)
    assert first is not None
    assert (first.name, first.value, first.larger_is_better) == ("test_accuracy", 0.75, True)
    other_training = write("examples", train__a="b", test__a="a")
    assert measurement(config(), other_training, COUNTS) == first
    loss = measurement(config("loss"), examples, COUNTS)
    other_test = measurement(config(), write("examples", train__a="a", test__a="b"), COUNTS)
    assert loss is not None
    assert other_test is not None
    assert not loss.larger_is_better
    assert len({first.data, loss.data, other_test.data}) == 3
    assert measurement(config(), examples, {"test_metrics": None}) is None
