"""Which modules are adapted: counts and lists of sd-scripts, on models of full size without memory."""

from __future__ import annotations

import pytest
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from maulstick.adapters.blocks import sd_block_index, sdxl_block_index
from maulstick.adapters.targets import (
    TEXT_ENCODER_CONTAINERS,
    UNET_CONTAINERS,
    UNET_CONV_CONTAINERS,
    BlockRank,
    find_targets,
    plan_from_ranks,
    plan_lora,
)
from maulstick.errors import ModelError, OptionError

SD2 = {"use_linear_projection": True, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20]}


@pytest.mark.parametrize(("golden", "index_of"), [("golden_sd", sd_block_index), ("golden_sdxl", sdxl_block_index)])
def test_plan_with_conv_is_the_golden_list(golden, index_of, request, meta_unet):
    data = request.getfixturevalue(golden)
    plan = plan_lora(
        meta_unet(data["config"]), component="unet", network_dim=8, conv_dim=4, conv_alpha=2, block_of=index_of
    )
    assert [[t.path, t.kind, t.container, list(t.shape), t.block] for t in plan] == [
        [row[0], *row[2:]] for row in data["rows"]
    ]
    assert {t.kind: (t.dim, t.alpha) for t in plan} == {"linear": (8, 1), "conv1x1": (8, 1), "conv3x3": (4, 2)}


@pytest.mark.parametrize(
    ("golden", "changes", "plain", "with_conv", "values"),
    [
        ("golden_sd", {}, (160, 32), (182, 46, 50), (423_936, 1_050_816)),
        ("golden_sd", SD2, (192, 0), (214, 14, 50), (432_128, 1_059_008)),
        ("golden_sdxl", {}, (722, 0), (739, 11, 38), (2_659_840, 3_074_240)),
    ],
)
def test_counts_and_parameters(golden, changes, plain, with_conv, values, request, meta_unet):
    unet = meta_unet(request.getfixturevalue(golden)["config"], **changes)
    # The run with convolutions comes first: sd-scripts lets it change what later runs in the process target.
    conv_plan = plan_lora(unet, component="unet", network_dim=1, conv_dim=1)
    plan = plan_lora(unet, component="unet", network_dim=1)
    kinds = [target.kind for target in plan]
    conv_kinds = [target.kind for target in conv_plan]
    assert (kinds.count("linear"), kinds.count("conv1x1")) == plain
    assert len(kinds) == sum(plain)
    assert tuple(conv_kinds.count(kind) for kind in ("linear", "conv1x1", "conv3x3")) == with_conv
    assert len(conv_kinds) == sum(with_conv)
    assert (sum(t.parameter_count for t in plan), sum(t.parameter_count for t in conv_plan)) == values


@pytest.mark.parametrize(
    ("layers", "width", "projection", "count"), [(12, 768, False, 72), (23, 1024, False, 138), (32, 1280, True, 192)]
)
def test_text_encoders(layers, width, projection, count, meta_text_encoder):
    plan = plan_lora(meta_text_encoder(layers, width, projection=projection), component="text_encoder", network_dim=1)
    assert len(plan) == count
    assert {target.container for target in plan} == {"CLIPAttention", "CLIPMLP"}
    assert {target.block for target in plan} == {None}
    if layers == 12:
        assert sum(target.parameter_count for target in plan) == 165_888


