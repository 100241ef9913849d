"""LoRA on a frozen model: attach it, reach its parameters, read and write its state, bound its norm.

Everything works on one component (the UNet, a text encoder) and names modules by their path in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from maulstick.adapters.factors import LoraWeights, product_norm
from maulstick.adapters.injection import (
    DEFAULT_ADAPTER,
    AdapterParameter,
    LoadReport,
    base_weight,
    inject,
    rank_settings,
    refuse_no_targets,
    refuse_unplanned,
    set_dropout,
    start_tensor,
)
from maulstick.adapters.lean import LoraDropout, lean_or_none
from maulstick.adapters.targets import LoraTarget, refuse_unknown_paths
from maulstick.errors import ModelError


class MaxNormResult(NamedTuple):
    """How many modules were scaled down, and the mean and largest norm after that."""

    keys_scaled: int
    mean_norm: float
    max_norm: float


# ---------------------------------------------------------------------------------------------------------------------
# Attaching


def inject_lora(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    *,
    adapter_name: str = DEFAULT_ADAPTER,
    dropout: LoraDropout | None = None,
    seed: int = 0,
) -> dict[str, nn.Module]:
    """Attach a LoRA to exactly the modules in ``targets`` and freeze the rest of ``root``; return path -> LoRA module.

    The factors are fp32 whatever the base is. Down factors start uniform in ±1/sqrt(fan-in) (Kaiming with a = sqrt(5)),
    up factors at zero, so the model computes what it did before. Each module draws from its own generator, made from
    ``seed``, the component and the path: its start does not depend on which other modules are trained, and torch's
    global generator is left as it was. A model on the meta device gets meta factors.

    Raises ``ModelError`` when what was attached is not what was planned.
    """
    attach_factors(root, targets, adapter_name, lean_or_none, dropout=dropout, seed=seed)
    return lora_modules(root, adapter_name)


def add_lora(root: nn.Module, state: Mapping[str, LoraWeights], *, component: str, adapter_name: str) -> None:
    """Attach a LoRA with these factors, whatever modules of ``root`` they are for; the rest stays as it is.

    Raises ``ModelError`` for a path that ``root`` has no module for, and for factors of other sizes.
    """
    modules = dict(root.named_modules())
    refuse_unknown_paths(state, modules, component)
    targets = []
    for path, weights in state.items():
        found: Any = modules[path]
        bare = found.get_base_layer() if isinstance(found, LoraLayer) else found
        kind = "linear" if isinstance(bare, nn.Linear) else "conv"
        alpha = float(weights.rank) if weights.alpha is None else weights.alpha
        targets.append(LoraTarget(component, path, kind, "", tuple(bare.weight.shape), weights.rank, alpha, None))
    inject_lora(root, targets, adapter_name=adapter_name)
    load_lora_state(root, state, adapter_name=adapter_name, component=component)


def attach_factors(
    root: nn.Module,
    targets: Sequence[LoraTarget],
    adapter_name: str,
    layer: Callable[..., nn.Module | None],
    *,
    dropout: LoraDropout | None,
    seed: int,
) -> None:
    """``inject_lora`` with the layers that ``layer`` builds in the place of peft's (see ``lean.lean_or_none``)."""
    refuse_no_targets(root, targets, adapter_name)
    config = _peft_config(targets)
    config._register_custom_module({nn.Linear: layer, nn.Conv2d: layer})
    # The factors are made below, in fp32 and from our own generators; peft need not fill them.
    inject(lambda: inject_adapter_in_model(config, root, adapter_name, low_cpu_mem_usage=True))
    modules: dict[str, Any] = dict(lora_modules(root, adapter_name))
    attached = {path: (module.r[adapter_name], module.lora_alpha[adapter_name]) for path, module in modules.items()}
    refuse_unplanned(attached, targets)
    for target in targets:
        module = modules[target.path]
        _initialise(module, target, adapter_name, seed)
        if dropout is not None and not dropout.is_off:
            set_dropout(module, target, adapter_name, dropout)


def _peft_config(targets: Sequence[LoraTarget]) -> LoraConfig:
    settings = rank_settings(targets)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=settings.target_modules,
        rank_pattern=settings.rank_pattern,
        alpha_pattern=settings.alpha_pattern,
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,  # `_initialise` does it
    )


def _initialise(module: Any, target: LoraTarget, adapter_name: str, seed: int) -> None:
    down, up = module.lora_A[adapter_name], module.lora_B[adapter_name]
    device = base_weight(module).device
    bound = 1.0 / math.sqrt(math.prod(down.weight.shape[1:]))

    def fill(start: Tensor, generator: torch.Generator) -> None:
        start.uniform_(-bound, bound, generator=generator)

    down.weight = start_tensor(down.weight.shape, device, target, seed, fill)
    up.weight = nn.Parameter(torch.zeros(up.weight.shape, dtype=torch.float32, device=device))


# ---------------------------------------------------------------------------------------------------------------------
# Reaching


def lora_modules(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, nn.Module]:
    """Path -> LoRA module for every module of ``root`` that carries the adapter, in module order."""
    return {
        path: module
        for path, module in root.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A
    }


