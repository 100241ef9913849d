"""``maulstick convert``: the same LoRA in another program's naming or another number format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from maulstick.adapters.factors import LoraWeights
from maulstick.adapters.module_kinds import DoraWeights, kind_of
from maulstick.adapters.read_formats import AdapterFile, plain_modules
from maulstick.adapters.tensor_names import Layout
from maulstick.adapters.write_formats import UnetNames, layout_tensors, lora_changes
from maulstick.errors import ModelError
from maulstick.options.tools import SavePrecision
from maulstick.tools.lora_output import chosen_dtype, history_entry, source_entry, updated_metadata


def convert_lora(
    file: AdapterFile,
    output: Path,
    *,
    layout: Layout = "kohya",
    unet_names: UnetNames = "sai",
    precision: SavePrecision | None = None,
) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    """The tensors and the metadata of ``file`` in another layout.

    Every module keeps its strength: where a layout's readers know no alpha, or only one, it goes into the factors.

    Raises:
        ModelError: the file is neither LoRA nor DoRA, or is for a family whose names are not known.
    """
    kinds = {kind_of(module) for module in file.modules.values()} & {"LoHa", "LoKr"}
    if kinds:
        named = " and ".join(sorted(kinds))
        raise ModelError(
            f"{file.path} is a {named}, which has no other naming. 'maulstick resize --rank N' writes it as a LoRA."
        )
    dora = {name: module for name, module in file.modules.items() if isinstance(module, DoraWeights)}
    plain = plain_modules(replace(file, modules={n: m for n, m in file.modules.items() if n not in dora}))
    modules: dict[str, LoraWeights | DoraWeights] = {**plain, **dora}
    dtype = chosen_dtype(precision, file.dtypes)
    tensors = layout_tensors(modules, file.family, layout=layout, dtype=dtype, unet_names=unet_names)
    facts = {"to": layout, "dtype": str(dtype).removeprefix("torch.")}
    entry = history_entry("convert", sources=[source_entry(file)], **facts)
    return tensors, updated_metadata(file.metadata, lora_changes(modules), file.family, output, entry, resized=False)
