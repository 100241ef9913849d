"""Which modules get LoRA, with which rank and at which learning rate: what the options mean for a loaded model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from maulstick.adapters.block_ranks import parse_block_ranks
from maulstick.adapters.block_selection import parse_block_selection
from maulstick.adapters.block_table import read_block_table
from maulstick.adapters.block_weights import (
    BlockLayout,
    BlockWeights,
    check_weights_against_modules,
    read_part_weights,
)
from maulstick.adapters.files import assign_modules
from maulstick.adapters.key_names import KeyNames
from maulstick.adapters.kinds import AdapterKind, adapter_kind
from maulstick.adapters.module_kinds import AdapterModule
from maulstick.adapters.targets import (
    TEXT_ENCODER_CONTAINERS,
    UNET_CONV_CONTAINERS,
    LoraTarget,
    find_targets,
    plan_from_ranks,
    plan_lora,
)
from maulstick.errors import OptionError
from maulstick.families.base import Family
from maulstick.options.schema import NetworkOptions, TrainOptions
from maulstick.train.rates import ComponentRates, component_rates, up_ratio

Targets = dict[str, list[LoraTarget]]
StartWeights = dict[str, dict[str, AdapterModule]]
Rates = dict[str, ComponentRates]


class Choice(NamedTuple):
    """What is trained, per component: modules, weights of ``network_weights`` to start from, learning rates."""

    targets: Targets
    start_weights: StartWeights
    rates: Rates


def log_names_of(family: Family) -> dict[str, str]:
    """Return component name -> name in trackers."""
    names = {component: naming.log_name for component, naming in family.text_encoder_naming.items()}
    return {**names, family.denoiser_naming.component: family.denoiser_naming.log_name}


def choose_targets(family: Family, options: TrainOptions) -> Choice:
    """Choose the modules that get LoRA.

    A component whose learning rate is 0, and a block whose weight is 0, is not trained and is not in the file.

    Raises:
        OptionError: numbers by block are unusable, or nothing is left to train.
    """
    network, denoiser = options.network, family.denoiser_naming.component
    _refuse_other_network(network, family)
    family.prepare_for_adapters()
    layout = family.block_layout()
    chosen_blocks = _chosen_blocks(network, layout)
    weights = None if network.network_train_text_encoder_only else read_block_weights(network, layout)
    rates = _rates(family, options, weights)
    if chosen_blocks is not None and not chosen_blocks:
        rates.pop(denoiser, None)
    if not rates:
        raise OptionError(
            "Nothing would be trained: unet_lr and text_encoder_lr (or learning_rate) leave no network a rate above 0"
            f"{'' if chosen_blocks is None else ', and train_block_indices = none leaves out the denoiser'}."
        )
    networks = {name: family.denoiser if name == denoiser else family.text_encoders[name] for name in rates}
    if denoiser in networks:
        _refuse_conv_without_convolutions(network, family)
    kind = adapter_kind(network)
    start_weights = _read_start_weights(network.network_weights, networks, family, kind)
    targets: Targets = {}
    for name, root in networks.items():
        if network.dim_from_weights:
            targets[name] = _targets_of_file(root, start_weights.get(name, {}), name, family)
        else:
            targets[name] = _planned_targets(root, name, family, network, layout)
        targets[name] = [kind.fitted(target) for target in targets[name]]
    _refuse_other_ranks(targets, start_weights, network.network_weights, kind)
    if chosen_blocks is not None and denoiser in targets:
        _leave_out_unchosen(denoiser, chosen_blocks, targets, start_weights)
    if weights is not None and targets.get(denoiser):
        _leave_out_blocks(denoiser, weights, layout, Choice(targets, start_weights, rates))
    targets = {name: chosen for name, chosen in targets.items() if chosen}
    return Choice(targets, start_weights, {name: rates[name] for name in targets})


def read_block_weights(network: NetworkOptions, layout: BlockLayout) -> BlockWeights | None:
    """Read whichever form of weights by block was given; None where none was."""
    if network.block_lr:
        return read_block_table(layout, network.block_lr, network.block_lr_zero_threshold)
    by_part = {"down": network.down_lr_weight, "mid": network.mid_lr_weight, "up": network.up_lr_weight}
    return read_part_weights(layout, by_part, network.block_lr_zero_threshold)


def _refuse_other_network(network: NetworkOptions, family: Family) -> None:
    if network.network_module not in ("networks.lora", family.network_module):
        raise OptionError(
            f"network_module = {network.network_module}, but the model is {family.name}. Leave network_module out: it "
            "follows from the model."
        )


def _chosen_blocks(network: NetworkOptions, layout: BlockLayout) -> frozenset[int] | None:
    """Return the blocks of ``train_block_indices``; None for all."""
    if network.train_block_indices is None:
        return None
    return parse_block_selection(network.train_block_indices, layout)


def _refuse_conv_without_convolutions(network: NetworkOptions, family: Family) -> None:
    given = next((name for name in ("conv_dim", "conv_block_dims") if getattr(network, name) is not None), None)
    found = find_targets(family.denoiser, UNET_CONV_CONTAINERS) if given else []
    if given and not any(module.kind.startswith("conv") for module in found):
        raise OptionError(f"{given} is given, but {family.name} has no convolutions to train. Leave it out.")


def _leave_out_unchosen(denoiser: str, chosen: frozenset[int], targets: Targets, start_weights: StartWeights) -> None:
    """Take the modules of other blocks, and of none, out of what is trained."""
    targets[denoiser] = [target for target in targets[denoiser] if target.block in chosen]
    kept = {target.path for target in targets[denoiser]}
    if denoiser in start_weights:
        start_weights[denoiser] = {path: w for path, w in start_weights[denoiser].items() if path in kept}


def _rates(family: Family, options: TrainOptions, weights: BlockWeights | None) -> Rates:
    network, names = options.network, log_names_of(family)
    denoiser_rate, text_rates = component_rates(options.optimizer, list(family.text_encoder_naming))
    text_weight = 1.0 if weights is None else weights.text_encoder
    rates = {
        name: ComponentRates(names[name], rate * text_weight, up_ratio=up_ratio(network, text_encoder=True))
        for name, rate in text_rates.items()
        if rate * text_weight and not network.network_train_unet_only
    }
    if denoiser_rate and not network.network_train_text_encoder_only:
        name = family.denoiser_naming.component
        rates[name] = ComponentRates(
            names[name],
            denoiser_rate,
            None if weights is None else weights.values,
            up_ratio(network, text_encoder=False),
        )
    return rates


def _targets_of_file(
    root: nn.Module, start_weights: Mapping[str, AdapterModule], name: str, family: Family
) -> list[LoraTarget]:
    ranks = {
        path: (weights.rank, float(weights.rank if weights.alpha is None else weights.alpha))
        for path, weights in start_weights.items()
    }
    return plan_from_ranks(root, ranks, component=name, block_of=_block_of(name, family)) if ranks else []


def _planned_targets(
    root: nn.Module, name: str, family: Family, network: NetworkOptions, layout: BlockLayout
) -> list[LoraTarget]:
    block_ranks = None
    if name == family.denoiser_naming.component:
        block_ranks = parse_block_ranks(
            layout,
            block_dims=network.block_dims,
            block_alphas=network.block_alphas,
            conv_block_dims=network.conv_block_dims,
            conv_block_alphas=network.conv_block_alphas,
            network_dim=network.network_dim,
            network_alpha=network.network_alpha,
            conv_dim=network.conv_dim,
            conv_alpha=network.conv_alpha,
        )
    return plan_lora(
        root,
        component=name,
        network_dim=network.network_dim,
        network_alpha=network.network_alpha,
        conv_dim=network.conv_dim,
        conv_alpha=network.conv_alpha,
        block_of=_block_of(name, family),
        block_ranks=block_ranks,
    )


def _block_of(name: str, family: Family) -> Callable[[str], int | None] | None:
    return family.block_index if name == family.denoiser_naming.component else None


def _leave_out_blocks(denoiser: str, weights: BlockWeights, layout: BlockLayout, choice: Choice) -> None:
    """Take the modules in blocks of weight 0 out of the choice, and note what the user should know about them."""
    targets, start_weights, rates = choice
    planned = targets[denoiser]
    counts = Counter(target.block for target in planned if target.block is not None)
    notes = check_weights_against_modules(weights, counts, layout)
    kept = [target for target in planned if rates[denoiser].weight_of(target)]
    if not kept:
        raise OptionError(
            f"Every block with modules of the {denoiser} has weight 0, so nothing of it would be trained. Give a block "
            "a weight above 0, or use network_train_text_encoder_only."
        )
    if len(kept) < len(planned) and any(targets[name] for name in targets if name != denoiser):
        notes.append(
            "The text encoder is trained too, so the backward pass runs through blocks of weight 0 all the same; "
            "network_train_unet_only ends it at the first block that trains."
        )
    if denoiser in start_weights:
        dropped = {target.path for target in planned} - {target.path for target in kept}
        lost = [path for path in start_weights[denoiser] if path in dropped]
        if lost:
            notes.append(
                f"network_weights: {len(lost)} modules are in blocks of weight 0; they are not trained, and not in the "
                "new file."
            )
        for path in lost:
            del start_weights[denoiser][path]
    targets[denoiser] = kept
    rates[denoiser] = replace(rates[denoiser], notes=tuple(notes))


def _read_start_weights(
    path: Path | None, networks: Mapping[str, nn.Module], family: Family, kind: AdapterKind
) -> StartWeights:
    if path is None:
        return {}
    file = kind.read_start(path)
    containers = TEXT_ENCODER_CONTAINERS | UNET_CONV_CONTAINERS
    paths = {name: [module.path for module in find_targets(root, containers)] for name, root in networks.items()}
    assigned = assign_modules(file, family.key_names.table(paths), family.name)
    foreign = [name for name in assigned.unmatched if not _belongs_to_untrained(name, networks, family.key_names)]
    if foreign:
        raise OptionError(
            f"network_weights: {path} holds {len(foreign)} modules that this model does not have "
            f"({', '.join(foreign[:3])}). It was made for another model."
        )
    return assigned.components


def _refuse_other_ranks(targets: Targets, start_weights: StartWeights, path: Path | None, kind: AdapterKind) -> None:
    """Refuse start weights of other ranks now, not after minutes of caching."""
    for name, planned in targets.items():
        for target in planned:
            weights = start_weights.get(name, {}).get(target.path)
            misfit = None if weights is None else kind.misfit(target, weights)
            if misfit is not None:
                raise OptionError(
                    f"network_weights: the module of {path} for '{target.path}' of the {name} {misfit}. {kind.remedy}"
                )


def _belongs_to_untrained(name: str, networks: Mapping[str, nn.Module], key_names: KeyNames) -> bool:
    """A file for UNet and text encoder may start a run that trains one of them."""
    location = key_names.locate(name)
    return location is not None and location.component not in networks
