"""IP-Adapters trained by the one loop: what the file gives in diffusers, drops, ramp, average, resume, refusals."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from maulstick.errors import DataError, ModelError, OptionError
from maulstick.families.ip_adapter import IMAGE_FEATURES
from maulstick.families.load import load_family
from maulstick.train.plan import plan_lines
from tests.ip_adapter.conftest import write_images


def trained(run):
    result = run.train()
    assert result.exit_code == 0
    return result


def loaded_family(run):
    return load_family(run.options.model, device="cpu", dtype=torch.float32, objective=run.options.objective)


def pipeline_picture(family, image_arguments, path=None):
    """Draw with diffusers' own pipeline, after its own loader where a file is given."""
    pipeline = family.pipeline("euler")
    if path is not None:
        more = {} if hasattr(pipeline, "transformer") else {"subfolder": ""}
        pipeline.load_ip_adapter(
            str(path.parent), weight_name=path.name, image_encoder_folder=None, low_cpu_mem_usage=False, **more
        )
        # 0.5 for SD3 after every load; what was trained at 1 is meant for 1.
        pipeline.set_ip_adapter_scale(1.0)
    conditioning = family.pipeline_conditioning(["a shape"], [""])
    latents = torch.randn(1, family.latent_channels, 4, 4, generator=torch.Generator().manual_seed(0))
    return pipeline(
        **conditioning,
        **image_arguments,
        latents=latents,
        height=32,
        width=32,
        num_inference_steps=2,
        guidance_scale=3.0,
        output_type="latent",
    ).images


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("sd1", ()),
        ("sd1", ("--ip_adapter_type", "plus")),
        pytest.param("sdxl", ("--ip_adapter_type", "plus"), marks=pytest.mark.slow),
        ("sd3", ()),
        pytest.param("sd3-plain", (), marks=pytest.mark.slow),
    ],
)
def test_diffusers_draws_the_same_from_the_file_as_the_run_does(model, arguments, make_run, tmp_path) -> None:
    run = make_run(*arguments, model=model)
    path = trained(run).path
    family = run.prepared.family
    conditioner = run.loop.parts.conditioner
    features = conditioner.features.features_of(list(conditioner.references.values())[:1])
    both = torch.cat([conditioner._negative_features()[None], features])
    family.denoiser.eval()
    given = family.ip_adapter.pipeline_inputs(both)
    with torch.no_grad():
        own = pipeline_picture(family, given)
        fresh = loaded_family(run)
        assert torch.equal(pipeline_picture(fresh, given, path), own)
        assert not torch.equal(pipeline_picture(loaded_family(run), {}), own)


def test_everything_that_trains_gets_a_gradient_and_the_base_stays(make_run) -> None:
    run = make_run(model="sd3")
    run.prepare()
    base = {name: p.clone() for name, p in run.prepared.family.denoiser.named_parameters() if not p.requires_grad}
    before = [p.detach().clone() for _, p in run.loop.parts.named_parameters]
    trained(run)
    assert all(torch.equal(p, base[n]) for n, p in run.prepared.family.denoiser.named_parameters() if n in base)
    moved = [not torch.equal(p, old) for (_, p), old in zip(run.loop.parts.named_parameters, before, strict=True)]
    assert all(moved)
    assert run.loop.state.skipped == 0


def test_the_plan_and_the_file_say_what_it_is(make_run) -> None:
    run = make_run("--ip_adapter_type", "plus", "--ip_adapter_tokens", "8", "--ip_adapter_scale_warmup_steps", "2")
    path = trained(run).path
    lines = plan_lines(run.prepared.plan)
    assert any("unet: 16 modules (IP-Adapter Plus)" in line and "8 tokens of CLIP features" in line for line in lines)
    assert any("dropped: image 5 %, caption 5 %, both 5 %; scale rises to 1 over 2 steps" in line for line in lines)
    counted = sum(parameter.numel() for _, parameter in run.loop.parts.named_parameters)
    assert run.prepared.plan.components[0].parameters == counted
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["modelspec.architecture"] == "stable-diffusion-v1/ip-adapter"
    assert metadata["maulstick_ip_adapter_scale"] == "1"
    assert metadata["maulstick_ip_adapter_tokens"] == "8"
    assert metadata["ss_learning_rate"] == "0.001"
    assert not any(name in metadata for name in ("ss_network_dim", "ss_network_alpha"))
    assert {tensor.dtype for tensor in load_file(path).values()} == {torch.float32}


