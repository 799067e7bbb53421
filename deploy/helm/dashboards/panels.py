"""What the dashboards are made of, with Grafana's own SDK: variables, rows, panels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)

SUITE = 'namespace="$namespace", job="$job"'
TURNS = f'{SUITE}, gen_ai_request_model=~"$model"'
MODEL = f'{SUITE}, model=~"$model"'
ENGINE = f'{MODEL}, role=~"$role"'
ROLE = f'{SUITE}, role=~"$role"'
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_TAG = "millstream"
_WIDTHS = {1: 24, 2: 12, 3: 8, 4: 6}


@dataclass(frozen=True)
class Line:
    """One query of a panel, and what its series are called."""

    query: str
    legend: str


@dataclass(frozen=True)
class Chart:
    """A panel of lines over time."""

    title: str
    text: str
    unit: str
    lines: Sequence[Line]
    stacked: bool = False
    highest: float | None = None


@dataclass(frozen=True)
class Number:
    """A panel of one number, the latest."""

    title: str
    text: str
    unit: str
    query: str


def rate(name: str, matchers: str, by: str = "") -> str:
    """How much a counter grows per second, summed; ``by``: labels to keep."""
    kept = f" by ({by})" if by else ""
    return f"sum{kept} (rate({name}{{{matchers}}}[$__rate_interval]))"


def grown(name: str, matchers: str, by: str) -> str:
    """How much a counter grew between two points, summed by the labels ``by``."""
    return f"sum by ({by}) (increase({name}{{{matchers}}}[$__rate_interval]))"


def quantile(share: float, name: str, matchers: str, by: str = "") -> str:
    """A quantile of a histogram, per value of the labels ``by``."""
    kept = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', matchers, kept)})"


def quantiles(name: str, matchers: str) -> list[Line]:
    """Median, 95 % and 99 %."""
    return [Line(quantile(q, name, matchers), f"{q:.0%}") for q in (0.5, 0.95, 0.99)]


def share(part: str, whole: str) -> str:
    """One rate of another, and nothing while the other is 0."""
    return f"{part} / ({whole} > 0)"


class Board:
    """A dashboard that grows row by row."""

    def __init__(self, uid: str, title: str, text: str) -> None:
        """Begin with the variables that every dashboard has: data source, namespace, job, model."""
        self.uid = uid
        self._builder = (
            Dashboard(f"Millstream / {title}")
            .uid(f"millstream-{uid}")
            .description(text)
            .tags([_TAG])
            .time("now-1h", "now")
            .refresh("30s")
            .timezone("browser")
            .tooltip(DashboardCursorSync.CROSSHAIR)
            .link(
                DashboardLink("Millstream")
                .type(DashboardLinkType.DASHBOARDS)
                .tags([_TAG])
                .icon("external link")
                .tooltip("")
                .url("")
                .as_dropdown(as_dropdown=True)
                .include_vars(include_vars=True)
                .keep_time(keep_time=True)
            )
            .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
            .with_variable(_one("namespace", "label_values(millstream_build_info, namespace)"))
            .with_variable(
                _one("job", 'label_values(millstream_build_info{namespace="$namespace"}, job)')
            )
            .with_variable(
                _several(
                    "model", f"label_values(millstream_admission_queued_requests{{{SUITE}}}, model)"
                )
            )
        )

    def with_roles(self) -> Board:
        """Add the variable of the workers' roles."""
        self._builder.with_variable(
            _several("role", f"label_values(millstream_engine_info{{{SUITE}}}, role)")
        )
        return self

    def row(self, title: str, *panels: Chart | Number) -> Board:
        """Add panels side by side, under a title."""
        self._builder.with_row(Row(title))
        width = _WIDTHS.get(len(panels), 6)
        for panel in panels:
            if isinstance(panel, Number):
                self._builder.with_panel(_number(panel).span(24 // len(panels)).height(4))
            else:
                self._builder.with_panel(_chart(panel).span(width).height(8))
        return self

    def build(self) -> object:
        """Return what the SDK's JSONEncoder writes; panels are numbered."""
        built = self._builder.build()
        for number, panel in enumerate(built.panels or [], 1):
            panel.id_val = number
        return built


def _one(name: str, query: str) -> QueryVariable:
    return (
        QueryVariable(name)
        .label(name.capitalize())
        .datasource(_SOURCE)
        .query(query)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _several(name: str, query: str) -> QueryVariable:
    return _one(name, query).multi(multi=True).include_all(include_all=True).all_value(".*")


def _query(line: Line, number: int) -> Dataquery:
    query = Dataquery().datasource(_SOURCE).expr(line.query).legend_format(line.legend)
    return query.ref_id(chr(ord("A") + number))


def _chart(chart: Chart) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(chart.title)
        .description(chart.text)
        .datasource(_SOURCE)
        .unit(chart.unit)
        .min(0)
        .fill_opacity(20 if chart.stacked else 0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    if chart.stacked:
        panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if chart.highest is not None:
        panel.max(chart.highest)
    for number, line in enumerate(chart.lines):
        panel.with_target(_query(line, number))
    return panel


def _number(number: Number) -> stat.Panel:
    return (
        stat.Panel()
        .title(number.title)
        .description(number.text)
        .datasource(_SOURCE)
        .unit(number.unit)
        .with_target(_query(Line(number.query, ""), 0).instant())
    )
