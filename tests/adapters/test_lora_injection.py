"""Attaching a LoRA to a model: what was planned, in fp32, reproducibly; its state; its norm bound."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from maulstick.adapters import lora
from maulstick.adapters.blocks import sd_block_index
from maulstick.adapters.factors import LoraWeights, delta_weight, product_norm
from maulstick.adapters.injection import path_pattern
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.lora import (
    apply_max_norm,
    inject_lora,
    load_lora_state,
    lora_modules,
    lora_parameters,
    lora_state,
    set_strengths,
)
from maulstick.adapters.targets import BlockRank, LoraTarget, plan_lora
from maulstick.errors import ModelError, OptionError


def _plan(unet, **changes):
    return plan_lora(unet, component="unet", **({"network_dim": 4, "block_of": sd_block_index} | changes))


def _randomise(root, adapter_name="default", seed=5):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for entry in lora_parameters(root, adapter_name):
            entry.parameter.copy_(torch.randn(entry.parameter.shape, generator=generator))


def _sample(unet):
    generator = torch.Generator().manual_seed(9)
    dtype = unet.conv_in.weight.dtype
    noise = torch.randn(2, 4, 8, 8, generator=generator).to(dtype)
    states = torch.randn(2, 5, 24, generator=generator).to(dtype)
    return unet(noise, torch.tensor([3, 700]), states).sample


@pytest.mark.parametrize("conv_dim", [None, 2])
def test_attaches_what_was_planned_and_changes_no_output(conv_dim, small_unet):
    unet = small_unet()
    with torch.no_grad():
        before = _sample(unet)
        plan = _plan(unet, conv_dim=conv_dim)
        modules = inject_lora(unet, plan)
        torch.testing.assert_close(_sample(unet), before, rtol=0, atol=0)
    assert list(modules) == [target.path for target in plan]
    trained = [name for name, parameter in unet.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(plan)
    assert all(".lora_" in name for name in trained)
    assert sum(entry.parameter.numel() for entry in lora_parameters(unet)) == sum(t.parameter_count for t in plan)


def test_start_values_are_those_of_the_format(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet, network_dim=64, conv_dim=32), seed=3)
    for entry in lora_parameters(unet):
        if entry.role == "up":
            assert not entry.parameter.any()
        else:
            bound = entry.parameter[0].numel() ** -0.5
            assert entry.parameter.abs().max() <= bound
            # Uniform over the whole range: the standard deviation of U(-b, b) is b / sqrt(3).
            assert entry.parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_start_values_depend_on_seed_and_module_only(small_unet):
    def starts(seed=0, component="unet", **changes):
        unet = small_unet()
        plan = plan_lora(unet, component=component, network_dim=4, block_of=sd_block_index, **changes)
        state_before = torch.random.get_rng_state()
        inject_lora(unet, list(reversed(plan)), seed=seed)
        assert torch.equal(torch.random.get_rng_state(), state_before)
        return {path: weights.down.clone() for path, weights in lora_state(unet).items()}

    everything, again, other_seed = starts(), starts(), starts(seed=1)
    only_late = starts(block_ranks={block: BlockRank(0, 1) for block in range(13)})
    assert 0 < len(only_late) < len(everything)
    for path, down in everything.items():
        assert torch.equal(down, again[path])
        assert not torch.equal(down, other_seed[path])
    for path, down in only_late.items():
        assert torch.equal(down, everything[path])
    same_shape = [down for down in everything.values() if down.shape == (4, 32)]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(same_shape, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_are_fp32_on_a_half_precision_base(dtype, small_unet):
    unet = small_unet().to(dtype)
    inject_lora(unet, _plan(unet, conv_dim=4), seed=3)
    assert {entry.parameter.dtype for entry in lora_parameters(unet)} == {torch.float32}
    assert {p.dtype for n, p in unet.named_parameters() if ".lora_" not in n} == {dtype}
    full = small_unet()
    inject_lora(full, _plan(full, conv_dim=4), seed=3)
    for half_entry, full_entry in zip(lora_parameters(unet), lora_parameters(full), strict=True):
        assert torch.equal(half_entry.parameter, full_entry.parameter)  # not rounded on the way
    with torch.autocast("cpu", dtype=dtype):
        _sample(unet.to(torch.float32) if dtype == torch.float16 else unet).float().mean().backward()
    assert all(entry.parameter.grad.dtype == torch.float32 for entry in lora_parameters(unet))


def test_ranks_and_alphas_per_block(small_unet):
    unet = small_unet()
    ranks = {block: BlockRank(1 + block % 3, 0.25 * (1 + block), 1 + block % 2, 2.0) for block in range(25)}
    ranks[12] = BlockRank(0, 1.0)
    plan = _plan(unet, block_ranks=ranks)
    modules = inject_lora(unet, plan)
    for target in plan:
        module = modules[target.path]
        assert target.block != 12
        assert module.lora_A["default"].weight.shape[0] == target.dim
        assert module.lora_B["default"].weight.shape[1] == target.dim
        assert module.scaling["default"] == target.alpha / target.dim


def test_patterns_are_few(small_unet, monkeypatch):
    configs = []
    inject = lora.inject_adapter_in_model
    monkeypatch.setattr(lora, "inject_adapter_in_model", lambda c, *a, **k: (configs.append(c), inject(c, *a, **k)))
    unet = small_unet()
    inject_lora(unet, _plan(unet, block_ranks={block: BlockRank(1 + block, block + 0.5) for block in range(25)}))
    assert len(configs[0].rank_pattern) == 15  # 16 blocks have modules without convolutions
    assert len(configs[0].alpha_pattern) == 15


def test_a_path_that_ends_like_another_keeps_its_own_rank():
    """peft lets a pattern match the end of a path; ours mean whole paths."""
    model = torch.nn.ModuleDict({name: torch.nn.ModuleDict({"b": torch.nn.Linear(3, 3)}) for name in ("a", "c")})
    model["b"] = torch.nn.Linear(3, 3)
    targets = [LoraTarget("unet", path, "linear", "", (3, 3), 2, 2.0, None) for path in ("a.b", "c.b")]
    targets.append(LoraTarget("unet", "b", "linear", "", (3, 3), 1, 0.5, None))
    modules = inject_lora(model, targets)
    assert {path: (module.r["default"], module.scaling["default"]) for path, module in modules.items()} == {
        "a.b": (2, 1.0),
        "c.b": (2, 1.0),
        "b": (1, 0.5),
    }
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": torch.nn.Linear(3, 3)}), "b": torch.nn.Linear(3, 3)})
    assert list(inject_lora(model, [targets[-1]])) == ["b"]


PARTS = st.sampled_from(["a", "b", "0", "1", "to_q", "x+", "(y"])
PATHS = st.sets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12)


@given(PATHS, PATHS)
def test_a_pattern_matches_its_paths_and_no_other(wanted, others):
    pattern = re.compile(path_pattern(sorted(wanted)))
    assert {path for path in wanted | others if pattern.fullmatch(path)} == wanted


@pytest.mark.parametrize(
    ("field", "words"),
    [("rank_pattern", "got rank 4, alpha 1.0 instead of rank 2"), ("target_modules", "got no adapter")],
)
def test_another_result_than_planned_is_an_error(field, words, small_unet, monkeypatch):
    build = lora._peft_config

    def break_config(targets):
        config = build(targets)
        setattr(config, field, {} if field == "rank_pattern" else ".*attentions.*to_q")
        return config

    monkeypatch.setattr(lora, "_peft_config", break_config)
    unet = small_unet()
    with pytest.raises(ModelError, match=words):
        inject_lora(unet, _plan(unet, block_ranks={12: BlockRank(2, 1.0)}))


def test_too_many_modules_are_an_error(small_unet, monkeypatch):
    unet = small_unet()
    everything = _plan(unet)
    build = lora._peft_config
    monkeypatch.setattr(lora, "_peft_config", lambda targets: build(everything))
    with pytest.raises(ModelError, match="was not planned"):
        inject_lora(unet, everything[1:])


def test_an_empty_plan_and_a_used_name_are_refused(small_unet):
    unet = small_unet()
    with pytest.raises(OptionError, match="no module at all"):
        inject_lora(unet, [])
    inject_lora(unet, _plan(unet))
    with pytest.raises(OptionError, match="already carries an adapter named 'default'"):
        inject_lora(unet, _plan(unet))


def test_text_encoder(small_text_encoder):
    encoder = small_text_encoder()
    ids = torch.arange(2, 10)[None]
    before = encoder(ids).last_hidden_state
    plan = plan_lora(encoder, component="text_encoder", network_dim=2, network_alpha=1)
    inject_lora(encoder, plan)
    torch.testing.assert_close(encoder(ids).last_hidden_state, before)
    _randomise(encoder)
    assert (encoder(ids).last_hidden_state - before).abs().max() > 0.1
    assert len(lora_parameters(encoder)) == 24
    assert {n for n, p in encoder.named_parameters() if p.requires_grad} == {
        f"{target.path}.lora_{side}.default.weight" for target in plan for side in "AB"
    }


def test_a_model_on_the_meta_device_stays_there(golden_sd, meta_unet):
    unet = meta_unet(golden_sd["config"])
    inject_lora(unet, _plan(unet, conv_dim=2))
    assert {(e.parameter.device.type, e.parameter.dtype) for e in lora_parameters(unet)} == {("meta", torch.float32)}


def test_dropout_is_on_every_module_and_works_under_checkpointing(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet, conv_dim=2), dropout=LoraDropout(neuron=0.2, rank=0.2, module=0.2))
    _randomise(unet)
    with torch.no_grad():
        for entry in lora_parameters(unet):
            entry.parameter.mul_(0.1)
    gradients = []
    for checkpointing in (False, True):
        unet.train().zero_grad()
        if checkpointing:
            unet.enable_gradient_checkpointing()
        torch.manual_seed(2)
        _sample(unet).square().mean().backward()
        gradients.append({entry.name: entry.parameter.grad for entry in lora_parameters(unet)})
    without = [name for name, gradient in gradients[0].items() if gradient is None]
    assert 0 < len(without) < len(gradients[0]) // 2  # module dropout left some modules out
    for name, gradient in gradients[0].items():
        if gradient is None:
            assert gradients[1][name] is None
        else:
            torch.testing.assert_close(gradients[1][name], gradient)


def test_dropout_off_leaves_no_trace(small_unet):
    unet = small_unet()
    modules = inject_lora(unet, _plan(unet), dropout=LoraDropout())
    assert all(module.lora_noise == {} for module in modules.values())


def test_several_adapters_with_strengths(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet), adapter_name="style", seed=1)
    inject_lora(unet, _plan(unet, network_dim=2, block_ranks={12: BlockRank(0, 1)}), adapter_name="figure", seed=2)
    _randomise(unet, "style", seed=1)
    _randomise(unet, "figure", seed=2)
    with torch.no_grad():
        for name in ("style", "figure"):
            for entry in lora_parameters(unet, name):
                entry.parameter.mul_(0.2)
        set_strengths(unet, {"style": 0.5, "figure": -1.0})
        both = _sample(unet)
        states = {name: lora_state(unet, name) for name in ("style", "figure")}
        reference = small_unet()
        for name, strength in (("style", 0.5), ("figure", -1.0)):
            for path, weights in states[name].items():
                reference.get_submodule(path).weight += strength * delta_weight(weights)
        torch.testing.assert_close(both, _sample(reference), rtol=1e-4, atol=1e-5)
        set_strengths(unet, {})
        torch.testing.assert_close(_sample(unet), _sample(small_unet()))
    assert len(states["figure"]) == len(states["style"]) - 12
    assert not any(parameter.requires_grad for parameter in unet.parameters())
    with pytest.raises(ModelError, match="no adapter named nobody"):
        set_strengths(unet, {"nobody": 1.0})


# ---------------------------------------------------------------------------------------------------------------------
# State


def test_state_goes_round_to_the_bit_and_keeps_the_parameters(small_unet):
    source, target = small_unet(), small_unet()
    inject_lora(source, _plan(source, conv_dim=2), seed=1)
    _randomise(source)
    inject_lora(target, _plan(target, conv_dim=2), seed=2)
    before = [entry.parameter for entry in lora_parameters(target)]
    report = load_lora_state(target, lora_state(source))
    assert report.missing == []
    assert report.loaded == list(lora_modules(source))
    after = [entry.parameter for entry in lora_parameters(target)]
    assert all(a is b for a, b in zip(before, after, strict=True))
    for ours, theirs in zip(after, lora_parameters(source), strict=True):
        assert torch.equal(ours, theirs.parameter)


def test_loading_keeps_the_strength_where_alpha_differs(small_unet):
    source, target = small_unet(), small_unet()
    inject_lora(source, _plan(source, network_alpha=3.0))
    _randomise(source)
    inject_lora(target, _plan(target, network_alpha=1.0))
    load_lora_state(target, lora_state(source))
    ours, theirs = lora_state(target), lora_state(source)
    assert {weights.alpha for weights in ours.values()} == {1.0}
    for path, weights in theirs.items():
        torch.testing.assert_close(delta_weight(ours[path]), delta_weight(weights))
    no_alpha = {path: weights._replace(alpha=None) for path, weights in theirs.items()}
    load_lora_state(target, no_alpha)
    for path, weights in lora_state(target).items():
        torch.testing.assert_close(delta_weight(weights), delta_weight(no_alpha[path]))


def test_a_part_of_the_modules_can_be_loaded(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet))
    state = {path: weights for path, weights in lora_state(unet).items() if path.startswith("mid_block")}
    state = {path: LoraWeights(w.down * 0 + 2, w.up + 3, w.alpha) for path, w in state.items()}
    with pytest.raises(ModelError, match="no weights for 180 of 192 LoRA modules of the unet"):
        load_lora_state(unet, state, component="unet")
    report = load_lora_state(unet, state, component="unet", partial=True)
    assert (len(report.loaded), len(report.missing)) == (12, 180)
    for path, weights in lora_state(unet).items():
        assert bool((weights.up == 3).all()) == path.startswith("mid_block")


def _broken(weights: LoraWeights, defect: str) -> LoraWeights:
    if defect == "rank":
        return LoraWeights(weights.down[:2], weights.up[:, :2], weights.alpha)
    return weights._replace(down=torch.zeros(weights.rank, 999))


@pytest.mark.parametrize(
    ("defect", "words"),
    [("rank", "has rank 2 in .* this run plans rank 4"), ("shape", r"the down factor of .* has shape \(4, 999\)")],
)
def test_a_state_that_does_not_fit_changes_nothing(defect, words, small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet))
    before = [entry.parameter.clone() for entry in lora_parameters(unet)]
    state = {path: weights._replace(up=weights.up + 1) for path, weights in lora_state(unet).items()}
    last = list(state)[-1]
    state[last] = _broken(state[last], defect)
    with pytest.raises(ModelError, match=re.compile(words, re.IGNORECASE)):
        load_lora_state(unet, state)
    assert all(torch.equal(a, e.parameter) for a, e in zip(before, lora_parameters(unet), strict=True))


def test_unknown_modules_are_named(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet))
    state = lora_state(unet)
    state["mid_block.nothing"] = next(iter(state.values()))
    with pytest.raises(ModelError, match=r"1 modules that this unet does not have \(mid_block\.nothing\)"):
        load_lora_state(unet, state, component="unet")


def test_factors_of_1x1_convolutions_load_from_either_shape(small_unet):
    unet = small_unet()
    inject_lora(unet, _plan(unet))
    path = "mid_block.attentions.0.proj_in"
    weights = lora_state(unet)[path]
    flat = LoraWeights(torch.randn(weights.down.shape[:2]), torch.randn(weights.up.shape[:2]), 1.0)
    load_lora_state(unet, {path: flat}, partial=True)
    loaded = lora_state(unet)[path]
    assert loaded.down.shape == (4, 32, 1, 1)
    assert torch.equal(loaded.down.flatten(1), flat.down)
    assert torch.equal(loaded.up.flatten(1), flat.up)


# ---------------------------------------------------------------------------------------------------------------------
# Norm bound


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3]), st.integers(0, 10_000))
def test_norm_of_the_product_without_the_product(rank, inputs, outputs, kernel, seed):
    generator = torch.Generator().manual_seed(seed)
    down = torch.randn(rank, inputs, kernel, kernel, generator=generator)
    up = torch.randn(outputs, rank, 1, 1, generator=generator)
    exact = delta_weight(LoraWeights(down, up, 3.0)).norm()
    torch.testing.assert_close(product_norm(down, up, 3.0 / rank), exact, rtol=1e-4, atol=1e-5)


def test_max_norm_bounds_every_module_and_reports(small_unet, small_text_encoder):
    unet, encoder = small_unet(), small_text_encoder()
    inject_lora(unet, _plan(unet, conv_dim=2))
    inject_lora(encoder, plan_lora(encoder, component="text_encoder", network_dim=2))
    _randomise(unet)
    _randomise(encoder)
    before = [(w, delta_weight(w)) for root in (unet, encoder) for w in lora_state(root).values()]
    before = [(LoraWeights(w.down.clone(), w.up.clone(), w.alpha), delta) for w, delta in before]
    norms = sorted(delta.norm().item() for _, delta in before)
    limit = sum(norms[len(norms) // 2 - 1 :][:2]) / 2  # between two norms, away from rounding
    result = apply_max_norm([unet, encoder], limit)
    assert result.keys_scaled == sum(norm > limit for norm in norms) > 100
    assert result.max_norm == pytest.approx(limit)
    assert result.mean_norm == pytest.approx(sum(min(norm, limit) for norm in norms) / len(norms))
    after = [w for root in (unet, encoder) for w in lora_state(root).values()]
    for (old, delta), new in zip(before, after, strict=True):
        ratio = min(1.0, limit / delta.norm().item())
        torch.testing.assert_close(delta_weight(new), delta * ratio)
        torch.testing.assert_close(new.down, old.down * ratio**0.5)
        torch.testing.assert_close(new.up, old.up * ratio**0.5)
    again = apply_max_norm([unet, encoder], limit * 1.0001)
    assert again.keys_scaled == 0


def test_max_norm_of_an_untrained_or_broken_adapter(small_unet):
    unet = small_unet()
    with pytest.raises(ModelError, match="No module carries an adapter"):
        apply_max_norm([unet], 1.0)
    inject_lora(unet, _plan(unet))
    assert apply_max_norm([unet], 1.0) == (0, 0.0, 0.0)
    broken = lora_parameters(unet)[1].parameter
    with torch.no_grad():
        broken[0, 0] = float("inf")
    apply_max_norm([unet], 1.0)
    assert torch.isinf(broken).sum() == 1  # left for the guard to see, not spread
    assert torch.isfinite(lora_parameters(unet)[0].parameter).all()