def lora_parameters(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> list[AdapterParameter]:
    """The trained tensors, down before up for each module, in module order."""
    found: list[AdapterParameter] = []
    module: Any
    for path, module in lora_modules(root, adapter_name).items():
        found.append(AdapterParameter(f"{path}.lora_down.weight", module.lora_A[adapter_name].weight, path, "down"))
        found.append(AdapterParameter(f"{path}.lora_up.weight", module.lora_B[adapter_name].weight, path, "up"))
    return found


def set_strengths(root: nn.Module, strengths: Mapping[str, float]) -> None:
    """Let exactly these adapters act, each at its strength (1: as trained), for generating images.

    Adapters that are not named stay attached and do nothing. Nothing is trainable afterwards.
    """
    unknown = strengths.keys() - getattr(root, "peft_config", {}).keys()
    if unknown:
        raise ModelError(f"The model carries no adapter named {', '.join(sorted(unknown))}.")
    for module in root.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(list(strengths), inference_mode=True)
            for name, strength in strengths.items():
                module.set_scale(name, strength)


# ---------------------------------------------------------------------------------------------------------------------
# State


def lora_state(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, LoraWeights]:
    """Path -> factors and alpha. The tensors share memory with the live parameters: clone them to keep them."""
    return {path: lora_weights(module, adapter_name) for path, module in lora_modules(root, adapter_name).items()}


def lora_weights(module: Any, adapter_name: str = DEFAULT_ADAPTER) -> LoraWeights:
    """Factors and alpha of one module; they share memory with the live parameters."""
    down, up = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
    return LoraWeights(down.detach(), up.detach(), float(module.lora_alpha[adapter_name]))


@torch.no_grad()
def load_lora_state(
    root: nn.Module,
    state: Mapping[str, LoraWeights],
    *,
    adapter_name: str = DEFAULT_ADAPTER,
    component: str = "model",
    partial: bool = False,
) -> LoadReport:
    """Copy factors into the adapter in place, so that optimizers keep their parameters.

    Where the state's alpha is another one than the adapter's, the up factor is scaled so that the strength stays that
    of the state. With ``partial`` modules without an entry keep what they have; otherwise they are an error, as are
    entries without a module and other ranks or shapes (``ModelError``). Nothing is changed when an error is raised.
    """
    modules = lora_modules(root, adapter_name)
    refuse_unknown_paths(state, modules, component)
    missing = [path for path in modules if path not in state]
    if missing and not partial:
        raise ModelError(
            f"The state holds no weights for {len(missing)} of {len(modules)} LoRA modules of the {component}, "
            f"'{missing[0]}' among them."
        )
    module: Any
    for path, weights in state.items():
        module = modules[path]
        _refuse_other_rank(module, weights, path, adapter_name, component)
    for path, weights in state.items():
        module = modules[path]
        down, up = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        down.copy_(weights.down.reshape(down.shape))
        up.copy_(weights.up.reshape(up.shape))
        factor = weights.scale * module.r[adapter_name] / module.lora_alpha[adapter_name]
        if factor != 1.0:
            up.mul_(factor)
    return LoadReport(loaded=list(state), missing=missing)


def _refuse_other_rank(module: Any, weights: LoraWeights, path: str, adapter_name: str, component: str) -> None:
    rank = module.r[adapter_name]
    if weights.rank != rank:
        raise ModelError(
            f"The LoRA to start from has rank {weights.rank} in '{path}' of the {component}, but this run plans rank "
            f"{rank}. Set the same network_dim (and conv_dim), or use dim_from_weights."
        )
    for name, given, own in (
        ("down", weights.down, module.lora_A[adapter_name].weight),
        ("up", weights.up, module.lora_B[adapter_name].weight),
    ):
        # 1x1 convolutions are stored with and without their two last dimensions.
        if given.shape[:2] != own.shape[:2] or given.numel() != own.numel():
            raise ModelError(
                f"The {name} factor of '{path}' has shape {tuple(given.shape)}, but this {component} needs "
                f"{tuple(own.shape)}: the LoRA was made for another model family."
            )


# ---------------------------------------------------------------------------------------------------------------------
# Bounding


@torch.no_grad()
def apply_max_norm(roots: Collection[nn.Module], max_norm: float, adapter_name: str = DEFAULT_ADAPTER) -> MaxNormResult:
    """Scale down every module whose ``alpha / r * up @ down`` has a Frobenius norm above ``max_norm`` (in place).

    Both factors are multiplied by the square root of the ratio (sd-scripts' ``scale_weight_norms``). The mean and
    largest norm are those after scaling, over all modules of all ``roots``. One host read per call.
    """
    measured: list[tuple[Tensor, list[nn.Parameter]]] = []
    module: Any
    for root in roots:
        for module in lora_modules(root, adapter_name).values():
            down, up = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
            scale = module.lora_alpha[adapter_name] / module.r[adapter_name]
            measured.append((product_norm(down, up, scale), [down, up]))
    if not measured:
        raise ModelError(f"No module carries an adapter named '{adapter_name}', so there are no norms to bound.")
    return scale_to_norm(measured, max_norm)


@torch.no_grad()
def scale_to_norm(measured: Sequence[tuple[Tensor, Sequence[nn.Parameter]]], max_norm: float) -> MaxNormResult:
    """Scale down, in place, the factors of every module whose norm is above ``max_norm``; one host read for all.

    ``measured`` holds the norm (0-d) of each module's change and its factors, to whose product the change is
    proportional: each is multiplied by the same root of the ratio.
    """
    device = measured[0][0].device
    values: list[float] = torch.stack([norm.to(device) for norm, _ in measured]).tolist()
    scaled = 0
    for index, (_, factors) in enumerate(measured):
        norm = values[index]
        if norm > max_norm and math.isfinite(norm):
            root_of_ratio = (max_norm / norm) ** (1 / len(factors))
            for factor in factors:
                factor.mul_(root_of_ratio)
            values[index] = max_norm
            scaled += 1
    return MaxNormResult(scaled, sum(values) / len(values), max(values))
