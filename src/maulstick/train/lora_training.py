"""LoRA and its kin as what a run trains: modules chosen by options, with ranks and learning rates of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maulstick.adapters.adapter_tensors import adapter_tensors
from maulstick.adapters.files import save_lora_file
from maulstick.adapters.injection import AdapterParameter
from maulstick.adapters.key_names import KeyNames
from maulstick.adapters.kinds import AdapterKind, adapter_kind
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.targets import LoraTarget
from maulstick.families.base import Family
from maulstick.options.schema import TrainOptions
from maulstick.train.choice import Choice, choose_targets
from maulstick.train.optim import RateGroup
from maulstick.train.plan import ComponentPlan, component_plan, modules_per_block
from maulstick.train.rates import ComponentRates
from maulstick.train.trains import Attached, Trains


@dataclass
class AttachedLora(Attached):
    """LoRA in the networks.

    Groups are one per component, or one per text encoder and block; under LoRA+ two, the second for the up factors.

    Attributes:
        kind: the kind of adapter.
        key_names: how its modules are called in files.
        networks: component -> network that carries it.
        max_norm: ``scale_weight_norms``.
    """

    kind: AdapterKind = field(kw_only=True)
    key_names: KeyNames = field(kw_only=True)
    networks: dict[str, nn.Module] = field(default_factory=dict)
    max_norm: float | None = None

    def save(self, path: Path, dtype: torch.dtype, metadata: Mapping[str, str]) -> None:
        states = {name: self.kind.state(network) for name, network in self.networks.items()}
        save_lora_file(path, adapter_tensors(states, self.key_names, dtype), metadata)

    def after_update(self) -> dict[str, float]:
        """Apply ``scale_weight_norms``; return the values sd-scripts logs with it."""
        if self.max_norm is None:
            return {}
        result = self.kind.bound_norms(list(self.networks.values()), self.max_norm)
        return {
            "max_norm/keys_scaled": float(result.keys_scaled),
            "norm/avg_key_norm": result.mean_norm,
            "max_norm/max_key_norm": result.max_norm,
        }


class LoraTraining(Trains):
    """The modules that get LoRA, DoRA, LoHa, LoKr or OFT."""

    def __init__(self, family: Family, options: TrainOptions) -> None:
        """Choose modules and rates.

        Raises:
            OptionError: numbers by block are unusable, a file to start from does not fit, or nothing would be trained.
        """
        self.family, self.options = family, options
        self.kind = adapter_kind(options.network)
        self.choice: Choice = choose_targets(family, options)
        self.targets, self.rates = self.choice.targets, self.choice.rates
        self.notes = [note for part in self.rates.values() for note in part.notes]

    def components(self) -> list[ComponentPlan]:
        return [component_plan(self.rates[name], chosen, self.kind) for name, chosen in self.targets.items()]

    def modules_per_block(self) -> dict[int, int]:
        denoiser = self.family.denoiser_naming.component
        return modules_per_block(
            [target.block for target in self.targets.get(denoiser, [])], len(self.family.block_names())
        )

    @property
    def block_weights(self) -> Sequence[float] | None:
        denoiser = self.family.denoiser_naming.component
        return self.rates[denoiser].block_weights if denoiser in self.rates else None

    def attach(self, family: Family, seed: int) -> AttachedLora:
        network = self.options.network
        dropout = LoraDropout(
            neuron=network.network_dropout or 0.0,
            rank=network.rank_dropout or 0.0,
            module=network.module_dropout or 0.0,
        )
        attached = AttachedLora(kind=self.kind, key_names=family.key_names, max_norm=network.scale_weight_norms)
        for name, targets in self.targets.items():
            root = family.denoiser if name == family.denoiser_naming.component else family.text_encoders[name]
            self.kind.inject(root, targets, dropout=dropout, seed=seed)
            if name in self.choice.start_weights:
                report = self.kind.load(root, self.choice.start_weights[name], component=name, partial=True)
                if report.missing:
                    attached.notes.append(
                        f"network_weights has nothing for {len(report.missing)} modules of the {name}; they start "
                        "as untrained ones"
                    )
            parameters = self.kind.parameters(root)
            attached.networks[name] = root
            attached.named_parameters.extend((f"{name}.{p.name}", p.parameter) for p in parameters)
            attached.groups.extend(_rate_groups(self.rates[name], targets, parameters))
        return attached

    def network_facts(self) -> dict[str, Any]:
        network, components = self.options.network, self.components()
        given = dict(argument.split("=", 1) for argument in network.network_args)
        return {
            "network_dim": _common([component.rank for component in components]),
            "network_alpha": _common([component.alpha for component in components]),
            "network_module": (self.family.network_module if self.kind.algorithm is None else self.kind.network_module),
            "network_args": {**self.kind.metadata(), **given} or None,
            "network_dropout": network.network_dropout,
        }


def _rate_groups(
    rates: ComponentRates, targets: Sequence[LoraTarget], parameters: Sequence[AdapterParameter]
) -> list[RateGroup]:
    by_path = {target.path: target for target in targets}
    members: dict[tuple[str, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        group = rates.group_of(by_path[parameter.path], parameter.role)
        members.setdefault(group, []).append(parameter.parameter)
    return [RateGroup(name, rate, found) for (name, rate), found in members.items()]


def _common(values: Sequence[int | float | None]) -> Any:
    """Return the value that all components share, or what sd-scripts' tools write for mixed ones."""
    return values[0] if values and values[0] is not None and len(set(values)) == 1 else "Dynamic"
