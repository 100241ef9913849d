"""The code blocks of docs/guardian.md, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import transformers

import maulstick.guard
from maulstick.guard import GradientGuard, GradientLog, guarded_step
from maulstick.guard.lightning import GuardCallback as LightningCallback
from maulstick.guard.trainer import GuardCallback as TrainerCallback

DOCUMENT = Path(__file__).parents[2] / "docs" / "guardian.md"
BAD = 30


def examples() -> dict[str, str]:
    """Heading -> its first Python block."""
    found: dict[str, str] = {}
    heading = ""
    for match in re.finditer(r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        if match[1]:
            heading = match[1]
        else:
            found[heading] = match[2]
    return found


def batches(count: int = 40, bad: float = float("nan")) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Small batches, of which number 30 gives a bad gradient."""
    torch.manual_seed(1)
    made = [(torch.randn(4, 6), torch.randn(4, 2)) for _ in range(count)]
    made[BAD][1][0, 0] = bad
    return made


def space(model: torch.nn.Module, **more: Any) -> dict[str, Any]:
    names = {name: getattr(maulstick.guard, name) for name in maulstick.guard.__all__}
    return {
        **names,
        "torch": torch,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loss_fn": torch.nn.functional.mse_loss,
        "data": batches(),
        "device": "cpu",
        **more,
    }


def run(heading: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(examples()[heading], f"guardian.md: {heading}", "exec"), names)
    return names


def finite(model: torch.nn.Module) -> bool:
    return all(bool(each.isfinite().all()) for each in model.parameters())


def moved(model: torch.nn.Module, before: list[torch.Tensor]) -> bool:
    return any(not torch.equal(one, two) for one, two in zip(model.parameters(), before, strict=True))


@pytest.fixture
def before(model: torch.nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def test_every_example_has_a_test():
    assert set(examples()) == {
        "Plain PyTorch",
        "Plain PyTorch with a GradScaler",
        "accelerate",
        "Lightning",
        "Hugging Face Trainer",
        "By hand",
        "Accumulation",
        "Resuming",
        "The log and the replay",
        "Without waiting for the GPU",
    }
    for heading in list(examples())[:5]:
        assert len([line for line in examples()[heading].splitlines() if line]) <= 5


@pytest.mark.parametrize("heading", ["Plain PyTorch", "Plain PyTorch with a GradScaler", "By hand"])
def test_plain_loops(model: torch.nn.Module, before: list[torch.Tensor], heading: str):
    names = space(model, scaler=torch.amp.GradScaler("cpu"))
    run(heading, names)
    assert names["guard"].judge.skipped == {"nan": 1}
    assert names["guard"].observed == 40
    assert finite(model)
    assert moved(model, before)
    assert names["scaler"].get_scale() == (65536.0 if heading == "Plain PyTorch" else 32768.0)


@pytest.mark.parametrize("with_scaler", [False, True])
def test_accelerate(model: torch.nn.Module, before: list[torch.Tensor], with_scaler: bool):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    names = space(model, accelerator=accelerator)
    names["model"], names["optimizer"] = accelerator.prepare(model, names["optimizer"])
    if with_scaler:
        # accelerate makes no scaler on a CPU; one it had made would sit in the same two places.
        accelerator.scaler = names["optimizer"].scaler = torch.amp.GradScaler("cpu")
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    run("accelerate", names)
    guard = names["guard"]
    assert guard.observed == 20
    assert guard.judge.skipped == {"nan": 1}
    assert names["outcome"].verdict.micro_batches == 2
    assert finite(model)
    assert moved(model, before)
    if with_scaler:
        assert accelerator.scaler.get_scale() == 32768.0
        assert not names["optimizer"].step_was_skipped
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_prepared_scheduler_stands_still_on_a_skip_and_goes_on_after_it(model: torch.nn.Module):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    net, optimizer, scheduler = accelerator.prepare(model, plain, torch.optim.lr_scheduler.StepLR(plain, 1, 0.5))
    guard = GradientGuard.from_preset("steady")
    for step, (inputs, targets) in enumerate(batches(33)):
        accelerator.backward(torch.nn.functional.mse_loss(net(inputs), targets) * 1e-3)
        guarded_step(guard, optimizer, accelerator=accelerator)
        assert optimizer.step_was_skipped == (step == BAD)
        scheduler.step()
    assert scheduler.scheduler.last_epoch == 32


class Module(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module, fused: bool = False) -> None:
        super().__init__()
        self.model, self.fused = model, fused
        self.norms: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.fused)


def lightning_options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "max_epochs": 1,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
        **more,
    }


@pytest.mark.filterwarnings("ignore")
def test_lightning(model: torch.nn.Module, before: list[torch.Tensor], tmp_path: Path):
    module = Module(model)
    data = torch.utils.data.DataLoader(batches(), batch_size=None)
    names = space(model, lightning=lightning, lightning_module=module, data=data)
    names["trainer_options"] = lightning_options(tmp_path)
    run("Lightning", names)
    assert names["guard"].judge.skipped == {"nan": 1}
    assert finite(model)
    assert moved(model, before)
    saved = next(tmp_path.rglob("*.ckpt"))
    callback = LightningCallback(GradientGuard.from_preset("steady"))
    lightning.Trainer(callbacks=[callback], **lightning_options(tmp_path, max_epochs=2)).fit(
        module, data, ckpt_path=saved
    )
    assert callback.guard.observed == 80
    assert callback.guard.judge.skipped == {"nan": 2}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("fused", [False, True])
