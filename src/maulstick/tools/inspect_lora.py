"""``maulstick inspect``: what a LoRA file holds, block by block, and what is wrong with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.files import data_hash, file_hash
from maulstick.adapters.lora_family import LoraFamily, block_label, block_labels, component_of
from maulstick.adapters.module_kinds import AdapterModule, Unsupported, change_shape, kind_of, module_tensors
from maulstick.adapters.read_formats import AdapterFile, is_zero, read_adapter
from maulstick.adapters.tensor_names import LAYOUT_NAMES
from maulstick.tools.lora_metadata import decoded_metadata
from maulstick.tools.low_rank import effective_rank, singular_values
from maulstick.tools.parallel import map_modules
from maulstick.train.console import QuietConsole, RunConsole

_DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class ModuleFacts:
    """One module.

    ``norm`` is the Frobenius norm of its change at strength 1, ``effective_rank`` the number of directions it spreads
    over; ``None`` where they cannot be known (a value is not finite, or the change depends on the base model).
    """

    name: str
    block: str
    kind: str
    rank: int
    alpha: float | None
    shape: tuple[int, ...]
    parameters: int
    norm: float | None
    effective_rank: float | None
    is_zero: bool


@dataclass(frozen=True)
class BlockFacts:
    """All modules of a block: ``norm`` is the root of the sum of squares, ``effective_rank`` the mean."""

    block: str
    modules: int
    ranks: tuple[int, ...]
    alphas: tuple[float, ...]
    parameters: int
    norm: float | None
    effective_rank: float | None
    zero_modules: int


@dataclass(frozen=True)
class FileFacts:
    """Everything ``inspect`` tells about a file.

    ``findings`` are what a person should act on; ``hashes`` are the names under which other programs know the file.
    """

    file: str
    kinds: dict[str, int]
    family: str
    layout: str
    dtypes: tuple[str, ...]
    parameters: int
    norm: float | None
    hashes: dict[str, str]
    findings: tuple[str, ...]
    not_finite: dict[str, int]
    zero_modules: tuple[str, ...]
    blocks: tuple[BlockFacts, ...]
    modules: tuple[ModuleFacts, ...]
    metadata: dict[str, Any]

    @property
    def learned(self) -> bool:
        """Whether any module changes anything."""
        return len(self.zero_modules) < len(self.modules)

    def as_json(self) -> dict[str, Any]:
        """All facts as JSON-ready values."""
        return {**asdict(self), "learned": self.learned}


def inspect_file(path: Path, console: RunConsole | None = None) -> FileFacts:
    """Read a file and measure all of its modules.

    Raises:
        ModelError: the file is no adapter, or is damaged. Values that are not finite are reported, not refused.
    """
    file = read_adapter(path, allow_non_finite=True)
    console = console or QuietConsole()
    console.begin("Measuring", len(file.modules))
    modules: list[ModuleFacts] = []
    for facts in map_modules(lambda item: _module_facts(*item, file.family), file.modules.items()):
        modules.append(facts)
        console.advance()
    console.end()
    blocks = tuple(
        _block_facts(label, [module for module in modules if module.block == label])
        for label in block_labels(file.family, file.modules)
    )
    hashes = _hashes(file)
    zero = tuple(module.name for module in modules if module.is_zero)
    return FileFacts(
        file=str(path),
        kinds=dict(Counter(module.kind for module in modules)),
        family=file.family.name,
        layout=_layout(file),
        dtypes=tuple(_DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.")) for dtype in file.dtypes),
        parameters=sum(module.parameters for module in modules),
        norm=_root_sum(module.norm for module in modules),
        hashes=hashes,
        findings=tuple(_findings(file, modules, zero, hashes)),
        not_finite=file.not_finite,
        zero_modules=zero,
        blocks=blocks,
        modules=tuple(modules),
        metadata=decoded_metadata(file.metadata),
    )


def _module_facts(name: str, module: AdapterModule, family: LoraFamily) -> ModuleFacts:
    tensors = module_tensors(module)
    norm: float | None = None
    spread: float | None = None
    if all(torch.isfinite(tensor).all() for tensor in tensors.values()):
        try:
            values = singular_values(module)
        except Unsupported:
            pass  # DoRA and OFT: what they change cannot be told without the base model, which is what None says
        else:
            norm, spread = float(torch.linalg.vector_norm(values)), effective_rank(values)
    return ModuleFacts(
        name=name,
        block=block_label(name, family),
        kind=kind_of(module),
        rank=module.rank,
        alpha=module.alpha,
        shape=change_shape(module),
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        norm=norm,
        effective_rank=spread,
        is_zero=is_zero(module),
    )


def _block_facts(label: str, modules: list[ModuleFacts]) -> BlockFacts:
    spreads = [module.effective_rank for module in modules if module.effective_rank is not None]
    return BlockFacts(
        block=label,
        modules=len(modules),
        ranks=tuple(sorted({module.rank for module in modules})),
        alphas=tuple(sorted({float(m.rank) if m.alpha is None else m.alpha for m in modules})),
        parameters=sum(module.parameters for module in modules),
        norm=_root_sum(module.norm for module in modules),
        effective_rank=sum(spreads) / len(spreads) if spreads else None,
        zero_modules=sum(module.is_zero for module in modules),
    )


def _root_sum(norms: Iterable[float | None]) -> float | None:
    """Norm of all together; ``None`` when one of them is not known, or there is none."""
    known = list(norms)
    if not known or any(norm is None for norm in known):
        return None
    return math.sqrt(sum(norm**2 for norm in known if norm is not None))


def _layout(file: AdapterFile) -> str:
    name = LAYOUT_NAMES[file.layout]
    if file.family.kind == "sdxl" and file.layout == "kohya":
        return f"{name}, UNet in {'SAI' if file.original_layout else 'diffusers'} names"
    return name


def _hashes(file: AdapterFile) -> dict[str, str]:
    """Civitai calls the first ten digits of the file's hash AutoV2, the first twelve of the data's AutoV3."""
    if file.path.suffix != ".safetensors":
        return {"file_sha256": file_hash(file.path)} if file.path.is_file() else {}
    whole, data = file_hash(file.path), data_hash(file.path)
    return {"file_sha256": whole, "data_sha256": data, "AutoV2": whole[:10], "AutoV3": data[:12]}


def _findings(
    file: AdapterFile, modules: list[ModuleFacts], zero: tuple[str, ...], hashes: dict[str, str]
) -> Iterable[str]:
    yield from file.notes
    for key, count in list(file.not_finite.items())[:5]:
        yield f"Broken: tensor '{key}' holds {count} values that are not finite (NaN or infinite)."
    if len(file.not_finite) > 5:
        yield f"Broken: {len(file.not_finite) - 5} more tensors hold values that are not finite."
    if zero and len(zero) == len(modules):
        yield f"This LoRA did not learn: all {len(modules)} modules change nothing, their up weights are zero."
    elif zero:
        yield f"{len(zero)} of {len(modules)} modules change nothing, a factor of theirs is all zero: {_few(zero)}."
    stated = file.metadata.get("sshs_model_hash")
    if stated and "data_sha256" in hashes and stated != hashes["data_sha256"]:
        yield f"The hash in the metadata ({stated[:12]}) is not that of the tensors; other programs show that one."
    for component, alphas in _mixed_alphas(file).items():
        yield (
            f"{component} has {len(alphas)} different alphas; diffusers would apply one of them to most modules. "
            "'maulstick convert' writes the file so that every program applies the trained strength."
        )
    for name in (module.name for module in modules if module.alpha == 0):
        yield f"'{name}' has alpha 0: most programs apply nothing of it, sd-scripts all of it."
        break


def _mixed_alphas(file: AdapterFile) -> dict[str, set[float]]:
    """Components whose alphas diffusers would mix up: kohya's layout, more than one alpha."""
    found: dict[str, set[float]] = {}
    if file.layout == "kohya":
        for name, module in file.modules.items():
            if isinstance(module, LoraWeights) and module.alpha is not None:
                found.setdefault(component_of(name), set()).add(module.alpha)
    return {component: alphas for component, alphas in found.items() if len(alphas) > 1}


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
