"""Which request took part in which tick: a record, and its picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class TimelineStep:
    """One denoising step of one request.

    Attributes:
        tick: number of the engine's step, from 0.
        request_id: whose.
        step_index: which of the request's steps, from 0.
        rows: rows of the request.
        rows_together: rows that took their step in the same tick and with the same latent shape.
        started: seconds since the first recorded step.
        seconds: how long the tick's forwards took.
    """

    tick: int
    request_id: str
    step_index: int
    rows: int
    rows_together: int
    started: float
    seconds: float


@dataclass
class Timeline:
    """Give one to a :class:`~omnibatch.RolloutEngine` and it fills it.

    Example:
        >>> timeline = Timeline()
        >>> timeline.steps.append(TimelineStep(0, "a", 0, rows=1, rows_together=2, started=0.0, seconds=0.1))
        >>> timeline.request_ids
        ['a']
    """

    steps: list[TimelineStep] = field(default_factory=list)

    @property
    def request_ids(self) -> list[str]:
        """Ids in order of their first step."""
        return list(dict.fromkeys(step.request_id for step in self.steps))

    def plot(self) -> Figure:
        """Draw a bar a step: requests from top to bottom, ticks from left to right, the step's number in the bar."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        names = self.request_ids
        ticks = 1 + max((step.tick for step in self.steps), default=0)
        figure = Figure(figsize=(min(max(2 + 0.32 * ticks, 6.4), 14), 1.2 + 0.34 * len(names)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        widest = max((step.rows_together for step in self.steps), default=1)
        for step in self.steps:
            # Darker where more rows share the forward.
            shade = 0.25 + 0.65 * step.rows_together / widest
            color = (0.12, 0.42, 0.68, shade)
            row = names.index(step.request_id)
            axes.barh(row, 0.94, left=step.tick + 0.03, height=0.8, color=color)
            if ticks <= 40:
                ink = "white" if shade > 0.7 else "black"
                axes.text(step.tick + 0.5, row, str(step.step_index), ha="center", va="center", fontsize=7, color=ink)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.set_xlim(0, ticks)
        axes.set_xlabel("tick of the engine (number: the request's own step; darker: more rows together)", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        return figure

    def _repr_png_(self) -> bytes:
        """Show the picture in a notebook."""
        import io

        buffer = io.BytesIO()
        self.plot().savefig(buffer, format="png", dpi=110)
        return buffer.getvalue()