def test_rank_comes_from_the_block(golden_sd, meta_unet):
    ranks = {1: BlockRank(0, 1.0), 2: BlockRank(3, 0.5, 2, 0.25), 12: BlockRank(5, 0)}
    plan = plan_lora(
        meta_unet(golden_sd["config"]), component="unet", network_dim=8, block_of=sd_block_index, block_ranks=ranks
    )
    by_block = {block: [t for t in plan if t.block == block] for block in range(25)}
    assert by_block[1] == []
    assert {(t.kind, t.dim, t.alpha) for t in by_block[2]} == {
        ("linear", 3, 0.5),
        ("conv1x1", 3, 0.5),
        ("conv3x3", 2, 0.25),
    }
    assert {(t.kind, t.dim, t.alpha) for t in by_block[12]} == {("linear", 5, 5.0), ("conv1x1", 5, 5.0)}
    # A block that is not named keeps the run's ranks, and this run gives 3x3 convolutions none.
    assert {(t.kind, t.dim, t.alpha) for t in by_block[4]} == {("linear", 8, 1.0), ("conv1x1", 8, 1.0)}
    assert len(by_block[4]) == 16 - 2


def test_alpha_zero_means_the_rank_and_conv_alpha_is_one_by_default(golden_sd, meta_unet):
    plan = plan_lora(meta_unet(golden_sd["config"]), component="unet", network_dim=6, network_alpha=0, conv_dim=3)
    assert {t.kind: t.alpha for t in plan} == {"linear": 6.0, "conv1x1": 6.0, "conv3x3": 1.0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"network_dim": 0}, "network_dim is 0"),
        ({"network_dim": 4, "network_alpha": -1.0}, "network_alpha is -1"),
        ({"network_dim": 4, "network_alpha": float("nan")}, "network_alpha is nan"),
        ({"network_dim": 4, "conv_dim": 0}, "conv_dim is 0"),
        ({"network_dim": 4, "conv_dim": 2, "conv_alpha": -2}, "conv_alpha is -2"),
    ],
)
def test_ranks_out_of_range_are_refused(arguments, words, small_unet):
    with pytest.raises(OptionError, match=words):
        plan_lora(small_unet(), component="unet", **arguments)


def test_a_model_without_targets_is_refused():
    with pytest.raises(ModelError, match=r"unet \(Sequential\).*Transformer2DModel"):
        plan_lora(nn.Sequential(nn.Linear(2, 2)), component="unet", network_dim=4)


def test_ranks_per_block_need_a_block_for_every_module(small_unet):
    with pytest.raises(ModelError, match=r"down_blocks\.0\.attentions\.0\.proj_in.*in no block"):
        plan_lora(
            small_unet(), component="unet", network_dim=4, block_of=lambda path: None, block_ranks={1: BlockRank(2, 1)}
        )


def test_finding_changes_nothing_and_sees_through_adapters(small_unet):
    unet = small_unet()
    containers = (UNET_CONTAINERS, UNET_CONV_CONTAINERS, TEXT_ENCODER_CONTAINERS)
    before = [find_targets(unet, names) for names in containers]
    assert [len(found) for found in before] == [192, 278, 0]
    inject_adapter_in_model(LoraConfig(target_modules=["to_q", "conv1"]), unet)
    assert [find_targets(unet, names) for names in containers] == before


def test_a_shared_module_is_listed_once():
    class Transformer2DModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 3)
            self.second = self.first

    found = find_targets(nn.ModuleDict({"block": Transformer2DModel()}), UNET_CONTAINERS)
    assert [(module.path, module.kind, module.container, module.shape) for module in found] == [
        ("block.first", "linear", "Transformer2DModel", (3, 2))
    ]


def test_plan_of_an_existing_file(small_unet):
    ranks = {"up_blocks.1.attentions.0.proj_out": (3, 1.5), "mid_block.resnets.0.conv1": (2, 0.0)}
    plan = plan_from_ranks(small_unet(), ranks, component="unet", block_of=sd_block_index)
    assert [(t.path, t.dim, t.alpha, t.block) for t in plan] == [
        ("up_blocks.1.attentions.0.proj_out", 3, 1.5, 16),
        ("mid_block.resnets.0.conv1", 2, 2.0, 12),
    ]
    with pytest.raises(ModelError, match=r"1 modules that this unet does not have \(mid_block\.nothing\)"):
        plan_from_ranks(small_unet(), {"mid_block.nothing": (1, 1.0)}, component="unet")
