"""Tests of the directory of index maps and its index.json."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from megacore.data.index_directory import (
    INDEX_NAME,
    IndexMaps,
    load_map,
    map_path,
    member_directory,
    read_description,
    save_maps,
    write_description,
)
from megacore.data.index_options import IndexOptions, Member, Mixture
from megacore.errors import DataFormatError, TransientFileError

OPTIONS = IndexOptions(split=None, seq_length=10, seed=1, packing="unpacked", add_extra_token=False)


def test_description_is_read_back_after_a_move(tmp_path: Path) -> None:
    data, directory = tmp_path / "data", tmp_path / "index"
    directory.mkdir()
    a, b, c = (str(data / name) for name in "abc")
    mixture = Mixture.per_split([Member(a, 1.0), Member(c, 2.5)], [Member(b), Member(c)], [])
    write_description(directory, mixture, OPTIONS, {"train": 7, "valid": 3})
    content = json.loads((directory / INDEX_NAME).read_text())
    assert content["members"][1] == {"prefix": "../data/c", "splits": {"train": 2.5, "valid": None}}
    moved = directory.rename(tmp_path / "moved")
    description = read_description(moved)
    assert description.options == OPTIONS
    assert [member.prefix for member in description.members] == [a, c, b]
    # The validation members are in the order of their blend, not sorted by number.
    assert description.blends == {"train": (0, 1), "valid": (2, 1)}
    assert description.samples == {"train": 7, "valid": 3}
    assert not description.single


def test_description_of_a_single_data_set_is_marked_as_single(tmp_path: Path) -> None:
    write_description(tmp_path, Mixture.single("a"), IndexOptions("8,1,1", 10, 1), {"train": 7})
    assert read_description(tmp_path).single


def test_a_missing_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataFormatError, match=r"index.json does not exist: build the index maps first"
    ):
        read_description(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: "no json",
        lambda content: json.dumps([content]),
        lambda content: json.dumps({**content, "blends": {"train": [5]}}),
        lambda content: json.dumps({**content, "seq_length": 0}),
        lambda content: json.dumps({**content, "members": [{"prefix": "a"}]}),
        lambda content: json.dumps(
            {name: value for name, value in content.items() if name != "samples"}
        ),
    ],
)
def test_a_damaged_description_is_refused(tmp_path: Path, damage: object) -> None:
    write_description(tmp_path, Mixture.single("a"), IndexOptions("8,1,1", 10, 1), {"train": 7})
    path = tmp_path / INDEX_NAME
    path.write_text(damage(json.loads(path.read_text())))  # type: ignore[operator]
    with pytest.raises(
        DataFormatError, match=r"index.json is damaged .*: build the index maps again"
    ):
        read_description(tmp_path)


def test_a_description_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text('{"format": 2}')
    with pytest.raises(DataFormatError, match="has format 2; only 1 is known"):
        read_description(tmp_path)


def test_arrays_are_stored_in_numpys_format(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.int32).reshape(3, 2)
    maps = IndexMaps(np.arange(3, dtype=np.int32), rows, np.arange(0, dtype=np.uint32))
    save_maps(maps, tmp_path, "train")
    np.save(tmp_path / "expected.npy", rows)
    assert (
        map_path(tmp_path, "train", "sample").read_bytes()
        == (tmp_path / "expected.npy").read_bytes()
    )
    for name, values in (("document", maps.document_index), ("shuffle", maps.shuffle_index)):
        loaded = np.load(map_path(tmp_path, "train", name))
        assert loaded.dtype == values.dtype
        np.testing.assert_array_equal(loaded, values)
    assert member_directory(tmp_path, 3) == tmp_path / "member-03"


def test_a_failing_disk_is_no_damage_of_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **values: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))  # without a name, as read() raises it

    monkeypatch.setattr("numpy.load", fail)
    with pytest.raises(TransientFileError, match=f"cannot read or write {tmp_path}/map.npy "):
        load_map(tmp_path / "map.npy")
