"""The kinds of adapters that can be trained (``network_type``): one object says all that training asks of a kind."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from maulstick.adapters import dora, loha, lokr, lora, oft
from maulstick.adapters.adapter_tensors import kohya_parts
from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.files import ModuleFile
from maulstick.adapters.injection import AdapterParameter, LoadReport
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.lora import MaxNormResult, scale_to_norm
from maulstick.adapters.module_kinds import (
    AdapterModule,
    DoraWeights,
    LohaWeights,
    LokrWeights,
    OftWeights,
    kind_of,
)
from maulstick.adapters.read_formats import read_adapter, read_plain_lora
from maulstick.adapters.targets import LoraTarget, refuse_unknown_paths
from maulstick.errors import ModelError, OptionError
from maulstick.options.schema import NetworkOptions


class AdapterKind(ABC):
    """How one kind of adapter is attached, trained, written and loaded.

    Attributes:
        name: value of ``network_type``.
        title: name for people.
        weights_type: what a module of it is in a file.
        algorithm: what LyCORIS calls it; None for kohya's own LoRA.
        remedy: what to do when a file to start from does not fit the plan.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    weights_type: ClassVar[type]
    algorithm: ClassVar[str | None]
    remedy: ClassVar[str] = "Set network_dim (and conv_dim) to the file's, or use dim_from_weights."

    # --- planning ----------------------------------------------------------------------------------------------------

    def fitted(self, target: LoraTarget) -> LoraTarget:
        """The target with the rank and alpha that it really gets."""
        return target

    @abstractmethod
    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        """Name of a trained tensor -> its shape, for a target that is ``fitted``."""

    def parameter_count(self, target: LoraTarget) -> int:
        """Number of trained values of a target that is ``fitted``."""
        return sum(math.prod(shape) for shape in self.shapes(target).values())

    def strength_sentence(self, rank: int | None) -> str | None:
        """What to say instead of how alpha acts at this rank; None where that is to be said."""
        return None

    def metadata(self) -> dict[str, str]:
        """Arguments that tell other programs which kind it is (``ss_network_args``)."""
        return {} if self.algorithm is None else {"algo": self.algorithm}

    @property
    def network_module(self) -> str:
        """The program that other programs know this kind from (``ss_network_module``)."""
        return "networks.lora" if self.algorithm is None else "lycoris.kohya"

    # --- training ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        """Attach the adapter to exactly these modules, at the identity, and freeze the rest; its values are fp32."""

    @abstractmethod
    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        """Path -> module that carries the adapter, in module order."""

    @abstractmethod
    def live(self, module: Any) -> dict[str, nn.Parameter]:
        """Name of a trained tensor -> parameter of one module."""

    def parameters(self, root: nn.Module) -> list[AdapterParameter]:
        """The trained tensors in module order."""
        return [
            AdapterParameter(f"{path}.{part}", parameter, path, "up" if part == "lora_up.weight" else part)
            for path, module in self.modules(root).items()
            for part, parameter in self.live(module).items()
        ]

    def bound_norms(self, roots: Collection[nn.Module], max_norm: float) -> MaxNormResult:
        """Scale down every module whose change has a Frobenius norm above ``max_norm`` (in place)."""
        raise ModelError(f"scale_weight_norms does not work with a {self.title}.")

    # --- files -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def weights(self, module: Any) -> AdapterModule:
        """One module as a file has it; it shares memory with the live parameters where it can."""

    def state(self, root: nn.Module) -> dict[str, AdapterModule]:
        """Path -> weights of every module."""
        return {path: self.weights(module) for path, module in self.modules(root).items()}

    def read_start(self, path: Path) -> ModuleFile[AdapterModule]:
        """Read a file to start from.

        Raises:
            OptionError: it holds another kind.
        """
        file = read_adapter(path)
        for name, module in file.modules.items():
            if not isinstance(module, self.weights_type):
                raise OptionError(
                    f"network_weights: {path} holds a {kind_of(module)} ('{name}'), but network_type = {self.name} "
                    f"trains a {self.title}. Set network_type to what the file holds."
                )
        return file

    def stored(self, weights: Any) -> dict[str, Tensor]:
        """What lies in a file as the tensors of ``shapes``, with the strength that the file gives them left out."""
        return kohya_parts(weights)

    def strength(self, weights: Any) -> float:
        """What a file multiplies the product of its factors with."""
        return float(weights.scale)

    def misfit(self, target: LoraTarget, weights: AdapterModule) -> str | None:
        """Say how weights of a file differ from what is planned for ``target``; None where they fit."""
        stored, shapes = self.stored(weights), self.shapes(target)
        if stored.keys() != shapes.keys():
            return f"has {', '.join(sorted(stored))}, but this run plans {', '.join(sorted(shapes))}"
        for part, shape in shapes.items():
            found = tuple(stored[part].shape)
            # 1x1 convolutions are stored with and without their two last dimensions.
            if found[:2] != shape[:2] or math.prod(found) != math.prod(shape):
                return f"has a {part} of shape {list(found)}, but this run plans {list(shape)}"
        return None

    @torch.no_grad()
    def load(
        self, root: nn.Module, state: Mapping[str, Any], *, component: str = "model", partial: bool = False
    ) -> LoadReport:
        """Copy weights into the adapter in place, as ``lora.load_lora_state`` does for a LoRA.

        Raises:
            ModelError: weights without a module or of other sizes, or (unless ``partial``) modules without weights;
                nothing is changed then.
        """
        modules = self.modules(root)
        refuse_unknown_paths(state, modules, component)
        missing = [path for path in modules if path not in state]
        if missing and not partial:
            raise ModelError(f"There are no weights for {len(missing)} modules of the {component} ('{missing[0]}', …).")
        for path, weights in state.items():
            given, live = self.stored(weights), self.live(modules[path])
            if {part: tensor.numel() for part, tensor in given.items()} != {p: t.numel() for p, t in live.items()}:
                raise ModelError(f"The weights for '{path}' of the {component} are of other sizes than the adapter's.")
        for path, weights in state.items():
            given, live = self.stored(weights), self.live(modules[path])
            for part, parameter in live.items():
                parameter.copy_(given[part].reshape(parameter.shape))
            factor = self.strength(weights) / self.strength(self.weights(modules[path]))
            if factor != 1.0:
                next(iter(live.values())).mul_(factor)
        return LoadReport(list(state), missing)


