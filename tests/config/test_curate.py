"""Steps of curation: mistakes in `data.curate` are refused with one sentence."""

from typing import Any

import pytest

from megacore.config.load import parse_config
from megacore.errors import ConfigError

BASE = {
    "name": "n",
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1},
}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"curate": [{"step": "minhash"}]}, "data.curate.0.?.step is 'minhash': give exact_dedup"),
        ({"curate": [{"n_grams": 5}]}, "data.curate.0.?.step is missing"),
        (
            {"curate": [{"step": "minhash_dedup", "n_gram": 5}]},
            r"unknown key data.curate.0.?.n_gram \(did you mean n_grams\?\)",
        ),
        ({"curate": [{"step": "python", "function": "x"}]}, "'x' names no function"),
        ({"curate_workers": 2}, "data.curate_workers is 2 but data.curate has no steps"),
        ({"curate_executor": {"kind": "ray"}}, "data.curate_executor is ray but data.curate has"),
        (
            {"curate": [{"step": "exact_dedup", "across_sources": True}]},
            "step with across_sources, but there is only one source: give data.blend several",
        ),
    ],
)
def test_mistakes_in_steps_are_one_sentence(data: dict[str, Any], message: str) -> None:
    source = {"kind": "jsonl", "files": ["a.jsonl"]}
    with pytest.raises(ConfigError, match=message):
        parse_config(BASE | {"data": {"source": source, **data}}, origin="conf")


def test_web_pages_without_steps_are_refused() -> None:
    data = {"source": {"kind": "warc", "files": ["a.warc.gz"]}}
    with pytest.raises(ConfigError, match="a source of kind warc has web pages, which only data"):
        parse_config(BASE | {"data": data}, origin="conf")


def test_curation_of_tokens_is_refused() -> None:
    data = {"source": {"kind": "prefix", "prefix": "a"}, "curate": [{"step": "pii"}]}
    with pytest.raises(ConfigError, match="source of kind prefix has tokens instead of text"):
        parse_config(BASE | {"data": data}, origin="conf")
