"""The charts, as Plotly figures that read the same on light and on dark pages."""

from collections import defaultdict

import plotly.graph_objects as go

from dashboard.queries import Headline, RoundRow

__all__ = ["metrics", "seconds"]

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A800", "#8C8C8C")
"""Okabe and Ito's palette: told apart by colour-blind readers, on white and on black."""
_OTHERS = "other sites"
_HEIGHT = 300


def metrics(rounds: tuple[RoundRow, ...], headlines: tuple[Headline, ...], best_round: int) -> go.Figure:
    """The headline metrics over the evaluated rounds; the best round, if there is one, is marked on each line."""
    figure = _figure("round")
    evaluated = [row for row in rounds if row.metrics]
    for colour, headline in zip(_COLOURS, headlines, strict=False):
        points = [(row.number, row.metrics[headline.name]) for row in evaluated if headline.name in row.metrics]
        figure.add_scatter(
            x=[number for number, _ in points],
            y=[value for _, value in points],
            name=headline.name,
            mode="lines+markers",
            line={"color": colour, "width": 2.5},
            marker={"size": 5},
            hovertemplate="round %{x}: %{y:.3f}",
        )
        best = [(number, value) for number, value in points if number == best_round]
        if best and best_round:
            figure.add_scatter(
                x=[best[0][0]],
                y=[best[0][1]],
                mode="markers",
                marker={"size": 15, "symbol": "star", "color": colour},
                showlegend=False,
                hovertemplate=f"best round {best_round}: %{{y:.3f}}<extra>{headline.name}</extra>",
            )
    if best_round:
        figure.add_vline(x=best_round, line={"dash": "dot", "width": 1, "color": "#8C8C8C"})
        figure.add_annotation(x=best_round, y=1.06, yref="paper", text=f"best round {best_round}", showarrow=False)
    figure.update_yaxes(tickformat=".2f")
    return figure


def seconds(rounds: tuple[RoundRow, ...]) -> go.Figure:
    """Each site's seconds of work over the rounds, stacked; sites beyond the busiest seven are one."""
    total = defaultdict[str, float](float)
    for row in rounds:
        for site, spent in row.work.items():
            total[site] += spent
    busiest = sorted(total, key=lambda site: -total[site])
    shown = busiest if len(busiest) <= len(_COLOURS) else busiest[: len(_COLOURS) - 1]
    figure = _figure("round")
    trained = [row for row in rounds if row.number]
    for colour, site in zip(_COLOURS, sorted(shown), strict=False):
        _bars(figure, site, colour, [(row.number, row.work.get(site, 0.0)) for row in trained])
    if len(shown) < len(busiest):
        rest = set(busiest) - set(shown)
        _bars(
            figure, _OTHERS, _COLOURS[-1], [(row.number, sum(row.work.get(it, 0.0) for it in rest)) for row in trained]
        )
    figure.update_layout(barmode="stack", bargap=0.25)
    figure.update_yaxes(ticksuffix=" s")
    return figure


def _bars(figure: go.Figure, name: str, colour: str, bars: list[tuple[int, float]]) -> None:
    figure.add_bar(
        x=[number for number, _ in bars],
        y=[spent for _, spent in bars],
        name=name,
        marker={"color": colour},
        hovertemplate="round %{x}: %{y:.1f} s",
    )


def _figure(axis: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 8, "r": 8, "t": 24, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hovermode="x unified",
        legend={"orientation": "h", "y": -0.25, "x": 0, "traceorder": "normal"},
    )
    figure.update_xaxes(title=axis, tickformat="d", showgrid=False, automargin=True)
    figure.update_yaxes(automargin=True, gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    return figure
