"""Every option of a training run, in the dataclass of the part that it configures.

The string under a field is its line in ``--help``. Names are those of sd-scripts wherever sd-scripts has one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from maulstick.options import groups
from maulstick.options.dataset_schema import DatasetOptions
from maulstick.options.ip_adapter_schema import IpAdapterOptions
from maulstick.options.log_schema import LogOptions
from maulstick.options.objective_schema import ObjectiveOptions
from maulstick.options.output_schema import MetadataOptions, UploadOptions
from maulstick.options.safety_schema import AutopsyOptions, GuardOptions, RescueOptions
from maulstick.options.validation_schema import ValidationOptions

Precision = Literal["no", "fp16", "bf16"]
SavePrecision = Literal["float", "fp16", "bf16"]
NetworkType = Literal["lora", "dora", "loha", "lokr", "oft", "ip_adapter"]


@Parameter(name="*", group=groups.MODEL)
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    pretrained_model_name_or_path: str | None = None
    """Base model: a diffusers folder, or one .safetensors/.ckpt file in the original layout. Required."""
    v2: bool = False
    """Say that the base is SD 2.x; it is recognised anyway, and a contradiction is an error."""
    v_parameterization: bool = False
    """Say that the base predicts v instead of noise (SD 2.x 768-v and v-prediction fine-tunes)."""
    vae: str | None = None
    """Other VAE to encode images with: a diffusers folder or one file."""
    clip_skip: int | None = None
    """Take the text states from this layer, counted from the end (1 = last, 2 = one before it)."""
    max_token_length: Literal[75, 150, 225] = 75
    """Longest caption, in tokens; longer ones are cut and reported."""
    weighted_captions: bool = False
    """Read (word), (word:1.3) and [word] in captions and prompts as weights, as the web UI does; not for SD3."""
    clip_l: str | None = None
    """SD3: file of the first text encoder (CLIP-L), for a model file without one or instead of its own."""
    clip_g: str | None = None
    """SD3: file of the second text encoder (CLIP-G), in the same way."""
    t5xxl: str | None = None
    """SD3: the third text encoder (T5): a file, or a diffusers folder with text_encoder_3 and tokenizer_3."""
    no_t5xxl: bool = False
    """SD3: leave T5 out even if it is there, which saves 9 GB; the model was trained to do without it at times."""
    t5xxl_max_token_length: int | None = None
    """SD3: longest caption for T5, in tokens; 256 without it. CLIP always reads 75."""
    base_weights: list[Path] = field(default_factory=list)
    """LoRA files to merge into the base before anything else; what is trained belongs to that base."""
    base_weights_multiplier: list[float] = field(default_factory=list)
    """Strength of each of them; 1 where none is given."""


@Parameter(name="*", group=groups.NETWORK)
@dataclass(frozen=True, kw_only=True)
class NetworkOptions:
    network_module: str = "networks.lora"
    """Kind of adapter, as sd-scripts names it; networks.lora is the one there is."""
    network_type: NetworkType = "lora"
    """What is trained: lora, dora (a LoRA with lengths), loha, lokr, oft (turns groups of outputs), or ip_adapter."""
    network_dim: int = 4
    """Rank of the LoRA; of an OFT the largest size of its blocks."""
    network_alpha: float = 1.0
    """LoRA scale numerator: the update is multiplied by network_alpha / network_dim."""
    network_dropout: float | None = None
    """Chance (0 to 1) to drop each rank activation in training."""
    network_args: list[str] = field(default_factory=list)
    """Further network arguments as key=value: conv_dim, conv_alpha and what follows here down to module_dropout."""
    conv_dim: int | None = None
    """Rank for 3x3 convolutions; without it they get no LoRA."""
    conv_alpha: float | None = None
    """Scale numerator for 3x3 convolutions (1 when conv_dim is set)."""
    block_lr: list[str] = field(default_factory=list)
    """Weights of learning rates by block: down.4-5=0.5 mid=0 up=sine other=1, or a preset such as OUTALL."""
    down_lr_weight: str | None = None
    """Weights of the blocks from input to middle: 12 numbers (SDXL 9), one number, or a curve such as cosine+0.2."""
    mid_lr_weight: str | None = None
    """Weight of the middle block (SDXL: one or three)."""
    up_lr_weight: str | None = None
    """Weights of the blocks from middle to output, as for down_lr_weight."""
    block_lr_zero_threshold: float | None = None
    """Weights that are not above this count as 0; a block of weight 0 gets no LoRA."""
    block_dims: str | None = None
    """Rank of each block: 25 whole numbers (SDXL 23, SD3 one for each), 0 for none."""
    block_alphas: str | None = None
    """Scale numerator of each block, as many numbers."""
    conv_block_dims: str | None = None
    """Rank of each block for 3x3 convolutions, as many numbers."""
    conv_block_alphas: str | None = None
    """Scale numerator of each block for 3x3 convolutions, as many numbers."""
    train_block_indices: str | None = None
    """SD3: blocks that get a LoRA: all, none, or numbers and ranges such as 0-5,8; the others get none."""
    loraplus_lr_ratio: float | None = None
    """LoRA+: learning rate of the up factors as a multiple of that of the down factors; 16 is the paper's value."""
    loraplus_unet_lr_ratio: float | None = None
    """The same for the UNet alone."""
    loraplus_text_encoder_lr_ratio: float | None = None
    """The same for the text encoder alone."""
    rank_dropout: float | None = None
    """Chance (0 to 1) to drop a whole rank channel per image in training."""
    module_dropout: float | None = None
    """Chance (0 to 1) to leave out a whole LoRA module for a step."""
    factor: int | None = None
    """LoKr: size of the smaller factor to aim at; without it (or -1) both are as alike as can be."""
    decompose_both: bool = False
    """LoKr: make the smaller factor a product of rank network_dim too, where that is smaller."""
    wd_on_output: bool = False
    """DoRA: a length for each output instead of each input: for LyCORIS and diffusers, not ComfyUI and the web UI."""
    network_weights: Path | None = None
    """LoRA or IP-Adapter file to start from."""
    dim_from_weights: bool = False
    """Take ranks and alphas from network_weights instead of network_dim and network_alpha."""
    network_train_unet_only: bool = False
    """Train the LoRA of the UNet (or of SD3's transformer) only."""
    network_train_text_encoder_only: bool = False
    """Train the text encoder's LoRA only."""
    scale_weight_norms: float | None = None
    """Scale a module's update down when its norm exceeds this value (1 is a good start)."""


