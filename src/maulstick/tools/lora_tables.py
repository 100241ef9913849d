"""Tables of ``inspect``, ``diff``, ``extract`` and ``resize`` for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from maulstick.tools.diff_lora import FileDifference
from maulstick.tools.inspect_lora import FileFacts
from maulstick.tools.lora_metadata import readable_facts

_BAR = 20
_LONGEST_VALUE = 70
_WIDEST = 240


def console(width: int | None = None) -> Console:
    """Where tables go, as wide as the terminal or as asked for; nothing in them is read as markup."""
    return Console(highlight=False, markup=False, soft_wrap=False, width=width)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 or not column else "right", no_wrap=True)
    return table


def number(value: float | None, places: str = ".4g") -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else format(value, places)


def listed(values: Sequence[float]) -> str:
    """Ranks or alphas: one value, a few, or a range."""
    shown = [f"{value:g}" for value in values]
    if not shown:
        return "-"
    return ",".join(shown) if len(shown) <= 3 else f"{shown[0]}..{shown[-1]}"


def _bar(value: float | None, largest: float) -> str:
    if value is None or not value > 0:
        return ""
    return "█" * max(1, round(_BAR * value / largest))


def print_facts(facts: FileFacts, *, with_modules: bool = False, all_metadata: bool = False) -> None:
    """Show what a file holds: findings first, then what it is, its blocks, and its metadata."""
    out = console()
    kinds = ", ".join(f"{count} {kind} modules" for kind, count in facts.kinds.items())
    out.print(f"{facts.file}: {kinds} for {facts.family}", soft_wrap=True)
    out.print(
        f"{facts.layout} layout, {', '.join(facts.dtypes)}, {facts.parameters:,} parameters, norm {number(facts.norm)}"
    )
    for name, value in facts.hashes.items():
        out.print(f"{name} {value}", soft_wrap=True)
    for finding in facts.findings:
        out.print(f"! {finding}", style="bold", soft_wrap=True)
    out.print()
    table = _table("block", "modules", "rank", "alpha", "norm", "effective rank", "")
    largest = max((block.norm or 0.0 for block in facts.blocks), default=0.0)
    for block in facts.blocks:
        if block.modules:
            zero = f"  {block.zero_modules} zero" if block.zero_modules else ""
            table.add_row(
                block.block,
                str(block.modules),
                listed(block.ranks),
                listed(block.alphas),
                number(block.norm),
                number(block.effective_rank, ".1f"),
                _bar(block.norm, largest) + zero,
            )
    out.print(table)
    empty = [block.block for block in facts.blocks if not block.modules]
    if empty:
        out.print(f"no module in {', '.join(empty)}", soft_wrap=True)
    if with_modules:
        _print_modules(out, facts)
    _print_metadata(out, facts.metadata, everything=all_metadata)


def _print_modules(out: Console, facts: FileFacts) -> None:
    out.print()
    table = _table("module", "shape", "rank", "alpha", "norm", "effective rank")
    for module in facts.modules:
        shape = "x".join(map(str, module.shape))
        alpha = "-" if module.alpha is None else f"{module.alpha:g}"
        spread = number(module.effective_rank, ".1f")
        table.add_row(module.name, shape, str(module.rank), alpha, number(module.norm), spread)
    # Names are never shortened, whatever the terminal's width: they are there to be copied.
    console(_WIDEST).print(table)


def _print_metadata(out: Console, metadata: dict[str, Any], *, everything: bool) -> None:
    facts = list(metadata.items()) if everything else readable_facts(metadata)
    out.print()
    if not metadata:
        out.print("no metadata")
        return
    width = max((len(label) for label, _ in facts), default=0)
    for label, value in facts:
        out.print(f"{label.ljust(width)}  {value}", soft_wrap=True)
    if not everything:
        out.print(f"({len(metadata)} entries; --metadata shows all)")


def print_difference(difference: FileDifference) -> None:
    """Show how far two files are apart, block by block, and what their metadata say differently."""
    out = console()
    for side, name in (("A", difference.first), ("B", difference.second)):
        out.print(f"{side}: {name}", soft_wrap=True)
    for finding in difference.findings:
        out.print(f"! {finding}", style="bold", soft_wrap=True)
    out.print()
    table = _table("block", "modules", "|A|", "|B|", "|A-B|", "of the larger", "cosine", "")
    for block in (*difference.blocks, difference.whole):
        if block.modules:
            only = f"{block.only_first} only in A" if block.only_first else ""
            only += (", " if only and block.only_second else "") + (
                f"{block.only_second} only in B" if block.only_second else ""
            )
            table.add_row(
                block.block,
                str(block.modules),
                number(block.first_norm),
                number(block.second_norm),
                number(block.distance),
                number(block.relative_distance, ".2%"),
                number(block.cosine, "+.3f"),
                only,
            )
    out.print(table)
    out.print()
    if not difference.metadata:
        out.print("the metadata are the same")
    for key, (first, second) in difference.metadata.items():
        out.print(f"{key}: {_short(first)} | {_short(second)}", soft_wrap=True)


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


def print_errors(rows: Sequence[tuple[str, int, Sequence[int], float | None]]) -> None:
    """Show block, modules, ranks and relative error of what was approximated."""
    table = _table("block", "modules", "rank", "error")
    for block, modules, ranks, error in rows:
        table.add_row(block, str(modules), listed(ranks), number(error, ".2%"))
    console().print(table)