class LoraKind(AdapterKind):
    """A plain LoRA."""

    name, title, weights_type, algorithm = "lora", "LoRA", LoraWeights, None

    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        kernel = (1, 1) if len(target.shape) == 4 else ()
        return {
            "lora_down.weight": (target.dim, *target.shape[1:]),
            "lora_up.weight": (target.shape[0], target.dim, *kernel),
        }

    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        lora.inject_lora(root, targets, dropout=dropout, seed=seed)

    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        return lora.lora_modules(root)

    def live(self, module: Any) -> dict[str, nn.Parameter]:
        name = lora.DEFAULT_ADAPTER
        return {"lora_down.weight": module.lora_A[name].weight, "lora_up.weight": module.lora_B[name].weight}

    def weights(self, module: Any) -> AdapterModule:
        return lora.lora_weights(module)

    def read_start(self, path: Path) -> ModuleFile[AdapterModule]:
        """LoHa and LoKr come out as the LoRA that they are."""
        return read_plain_lora(path)

    def misfit(self, target: LoraTarget, weights: AdapterModule) -> str | None:
        """Only the rank can be another: sizes are the model's."""
        return None if weights.rank == target.dim else f"has rank {weights.rank}, but this run plans rank {target.dim}"

    def bound_norms(self, roots: Collection[nn.Module], max_norm: float) -> MaxNormResult:
        return lora.apply_max_norm(roots, max_norm)

    def load(
        self, root: nn.Module, state: Mapping[str, Any], *, component: str = "model", partial: bool = False
    ) -> LoadReport:
        return lora.load_lora_state(root, state, component=component, partial=partial)


@dataclass(frozen=True)
class DoraKind(AdapterKind):
    """A LoRA with trained lengths: of each column of the weight, or (``on_output``) of each row."""

    on_output: bool = False

    name, title, weights_type, algorithm = "dora", "DoRA", DoraWeights, "lora"
    remedy = "Set network_dim, conv_dim and wd_on_output to what the file was trained with."

    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        scale = [1] * len(target.shape)
        axis = 0 if self.on_output else 1
        scale[axis] = target.shape[axis]
        return {**LoraKind().shapes(target), "dora_scale": tuple(scale)}

    def metadata(self) -> dict[str, str]:
        return {**super().metadata(), "dora_wd": "True", "wd_on_output": str(self.on_output)}

    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        dora.inject_dora(root, targets, on_output=self.on_output, dropout=dropout, seed=seed)

    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        return lora.lora_modules(root)

    def live(self, module: Any) -> dict[str, nn.Parameter]:
        return {**LoraKind().live(module), "dora_scale": module.lora_magnitude[lora.DEFAULT_ADAPTER]}

    def weights(self, module: Any) -> AdapterModule:
        return dora.dora_weights(module)

    def strength(self, weights: Any) -> float:
        return float(weights.change.scale)


