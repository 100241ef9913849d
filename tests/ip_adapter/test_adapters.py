"""IP-Adapters in bare networks: structure, first weights, files that diffusers reads back, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers.models.attention_processor import (
    AttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from safetensors.torch import load_file, save_file

from maulstick.adapters.ip_adapter_files import (
    IpAdapterSpec,
    is_ip_adapter_file,
    read_ip_adapter,
    save_flat,
    save_nested,
)
from maulstick.errors import ModelError
from maulstick.families.ip_adapter_sd3 import Sd3IpAdapter, make_sd3_layers, sd3_spec
from maulstick.families.ip_adapter_unet import UnetIpAdapter, make_unet_layers, unet_spec
from tests.models import TEXT_WIDTH, small_model
from tests.sd3_models import T5_WIDTH, small_sd3, transformer_config
from tests.sdxl_models import small_sdxl

FEATURES = 48
PLAIN = IpAdapterSpec("plain", 4, FEATURES)
PLUS = IpAdapterSpec("plus", 6, FEATURES, 64)
TIME = IpAdapterSpec("time", 4, FEATURES, 128)


def unet():
    return copy.deepcopy(small_model().unet)


def transformer(*, qk_norm: bool = True):
    return copy.deepcopy(small_sd3(qk_norm=qk_norm).transformer)


def unet_output(network, features=None):
    torch.manual_seed(0)
    added = None if features is None else {"image_embeds": [features[:, None]]}
    with torch.no_grad():
        return network(
            torch.randn(2, 4, 8, 8),
            torch.tensor([500, 20]),
            encoder_hidden_states=torch.randn(2, 77, TEXT_WIDTH),
            added_cond_kwargs=added,
        ).sample


def sd3_call(network, features=None):
    torch.manual_seed(0)
    return network(
        hidden_states=torch.randn(2, 16, 8, 8),
        timestep=torch.tensor([500.0, 20.0]),
        encoder_hidden_states=torch.randn(2, 5, T5_WIDTH),
        pooled_projections=torch.randn(2, transformer_config()["pooled_projection_dim"]),
        joint_attention_kwargs=None if features is None else {"ip_adapter_image_embeds": features},
    ).sample


def sd3_output(network, features=None):
    with torch.no_grad():
        return sd3_call(network, features)


def features_for(spec: IpAdapterSpec) -> torch.Tensor:
    shape = (2, FEATURES) if spec.kind == "plain" else (2, 9, FEATURES)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def shaken(adapter):
    """Give every parameter another value, as training would."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in adapter.named_parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return adapter


# ---------------------------------------------------------------------------------------- structure


def test_a_unet_gets_the_second_attention_beside_the_text_only() -> None:
    network = unet()
    adapter = UnetIpAdapter(network, PLAIN)
    kinds = {name: type(processor) for name, processor in network.attn_processors.items()}
    assert all(
        kind is (IPAdapterAttnProcessor2_0 if name.endswith("attn2.processor") else AttnProcessor2_0)
        for name, kind in kinds.items()
    )
    assert list(adapter.layers.processors) == list(range(1, 32, 2))
    trained = {id(p) for p in network.parameters() if p.requires_grad}
    assert trained == {id(p) for _, p in adapter.named_parameters()}
    assert {p.dtype for _, p in adapter.named_parameters()} == {torch.float32}


def test_keys_and_values_begin_as_those_of_the_text() -> None:
    network = unet()
    adapter = UnetIpAdapter(network, PLAIN)
    for place, path in adapter.layers.paths.items():
        attention, processor = network.get_submodule(path), adapter.layers.processors[place]
        assert torch.equal(processor.to_k_ip[0].weight, attention.to_k.weight)
        assert torch.equal(processor.to_v_ip[0].weight, attention.to_v.weight)


def test_sdxl_numbers_its_seventy_layers_as_the_published_files_do() -> None:
    layers = make_unet_layers(small_sdxl().unet, IpAdapterSpec("plain", 4, FEATURES), with_weights=False)
    assert list(layers.processors) == list(range(1, 140, 2))


