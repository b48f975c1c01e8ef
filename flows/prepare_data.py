"""Flow `prepare-data`: documents → tokenizer → tokens → index maps."""

from typing import Any, NamedTuple

from prefect import flow

from megacore.artifact import Artifact
from tasks._pipeline import Pipeline
from tasks.download import download
from tasks.index import build_index
from tasks.preflight import load_checked_config
from tasks.tokenize import make_tokenizer, tokenize


class PreparedData(NamedTuple):
    """What training reads."""

    tokens: Artifact
    tokenizer: Artifact
    index: Artifact


def data_stages(pipeline: Pipeline) -> PreparedData:
    """The four data stages in order."""
    corpus = pipeline.stage(download)
    tokenizer = pipeline.stage(make_tokenizer, corpus)
    tokens = pipeline.stage(tokenize, corpus, tokenizer)
    index = pipeline.stage(build_index, tokens)
    return PreparedData(tokens, tokenizer, index)


@flow(name="prepare-data", flow_run_name="prepare-data-{conf}", validate_parameters=False)
def prepare_data(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Prepare the data of `conf`, a name in conf/ or a path, with dotted `overrides`."""
    with Pipeline.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data_stages(pipeline)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(prepare_data)