class LohaKind(AdapterKind):
    """A LoHa."""

    name, title, weights_type, algorithm = "loha", "LoHa", LohaWeights, "loha"

    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        return loha.loha_shapes(target)

    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        loha.inject_loha(root, targets, dropout=dropout, seed=seed)

    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        return loha.loha_modules(root)

    def live(self, module: Any) -> dict[str, nn.Parameter]:
        return loha.loha_parts(module)

    def weights(self, module: Any) -> AdapterModule:
        return loha.loha_weights(module)

    def bound_norms(self, roots: Collection[nn.Module], max_norm: float) -> MaxNormResult:
        return _bound_products(self, roots, max_norm)


@dataclass(frozen=True)
class LokrKind(AdapterKind):
    """A LoKr; ``factor`` and ``decompose_both`` as in ``lokr.inject_lokr``."""

    factor: int = -1
    decompose_both: bool = False

    name, title, weights_type, algorithm = "lokr", "LoKr", LokrWeights, "lokr"
    remedy = "Set network_dim, conv_dim, factor and decompose_both to what the file was trained with."

    def fitted(self, target: LoraTarget) -> LoraTarget:
        return lokr.lokr_target(target, self.factor, self.decompose_both)

    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        return lokr.lokr_shapes(target, self.factor, self.decompose_both)

    def metadata(self) -> dict[str, str]:
        return {**super().metadata(), "factor": str(self.factor), "decompose_both": str(self.decompose_both)}

    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        lokr.inject_lokr(
            root, targets, factor=self.factor, decompose_both=self.decompose_both, dropout=dropout, seed=seed
        )

    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        return lokr.lokr_modules(root)

    def live(self, module: Any) -> dict[str, nn.Parameter]:
        return lokr.lokr_parts(module)

    def weights(self, module: Any) -> AdapterModule:
        return lokr.lokr_weights(module)

    def bound_norms(self, roots: Collection[nn.Module], max_norm: float) -> MaxNormResult:
        return _bound_products(self, roots, max_norm)


class OftKind(AdapterKind):
    """An OFT: ranks are block sizes, and there is no alpha."""

    name, title, weights_type, algorithm = "oft", "OFT", OftWeights, "diag-oft"
    remedy = "Set network_dim (and conv_dim) to the size of the file's blocks."

    def fitted(self, target: LoraTarget) -> LoraTarget:
        return oft.oft_target(target)

    def shapes(self, target: LoraTarget) -> dict[str, tuple[int, ...]]:
        return oft.oft_shapes(target)

    def strength_sentence(self, rank: int | None) -> str | None:
        return "turns blocks of outputs of different sizes" if rank is None else f"turns blocks of {rank} outputs"

    def inject(
        self, root: nn.Module, targets: Sequence[LoraTarget], *, dropout: LoraDropout | None = None, seed: int = 0
    ) -> None:
        oft.inject_oft(root, targets, dropout=dropout)

    def modules(self, root: nn.Module) -> Mapping[str, Any]:
        return oft.oft_modules(root)

    def live(self, module: Any) -> dict[str, nn.Parameter]:
        return {"oft_skew": module.oft_skew[lora.DEFAULT_ADAPTER]}

    def weights(self, module: Any) -> AdapterModule:
        return oft.oft_weights(module)

    def stored(self, weights: Any) -> dict[str, Tensor]:
        blocks = weights.blocks
        return {"oft_skew": oft.skew_of(blocks.float())} if blocks.ndim == 3 else {"oft_R": blocks}

    def strength(self, weights: Any) -> float:
        return 1.0


def _bound_products(kind: AdapterKind, roots: Collection[nn.Module], max_norm: float) -> MaxNormResult:
    """The change is proportional to every factor, so each takes the same root of the ratio."""
    modules = [module for root in roots for module in kind.modules(root).values()]
    with torch.no_grad():
        norms = [torch.linalg.vector_norm(module.get_delta_weight(lora.DEFAULT_ADAPTER)) for module in modules]
    return scale_to_norm(
        [(norm, list(kind.live(module).values())) for norm, module in zip(norms, modules, strict=True)], max_norm
    )


KINDS: Mapping[str, Callable[[NetworkOptions], AdapterKind]] = {
    "lora": lambda network: LoraKind(),
    "dora": lambda network: DoraKind(on_output=network.wd_on_output),
    "loha": lambda network: LohaKind(),
    "lokr": lambda network: LokrKind(-1 if network.factor is None else network.factor, network.decompose_both),
    "oft": lambda network: OftKind(),
}
"""``network_type`` -> the kind with its settings."""


def adapter_kind(network: NetworkOptions) -> AdapterKind:
    """The kind of adapter that the options ask for."""
    return KINDS[network.network_type](network)
