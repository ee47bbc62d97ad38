"""A measurement of the path, to be read by a person."""

from collections.abc import Mapping
from typing import Any

from headrace.metrics.meter import ROOMS

_WIDTHS = (12, 12, 12, 12, 14)


def table(result: Mapping[str, Any]) -> str:
    """What ``bench_path`` gives, as text."""
    lines = [_line("room alone", "rows/s", "before", "after", "of a step", "µs CPU a row", note="form")]
    for room in ROOMS:
        rate, before, after = (result[key][room] for key in ("rates", "rates_before", "rates_after"))
        cells = [f"{x:,.0f}" for x in (rate, before, after)]
        cpu = f"{result['cpu_s_per_row'][room] * 1e6:,.1f}"
        lines.append(_line(room, *cells, f"{result['limit'] / rate:.1%}", cpu, note=result["forms"][room]))
    windows, lag = (
        result["steps_per_s_windows"],
        f"mean {result['lag_mean']:.2f}, max {result['lag_max']} updates",
    )
    cpu = f"{result['cpu_s_per_step'] * 1e6:,.1f}"
    waits = [f"{room} {w['wait_in']:.0%} {w['wait_out']:.0%}" for room, w in result["waits"].items()]
    lines += [
        _line(
            "limit",
            f"{result['limit']:,.0f}",
            "",
            "",
            "",
            f"{sum(result['cpu_s_per_row'].values()) * 1e6:,.1f}",
        ),
        _line("path", f"{result['steps_per_s']:,.0f}", "", "", "", cpu, note="steps/s, end to end"),
        _line("efficiency", f"{result['efficiency']:.1%}"),
        "",
        f"windows      {' '.join(f'{rate:,.0f}' for rate in windows)} steps/s in {result['seconds']:.1f} s",
        f"collected    {result['collected_per_s']:,.0f} steps/s meanwhile",
        f"lag          {lag}",
        f"cores        {result['cores_busy']:.2f} of {result['cores']} busy",
        f"waits in out {', '.join(waits)}",
        f"machine      {', '.join(result['machine'].values())}",
        f"versions     {', '.join(f'{name} {version}' for name, version in result['versions'].items())}",
    ]
    return "\n".join(lines)


def _line(name: str, *cells: str, note: str = "") -> str:
    columns = [f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=False)]
    return f"{name:<12}{''.join(columns)}  {note}".rstrip()
