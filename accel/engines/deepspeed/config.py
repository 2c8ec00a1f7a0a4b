"""The user's DeepSpeed configuration, and accel's for DeepSpeed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.parts import elementwise

#: Sections that accel passes to DeepSpeed unchanged.
_PASSED: Final = {"activation_checkpointing", "comms_logger", "communication_data_type"}
#: Keys that accel reads itself, or that a raw loop doesn't need.
_READ: Final = {
    *("bf16", "gradient_clipping", "zero_allow_untested_optimizer", "zero_optimization"),
    *("steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu"),
}
#: Keys that raise an error, with its advice. Unknown keys raise one too.
_REFUSED: Final = {
    "amp": "Use precision='16-mixed'.",
    "fp16": "Use precision='bf16-mixed' or '16-mixed'.",
    "gradient_accumulation_steps": "Call backward() several times before step().",
    "optimizer": "Give accel.setup the optimizer of your loop.",
    "scheduler": "Step a torch scheduler in your loop.",
    "torch_autocast": "Use precision='bf16-mixed'.",
    "cpu_offload": "Use offload_optimizer.",
    "cpu_offload_param": "Use offload_param.",
    "mics_shard_size": "Use zero_hpz_partition_size.",
    "zenflow": "Remove it, because your optimizer runs the step.",
}
#: The most elements in a bucket. DeepSpeed would allocate its default of 5e8 at once.
_BUCKET: Final = 200_000_000
#: DeepSpeed's elementwise optimizers. FusedAdam is missing, because it counts steps per group.
#: These counts would differ on ranks without fragments of some parameters.
_ELEMENTWISE: Final = {"DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"}


def _refuse(key: str, value: Any, advice: str) -> NoReturn:
    raise BackendError(f"DeepSpeed's {key!r} is {value!r}. {advice}")


def _is_off(value: Any) -> bool:
    """True if a value has no effect. "auto" leaves it to accel."""
    if isinstance(value, Mapping):
        return not value or _is_off(value.get("enabled", True))
    return value is None or value is False or value == "auto"


class Configuration:
    """The options and the user's configuration together."""

    def __init__(self, options: Any) -> None:
        config = options.config or {}
        if isinstance(config, str | Path):
            config = json.loads(Path(config).read_text(encoding="utf-8"))
        self._config: Mapping[str, Any] = config
        zero = config.get("zero_optimization") or {}
        self._zero = {k: v for k, v in zero.items() if v not in (None, "auto")}
        self.stage: int = self._zero.get("stage", options.stage or 2)
        if options.stage not in (None, self.stage):
            _refuse("zero_optimization.stage", self.stage, f"Remove stage={options.stage}.")
        if self.stage not in (1, 2, 3):
            _refuse("stage", self.stage, "Use 1, 2 or 3, or backend='ddp'.")
        #: True if the weights that the optimizer updates are in CPU memory.
        self.offload_optimizer = self._offloads("offload_optimizer") or options.offload_optimizer
        #: True if the shards of the model's weights are in CPU memory.
        self._offload_param = self._offloads("offload_param") or options.offload_parameters
        #: True if the optimizer updates fp32 copies of bfloat16 weights.
        self.masters = not _is_off(config.get("bf16"))
        clipping: Any = config.get("gradient_clipping")
        #: The norm to which every step clips. 0: no clipping.
        self.clipping = 0.0 if _is_off(clipping) else float(clipping)

    def _offloads(self, key: str) -> bool:
        section = self._zero.get(key, {})
        device = section.get("device", "none")
        if device not in ("cpu", "none"):
            _refuse(f"zero_optimization.{key}", section, "Use {'device': 'cpu'}.")
        return bool(device == "cpu")

    def check(self, world_size: int) -> None:
        """Raise BackendError for keys that conflict with the loop."""
        known = _PASSED | _READ | self._zero.keys() - _REFUSED.keys()
        for key, value in {**self._config, **self._zero}.items():
            is_one = key == "gradient_accumulation_steps" and value == 1
            if key.startswith("zero_quantized") and value:
                _refuse(key, value, "Remove it, because quantization changes the result.")
            if key not in known and not _is_off(value) and not is_one:
                _refuse(key, value, _REFUSED.get(key, "Remove it, because accel doesn't use it."))
        if self._offload_param and self.stage != 3:
            _refuse("zero_optimization.offload_param", "cpu", "Use stage=3 with it.")
        needs_ranks = self.offload_optimizer or self._offload_param or self.masters
        if world_size == 1 and needs_ranks:
            _refuse("world size", 1, "Offload and fp32 masters need at least 2 ranks.")

    def check_precision(self, name: str) -> None:
        """Raise PrecisionError for master weights without bf16-true."""
        if self.masters and name != "bf16-true":
            raise PrecisionError(
                "DeepSpeed's config key 'bf16' adds fp32 master weights, but "
                f"precision is {name!r}. Use precision='bf16-true'."
            )

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raise OptimizerError unless it can step ranges of parameters."""
        kind = type(optimizer)
        fits = elementwise(optimizer) or kind.__name__ in _ELEMENTWISE
        if not kind.__module__.startswith("deepspeed.ops."):
            fits |= self._config.get("zero_allow_untested_optimizer") is True
        if not fits:
            raise OptimizerError(
                f"{kind.__name__} can't step flat shards. Use an elementwise "
                "optimizer such as AdamW(fused=True), or set "
                "config={'zero_allow_untested_optimizer': True}."
            )

    def predict(self, tensors: Sequence[TensorSize], world_size: int) -> MemoryUse:
        """Return the bytes on each rank (arXiv 1910.02054)."""
        # At every stage, a rank keeps only shards of reduced gradients. Stage 3 also keeps small
        # weights in full, and a bucket for gradients.
        shards_weights = self.stage == 3 and world_size > 1
        small = int(self._zero.get("stage3_param_persistence_threshold", 100_000))
        share = 1 / world_size
        # With fp32 masters, gradients are in fp32 too, twice the bytes of bfloat16.
        gradients = min(1.0, 2 * share) if self.masters else share
        uses: list[MemoryUse] = []
        full = bucket = 0
        for tensor in tensors:
            if self.masters and not tensor.is_buffer:
                state = tensor.state_bytes * 4 // tensor.itemsize
                if tensor.trainable and tensor.optimizer is not None:
                    state += 4 * tensor.numel
                tensor = replace(tensor, itemsize=2, state_bytes=state)
            weights = share + (tensor.numel <= small) if shards_weights else 1.0
            uses.append(tensor.use(weights, gradients, share))
            if shards_weights and not tensor.is_buffer:
                full += tensor.use().parameters
                size = int(self._zero.get("reduce_bucket_size", _BUCKET))
                bucket = size * tensor.itemsize
        return replace(add_uses(uses), buckets=min(bucket, full))

    def complete(self, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """Return the configuration for ``deepspeed.initialize``."""
        numel, dtype = 0, torch.float32
        # DeepSpeed shards weights of a single dtype. Trainable weights come last and decide it.
        for p in sorted(parameters, key=lambda p: p.requires_grad):
            numel += p.numel()
            if p.is_floating_point():
                dtype = p.dtype
        size = min(_BUCKET, numel + numel % 2)
        sizes = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        zero: dict[str, Any] = {**sizes, **self._zero, "stage": self.stage}
        # accel offloads the optimizer's state itself, because the user's optimizer does the step.
        zero.pop("offload_optimizer", None)
        if self._offload_param:
            offload = self._zero.get("offload_param", {})
            zero["offload_param"] = {**offload, "device": "cpu"}
        config = {
            **{key: self._config[key] for key in _PASSED & self._config.keys()},
            "steps_per_print": None,
            "zero_optimization": zero,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Without it, DeepSpeed would clip to 1.0.
            "gradient_clipping": 0.0,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if dtype in (torch.bfloat16, torch.float16):
            name = "bf16" if dtype is torch.bfloat16 else "fp16"
            config["data_types"] = {"grad_accum_dtype": name}
            # DeepSpeed's own fp16 mode would scale the loss, so it stays off for float16.
            config["bf16"] = {"enabled": name == "bf16"}
        return config


def check_parameters(named: Mapping[str, nn.Parameter], stage: int) -> None:
    """Raise BackendError for weights that DeepSpeed can't shard."""
    first: tuple[str, torch.dtype] | None = None
    for name, p in named.items():
        dtype = p.dtype
        if stage < 3 and not p.requires_grad:
            continue
        if dtype is torch.float64 or dtype.is_complex or not p.numel():
            raise BackendError(f"DeepSpeed can't shard {name} ({p.numel()} {dtype}). Use 'fsdp'.")
        if not dtype.is_floating_point:
            continue
        first = first or (name, dtype)
        if first[1] is not dtype:
            raise BackendError(
                "DeepSpeed needs one dtype for all weights, but "
                f"{first[0]} is {first[1]} and {name} is {dtype}. Convert one."
            )
