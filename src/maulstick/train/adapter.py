"""The adapter of a run: LoRA put into the networks that train, its parameters grouped by learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.lora import apply_max_norm, inject_lora, load_lora_state, lora_parameters
from maulstick.train.optim import RateGroup
from maulstick.train.prepare import Prepared, log_names_of


@dataclass(frozen=True)
class AttachedAdapter:
    """What trains.

    Attributes:
        networks: component -> network that carries LoRA.
        groups: one group per component, with its learning rate.
        named_parameters: every trained parameter, named by component, module and factor.
        notes: lines for the user.
    """

    networks: dict[str, nn.Module]
    groups: list[RateGroup]
    named_parameters: list[tuple[str, nn.Parameter]]
    notes: list[str]


def attach_adapter(prepared: Prepared) -> AttachedAdapter:
    """Freeze the networks, put in the planned LoRA modules, and load ``network_weights`` where given."""
    network = prepared.options.network
    dropout = LoraDropout(
        neuron=network.network_dropout or 0.0, rank=network.rank_dropout or 0.0, module=network.module_dropout or 0.0
    )
    family, log_names = prepared.family, log_names_of(prepared.family)
    adapter = AttachedAdapter({}, [], [], [])
    for name, targets in prepared.targets.items():
        root = family.denoiser if name == family.denoiser_naming.component else family.text_encoders[name]
        inject_lora(root, targets, dropout=dropout, seed=prepared.seed)
        if name in prepared.start_weights:
            report = load_lora_state(root, prepared.start_weights[name], component=name, partial=True)
            if report.missing:
                adapter.notes.append(
                    f"network_weights has nothing for {len(report.missing)} modules of the {name}; they start at zero"
                )
        parameters = lora_parameters(root)
        adapter.networks[name] = root
        adapter.named_parameters.extend((f"{name}.{p.name}", p.parameter) for p in parameters)
        adapter.groups.append(RateGroup(log_names[name], prepared.rates[name], [p.parameter for p in parameters]))
    return adapter


def bound_norms(networks: Mapping[str, nn.Module], limit: float | None) -> dict[str, float]:
    """Apply ``scale_weight_norms`` after an update; return the values sd-scripts logs with it."""
    if limit is None:
        return {}
    result = apply_max_norm(list(networks.values()), limit)
    return {
        "max_norm/keys_scaled": float(result.keys_scaled),
        "norm/avg_key_norm": result.mean_norm,
        "max_norm/max_key_norm": result.max_norm,
    }
