"""DoRA, LoHa, LoKr and OFT: what is trained equals what a reader makes of the file, by formulas written here."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from maulstick.adapters.kinds import AdapterKind, DoraKind, LohaKind, LokrKind, LoraKind, OftKind
from maulstick.adapters.lean import LoraDropout
from maulstick.adapters.module_kinds import add_change
from maulstick.adapters.read_formats import read_adapter
from maulstick.adapters.targets import LoraTarget
from maulstick.errors import ModelError, OptionError
from tests.adapters.network_types import (
    CONV3,
    FF,
    KINDS,
    RANKS,
    Q,
    change,
    inputs,
    network,
    outputs,
    plan,
    trained,
    written,
)


def read_weight(parts: dict[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
    """The changed weight as LyCORIS' documentation and ComfyUI's readers have it."""
    base = base.double()
    parts = {name: tensor.double() for name, tensor in parts.items()}
    alpha = float(parts["alpha"])
    if "oft_blocks" in parts:
        blocks = parts["oft_blocks"]
        count, size, _ = blocks.shape
        q = blocks - blocks.transpose(1, 2)
        assert q.norm() < alpha  # ComfyUI's limit; LyCORIS' and sd-scripts' are larger
        identity = torch.eye(size, dtype=torch.float64)
        turn = (identity + q) @ torch.linalg.inv(identity - q)
        rows = base.reshape(count, size, -1)
        return torch.stack([turn[k].T @ rows[k] for k in range(count)]).reshape(base.shape)
    if "hada_w1_a" in parts:
        first, second = parts["hada_w1_a"] @ parts["hada_w1_b"], parts["hada_w2_a"] @ parts["hada_w2_b"]
        delta = first * second * alpha / parts["hada_w1_b"].shape[0]
    elif any(name.startswith("lokr") for name in parts):
        rank = next((parts[name].shape[0] for name in ("lokr_w1_b", "lokr_w2_b") if name in parts), None)
        w1 = parts["lokr_w1"] if "lokr_w1" in parts else parts["lokr_w1_a"] @ parts["lokr_w1_b"]
        w2 = parts["lokr_w2"].flatten(1) if "lokr_w2" in parts else parts["lokr_w2_a"] @ parts["lokr_w2_b"]
        delta = torch.kron(w1, w2) * (1.0 if rank is None else alpha / rank)
    else:
        down, up = parts["lora_down.weight"], parts["lora_up.weight"]
        delta = up.flatten(1) @ down.flatten(1) * alpha / down.shape[0]
    changed = base + delta.reshape(base.shape)
    if "dora_scale" in parts:
        scale = parts["dora_scale"]
        on_output = scale.shape[0] == base.shape[0]
        others = [d for d in range(base.ndim) if d != (0 if on_output else 1)]
        changed = changed * scale / torch.linalg.vector_norm(changed, dim=others, keepdim=True)
    return changed


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request) -> AdapterKind:
    return request.param


def test_it_starts_at_the_identity_in_fp32_and_the_base_is_frozen(kind):
    root = network()
    base = {path: root.get_submodule(path) for path in RANKS}
    before = {path: module(inputs(module)) for path, module in base.items()}
    kind.inject(root, plan(root, kind))
    for path, expected in before.items():
        torch.testing.assert_close(root.get_submodule(path)(inputs(base[path])), expected, rtol=1e-5, atol=1e-6)
    trainable = {id(p) for p in root.parameters() if p.requires_grad}
    assert trainable == {id(entry.parameter) for entry in kind.parameters(root)}
    assert {entry.parameter.dtype for entry in kind.parameters(root)} == {torch.float32}


def test_what_is_trained_is_what_a_reader_makes_of_the_file(kind, tmp_path):
    root, base = trained(kind)
    tensors = load_file(written(root, kind, tmp_path))
    for path, module in base.items():
        prefix = f"lora_unet_{path.replace('.', '_')}."
        parts = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
        weight = read_weight(parts, module.weight.detach())
        assert (weight - module.weight).norm() > 0.05 * module.weight.norm()
        live = root.get_submodule(path)(inputs(module))
        torch.testing.assert_close(live, outputs(module, weight.float()), rtol=1e-4, atol=1e-4)
        if not isinstance(kind, LoraKind):
            merged = module.weight + root.get_submodule(path).get_delta_weight("default")
            torch.testing.assert_close(merged, weight.float(), rtol=1e-4, atol=1e-5)


def test_our_own_reader_makes_the_same_of_it(kind, tmp_path):
    root, base = trained(kind)
    file = read_adapter(written(root, kind, tmp_path))
    assert {type(module) for module in file.modules.values()} == {kind.weights_type}
    for path, module in base.items():
        weight = module.weight.detach()
        total = weight.clone()
        add_change(total, weight, file.modules[f"lora_unet_{path.replace('.', '_')}"], 1.0)
        torch.testing.assert_close(
            outputs(module, total), root.get_submodule(path)(inputs(module)), rtol=1e-4, atol=1e-4
        )


def test_the_parameters_are_as_many_as_the_plan_says(kind):
    root = network()
    targets = plan(root, kind)
    kind.inject(root, targets)
    for target in targets:
        live = kind.live(kind.modules(root)[target.path])
        assert sum(parameter.numel() for parameter in live.values()) == kind.parameter_count(target)
        assert {part: math.prod(shape) for part, shape in kind.shapes(target).items()} == {
            part: parameter.numel() for part, parameter in live.items()
        }


def test_every_value_gets_a_gradient_once_training_has_begun(kind):
    root, base = trained(kind)
    root.train()
    for path, module in base.items():
        root.get_submodule(path)(inputs(module)).square().sum().backward()
    assert all(bool(entry.parameter.grad.abs().sum() > 0) for entry in kind.parameters(root))


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if not isinstance(kind, DoraKind)])
def test_gradients_are_those_of_the_output(kind):
    """Against finite differences. A DoRA's are not, by the paper's own choice; it has a test of its own."""
    root, base = trained(kind)
    for path, module in base.items():
        live = kind.live(kind.modules(root)[path])
        out = root.get_submodule(path)(inputs(module))
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        found = torch.autograd.grad((out * direction).sum(), list(live.values()))
        step = 1e-3
        for parameter, gradient in zip(live.values(), found, strict=True):
            along = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
            values = []
            with torch.no_grad():
                for sign in (1, -1):
                    parameter.add_(sign * step * along)
                    values.append((root.get_submodule(path)(inputs(module)).double() * direction).sum())
                    parameter.add_(-sign * step * along)
            slope = float(values[0] - values[1]) / (2 * step)
            assert slope == pytest.approx(float((gradient * along).sum()), rel=3e-2, abs=0.05)


@pytest.mark.parametrize("on_output", [False, True])
def test_a_dora_takes_the_norm_as_a_constant(on_output):
    kind = DoraKind(on_output=on_output)
    root, base = trained(kind)
    module, live = base[CONV3], kind.live(kind.modules(root)[CONV3])
    out = root.get_submodule(CONV3)(inputs(module))
    found = torch.autograd.grad(out.square().sum(), list(live.values()))
    down, up, scale = (value.detach().clone().requires_grad_() for value in live.values())
    direction = module.weight.detach() + ((up.flatten(1) @ down.flatten(1)) * 1.0 / 4).reshape(module.weight.shape)
    axis = 0 if on_output else 1
    norm = torch.linalg.vector_norm(direction.detach(), dim=[d for d in range(4) if d != axis], keepdim=True)
    weight = direction * scale.reshape(norm.shape) / norm
    expected = torch.autograd.grad(outputs(module, weight).square().sum(), (down, up, scale))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("on_output", [False, True])
def test_a_dora_of_a_weight_with_zero_rows_and_columns_stays_finite(on_output, tmp_path):
    kind = DoraKind(on_output=on_output)
    root = network()
    module = root.get_submodule(FF)
    with torch.no_grad():
        module.weight[3], module.weight[:, 7] = 0.0, 0.0
    before = module(inputs(module))
    kind.inject(root, plan(root, kind))
    live = root.get_submodule(FF)
    torch.testing.assert_close(live(inputs(module)), before, rtol=1e-5, atol=1e-6)
    for _ in range(3):
        live(inputs(module)).square().sum().backward()
        with torch.no_grad():
            for entry in kind.parameters(root):
                if entry.parameter.grad is not None:
                    assert torch.isfinite(entry.parameter.grad).all()
                    entry.parameter.sub_(1e-3 * entry.parameter.grad)
                    entry.parameter.grad = None
    assert torch.isfinite(live(inputs(module))).all()
    parts = kind.state(root)[FF]
    total = module.weight.detach().clone()
    add_change(total, module.weight.detach(), parts, 1.0)
    torch.testing.assert_close(outputs(module, total), live(inputs(module)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_file_of_16_bits_keeps_the_strength(kind, dtype, tmp_path):
    """Alpha 1.1 cannot be held in 16 bits; the strength must not change by what is lost."""
    root = network()
    targets = [
        kind.fitted(LoraTarget("unet", Q, "linear", "", (24, 12), 4, 1.1, None)),
    ]
    base = root.get_submodule(Q)
    kind.inject(root, targets)
    change(root, kind)
    (module,) = read_adapter(written(root, kind, tmp_path, dtype)).modules.values()
    total = base.weight.detach().clone()
    add_change(total, base.weight.detach(), module, 1.0)
    live = root.get_submodule(Q)(inputs(base))
    error = (outputs(base, total) - live).norm() / (live - base(inputs(base))).norm()
    assert error < (2e-3 if dtype == torch.float16 else 1.5e-2)


def test_weights_are_loaded_with_the_strength_of_the_file(kind, tmp_path):
    source, base = trained(kind)
    state = read_adapter(written(source, kind, tmp_path)).modules
    by_path = {path: state[f"lora_unet_{path.replace('.', '_')}"] for path in RANKS}
    target = network()
    other_alphas = [kind.fitted(LoraTarget(*t.__dict__.values())) for t in plan(target, kind)]
    other_alphas = [kind.fitted(type(t)(**{**vars(t), "alpha": 2 * t.alpha})) for t in other_alphas]
    kind.inject(target, other_alphas)
    before = [entry.parameter for entry in kind.parameters(target)]
    kind.load(target, by_path)
    assert all(a is b.parameter for a, b in zip(before, kind.parameters(target), strict=True))
    for path, module in base.items():
        torch.testing.assert_close(
            target.get_submodule(path)(inputs(module)), source.get_submodule(path)(inputs(module)), rtol=1e-4, atol=1e-5
        )


def test_weights_of_another_plan_are_refused(kind):
    source, _ = trained(kind)
    state = kind.state(source)
    wider = LoraTarget("unet", CONV3, "conv3x3", "", (24, 8, 3, 3), 2, 1.0, None)
    assert kind.misfit(kind.fitted(wider), state[CONV3]) is not None
    assert all(kind.misfit(target, state[target.path]) is None for target in plan(network(), kind))
    with pytest.raises(ModelError, match="does not have"):
        kind.load(source, {"mid_block.nothing": state[Q]}, partial=True)


def test_a_start_depends_on_nothing_but_its_module_and_the_seed(kind):
    def start(targets, seed):
        root = network()
        kind.inject(root, targets, seed=seed)
        return {entry.name: entry.parameter.detach() for entry in kind.parameters(root)}

    torch.manual_seed(1)
    whole = start(plan(network(), kind), 0)
    torch.manual_seed(2)
    part = start(plan(network(), kind)[1:3], 0)
    assert all(torch.equal(whole[name], value) for name, value in part.items())
    if not isinstance(kind, OftKind):
        assert any(not torch.equal(whole[name], value) for name, value in start(plan(network(), kind), 1).items())


def test_only_the_planned_modules_are_adapted(kind):
    root = network()
    kind.inject(root, plan(root, kind)[:2])
    assert list(kind.modules(root)) == [path for path, _ in root.named_modules() if path in (Q, FF)]


def test_module_dropout_leaves_the_module_out_in_training_only(kind):
    root, base = trained(kind, dropout=LoraDropout(module=0.5))
    live, x = root.get_submodule(Q), inputs(base[Q])
    full, plain = live(x), base[Q](x)
    root.train()
    torch.manual_seed(0)
    drawn = [live(x) for _ in range(40)]
    left_out = sum(torch.allclose(out, plain, atol=1e-6) for out in drawn)
    assert left_out + sum(torch.allclose(out, full, atol=1e-5) for out in drawn) == 40
    assert 10 < left_out < 30


@pytest.mark.parametrize("kind", [LohaKind(), LokrKind(), LokrKind(factor=2)])
def test_rank_dropout_drops_rows_and_keeps_the_mean(kind):
    root, base = trained(kind, dropout=LoraDropout(rank=0.25))
    live, x = root.get_submodule(Q), inputs(base[Q])
    added = live(x) - base[Q](x)
    root.train()
    torch.manual_seed(0)
    drawn = torch.stack([live(x) - base[Q](x) for _ in range(400)])
    ratio = drawn / added
    is_zero = drawn.abs() < 1e-6
    assert float(is_zero.float().mean()) == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(ratio[~is_zero], torch.full_like(ratio[~is_zero], 1 / 0.75), rtol=1e-2, atol=1e-2)
    assert torch.equal(is_zero.any((1, 2)), is_zero.all((1, 2)))


@pytest.mark.parametrize("kind", [LoraKind(), LohaKind(), LokrKind(), LokrKind(factor=8, decompose_both=True)])
def test_norms_are_bounded(kind):
    root, base = trained(kind)

    def norms():
        return {
            path: float(torch.linalg.vector_norm(kind.modules(root)[path].get_delta_weight("default").detach()))
            for path in base
        }

    before = norms()
    limit = sorted(before.values())[2]
    result = kind.bound_norms([root], limit)
    after = norms()
    assert result.keys_scaled == 2
    assert result.max_norm == pytest.approx(limit, rel=1e-5)
    for path, norm in before.items():
        assert after[path] == pytest.approx(min(norm, limit), rel=1e-4)


def test_a_dora_and_an_oft_have_no_norm_to_bound():
    for kind in (DoraKind(), OftKind()):
        with pytest.raises(ModelError, match=f"does not work with a {kind.title}"):
            kind.bound_norms([], 1.0)


def test_blocks_of_an_oft_divide_the_outputs():
    def size(outputs, dim):
        return OftKind().fitted(LoraTarget("unet", "x", "linear", "", (outputs, 8), dim, 1.0, None)).dim

    assert [size(320, 4), size(320, 64), size(320, 7), size(768, 33), size(6, 100)] == [4, 64, 5, 32, 6]
    for count, dim in ((7, 4), (320, 1)):
        with pytest.raises(OptionError, match="cannot be split into blocks"):
            size(count, dim)


def test_a_lokr_without_products_has_strength_one():
    """Every reader leaves alpha out there, so training must, too."""
    target = LokrKind().fitted(LoraTarget("unet", "x", "linear", "", (24, 12), 100000, 1.0, None))
    assert (target.dim, target.alpha) == (100000, 100000.0)
    assert set(LokrKind().shapes(target)) == {"lokr_w1", "lokr_w2"}


def test_it_runs_under_autocast_and_on_a_half_precision_base(kind):
    root = network().to(torch.bfloat16)
    base = {path: root.get_submodule(path) for path in RANKS}
    kind.inject(root, plan(root, kind))
    with torch.autocast("cpu", torch.bfloat16):
        for path, module in base.items():
            x = inputs(module)
            out = root.get_submodule(path)(x)
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out, module(x), rtol=1e-2, atol=1e-2)
    out = root.get_submodule(Q)(inputs(base[Q]).to(torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert all(entry.parameter.dtype == torch.float32 for entry in kind.parameters(root))
