"""The commands around a LoRA file. Each imports what it needs when it is called, so that ``--help`` is instant."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maulstick.errors import OptionError
from maulstick.options.tools import (
    ConvertOptions,
    DiffOptions,
    ExtractOptions,
    InspectOptions,
    MergeOptions,
    ResizeOptions,
    SaveOptions,
)

if TYPE_CHECKING:
    from maulstick.train.console import RunConsole


def inspect(file: Path, *, options: InspectOptions = InspectOptions()) -> int:  # noqa: B008 (never changed)
    """Show what a LoRA file holds: ranks, norms and effective rank by block, metadata, and what is wrong with it.

    Args:
        file: LoRA file of any program (kohya, diffusers, PEFT, ComfyUI), or the folder of one.
    """
    from maulstick.tools.inspect_lora import inspect_file
    from maulstick.tools.lora_tables import print_facts

    if options.chart is not None and options.chart.suffix.lower() != ".png":
        raise OptionError(f"--chart {options.chart} should end in .png.")
    facts = inspect_file(file.expanduser(), _console(quiet=options.as_json or not sys.stdout.isatty()))
    if options.as_json:
        _print_json(facts.as_json())
    else:
        print_facts(facts, with_modules=options.modules, all_metadata=options.metadata)
    if options.chart is not None:
        from maulstick.tools.bar_chart import write_block_chart

        write_block_chart(facts, options.chart.expanduser())
        if not options.as_json:
            print(f"chart: {options.chart}")
    return 0


def diff(first: Path, second: Path, *, options: DiffOptions = DiffOptions()) -> int:  # noqa: B008
    """Compare two LoRA files: distance and direction by block, and the entries of their metadata that differ.

    Args:
        first: A LoRA file.
        second: Another one, for the same model family; its naming may be another program's.
    """
    from maulstick.tools.diff_lora import diff_files
    from maulstick.tools.lora_tables import print_difference

    difference = diff_files(
        first.expanduser(), second.expanduser(), _console(quiet=options.as_json or not sys.stdout.isatty())
    )
    if options.as_json:
        _print_json(difference.as_json())
    else:
        print_difference(difference)
    return 0


def merge(loras: list[str], /, *, options: MergeOptions = MergeOptions()) -> int:  # noqa: B008
    """Merge LoRA files into a checkpoint (--base), or into one LoRA.

    Args:
        loras: LoRA files, each with its strength behind a colon (style.safetensors:0.8), or apart for UNet and text
            encoders (style.safetensors:unet=0.8:te=0.5), and with block weights of the LoRA Block Weight extension
            (style.safetensors:0.8:lbw=OUTALL, or a list of 12, 17, 20 or 26 values).
    """
    from maulstick.adapters.block_presets import read_presets
    from maulstick.tools.lora_choice import parse_lora_choice
    from maulstick.tools.lora_output import check_output

    choices = [parse_lora_choice(text) for text in loras]
    presets = None if options.lbw_presets is None else read_presets(options.lbw_presets.expanduser())
    console = _console()
    if options.base is None:
        output = _output(options.save)
        check_output(output, set_old_aside=options.save.set_aside)
        _merge_loras(choices, presets, options, output, console)
        return 0
    from maulstick.tools.checkpoint import open_checkpoint
    from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge

    if options.rank is not None:
        raise OptionError("--rank is for LoRA + LoRA; a checkpoint (--base) takes a LoRA as a whole. Leave it out.")
    base = open_checkpoint(options.base.expanduser())
    output = _output(options.save)
    check_output(output, set_old_aside=options.save.set_aside, ending="" if base.is_folder else ".safetensors")
    plan = plan_merge(base, choices, presets)
    for path, names in plan.unmatched.items():
        if names:
            console.say(f"{path}: {len(names)} modules have no place in {base.path.name} ({names[0]}, …), left out")
    merge_into_checkpoint(base, plan, output, console, options.save.save_precision)
    console.say(f"{output}: {len(plan.changes)} tensors of {base.path.name} changed")
    return 0


def _merge_loras(choices: Any, presets: Any, options: MergeOptions, output: Path, console: RunConsole) -> None:
    from maulstick.adapters.write_formats import layout_tensors, save_layout
    from maulstick.tools.lora_output import chosen_dtype, old_set_aside
    from maulstick.tools.merge_loras import merge_loras

    merged = merge_loras(choices, output, rank=options.rank, presets=presets, console=console)
    dtype = chosen_dtype(options.save.save_precision, merged.dtypes)
    tensors = layout_tensors(merged.modules, merged.family, dtype=dtype)
    with old_set_aside(output):
        save_layout(output, tensors, merged.metadata)
    ranks = sorted({weights.rank for weights in merged.modules.values()})
    shown = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    exact = "exact" if options.rank is None else f"error {merged.error:.2%} of the exact sum"
    console.say(f"{output}: {len(merged.modules)} modules of rank {shown}, {exact}")


def extract(base: Path, tuned: Path, *, options: ExtractOptions = ExtractOptions()) -> int:  # noqa: B008
    """Make a LoRA of the difference of two checkpoints.

    Args:
        base: Checkpoint that the LoRA will be used with: a diffusers folder or one file.
        tuned: Checkpoint that was trained from it.
    """
    from maulstick.adapters.write_formats import layout_tensors, save_layout
    from maulstick.tools.checkpoint import open_checkpoint
    from maulstick.tools.extract import ExtractChoice, extract_lora, parse_block_ranks
    from maulstick.tools.lora_output import (
        check_output,
        chosen_dtype,
        extracted_metadata,
        old_set_aside,
    )
    from maulstick.tools.lora_tables import print_errors

    output = _output(options.save)
    check_output(output, set_old_aside=options.save.set_aside)
    original, other = open_checkpoint(base.expanduser()), open_checkpoint(tuned.expanduser())
    choice = ExtractChoice(
        rank=options.rank,
        conv_rank=options.conv_rank,
        energy=options.energy,
        block_ranks=parse_block_ranks(options.block_ranks, original),
        min_difference=options.min_difference,
        unet_only=options.unet_only,
        iterations=options.iterations,
    )
    console = _console()
    found = extract_lora(original, other, choice, console)
    error = found.approximation.error
    metadata = extracted_metadata(original, other, found.approximation.modules, output, error, options.rank)
    dtype = chosen_dtype(options.save.save_precision, other.dtypes)
    tensors = layout_tensors(found.approximation.modules, original.family, dtype=dtype)
    with old_set_aside(output):
        save_layout(output, tensors, metadata)
    print_errors([(b.block, b.modules, b.ranks, b.error) for b in found.approximation.blocks])
    console.say(f"{output}: {len(found.approximation.modules)} modules, error {error:.2%} of their difference")
    if found.unchanged:
        console.say(f"{found.unchanged} modules do not differ")
    if found.outside:
        console.say(f"{found.outside:.2%} of the whole difference lies in weights that get no LoRA (biases, norms, …)")
    return 0


def resize(file: Path, *, options: ResizeOptions = ResizeOptions()) -> int:  # noqa: B008
    """Give a LoRA another rank: by a fixed number, or module by module by its singular values.

    Args:
        file: LoRA file of any program; a LoHa or LoKr becomes a LoRA.
    """
    from maulstick.adapters.read_formats import read_adapter
    from maulstick.adapters.write_formats import layout_tensors, save_layout
    from maulstick.tools.lora_output import (
        check_output,
        chosen_dtype,
        history_entry,
        old_set_aside,
        source_entry,
        updated_metadata,
    )
    from maulstick.tools.lora_tables import print_errors
    from maulstick.tools.low_rank import RankChoice
    from maulstick.tools.resize import resize_lora

    if options.rank is None:
        raise OptionError("No new rank is given. Name it with --rank N; with --rule it is the largest one.")
    if (options.rule is None) != (options.value is None):
        raise OptionError("--rule and --value belong together, such as --rule sv_fro --value 0.95.")
    output = _output(options.save)
    check_output(output, set_old_aside=options.save.set_aside)
    rule, value = options.rule or "fixed", options.value or 0.0
    choice = RankChoice(rule, value, options.rank)
    conv_choice = None if options.conv_rank is None else RankChoice(rule, value, options.conv_rank)
    adapter = read_adapter(file.expanduser())
    console = _console()
    resized = resize_lora(adapter, choice, conv_choice, console)
    told = {"rank": options.rank} | ({} if options.rule is None else {"rule": options.rule, "value": options.value})
    entry = history_entry("resize", sources=[source_entry(adapter)], **told, error=resized.error)
    metadata = updated_metadata(adapter.metadata, resized.modules, adapter.family, output, entry, resized=True)
    dtype = chosen_dtype(options.save.save_precision, adapter.dtypes)
    with old_set_aside(output):
        save_layout(output, layout_tensors(resized.modules, adapter.family, dtype=dtype), metadata)
    print_errors([(b.block, b.modules, b.ranks, b.error) for b in resized.blocks])
    console.say(f"{output}: {len(resized.modules)} modules, error {resized.error:.2%}")
    return 0


def convert(file: Path, *, options: ConvertOptions = ConvertOptions()) -> int:  # noqa: B008
    """Write a LoRA or an IP-Adapter in another program's naming, or in another number format.

    Args:
        file: LoRA file of any program (kohya, diffusers, PEFT, ComfyUI), or the folder of one; or an IP-Adapter.
    """
    from maulstick.adapters.ip_adapter_files import is_ip_adapter_file

    if is_ip_adapter_file(file.expanduser()):
        return _convert_ip_adapter(file.expanduser(), options)
    if options.to == "instantx":
        raise OptionError("--to instantx is for IP-Adapters of SD3, and this is none.")
    from maulstick.adapters.read_formats import read_adapter
    from maulstick.adapters.write_formats import save_layout
    from maulstick.tools.convert import convert_lora
    from maulstick.tools.lora_output import check_output, old_set_aside

    output = _output(options.save)
    ending = "" if options.to == "peft" else ".safetensors"
    check_output(output, set_old_aside=options.save.set_aside, ending=ending)
    adapter = read_adapter(file.expanduser())
    console = _console()
    for note in adapter.notes:
        console.say(note)
    tensors, metadata = convert_lora(
        adapter, output, layout=options.to, unet_names=options.unet_names, precision=options.save.save_precision
    )
    with old_set_aside(output):
        save_layout(output, tensors, metadata, layout=options.to)
    console.say(f"{output}: {len(adapter.modules)} modules for {adapter.family.name} in {options.to} naming")
    return 0


def _convert_ip_adapter(file: Path, options: ConvertOptions) -> int:
    from maulstick.adapters.ip_adapter_files import read_ip_adapter
    from maulstick.tools.convert_ip_adapter import convert_ip_adapter, ip_adapter_ending
    from maulstick.tools.lora_output import check_output, chosen_dtype, old_set_aside

    output = _output(options.save)
    check_output(output, set_old_aside=options.save.set_aside, ending=ip_adapter_ending(options.to))
    adapter = read_ip_adapter(file)
    precision = options.save.save_precision
    dtype = None if precision is None else chosen_dtype(precision, ())
    with old_set_aside(output):
        count = convert_ip_adapter(adapter, output, layout=options.to, dtype=dtype)
    _console().say(f"{output}: {adapter.spec.title}, {count} tensors in the form of {options.to}")
    return 0


COMMANDS = (inspect, diff, merge, extract, resize, convert)


def _output(options: SaveOptions) -> Path:
    if options.output is None:
        raise OptionError("No output is given. Name the file to write with --output FILE.")
    return options.output.expanduser()


def _console(*, quiet: bool = False) -> RunConsole:
    from maulstick.train.console import make_console

    return make_console("quiet" if quiet else "auto")


def _print_json(content: dict[str, Any]) -> None:
    print(json.dumps(content, indent=2, ensure_ascii=False))
