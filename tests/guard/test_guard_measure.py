"""The measurement: exact, in every precision, with names, and told from overflow."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maulstick.guard import GradientGuard, GradientSource, GuardError, scaled_by, unscaled_from
from maulstick.guard.cosine import PreviousGradient
from maulstick.guard.measure import measure


def parameters(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    made = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for each in made:
        each.grad = (torch.randn(each.shape) * 0.01).to(dtype)
    return made


def true_norm(params: list[torch.nn.Parameter]) -> float:
    return math.sqrt(sum(each.grad.double().square().sum().item() for each in params if each.grad is not None))


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    st.integers(-20, 20),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_norm_is_exact_in_every_precision_and_at_any_scale(shapes, dtype, exponent, still_applied, seed):
    params = parameters(shapes, torch.float32, seed)
    scale = 2.0**exponent
    for each in params:
        each.data = each.data.to(dtype)
        each.grad = each.grad.to(dtype)
    source = GradientSource.of(params)
    want = true_norm(params)
    given_scale = scaled_by(scale) if still_applied else unscaled_from(scale)
    on_host, on_device = (measure(source, scale=given_scale, on_host=flag) for flag in (True, False))
    assert on_host.norm == pytest.approx(want / scale if still_applied else want, rel=1e-6)
    assert on_host.scaled_norm == pytest.approx(want if still_applied else want * scale, rel=1e-6)
    assert on_device.norm == pytest.approx(on_host.norm, rel=1e-12)
    assert measure(source).norm == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("on_host", [True, False])
def test_groups_loss_and_scale_come_with_one_read(on_host: bool, monkeypatch: pytest.MonkeyPatch):
    params = parameters([(3, 4), (5,), (2, 2), (7,)])
    optimizer = torch.optim.SGD(
        [{"params": params[:1], "name": "first"}, {"params": params[1:3]}, {"params": params[3:]}], lr=0.1
    )
    params[3].grad = None
    reads = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    scale = torch.tensor(1024.0)
    found = measure(GradientSource.of(optimizer), loss=torch.tensor(0.25), scale=unscaled_from(scale), on_host=on_host)
    assert len(reads) == (0 if on_host else 1)
    assert found.loss == 0.25
    assert found.scale == 1024.0
    assert found.tensors == 3
    assert found.group_norms == {
        "first": pytest.approx(true_norm(params[:1]), rel=1e-6),
        "group 1": pytest.approx(true_norm(params[1:3]), rel=1e-6),
        "group 2": 0.0,
    }


def test_groups_by_name(model: torch.nn.Module):
    model(torch.ones(3, 6)).sum().backward()
    layers = GradientSource.of(model, lambda name: f"layer {name.split('.')[0]}")
    found = measure(layers)
    assert list(found.group_norms) == ["layer 0", "layer 2"]
    assert found.group_norms["layer 2"] == pytest.approx(true_norm(list(model[2].parameters())), rel=1e-6)
    assert math.hypot(*found.group_norms.values()) == pytest.approx(found.norm)
    with pytest.raises(GuardError, match=r"no entry for the parameter '2\.weight'"):
        GradientSource.of(model, {"0.weight": "a", "0.bias": "a"})
    with pytest.raises(GuardError, match="needs names"):
        GradientSource.of(list(model.parameters()), {})


def test_no_gradient_at_all_is_norm_zero(optimizer: torch.optim.Optimizer):
    verdict = GradientGuard.from_preset("stable").observe(optimizer, loss=1.0)
    assert verdict.norm == 0.0
    assert verdict.accept
    assert verdict.tensors == 0


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("value", "count"), [(1e25, 2), (1e38, 1), (3e19, 50), (1e-30, 4), (1e-24, 1)], ids=lambda each: f"{each:g}"
)
def test_overflow_and_underflow_of_the_square_are_told_from_bad_gradients(value: float, count: int, on_host: bool):
    params = parameters([(count,), (3,)])
    params[0].grad = torch.full((count,), value)
    params[1].grad = torch.zeros(3)
    found = measure(GradientSource.of(params), on_host=on_host)
    assert found.norm == pytest.approx(value * math.sqrt(count), rel=1e-6)
    assert found.bad_tensors == 0
    assert found.first_bad is None
    # As the original classifies it: a square that leaves the range of fp32 reads as inf, or 0.
    assert found.scaled_norm == (math.inf if value > 1 else 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("on_host", [True, False])
def test_the_first_bad_tensor_is_named(model: torch.nn.Module, bad: float, on_host: bool):
    model(torch.ones(3, 6)).sum().backward()
    model[0].weight.grad = None
    model[2].weight.grad[1, 3] = bad
    model[2].bias.grad[0] = bad
    found = measure(GradientSource.of(model), on_host=on_host)
    assert found.bad_tensors == 2
    assert found.first_bad == 2
    assert math.isnan(found.norm) if math.isnan(bad) else found.norm == math.inf
    verdict = GradientGuard.from_preset("steady").observe(model, loss=0.5)
    assert verdict.bad_tensor == "2.weight"
    assert "2 of 3 tensors, first in 2.weight" in verdict.describe()


def test_an_optimizer_borrows_names(model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    model(torch.ones(3, 6)).sum().backward()
    model[2].bias.grad[0] = math.nan
    assert GradientGuard.from_preset("steady").observe(optimizer).bad_tensor == "tensor 3 of group 0"
    assert GradientGuard.from_preset("steady", names=model).observe(optimizer).bad_tensor == "2.bias"
    named = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
    assert GradientGuard.from_preset("steady").observe(named).bad_tensor == "2.bias"


def test_sparse_complex_and_mixed_gradients():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    wave = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    wave.grad = torch.tensor([3 + 4j, 0j])
    half = torch.nn.Parameter(torch.zeros(2, dtype=torch.float16))
    half.grad = torch.tensor([300.0, 400.0], dtype=torch.float16)
    found = measure(GradientSource.of([embedding.weight, wave, half]))
    assert found.norm == pytest.approx(math.sqrt(3 * 4 + 3 * 1 + 25 + 250000), rel=1e-6)


def test_scale_must_say_what_it_means(optimizer: torch.optim.Optimizer):
    guard = GradientGuard.from_preset("steady")
    for scale in (65536.0, 1, torch.tensor(2.0)):
        with pytest.raises(GuardError, match="scaled_by"):
            guard.observe(optimizer, scale=scale)
    with pytest.raises(GuardError, match="GradScaler"):
        guard.observe(optimizer, scale="65536")


def test_a_grad_scaler_knows_whether_it_has_unscaled(model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.zeros(2)
    scaler.scale(model(torch.ones(3, 6)).sum()).backward()
    want = true_norm(list(model.parameters())) / 1024
    guard = GradientGuard.from_preset("steady")
    before = guard.observe(optimizer, scale=scaler)
    assert before.norm == pytest.approx(want, rel=1e-6)
    scaler.unscale_(optimizer)
    after = guard.observe(optimizer, scale=scaler)
    assert (after.norm, after.scaled_norm) == pytest.approx((before.norm, before.scaled_norm), rel=1e-6)
    assert guard.observe(model, scale=scaler).norm == pytest.approx(want, rel=1e-6)
    with pytest.raises(GuardError, match="not all"):
        guard.observe([optimizer, other], scale=scaler)
    scaler.step(optimizer)
    with pytest.raises(GuardError, match=r"after scaler\.step"):
        guard.observe(optimizer, scale=scaler)
    scaler.update()
    assert guard.observe(optimizer, scale=torch.amp.GradScaler("cpu", enabled=False)).scale is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_steady_decides_alike_in_every_precision_and_at_any_scale(dtype: torch.dtype):
    """fp32 without a scale against ``dtype`` with a scale that changes every ten steps."""
    torch.manual_seed(3)
    plain, other = (GradientGuard.from_preset("steady") for _ in range(2))
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    low = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    for step in range(120):
        gradient = torch.randn(8, 8) * 0.01 * math.exp(0.3 * torch.randn(()).item())
        if step in (60, 61, 90):
            gradient *= 300
        scale = 2.0 ** (4 + step // 10 % 5)
        weight.grad, low.grad = gradient, (gradient * scale).to(dtype)
        one, two = plain.observe([weight]), other.observe([low], scale=scaled_by(scale))
        assert one.skip == two.skip == (step in (60, 61, 90)), step
        assert two.norm == pytest.approx(one.norm, rel=1e-2)


def test_clip_coefficient_is_that_of_torch(model: torch.nn.Module):
    model(torch.ones(3, 6)).square().sum().backward()
    verdict = GradientGuard.from_preset("steady").observe(model)
    want = [each.grad.clone() for each in model.parameters()]
    for each, gradient in zip(model.parameters(), want, strict=True):
        gradient.mul_(verdict.clip_coefficient(0.5))
        assert each.grad is not gradient
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    for each, gradient in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(gradient, each.grad, rtol=1e-6, atol=0)
    assert verdict.clip_coefficient(1e9) == 1.0
    model[0].bias.grad[0] = math.nan
    with pytest.raises(ValueError, match="cannot be clipped"):
        GradientGuard.from_preset("off").observe(model).clip_coefficient(1.0)


@pytest.mark.parametrize("mode", ["exact", "sampled"])
def test_cosine_to_the_previous_gradient(mode: str):
    torch.manual_seed(1)
    params = parameters([(40, 50), (300,), (3, 3, 5)])
    params[2].grad = params[2].grad.transpose(0, 1)
    guard = GradientGuard.from_preset("steady", cosine=mode)
    assert math.isnan(guard.observe(params).cosine)
    assert guard.observe(params).cosine == pytest.approx(1.0, rel=1e-5)
    before = [each.grad.clone() for each in params]
    for each in params:
        each.grad = 0.5 * each.grad + torch.randn(each.shape) * 0.01
    flat, flat_before = (torch.cat([g.reshape(-1) for g in side]) for side in ([p.grad for p in params], before))
    want = torch.nn.functional.cosine_similarity(flat.double(), flat_before.double(), dim=0).item()
    got = guard.observe(params).cosine
    assert got == pytest.approx(want, rel=1e-5) if mode == "exact" else abs(got - want) < 0.15
    for each in params:
        each.grad = -each.grad
    assert guard.observe(params).cosine == pytest.approx(-1.0, rel=1e-5)


def test_cosine_survives_a_checkpoint_and_a_change_of_tensors(tmp_path):
    params = parameters([(4, 4), (3,)])
    first, second = (GradientGuard.from_preset("stable") for _ in range(2))
    first.observe(params)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in params:
        each.grad = torch.randn(each.shape)
    assert second.observe(params).cosine == first.observe(params).cosine
    params[1].grad = None
    assert math.isnan(first.observe(params).cosine)
    other_mode = PreviousGradient("sampled")
    other_mode.load_state_dict(first.previous.state_dict())
    assert other_mode.kept is None


def test_nothing_is_measured_twice_or_copied_when_cosine_is_off(monkeypatch: pytest.MonkeyPatch):
    params = parameters([(4, 4)] * 5)
    calls = []
    norm = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *args: calls.append(len(args[0])) or norm(*args))
    guard = GradientGuard.from_preset("steady")
    verdict = guard.observe(params, loss=1.0)
    assert guard.previous is None
    assert verdict.cosine is None
    assert calls == [5]


def test_sources_that_hold_no_gradients_are_refused():
    for source in (3, ["a"], [("a", 1)], [("a", torch.zeros(2)), 2]):
        with pytest.raises(GuardError, match="parameters"):
            GradientGuard.from_preset("steady").observe(source)
    with pytest.raises(GuardError, match="GuardConfig"):
        GradientGuard("steady")
    with pytest.raises(GuardError, match="auto"):
        GradientGuard.from_preset("steady", processes="all")
