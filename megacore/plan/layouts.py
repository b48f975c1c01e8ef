"""From a configuration and a number of ranks to the layout that they make."""

from megacore.config.deepspeed_checks import check_deepspeed
from megacore.config.layouts import check_layout
from megacore.config.run import RunConfig
from megacore.errors import ParallelLayoutError
from megacore.models.parameters import padded_vocab_size
from megacore.parallel.rank_layout import RankLayout


def layout_of(config: RunConfig, ranks: int, vocab_size: int | None = None) -> RankLayout:
    """The layout of `ranks` ranks: tensor and pipeline sizes as configured, data parallel over what they leave.

    Args:
        config: the run.
        ranks: processes of the job.
        vocab_size: entries of the tokenizer before padding, None where they are not known yet.

    Raises:
        ParallelLayoutError: model, batch and ranks do not divide as they must, or not as a DeepSpeed JSON says;
            the message has all the numbers and the nearest layouts of as many ranks that work.
    """
    padded = None if vocab_size is None else padded_vocab_size(config, vocab_size)
    try:
        layout = check_layout(config, ranks, padded)
        check_deepspeed(config, layout.data)
    except ValueError as error:
        raise ParallelLayoutError(str(error)) from error
    return RankLayout(data=layout.data, pipeline=layout.pipeline, tensor=layout.tensor)
