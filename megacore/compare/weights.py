"""Comparison of the weights of two models, one group of tensors at a time.

Two passes read each tensor. The first takes fingerprints that do not depend on the order of the
values, finds the precision of each side, and pairs the layers. The second names the relation of
each part of B to its counterpart in A.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from megacore.compare.parts import LAYER, Group, groups, name_mixed, name_order, tensor_of
from megacore.compare.relations import (
    HALF_TYPES,
    Relation,
    fingerprint,
    permutation,
    relate,
    similarity,
)
from megacore.compare.report import UNEXPLAINED, Explains, Finding
from megacore.compare.side import Reading
from megacore.convert.key_map import LazyTensors
from megacore.errors import listed

Fingerprint = tuple[int, int, int]


@dataclass(frozen=True)
class Difference:
    """Finding, and what of A corrects it in B."""

    finding: Finding
    fields: tuple[str, ...] = ()
    """Fields of the specification."""
    tensors: frozenset[str] = frozenset()
    """Tensors by our global names."""

    def tested(self, explains: Explains) -> "Difference":
        """Return the difference with the result of its correction."""
        return replace(self, finding=self.finding.tested(explains))


@dataclass
class _Survey:
    """Result of the first pass over one side."""

    prints: dict[str, Fingerprint] = field(default_factory=dict)
    """Fingerprint of each part."""
    exact: dict[str, bool] = field(default_factory=dict)
    """True if every value has the type, by its name."""


@dataclass
class _Part:
    """Part of B that differs from A."""

    name: str
    relation: Relation
    cause: str
    text: str
    tensor: str


def compare_weights(a: Reading, b: Reading) -> tuple[list[Difference], dict[str, Any]]:
    """Compare all weights of two readings; the architectures may differ.

    Returns the differences, and the numbers of tensors that are equal and that differ.
    """
    first, second = _survey(a), _survey(b)
    differences: list[Difference] = []
    rounding = _precision(first, second)
    if rounding is not None:
        differences.append(rounding)
        dtype = HALF_TYPES[
            str(rounding.finding.b if rounding.finding.b != "float32" else rounding.finding.a)
        ]
        a, b = _rounded(a, dtype), _rounded(b, dtype)
        first, second = _survey(a), _survey(b)
    moved, places = _pair_layers(a, b, first, second)
    differences += moved
    theirs = b.tensors
    b = replace(b, tensors=LazyTensors(places, lambda name: theirs[places[name]]))
    names = [name for name in a.shapes if name in places]
    parts: list[_Part] = []
    equal = 0
    again = frozenset[str]().union(
        *(each.tensors for each in moved if each.finding.sentence.startswith("A repeats"))
    )
    for group in groups([name for name in names if name not in again]):
        differing = list(_compare_group(group, a, b))
        parts += differing
        equal += not differing
    parts = _cross_matched(parts, (a, b), (first, second))
    differences += _summarized(parts)
    facts = {
        "tensors": len(names),
        "only_in_a": [name for name in a.shapes if name not in places],
        "only_in_b": [name for name in b.shapes if name not in places.values()],
        "differing": sorted({part.tensor for part in parts}),
    }
    return differences, facts


def _rounded(reading: Reading, dtype: torch.dtype) -> Reading:
    """Return a reading whose values are rounded to a type on access."""
    tensors = reading.tensors
    rounded = LazyTensors(tensors, lambda name: tensors[name].to(dtype).float())
    return replace(reading, tensors=rounded)


def _survey(reading: Reading) -> _Survey:
    survey = _Survey(exact=dict.fromkeys(HALF_TYPES, True))
    for group in groups(list(reading.tensors)):
        for name, tensor in group.parts(reading).items():
            survey.prints[name] = fingerprint(tensor)
            for kind, dtype in HALF_TYPES.items():
                if survey.exact[kind]:
                    same = torch.equal(tensor.to(dtype).float(), tensor)
                    survey.exact[kind] = same or not bool(torch.isfinite(tensor).all())
    return survey


def _precision(a: _Survey, b: _Survey) -> Difference | None:
    """Return the difference if all values of one side have a type that the other's have not."""
    kinds = [
        next((kind for kind, exact in survey.exact.items() if exact), "float32")
        for survey in (a, b)
    ]
    if kinds[0] == kinds[1] or a.prints == b.prints:
        return None
    coarse = kinds[1] if kinds[1] != "float32" else kinds[0]
    if a.exact[coarse] and b.exact[coarse]:
        return None
    sentence = f"the weights of A have {kinds[0]} precision, those of B {kinds[1]}"
    finding = Finding("weights", "precision", sentence, (), kinds[0], kinds[1])
    return Difference(finding, tensors=frozenset({"*"}))


