"""Pictures of schedules: a box for every pass, visible idle time, and the bubble in the title."""

import resource
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from megacore.errors import ConfigError, WorkspaceError
from megacore.pipeline_parallel.schedules import Timeline, build_schedule, simulate
from megacore.plan.draw import draw, schedule_figure

INTERLEAVED = simulate(build_schedule("1f1b", 4, 8, 2))


def axes_of(timeline: Timeline, name: str = "1F1B") -> Axes:
    (axes,) = schedule_figure(timeline, name).axes
    return axes


def bars(axes: Axes) -> dict[str, list[tuple[float, float, float]]]:
    """Return row, start and end of every bar, by colour."""
    boxes: dict[str, list[tuple[float, float, float]]] = {}
    for collection in axes.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            color = to_hex(collection.get_facecolor()[0])
            boxes.setdefault(color, []).append((round((box.y0 + box.y1) / 2), box.x0, box.x1))
    return boxes


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_suffix_selects_the_file_format(tmp_path: Path, suffix: str) -> None:
    path = draw(INTERLEAVED, tmp_path / f"schedule{suffix}", "Interleaved 1F1B")
    if suffix == ".svg":
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    else:
        assert path.read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize("name", ["schedule.pdf", "schedule", "schedule.svg.gz"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"pictures are written as \.svg or \.png, not as"):
        draw(INTERLEAVED, tmp_path / name, "1F1B")
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"missing/a\.png: No such file .*choose another path"):
        draw(INTERLEAVED, tmp_path / "missing" / "a.png", "1F1B")


def test_a_full_disk_leaves_the_earlier_picture(tmp_path: Path) -> None:
    path = tmp_path / "schedule.svg"
    path.write_text("earlier")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(WorkspaceError, match=r"cannot write .*schedule\.svg: File too large"):
            draw(INTERLEAVED, path, "1F1B")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("schedule.svg", "earlier")
    ]


def test_every_pass_has_a_box_in_the_colour_of_direction_and_chunk() -> None:
    boxes_by_colour = bars(axes_of(INTERLEAVED))
    assert len(boxes_by_colour) == 5  # forward and backward of two chunks, idle
    idle = boxes_by_colour.pop("#f0f0f0")
    assert idle == [(stage, 0.0, INTERLEAVED.makespan) for stage in range(4)]
    drawn = sorted(box for boxes in boxes_by_colour.values() for box in boxes)
    expected = sorted(
        (stage, span.start, span.end) for stage, row in enumerate(INTERLEAVED.spans) for span in row
    )
    assert drawn == expected
    assert {len(boxes) for boxes in boxes_by_colour.values()} == {4 * 8}


def test_boxes_are_labelled_with_their_micro_batch() -> None:
    axes = axes_of(INTERLEAVED)
    labels = sorted(
        (round(text.get_position()[1]), text.get_position()[0], text.get_text())
        for text in axes.texts
    )
    expected = [
        (stage, (span.start + span.end) / 2, str(span.work.micro_batch))
        for stage, row in enumerate(INTERLEAVED.spans)
        for span in row
    ]
    assert labels == sorted(expected)


def test_labels_that_do_not_fit_are_left_out() -> None:
    wide = axes_of(simulate(build_schedule("1f1b", 2, 64), [1.0, 1.0], [40.0, 40.0]))
    assert len(wide.texts) == 2 * 64  # only of the backward passes


def test_title_axis_and_legend_describe_the_schedule() -> None:
    axes = axes_of(INTERLEAVED, "gpt2-tiny, interleaved 1F1B")
    assert axes.get_title(loc="left") == "gpt2-tiny, interleaved 1F1B: pp 4, v 2, m 8: bubble 18.8%"
    assert "(pp − 1) / (m · v) = 18.8%" in axes.get_xlabel()
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "stage 0",
        "stage 1",
        "stage 2",
        "stage 3",
    ]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward, chunk 0",
        "forward, chunk 1",
        "backward, chunk 0",
        "backward, chunk 1",
        "idle",
    ]


def test_the_title_has_the_bubble_of_unequal_chunks() -> None:
    timeline = simulate(build_schedule("gpipe", 2, 4), [1, 3])
    axes = axes_of(timeline, "GPipe")
    assert (
        axes.get_title(loc="left")
        == f"GPipe: pp 2, v 1, m 4: bubble {timeline.bubble_fraction:.1%}"
    )
    assert timeline.bubble_fraction > 0.5
    assert "= 25.0% with equal chunks" in axes.get_xlabel()
