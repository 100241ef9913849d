"""Module to block, against the golden lists and in every way a module is named."""

from __future__ import annotations

from collections import Counter

import pytest

from maulstick.adapters.blocks import SD_BLOCKS, SDXL_BLOCKS, sd_block_index, sdxl_block_index

SD_WITH_CONV = [0, 15, 15, 1, 16, 15, 1, 16, 15, 1, 3, 3, 18, 4, 4, 5, 16, 16, 17, 16, 16, 17, 16, 16, 16]
SDXL_WITH_CONV = [0, 0, 3, 3, 1, 26, 25, 1, 106, 105, 3, 102, 3, 106, 106, 107, 26, 26, 27, 4, 4, 4, 0]


def test_every_sd_module_by_path_and_by_key(golden_sd):
    rows = golden_sd["rows"]
    assert [sd_block_index(row[0]) for row in rows] == [row[5] for row in rows]
    assert [sd_block_index(row[1]) for row in rows] == [row[5] for row in rows]


def test_every_sdxl_module_by_path_and_by_key(golden_sdxl):
    rows = golden_sdxl["rows"]
    assert [sdxl_block_index(row[0]) for row in rows] == [row[5] for row in rows]
    assert [sdxl_block_index(row[1]) for row in rows] == [row[5] for row in rows]
    original_paths = [row[1].removeprefix("lora_unet_").replace("_blocks_", "_blocks.") for row in rows]
    assert [sdxl_block_index(path) for path in original_paths] == [row[5] for row in rows]


@pytest.mark.parametrize(
    ("golden", "index_of", "expected"),
    [("golden_sd", sd_block_index, SD_WITH_CONV), ("golden_sdxl", sdxl_block_index, SDXL_WITH_CONV)],
)
def test_modules_per_block(golden, index_of, expected, request):
    counts = Counter(index_of(row[0]) for row in request.getfixturevalue(golden)["rows"])
    assert [counts[index] for index in range(len(expected))] == expected


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("conv_in", 0),
        ("input_blocks.0.0", 0),
        ("input_blocks.11.0.in_layers.2", 11),
        ("lora_unet_output_blocks_11_1_proj_in", 24),
        ("middle_block.1.proj_in", 12),
        ("unet.mid_block.attentions.0.proj_in", 12),
        ("model.diffusion_model.output_blocks.3.1.proj_in", 16),
        ("down_blocks.0.attentions.1", 2),
        ("conv_out", None),
        ("time_embedding.linear_1", None),
        ("lora_te_text_model_encoder_layers_0_mlp_fc1", None),
        # One level, layer or digit too many must not run into the next part's indices.
        ("down_blocks.4.attentions.0.proj_in", None),
        ("down_blocks.0.attentions.2.proj_in", None),
        ("down_blocks.3.downsamplers.0.conv", None),
        ("down_blocks.10.attentions.0.proj_in", None),
        ("down_blocks.0.attentions.10.proj_in", None),
        ("up_blocks.3.upsamplers.0.conv", None),
        ("up_blocks.0.resnets.3.conv1", None),
        ("input_blocks.12.0.in_layers.2", None),
        ("mid_blocks.attentions.0", None),
        ("", None),
    ],
)
def test_sd_paths_at_the_edges(path, index):
    assert sd_block_index(path) == index


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("time_embedding.linear_1", 0),
        ("lora_unet_label_emb_0_2", 0),
        ("conv_in", 1),
        ("conv_out", 22),
        ("lora_unet_out_2", 22),
        ("mid_block.resnets.1.conv1", 12),
        ("down_blocks.2.downsamplers.0.conv", None),
        ("up_blocks.2.upsamplers.0.conv", None),
        ("down_blocks.3.resnets.0.conv1", None),
        ("input_blocks.9.0.in_layers.2", None),
    ],
)
def test_sdxl_paths_at_the_edges(path, index):
    assert sdxl_block_index(path) == index


def test_names_and_parts_fit_each_other():
    assert (len(SD_BLOCKS.names), len(SDXL_BLOCKS.names)) == (25, 23)
    assert [SD_BLOCKS.names[i] for i in (0, 11, 12, 13, 24)] == ["IN00", "IN11", "MID", "OUT00", "OUT11"]
    assert [SDXL_BLOCKS.names[i] for i in (1, 9, 10, 12, 13, 21)] == ["IN00", "IN08", "MID0", "MID2", "OUT00", "OUT08"]
    assert {part: len(indices) for part, indices in SD_BLOCKS.parts.items()} == {"down": 12, "mid": 1, "up": 12}
    assert {part: len(indices) for part, indices in SDXL_BLOCKS.parts.items()} == {"down": 9, "mid": 3, "up": 9}
    assert [i for part in ("down", "mid", "up") for i in SD_BLOCKS.parts[part]] == list(range(25))
    assert [i for part in ("down", "mid", "up") for i in SDXL_BLOCKS.parts[part]] == list(range(1, 22))
