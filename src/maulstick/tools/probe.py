"""``maulstick probe``: which blocks matter for a model and its training images, measured before training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from maulstick.errors import OptionError
from maulstick.files_io import atomic_write, set_aside
from maulstick.options.load import LoadedOptions
from maulstick.options.probe import LoadedProbe, ProbeOptions
from maulstick.options.schema import NetworkOptions, TrainOptions
from maulstick.tools.probe_chart import draw_probe
from maulstick.tools.probe_report import print_report
from maulstick.tools.probe_run import probe_blocks
from maulstick.train.console import make_console
from maulstick.train.optim import resolve_optimizer
from maulstick.train.prepare import default_device, draw_seed, prepare

WEIGHTS_BY_BLOCK = ("block_lr", "down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold")
DROPOUTS = ("network_dropout", "rank_dropout", "module_dropout")


def probe_command(asked: LoadedProbe) -> int:
    """Measure, print a table (or one JSON object), and write probe.json and probe.png."""
    options = asked.loaded.options
    console = make_console("quiet" if asked.as_json else options.log.console)
    loaded, notes = options_to_probe(asked.loaded, asked.probe)
    folder = (asked.probe.probe_output or options.run.output_dir or Path()).expanduser()
    # A folder that cannot be written must not surface after minutes of measuring.
    folder.mkdir(parents=True, exist_ok=True)
    prepared = prepare(loaded, console, device=default_device(), seed=draw_seed(options))
    report = probe_blocks(prepared, asked.probe, console, notes)
    text = json.dumps(report.as_json(), indent=2, ensure_ascii=False)
    if asked.as_json:
        print(text)
    else:
        print_report(report)
    for path, write in ((folder / "probe.json", text), (folder / "probe.png", draw_probe(report))):
        earlier = set_aside(path)
        atomic_write(path, write)
        console.say(f"written: {path}" + (f" (the earlier file is now {earlier.name})" if earlier else ""))
    return 0


def options_to_probe(loaded: LoadedOptions, probe: ProbeOptions) -> tuple[LoadedOptions, list[str]]:
    """Return the options with what the probe leaves out taken back, and a line for each thing that was.

    Raises:
        OptionError: the run starts from a LoRA file, trains no block at all, or has no learning rate to try.
    """
    options, network = loaded.options, loaded.options.network
    if network.network_weights is not None:
        raise OptionError(
            "network_weights: probe starts every trial from the base model with a LoRA of zero, and would tell nothing "
            "about a run that starts from a file. Merge the file into the base model first, or leave it out "
            '(--network_weights "" takes back what a configuration file says).'
        )
    if network.network_train_text_encoder_only:
        raise OptionError("network_train_text_encoder_only: no block would be trained, so there is nothing to probe.")
    info = resolve_optimizer(options.optimizer.optimizer_type)[1]
    if info.estimates_rate and probe.probe_lr is None:
        raise OptionError(
            f"optimizer_type {options.optimizer.optimizer_type} finds its own step size, so its learning rate is none "
            "for the trial updates, which use Adam. Give --probe_lr, such as 1e-4."
        )
    notes = _left_out(options)
    usual = NetworkOptions()
    without = replace(
        network,
        network_train_unet_only=True,
        **{name: getattr(usual, name) for name in (*WEIGHTS_BY_BLOCK, *DROPOUTS)},
    )
    return replace(loaded, options=replace(options, network=without)), notes


def _left_out(options: TrainOptions) -> list[str]:
    network = options.network
    notes = []
    weighed = [name for name in WEIGHTS_BY_BLOCK if getattr(network, name)]
    if weighed:
        notes.append(f"{', '.join(weighed)}: not used here; every block that can have modules is measured.")
    dropped = [name for name in DROPOUTS if getattr(network, name)]
    if dropped:
        notes.append(f"{', '.join(dropped)}: not used here; measurements are made without dropout.")
    if not network.network_train_unet_only:
        notes.append("The text encoder is not measured; it stays as it is.")
    return notes
