"""The picture of a run."""

from omnibatch.timeline import Timeline, TimelineStep


def step(tick, name, index, together):
    return TimelineStep(tick, name, index, rows=1, rows_together=together, started=0.1 * tick, seconds=0.1)


def test_plot_has_a_bar_a_step_and_a_row_a_request():
    timeline = Timeline([step(0, "a", 0, 1), step(1, "a", 1, 2), step(1, "b", 0, 2), step(2, "b", 1, 1)])
    (axes,) = timeline.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    bars = [(round(bar.get_x()), round(bar.get_y() + 0.4)) for bar in axes.patches]
    assert bars == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert [text.get_text() for text in axes.texts] == ["0", "1", "0", "1"]


def test_an_empty_timeline_can_be_drawn():
    assert Timeline()._repr_png_().startswith(b"\x89PNG")