def _pair_layers(
    a: Reading, b: Reading, first: _Survey, second: _Survey
) -> tuple[list[Difference], dict[str, str]]:
    """Pair the layers by their contents.

    Returns the differences, and the name in B of the tensor that is compared with each of A's.
    """
    places = {name: name for name in a.shapes if name in b.shapes}
    differences = []
    for stack in dict.fromkeys(match["stack"] for name in a.shapes if (match := LAYER.match(name))):
        ours, theirs = _layers(first.prints, stack), _layers(second.prints, stack)
        origin = _origins(ours, theirs)
        if len(ours) == len(theirs) and len(origin) < len(theirs):
            again = {new: old for new, old in _origins(theirs, ours).items() if new != old}
            if again:
                differences.append(_repeated(stack, again, a))
                continue
        if all(origin.get(number, number) == number for number in theirs) and len(ours) == len(
            theirs
        ):
            continue
        difference_, moved = _layer_difference(stack, origin, ours, theirs, a)
        if difference_ is not None:
            differences.append(difference_)
        for name in [name for name in places if name.startswith(f"{stack}.layers.")]:
            match = LAYER.match(name)
            assert match is not None
            number = moved.get(int(match["number"]))
            del places[name]
            if number is not None:
                places[name] = f"{stack}.layers.{number}.{match['local']}"
    return differences, places


def _layers(prints: Mapping[str, Fingerprint], stack: str) -> dict[int, dict[str, Fingerprint]]:
    layers: dict[int, dict[str, Fingerprint]] = {}
    for name, value in prints.items():
        match = LAYER.match(name)
        if match is not None and match["stack"] == stack:
            layers.setdefault(int(match["number"]), {})[match["local"]] = value
    return layers


def _origins(
    ours: Mapping[int, Mapping[str, Fingerprint]], theirs: Mapping[int, Mapping[str, Fingerprint]]
) -> dict[int, int]:
    """Return for each layer of B the layer of A with the most equal parts, if there is one.

    Parts that several layers of A have in common do not count.
    """
    places: dict[tuple[str, Fingerprint], list[int]] = {}
    for number, parts in ours.items():
        for local, value in parts.items():
            places.setdefault((local, value), []).append(number)
    result = {}
    for number, parts in theirs.items():
        votes: Counter[int] = Counter()
        for local, value in parts.items():
            candidates = places.get((local, value), [])
            if len(candidates) == 1:
                votes[candidates[0]] += 1
        if votes and votes[number] < max(votes.values()):
            result[number] = votes.most_common(1)[0][0]
        elif votes:
            result[number] = number
    return result


def _layer_difference(
    stack: str,
    origin: Mapping[int, int],
    ours: Mapping[int, Any],
    theirs: Mapping[int, Any],
    a: Reading,
) -> tuple[Difference | None, dict[int, int]]:
    """Return the difference, and the layer of B by the layer of A that it is compared with."""
    moved: dict[int, int] = {}
    for number in theirs:
        moved.setdefault(origin.get(number, number), number)
    wrong = [number for number in theirs if origin.get(number, number) != number]
    missing = [number for number in ours if number not in moved]
    if not wrong and not missing and len(ours) == len(theirs):
        return None, moved
    if sorted(moved) == sorted(ours) and len(theirs) == len(ours):
        cause = "layer_order"
        order = [origin.get(number, number) for number in theirs]
        text = f"the layers of the {stack} are A's in the order {_order(order)}"
    else:
        cause = "layers_missing"
        lacking = f"lacks A's layer{'s' if len(missing) > 1 else ''} {_order(missing)}"
        again = [f"layer {number} is A's {origin[number]}" for number in wrong if number in origin]
        text = (
            f"the {stack} has {len(theirs)} layers where A has {len(ours)}"
            + (f", {lacking}" if missing else "")
            + (f"; {listed(again)}" if again else "")
        )
    affected = frozenset(
        name
        for name in a.shapes
        if (match := LAYER.match(name))
        and match["stack"] == stack
        and int(match["number"]) in {*wrong, *missing}
    )
    where = tuple(f"{stack}.layers.{number}" for number in wrong or missing)
    finding = Finding("weights", cause, f"B: {text}", where)
    return Difference(finding, tensors=affected), moved


def _repeated(stack: str, again: Mapping[int, int], a: Reading) -> Difference:
    """Return the difference of layers of A that repeat others, where B has layers of its own."""
    text = listed([f"layer {new} of A is B's {old}" for new, old in again.items()])
    affected = frozenset(
        name
        for name in a.shapes
        if (match := LAYER.match(name))
        and match["stack"] == stack
        and int(match["number"]) in again
    )
    where = tuple(f"{stack}.layers.{number}" for number in again)
    return Difference(
        Finding("weights", "layers_missing", f"A repeats layers: {text}", where), tensors=affected
    )


