"""Fuzz tests of readers: damaged files are refused without crash, hang or large allocation."""

import io
import json
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megacore.data.gpt_dataset import GPTDataset
from megacore.data.index_directory import MAP_NAMES, map_path, read_description
from megacore.data.index_maps import build_index_maps
from megacore.data.index_options import IndexOptions, Mixture
from megacore.errors import DataFormatError
from megacore.inspect.provenance import Origins
from megacore.token_files.indexed_dataset import DTYPES, IndexedDataset
from megacore.token_files.indexed_dataset_writer import IndexedDatasetWriter
from tests.data._corpus import entry, write_documents
from tests.data._files import write_tokens

SEQ_LENGTH = 3
HUGE = [2**31, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
fuzz = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@contextmanager
def bounded_memory(file_bytes: int) -> Iterator[None]:
    """Check that the allocations of NumPy and Python inside are bounded by the size of the file."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 * file_bytes + (1 << 20)
    finally:
        tracemalloc.stop()


def check_message(error: DataFormatError) -> bool:
    """Check that the message is one line with advice, and return False."""
    assert "\n" not in str(error)
    assert ": " in str(error)
    return False


def open_and_check(prefix: Path) -> bool:
    """Return True if the reader accepts the files, after a check of its content against them."""
    index = Path(f"{prefix}.idx").read_bytes()
    with bounded_memory(len(index)):
        try:
            dataset = IndexedDataset(prefix)
        except DataFormatError as error:
            return check_message(error)
    code, sequences, entries = struct.unpack_from("<BQQ", index, 17)
    lengths = struct.unpack_from(f"<{sequences}i", index, 34)
    starts = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    tokens = np.frombuffer(Path(f"{prefix}.bin").read_bytes(), DTYPES[code])
    assert (len(dataset), dataset.documents, dataset.dtype) == (
        sequences,
        entries - 1,
        DTYPES[code],
    )
    assert sum(lengths) == len(tokens)
    for number, (start, stop) in enumerate(pairwise(np.cumsum([0, *lengths]))):
        np.testing.assert_array_equal(dataset[number], tokens[start:stop])
    assert all(0 <= first <= last <= sequences for first, last in pairwise(starts))
    return True


def valid_index(code: int, documents: list[int]) -> tuple[bytes, bytes]:
    """Return the contents of the .bin and .idx files of documents of these lengths."""
    dtype, lengths = DTYPES[code], [length for length in documents if length]
    tokens = np.arange(sum(documents)).astype(dtype).tobytes()
    ends = np.cumsum(lengths) * dtype.itemsize
    starts = np.cumsum([0, *(length > 0 for length in documents)])
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(starts))
    index += (
        np.array(lengths, "<i4").tobytes()
        + (ends - np.array(lengths) * dtype.itemsize).astype("<i8").tobytes()
    )
    return tokens, index + starts.astype("<i8").tobytes()


def write(directory: Path, tokens: bytes, index: bytes) -> Path:
    (directory / "a.bin").write_bytes(tokens)
    (directory / "a.idx").write_bytes(index)
    return directory / "a"


@fuzz
@given(index=st.binary(max_size=400), tokens=st.binary(max_size=40), header=st.booleans())
def test_random_bytes_are_refused_or_read_consistently(
    tmp_path: Path, index: bytes, tokens: bytes, header: bool
) -> None:
    prefix = write(
        tmp_path, tokens, (b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) if header else b"") + index
    )
    open_and_check(prefix)


@fuzz
@given(
    data=st.data(),
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
    documents=st.lists(st.integers(0, 9), max_size=6),
)
def test_mutations_of_an_idx_file_are_refused_or_read_consistently(
    tmp_path: Path, data: st.DataObject, code: int, documents: list[int]
) -> None:
    tokens, valid = valid_index(code, documents)
    assert open_and_check(write(tmp_path, tokens, valid))
    index = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3), "mutations")):
        place = data.draw(st.integers(0, max(0, len(index) - 1)), "place")
        match data.draw(st.sampled_from(["flip", "set", "cut", "extend", "insert"]), "what"):
            case "flip" if index:
                index[place] ^= 1 << data.draw(st.integers(0, 7))
            case "set":
                index[place : place + 8] = struct.pack(
                    "<Q", data.draw(st.sampled_from([0, 1, *HUGE]))
                )
            case "cut":
                del index[place:]
            case "extend":
                index += data.draw(st.binary(min_size=1, max_size=24))
            case "insert":
                index[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    open_and_check(write(tmp_path, tokens, bytes(index)))


@fuzz
@given(
    change=st.integers(-20, 20).filter(bool),
    documents=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_a_bin_file_of_another_size_is_refused(
    tmp_path: Path, change: int, documents: list[int]
) -> None:
    tokens, index = valid_index(8, documents)
    tokens = tokens[: max(0, len(tokens) + change)] if change < 0 else tokens + bytes(change)
    assert not open_and_check(write(tmp_path, tokens, index))


@pytest.mark.parametrize("sequences", [*HUGE, 3, 0])
@pytest.mark.parametrize("entries", [*HUGE, 3, 0])
def test_counts_that_do_not_fit_into_the_file_are_refused(
    tmp_path: Path, sequences: int, entries: int
) -> None:
    tokens, index = valid_index(8, [4, 4])
    changed = index[:18] + struct.pack("<QQ", sequences, entries) + index[34:]
    assert not open_and_check(write(tmp_path, tokens, changed))


@fuzz
@given(overflow=st.integers(1, 11), entries=st.integers(0, 40))
@example(overflow=4, entries=0)
def test_counts_with_a_size_that_overflows_64_bits_are_refused(
    tmp_path: Path, overflow: int, entries: int
) -> None:
    # 12 S + 8 D modulo 2^64 is the size of the file: arithmetic in 64 bits would accept it.
    body = bytes(400)
    sequences = (overflow * 2**64 + len(body) - 8 * entries) // 12
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, sequences % 2**64, entries)
    assert not open_and_check(write(tmp_path, b"", header + body))


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("place", [34, 38])
def test_impossible_lengths_are_refused(tmp_path: Path, value: int, place: int) -> None:
    tokens, index = valid_index(8, [4, 4])
    assert not open_and_check(
        write(tmp_path, tokens, index[:place] + struct.pack("<i", value) + index[place + 4 :])
    )


@pytest.mark.parametrize("value", [-1, -8, 2, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", [42, 50, 58, 66, 74])
def test_pointers_and_document_entries_out_of_range_are_refused(
    tmp_path: Path, value: int, place: int
) -> None:
    tokens, index = valid_index(8, [4, 4])
    if place == 74 and value == 2:
        assert open_and_check(write(tmp_path, tokens, index))
        return
    changed = index[:place] + struct.pack("<q", value) + index[place + 8 :]
    # Document 1 may begin anywhere between 0 and 2: the other fields do not determine it.
    assert open_and_check(write(tmp_path, tokens, changed)) == (place == 66 and value == 2)


@pytest.mark.parametrize("kind", ["directory", "fifo", "loop"])
@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_directories_pipes_and_loops_are_refused(tmp_path: Path, kind: str, suffix: str) -> None:
    import os

    prefix = write(tmp_path, *valid_index(8, [4]))
    path = Path(f"{prefix}.{suffix}")
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case _:
            path.symlink_to(path)
    with pytest.raises(DataFormatError):
        IndexedDataset(prefix)


def test_token_files_of_megatron_deepspeed_are_refused_with_the_reason(tmp_path: Path) -> None:
    # Its --append-eod writes a token after each document that the index does not count.
    with IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        for length in (3, 0, 5):
            writer.add_document(range(length))
    with open(tmp_path / "a.bin", "ab") as file:
        file.write(bytes(4))
    with pytest.raises(
        DataFormatError, match=r"one token more per document .*Megatron-DeepSpeed's .* --append-eod"
    ):
        IndexedDataset(tmp_path / "a")


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with tokens `a` and their maps, for tests that restore every file."""
    directory = tmp_path_factory.mktemp("maps")
    prefix = write_tokens(directory / "a", [5, 1, 9])
    options = IndexOptions(split="1", seq_length=SEQ_LENGTH, seed=5)
    build_index_maps(Mixture.single(prefix), directory, options, (None, 0, 0))
    return directory


def open_maps(directory: Path) -> GPTDataset | None:
    """Open the data set and read every sample; return None if it was refused."""
    size = sum(path.stat().st_size for path in directory.iterdir())
    try:
        with bounded_memory(size):
            dataset = GPTDataset(directory / "a", directory, "train", SEQ_LENGTH)
            dataset.gather(range(len(dataset)))
    except DataFormatError as error:
        check_message(error)
        return None
    return dataset


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def npy(header: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    """Return a .npy file with this header."""
    encoded = header.encode() + b"\n"
    return (
        b"\x93NUMPY"
        + version
        + struct.pack("<H" if version == b"\x01\x00" else "<I", len(encoded))
        + encoded
        + body
    )


@fuzz
@given(name=st.sampled_from(MAP_NAMES), content=st.binary(max_size=300), magic=st.booleans())
def test_random_maps_are_refused(maps: Path, name: str, content: bytes, magic: bool) -> None:
    with replaced(map_path(maps, "train", name), (b"\x93NUMPY" if magic else b"") + content):
        assert open_maps(maps) is None


@fuzz
@given(data=st.data(), name=st.sampled_from(MAP_NAMES))
def test_mutations_of_maps_are_refused_or_read(maps: Path, data: st.DataObject, name: str) -> None:
    content = bytearray(map_path(maps, "train", name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    with replaced(map_path(maps, "train", name), bytes(content)):
        open_maps(maps)


def invalid_maps() -> dict[str, bytes]:
    """Return invalid map files by their fault."""
    good = "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }"
    pickled, archive = io.BytesIO(), io.BytesIO()
    np.save(pickled, np.array([1, "a"], object), allow_pickle=True)
    np.savez(archive, a=np.arange(3))
    cases = {
        "pickle": pickled.getvalue(),
        "bare pickle": b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00K\x01.",
        "archive": archive.getvalue(),
        "broken archive": archive.getvalue()[:60],
        "unknown version": npy(good, bytes(12), b"\x09\x00"),
        "other version": npy(good, bytes(12), b"\x03\x00"),
        "no newline": npy(good.replace("}", "")),
        "no dictionary": npy("3"),
        "code": npy("__import__('os')"),
        "deep": npy("(" * 3000 + ")" * 3000),
        "unclosed": npy("{'descr': '<i4', 'fortran_order': False, 'shape': (3L,"),
        "bytes": npy("{'descr': b'', 'fortran_order': False, 'shape': (3,), }"),
        "structure": npy(
            "{'descr': [('a', '<i4'), ('a', '<i4')], 'fortran_order': False, 'shape': (1,), }",
            bytes(8),
        ),
        "too long": npy(good + " " * 20000, bytes(12)),
    }
    for shape in (
        "(2**63,)",
        "(9223372036854775807,)",
        "(18446744073709551616,)",
        "(-3,)",
        "(3, -1)",
        "(4611686018427387907,)",
        "(4611686018427387904, 4)",
        "(3.0,)",
    ):
        cases[f"shape {shape}"] = npy(good.replace("(3,)", shape), bytes(12))
    for dtype in ("|O", "<f4", ">i4", "<M8[s]", "<U4", "<i3", "V4", "|b1", "<i8,<i4"):
        cases[f"type {dtype}"] = npy(good.replace("<i4", dtype), bytes(48))
    for shape in ("(3, 2)", "(2, 3)", "(0, 2)", "()", "(1, 1, 1)"):
        cases[f"Fortran {shape}"] = npy(
            good.replace("False", "True").replace("(3,)", shape), bytes(24)
        )
    return cases


@pytest.mark.parametrize("name", MAP_NAMES)
@pytest.mark.parametrize("case", invalid_maps())
def test_map_files_with_invalid_headers_are_refused(maps: Path, name: str, case: str) -> None:
    with replaced(map_path(maps, "train", name), invalid_maps()[case]):
        assert open_maps(maps) is None


def test_valid_maps_are_accepted(maps: Path) -> None:
    dataset = open_maps(maps)
    assert dataset is not None
    assert len(dataset) == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: (
        st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3)
    ),
    max_leaves=6,
)


def replace_somewhere(data: st.DataObject, value: Any) -> Any:
    """Return `value` with a random part of it replaced or removed."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else list(range(len(value)))
        if isinstance(value, list)
        else []
    )
    if not keys or data.draw(st.integers(0, 4)) == 0:
        return data.draw(JSON)
    key = data.draw(st.sampled_from(keys))
    if isinstance(value, dict) and data.draw(st.integers(0, 6)) == 0:
        return {name: other for name, other in value.items() if name != key}
    value[key] = replace_somewhere(data, value[key])
    return value


@fuzz
@given(data=st.data())
def test_mutations_of_index_json_are_refused_or_read(maps: Path, data: st.DataObject) -> None:
    path = maps / "index.json"
    content = replace_somewhere(data, json.loads(path.read_text()))
    with replaced(path, json.dumps(content).encode()):
        try:
            read_description(maps)
        except DataFormatError as error:
            check_message(error)


@fuzz
@given(data=st.data())
def test_mutations_of_documents_json_are_refused_or_read(
    tmp_path: Path, data: st.DataObject
) -> None:
    write_documents(
        tmp_path / "documents.json",
        [entry("a", 2, skipped_lines=[2]), entry("b", 1)],
        shuffle_seed=3,
    )
    content = replace_somewhere(data, json.loads((tmp_path / "documents.json").read_text()))
    (tmp_path / "documents.json").write_text(json.dumps(content))
    try:
        origins = Origins.read(tmp_path / "documents.json")
    except DataFormatError as error:
        check_message(error)
        return
    for document in range(min(origins.documents, 3)):
        origins.place(document)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"format": 1e999}', "\ud800", "\x00", "NaN"])
def test_invalid_json_is_refused_with_the_name_of_the_file(maps: Path, content: str) -> None:
    for name, read in (("index.json", read_description), ("documents.json", read_origins)):
        path = maps / name
        path.touch()
        with (
            replaced(path, content.encode("utf-8", "surrogatepass")),
            pytest.raises(DataFormatError, match=name),
        ):
            read(maps)


def read_origins(directory: Path) -> Origins:
    return Origins.read(directory / "documents.json")
