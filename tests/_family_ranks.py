"""What each of t tensor-parallel ranks computes with the models of `tests/_families.py`, all of it
in one spawn."""

from typing import Any

from torch import Tensor

from megacore.models.base import Model
from megacore.parallel.mesh import ALONE, ParallelGroup, ProcessMesh
from megacore.parallel.rank_layout import RankLayout
from megacore.tensor_parallel import partial_gradients, partitions
from tests import _families
from tests._dist import still_alive
from tests._families import VARIANTS

ALIKE = ("llama geglu, long base", "neox serial", "bert gelu_new", "bert masked lm")
"""Models that are divided over ranks as another one is."""
DIVIDED = tuple(name for name in VARIANTS if name not in ALIKE)
DROPPED = ("bert", "t5 v1.1")
"""Models that are trained with dropout; GPT's is tested in tests/models/test_gpt_parallel.py."""
SEED = 77
RECOMPUTED: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "full of one layer": {"recompute": "full", "recompute_num_layers": 1},
}


def run(world: int) -> dict[str, Any]:
    """Every case, in one order on all ranks; sequence parallelism needs several."""
    tp = ProcessMesh.build(RankLayout(tensor=world)).tensor_parallel if world > 1 else ALONE
    kinds = ("plain", "sequence")[:world]
    found: dict[str, Any] = {}
    for name in VARIANTS if world == 1 else DIVIDED:
        still_alive()
        found[name] = {kind: _plain(name, tp, kind == "sequence") for kind in kinds}
    for name in DROPPED:
        still_alive()
        found[name]["dropped"] = {kind: _dropped(name, tp, kind == "sequence") for kind in kinds}
    return found


def _plain(name: str, tp: ParallelGroup, sequence: bool) -> dict[str, Any]:
    """Logits, losses and every gradient of the whole model, and of a pipeline of one layer per
    chunk.

    The pipeline of several ranks is sequence parallel, which divides what the chunks hand on.
    """
    of = _families.spec(name)
    whole, given = _families.model(of, tp, sequence_parallel=sequence), _families.given(of)
    found = (
        {}
        if tp.size > 1 and not sequence
        else {"chunks": _families.backward(_pieces(name, tp, sequence), given)}
    )
    return found | {
        "partitions": partitions(whole),
        "partial": partial_gradients(whole),
        "logits": [part.detach() for part in _families.logits(whole, given)],
        "whole": _families.backward([whole], given),
    }


def _dropped(name: str, tp: ParallelGroup, sequence: bool) -> dict[str, dict[str, Tensor]]:
    """Losses and gradients with all dropouts on: recomputed in every way, once more, of another
    seed, and in chunks."""
    values = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
    of = _families.spec(name, **values)
    given = _families.given(of)

    def passed(parts: list[Model], seed: int = SEED) -> dict[str, Tensor]:
        return _families.backward(parts, given, seed)

    def whole(**options: Any) -> list[Model]:
        return [_families.model(of, tp, sequence_parallel=sequence, **options)]

    found = {way: passed(whole(**options)) for way, options in RECOMPUTED.items()}
    found["again"] = passed(whole())
    found["another seed"] = passed(whole(), SEED + 1)
    found["chunks"] = passed(_pieces(name, tp, sequence, **values))
    return found


def _pieces(name: str, tp: ParallelGroup, sequence: bool, **values: Any) -> list[Model]:
    of = _families.spec(name, **values)
    return [
        _families.model(of, tp, chunk=chunk, sequence_parallel=sequence)
        for chunk in _families.chunks(of)
    ]
