"""LoRA + LoRA: the sum is exact, cut to a rank it is the best there is, strengths count once, metadata add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maulstick.adapters.factors import LoraWeights, delta_weight
from maulstick.adapters.files import data_hash
from maulstick.adapters.lora_family import FAMILIES
from maulstick.adapters.read_formats import plain_modules, read_adapter
from maulstick.adapters.write_formats import layout_tensors, save_layout
from maulstick.cli import main
from maulstick.errors import ModelError, OptionError
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.merge_loras import merge_loras
from tests.tools.lora_files import changes, random_lora, save_lora, sdxl_lora

OUT = Path("merged.safetensors")
GOLDEN = Path(__file__).parents[1] / "data" / "blocks" / "sdxl.json"
Q = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"
TEXT = "lora_te_text_model_encoder_layers_3_mlp_fc1"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    """Two LoRAs of different ranks, alphas, modules and layouts."""
    folder = tmp_path_factory.mktemp("loras")
    tags = {"ss_tag_frequency": json.dumps({"10_cat": {"cat": 3}}), "ss_v2": "False", "ss_epoch": "4"}
    first = save_lora(folder / "first.safetensors", random_lora(rank=3, alpha=1.5), metadata=tags)
    tags = {"ss_tag_frequency": json.dumps({"10_cat": {"cat": 1, "hat": 2}}), "ss_v2": "False", "ss_epoch": "9"}
    modules = random_lora(seed=4, rank=5, alpha=7.0, conv=False)
    return first, save_lora(folder / "second.safetensors", modules, metadata=tags, layout="diffusers")


def expected(first: float, second: float) -> dict[str, torch.Tensor]:
    a, b = changes(random_lora(rank=3, alpha=1.5)), changes(random_lora(seed=4, rank=5, alpha=7.0, conv=False))
    return {name: first * delta + second * b.get(name, torch.zeros(1)) for name, delta in a.items()}


@pytest.mark.parametrize(("first", "second"), [(1.0, 1.0), (0.5, -0.25), (-1.0, 2.0)])
def test_the_sum_is_exact_and_strengths_count_once(files, first, second, tmp_path):
    output = tmp_path / "m.safetensors"
    assert main(["merge", f"{files[0]}:{first}", f"{files[1]}:{second}", "--output", str(output)]) == 0
    merged = plain_modules(read_adapter(output))
    assert merged.keys() == expected(1, 1).keys()
    assert {weights.rank for weights in merged.values()} == {2, 3, 8}
    for name, delta in expected(first, second).items():
        torch.testing.assert_close(delta_weight(merged[name]), delta, rtol=1e-4, atol=1e-5)


def test_half_a_lora_is_half_and_a_negative_one_turns_its_sign(files):
    whole = changes(random_lora(rank=3, alpha=1.5))
    for strength in (0.5, -0.5):
        merged = merge_loras([LoraChoice(files[0], strength)], OUT)
        for name, delta in whole.items():
            torch.testing.assert_close(delta_weight(merged.modules[name]), strength * delta, rtol=1e-5, atol=1e-6)


def test_block_weights_count_once_and_a_block_at_zero_is_left_out(files):
    ratios = ",".join(["0.5"] + ["0"] * 5 + ["0.25"] + ["0"] * 5)  # 12 values: BASE, IN04, IN05, IN07, IN08, M00, OUT00
    with pytest.raises(OptionError, match="lbw has 13 values"):
        merge_loras([LoraChoice(files[0], lbw=f"{ratios},1")], OUT)
    ratios = ",".join(["0.5"] + ["0"] * 15 + ["-0.25"])  # 17 values: BASE … OUT11
    merged = merge_loras([LoraChoice(files[0], 2.0, lbw=ratios)], OUT)
    whole = changes(random_lora(rank=3, alpha=1.5))
    last = {name for name in whole if "up_blocks_3_attentions_2_" in name or "up_blocks_3_resnets_2_" in name}
    assert merged.modules.keys() == last | {name for name in whole if name.startswith("lora_te_")}
    for name, weights in merged.modules.items():
        strength = 1.0 if name.startswith("lora_te_") else -0.5
        torch.testing.assert_close(delta_weight(weights), strength * whole[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(ModelError, match="strengths of all modules are 0"):
        merge_loras([LoraChoice(files[0], 0.0)], OUT)


def test_a_rank_gives_the_best_lora_of_that_rank_and_its_error(files):
    merged = merge_loras([LoraChoice(files[0]), LoraChoice(files[1], 0.5)], OUT, rank=4)
    cut = total = 0.0
    for name, delta in expected(1.0, 0.5).items():
        values = torch.linalg.svdvals(delta.flatten(1))
        best = values[4:].norm()
        error = (delta_weight(merged.modules[name]) - delta).norm()
        assert merged.modules[name].rank == min(4, merged.modules[name].rank)
        assert error <= best * 1.001 + 1e-4
        cut, total = cut + float(best) ** 2, total + float(values.norm()) ** 2
    assert merged.error == pytest.approx((cut / total) ** 0.5, rel=1e-3)
    assert merged.error > 0.05


def test_metadata_of_a_merge(files, tmp_path):
    output = tmp_path / "both.safetensors"
    assert main(["merge", str(files[0]), f"{files[1]}:0.5:te=0", "--output", str(output), "--rank", "4"]) == 0
    metadata = read_adapter(output).metadata
    assert json.loads(metadata["ss_tag_frequency"]) == {"10_cat": {"cat": 4, "hat": 2}}
    assert metadata["ss_v2"] == "False"
    assert "ss_epoch" not in metadata
    assert metadata["ss_output_name"] == metadata["modelspec.title"] == "both"
    assert metadata["modelspec.merged_from"] == "first, second"
    assert metadata["ss_network_dim"] == "Dynamic"
    assert metadata["sshs_model_hash"] == data_hash(output)
    (entry,) = json.loads(metadata["maulstick.history"])
    assert [source["sha256"] for source in entry["sources"]] == [data_hash(path) for path in files]
    assert entry["sources"][1]["text_encoder"] == 0
    assert entry["sources"][1]["unet"] == 0.5
    assert entry["rank"] == 4
    assert 0 < entry["error"] < 1


def test_sdxl_in_two_naming_schemes_is_one_lora(tmp_path):
    modules = sdxl_lora(json.loads(GOLDEN.read_text()))
    paths = []
    for names in ("sai", "diffusers"):
        paths.append(tmp_path / f"{names}.safetensors")
        save_layout(paths[-1], layout_tensors(modules, FAMILIES["sdxl"], unet_names=names), {})
    merged = merge_loras([LoraChoice(paths[0], 2.0), LoraChoice(paths[1], -1.0)], OUT)
    assert merged.family.kind == "sdxl"
    assert merged.modules.keys() == modules.keys()
    for name, weights in modules.items():
        assert merged.modules[name].rank == 4
        torch.testing.assert_close(delta_weight(merged.modules[name]), delta_weight(weights), rtol=1e-4, atol=1e-5)


def test_matrices_and_1x1_convolutions_of_one_module_add_up():
    """Some programs write a 1x1 convolution's factors as matrices."""
    name = "lora_unet_mid_block_attentions_0_proj_in"
    flat = LoraWeights(torch.randn(2, 5), torch.randn(4, 2), None)
    conv = LoraWeights(torch.randn(3, 5, 1, 1), torch.randn(4, 3, 1, 1), 1.0)
    from maulstick.tools.merge_loras import _joined

    joined = _joined(name, [(flat, 1.0, Path("a")), (conv, -2.0, Path("b"))])
    assert joined.down.shape == (5, 5, 1, 1)
    torch.testing.assert_close(delta_weight(joined), delta_weight(flat)[..., None, None] - 2 * delta_weight(conv))


