"""A report as text for a terminal. Pure Python, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .report import LARGEST, Direction, Finding, Headroom, Report, times

_WIDTH = 12


def report_text(report: Report, *, table: bool) -> str:
    """Return the whole report; ``table``: with the modules of least headroom."""
    lines = list(_lines(report))
    if table and report.tightest:
        lines += [
            "",
            "Modules with the largest values (below 1x, fp16 would overflow):",
            *headroom_table(report.tightest),
        ]
    return "\n".join(lines)


def headroom_table(rows: Sequence[Headroom]) -> list[str]:
    """Return the rows as aligned columns, with a header."""
    cells = [("max |x|", "fp16 headroom", "computed in", "operation", "module")]
    for row in rows:
        room = row.factor_in_fp16
        shown = "-" if room is None else times(room)
        module = f"{row.module or 'the model itself'} ({row.module_class})"
        cells.append((f"{row.amax:.4g}", shown, row.dtype, row.op, module))
    first, second, third, fourth = (max(len(row[column]) for row in cells) for column in range(4))
    return [
        f"{amax:>{first}}  {factor:>{second}}  {dtype:<{third}}  {op:<{fourth}}  {module}"
        for amax, factor, dtype, op, module in cells
    ]


def _lines(report: Report) -> Iterator[str]:
    title = report.title or "Autopsy"
    scale = f", loss scale {report.loss_scale:g}" if report.loss_scale != 1 else ""
    if report.finding is None:
        yield f"{title}: everything was finite (loss {report.loss:.6g}{scale})"
    else:
        yield f"{title}: {report.finding.headline()}"
        yield _row("loss", f"{report.loss:.6g}{scale}")
        yield from _finding_lines(report.finding)
    yield from _sample_lines(report)
    for cause in report.causes:
        yield _row("likely cause", cause.sentence)
        yield _row("because", cause.evidence)
        yield _row("cure", cause.cure)
        if cause.seen_in:
            yield _row("seen in", ", ".join(cause.seen_in))
    for note in report.notes:
        yield _row("note", note)


def _finding_lines(finding: Finding) -> Iterator[str]:
    if finding.direction not in (Direction.OPTIMIZER_STATE, Direction.OPTIMIZER_STEP) and finding.op is not None:
        yield _row("module", finding.where)
    if finding.op is not None:
        node = f" in the backward of {finding.node}" if finding.node else ""
        yield _row("operation", f"{finding.op}{node}")
    yield _row("tensor", finding.tensor.describe())
    for operand in finding.operands:
        yield _row("went in", operand.describe())
    if finding.amax_in_fp32 is not None:
        yield _row("in fp32", _in_fp32(finding))
    for row in finding.before:
        factor = row.factor
        room = "" if factor is None or factor > 1e6 else f", headroom {times(factor)} to {LARGEST[row.dtype]:.6g}"
        where = f"{row.module or 'the model itself'} ({row.module_class})"
        yield _row("before it", f"{where}: max |x| {row.amax:.4g} in {row.dtype}{room}")
    if finding.masked:
        yield _row(
            "note", "the loss is finite all the same: the value was masked in the forward pass, its gradient not"
        )


def _in_fp32(finding: Finding) -> str:
    reached = finding.amax_in_fp32
    if reached is None or not math.isfinite(reached):
        return "the same operation fails in fp32 too"
    largest = LARGEST.get(finding.tensor.dtype, math.inf)
    if reached > largest:
        excess = times(reached / largest)
        return f"the same operation reaches {reached:.4g}, {excess} {finding.tensor.dtype}'s {largest:.6g}"
    return f"the same operation is finite, up to {reached:.4g}"


def _sample_lines(report: Report) -> Iterator[str]:
    for sample in report.samples:
        yield _row("sample", sample.describe())
    count = report.samples_in_batch
    if report.finding is not None and not report.samples and count is not None and count > 1:
        yield _row("sample", f"all {count} of the batch, each on its own: it is not the data")


def _row(label: str, text: str) -> str:
    return f"  {label:<{_WIDTH}} {text}"
