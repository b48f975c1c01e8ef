"""Relations between two tensors: rounding, scale, offset, transposition, permutation.

Each function takes tensors with the same numbers in another arrangement, and returns the
arrangement. Equal rows are found by a hash of their bits, so that a permutation of any size costs
one pass. Values must be fp32.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_PRIMES = (2654435761, 40503, 1000003)
_BLOCK = 1 << 22
"""Values that are hashed at a time."""
_SCALE_TOLERANCE = 2e-6
"""Largest relative error of a product in fp32 that still counts as the same factor."""
_ROUNDED = 2**-8 * 1.05
"""Largest relative error of two values that were rounded from one to bfloat16 or float16."""
_SAME_DIRECTION = 0.9999
_UNRELATED = 0.2
_FEW_RUNS = 64
"""Most contiguous pieces of a permutation that is described as an order of blocks."""


@dataclass(frozen=True)
class Relation:
    """Arrangement that makes two tensors equal, or the size of their difference."""

    kind: str
    """Name of the arrangement, such as "scaled", "transposed", "rows" or "values"."""
    text: str
    """Clause that describes B in terms of A."""
    details: Mapping[str, Any]
    """Numbers of the arrangement: factor, offset, permutation."""

    @property
    def explained(self) -> bool:
        """True if the arrangement makes the tensors equal."""
        return self.kind not in ("values", "rows differ", "not finite", "shape")


def _relation(kind: str, text: str, **details: Any) -> Relation:
    return Relation(kind, text, details)


def relate(a: Tensor, b: Tensor) -> Relation | None:
    """Return the relation of two tensors; None if they are equal."""
    if a.shape == b.shape and torch.equal(a, b):
        return None
    infinite = [int((~torch.isfinite(each)).sum()) for each in (a, b)]
    if any(infinite):
        same = a.shape == b.shape and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        text = f"has {infinite[1]:,} values that are no numbers (NaN, infinity), A {infinite[0]:,}"
        return None if same else _relation("not finite", text)
    if a.shape != b.shape:
        return _reshaped(a, b)
    searches: Iterable[Callable[[Tensor, Tensor], Relation | None]] = (
        _constant,
        _rounded,
        _scaled,
        _shifted,
        _transposed,
        _rearranged,
        _partly_equal,
        _scaled_along_an_axis,
    )
    for search in searches:
        result = search(a, b)
        if result is not None:
            return result
    return _relation("values", "has other values", **difference(a, b))


def difference(a: Tensor, b: Tensor) -> dict[str, float]:
    """Return the largest absolute and the relative difference, and the cosine of two tensors."""
    x, y = a.double().flatten(), b.double().flatten()
    lengths = float(x.norm()) * float(y.norm())
    return {
        "max_abs": float((x - y).abs().max()) if x.numel() else 0.0,
        "relative": float((x - y).norm()) / max(float(x.norm()), 1e-30),
        "cosine": float(x @ y) / lengths if lengths else 0.0,
    }


def row_hashes(tensor: Tensor) -> Tensor:
    """Return a hash [rows] of the bits of each row; -0.0 counts as 0.0."""
    rows = tensor.reshape(len(tensor), -1) if tensor.dim() else tensor.reshape(1, 1)
    width = rows.shape[1]
    generator = torch.Generator().manual_seed(width)
    factors = torch.randint(-(2**62), 2**62, (width,), generator=generator) | 1
    blocks = []
    for block in torch.split(rows, max(1, _BLOCK // max(width, 1))):
        bits = (block + 0.0).contiguous().view(torch.int32).long()
        mixed = (bits * _PRIMES[0]) ^ (bits >> 5)
        blocks.append((mixed * factors).sum(1))
    return torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.int64)


def fingerprint(tensor: Tensor) -> tuple[int, int, int]:
    """Return the number of values, and two sums that do not depend on their order."""
    first = second = 0
    for block in torch.split(tensor.reshape(-1), _BLOCK):
        bits = (block + 0.0).contiguous().view(torch.int32).long()
        mixed = (bits * _PRIMES[0]) ^ (bits >> 7)
        first += int(mixed.sum())
        second += int((mixed * mixed * _PRIMES[2] + mixed * _PRIMES[1]).sum())
    mask = 2**64 - 1
    return tensor.numel(), first & mask, second & mask


def matching_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return for each row of `b` the index of the equal row of `a`, or -1, as int64 [rows of b].

    Rows with several equals are given the next one in order, and their own place first.
    """
    ours, theirs = row_hashes(a).tolist(), row_hashes(b).tolist()
    places: dict[int, list[int]] = {}
    for index, value in enumerate(ours):
        places.setdefault(value, []).append(index)
    used: set[int] = set()
    result = [-1] * len(theirs)
    for index, value in enumerate(theirs):
        if index < len(ours) and ours[index] == value:
            result[index] = index
            used.add(index)
    for index, value in enumerate(theirs):
        if result[index] >= 0:
            continue
        for place in places.get(value, ()):
            if place not in used:
                result[index] = place
                used.add(place)
                break
        else:
            result[index] = places[value][0] if value in places else -1
    return torch.tensor(result, dtype=torch.int64)


