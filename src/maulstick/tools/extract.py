"""``maulstick extract``: a LoRA that turns one checkpoint into another, as far as its rank allows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.lora_family import LoraFamily, block_label, block_labels, component_of
from maulstick.errors import ModelError, OptionError, nearest_name_hint
from maulstick.tools.approximation import Approximation, Squares
from maulstick.tools.checkpoint import Checkpoint
from maulstick.tools.low_rank import RankChoice, from_svd, randomised_svd, residual, squared_norm
from maulstick.tools.parallel import map_modules
from maulstick.train.console import QuietConsole, RunConsole

# The modules that a LoRA usually has: all inside transformers; with convolutions also residual blocks and samplers.
_IN_TRANSFORMERS = re.compile(r"lora_unet_(.*_attentions|joint_blocks)_\d+_")
_IN_RESIDUAL_BLOCKS = re.compile(r"lora_unet_.*_(resnets_\d+_|(down|up)samplers_0_)")
_TRAINED_PARTS = ("model.diffusion_model.", "cond_stage_model.", "conditioner.", "text_encoders.")
_IN_TEXT_ENCODERS = re.compile(r"lora_te\d?_.*_(self_attn_(q|k|v|out)_proj|mlp_fc[12])$")


@dataclass(frozen=True)
class ExtractChoice:
    """Which modules get a LoRA, and of which rank.

    Attributes:
        rank: of matrices and 1x1 convolutions; the largest one with ``energy``.
        conv_rank: of larger convolutions; with 0 they and the rest of the residual blocks get none.
        energy: share of a module's squared difference that its rank has to hold; ``None`` for a fixed rank.
        block_ranks: block name -> rank instead of ``rank`` and (unless that is 0) ``conv_rank``; 0 for none.
        min_difference: modules of which no weight differs by more than this get none.
        unet_only: whether the text encoders are left out.
        iterations: subspace iterations of the randomised SVD.
    """

    rank: int = 16
    conv_rank: int = 0
    energy: float | None = None
    block_ranks: Mapping[str, int] | None = None
    min_difference: float = 0.0
    unet_only: bool = False
    iterations: int = 2

    def __post_init__(self) -> None:
        for name, lowest in (("rank", 1), ("conv_rank", 0), ("iterations", 0), ("min_difference", 0)):
            value = getattr(self, name)
            if not value >= lowest:
                raise OptionError(f"--{name} is {value}; it must be at least {lowest}.")
        if self.energy is not None and not 0 < self.energy <= 1:
            raise OptionError(f"--energy is {self.energy:g}; it must be above 0 and at most 1 (the share to keep).")

    def limit(self, module: str, shape: tuple[int, ...], family: LoraFamily) -> int:
        """The largest rank a module may get; 0 when it gets none."""
        is_large_conv = len(shape) == 4 and shape[2:] != (1, 1)
        rank = self.conv_rank if is_large_conv else self.rank
        if _IN_RESIDUAL_BLOCKS.match(module) and self.conv_rank == 0:
            return 0
        if not (_IN_TRANSFORMERS.match(module) or _IN_RESIDUAL_BLOCKS.match(module)):
            return 0 if self.unet_only or not _IN_TEXT_ENCODERS.match(module) else rank
        return (self.block_ranks or {}).get(block_label(module, family), rank)


@dataclass(frozen=True)
class Extracted:
    """What ``extract_lora`` found.

    Attributes:
        approximation: the modules, and their error against the difference of the weights they stand for.
        unchanged: modules that do not differ.
        outside: norm of the difference that lies in weights no module was asked for (biases, norms, convolutions, …)
            over the norm of the whole difference of UNet and text encoders; ``None`` for checkpoints of different
            layouts, whose biases and norms are not compared.
    """

    approximation: Approximation
    unchanged: int
    outside: float | None


def parse_block_ranks(text: str | None, base: Checkpoint) -> dict[str, int] | None:
    """Read ``"IN04=32,MID=8"`` for the names of a checkpoint's blocks; ``"7=32"`` means SD3's joint block 7.

    Raises:
        OptionError: an unknown block, or a rank that is no whole number of 0 or more.
    """
    if text is None:
        return None
    names = [label for label in block_labels(base.family, base.modules) if label != "other" and label[:2] != "TE"]
    ranks: dict[str, int] = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        name = f"joint {int(name):02}" if name.isdecimal() and base.family.blocks is None else name
        if name not in names:
            hint = nearest_name_hint(name, names)
            raise OptionError(f"--block_ranks: there is no block '{name}'.{hint} Blocks: {', '.join(names)}.")
        if not value.isdecimal():
            raise OptionError(f"--block_ranks {item.strip()}: expected BLOCK=RANK, such as {name}=16.")
        ranks[name] = int(value)
    return ranks


def extract_lora(
    base: Checkpoint, tuned: Checkpoint, choice: ExtractChoice, console: RunConsole | None = None
) -> Extracted:
    """Approximate ``tuned - base`` by a LoRA, module by module; the two may lie in different layouts.

    Text encoders get all modules of which the choice allows one, or none when none differs, because some programs read
    only whole layers.

    Raises:
        ModelError: the checkpoints are of different families or sizes, or do not differ.
    """
    _refuse_different_models(base, tuned)
    console = console or QuietConsole()
    common = [name for name in base.modules if name in tuned.modules]
    console.begin("Extracting", len(common))
    squares = Squares(base.family)
    modules: dict[str, LoraWeights] = {}
    alike: dict[str, LoraWeights] = {}
    outside = 0.0
    for name, found in zip(common, map_modules(lambda name: _compared(base, tuned, name, choice), common), strict=True):
        if found.weights is None:
            outside += found.square
        elif found.is_alike:
            alike[name] = found.weights
            outside += found.square
        else:
            modules[name] = found.weights
            squares.add(name, found.square, found.cut_off)
        console.advance()
    console.end()
    if not modules:
        raise ModelError(
            f"{base.path} and {tuned.path} do not differ in any weight that a LoRA was asked for; there is nothing to "
            "extract."
        )
    changed_encoders = {component_of(name) for name in modules} - {"lora_unet"}
    for name, weights in alike.items():
        if component_of(name) in changed_encoders:
            modules[name] = weights
            squares.add(name, 0.0, 0.0)
    approximation = squares.approximation(dict(sorted(modules.items())))
    if base.is_folder != tuned.is_folder:
        return Extracted(approximation, len(alike), None)
    outside += _vector_differences(base, tuned)
    return Extracted(approximation, len(alike), math.sqrt(outside / (squares.total + outside)))


def _refuse_different_models(base: Checkpoint, tuned: Checkpoint) -> None:
    if base.family.kind != tuned.family.kind:
        raise ModelError(
            f"{base.path} is {base.family.name}, {tuned.path} is {tuned.family.name}; a LoRA is the difference of two "
            "models of one family."
        )
    for name in base.modules:
        if name in tuned.modules and base.module_shape(name) != tuned.module_shape(name):
            raise ModelError(
                f"'{name}' has shape {list(base.module_shape(name))} in {base.path} and "
                f"{list(tuned.module_shape(name))} in {tuned.path}; they are different models."
            )


class _Compared(NamedTuple):
    """One weight in both checkpoints.

    ``square`` is the squared norm of the difference, ``cut_off`` that of what ``weights`` leaves out of it; without
    weights the module gets no LoRA. ``is_alike``: the difference does not count, the weights change nothing.
    """

    square: float
    weights: LoraWeights | None = None
    cut_off: float = 0.0
    is_alike: bool = False


def _compared(base: Checkpoint, tuned: Checkpoint, name: str, choice: ExtractChoice) -> _Compared:
    difference = tuned.read_module(name).float() - base.read_module(name).float()
    if not torch.isfinite(difference).all():
        broken = base if torch.isfinite(tuned.read_module(name).float()).all() else tuned
        raise ModelError(f"{broken.path}: the weight of '{name}' holds values that are not finite.")
    square = squared_norm(difference)
    limit = choice.limit(name, tuple(difference.shape), base.family)
    if limit == 0:
        return _Compared(square)
    if square == 0 or float(difference.abs().max()) <= choice.min_difference:
        nothing = LoraWeights(torch.zeros(1, *difference.shape[1:]), torch.zeros(difference.shape[0], 1), 1.0)
        return _Compared(square, nothing, is_alike=True)
    matrix = difference.flatten(1)
    svd = randomised_svd(matrix, min(limit, *matrix.shape), iterations=choice.iterations, seed=crc32(name.encode()))
    rule = RankChoice("fixed", 0, limit) if choice.energy is None else RankChoice("sv_energy", choice.energy, limit)
    rank = rule.rank(svd.values, square)
    cut_off = residual(square, svd.values[:rank]) ** 2
    return _Compared(square, from_svd(svd, rank, float(rank), difference.shape), cut_off)


def _vector_differences(base: Checkpoint, tuned: Checkpoint) -> float:
    """Squared norm of the differences in biases and norms: what no LoRA can hold."""
    theirs = {(component, name): source for component, source, name in tuned.tensors()}
    total = 0.0
    for component, source, name in base.tensors():
        other = theirs.get((component, name))
        if component == "vae" or (component, name) in base.parts or other is None:
            continue
        spec = source.specs[name]
        if spec.dtype.is_floating_point and spec.shape == other.specs[name].shape and _is_trained(component, name):
            total += squared_norm(other.read(name).float() - source.read(name).float())
    return total


def _is_trained(component: str, name: str) -> bool:
    """Whether a tensor belongs to UNet or text encoders; in folders the component has said so."""
    return component != "" or name.startswith(_TRAINED_PARTS)