def test_sizes_are_those_of_the_published_adapters() -> None:
    class Unet:
        def __init__(self, width):
            self.config = type("Config", (), {"cross_attention_dim": width})

    assert unet_spec(Unet(768), "plus", None, 1280) == IpAdapterSpec("plus", 16, 1280, 768)
    assert unet_spec(Unet(2048), "plus", None, 1280) == IpAdapterSpec("plus", 16, 1280, 1280)
    assert unet_spec(Unet(768), "plain", None, 1024) == IpAdapterSpec("plain", 4, 1024)
    with pytest.raises(ModelError, match="ip_adapter_tokens = 8: a plain IP-Adapter has 4"):
        unet_spec(Unet(768), "plain", 8, 1024)

    class Transformer:
        config = type("Config", (), {"attention_head_dim": 64, "num_attention_heads": 38})

    assert sd3_spec(Transformer, None, 1152) == IpAdapterSpec("time", 64, 1152, 1280)


def test_pitfall_1_processors_before_the_resampler() -> None:
    network = transformer()
    adapter = Sd3IpAdapter(network, TIME)
    # Afterwards the resampler's own attention layers are listed as well.
    assert len(network.attn_processors) == len(adapter.layers.processors) + 4
    inside = [type(m) for m in network.image_proj.modules()]
    assert SD3IPAdapterJointAttnProcessor2_0 not in inside
    # Two in the first block (dual attention), one in each of the others, in the order of the file.
    assert list(adapter.layers.paths.values()) == [
        "transformer_blocks.0.attn",
        "transformer_blocks.0.attn2",
        "transformer_blocks.1.attn",
        "transformer_blocks.2.attn",
    ]
    sd3_call(network, features_for(TIME)).pow(2).mean().backward()
    without = [name for name, parameter in adapter.named_parameters() if parameter.grad is None]
    assert without == []
    plus = unet()
    held = UnetIpAdapter(plus, PLUS)
    assert not any(isinstance(m, IPAdapterAttnProcessor2_0) for m in plus.encoder_hid_proj.modules())
    assert len(held.layers.processors) == 16


def test_pitfall_3_scale_is_one_and_not_diffusers_half() -> None:
    network = transformer()
    adapter = Sd3IpAdapter(network, TIME)
    assert {processor.scale for processor in adapter.layers.processors.values()} == {1.0}
    with adapter.at_scale(0.25):
        assert {processor.scale for processor in adapter.layers.processors.values()} == {0.25}
    assert adapter.scale == 1.0
    assert {tuple(p.scale) for p in UnetIpAdapter(unet(), PLAIN).layers.processors.values()} == {(1.0,)}


def test_pitfall_4_sd3_is_no_identity_at_first_and_a_small_scale_is_nearly_one() -> None:
    network = transformer()
    base = sd3_output(network)
    adapter = Sd3IpAdapter(network, TIME)
    for processor in adapter.layers.processors.values():
        torch.nn.init.zeros_(processor.to_v_ip.weight)
    features = features_for(TIME)

    def change(scale: float) -> float:
        adapter.scale = scale
        return float((sd3_output(network, features) - base).norm() / base.norm())

    assert change(1.0) > 0.01
    assert change(0.01) < 0.02 * change(1.0)
    assert change(0.0) == 0.0


def test_without_features_or_at_scale_0_the_base_is_unchanged() -> None:
    network = transformer()
    base = sd3_output(network)
    shaken(Sd3IpAdapter(network, TIME))
    assert torch.equal(sd3_output(network), base)
    plain = unet()
    base = unet_output(plain)
    adapter = shaken(UnetIpAdapter(plain, PLAIN))
    # Other than SD3's, diffusers' UNet cannot be run without features once it has an IP-Adapter.
    with adapter.predicting({}, 2) as inputs:
        assert torch.equal(unet_output(plain, inputs["image_embeds"][0][:, 0]), base)
    assert adapter.scale == 1.0
    assert not torch.equal(unet_output(plain, features_for(PLAIN)), base)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["unet", "sd3"])