def permutation(a: Tensor, b: Tensor) -> Tensor | None:
    """Return p with b = a[p]; None if the rows of `b` are not those of `a`."""
    if a.shape != b.shape:
        return None
    rows = matching_rows(a, b)
    whole = bool((rows >= 0).all()) and len(set(rows.tolist())) == len(rows)
    return rows if whole and torch.equal(a[rows], b) else None


def describe_permutation(rows: Tensor) -> str:
    """Describe a permutation p with b = a[p] in words."""
    count = len(rows)
    steps = torch.nonzero(rows[1:] != rows[:-1] + 1).flatten() + 1
    starts = [0, *steps.tolist()]
    if torch.equal(rows, torch.arange(count - 1, -1, -1)):
        return "in reverse order"
    if len(starts) == 2:
        shift = starts[1]
        return f"shifted by {shift} (the first {shift:,} are A's last)"
    lengths = {end - start for start, end in zip(starts, [*starts[1:], count], strict=True)}
    if len(starts) <= _FEW_RUNS and len(lengths) == 1 and lengths != {1}:
        [length] = lengths
        order = [int(rows[start]) // length for start in starts]
        shown = ", ".join(map(str, order[:8])) + (", …" if len(order) > 8 else "")
        return f"in another order of {len(starts)} blocks of {length:,} ({shown})"
    if (stride := _stride(rows)) is not None:
        return f"interleaved: {count // stride} blocks of {stride} are read across"
    if len(starts) <= _FEW_RUNS and 1 not in lengths:
        return f"in another order of {len(starts)} blocks"
    moved = int((rows != torch.arange(count)).sum())
    return f"in another order ({moved:,} of {count:,} moved)"


def _stride(rows: Tensor) -> int | None:
    """Return s if the permutation reads a matrix [n / s, s] by columns, else None."""
    count = len(rows)
    second = int(rows[1]) if count > 1 and int(rows[0]) == 0 else 0
    if second < 2 or count % second or second == count:
        return None
    same = torch.equal(rows, torch.arange(count).reshape(-1, second).t().reshape(-1))
    return second if same else None


def _reshaped(a: Tensor, b: Tensor) -> Relation:
    shapes = f"{tuple(b.shape)} instead of {tuple(a.shape)}"
    if a.dim() == 2 and b.shape == a.t().shape and torch.equal(a.t(), b):
        return _relation("transposed", f"is transposed: {shapes}")
    if a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1)):
        return _relation("reshaped", f"has the same values in another shape: {shapes}")
    if a.shape[1:] == b.shape[1:] and len(a) != len(b):
        common = min(len(a), len(b))
        if torch.equal(a[:common], b[:common]):
            more = "lacks the last" if len(b) < len(a) else "has"
            rest = "" if len(b) < len(a) else " more at the end"
            text = f"{more} {abs(len(a) - len(b)):,} rows{rest} ({len(b):,} instead of {len(a):,})"
            return _relation("rows at the end", text, rows=len(b) - len(a))
        shift = _row_shift(a, b)
        if shift is not None:
            text = f"has its rows shifted by {shift} ({len(b):,} rows instead of {len(a):,})"
            return _relation("row shift", text, shift=shift)
    return _relation("shape", f"has shape {shapes}")


def _constant(a: Tensor, b: Tensor) -> Relation | None:
    if a.numel() < 2:
        return None
    for tensor, text in ((b, "is {} everywhere"), (a, "has values where A is {} everywhere")):
        value = float(tensor.reshape(-1)[0])
        if bool((tensor == value).all()):
            return _relation("constant", text.format(f"{value + 0.0:g}"), value=value)
    return None


def _rounded(a: Tensor, b: Tensor) -> Relation | None:
    """Recognize values of one side that were rounded, or of both sides that differ by rounding."""
    for name, dtype in HALF_TYPES.items():
        if torch.equal(a.to(dtype).float(), b):
            return _relation("rounded", f"is rounded to {name}", dtype=name)
        if torch.equal(b.to(dtype).float(), a):
            return _relation("rounded", f"is exact where A is rounded to {name}", dtype=name)
    gap = (a - b).abs()
    limit = torch.maximum(a.abs(), b.abs()) * _ROUNDED + 1e-7
    if bool((gap <= limit).all()):
        numbers = difference(a, b)
        return _relation(
            "close",
            f"differs by rounding (relative difference {numbers['relative']:.1e})",
            **numbers,
        )
    return None


def _scaled(a: Tensor, b: Tensor) -> Relation | None:
    factor = _factor(a, b)
    if factor is None:
        return None
    return _relation("scaled", f"is {_number(factor)} times A's", factor=factor)


def _factor(a: Tensor, b: Tensor) -> float | None:
    """Return c with b = c a; None if there is none."""
    x, y = a.double().flatten(), b.double().flatten()
    square = float(x @ x)
    if square == 0.0 or a.numel() < 2:
        return None
    factor = float(x @ y) / square
    error = float((y - factor * x).norm())
    same = factor != 0.0 and error <= _SCALE_TOLERANCE * float(y.norm())
    return factor if same and abs(factor - 1) > _SCALE_TOLERANCE else None