def test_loras_that_do_not_go_together_are_refused(files, tmp_path):
    xl = save_lora(tmp_path / "xl.safetensors", sdxl_lora(json.loads(GOLDEN.read_text())), "sdxl")
    with pytest.raises(ModelError, match=r"first.safetensors is a LoRA for Stable Diffusion 1.x or 2.x, .* for SDXL"):
        merge_loras([LoraChoice(files[0]), LoraChoice(xl)], OUT)
    other = save_lora(tmp_path / "o.safetensors", {Q: LoraWeights(torch.ones(1, 7), torch.ones(9, 1), 1.0)})
    with pytest.raises(ModelError, match=rf"'{Q}' changes weights of different sizes in .*first.* and .*o.safetensors"):
        merge_loras([LoraChoice(files[0]), LoraChoice(other)], OUT)
    with pytest.raises(OptionError, match="--rank is 0"):
        merge_loras([LoraChoice(files[0])], OUT, rank=0)


def test_the_number_format_is_that_of_the_files_or_the_one_asked_for(tmp_path):
    half = save_lora(tmp_path / "h.safetensors", {TEXT: random_lora()[TEXT]}, dtype=torch.float16)
    full = save_lora(tmp_path / "f.safetensors", {TEXT: random_lora(seed=1)[TEXT]})
    cases = (
        ([half], [], torch.float16),
        ([half, full], [], torch.float32),
        ([full], ["--save_precision", "bf16"], torch.bfloat16),
    )
    for number, (sources, more, dtype) in enumerate(cases):
        output = tmp_path / f"{number}.safetensors"
        assert main(["merge", *map(str, sources), "--output", str(output), *more]) == 0
        assert read_adapter(output).dtypes == (dtype,)
