"""The generated reference page and JSON schemas, and the files that a schema accepts."""

import html
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN, FINETUNE = "conf/schema.json", "conf/finetune/schema.json"
SOURCE = "data: {source: {kind: source_tree}}\n"
TUNING = "model: {path: a}\ndata: {source: {kind: hub, dataset: a}}\n"


class EditorsLoader(yaml.SafeLoader):
    """Loader of YAML 1.2, which editors read: 1e-4 is a number, and on is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012  PyYAML's own name
        first: [pair for pair in known if not pair[0].endswith((":bool", ":int", ":float"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


for tag, pattern, first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
):
    EditorsLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{tag}", re.compile(f"(?:{pattern})$"), list(first)
    )


def shipped(schema: str) -> list[Path]:
    """Return the configuration files that a schema is for."""
    return sorted((ROOT / schema).parent.glob("*.yaml"))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import config_reference

    return config_reference


@cache
def validator(schema: str) -> Draft202012Validator:
    content = json.loads((ROOT / schema).read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(content)
    return Draft202012Validator(content)


def problems(schema: str, text: str) -> list[str]:
    """Return what an editor underlines in a file."""
    values = yaml.load(text, Loader=EditorsLoader)
    return [error.message for error in validator(schema).iter_errors(values)]


def test_the_generated_files_are_up_to_date(reference: ModuleType) -> None:
    outputs = reference.outputs()
    assert set(outputs) == {"docs/reference.md", PRETRAIN, FINETUNE}
    old = [name for name, text in outputs.items() if (ROOT / name).read_text("utf-8") != text]
    assert not old, f"{', '.join(old)} are not up to date: run `make reference`"


def leaves(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of a configuration's values."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        key = f"{prefix}{field.alias or name}"
        yield key
        if hasattr(type(value), "model_fields"):
            yield from leaves(value, f"{key}.")


def test_the_page_has_a_row_of_five_cells_for_every_key() -> None:
    from megacore.config import load_config

    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert {row.count(" | ") for row in rows} == {4}
    assert {row.count("|") for row in rows} == {6}  # none inside a cell
    config = load_config(str(ROOT / "conf/gpt2-tiny.yaml"))
    assert set(leaves(config)) <= {row.split("`")[1] for row in rows}
    lr = next(row for row in rows if row.startswith("| `optim.lr` |"))
    assert lr == "| `optim.lr` | float > 0 | `0.001` | Peak learning rate. | run |"
    names = [row.split(" | ")[2] for row in rows if row.startswith("| `name` |")]
    assert names == ["the file's name"] * 2  # both kinds of files may leave it out


def test_the_page_gives_a_row_of_both_flows_once() -> None:
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(("| `launch.", "| `tracking."))]
    assert len(rows) == len(set(rows))
    assert "### launch.slurm" in page
    assert "### Fine-tuning: launch.slurm" not in page  # the same table
    assert "As in the section [launch](#launch): `launch.kind`, " in page
    # another stage is another row
    assert sum(row.startswith("| `launch.hostfile` |") for row in rows) == 2


def test_links_of_the_page_lead_to_its_headings() -> None:
    page = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    slugs = [re.sub(r"[^\w\s-]", "", text).lower().replace(" ", "-") for text in headings]
    assert len(slugs) == len(set(slugs))
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert len(links) > 30
    assert links <= set(slugs)


def test_text_of_docstrings_is_escaped(reference: ModuleType) -> None:
    cell = reference._escaped("Ends with `<|end|>`; docs/**/*.md, <b> and [x] are text.")
    assert "|" not in cell
    assert "<code>&lt;&#124;end&#124;&gt;</code>" in cell
    assert r"docs/\*\*/\*.md, &lt;b>" in cell
    assert "<|end|>" in html.unescape(cell)


@pytest.mark.parametrize("schema", [PRETRAIN, FINETUNE])
def test_shipped_files_are_valid(schema: str) -> None:
    files = shipped(schema)
    assert len(files) >= 5
    for path in files:
        assert problems(schema, path.read_text(encoding="utf-8")) == [], path


def test_shipped_files_name_their_schema_to_editors() -> None:
    expected = "# yaml-language-server: $schema=schema.json"
    for path in (*shipped(PRETRAIN), *shipped(FINETUNE)):
        assert path.read_text(encoding="utf-8").splitlines()[0] == expected, path


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (
            PRETRAIN,
            SOURCE + "optim: {lr: 1e-4, min_lr: 1.5e-5, weight_decay: 0, lr_decay_iters: null}",
        ),
        (
            PRETRAIN,
            SOURCE + "train: {compile: on, skip_samples: [7, 9-12]}\nlaunch: {preflight: off}",
        ),
        (
            PRETRAIN,
            SOURCE + "train: {compile: false}\ncheckpoint: {asynchronous: no, keep_best: true}",
        ),
        (
            PRETRAIN,
            SOURCE + "launch: {nnodes: 2:4, nproc_per_node: auto, slurm: {time_limit: 1:00:00}}",
        ),
        (PRETRAIN, SOURCE + "launch: {nnodes: 2}\ndeepspeed: {config: {a: 1}, overlap_comm: off}"),
        (
            PRETRAIN,
            SOURCE + "train: {profile: {from: 2, to: 4}}\nparallel: {pipeline_partition: [2, 2]}",
        ),
        (PRETRAIN, "data: {blend: [{weight: 1, source: {kind: jsonl, files: [a]}}]}"),
        (PRETRAIN, "extends: gpt2-tiny.yaml"),
        (
            PRETRAIN,
            "extends: [a.yaml, b.yaml]\ndata: {tokenizer: {vocab_size: 512}, source: {key: a}}",
        ),
        (FINETUNE, TUNING + "task: {kind: causal_lm}\nlaunch: {deepspeed_config: a.json}"),
        (FINETUNE, "extends: mrpc.yaml\noptim: {weight_decay: 0.1}\ntask: {max_length: 64}"),
    ],
)
def test_values_as_users_write_them_are_accepted(schema: str, text: str) -> None:
    assert problems(schema, text) == []


@pytest.mark.parametrize(
    ("schema", "text", "problem"),
    [
        (PRETRAIN, SOURCE + "trian: {}", "'trian' was unexpected"),
        (PRETRAIN, SOURCE + "train: {lrr: 1}", "'lrr' was unexpected"),
        (PRETRAIN, SOURCE + "train: {train_iters: many}", "'many' is not of type 'integer'"),
        (
            PRETRAIN,
            SOURCE + "train: {train_iters: 0}",
            "0 is less than or equal to the minimum of 0",
        ),
        (PRETRAIN, SOURCE + "train: {train_iters: true}", "True is not of type 'integer'"),
        (PRETRAIN, SOURCE + "checkpoint: {asynchronous: maybe}", "'maybe' does not match"),
        (PRETRAIN, SOURCE + "family: gtp", "'gtp' is not one of"),
        (PRETRAIN, SOURCE + "extends: 3", "3 is not valid"),
        (PRETRAIN, "extends: a.yaml\ndata: {tokenizer: {vocab: 3}}", "is not valid under any"),
        (PRETRAIN, "data: {source: {kind: text, files: [a], key: b}}", "is not valid under any"),
        (PRETRAIN, "data: {source: {kind: text}}", "'files' is a required property"),
        (PRETRAIN, "data: {source: {files: [a]}}", "'kind' is a required property"),
        (PRETRAIN, "extends: a.yaml\ndata: {blend: [{weight: 1}]}", "is not valid under any"),
        (PRETRAIN, "name: a", "'data' is a required property"),
        (PRETRAIN, "data: {seq_length: 8}", "is not valid under any"),
        (FINETUNE, TUNING, "'task' is a required property"),
        (
            FINETUNE,
            TUNING + "task: {kind: seq2seq, source_column: a}",
            "'target_column' is a required",
        ),
    ],
)
def test_mistakes_are_reported(schema: str, text: str, problem: str) -> None:
    assert any(problem in message for message in problems(schema, text)), problems(schema, text)