def _order(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", …" if len(numbers) > 12 else "")


def _compare_group(group: Group, a: Reading, b: Reading) -> Iterator[_Part]:
    """Yield the parts of a group that differ."""
    ours, theirs = group.parts(a), group.parts(b)
    common = [name for name in ours if name in theirs]
    relations = {name: relate(ours[name], theirs[name]) for name in common}
    differing = {name: each for name, each in relations.items() if each is not None}
    if not differing:
        return
    unclear = [
        name
        for name, each in differing.items()
        if each.kind not in ("rows", "columns") and not _is_plain(each)
    ]
    if len(common) > 1 and unclear:
        mixed = _mixed(group, common, ours, theirs, differing, a)
        if mixed is not None:
            yield from mixed
            return
    for name, relation in differing.items():
        cause, text = _named(name, relation, a)
        yield _Part(name, relation, cause, text, tensor_of(name, a.shapes))


def _is_plain(relation: Relation) -> bool:
    """Return True if a relation to the same part of A explains the difference."""
    return relation.explained and relation.kind not in ("values moved", "close")


def _mixed(
    group: Group,
    common: list[str],
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    differing: Mapping[str, Relation],
    a: Reading,
) -> list[_Part] | None:
    """Return the parts of a group whose rows were taken from one another; None if they were not."""
    shapes = {ours[name].shape[1:] for name in common} | {theirs[name].shape[1:] for name in common}
    if len(shapes) > 1:
        return None
    rows = permutation(
        torch.cat([ours[name] for name in common]), torch.cat([theirs[name] for name in common])
    )
    if rows is None:
        return None
    if group.kind == "attention":
        model = a.spec.model
        named = name_mixed(rows, model) if len(common) == 3 else None
        if named is None and len(common) == 2:
            offset = model.attention_size
            whole = torch.cat([torch.arange(offset), rows + offset])
            named = name_mixed(whole, model)
        cause, text = named or ("qkv_order", "rows of q, k and v are exchanged in an unknown order")
    else:
        half = len(rows) // 2
        swapped = torch.equal(rows, torch.arange(len(rows)).roll(half))
        cause, text = (
            ("gate_up_swapped", "gate and up are exchanged")
            if swapped
            else (
                "gate_up_order",
                "rows of gate and up are interleaved, as by tensor-parallel "
                "ranks whose parts were merged without separating them",
            )
        )
    return [
        _Part(name, relation, cause, text, tensor_of(name, a.shapes))
        for name, relation in differing.items()
    ]


def _named(name: str, relation: Relation, a: Reading) -> tuple[str, str]:
    """Return the cause and the description of a part's relation to the same part of A."""
    kind, details = relation.kind, relation.details
    norm, bias = "norm" in name, name.endswith(".bias")
    vocabulary = "word_embeddings" in name or "output_layer" in name or name == "lm_head.bias"
    position = "position_embeddings" in name
    if kind in ("rows", "columns"):
        return name_order(name, details["rows"], a.spec.model, columns=kind == "columns")
    if kind in ("rounded", "close"):
        return "precision", relation.text
    if kind in ("transposed", "reshaped"):
        return "transposed", relation.text
    if kind == "scaled":
        attention = ".query." in name or ".key." in name
        cause = "attention_scale" if attention else ("embedding_scale" if vocabulary else "scaled")
        return cause, relation.text
    if kind == "shifted":
        unit = norm and not bias and abs(abs(details["offset"]) - 1) < 1e-4
        return ("norm_offset" if unit else "shifted"), relation.text
    if kind == "constant":
        value = details["value"]
        if norm and not bias and value in (0.0, 1.0):
            return "norm_reset", relation.text
        return ("missing_bias" if bias and value == 0 else "constant"), relation.text
    if kind == "row shift":
        cause = (
            "vocabulary_shift" if vocabulary else ("position_offset" if position else "shard_order")
        )
        return cause, relation.text
    if kind == "rows at the end":
        cause = "vocabulary_padding" if vocabulary else ("position_table" if position else "shape")
        return cause, relation.text
    if kind in ("rows scaled", "columns scaled"):
        return _named_factors(name, relation, a)
    if kind == "rows differ" and vocabulary:
        return "vocabulary_rows", relation.text
    if kind == "rows differ" and details["zero"]:
        return "missing_values", relation.text
    if kind in ("not finite", "shape"):
        return kind.replace(" ", "_"), relation.text
    if kind == "values moved":
        return "order", relation.text
    text = relation.text
    if kind == "values":
        text += f" ({similarity(details['cosine'])}, relative difference {details['relative']:.2g})"
    return UNEXPLAINED, text


