"""Flow `prepare-data`: documents → curated documents → tokenizer → tokens → index maps."""

from typing import Any

from prefect import flow

from megacore.artifact import Artifact
from megacore.config.curate import compares_sources
from megacore.config.run import RunConfig
from tasks._form import PRETRAINING, on_page, with_form
from tasks._stage_runner import StageRunner, run_name, sentence_state
from tasks.collect import COLLECTED_AT_ONCE, collect, needs_punkt, punkt
from tasks.contamination import contamination_stage, contamination_summary, searched
from tasks.curate import curate
from tasks.index import RunData, build_index, report_epochs
from tasks.preflight import load_checked_config
from tasks.tokenize import blend, make_tokenizer, share_cores, tokenize
from tasks.train import planned_order


def data_stages(pipeline: StageRunner[RunConfig]) -> RunData[Artifact]:
    """Run the data stages in order, each source separately and several sources side by side."""
    config = pipeline.config
    sources = [(source,) for source in config.data.sources]
    corpora = pipeline.stages(collect, sources, at_once=COLLECTED_AT_ONCE)
    if compares_sources(config.data.curate):
        curated: tuple[Artifact, ...] = ()
        for corpus in corpora:
            curated = (*curated, pipeline.stage(curate, corpus, curated))
        corpora = curated
    elif config.data.curate:  # one at a time: its shards are curated side by side
        corpora = pipeline.stages(curate, [(corpus,) for corpus in corpora])
    searches, corpora = searched(pipeline, corpora)
    tokenizer = pipeline.stage(make_tokenizer, corpora)
    splitter = pipeline.stage(punkt) if needs_punkt(config) else None
    inputs = [(corpus, tokenizer, splitter) for corpus in corpora]
    members = pipeline.stages(tokenize, inputs, share=share_cores)
    tokens = members[0] if len(members) == 1 else pipeline.stage(blend, members)
    planned_before = pipeline.value(planned_order, tokens, tokenizer)
    index = pipeline.stage(build_index, tokens, planned_before)
    pipeline.contamination = contamination_stage(pipeline, searches, tokens, index)
    return RunData(tokens, tokenizer, index)


@on_page(PRETRAINING)
@flow(name="prepare-data", flow_run_name=run_name, validate_parameters=False)
@sentence_state
@with_form(PRETRAINING)
def prepare_data(conf: str = "gpt2-tiny", overrides: dict[str, Any] | None = None) -> None:
    """Prepare the data of `conf`, a name in conf/ or a path, with dotted `overrides`."""
    with StageRunner.start(load_checked_config(conf, overrides, trains=False)) as pipeline:
        data = data_stages(pipeline)
        pipeline.summary = report_epochs(pipeline.config, data.index)
        pipeline.summary += contamination_summary(pipeline.config, pipeline.contamination)


if __name__ == "__main__":
    from tasks._cli import run_flow

    run_flow(prepare_data)
