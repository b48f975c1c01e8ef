"""Flow `prepare-data`: documents → tokenizer → tokens → index maps."""

from typing import Any

from prefect import flow

from megacore.artifact import Artifact
from tasks._pipeline import Pipeline
from tasks.download import download
from tasks.index import build_index
from tasks.preflight import load_checked_config
from tasks.tokenize import make_tokenizer, tokenize


def data_stages(pipeline: Pipeline) -> tuple[Artifact, Artifact, Artifact]:
    """The four data stages in order; returns the tokens, the tokenizer and the index maps."""
    corpus = pipeline.stage(download)
    tokenizer = pipeline.stage(make_tokenizer, corpus)
    tokens = pipeline.stage(tokenize, corpus, tokenizer)
    index = pipeline.stage(build_index, tokens)
    return tokens, tokenizer, index


@flow(name="prepare-data", flow_run_name="prepare-data-{conf}", validate_parameters=False)
def prepare_data(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Prepare the data of `conf`, a name in conf/ or a path, with dotted `overrides`."""
    with Pipeline.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data_stages(pipeline)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(prepare_data)