def test_pitfall_7_fp32_adapter_in_a_half_precision_base(precision: torch.dtype, family: str) -> None:
    network = (unet() if family == "unet" else transformer()).to(precision)
    spec = PLUS if family == "unet" else TIME
    adapter = UnetIpAdapter(network, spec) if family == "unet" else Sd3IpAdapter(network, spec)
    with torch.autocast("cpu", dtype=precision):
        if family == "unet":
            output = network(
                torch.randn(1, 4, 8, 8).to(precision),
                torch.tensor([500]),
                encoder_hidden_states=torch.randn(1, 7, TEXT_WIDTH).to(precision),
                added_cond_kwargs={"image_embeds": [features_for(spec)[:1, None]]},
            ).sample
        else:
            output = network(
                hidden_states=torch.randn(1, 16, 8, 8).to(precision),
                timestep=torch.tensor([500.0]),
                encoder_hidden_states=torch.randn(1, 5, T5_WIDTH).to(precision),
                pooled_projections=torch.randn(1, transformer_config()["pooled_projection_dim"]).to(precision),
                joint_attention_kwargs={"ip_adapter_image_embeds": features_for(spec)[:1]},
            ).sample
    output.float().pow(2).mean().backward()
    gradients = [parameter.grad for _, parameter in adapter.named_parameters()]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in gradients)
    assert all(torch.isfinite(grad).all() for grad in gradients)


def test_a_second_adapter_is_refused() -> None:
    network, other = unet(), transformer()
    UnetIpAdapter(network, PLAIN)
    Sd3IpAdapter(other, TIME)
    with pytest.raises(ModelError, match="can have no IP-Adapter"):
        UnetIpAdapter(network, PLAIN)
    with pytest.raises(ModelError, match="has an IP-Adapter already"):
        Sd3IpAdapter(other, TIME)


# ---------------------------------------------------------------------------------------- files


def reloaded(network, path):
    """Read a file into a network as ``load_ip_adapter`` of diffusers does, with strict checking."""
    flat = load_file(path)
    nested: dict = {"image_proj": {}, "ip_adapter": {}}
    for name, tensor in flat.items():
        part, rest = name.split(".", 1)
        nested[part][rest] = tensor
    network._load_ip_adapter_weights([nested] if hasattr(network, "up_blocks") else nested, low_cpu_mem_usage=False)
    return network


@pytest.mark.parametrize("spec", [PLAIN, PLUS], ids=lambda spec: spec.kind)
def test_diffusers_reads_a_unets_file_strictly_and_computes_the_same(spec: IpAdapterSpec, tmp_path) -> None:
    trained = unet()
    adapter = shaken(UnetIpAdapter(trained, spec))
    save_flat(tmp_path / "a.safetensors", adapter.file_tensors(), {})
    features = features_for(spec)
    loaded = reloaded(unet(), tmp_path / "a.safetensors")
    assert torch.equal(unet_output(loaded, features), unet_output(trained, features))


@pytest.mark.parametrize("qk_norm", [True, False])
def test_diffusers_reads_an_sd3_file_strictly_and_computes_the_same(qk_norm: bool, tmp_path) -> None:
    trained = transformer(qk_norm=qk_norm)
    # diffusers takes a resampler's heads to be 64 wide.
    spec = IpAdapterSpec("time", 4, FEATURES, 64)
    adapter = shaken(Sd3IpAdapter(trained, spec))
    save_flat(tmp_path / "a.safetensors", adapter.file_tensors(), {})
    loaded = reloaded(transformer(qk_norm=qk_norm), tmp_path / "a.safetensors")
    for processor in loaded.attn_processors.values():
        if isinstance(processor, SD3IPAdapterJointAttnProcessor2_0):
            # Pitfall 3: 0.5 after every load.
            assert processor.scale == 0.5
            processor.scale = 1.0
    features = features_for(spec)
    assert torch.equal(sd3_output(loaded, features), sd3_output(trained, features))


