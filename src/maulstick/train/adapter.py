"""The adapter of a run: put into the networks that train, its parameters grouped by learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from maulstick.adapters.injection import AdapterParameter
from maulstick.adapters.kinds import AdapterKind, adapter_kind
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.targets import LoraTarget
from maulstick.train.optim import RateGroup
from maulstick.train.prepare import Prepared
from maulstick.train.rates import ComponentRates


@dataclass(frozen=True)
class AttachedAdapter:
    """What trains.

    Attributes:
        kind: the kind of adapter.
        networks: component -> network that carries it.
        groups: parameters by learning rate: one group per component, or one per text encoder and block; under LoRA+
            two, the second for the up factors.
        named_parameters: every trained parameter, named by component, module and factor.
        notes: lines for the user.
    """

    kind: AdapterKind
    networks: dict[str, nn.Module]
    groups: list[RateGroup]
    named_parameters: list[tuple[str, nn.Parameter]]
    notes: list[str]


def attach_adapter(prepared: Prepared) -> AttachedAdapter:
    """Freeze the networks, put in the planned modules, and load ``network_weights`` where given."""
    network = prepared.options.network
    dropout = LoraDropout(
        neuron=network.network_dropout or 0.0, rank=network.rank_dropout or 0.0, module=network.module_dropout or 0.0
    )
    family = prepared.family
    kind = adapter_kind(network)
    adapter = AttachedAdapter(kind, {}, [], [], [])
    for name, targets in prepared.targets.items():
        root = family.denoiser if name == family.denoiser_naming.component else family.text_encoders[name]
        kind.inject(root, targets, dropout=dropout, seed=prepared.seed)
        if name in prepared.start_weights:
            report = kind.load(root, prepared.start_weights[name], component=name, partial=True)
            if report.missing:
                adapter.notes.append(
                    f"network_weights has nothing for {len(report.missing)} modules of the {name}; they start "
                    "as untrained ones"
                )
        parameters = kind.parameters(root)
        adapter.networks[name] = root
        adapter.named_parameters.extend((f"{name}.{p.name}", p.parameter) for p in parameters)
        adapter.groups.extend(_rate_groups(prepared.rates[name], targets, parameters))
    return adapter


def _rate_groups(
    rates: ComponentRates, targets: Sequence[LoraTarget], parameters: Sequence[AdapterParameter]
) -> list[RateGroup]:
    by_path = {target.path: target for target in targets}
    members: dict[tuple[str, float], list[nn.Parameter]] = {}
    for parameter in parameters:
        group = rates.group_of(by_path[parameter.path], parameter.role)
        members.setdefault(group, []).append(parameter.parameter)
    return [RateGroup(name, rate, found) for (name, rate), found in members.items()]


def bound_norms(adapter: AttachedAdapter, limit: float | None) -> dict[str, float]:
    """Apply ``scale_weight_norms`` after an update; return the values sd-scripts logs with it."""
    if limit is None:
        return {}
    result = adapter.kind.bound_norms(list(adapter.networks.values()), limit)
    return {
        "max_norm/keys_scaled": float(result.keys_scaled),
        "norm/avg_key_norm": result.mean_norm,
        "max_norm/max_key_norm": result.max_norm,
    }
