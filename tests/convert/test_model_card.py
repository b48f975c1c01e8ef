"""The model card: a YAML header and a body with the facts."""

import pytest
import yaml

from megacore.config.spec import ModelSpec
from megacore.convert.model_card import bare_card, model_card
from megacore.convert.report import ParityReport
from tests.convert._models import tiny_spec
from tests.convert._tiny import tiny_config


def test_the_card_has_a_yaml_header_and_the_facts() -> None:
    config = tiny_config()
    card = model_card(
        config,
        ModelSpec.of(config, 300),
        iterations=40,
        facts={"data": "a | b\nc", "test PPL": "12.34"},
        report=ParityReport(
            tolerance=1e-4, samples=3, greedy_tokens=96, max_abs_logit_difference=2e-6
        ),
    )
    _, header, body = card.split("---\n", 2)
    assert yaml.safe_load(header) == {
        "model_name": "tiny",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["gpt2", "megacore", "pretraining"],
    }
    assert "# tiny" in body
    assert (
        "49,312 parameters (3 layers, hidden size 32, 4 heads, 48 positions, vocabulary 300)"
        in body
    )
    assert "| data | a \\| b c |\n| test PPL | 12.34 |" in body
    assert "40 iterations of 4 sequences of 48 tokens" in body
    assert "largest logit difference is 2e-06 (allowed 0.0001)" in body
    assert 'pipeline("text-generation"' in body
    assert "max_new_tokens=24)" in body, "64 new tokens do not fit into 48 positions"
    assert "push_to_hub" in body
    assert "float32" in body
    assert "The first weights are those of" not in body
    assert "{" not in body


def test_the_card_of_continued_pretraining_names_its_first_weights() -> None:
    fresh = tiny_config()
    train = fresh.train.model_copy(update={"pretrained_checkpoint": "in/iter_0000000"})
    config = fresh.model_copy(update={"train": train})
    card = model_card(
        config,
        ModelSpec.of(config, 300),
        iterations=40,
        facts={},
        report=ParityReport(tolerance=1e-4),
    )
    assert "seed 1234. The first weights are those of in/iter_0000000." in card


@pytest.mark.parametrize("name", ["bert", "bert-masked", "megatron-bert", "megatron-bert-masked"])
def test_the_card_of_a_bert_loads_the_heads_that_it_has(name: str) -> None:
    card = bare_card("tiny", tiny_spec(name), iterations=1, dtype="float32", facts={})
    masked = name.endswith("masked")
    assert ("for part in (AutoModelForMaskedLM, AutoTokenizer):" in card) == masked
    assert ("for part in (AutoModelForPreTraining, AutoTokenizer):" in card) != masked
    assert ("trained to predict masked tokens, of " in card) == masked
    assert ("how two segments belong together, of " in card) != masked
