"""Which modules of a model get a LoRA, and with which rank: planned before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from maulstick.adapters.block_ranks import BlockRank
from maulstick.errors import ModelError, OptionError

# Linear and Conv2d modules are adapted when they lie inside a module of one of these classes, as in sd-scripts.
UNET_CONTAINERS = frozenset({"Transformer2DModel", "JointTransformerBlock"})
UNET_CONV_CONTAINERS = UNET_CONTAINERS | {"ResnetBlock2D", "Downsample2D", "Upsample2D"}
TEXT_ENCODER_CONTAINERS = frozenset(
    {"CLIPAttention", "CLIPSdpaAttention", "CLIPMLP", "T5Attention", "T5DenseGatedActDense"}
)


class FoundModule(NamedTuple):
    """A module that can be adapted: where it is, what it is, and the class of the container that made it a target."""

    path: str
    kind: str
    container: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LoraTarget:
    """One planned adapter module.

    ``component`` is the part of the pipeline (``unet``, ``text_encoder``), ``path`` the module's path in it, ``kind``
    is ``linear``, ``conv1x1`` or ``conv3x3`` (any KxK), ``shape`` the base weight's shape, ``block`` the index in the
    family's block map, ``None`` outside every block. The adapter acts with strength ``alpha / dim``.
    """

    component: str
    path: str
    kind: str
    container: str
    shape: tuple[int, ...]
    dim: int
    alpha: float
    block: int | None

    @property
    def parameter_count(self) -> int:
        """Number of trained values: the down factor has ``dim`` rows, the up factor ``dim`` columns."""
        return self.dim * (self.shape[0] + math.prod(self.shape[1:]))


def _kind_of(module: nn.Module) -> str | None:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Conv2d):
        return "conv" + "x".join(str(size) for size in module.kernel_size)
    return None


def _weight_shape(module: nn.Module) -> tuple[int, ...]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return tuple(weight.shape)


def _without_adapter(module: nn.Module) -> nn.Module:
    """The module itself, or what an adapter that is already there wraps."""
    base = getattr(module, "base_layer", None)
    return base if isinstance(base, nn.Module) else module


def find_targets(root: nn.Module, containers: frozenset[str]) -> list[FoundModule]:
    """List every Linear and Conv2d below a module whose class is named in ``containers``, in ``named_modules`` order.

    Modules that already carry an adapter are listed by their own path, never by the parts of the adapter. Nothing is
    changed, neither in ``root`` nor anywhere else.
    """
    found: list[FoundModule] = []
    seen: set[int] = set()

    def visit(module: nn.Module, path: str, container: str | None) -> None:
        if id(module) in seen:  # a module that is shared answers under its first path, as in named_modules
            return
        seen.add(id(module))
        bare = _without_adapter(module)
        kind = _kind_of(bare)
        if kind is not None:
            if container is not None:
                found.append(FoundModule(path, kind, container, _weight_shape(bare)))
            return
        name = type(bare).__name__
        inside = name if name in containers else container
        for child_name, child in bare.named_children():
            visit(child, f"{path}.{child_name}" if path else child_name, inside)

    visit(root, "", None)
    return found


def _containers_for(component: str, *, with_conv: bool) -> frozenset[str]:
    if component.startswith("text_encoder"):
        return TEXT_ENCODER_CONTAINERS
    return UNET_CONV_CONTAINERS if with_conv else UNET_CONTAINERS


def _found_or_refuse(root: nn.Module, component: str, *, with_conv: bool) -> list[FoundModule]:
    containers = _containers_for(component, with_conv=with_conv)
    found = find_targets(root, containers)
    if not found:
        raise ModelError(
            f"The {component} ({type(root).__name__}) holds no module a LoRA can be attached to: expected Linear or "
            f"Conv2d modules inside {', '.join(sorted(containers))}. Is this a model of a supported family?"
        )
    return found


def _checked_rank(name: str, dim: int, alpha: float) -> tuple[int, float]:
    if dim < 1:
        raise OptionError(f"{name}_dim is {dim}, but a rank is a whole number of at least 1.")
    if alpha == 0:  # as in sd-scripts: alpha 0 stands for the rank, strength 1
        return dim, float(dim)
    if not math.isfinite(alpha) or alpha < 0:
        raise OptionError(f"{name}_alpha is {alpha}, but it must be a positive number (strength is alpha / dim).")
    return dim, float(alpha)


def plan_lora(
    root: nn.Module,
    *,
    component: str,
    network_dim: int,
    network_alpha: float = 1.0,
    conv_dim: int | None = None,
    conv_alpha: float | None = None,
    block_of: Callable[[str], int | None] | None = None,
    block_ranks: Mapping[int, BlockRank] | None = None,
) -> list[LoraTarget]:
    """Choose the modules of ``root`` to adapt, with rank and alpha, as sd-scripts does.

    Linear modules and 1x1 convolutions get ``network_dim``; larger convolutions get ``conv_dim``, or no adapter when it
    is ``None``. With ``conv_dim`` the residual blocks and samplers become targets too, so that their Linear and 1x1
    modules get ``network_dim``. ``conv_alpha`` is 1 where it is not given; an alpha of 0 means the rank (strength 1).
    ``block_of`` maps a path to its block index (none for text encoders). ``block_ranks`` replaces these ranks for the
    blocks it names; dim 0 leaves the modules out.

    Raises ``OptionError`` for a rank or alpha out of range, ``ModelError`` when ``root`` has no module to adapt, or a
    module outside every block while ranks are given per block.
    """
    linear = _checked_rank("network", network_dim, network_alpha)
    conv = None if conv_dim is None else _checked_rank("conv", conv_dim, 1.0 if conv_alpha is None else conv_alpha)
    ranks = block_ranks or {}
    with_conv = conv is not None or any(rank.conv_dim > 0 for rank in ranks.values())
    targets: list[LoraTarget] = []
    for module in _found_or_refuse(root, component, with_conv=with_conv):
        is_large_conv = module.kind not in ("linear", "conv1x1")
        block = block_of(module.path) if block_of is not None else None
        if ranks and block is None:
            raise ModelError(
                f"{component} module '{module.path}' is in no block of this family, so ranks per block cannot say what "
                "it gets. Leave the per-block ranks out for this model."
            )
        rank = conv if is_large_conv else linear
        if block is not None and block in ranks:
            rank = _rank_in_block(ranks[block], is_large_conv=is_large_conv)
        if rank is not None:
            targets.append(LoraTarget(component, *module, dim=rank[0], alpha=rank[1], block=block))
    return targets


def _rank_in_block(rank: BlockRank, *, is_large_conv: bool) -> tuple[int, float] | None:
    name, dim, alpha = ("conv", rank.conv_dim, rank.conv_alpha) if is_large_conv else ("block", rank.dim, rank.alpha)
    return None if dim == 0 else _checked_rank(name, dim, alpha)


def plan_from_ranks(
    root: nn.Module,
    ranks: Mapping[str, tuple[int, float]],
    *,
    component: str,
    block_of: Callable[[str], int | None] | None = None,
) -> list[LoraTarget]:
    """Plan exactly the modules in ``ranks`` (path -> (dim, alpha)), as they stand in an existing LoRA file.

    Raises ``ModelError`` naming the paths that ``root`` has no such module for.
    """
    found = {module.path: module for module in _found_or_refuse(root, component, with_conv=True)}
    refuse_unknown_paths(ranks, found, component)
    return [
        LoraTarget(component, *module, *_checked_rank("network", *ranks[path]), block_of(path) if block_of else None)
        for path, module in found.items()
        if path in ranks
    ]


def refuse_unknown_paths(asked: Iterable[str], known: Iterable[str], component: str) -> None:
    """Raise ``ModelError`` when ``asked`` names modules that are not in ``known``."""
    known_set = set(known)
    unknown = [path for path in asked if path not in known_set]
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise ModelError(
            f"The LoRA holds {len(unknown)} modules that this {component} does not have ({shown}). It was made for "
            "another model family or with another choice of modules."
        )
