"""LoRA on a frozen model: attach it, reach its parameters, read and write its state, bound its norm.

Everything works on one component (the UNet, a text encoder) and names modules by their path in it.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from maulstick.adapters.factors import LoraWeights, product_norm
from maulstick.adapters.lean import LoraDropout, lean_or_none
from maulstick.adapters.targets import LoraTarget, refuse_unknown_paths
from maulstick.errors import ModelError, OptionError

DEFAULT_ADAPTER = "default"


class LoraParameter(NamedTuple):
    """One trained tensor: ``role`` is ``down`` or ``up``, ``path`` the module it adapts, ``name`` both together."""

    name: str
    parameter: nn.Parameter
    path: str
    role: Literal["down", "up"]


class LoadReport(NamedTuple):
    """Paths of the modules whose weights were loaded, and of those the state had nothing for."""

    loaded: list[str]
    missing: list[str]


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
    if not targets:
        raise OptionError("The LoRA has no module at all: every block was given rank 0 or learning rate 0.")
    if adapter_name in getattr(root, "peft_config", {}):
        raise OptionError(f"The model already carries an adapter named '{adapter_name}'; give this one another name.")
    config = _peft_config(targets)
    with warnings.catch_warnings():
        # Several adapters on one model are meant.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        # The factors are made below, in fp32 and from our own generators; peft need not fill them.
        inject_adapter_in_model(config, root, adapter_name, low_cpu_mem_usage=True)
    modules = lora_modules(root, adapter_name)
    _refuse_unplanned(modules, targets, adapter_name)
    active_dropout = None if dropout is None or dropout.is_off else dropout
    for target in targets:
        module = modules[target.path]
        _initialise(module, target, adapter_name, seed)
        if active_dropout is not None:
            _set_dropout(module, target, adapter_name, active_dropout)
    return modules


def _peft_config(targets: Sequence[LoraTarget]) -> LoraConfig:
    """Say in peft's terms which modules get which rank: one pattern per distinct rank and per distinct alpha."""
    dims = Counter(target.dim for target in targets)
    alphas = Counter(target.alpha for target in targets)
    common_dim, common_alpha = dims.most_common(1)[0][0], alphas.most_common(1)[0][0]
    config = LoraConfig(
        r=common_dim,
        lora_alpha=common_alpha,
        target_modules=_path_pattern([target.path for target in targets]),
        # "^" forbids peft's own optional prefix, so that a pattern means these paths and no longer ones.
        rank_pattern={
            "^" + _path_pattern([target.path for target in targets if target.dim == dim]): dim
            for dim in dims
            if dim != common_dim
        },
        alpha_pattern={
            "^" + _path_pattern([target.path for target in targets if target.alpha == alpha]): alpha
            for alpha in alphas
            if alpha != common_alpha
        },
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,  # `_initialise` does it
    )
    config._register_custom_module({nn.Linear: lean_or_none, nn.Conv2d: lean_or_none})
    return config