@Parameter(name="*", group=groups.RUN)
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    output_dir: Path | None = None
    """Folder for everything the run writes. Required."""
    output_name: str = "last"
    """Name of the LoRA file, without extension."""
    save_model_as: Literal["safetensors", "ckpt", "pt"] = "safetensors"
    """Kind of the saved file; ckpt and pt hold no metadata, and programs must unpack code to read them."""
    save_precision: SavePrecision | None = None
    """Number format of the saved file; without it float (32 bit)."""
    save_every_n_epochs: int | None = None
    """Save a LoRA file every so many epochs."""
    save_every_n_steps: int | None = None
    """Save a LoRA file every so many steps."""
    save_last_n_epochs: int | None = None
    """Keep the LoRA files of the last so many saved epochs and remove older ones of this run."""
    save_last_n_steps: int | None = None
    """Keep the LoRA files saved within the last so many steps and remove older ones of this run."""
    save_state: bool = False
    """Save the whole state too, each time a LoRA file is saved and at the end: what resume goes on from."""
    save_state_on_train_end: bool = False
    """Save the whole state at the end, and when the run is stopped."""
    save_last_n_epochs_state: int | None = None
    """As save_last_n_epochs, for states; without it save_last_n_epochs counts for them too."""
    save_last_n_steps_state: int | None = None
    """As save_last_n_steps, for states; without it save_last_n_steps counts for them too."""
    resume: str | None = None
    """State folder to go on from exactly, or auto: the last state of output_name in output_dir, if there is one."""
    initial_epoch: int | None = None
    """Count from this epoch (1 is the first), as if those before had been trained."""
    initial_step: int | None = None
    """Count from this step, as if those before had been trained; also from a state that resume names."""
    skip_until_initial_step: bool = False
    """Let the order of the images go on at initial_step too, instead of beginning an epoch."""
    max_train_steps: int = 1600
    """Length of training in steps (updates)."""
    max_train_epochs: int | None = None
    """Length of training in epochs; takes the place of max_train_steps."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per update."""
    max_skipped_fraction: float = 0.5
    """Stop the run when more than this share of the last steps (20 to 200 of them) was lost; 1 never stops it."""
    alarms: Annotated[bool, Parameter(negative="--no-alarms")] = True
    """Look now and then for weights that do not learn, and for trends that end in an overflow."""
    gradient_checkpointing: bool = False
    """Compute activations twice to save memory."""
    fsdp_base: bool = False
    """Spread the frozen denoiser over all processes (FSDP2), so that each holds only a part of it."""
    mixed_precision: Precision = "no"
    """Number format of the base and of the forward pass; the LoRA itself stays in 32 bit."""
    ddp_timeout: int | None = None
    """Several processes: minutes that one waits for another; without it 720."""
    ddp_gradient_as_bucket_view: bool = False
    """Several processes: let gradients lie in the buffers that they are exchanged in."""
    ddp_static_graph: bool = False
    """Several processes: tell DDP that every step takes the same way through the network."""
    fp8_base: bool = False
    """Keep the frozen base, text encoders included, in 8 bits; it is computed in mixed_precision (fp16 or bf16)."""
    fp8_base_unet: bool = False
    """The same for the UNet (or SD3's transformer) alone."""
    seed: int | None = None
    """Seed of every random choice; without it one is drawn and logged."""
    no_metadata: bool = False
    """Write only the metadata that programs need to load the file."""
    training_comment: str | None = None
    """Comment stored in the file's metadata."""


