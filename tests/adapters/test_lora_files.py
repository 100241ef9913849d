"""LoRA files: bytes, hashes, folding, what is refused, and what reading says about files that are something else."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from maulstick.adapters import files
from maulstick.adapters.factors import LoraWeights, cast_weights, delta_weight, fold_alphas
from maulstick.adapters.files import (
    assign_modules,
    data_hash,
    file_hash,
    legacy_file_hash,
    lora_tensors,
    read_lora_file,
    save_lora_file,
)
from maulstick.adapters.key_names import SD_KEY_NAMES
from maulstick.errors import ModelError

Q = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
CONV = "mid_block.resnets.0.conv1"
TEXT = "encoder.layers.0.mlp.fc1"


def _linear(rank: int, alpha: float | None, seed: int, outputs: int = 6, inputs: int = 5) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, inputs, generator=generator)
    return LoraWeights(down, torch.randn(outputs, rank, generator=generator), alpha)


def _conv(rank: int, alpha: float | None, seed: int) -> LoraWeights:
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, 4, 3, 3, generator=generator)
    return LoraWeights(down, torch.randn(6, rank, 1, 1, generator=generator), alpha)


def _components() -> dict[str, dict[str, LoraWeights]]:
    return {"text_encoder": {TEXT: _linear(3, 1.0, 1)}, "unet": {Q: _linear(4, 2.0, 2), CONV: _conv(2, 2.0, 3)}}


def _save(path: Path, dtype: torch.dtype = torch.float32, metadata: dict[str, str] | None = None):
    return save_lora_file(path, lora_tensors(_components(), SD_KEY_NAMES, dtype), metadata or {"ss_epoch": "1"})


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_three_tensors_a_module_in_the_libraries_eyes(tmp_path, dtype):
    path = tmp_path / "lora.safetensors"
    _save(path, dtype)
    tensors = load_file(path)
    names = [SD_KEY_NAMES.name(component, module) for component, modules in _components().items() for module in modules]
    assert set(tensors) == {f"{n}.{part}" for n in names for part in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert tensors["lora_unet_mid_block_resnets_0_conv1.alpha"].shape == ()
    assert tensors["lora_unet_mid_block_resnets_0_conv1.lora_down.weight"].shape == (2, 4, 3, 3)
    for component, modules in _components().items():
        for module, weights in modules.items():
            name = SD_KEY_NAMES.name(component, module)
            assert torch.equal(tensors[f"{name}.lora_down.weight"], weights.down.to(dtype))
            assert torch.equal(tensors[f"{name}.lora_up.weight"], weights.up.to(dtype))
            assert tensors[f"{name}.alpha"].item() == weights.alpha


def test_layout_of_the_file(tmp_path):
    path = tmp_path / "lora.safetensors"
    hashes = _save(path, metadata={"z": "1", "ss_b": "é\ud800", "a": "2"})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert content[8:10] == b'{"'
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert next(iter(header)) == "__metadata__"
    assert header["__metadata__"] == {
        "a": "2",
        "ss_b": "é?",
        "sshs_legacy_hash": hashes.legacy,
        "sshs_model_hash": hashes.data,
        "z": "1",
    }
    assert list(header["__metadata__"]) == sorted(header["__metadata__"])
    library_content = save(load_file(path))
    (library_length,) = struct.unpack("<Q", library_content[:8])
    assert content[8 + length :] == library_content[8 + library_length :]


def test_mixed_dtypes_lie_as_the_library_lays_them(tmp_path):
    path = tmp_path / "lora.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, dtype in (("a", torch.float16), ("b", torch.float32), ("c", torch.bfloat16)):
        tensors[f"{name}.lora_down.weight"] = torch.randn(1, 3).to(dtype)
        tensors[f"{name}.lora_up.weight"] = torch.randn(3, 1).to(dtype)
    save_lora_file(path, tensors, {})
    content, library_content = path.read_bytes(), save(tensors)
    starts = [8 + struct.unpack("<Q", data[:8])[0] for data in (content, library_content)]
    assert content[starts[0] :] == library_content[starts[1] :]
    assert all(torch.equal(tensor, tensors[key]) for key, tensor in load_file(path).items())


SCRIPT = """
import sys, torch
from pathlib import Path
from maulstick.adapters.files import save_lora_file
torch.manual_seed(0)
names = sys.argv[2].split(",")
values = {name: torch.randn(2, 2) for name in sorted(names)}
tensors = {f"{n}.{part}": values[n] for n in names for part in ("lora_up.weight", "lora_down.weight")}
save_lora_file(Path(sys.argv[1]), tensors, {n: n for n in names})
"""


def test_equal_content_gives_equal_bytes_in_every_process(tmp_path):
    names = ["b", "a", "d", "c"]
    own, other = tmp_path / "own.safetensors", tmp_path / "other.safetensors"
    source = Path(files.__file__).parents[2]
    environment = {"PYTHONPATH": str(source), "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(other), ",".join(names)], check=True, env=environment)
    torch.manual_seed(0)
    values = {name: torch.randn(2, 2) for name in sorted(names)}
    parts = ("lora_down.weight", "lora_up.weight")
    tensors = {f"{name}.{part}": values[name] for part in parts for name in sorted(names)}
    save_lora_file(own, tensors, {name: name for name in reversed(names)})
    assert own.read_bytes() == other.read_bytes()


def test_hashes_against_the_bytes_of_the_file(tmp_path):
    path = tmp_path / "lora.safetensors"
    big = {"unet": {Q: _linear(64, 1.0, 1, outputs=3000, inputs=4000)}}  # 1.8 MB: the legacy window lies inside
    hashes = save_lora_file(path, lora_tensors(big, SD_KEY_NAMES), {"ss_x": "1", "modelspec.title": "t"})
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    expected = hashlib.sha256(content[8 + length :]).hexdigest()
    assert hashes.data == data_hash(path) == expected
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["sshs_model_hash"] == expected != hashlib.sha256(b"").hexdigest()
    # sd-scripts hashes a serialisation with the ss_ entries only; with one entry the library's order is not random.
    library = save(load_file(path), {"ss_x": "1"})
    assert metadata["sshs_legacy_hash"] == hashlib.sha256(library[0x100000:0x110000]).hexdigest()[:8] == hashes.legacy
    assert file_hash(path) == hashlib.sha256(content).hexdigest()
    assert legacy_file_hash(path) == hashlib.sha256(content[0x100000:0x110000]).hexdigest()[:8]


def test_the_data_hash_ignores_metadata_and_the_legacy_hash_of_a_small_file_is_of_nothing(tmp_path):
    first = _save(tmp_path / "a.safetensors", metadata={"ss_epoch": "1"})
    second = _save(tmp_path / "b.safetensors", metadata={"ss_epoch": "2", "more": "text"})
    assert first.data == second.data
    assert first.legacy == "e3b0c442"


def test_a_file_is_replaced_only_when_the_new_one_is_good(tmp_path):
    path = tmp_path / "lora.safetensors"
    _save(path)
    before = path.read_bytes()
    tensors = lora_tensors(_components(), SD_KEY_NAMES)
    tensors["lora_te_text_model_encoder_layers_0_mlp_fc1.lora_up.weight"][1, 2] = float("nan")
    with pytest.raises(
        ModelError, match=r"'lora_te_text_model_encoder_layers_0_mlp_fc1\.lora_up\.weight' holds 1 of 18"
    ):
        save_lora_file(path, tensors, {})
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["lora.safetensors"]


def test_values_beyond_fp16_are_refused_with_a_way_out(tmp_path):
    components = {"unet": {Q: _linear(2, 1.0, 1)}}
    components["unet"][Q].up[0, 0] = 1e6
    with pytest.raises(ModelError, match="65504 do not fit into fp16: save_precision bf16 or float"):
        save_lora_file(tmp_path / "x.safetensors", lora_tensors(components, SD_KEY_NAMES, torch.float16), {})
    save_lora_file(tmp_path / "x.safetensors", lora_tensors(components, SD_KEY_NAMES, torch.bfloat16), {})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.clear(), "the LoRA has no module"),
        (lambda t: t.pop("a.lora_up.weight"), r"module 'a' has no lora_up\.weight"),
        (lambda t: t.pop("a.lora_down.weight"), r"module 'a' has no lora_down\.weight"),
        (lambda t: t.update({"a.alpha": torch.tensor(0.0)}), r"'a\.alpha' is 0\.0"),
        (lambda t: t.update({"a.alpha": torch.tensor(-1.0)}), r"'a\.alpha' is -1\.0"),
        (lambda t: t.update({"a.alpha": torch.tensor(4)}), r"'a\.alpha' is torch\.int64"),
    ],
)
def test_unusable_tensors_are_not_written(tmp_path, change, words):
    tensors = {
        "a.lora_up.weight": torch.ones(3, 1),
        "a.lora_down.weight": torch.ones(1, 3),
        "a.alpha": torch.tensor(1.0),
    }
    change(tensors)
    with pytest.raises(ModelError, match=words):
        save_lora_file(tmp_path / "x.safetensors", tensors, {})
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_readers_refuse_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_HEADER_BYTES", 2000)
    with pytest.raises(ModelError, match="largest entry is ss_tag_frequency"):
        _save(tmp_path / "x.safetensors", metadata={"ss_tag_frequency": "x" * 1500, "ss_v2": "False"})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Alphas


MIXED = {"a": (4, 2.0), "b": (2, 2.0), "c": (3, 0.5), "d": (8, 8.0)}


@pytest.mark.parametrize("folding", ["one_alpha", "no_alpha", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folding_keeps_every_strength(folding, dtype):
    modules = {f"mid_block.resnets.{i}.conv1": _conv(rank, alpha, i) for i, (rank, alpha) in enumerate(MIXED.values())}
    tensors = lora_tensors({"unet": modules}, SD_KEY_NAMES, dtype, folding)
    for path, weights in modules.items():
        name = SD_KEY_NAMES.name("unet", path)
        alpha = tensors.get(f"{name}.alpha")
        stored = LoraWeights(
            tensors[f"{name}.lora_down.weight"],
            tensors[f"{name}.lora_up.weight"],
            None if alpha is None else alpha.item(),
        )
        tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
        exact = delta_weight(weights)
        assert (delta_weight(stored) - exact).norm() <= tolerance * exact.norm()
    alphas = {tensor.item() for key, tensor in tensors.items() if key.endswith(".alpha")}
    assert alphas == {"one_alpha": {2.0}, "no_alpha": set(), "none": {2.0, 0.5, 8.0}}[folding]


def test_each_component_has_its_own_alpha_and_equal_alphas_change_nothing():
    components = _components()
    for component, modules in components.items():
        folded = fold_alphas(modules, "one_alpha")
        for path, weights in modules.items():
            assert folded[path].up is weights.up, component
            assert folded[path].alpha == weights.alpha


def test_partly_missing_alphas_become_explicit():
    modules = {"a": _linear(4, None, 1), "b": _linear(2, 4.0, 2), "c": _linear(2, 2.0, 3)}
    folded = fold_alphas(modules, "one_alpha")
    assert {weights.alpha for weights in folded.values()} == {4.0}
    for path, weights in modules.items():
        torch.testing.assert_close(delta_weight(folded[path]), delta_weight(weights))
    only_missing = {"a": _linear(4, None, 1), "b": _linear(2, None, 2)}
    assert fold_alphas(only_missing, "one_alpha") == only_missing


def test_an_alpha_of_zero_is_never_written():
    folded = fold_alphas({"a": _linear(4, 0.0, 1), "b": _linear(4, 0.0, 2)}, "one_alpha")
    assert {weights.alpha for weights in folded.values()} == {1.0}
    assert not any(weights.up.any() for weights in folded.values())


@given(st.floats(1e-12, 1e6), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_rounding_alpha_does_not_change_the_strength(alpha, dtype):
    weights = LoraWeights(torch.ones(3, 2), torch.ones(2, 3), alpha)
    stored = cast_weights(weights, dtype)
    assert stored.alpha > 0
    assert torch.tensor(stored.alpha, dtype=dtype).item() == stored.alpha
    strength = stored.alpha * stored.up[0, 0].item()
    assert strength == pytest.approx(alpha, rel=torch.finfo(dtype).eps, abs=1e-7)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_was_written_is_read(tmp_path, dtype):
    path = tmp_path / "lora.safetensors"
    _save(path, dtype, metadata={"ss_epoch": "7"})
    file = read_lora_file(path)
    assert file.metadata["ss_epoch"] == "7"
    assert file.metadata["sshs_model_hash"] == data_hash(path)
    table = SD_KEY_NAMES.table({"unet": [Q, CONV], "text_encoder": [TEXT]})
    assigned = assign_modules(file, table, "Stable Diffusion 1.x")
    assert assigned.unmatched == []
    for component, modules in _components().items():
        for module, weights in modules.items():
            read = assigned.components[component][module]
            assert torch.equal(read.down, weights.down.to(dtype))
            assert torch.equal(read.up, weights.up.to(dtype))
            assert read.alpha == weights.alpha


def _plain(name: str = "lora_unet_mid_block_attentions_0_proj_in") -> dict[str, torch.Tensor]:
    return {f"{name}.lora_down.weight": torch.ones(2, 5), f"{name}.lora_up.weight": torch.ones(6, 2)}


def test_files_of_the_library_without_alpha_are_read(tmp_path):
    path = tmp_path / "old.safetensors"
    save_file(_plain(), path)
    file = read_lora_file(path)
    assert file.metadata == {}
    (weights,) = file.modules.values()
    assert weights.alpha is None
    assert torch.equal(delta_weight(weights), torch.full((6, 5), 2.0))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["base_model.model.mid_block.x.lora_A.weight"], "LoRA in peft's own naming"),
        (["unet.mid_block.x.lora_A.weight"], "LoRA in diffusers' naming"),
        (["unet.mid_block.x.processor.to_q_lora.down.weight"], "old diffusers naming"),
        (["unet.mid_block.x.lora.up.weight"], "old diffusers naming"),
        (["lora_unet_x.lora_down.weight", "lora_unet_x.dora_scale"], "a DoRA"),
        (["lora_unet_x.hada_w1_a"], "a LoHa"),
        (["lora_unet_x.lokr_w1"], "a LoKr"),
        (["lora_unet_x.lokr_w2_a"], "a LoKr"),
        (["lora_unet_x.oft_blocks"], "an OFT"),
        (["lora_unet_x.lora_mid.weight"], "Tucker"),
        (["image_proj.latents", "ip_adapter.1.to_k_ip.weight"], "an IP-Adapter"),
        (["model.diffusion_model.out.2.weight"], "a whole Stable Diffusion checkpoint"),
        (["down_blocks.0.resnets.0.conv1.weight"], "the weights of a UNet"),
        (["emb_params"], "a textual-inversion embedding"),
        (["decoder.conv_in.weight"], "the weights of a VAE"),
        (["text_model.encoder.layers.0.mlp.fc1.weight"], "the weights of a text encoder"),
        (["something.else"], "'something.else' that is no part of a LoRA"),
    ],
)
def test_other_kinds_of_files_are_named(tmp_path, keys, words):
    path = tmp_path / "other.safetensors"
    save_file({key: torch.ones(2, 2) for key in keys}, path)
    with pytest.raises(ModelError, match=words) as caught:
        read_lora_file(path)
    assert str(path) in str(caught.value)
    assert "kohya-style LoRA files" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"), r"has no lora_up\.weight"),
        (lambda t: t.pop("lora_unet_mid_block_attentions_0_proj_in.lora_down.weight"), r"has no lora_down\.weight"),
        (lambda t: t.update({"lora_unet_y.alpha": torch.tensor(1.0)}), r"'lora_unet_y' has no lora_down\.weight"),
        (lambda t: t.update({"lora_unet_mid_block_attentions_0_proj_in.alpha": torch.ones(2)}), "single number"),
        (
            lambda t: t.update({"lora_unet_mid_block_attentions_0_proj_in.lora_up.weight": torch.ones(6, 3)}),
            r"lora_down is \(2, 5\), lora_up is \(6, 3\)",
        ),
        (
            lambda t: t["lora_unet_mid_block_attentions_0_proj_in.lora_up.weight"].fill_(float("inf")),
            r"proj_in\.lora_up\.weight' holds values that are not finite",
        ),
        (lambda t: t.clear(), "holds no tensors"),
    ],
)
def test_broken_loras_are_refused(tmp_path, change, words):
    path = tmp_path / "broken.safetensors"
    tensors = _plain()
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=words):
        read_lora_file(path)


def test_damaged_files_are_refused_at_every_length(tmp_path):
    path = tmp_path / "lora.safetensors"
    _save(path)
    content = path.read_bytes()
    for length in (0, 4, 8, 9, 40, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"is not a safetensors file|is cut off"):
            read_lora_file(path)
    path.write_bytes(content + b"more")
    with pytest.raises(ModelError, match="damaged"):
        read_lora_file(path)
    path.write_bytes(content[:8] + b"{not json" + content[17:])
    with pytest.raises(ModelError, match="damaged"):
        read_lora_file(path)
    with pytest.raises(ModelError, match="There is no file"):
        read_lora_file(tmp_path / "missing.safetensors")


def test_a_pickle_is_refused_unopened(tmp_path):
    path = tmp_path / "lora.pt"
    torch.save(_plain(), path)
    with pytest.raises(ModelError, match="is not a safetensors file"):
        read_lora_file(path)


@pytest.mark.parametrize(
    ("name", "inputs", "family"),
    [
        ("lora_te2_text_model_encoder_layers_0_mlp_fc1", 1280, "SDXL"),
        ("lora_unet_input_blocks_4_1_transformer_blocks_1_attn1_to_q", 640, "SDXL"),
        ("lora_unet_joint_blocks_0_x_block_attn_qkv", 1536, "Stable Diffusion 3"),
        ("lora_unet_double_blocks_0_img_attn_qkv", 3072, "FLUX"),
        ("lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn2_to_k", 768, "Stable Diffusion 1.x"),
        ("lora_te_text_model_encoder_layers_0_self_attn_q_proj", 1024, "Stable Diffusion 2.x"),
        ("lora_unet_whatever", 7, "another model family"),
    ],
)
def test_a_lora_of_another_family_is_named(tmp_path, name, inputs, family):
    path = tmp_path / "other.safetensors"
    save_file({f"{name}.lora_down.weight": torch.ones(1, inputs), f"{name}.lora_up.weight": torch.ones(6, 1)}, path)
    with pytest.raises(ModelError, match=f"a LoRA for {family}; none of its 1 modules .* in this test model"):
        assign_modules(read_lora_file(path), SD_KEY_NAMES.table({"unet": [Q]}), "test")


def test_names_without_a_place_are_returned(tmp_path):
    path = tmp_path / "lora.safetensors"
    save_file(_plain() | _plain("lora_unet_nowhere"), path)
    table = SD_KEY_NAMES.table({"unet": ["mid_block.attentions.0.proj_in"]})
    assigned = assign_modules(read_lora_file(path), table, "test")
    assert list(assigned.components["unet"]) == ["mid_block.attentions.0.proj_in"]
    assert assigned.unmatched == ["lora_unet_nowhere"]
