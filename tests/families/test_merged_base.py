"""``base_weights``: any LoRA file merged into the base, as ``maulstick merge`` does it, before anything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maulstick.errors import ModelError, OptionError
from maulstick.families.base import Family
from maulstick.families.load import load_family
from maulstick.families.merged_base import multipliers
from maulstick.options.schema import ModelOptions
from maulstick.tools.checkpoint import open_checkpoint
from maulstick.tools.lora_choice import LoraChoice
from maulstick.tools.merge_checkpoint import merge_into_checkpoint, plan_merge
from maulstick.train.console import QuietConsole
from tests.models import model_folder, small_model
from tests.sd3_models import kohya_file, sd3_file
from tests.tools.lora_files import random_lora, save_lora


def load(model: Path, *files: Path, strengths: tuple[float, ...] = (), dtype: torch.dtype = torch.float32) -> Family:
    options = ModelOptions(
        pretrained_model_name_or_path=str(model), base_weights=list(files), base_weights_multiplier=list(strengths)
    )
    return load_family(options, device="cpu", dtype=dtype)


def weights(family: Family) -> dict[str, Tensor]:
    networks = {"denoiser": family.denoiser, **family.text_encoders}
    return {
        f"{part}.{name}": tensor for part, network in networks.items() for name, tensor in network.state_dict().items()
    }


def merged_by_command(model: Path, output: Path, *choices: tuple[Path, float]) -> Path:
    opened = open_checkpoint(model)
    chosen = [LoraChoice(path, strength) for path, strength in choices]
    merge_into_checkpoint(opened, plan_merge(opened, chosen), output, QuietConsole())
    return output


def mixed_file(path: Path) -> Path:
    """A file with one module of each kind."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    block = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0"
    out, width = small_model("tiny").unet.down_blocks[0].attentions[0].transformer_blocks[0].attn1.to_q.weight.shape
    tensors = {
        f"{block}_attn1_to_q.hada_w1_a": random(out, 2),
        f"{block}_attn1_to_q.hada_w1_b": random(2, width),
        f"{block}_attn1_to_q.hada_w2_a": random(out, 2),
        f"{block}_attn1_to_q.hada_w2_b": random(2, width),
        f"{block}_attn1_to_k.lokr_w1": random(2, 2),
        f"{block}_attn1_to_k.lokr_w2": random(out // 2, width // 2),
        f"{block}_attn1_to_v.oft_blocks": random(4, out // 4, out // 4),
        f"{block}_attn1_to_out_0.lora_down.weight": random(2, width),
        f"{block}_attn1_to_out_0.lora_up.weight": random(out, 2),
        f"{block}_attn1_to_out_0.alpha": torch.tensor(2.0),
        f"{block}_attn1_to_out_0.dora_scale": 1 + random(1, width),
    }
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("kind", ["two files", "mixed kinds", "sd3"])
def test_the_merged_base_is_that_of_the_merge_command(kind: str, tmp_path: Path) -> None:
    if kind == "sd3":
        model, output = sd3_file(), tmp_path / "merged.safetensors"
        files = ((kohya_file(tmp_path / "lora.safetensors"), 0.1),)
    else:
        model, output = model_folder("tiny"), tmp_path / "merged"
        lora = save_lora(tmp_path / "lora.safetensors", random_lora("tiny"))
        files = ((lora, 0.5), (mixed_file(tmp_path / "mixed.safetensors"), 1.0)) if kind == "two files" else ()
        files = files or ((mixed_file(tmp_path / "mixed.safetensors"), -0.7),)
    merged = weights(load(merged_by_command(model, output, *files)))
    found = weights(load(model, *(path for path, _ in files), strengths=tuple(strength for _, strength in files)))
    base = weights(load(model))
    assert found.keys() == merged.keys() == base.keys()
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert len(changed) > 3
    for name in base:
        if name in changed:
            torch.testing.assert_close(found[name], merged[name], rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(found[name], base[name])


def test_the_sum_is_made_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    modules = random_lora("tiny")
    file = save_lora(tmp_path / "lora.safetensors", modules)
    base, found = (load(model_folder("tiny"), *files, dtype=torch.bfloat16) for files in ((), (file,)))
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    lora = modules[f"lora_unet_{name.replace('.', '_')}"]
    assert lora.alpha is not None
    change = lora.alpha / lora.down.shape[0] * (lora.up @ lora.down)
    before = base.denoiser.get_submodule(name).weight
    expected = (before.float() + change).bfloat16()
    assert torch.equal(found.denoiser.get_submodule(name).weight, expected)
    assert found.denoiser.get_submodule(name).weight.dtype == torch.bfloat16
    assert not torch.equal(before, expected)


def test_text_encoders_are_changed_each_time_they_are_loaded(tmp_path: Path) -> None:
    file = save_lora(tmp_path / "lora.safetensors", random_lora("tiny"))
    base, found = load(model_folder("tiny")), load(model_folder("tiny"), file)
    tokens = base.tokenize(["a cat"])
    states = [each.encode_text(tokens)["encoder_hidden_states"] for each in (base, found)]
    found.release_encoders(vae=False, text_encoders=True)
    assert not found.encoders_on_device()
    again = found.encode_text(tokens)["encoder_hidden_states"]
    assert torch.equal(again, states[1])
    assert not torch.allclose(states[0], states[1], atol=1e-3)
    # What is cached for one base must not be taken for the other.
    assert base.text_identity != found.text_identity
    assert base.latent_identity == found.latent_identity
    without_text = save_lora(tmp_path / "unet.safetensors", random_lora("tiny", text=False))
    assert load(model_folder("tiny"), without_text).text_identity == base.text_identity


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    modules = random_lora("tiny", text=False)
    file = save_lora(tmp_path / "lora.safetensors", modules)
    with pytest.raises(ModelError, match=r"does not fit this SD3.*'lora_unet_down_blocks"):
        load(sd3_file(), file)
    tensors = load_file(file)
    other = {name.replace("down_blocks_0_attentions_0_proj_in", "down_blocks_9_attentions_0_proj_in"): tensor
             for name, tensor in tensors.items()}  # fmt: skip
    save_file(other, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match=r"no place for 1 of its \d+ modules \('lora_unet_down_blocks_9"):
        load(model_folder("tiny"), tmp_path / "other.safetensors")
    wide = {name: tensor.repeat(1, 2) if name.endswith("attn2_to_k.lora_down.weight") else tensor
            for name, tensor in tensors.items()}  # fmt: skip
    save_file(wide, tmp_path / "wide.safetensors")
    with pytest.raises(
        ModelError, match=r"wide.safetensors: module 'lora_unet_.*_attn2_to_k' changes a weight of shape"
    ):
        load(model_folder("tiny"), tmp_path / "wide.safetensors")
    with pytest.raises(ModelError, match="cannot hold"):
        load(model_folder("tiny"), file, strengths=(1e6,), dtype=torch.float16)


def test_multipliers_belong_to_files() -> None:
    a, b = Path("a"), Path("b")
    assert multipliers(ModelOptions(base_weights=[a, b], base_weights_multiplier=[0.5])) == [0.5, 1.0]
    with pytest.raises(OptionError, match="base_weights_multiplier has 3 values for 2 base_weights"):
        multipliers(ModelOptions(base_weights=[a, b], base_weights_multiplier=[1, 1, 1]))
    with pytest.raises(OptionError, match="merges nothing of b"):
        multipliers(ModelOptions(base_weights=[a, b], base_weights_multiplier=[1, 0]))