# ---------------------------------------------------------------------------------------- drops and ramp


def test_drops_exclude_each_other_and_follow_seed_and_place(make_run) -> None:
    rates = ("--image_dropout_rate", "0.2", "--text_dropout_rate", "0.3", "--image_text_dropout_rate", "0.1")
    run = make_run(*rates)
    run.prepare()
    conditioner, batches = run.loop.parts.conditioner, run.prepared.batches
    record = run.prepared.index.records[0]
    items = [batches.draw(record, epoch, position) for epoch in range(20) for position in range(100)]
    drops = [conditioner.dropped(item) for item in items]
    assert drops == [conditioner.dropped(item) for item in items]
    share = {kind: drops.count(kind) / len(drops) for kind in set(drops)}
    # Standard deviations are about 0.01.
    assert share[True, False] == pytest.approx(0.2, abs=0.04)
    assert share[False, True] == pytest.approx(0.3, abs=0.04)
    assert share[True, True] == pytest.approx(0.1, abs=0.03)


def test_pitfall_9_a_dropped_image_is_zero_features_and_never_absent(make_run) -> None:
    run = make_run("--image_dropout_rate", "0.9", "--text_dropout_rate", "0", "--image_text_dropout_rate", "0")
    run.prepare()
    conditioner = run.loop.parts.conditioner
    record = run.prepared.index.records[0]
    items = [run.prepared.batches.draw(record, 0, position) for position in range(40)]
    features = conditioner.about(items)[IMAGE_FEATURES]
    zero = [not row.any() for row in features]
    assert zero == [conditioner.dropped(item)[0] for item in items]
    assert any(zero)
    assert not all(zero)
    assert conditioner.captions(items) == [item.caption for item in items]
    # With every image dropped there is a gradient all the same.
    run.loop.train_mode()
    (window, count) = next(run.loop.windows(0))
    run.loop.accumulate_gradients(window, count)
    assert all(parameter.grad is not None for _, parameter in run.loop.parts.named_parameters)


def test_the_scale_rises_from_above_zero_to_one(make_run) -> None:
    run = make_run("--ip_adapter_scale_warmup_steps", "4")
    run.prepare()
    adapter, conditioner = run.prepared.family.ip_adapter, run.loop.parts.conditioner
    seen = []
    for step in range(6):
        conditioner.at_step(step)
        seen.append(adapter.scale)
    assert seen == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_paired_references_are_what_it_looks_at(make_run, tmp_path) -> None:
    write_images(tmp_path / "refs", seed=9)
    run = make_run("--conditioning_data_dir", str(tmp_path / "refs"))
    trained(run)
    references = run.loop.parts.conditioner.references
    assert {path.parent.name for path in references} == {"1_shape"}
    assert {each.path.parent for each in references.values()} == {tmp_path / "refs"}
    assert len(list((tmp_path / "refs").glob("*_features_*.maulstick.safetensors"))) == 4
    (tmp_path / "refs" / "2.png").unlink()
    with pytest.raises(DataError, match=r"no reference image for 1 of 4 training images \(2.png\)"):
        make_run("--conditioning_data_dir", str(tmp_path / "refs"), output="again").prepare()


# ---------------------------------------------------------------------------------------- average, resume, start