def _path_pattern(paths: Iterable[str]) -> str:
    """One regular expression for exactly these dotted paths, factored by path component.

    peft matches every pattern against every module, and Python keeps 512 compiled ones: one pattern per module took a
    minute on SDXL. Factoring keeps the matching itself linear in the path's length.
    """
    tree: dict[str, Any] = {}
    for path in paths:
        node = tree
        for part in path.split("."):
            node = node.setdefault(part, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        ends_here = "" in node
        choices = []
        for part, below in node.items():
            if part:
                rest = expression(below)
                choices.append(re.escape(part) + (rest if rest.startswith("(?:\\.") or not rest else f"\\.{rest}"))
        if not choices:
            return ""
        joined = choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"
        return f"(?:\\.{joined})?" if ends_here else joined

    return expression(tree)


def _refuse_unplanned(modules: Mapping[str, nn.Module], targets: Sequence[LoraTarget], adapter_name: str) -> None:
    planned = {target.path: target for target in targets}
    wrong = [f"'{path}' was not planned" for path in modules.keys() - planned.keys()]
    for path, target in planned.items():
        module: Any = modules.get(path)
        if module is None:
            wrong.append(f"'{path}' got no adapter")
        elif (module.r[adapter_name], module.lora_alpha[adapter_name]) != (target.dim, target.alpha):
            got = f"rank {module.r[adapter_name]}, alpha {module.lora_alpha[adapter_name]}"
            wrong.append(f"'{path}' got {got} instead of rank {target.dim}, alpha {target.alpha}")
    if wrong:
        raise ModelError(
            f"The LoRA could not be attached as planned ({len(wrong)} of {len(planned)} modules differ): "
            f"{'; '.join(sorted(wrong)[:3])}. This points to an untested version of peft."
        )


def _initialise(module: Any, target: LoraTarget, adapter_name: str, seed: int) -> None:
    down, up = module.lora_A[adapter_name], module.lora_B[adapter_name]
    device = module.get_base_layer().weight.device
    # The path differs between versions of transformers by this part only.
    path = target.path.removeprefix("text_model.")
    digest = hashlib.sha256(f"{seed}\n{target.component}\n{path}".encode()).digest()
    start = torch.empty(down.weight.shape, dtype=torch.float32, device="cpu" if device.type != "meta" else "meta")
    bound = 1.0 / math.sqrt(math.prod(start.shape[1:]))
    start.uniform_(-bound, bound, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1))
    down.weight = nn.Parameter(start.to(device))
    up.weight = nn.Parameter(torch.zeros(up.weight.shape, dtype=torch.float32, device=device))


def _set_dropout(module: Any, target: LoraTarget, adapter_name: str, dropout: LoraDropout) -> None:
    if not hasattr(module, "lora_noise"):
        raise OptionError(
            f"network_dropout, rank_dropout and module_dropout do not work on '{target.path}', whose base weight is "
            f"{type(module.get_base_layer()).__name__}; leave them at 0 for a quantised base model."
        )
    module.lora_noise[adapter_name] = dropout


# ---------------------------------------------------------------------------------------------------------------------
# Reaching


def lora_modules(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> dict[str, nn.Module]:
    """Path -> LoRA module for every module of ``root`` that carries the adapter, in module order."""
    return {
        path: module
        for path, module in root.named_modules()
        if isinstance(module, LoraLayer) and adapter_name in module.lora_A
    }


def lora_parameters(root: nn.Module, adapter_name: str = DEFAULT_ADAPTER) -> list[LoraParameter]:
    """The trained tensors, down before up for each module, in module order."""
    found: list[LoraParameter] = []
    module: Any
    for path, module in lora_modules(root, adapter_name).items():
        found.append(LoraParameter(f"{path}.lora_down.weight", module.lora_A[adapter_name].weight, path, "down"))
        found.append(LoraParameter(f"{path}.lora_up.weight", module.lora_B[adapter_name].weight, path, "up"))
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
    state: dict[str, LoraWeights] = {}
    module: Any
    for path, module in lora_modules(root, adapter_name).items():
        down, up = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
        state[path] = LoraWeights(down.detach(), up.detach(), float(module.lora_alpha[adapter_name]))
    return state


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
    factors: list[tuple[nn.Parameter, nn.Parameter]] = []
    norms: list[Tensor] = []
    module: Any
    for root in roots:
        for module in lora_modules(root, adapter_name).values():
            down, up = module.lora_A[adapter_name].weight, module.lora_B[adapter_name].weight
            factors.append((down, up))
            norms.append(product_norm(down, up, module.lora_alpha[adapter_name] / module.r[adapter_name]))
    if not norms:
        raise ModelError(f"No module carries an adapter named '{adapter_name}', so there are no norms to bound.")
    values: list[float] = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()
    scaled = 0
    for index, (down, up) in enumerate(factors):
        norm = values[index]
        if norm > max_norm and math.isfinite(norm):
            root_of_ratio = math.sqrt(max_norm / norm)
            down.mul_(root_of_ratio)
            up.mul_(root_of_ratio)
            values[index] = max_norm
            scaled += 1
    return MaxNormResult(scaled, sum(values) / len(values), max(values))
