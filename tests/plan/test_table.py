"""Predictions for a table of published runs."""

import csv
from pathlib import Path

import pytest

from megacore.errors import DataFormatError, MegacoreError, WorkspaceError
from megacore.plan import table
from megacore.plan.machine import load_machine
from megacore.plan.memory import GIB
from megacore.plan.operations import BLOOM_2022, MEGACORE, MEGATRON_2021
from megacore.plan.table import NEW_COLUMNS, iteration_of, memory_of, predict_row, predict_table

RUN = {
    "model": "gpt-1.3b",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "seq": "2048",
    "gpu": "a100-80gb",
    "gpus": "8",
    "tp": "2",
    "pp": "2",
    "micro_batch": "2",
    "global_batch": "32",
    "precision": "fp16",
}


def write_table(path: Path, *rows: dict[str, str]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_each_row_gets_a_prediction_or_a_reason(tmp_path: Path) -> None:
    source = write_table(
        tmp_path / "runs.csv", RUN, RUN | {"tp": "3"}, RUN | {"gpu": "tpu"}, RUN | {"hidden": "x"}
    )
    assert predict_table(source, tmp_path / "out.csv") == (4, 3)
    good, *refused = read_table(tmp_path / "out.csv")
    assert list(good) == [*RUN, *NEW_COLUMNS]
    assert {key: good[key] for key in RUN} == RUN
    assert float(good["predicted_iter_s"]) == pytest.approx(
        iteration_of(RUN).predict().seconds, rel=1e-5
    )
    assert 0 < float(good["predicted_mem_gib"]) < 80
    assert (good["predicted_fits"], good["refused"]) == ("yes", "")
    reasons = ["tensor_model_parallel_size 3", "gpu is 'tpu'", "hidden is 'x'"]
    for row, reason in zip(refused, reasons, strict=True):
        assert (row["predicted_iter_s"], row["predicted_fits"]) == ("", "")
        assert reason in row["refused"]
        assert "\n" not in row["refused"]


def test_predictions_of_an_earlier_run_are_replaced(tmp_path: Path) -> None:
    source = write_table(tmp_path / "runs.csv", RUN)
    predict_table(source, tmp_path / "out.csv")
    before = (tmp_path / "out.csv").read_bytes()
    predict_table(tmp_path / "out.csv", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == before


def test_too_large_a_model_does_not_fit() -> None:
    row = predict_row(RUN | {"layers": "96", "hidden": "12288", "heads": "96"})
    assert (row["predicted_fits"], row["refused"]) == ("no", "")


@pytest.mark.parametrize(("share", "fits"), [(1.001, "yes"), (0.999, "no")])
def test_all_memory_of_a_device_can_be_used(
    share: float, fits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    iteration = iteration_of(RUN)
    memory = share * memory_of(iteration) / GIB
    machine = iteration.machine.model_copy(update={"memory_gib": memory})
    monkeypatch.setattr(table, "_machine", lambda _: machine)
    assert predict_row(RUN)["predicted_fits"] == fits


def test_heads_that_do_not_divide_the_hidden_size_become_the_next_smaller_that_do() -> None:
    row = RUN | {"hidden": "14336", "heads": "96", "tp": "8", "pp": "1"}
    model = iteration_of(row).config.model
    assert (model.num_attention_heads, model.head_dim) == (64, 224)


def test_gradients_in_fp32_are_added_where_embeddings_have_the_place_of_a_layer() -> None:
    whole = RUN | {"layers": "24", "pp": "4"}
    divided = whole | {"layers": "22"}
    assert memory_of(iteration_of(divided)) > memory_of(iteration_of(whole))


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("GH200 96GB", "h100"),
        ("NVIDIA H200", "h200"),
        ("DGX A100 640GB", "a100-80gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
    ],
)
def test_a_gpu_is_recognized_by_its_name(gpu: str, name: str) -> None:
    assert iteration_of(RUN | {"gpu": gpu}).machine == load_machine(name)


def test_the_program_is_that_of_the_time() -> None:
    assert iteration_of(RUN).software is MEGATRON_2021
    bloom = "Megatron-DeepSpeed, BLOOM 176B"
    for more in ({"source": bloom}, {"model": bloom}, {"vocab": "250880"}):
        row = RUN | more
        assert iteration_of(row).software is BLOOM_2022
        assert iteration_of(row | {"gpu": "h100"}).software is MEGACORE
    assert iteration_of(RUN | {"gpu": "h100"}).software is MEGACORE


def test_divided_sequences_are_predicted_and_experts_are_refused() -> None:
    row = RUN | {"seq": "32768", "gpu": "h100", "cp": "2"}
    whole, parts = iteration_of(row | {"cp": "1"}).predict(), iteration_of(row).predict()
    assert whole.context == 0.0 < parts.context
    memory = [float(predict_row(row | {"cp": cp})["predicted_mem_gib"]) for cp in "12"]
    assert memory[1] < memory[0]
    assert iteration_of(row | {"gpu": "a100-80gb"}).software is MEGACORE
    assert "parallel.context_parallel_size" in predict_row(row | {"seq": "2046"})["refused"]
    assert (
        predict_row(row | {"ep": "2"})["refused"] == "ep is 2: expert parallelism is not modelled"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", r"has no column layers, hidden"),
        (b"layers,hidden\n1,2\n", r"has no column heads, seq"),
        (b"\xff\xfe\x00", r"is no CSV file in UTF-8"),
        (b'layers,"hidden\n', r"is no CSV file in UTF-8"),
        (b"model,model," + ",".join(RUN).encode() + b"\n", r"has the column 'model' twice"),
        (",".join(RUN).encode() + b"\n1,2\n", r"has 2 values in row 1 and 12 columns"),
    ],
)
def test_what_is_no_table_is_refused_before_anything_is_written(
    tmp_path: Path, content: bytes, problem: str
) -> None:
    (tmp_path / "runs.csv").write_bytes(content)
    with pytest.raises(DataFormatError, match=problem):
        predict_table(tmp_path / "runs.csv", tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_files_that_cannot_be_read_or_written_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"none\.csv cannot be read \(No such file"):
        predict_table(tmp_path / "none.csv", tmp_path / "out.csv")
    with pytest.raises(MegacoreError, match="cannot be read"):
        predict_table(tmp_path, tmp_path / "out.csv")
    source = write_table(tmp_path / "runs.csv", RUN)
    for parent in ("none", "runs.csv"):
        with pytest.raises(WorkspaceError, match=rf"{parent} is no directory"):
            predict_table(source, tmp_path / parent / "out.csv")
    (tmp_path / "out").mkdir()
    with pytest.raises(WorkspaceError, match="cannot write"):
        predict_table(source, tmp_path / "out")
    (tmp_path / "out").rmdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.csv"]