def test_names_in_files_are_the_published_ones(tmp_path) -> None:
    plain = set(UnetIpAdapter(unet(), PLAIN).file_tensors())
    layers = {f"ip_adapter.{place}.to_{part}_ip.weight" for place in range(1, 32, 2) for part in "kv"}
    assert plain == layers | {f"image_proj.{n}.{p}" for n in ("proj", "norm") for p in ("weight", "bias")}
    plus = set(UnetIpAdapter(unet(), PLUS).file_tensors()) - layers
    inside = ("0.norm1.weight", "0.norm1.bias", "0.norm2.weight", "0.norm2.bias", "0.to_q.weight", "0.to_kv.weight")
    inside += ("0.to_out.weight", "1.0.weight", "1.0.bias", "1.1.weight", "1.3.weight")
    outside = {"latents", *(f"{n}.{p}" for n in ("proj_in", "proj_out", "norm_out") for p in ("weight", "bias"))}
    assert plus == {f"image_proj.{n}" for n in outside | {f"layers.{i}.{n}" for i in range(4) for n in inside}}
    sd3 = Sd3IpAdapter(transformer(), TIME).file_tensors()
    assert {name.split(".", 2)[2] for name in sd3 if name.startswith("ip_adapter.3.")} == {
        "norm_ip.linear.weight",
        "norm_ip.linear.bias",
        "to_k_ip.weight",
        "to_v_ip.weight",
        "norm_q.weight",
        "norm_k.weight",
        "norm_ip_k.weight",
    }
    assert "image_proj.layers.3.attn.to_kv.weight" in sd3


@pytest.mark.parametrize("kind", ["plain", "plus", "time"])
def test_a_file_comes_back_the_same_in_every_form(kind: str, tmp_path) -> None:
    adapter = shaken(
        {
            "plain": lambda: UnetIpAdapter(unet(), PLAIN),
            "plus": lambda: UnetIpAdapter(unet(), PLUS),
            "time": lambda: Sd3IpAdapter(transformer(), TIME),
        }[kind]()
    )
    tensors = adapter.file_tensors()
    save_flat(tmp_path / "a.safetensors", tensors, {"note": "kept"})
    save_nested(tmp_path / "a.bin", tensors)
    nested = torch.load(tmp_path / "a.bin", weights_only=True)
    assert set(nested) == {"image_proj", "ip_adapter"}
    if kind == "time":
        assert "layers.0.2.1.weight" in nested["image_proj"]
        assert not any("adaln" in name for name in nested["image_proj"])
    for path in (tmp_path / "a.safetensors", tmp_path / "a.bin"):
        assert is_ip_adapter_file(path)
        file = read_ip_adapter(path)
        assert file.spec == adapter.spec
        assert file.tensors.keys() == tensors.keys()
        assert all(torch.equal(file.tensors[name], tensor) for name, tensor in tensors.items())
    fresh = {
        "plain": lambda: UnetIpAdapter(unet(), PLAIN),
        "plus": lambda: UnetIpAdapter(unet(), PLUS),
        "time": lambda: Sd3IpAdapter(transformer(), TIME),
    }[kind]()
    fresh.load(read_ip_adapter(tmp_path / "a.bin"))
    for (name, mine), (_, theirs) in zip(fresh.named_parameters(), adapter.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_diffusers_reads_the_nested_sd3_form(tmp_path) -> None:
    spec = IpAdapterSpec("time", 4, FEATURES, 64)
    trained = transformer()
    adapter = shaken(Sd3IpAdapter(trained, spec))
    save_nested(tmp_path / "a.bin", adapter.file_tensors())
    loaded = transformer()
    loaded._load_ip_adapter_weights(torch.load(tmp_path / "a.bin", weights_only=True), low_cpu_mem_usage=False)
    for place, processor in adapter.layers.processors.items():
        theirs = list(loaded.attn_processors.values())[place].state_dict()
        assert all(torch.equal(theirs[name], tensor) for name, tensor in processor.state_dict().items())
    theirs = loaded.image_proj.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in trained.image_proj.state_dict().items())


