"""SD3's LoRA in the original layout and in diffusers': the same change in every form; block selection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from maulstick.adapters.block_selection import parse_block_selection
from maulstick.adapters.block_weights import numbered_blocks
from maulstick.adapters.blocks import SD_BLOCKS
from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.joint_names import SD3_KEY_NAMES, place_in_joined
from maulstick.adapters.read_formats import read_adapter
from maulstick.adapters.write_formats import layout_tensors, save_layout
from maulstick.errors import ModelError, OptionError
from maulstick.tools.convert import convert_lora
from tests.sd3_models import RANK, kohya_file, original_transformer, sd3_folder


def deltas(modules: Mapping[str, object]) -> dict[str, Tensor]:
    return {name: delta_weight(weights) for name, weights in modules.items() if isinstance(weights, LoraWeights)}


def assert_same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, delta in ours.items():
        torch.testing.assert_close(delta, theirs[name], rtol=1e-5, atol=1e-5)


def test_our_own_form_is_read_as_it_is(tmp_path: Path) -> None:
    file = read_adapter(kohya_file(tmp_path / "own.safetensors"))
    assert (file.family.kind, file.layout, len(file.modules)) == ("sd3", "kohya", 32)
    assert {module.rank for module in file.modules.values()} == {RANK}


def test_diffusers_form_changes_the_pipeline_by_the_same(tmp_path: Path) -> None:
    file = read_adapter(kohya_file(tmp_path / "own.safetensors"))
    tensors, metadata = convert_lora(file, tmp_path / "theirs.safetensors", layout="diffusers")
    save_layout(tmp_path / "theirs.safetensors", tensors, metadata, layout="diffusers")
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        sd3_folder(with_t5=False), local_files_only=True, text_encoder_3=None, tokenizer_3=None
    )
    base = {name: t.clone() for name, t in pipeline.transformer.state_dict().items()}
    pipeline.load_lora_weights(str(tmp_path), weight_name="theirs.safetensors", adapter_name="it")
    layer = pipeline.text_encoder.text_model.encoder.layers[0]
    text = {
        "lora_te1_text_model_encoder_layers_0_self_attn_v_proj": layer.self_attn.v_proj,
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": layer.mlp.fc1,
        "lora_te2_text_model_encoder_layers_3_self_attn_q_proj": (
            pipeline.text_encoder_2.text_model.encoder.layers[3].self_attn.q_proj
        ),
    }
    loaded = {name: module.get_delta_weight("it") for name, module in text.items()}
    pipeline.fuse_lora(components=["transformer"])
    pipeline.unload_lora_weights()
    before, after = (original_transformer(_WithState(state)) for state in (base, pipeline.transformer.state_dict()))
    for name in file.modules:
        if name.startswith("lora_unet"):
            (key,) = (key for key in before if key.replace(".", "_") == f"{name.removeprefix('lora_unet_')}_weight")
            loaded[name] = after[key] - before[key]
    own = deltas(file.modules)
    assert own.keys() == loaded.keys()
    for name, delta in own.items():
        torch.testing.assert_close(loaded[name], delta, rtol=1e-4, atol=1e-4)


class _WithState:
    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.state


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_other_layouts_come_back_with_the_rank_they_had(tmp_path: Path, layout: str) -> None:
    file = read_adapter(kohya_file(tmp_path / "own.safetensors"))
    tensors = layout_tensors(dict(file.modules), file.family, layout=layout)
    save_file(tensors, tmp_path / "other.safetensors")
    back = read_adapter(tmp_path / "other.safetensors")
    assert (back.family.kind, back.layout) == ("sd3", layout)
    assert {module.rank for module in back.modules.values()} == {RANK}
    assert_same(deltas(file.modules), deltas(back.modules))
    if layout == "comfyui":
        assert "diffusion_model.joint_blocks.0.x_block.attn2.qkv.lora_up.weight" in tensors
        assert "text_encoders.clip_g.transformer.text_model.encoder.layers.3.self_attn.q_proj.alpha" in tensors


def test_separate_projections_are_joined_exactly(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    prefix = "transformer.transformer_blocks"
    parts = {"0.attn.to_q": 2, "0.attn.to_v": 4, "1.attn.add_k_proj": 2}
    tensors, changes = {}, {}
    for path, rank in parts.items():
        down, up = torch.randn(rank, 128, generator=generator), torch.randn(128, rank, generator=generator)
        tensors |= {f"{prefix}.{path}.lora_A.weight": down, f"{prefix}.{path}.lora_B.weight": up}
        changes[path] = up @ down
    scale_first = torch.randn(256, 2, generator=generator)
    down = torch.randn(2, 128, generator=generator)
    tensors[f"{prefix}.2.norm1_context.linear.lora_A.weight"] = down
    tensors[f"{prefix}.2.norm1_context.linear.lora_B.weight"] = scale_first
    save_file(tensors, tmp_path / "theirs.safetensors")
    modules = read_adapter(tmp_path / "theirs.safetensors").modules
    found = deltas(modules)
    zero = torch.zeros(128, 128)
    assert_same(
        found,
        {
            "lora_unet_joint_blocks_0_x_block_attn_qkv": torch.cat(
                [changes["0.attn.to_q"], zero, changes["0.attn.to_v"]]
            ),
            "lora_unet_joint_blocks_1_context_block_attn_qkv": torch.cat([zero, changes["1.attn.add_k_proj"], zero]),
            "lora_unet_joint_blocks_2_context_block_adaLN_modulation_1": torch.cat(
                [scale_first[128:] @ down, scale_first[:128] @ down]
            ),
        },
    )
    assert modules["lora_unet_joint_blocks_0_x_block_attn_qkv"].rank == 6


def test_names_that_sd3_does_not_have_are_nowhere() -> None:
    assert place_in_joined("lora_transformer_transformer_blocks_0_attn_to_z") is None
    assert place_in_joined("lora_transformer_transformer_blocks_7_attn2_to_k") == (
        "lora_unet_joint_blocks_7_x_block_attn2_qkv",
        1,
        3,
    )
    assert SD3_KEY_NAMES.locate("lora_unet_joint_blocks_0_x_block_attn_to_q") is None
    assert SD3_KEY_NAMES.locate("lora_te3_encoder_block_23_layer_1_DenseReluDense_wi_1") == (
        "text_encoder_3",
        "encoder.block.23.layer.1.DenseReluDense.wi_1",
    )


def test_peft_names_would_mix_up_the_text_encoders(tmp_path: Path) -> None:
    file = read_adapter(kohya_file(tmp_path / "own.safetensors"))
    with pytest.raises(ModelError, match=r"do not tell the text encoders of Stable Diffusion 3 apart"):
        layout_tensors(dict(file.modules), file.family, layout="peft")
    unet = {name: module for name, module in file.modules.items() if name.startswith("lora_unet")}
    save_layout(tmp_path / "peft", layout_tensors(unet, file.family, layout="peft"), {}, layout="peft")
    assert len(load_file(tmp_path / "peft" / "transformer" / "adapter_model.safetensors")) > 2 * 29
    assert_same(deltas(unet), deltas(read_adapter(tmp_path / "peft").modules))


# --- block selection --------------------------------------------------------------------------------------------------

LAYOUT = numbered_blocks({"block": 24})


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("all", set(range(24))),
        ("none", set()),
        ("", set()),
        ("0, 3-5 ,23", {0, 3, 4, 5, 23}),
        ("7-7", {7}),
    ],
)
def test_blocks_are_selected_as_in_sd_scripts(text: str, chosen: set[int]) -> None:
    assert parse_block_selection(text, LAYOUT) == chosen


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("24", "'24' names a block that is not there: there are 0 to 23"),
        ("20-30", "'20-30' names a block"),
        ("5-3", "runs backwards. Write 3-5"),
        ("al", "'al' is no block. Did you mean 'all'"),
        ("1,,2", "'' is no block"),
        ("-1", "'-1' is no block"),
    ],
)
def test_wrong_selections_are_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_block_selection(text, LAYOUT)


def test_selection_needs_one_row_of_blocks() -> None:
    with pytest.raises(OptionError, match=r"no single row of numbers.*block_lr = down=0"):
        parse_block_selection("0-3", SD_BLOCKS)
