"""Names in files and module paths, both ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maulstick.adapters.key_names import (
    SD_KEY_NAMES,
    SDXL_KEY_NAMES,
    Location,
    from_original_layout,
    to_original_layout,
)
from maulstick.adapters.targets import plan_lora

TRANSFORMER_TAILS = [
    *(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0")),
    *("ff.net.0.proj", "ff.net.2"),
]


def _attention_tails() -> st.SearchStrategy[str]:
    inner = st.builds("transformer_blocks.{}.{}".format, st.integers(0, 11), st.sampled_from(TRANSFORMER_TAILS))
    return st.one_of(st.sampled_from(["proj_in", "proj_out"]), inner)


def _unet_paths(levels: int) -> st.SearchStrategy[str]:
    resnet_tails = st.sampled_from(["conv1", "conv2", "time_emb_proj", "conv_shortcut"])
    level = st.integers(0, levels - 1)
    return st.one_of(
        st.builds("down_blocks.{}.resnets.{}.{}".format, level, st.integers(0, 1), resnet_tails),
        st.builds("down_blocks.{}.attentions.{}.{}".format, level, st.integers(0, 1), _attention_tails()),
        st.builds("up_blocks.{}.resnets.{}.{}".format, level, st.integers(0, 2), resnet_tails),
        st.builds("up_blocks.{}.attentions.{}.{}".format, level, st.integers(0, 2), _attention_tails()),
        st.builds("down_blocks.{}.downsamplers.0.conv".format, level),
        st.builds("up_blocks.{}.upsamplers.0.conv".format, level),
        st.builds("mid_block.resnets.{}.{}".format, st.integers(0, 1), resnet_tails),
        st.builds("mid_block.attentions.0.{}".format, _attention_tails()),
        st.sampled_from(["conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"]),
        st.sampled_from(["add_embedding.linear_1", "add_embedding.linear_2"]),
    )


TEXT_TAILS = [*(f"self_attn.{part}_proj" for part in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2"]
TEXT_PATHS = st.builds("text_model.encoder.layers.{}.{}".format, st.integers(0, 31), st.sampled_from(TEXT_TAILS))


@given(_unet_paths(4))
def test_sd_unet_paths_come_back(path):
    name = SD_KEY_NAMES.name("unet", path)
    assert name == "lora_unet_" + path.replace(".", "_")
    assert SD_KEY_NAMES.locate(name) == ("unet", path)


@given(_unet_paths(3))
def test_sdxl_unet_paths_come_back_from_both_layouts(path):
    name = SDXL_KEY_NAMES.name("unet", path)
    assert "_blocks_" not in name.replace("input_blocks_", "").replace("output_blocks_", "").replace(
        "transformer_blocks_", ""
    )
    assert SDXL_KEY_NAMES.locate(name) == ("unet", path)
    assert SDXL_KEY_NAMES.locate("lora_unet_" + path.replace(".", "_")) == ("unet", path)


@given(_unet_paths(4), st.booleans())
def test_layouts_are_each_others_inverse(path, attention_in_first_up_block):
    underscored = path.replace(".", "_")
    original = to_original_layout(underscored, attention_in_first_up_block=attention_in_first_up_block)
    assert original != underscored
    assert from_original_layout(original) == underscored


@given(_unet_paths(3), _unet_paths(3))
def test_sdxl_names_tell_modules_apart(first, second):
    names = [SDXL_KEY_NAMES.name("unet", path) for path in (first, second)]
    assert (names[0] == names[1]) == (first == second)


@given(TEXT_PATHS)
def test_text_encoder_paths_come_back(path):
    for key_names, component, prefix in (
        (SD_KEY_NAMES, "text_encoder", "lora_te"),
        (SDXL_KEY_NAMES, "text_encoder", "lora_te1"),
        (SDXL_KEY_NAMES, "text_encoder_2", "lora_te2"),
    ):
        name = key_names.name(component, path)
        assert name == f"{prefix}_" + path.replace(".", "_")
        # transformers 5.24 has no text_model level in CLIPTextModel; the name must be the same.
        assert key_names.name(component, path.removeprefix("text_model.")) == name
        assert key_names.locate(name) == (component, path)


def test_names_of_every_golden_module(golden_sd, golden_sdxl):
    for key_names, golden in ((SD_KEY_NAMES, golden_sd), (SDXL_KEY_NAMES, golden_sdxl)):
        rows = golden["rows"]
        assert [key_names.name("unet", row[0]) for row in rows] == [row[1] for row in rows]
        assert [key_names.locate(row[1]) for row in rows] == [("unet", row[0]) for row in rows]


def test_names_of_a_real_text_encoder(meta_text_encoder):
    plan = plan_lora(meta_text_encoder(12, 768), component="text_encoder", network_dim=1)
    names = [SD_KEY_NAMES.name("text_encoder", target.path) for target in plan]
    assert len(set(names)) == 72
    assert {
        name.replace(f"_layers_{n}_", "_layers_N_") for n in range(12) for name in names if f"_layers_{n}_" in name
    } == {"lora_te_text_model_encoder_layers_N_" + tail.replace(".", "_") for tail in TEXT_TAILS}


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("lora_te1_text_model_encoder_layers_3_mlp_fc1", ("text_encoder", "text_model.encoder.layers.3.mlp.fc1")),
        ("lora_unet_input_blocks_4_1_proj_in", ("unet", "down_blocks.1.attentions.0.proj_in")),
        ("lora_unet_output_blocks_2_1_conv", ("unet", "up_blocks.0.upsamplers.0.conv")),
        ("lora_unet_output_blocks_5_2_conv", ("unet", "up_blocks.1.upsamplers.0.conv")),
        ("lora_te2_text_model_encoder_layers_3_mlp_fc1", None),
        ("lora_te3_encoder_block_0_layer_0_SelfAttention_q", None),
        ("lora_unet_", None),
        ("lora_unet_down_blocks__0", None),
        ("lora_unet_proj_in_", None),
        ("something_else", None),
    ],
)
def test_names_of_other_programs(name, location):
    assert SD_KEY_NAMES.locate(name) == location


def test_sd_names_of_the_original_layout():
    # The one place where SD differs from SDXL: no attention in the first up block.
    path = "up_blocks_0_upsamplers_0_conv"
    assert to_original_layout(path, attention_in_first_up_block=False) == "output_blocks_2_1_conv"
    assert to_original_layout(path) == "output_blocks_2_2_conv"


def test_table_knows_all_names_of_a_model():
    paths = {"unet": ["up_blocks.0.upsamplers.0.conv"], "text_encoder": ["encoder.layers.0.mlp.fc1"]}
    assert SD_KEY_NAMES.table(paths) == {
        "lora_unet_up_blocks_0_upsamplers_0_conv": Location("unet", "up_blocks.0.upsamplers.0.conv"),
        "lora_unet_output_blocks_2_1_conv": Location("unet", "up_blocks.0.upsamplers.0.conv"),
        "lora_te_text_model_encoder_layers_0_mlp_fc1": Location("text_encoder", "encoder.layers.0.mlp.fc1"),
        "lora_te1_text_model_encoder_layers_0_mlp_fc1": Location("text_encoder", "encoder.layers.0.mlp.fc1"),
    }
    paths = {"unet": ["mid_block.resnets.1.conv2"], "text_encoder_2": ["text_model.encoder.layers.0.mlp.fc1"]}
    assert SDXL_KEY_NAMES.table(paths) == {
        "lora_unet_mid_block_resnets_1_conv2": Location("unet", "mid_block.resnets.1.conv2"),
        "lora_unet_middle_block_2_out_layers_3": Location("unet", "mid_block.resnets.1.conv2"),
        "lora_te2_text_model_encoder_layers_0_mlp_fc1": Location(
            "text_encoder_2", "text_model.encoder.layers.0.mlp.fc1"
        ),
    }
