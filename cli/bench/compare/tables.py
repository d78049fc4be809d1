"""A comparison as tables for people: medians with their spread, the first subject's ratios, and who used the CPUs."""

from __future__ import annotations

from ...console import Console
from .figures import MEASURES, Cell, Line, Ratio, Sample
from .run import Comparison


def show(console: Console, found: Comparison) -> None:
    """Print the figures to stdout and the findings to stderr."""
    names = [subject.name for subject in found.subjects]
    first, *others = names
    title = (
        f"{', '.join(names)}: median of {found.rounds} rounds (lowest-highest); {found.threads} threads, "
        f"CPUs {','.join(map(str, found.cpus))}, client included; {found.machine.model}"
    )
    if found.partial:
        title += "; PARTIAL: interrupted"
    columns = ["scenario", "measure", *(f">{name}" for name in names), *(f">{first} / {name}" for name in others)]
    console.table(columns, [_row(line, names) for line in found.lines], title)
    cpu_columns = ["CPUs busy", *(f">{name}" for name in names)]
    scenarios = list(dict.fromkeys(one.scenario for one in found.samples))
    console.table(
        cpu_columns,
        [[scenario, *(_cpu(found.samples, scenario, name) for name in names)] for scenario in scenarios],
        "server + client, of a scenario's time",
    )
    salt = f"salt {found.salt}" if found.salt else "no salt"
    console.data(f"prompts: {found.prompts}; {salt}")
    for subject in found.subjects:
        console.data(f"{subject.name}: {subject.url or ' '.join(subject.command)}")
    for finding in found.findings:
        backend = f"{finding.backend}: " if finding.backend else ""
        console.say(f"{finding.guard}: {backend}{finding.message}", "bold")


def _row(line: Line, names: list[str]) -> list[str]:
    cells = {cell.subject: cell for cell in line.cells}
    ratios = {ratio.against: ratio for ratio in line.ratios}
    return [
        line.scenario,
        MEASURES[line.measure].label,
        *(_cell(cells.get(name)) for name in names),
        *(_ratio(ratios.get(name)) for name in names[1:]),
    ]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return _number(cell.median) + (f" ({_number(cell.low)}-{_number(cell.high)})" if cell.rounds > 1 else "")


def _ratio(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio.median:.2f}x" + (f" ({ratio.low:.2f}-{ratio.high:.2f})" if ratio.rounds > 1 else "")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _cpu(samples: tuple[Sample, ...], scenario: str, subject: str) -> str:
    own = [one.cpu for one in samples if one.scenario == scenario and one.subject == subject]
    elapsed = sum(cpu.elapsed_s for cpu in own)
    if not elapsed:
        return "-"
    client = sum(cpu.client_s for cpu in own) / elapsed
    servers = [cpu.server_s for cpu in own if cpu.server_s is not None]
    server = f"{sum(servers) / elapsed:.2f}" if servers else "?"
    return f"{server} + {client:.2f}"