def test_pitfall_5_what_diffusers_is_silent_about_is_refused(tmp_path) -> None:
    adapter = UnetIpAdapter(unet(), PLUS)
    whole = {name: tensor.clone() for name, tensor in adapter.file_tensors().items()}

    def changed(name: str, tensors) -> IpAdapterSpec:
        save_file(
            {key: tensor.contiguous().clone() for key, tensor in tensors.items()}, tmp_path / f"{name}.safetensors"
        )
        return read_ip_adapter(tmp_path / f"{name}.safetensors")

    lacking = {name: t for name, t in whole.items() if name != "ip_adapter.3.to_v_ip.weight"}
    with pytest.raises(ModelError, match=r"1 tensors are missing \(ip_adapter.3.to_v_ip.weight\)"):
        adapter.load(changed("lacking", lacking))
    with pytest.raises(ModelError, match="it has 15 attention layers, this model has 16"):
        adapter.load(changed("layer", {n: t for n, t in whole.items() if not n.startswith("ip_adapter.31.")}))
    with pytest.raises(ModelError, match=r"1 tensors are unknown \(image_proj.extra\)"):
        adapter.load(changed("unknown", {**whole, "image_proj.extra": torch.zeros(1)}))
    deeper = {name.replace("layers.3.", "layers.4."): t for name, t in whole.items() if ".layers.3." in name}
    with pytest.raises(ModelError, match="its resampler has 5 layers"):
        changed("deep", {**whole, **deeper})
    with pytest.raises(ModelError, match="its resampler has 3 layers"):
        changed("shallow", {name: t for name, t in whole.items() if ".layers.3." not in name})
    narrow = {name: t[:32] if name.endswith(".0.to_q.weight") else t for name, t in whole.items()}
    with pytest.raises(ModelError, match=r"to_q.weight' has shape \[32, 64\], this model needs \[64, 64\]"):
        adapter.load(changed("narrow", narrow))
    broken = {**whole, "image_proj.latents": torch.full_like(whole["image_proj.latents"], torch.nan)}
    with pytest.raises(ModelError, match=r"'image_proj.latents' holds values that are not finite"):
        changed("broken", broken)
    before = adapter.file_tensors()
    assert all(torch.equal(before[name], tensor) for name, tensor in whole.items())


def test_pitfall_6_weights_loaded_for_training_are_fp32(tmp_path) -> None:
    network = unet().to(torch.bfloat16)
    adapter = shaken(UnetIpAdapter(unet(), PLAIN))
    save_flat(tmp_path / "half.safetensors", adapter.file_tensors(torch.bfloat16), {})
    loaded = UnetIpAdapter(network, PLAIN)
    loaded.load(read_ip_adapter(tmp_path / "half.safetensors"))
    assert {parameter.dtype for _, parameter in loaded.named_parameters()} == {torch.float32}
    assert all(parameter.requires_grad for _, parameter in loaded.named_parameters())


def test_files_of_other_kinds_are_refused(tmp_path) -> None:
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(1, 1)}, tmp_path / "lora.safetensors")
    assert not is_ip_adapter_file(tmp_path / "lora.safetensors")
    with pytest.raises(ModelError, match="is no IP-Adapter"):
        read_ip_adapter(tmp_path / "lora.safetensors")
    save_file({"image_proj.proj.0.weight": torch.zeros(1, 1)}, tmp_path / "face.safetensors")
    with pytest.raises(ModelError, match="of a kind that is not known here"):
        read_ip_adapter(tmp_path / "face.safetensors")
    with pytest.raises(ModelError, match="There is no file"):
        read_ip_adapter(tmp_path / "absent.safetensors")
    adapter = UnetIpAdapter(unet(), PLAIN)
    save_flat(tmp_path / "plus.safetensors", UnetIpAdapter(unet(), PLUS).file_tensors(), {})
    with pytest.raises(ModelError, match="is an IP-Adapter Plus, not an IP-Adapter"):
        adapter.load(read_ip_adapter(tmp_path / "plus.safetensors"))
    bad = adapter.file_tensors()
    bad["image_proj.norm.bias"] = bad["image_proj.norm.bias"].clone()
    bad["image_proj.norm.bias"][3] = torch.inf
    with pytest.raises(ModelError, match=r"'image_proj.norm.bias' holds 1 of 64 values that are not finite"):
        save_flat(tmp_path / "bad.safetensors", bad, {})
    assert not (tmp_path / "bad.safetensors").exists()


def test_counts_of_the_real_models() -> None:
    """Numbers of tensors and values that were counted on the published configurations."""
    from diffusers import SD3Transformer2DModel

    medium = {
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 192,
        "in_channels": 16,
    }
    with torch.device("meta"):
        network = SD3Transformer2DModel(**medium)
    layers = make_sd3_layers(network, sd3_spec(network, None, 1152), with_weights=False)
    assert len(layers.processors) == 24
    assert len(layers.parameters()) == 231
    assert round(sum(p.numel() for p in layers.parameters().values()) / 1e6) == 318