@Parameter(name="*", group=groups.OPTIMIZER)
@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    learning_rate: float = 1e-4
    """Learning rate of all that has no rate of its own."""
    unet_lr: float | None = None
    """Learning rate of the LoRA of the UNet (or of SD3's transformer)."""
    text_encoder_lr: list[float] | None = None
    """Learning rate of the text encoder's LoRA; for SDXL and SD3 one value for both, or two."""
    text_encoder_lr1: float | None = None
    """Learning rate of the first text encoder's LoRA (of SDXL, SD3: CLIP-L) alone."""
    text_encoder_lr2: float | None = None
    """Learning rate of the second text encoder's LoRA (of SDXL, SD3: CLIP-G) alone."""
    optimizer_type: str = "AdamW"
    """Optimizer; `maulstick optimizers` lists them."""
    optimizer_args: list[str] = field(default_factory=list)
    """Further optimizer arguments as key=value, such as weight_decay=0.01 betas=0.9,0.99."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm; 0 turns clipping off."""
    ema_decay: float | None = None
    """Save and draw with a running average of what trains, of this decay (0.999 to 0.9999)."""


@Parameter(name="*", group=groups.SCHEDULE)
@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    lr_scheduler: str = "constant"
    """Course of the rate: constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial,
    inverse_sqrt, cosine_with_min_lr, warmup_stable_decay, piecewise_constant or rex."""
    lr_scheduler_type: str | None = None
    """Instead: a class of torch.optim.lr_scheduler, or module.Class, or a function that takes an optimizer."""
    lr_scheduler_args: list[str] = field(default_factory=list)
    """Arguments of the schedule as key=value, such as step_rules=1:10,0.1:20,0.01 for piecewise_constant."""
    lr_warmup_steps: str = "0"
    """Length of the warm-up from rate 0: steps, a fraction below 1 of all steps, or a share such as 10%."""
    lr_warmup_skip_zero: bool = False
    """Start the warm-up at 1/length instead of 0: an update at rate 0 is lost."""
    lr_decay_steps: str = "0"
    """Length of the decay at the end of warmup_stable_decay, given in the same ways."""
    lr_scheduler_num_cycles: int = 1
    """Cycles of cosine_with_restarts; half waves of cosine_with_min_lr and warmup_stable_decay."""
    lr_scheduler_power: float = 1.0
    """Power of polynomial; 1 is linear, 2 falls fast at first."""
    lr_scheduler_min_lr_ratio: float | None = None
    """Lowest rate as a share of the full one: cosine_with_min_lr, warmup_stable_decay, rex."""
    lr_scheduler_timescale: int | None = None
    """Time scale of inverse_sqrt in steps; without it the length of the warm-up."""


@Parameter(name="*", group=groups.SAMPLES)
@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    sample_prompts: Path | None = None
    """Text file with one prompt a line, with sd-scripts' --n --w --h --d --l --s options; or its TOML or JSON."""
    sample_every_n_steps: int | None = None
    """Draw the sample prompts every so many steps."""
    sample_every_n_epochs: int | None = None
    """Draw the sample prompts every so many epochs."""
    sample_at_first: bool = False
    """Draw the sample prompts before the first step too, unless the run goes on from a state."""
    sample_sampler: Literal["ddim", "pndm", "lms", "euler", "euler_a", "dpmsolver", "dpmsolver++"] = "euler"
    """Sampler for the sample images."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All options of one run, by the part they belong to."""

    model: ModelOptions = field(default_factory=ModelOptions)
    network: NetworkOptions = field(default_factory=NetworkOptions)
    ip_adapter: IpAdapterOptions = field(default_factory=IpAdapterOptions)
    dataset: DatasetOptions = field(default_factory=DatasetOptions)
    run: RunOptions = RunOptions()
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    guard: GuardOptions = field(default_factory=GuardOptions)
    rescue: RescueOptions = field(default_factory=RescueOptions)
    autopsy: AutopsyOptions = field(default_factory=AutopsyOptions)
    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    sample: SampleOptions = SampleOptions()
    metadata: MetadataOptions = field(default_factory=MetadataOptions)
    upload: UploadOptions = field(default_factory=UploadOptions)
    log: LogOptions = field(default_factory=LogOptions)


def flat_values(options: TrainOptions) -> dict[str, Any]:
    """Return every option's value by its name, without the groups."""
    return {
        option.name: getattr(getattr(options, group.name), option.name)
        for group in fields(options)
        for option in fields(getattr(options, group.name))
    }
