"""Messages over a pipe: messages in pieces, and lines that are no message."""

import os
from collections.abc import Iterator

import pytest

from megacore.cluster.hosts import channel as channel_module
from megacore.cluster.hosts.channel import Channel


@pytest.fixture
def pipe() -> Iterator[tuple[Channel, int]]:
    """Provide a channel and the descriptor that the other side writes to."""
    reader, writer = os.pipe()
    sink = os.open(os.devnull, os.O_WRONLY)
    yield Channel(reader, sink), writer
    for descriptor in (reader, writer, sink):
        os.close(descriptor)


def test_message_in_pieces_between_lines_of_text_is_received(pipe: tuple[Channel, int]) -> None:
    channel, writer = pipe
    os.write(writer, b'Welcome!\r\n\x1e{"kind": "e')
    assert list(channel.receive()) == ["Welcome!"]
    os.write(writer, b'nd", "code": 3}\n')
    assert list(channel.receive()) == [{"kind": "end", "code": 3}]


@pytest.mark.parametrize("line", [b"\x1e{", b"\x1e[1]", b"\x1e{}", b"\x1e" + b"[" * 20000, b"\xff"])
def test_invalid_message_is_received_as_text(line: bytes, pipe: tuple[Channel, int]) -> None:
    channel, writer = pipe
    os.write(writer, line + b"\n")
    assert list(channel.receive()) == [line.decode(errors="replace")]


def test_length_of_a_line_without_an_end_is_limited(
    pipe: tuple[Channel, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_module, "LONGEST", 1000)
    channel, writer = pipe
    os.write(writer, b"x" * 900)
    assert list(channel.receive()) == []
    os.write(writer, b"x" * 900)
    assert list(channel.receive()) == ["x" * 1800]
    os.write(writer, b"y\n")
    assert list(channel.receive()) == ["y"]
