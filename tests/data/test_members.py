"""Tests of directories that contain token files or refer to others."""

from pathlib import Path

import pytest

from megacore.errors import DataFormatError
from megacore.token_files.indexed_dataset import MEMBERS_NAME, token_prefixes, write_members
from tests.data._files import write_tokens


def test_a_directory_refers_to_the_token_files_in_it(tmp_path: Path) -> None:
    prefix = write_tokens(tmp_path / "tokens_text_sentence", [3])
    assert token_prefixes(tmp_path) == (prefix,)


def test_members_keep_their_order_and_are_found_after_a_move(tmp_path: Path) -> None:
    workspace = tmp_path / "before"
    for name in ("b", "a", "both"):
        (workspace / name).mkdir(parents=True)
    for name in ("b", "a"):
        write_tokens(workspace / name / "tokens_text_document", [3])
    write_members(workspace / "both", [workspace / "b", workspace / "a"])
    moved = workspace.rename(tmp_path / "after")
    expected = tuple(str(moved / name / "tokens_text_document") for name in ("b", "a"))
    assert token_prefixes(moved / "both") == expected


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"members": 3}', '{"members": []}', '{"members": "ab"}'],
)
def test_a_damaged_members_json_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / MEMBERS_NAME).write_text(content)
    with pytest.raises(DataFormatError, match=r"members.json is damaged"):
        token_prefixes(tmp_path)


def test_a_directory_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataFormatError, match=r"neither token files nor members\.json"):
        token_prefixes(tmp_path)


@pytest.mark.parametrize("member", [".", "../elsewhere"])
def test_a_member_without_tokens_is_refused(tmp_path: Path, member: str) -> None:
    """The directory that lists it is one, too: members do not have members."""
    blend = tmp_path / "blend"
    blend.mkdir()
    write_members(blend, [blend / member])
    message = (
        rf"blend/members\.json names \S*/{Path(member).name or 'blend'}, which has no token files"
    )
    with pytest.raises(DataFormatError, match=message):
        token_prefixes(blend)