def _named_factors(name: str, relation: Relation, a: Reading) -> tuple[str, str]:
    """Name the norm whose weight was multiplied into a linear layer, if there is one."""
    factors = relation.details["factors"]
    match = LAYER.match(name)
    prefix = f"{match['stack']}.layers.{match['number']}." if match else ""
    for norm in a.shapes:
        inside = norm.startswith(prefix) if prefix else ".layers." not in norm
        if not (inside and "norm" in norm and norm.endswith(".weight")):
            continue
        weight = a.tensors[norm]
        for each, verb in ((factors, "multiplied by"), (1 / factors, "divided by")):
            if weight.shape == each.shape and torch.allclose(weight, each, rtol=1e-4, atol=1e-6):
                unit = relation.kind.removesuffix("s scaled")
                return "folded_norm", f"has each {unit} {verb} the weight of A's {norm}"
    return "scaled", relation.text


def _cross_matched(
    parts: list[_Part], readings: tuple[Reading, Reading], surveys: tuple[_Survey, _Survey]
) -> list[_Part]:
    """Name the parts whose values are those of another tensor of the other side."""
    result = []
    for part in parts:
        if part.cause in (UNEXPLAINED, "shape", "vocabulary_rows", "order"):
            for this, other, text in ((1, 0, "is A's {}"), (0, 1, "has there what A has as {}")):
                origin = _origin(part, readings[this], surveys[other])
                if origin is not None:
                    cause = _swap_cause(part.name, origin)
                    part = replace(part, cause=cause, text=text.format(origin))
                    break
        result.append(part)
    return result


def _origin(part: _Part, reading: Reading, other: _Survey) -> str | None:
    """Return the only other part of `other` with the values that the part has in `reading`."""
    values = Group((part.tensor,), "single").parts(reading).get(part.name)
    if values is None or bool((values == values.reshape(-1)[0]).all()):
        return None
    target = fingerprint(values)
    names = [name for name, value in other.prints.items() if value == target]
    return names[0] if len(names) == 1 and names[0] != part.name else None


def _swap_cause(name: str, origin: str) -> str:
    pair = {each.rpartition(".")[0].rpartition(".")[2] for each in (name, origin)}
    if pair <= {"dense_h_to_4h", "dense_h_to_4h_gate"}:
        return "gate_up_swapped"
    if pair <= {"query", "key", "value"}:
        return "qkv_order"
    if pair <= {"word_embeddings", "output_layer"}:
        return "tied_embeddings"
    match, other = LAYER.match(name), LAYER.match(origin)
    if match and other and match["local"] == other["local"]:
        return "layer_order"
    return "norms_swapped" if all("norm" in each for each in (name, origin)) else "tensors_swapped"


def _summarized(parts: list[_Part]) -> list[Difference]:
    """Return one difference for each cause and description, with all tensors that it affects."""
    grouped: dict[tuple[str, str, str], list[_Part]] = {}
    for part in parts:
        match = LAYER.match(part.name)
        local = match["local"] if match else part.name
        shape = local if part.cause == UNEXPLAINED else re.sub(r"[-\d.,e+]+", "#", part.text)
        grouped.setdefault((part.cause, part.relation.kind, shape), []).append(part)
    return [_summary(cause, members) for (cause, _, _), members in grouped.items()]


def _summary(cause: str, parts: list[_Part]) -> Difference:
    names = tuple(part.name for part in parts)
    locals_ = list(
        dict.fromkeys(match["local"] if (match := LAYER.match(name)) else name for name in names)
    )
    layers = {match["number"] for name in names if (match := LAYER.match(name))}
    places = f" in {len(layers)} layers" if len(layers) > 1 else ""
    named = listed(locals_) if len(layers) > 1 else listed(list(names))
    worst = max(parts, key=lambda part: part.relation.details.get("max_abs", 0.0))
    numbers = {
        key: float(value)
        for key, value in worst.relation.details.items()
        if key in ("max_abs", "relative", "cosine", "factor", "offset")
    }
    verb = worst.text.split()[0] in ("is", "has", "lacks", "differs")
    others = len({part.text for part in parts}) > 1
    of = f" in {worst.name}, with other numbers in the others" if others else ""
    sentence = f"{named}{places}: {'B' if verb else 'in B,'} {worst.text}{of}"
    finding = Finding("weights", cause, sentence, names, numbers=numbers)
    return Difference(finding, tensors=frozenset(part.tensor for part in parts))