def test_the_average_is_what_is_saved_and_training_goes_on_from_the_weights(make_run) -> None:
    plain = make_run(output="plain")
    trained(plain)
    averaged = make_run("--ema_decay", "0.5", output="averaged")
    averaged.prepare()
    followed = [parameter.detach().clone() for _, parameter in averaged.loop.parts.named_parameters]
    weights = []
    step = averaged.loop.train_step

    def watched(window, images):
        outcome = step(window, images)
        weights.append([parameter.detach().clone() for _, parameter in averaged.loop.parts.named_parameters])
        return outcome

    averaged.loop.train_step = watched
    path = trained(averaged).path
    final = [parameter.detach() for _, parameter in plain.loop.parts.named_parameters]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(weights[-1], final, strict=True))
    # The decay of the first three updates: 0, 2/11, 3/12, all below 0.5.
    for decay, update in zip((0, 2 / 11, 3 / 12), weights, strict=True):
        followed = [a - (1 - decay) * (a - b) for a, b in zip(followed, update, strict=True)]
    names = [name.removeprefix("unet.") for name, _ in averaged.loop.parts.named_parameters]
    by_name = dict(zip(names, followed, strict=True))
    saved = load_file(path)
    torch.testing.assert_close(saved["ip_adapter.1.to_k_ip.weight"], by_name["ip_adapter.1.to_k_ip.0.weight"])
    last = weights[-1][names.index("ip_adapter.1.to_k_ip.0.weight")]
    assert not torch.equal(saved["ip_adapter.1.to_k_ip.weight"], last)


def test_the_average_refuses_an_optimizer_that_averages_itself(make_run) -> None:
    run = make_run("--ema_decay", "0.9", "--optimizer_type", "AdamWScheduleFree")
    with pytest.raises(OptionError, match="ema_decay does not work with optimizer_type = AdamWScheduleFree"):
        run.prepare()


def test_a_resumed_run_ends_as_an_undisturbed_one(make_run, tmp_path) -> None:
    more = ("--ema_decay", "0.9", "--ip_adapter_scale_warmup_steps", "3", "--max_train_steps", "4")
    whole = trained(make_run(*more, output="whole"))
    begun = make_run(*more, "--save_state", "--save_every_n_steps", "2", output="begun")
    trained(begun)
    state = tmp_path / "begun" / "last-step00000002-state"
    resumed = trained(make_run(*more, "--resume", str(state), output="resumed"))
    one, two = load_file(whole.path), load_file(resumed.path)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    Image.new("RGB", (20, 20)).save(tmp_path / "images" / "1_shape" / "0.png")
    with pytest.raises(OptionError, match="the images are not those of the state"):
        make_run(*more, "--resume", str(state), output="other").prepare()


def test_a_state_belongs_to_its_references(make_run, tmp_path) -> None:
    write_images(tmp_path / "refs", seed=9)
    paired = ("--conditioning_data_dir", str(tmp_path / "refs"))
    trained(make_run(*paired, "--save_state_on_train_end", output="begun"))
    write_images(tmp_path / "others", seed=10)
    moved = ("--conditioning_data_dir", str(tmp_path / "others"), "--max_train_steps", "4")
    with pytest.raises(OptionError, match="the reference images or the image encoder are not those of the state"):
        make_run(*moved, "--resume", str(tmp_path / "begun" / "last-state"), output="more").prepare()


def test_a_run_can_start_from_a_file(make_run) -> None:
    first = trained(make_run())
    begun = make_run("--network_weights", str(first.path), output="more")
    begun.prepare()
    saved = load_file(first.path)
    live = dict(begun.loop.parts.named_parameters)
    assert torch.equal(live["unet.ip_adapter.31.to_v_ip.0.weight"], saved["ip_adapter.31.to_v_ip.weight"])
    with pytest.raises(OptionError, match=r"is an IP-Adapter of 4 tokens .* plans an IP-Adapter Plus of 16 tokens"):
        make_run("--network_weights", str(first.path), "--ip_adapter_type", "plus", output="plus").prepare()