def test_lightning_with_a_scaler_and_accumulation(model: torch.nn.Module, fused: bool, tmp_path: Path):
    from lightning.pytorch.plugins import MixedPrecision

    module = Module(model, fused)
    skipped = []
    callback = LightningCallback(GradientGuard.from_preset("steady"), lambda trainer, verdict: skipped.append(verdict))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # fp16 autocast is slow on a CPU; only the scaler matters here.
    precision = MixedPrecision("bf16-mixed", "cpu")
    precision.scaler = scaler
    options = lightning_options(tmp_path, accumulate_grad_batches=2, enable_checkpointing=False, plugins=[precision])
    data = torch.utils.data.DataLoader(batches(bad=float("inf")), batch_size=None)
    lightning.Trainer(callbacks=[callback], **options).fit(module, data)
    assert callback.guard.observed == 20
    assert len(skipped) == 1
    assert skipped[0].loss == float("inf") or skipped[0].loss < 10
    assert 0 < callback.last_verdict.loss < 10
    assert callback.last_verdict.norm < 10
    assert scaler.get_scale() == 512.0
    assert finite(model)


class Regression(torch.nn.Module):
    """What the Trainer expects of a model: named inputs, a loss in the output."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}


def trainer_arguments(folder: Path, **more: Any) -> transformers.TrainingArguments:
    options = {
        "max_steps": 40,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "logging_strategy": "no",
        **more,
    }
    return transformers.TrainingArguments(output_dir=str(folder), **options)


def dataset(bad: bool = True) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    rows = [{"inputs": torch.randn(6), "targets": torch.randn(2)} for _ in range(160)]
    if bad:
        rows[77]["targets"][0] = float("nan")
    return rows


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer(model: torch.nn.Module, before: list[torch.Tensor], tmp_path: Path):
    arguments = trainer_arguments(tmp_path, max_grad_norm=0.25)
    names = space(Regression(model), Trainer=transformers.Trainer, arguments=arguments, dataset=dataset())
    run("Hugging Face Trainer", names)
    assert names["guard"].judge.skipped == {"nan": 1}
    assert names["guard"].observed == 40
    assert finite(model)
    assert moved(model, before)
    assert arguments.max_grad_norm == 0.25


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trainer_clips_as_before_and_resumes(model: torch.nn.Module, tmp_path: Path):
    import copy

    def train(net: torch.nn.Module, callbacks: list[Any], resume: bool = False, **more: Any) -> None:
        arguments = trainer_arguments(tmp_path / "run", max_grad_norm=0.05, seed=3, **more)
        trainer = transformers.Trainer(model=net, args=arguments, train_dataset=dataset(bad=False), callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)

    plain, guarded = Regression(copy.deepcopy(model)), Regression(copy.deepcopy(model))
    train(plain, [])
    verdicts = []
    guard = GradientGuard.from_preset("steady")
    callback = TrainerCallback(guard, lambda state, verdict: verdicts.append(verdict))
    train(guarded, [callback], save_strategy="steps", save_steps=25)
    assert callback.last_verdict.norm > 0.05
    assert verdicts == []
    for one, two in zip(plain.parameters(), guarded.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    resumed = TrainerCallback(GradientGuard.from_preset("steady"))
    (tmp_path / "run" / "checkpoint-40").rename(tmp_path / "later")
    train(Regression(copy.deepcopy(model)), [resumed], resume=True)
    assert resumed.guard.observed == 40
    assert resumed.guard.state_dict()["judge"] == guard.state_dict()["judge"]


def test_accumulation(model: torch.nn.Module, before: list[torch.Tensor]):
    data = batches()
    names = run("Accumulation", space(model, windows=[data[start : start + 4] for start in range(0, 40, 4)]))
    assert names["guard"].observed == 10
    assert names["guard"].skipped == 0
    assert finite(model)
    assert moved(model, before)


def test_resuming_and_replaying(model: torch.nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture):
    guard = GradientGuard.from_preset("steady")
    names = space(model, guard=guard, folder=tmp_path, name="mine")
    with GradientLog(maulstick.guard.gradient_log_path(tmp_path, "mine"), scale=False, cosine=False) as log:
        for step, (inputs, targets) in enumerate(names["data"]):
            loss = names["loss_fn"](model(inputs), targets)
            loss.backward()
            log.write(0, step, guarded_step(guard, names["optimizer"], loss=loss).verdict)
    run("Resuming", names)
    assert names["guard"] is not guard
    assert names["guard"].state_dict() == guard.state_dict()
    run("The log and the replay", names)
    assert "| steady | 1 (2.50%)" in capsys.readouterr().out


def test_without_waiting(model: torch.nn.Module):
    fused = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    names = run("Without waiting for the GPU", space(model, fused_optimizer=fused))
    assert [place for place, verdict in enumerate(names["verdicts"]) if verdict.skip] == [BAD]
    assert finite(model)