def _shifted(a: Tensor, b: Tensor) -> Relation | None:
    x, y = a.double(), b.double()
    gap = y - x
    offset = float(gap.mean())
    scale = float(y.abs().max()) + abs(offset)
    if a.numel() < 2 or float((gap - offset).abs().max()) > 1e-6 * max(scale, 1e-6):
        return None
    return _relation(
        "shifted", f"is A's {'+' if offset > 0 else '-'} {abs(offset):g}", offset=round(offset, 6)
    )


def _transposed(a: Tensor, b: Tensor) -> Relation | None:
    if a.dim() != 2:
        return None
    if a.shape == a.t().shape and torch.equal(a.t(), b):
        return _relation("transposed", "is transposed")
    if torch.equal(a.t().reshape(a.shape), b):
        return _relation("reshaped", "is transposed and then read in the old shape")
    if torch.equal(a.reshape(a.t().shape).t(), b):
        return _relation("reshaped", "is read in the transposed shape without being transposed")
    return None


def _rearranged(a: Tensor, b: Tensor) -> Relation | None:
    """Recognize permuted rows or columns, or the same values in an unknown order."""
    if fingerprint(a) == fingerprint(b):
        rows = permutation(a, b) if a.dim() else None
        if rows is not None:
            unit = "values" if a.dim() == 1 else "rows"
            return _relation("rows", f"has its {unit} {describe_permutation(rows)}", rows=rows)
        if a.dim() == 2:
            columns = permutation(a.t().contiguous(), b.t().contiguous())
            if columns is not None:
                text = f"has its columns {describe_permutation(columns)}"
                return _relation("columns", text, rows=columns)
            both = permutation(a.sort(1).values, b.sort(1).values)
            if both is not None:
                return _relation("values moved", "has its rows and columns in another order")
        return _relation("values moved", "has the same values in another order")
    if a.dim() == 2 and (shift := _row_shift(a, b)) is not None:
        return _relation("row shift", f"has its rows shifted by {shift}", shift=shift)
    return None


def _row_shift(a: Tensor, b: Tensor) -> int | None:
    """Return s if b[i] = a[i - s] for most rows, else None."""
    rows = matching_rows(a, b)
    found = rows >= 0
    if int(found.sum()) < max(2, len(b) // 2):
        return None
    shifts = (torch.arange(len(b)) - rows)[found]
    shift = int(shifts.mode().values)
    return shift if shift and float((shifts == shift).float().mean()) > 0.8 else None


def _scaled_along_an_axis(a: Tensor, b: Tensor) -> Relation | None:
    if a.dim() != 2 or min(a.shape) < 2:
        return None
    for axis, name in ((1, "row"), (0, "column")):
        x, y = a.double(), b.double()
        factors = (x * y).sum(axis) / (x * x).sum(axis).clamp(min=1e-30)
        error = (y - x * factors.unsqueeze(axis)).norm()
        if float(error) <= 1e-5 * float(y.norm()):
            text = f"has each {name} multiplied by a factor of its own"
            return _relation(f"{name}s scaled", text, factors=factors.float())
    return None


def _partly_equal(a: Tensor, b: Tensor) -> Relation | None:
    """Recognize tensors that differ in some rows, values or columns only."""
    for axis, unit in enumerate(("values",) if a.dim() == 1 else ("rows", "columns")):
        count = a.shape[axis] if a.dim() in (1, 2) else 0
        if count < 4:
            continue
        same = a == b
        same = same.all(1 - axis) if a.dim() == 2 else same
        if not count // 4 <= int(same.sum()) < count:
            continue
        places = torch.nonzero(~same).flatten()
        first, last = int(places[0]), int(places[-1])
        zero_a, zero = (bool((each.index_select(axis, places) == 0).all()) for each in (a, b))
        place = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        kind = "zeros" if zero else "values where A has zeros" if zero_a else "other values"
        text = f"has {kind} in {len(places):,} of {count:,} {unit} ({place})"
        details = {"first": first, "last": last, "zero": zero or zero_a, **difference(a, b)}
        return Relation("rows differ", text, details)
    return None


def _number(factor: float) -> str:
    """Return a factor with the root that it is close to, as in 0.125 (1/√64)."""
    square = factor * factor
    for value, form in ((square, "√{}"), (1 / square if square else 0.0, "1/√{}")):
        whole = round(value)
        if whole > 1 and math.isclose(value, whole, rel_tol=1e-4):
            return f"{'-' if factor < 0 else ''}{form.format(whole)} ({factor:.6g})"
    return f"{factor:.6g}"


def similarity(cosine: float) -> str:
    """Describe the cosine of two tensors in words."""
    if cosine > _SAME_DIRECTION:
        return "nearly the same direction"
    return "unrelated" if abs(cosine) < _UNRELATED else f"cosine {cosine:.4f}"