def test_sample_pictures_look_at_the_sample_image(make_run, tmp_path, images) -> None:
    (tmp_path / "prompts.txt").write_text("a shape --w 32 --h 32 --s 1\n")
    sample = ("--sample_prompts", str(tmp_path / "prompts.txt"), "--sample_every_n_steps", "3")
    for number in (0, 1):
        image = images / "1_shape" / f"{number}.png"
        trained(make_run(*sample, "--sample_ip_image", str(image), output=f"with{number}"))
    drawn = [Image.open(tmp_path / f"with{n}/sample/last_step00000003_00.png").tobytes() for n in (0, 1)]
    assert drawn[0] != drawn[1]


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--network_dim", "4"), "network_dim does not work with network_type = ip_adapter: it belongs to LoRA"),
        (("--block_lr", "mid=0"), "block_lr does not work with network_type = ip_adapter"),
        (("--scale_weight_norms", "1"), "scale_weight_norms does not work with network_type = ip_adapter"),
        (("--text_encoder_lr", "1e-4"), "text_encoder_lr does not work with network_type = ip_adapter"),
        (("--caption_dropout_rate", "0.1"), "caption_dropout_rate = 0.1 would come on top of text_dropout_rate"),
        (("--text_dropout_rate", "0.9"), "add up to 1, but at most one of them"),
        (("--sample_prompts", "p.txt"), "sample_prompts needs sample_ip_image"),
        (
            ("--network_train_text_encoder_only",),
            "network_train_text_encoder_only does not work with network_type",
        ),
        (("--image_encoder", ""), "network_type = ip_adapter needs image_encoder"),
    ],
)
def test_options_that_cannot_be_meant(arguments, message, make_run) -> None:
    with pytest.raises(OptionError, match=message):
        make_run(*arguments)


def test_images_that_are_not_there_are_named_before_anything_is_cached(make_run, tmp_path) -> None:
    (tmp_path / "p.txt").write_text("a shape")
    sample = ("--sample_prompts", str(tmp_path / "p.txt"), "--sample_every_n_steps", "1", "--sample_ip_image")
    with pytest.raises(OptionError, match=r"sample_ip_image: .*gone\.png: cannot be read"):
        make_run(*sample, str(tmp_path / "gone.png")).prepare()
    with pytest.raises(DataError, match=r"conditioning_data_dir: there is no folder .*gone\."):
        make_run("--conditioning_data_dir", str(tmp_path / "gone")).prepare()


def test_options_of_an_ip_adapter_without_one(make_run) -> None:
    with pytest.raises(OptionError, match="image_encoder belongs to network_type = ip_adapter, but"):
        make_run("--network_type", "lora", "--network_train_unet_only")


def test_an_encoder_of_the_wrong_kind_is_refused(make_run) -> None:
    from tests.image_encoders import clip_encoder, siglip_encoder

    with pytest.raises(OptionError, match=r"is a SigLIP model, but IP-Adapters for SD 1.x read CLIP"):
        make_run("--image_encoder", str(siglip_encoder())).prepare()
    with pytest.raises(OptionError, match=r"is a CLIP model, but IP-Adapters for SD3.5 medium read SigLIP"):
        make_run("--image_encoder", str(clip_encoder()), model="sd3").prepare()
    with pytest.raises(OptionError, match=r"ip_adapter_type: SD3.5 medium has one type"):
        make_run("--ip_adapter_type", "plus", model="sd3").prepare()


def test_a_lora_file_is_no_start_for_an_ip_adapter(make_run, tmp_path) -> None:
    from safetensors.torch import save_file

    save_file({"lora_unet_x.lora_down.weight": torch.zeros(1, 1)}, tmp_path / "lora.safetensors")
    with pytest.raises(ModelError, match="is no IP-Adapter"):
        make_run("--network_weights", str(tmp_path / "lora.safetensors")).prepare()


def test_a_validation_drops_nothing_and_measures_at_full_scale(make_run) -> None:
    drops = ("--image_dropout_rate", "0.4", "--text_dropout_rate", "0.4", "--ip_adapter_scale_warmup_steps", "50")
    found = []
    for further in ((), drops):
        run = make_run("--validation_split", "0.5", *further, output=f"out{len(further)}")
        run.prepare()
        watcher = next(each for each in run.loop.parts.watchers if each.name == "validation")
        run.loop.parts.conditioner.at_step(0)
        run.loop.train_mode()
        found.append(watcher.measure(run.loop))
    assert len(found[0]) == 4
    assert found[0] == found[1]
