"""What a user's DeepSpeed configuration means here, and what is passed to ``deepspeed.initialize``."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import BackendError, OptimizerError, PrecisionError
from ..base.memory import MemoryUse, TensorSize, add_uses
from ..base.parts import ELEMENTWISE, elementwise
from .library import library

#: Keys that DeepSpeed gets as they are.
_PASSED: Final = frozenset({
    "activation_checkpointing", "comms_logger", "communication_data_type", "disable_allgather", "dump_state",
    "memory_breakdown", "seq_parallel_communication_data_type", "steps_per_print", "zero_optimization",
})  # fmt: skip
#: Keys that this file reads.
_READ: Final = frozenset({
    "bf16", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
    "zero_allow_untested_optimizer",
})  # fmt: skip
_LOSSY: Final = "quantized communication changes the result: remove the key"
_NO_MICS: Final = (
    "DeepSpeed has no MiCS any more: use 'zero_hpz_partition_size', or accel.FSDP(replicas=...)"
)
_OLD_OFFLOAD: Final = "use 'offload_optimizer' or 'offload_param' with {'device': 'cpu'}"
#: Refused keys and the reasons. Any other key that is not listed above is refused too.
_REFUSED: Final = {
    "optimizer": "give accel.setup the optimizer of your loop",
    "scheduler": "step a torch scheduler in your loop",
    "fp16": "DeepSpeed's own fp16 scales the loss inside its backward: use precision='bf16-mixed'",
    "amp": "use precision=",
    "torch_autocast": "use precision='bf16-mixed'",
    "data_types": "the dtypes follow from precision= and 'bf16'",
    "zero_force_ds_cpu_optimizer": "give accel.setup a deepspeed.ops.adam.DeepSpeedCPUAdam as the optimizer",
    "zero_optimization.cpu_offload": _OLD_OFFLOAD,
    "zero_optimization.cpu_offload_param": _OLD_OFFLOAD,
    "zero_optimization.mics_hierarchical_params_gather": _NO_MICS,
    "zero_optimization.mics_shard_size": _NO_MICS,
    "zero_optimization.zenflow": "ZenFlow steps by itself: remove the key",
    "zero_optimization.zero_quantized_gradients": _LOSSY,
    "zero_optimization.zero_quantized_nontrainable_weights": _LOSSY,
    "zero_optimization.zero_quantized_weights": _LOSSY,
    "zero_optimization.offload_optimizer.ratio": "accel offloads everything that the optimizer steps: remove the key",
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload steps by itself: remove the key",
}
#: Elements of a bucket, which is allocated in full: DeepSpeed's default is 5e8. Small buckets are faster over gloo.
_BUCKET: Final = 200_000_000
_GLOO_BUCKET: Final = 8_000_000


def _is_off(value: Any) -> bool:
    """True if a value asks for nothing."""
    if isinstance(value, Mapping):
        return not value or _is_off(value.get("enabled", True))
    return value is None or value is False or value == "auto"


def _given(section: Any) -> Any:
    """Return a section without the values that are left to accel."""
    if not isinstance(section, Mapping):
        return section
    return {
        key: _given(value)
        for key, value in section.items()
        if value is not None and value != "auto"
    }


def _contradiction(key: str, value: Any, reason: str) -> BackendError:
    return BackendError(f"DeepSpeed configuration: {key!r} is {value!r}, but {reason}")


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return copy.deepcopy(dict(config or {}))
    try:
        return dict(json.loads(Path(config).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise BackendError(
            f"DeepSpeed(config={config!r}) can't be read as a JSON object: {error}"
        ) from error


def check_stage(stage: Any) -> None:
    """Raise BackendError if ``stage`` is not 1, 2 or 3."""
    if stage == 0 and type(stage) is int:
        raise BackendError("DeepSpeed(stage=0): stage 0 divides nothing: use backend='ddp'")
    if type(stage) is not int or stage not in (1, 2, 3):
        raise BackendError(f"DeepSpeed(stage={stage!r}): expected 1, 2 or 3")


def _with_master(tensor: TensorSize) -> TensorSize:
    """Return the sizes of a 2-byte parameter whose optimizer steps an fp32 copy."""
    if tensor.is_buffer:
        return tensor
    state = tensor.state_bytes * 4 // tensor.itemsize
    if tensor.trainable and tensor.optimizer is not None:
        state += 4 * tensor.numel
    return replace(tensor, itemsize=2, state_bytes=state)


class Configuration:
    """The options and the user's configuration together. Errors (BackendError) name the key and the reason."""

    def __init__(self, options: Any) -> None:
        self._config = _read(options.config)
        self._zero = _given(self._config.get("zero_optimization", {}))
        if not isinstance(self._zero, dict):
            raise _contradiction(
                "zero_optimization", self._zero, "a dict was expected, such as {'stage': 2}"
            )
        self.stage = self._stage(options.stage)
        #: The weights that the optimizer updates are in CPU memory, and the shards of the model's weights.
        self.offload_optimizer = self._offloads("offload_optimizer", options.offload_optimizer)
        self.offload_parameters = self._offloads("offload_param", options.offload_parameters)
        offload = self._zero.get("offload_optimizer")
        unpinned = isinstance(offload, dict) and offload.get("pin_memory") is False
        self.pins = self.offload_optimizer and not unpinned
        #: The optimizer updates fp32 copies of bfloat16 weights.
        self.masters = not _is_off(self._config.get("bf16"))
        norm = self._config.get("gradient_clipping")
        if _is_off(norm):
            norm = 0.0
        elif not isinstance(norm, int | float) or norm is True or norm < 0:
            raise _contradiction("gradient_clipping", norm, "a number of at least 0 was expected")
        #: The norm to which every step clips; 0.0 for none.
        self.clipping = float(norm)
        self.any_optimizer = self._config.get("zero_allow_untested_optimizer") is True

    def _stage(self, stage: int | None) -> int:
        given = self._zero.get("stage")
        if stage is not None and given not in (None, stage):
            raise _contradiction(
                "zero_optimization.stage",
                given,
                f"DeepSpeed(stage={stage}) was asked for: drop one",
            )
        chosen = stage if stage is not None else 2 if given is None else given
        check_stage(chosen)
        return int(chosen)

    def _offloads(self, key: str, option: bool) -> bool:
        given = self._zero.get(key, "none")
        device = given.get("device", "none") if isinstance(given, dict) else given or "none"
        if device not in ("cpu", "none"):
            raise _contradiction(
                f"zero_optimization.{key}.device", device, "accel offloads to CPU memory: use 'cpu'"
            )
        return bool(option or device != "none")

    def check(self, world_size: int) -> None:
        """Raise BackendError for what would be ignored, has no effect, or contradicts the loop."""
        for key, value in self._config.items():
            if key not in _PASSED and key not in _READ and not _is_off(value):
                reason = _REFUSED.get(
                    key, "accel does not use it, so it would be ignored: remove the key"
                )
                raise BackendError(
                    f"DeepSpeed configuration: {key!r} has no place in a raw loop: {reason}"
                )
        self._check_zero(world_size)
        half = self._config.get("bf16")
        if self.masters and _given(half) != {"enabled": True}:
            raise _contradiction("bf16", half, "{'enabled': True} was expected")
        steps = self._config.get("gradient_accumulation_steps", 1)
        if steps not in (1, "auto", None) or steps is True:
            raise _contradiction(
                "gradient_accumulation_steps",
                steps,
                "a raw loop accumulates by itself: drop the key",
            )
        total, each = (
            self._config.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu")
        )
        if isinstance(total, int) and isinstance(each, int) and total != each * world_size:
            reason = f"{world_size} batches of {each} are a step, and a raw loop accumulates by itself: drop the key"
            raise _contradiction("train_batch_size", total, reason)
        if self.offload_parameters and self.stage != 3:
            raise BackendError(
                f"DeepSpeed(offload_parameters=True) needs stage 3, but the stage is {self.stage}"
            )
        for option, wanted in (
            ("offload_parameters=True", self.offload_parameters),
            ("offload_optimizer=True", self.offload_optimizer),
            ("config={'bf16': ...}", self.masters),
        ):
            if wanted and world_size == 1:
                raise BackendError(
                    f"DeepSpeed({option}) on one process has no effect. Use more ranks or remove it."
                )

    def _check_zero(self, world_size: int) -> None:
        """Check ``zero_optimization`` against the table of refused keys, and then against DeepSpeed's own schema."""
        offload = self._zero.get("offload_optimizer")
        for start, section in (
            ("", self._zero),
            ("offload_optimizer.", offload if isinstance(offload, dict) else {}),
        ):
            for name, value in section.items():
                key = f"zero_optimization.{start}{name}"
                if key in _REFUSED and not _is_off(value) and (name, value) != ("ratio", 1):
                    raise _contradiction(key, value, _REFUSED[key])
        # "offload_optimizer": "cpu" is a short form of accel's.
        short = [
            name
            for name in ("offload_optimizer", "offload_param")
            if isinstance(self._zero.get(name), str | bool)
        ]
        given = {key: value for key, value in self._zero.items() if key not in short}
        if not given:  # DeepSpeed need not be installed to predict memory
            return
        try:
            schema = library("deepspeed.runtime.zero.config").DeepSpeedZeroConfig(
                **{**given, "stage": self.stage}
            )
        except (AssertionError, TypeError, ValueError) as error:
            raise BackendError(f"DeepSpeed configuration: zero_optimization: {error}") from error
        near = schema.zero_hpz_partition_size
        if near not in (0, 1) and (self.stage != 3 or world_size % near):
            reason = f"it needs stage 3 and must divide the number of ranks: the stage is {self.stage}, on {world_size}"
            raise _contradiction("zero_optimization.zero_hpz_partition_size", near, reason)

    def check_precision(self, name: str) -> None:
        """Raise PrecisionError for master weights with a precision other than bf16-true."""
        if self.masters and name != "bf16-true":
            raise PrecisionError(
                f"The 'bf16' of a DeepSpeed configuration adds fp32 master weights, but precision is {name!r}. "
                "Use precision='bf16-true'."
            )

    def predict(self, tensors: Sequence[TensorSize], world_size: int) -> MemoryUse:
        """Return the bytes on each rank, as in the ZeRO paper (Rajbhandari et al., 1910.02054).

        Stage 1 also keeps only its shards of the gradients after they are reduced. Stage 3 keeps
        small weights in full in addition to their shards, and a bucket to reduce gradients in.
        """
        if world_size == 1:
            return add_uses(tensor.use() for tensor in tensors)
        if self.masters:
            tensors = [_with_master(tensor) for tensor in tensors]
        threshold = self._number("stage3_param_persistence_threshold", 100_000)
        part = 1 / world_size
        uses = []
        for tensor in tensors:
            kept = self.stage < 3 or tensor.numel <= threshold
            weights = kept + (part if self.stage == 3 else 0)
            uses.append(tensor.use(weights=weights, gradients=part, state=part))
        use = add_uses(uses)
        if self.stage < 3:
            return use
        parameters = [tensor for tensor in tensors if not tensor.is_buffer]
        numel = sum(p.numel for p in parameters)
        numel = min(self._number("reduce_bucket_size", _BUCKET), numel + numel % 2)
        return replace(use, buckets=numel * max((p.itemsize for p in parameters), default=0))

    def _number(self, key: str, default: int) -> int:
        given: Any = self._zero.get(key, self._zero.get(key.removeprefix("stage3_")))
        return int(given) if isinstance(given, int | float) else default

    def complete(self, dtype: torch.dtype, numel: int, transport: str | None) -> dict[str, Any]:
        """Return the configuration for DeepSpeed: the user's, and what accel needs. Gradients travel by ``transport``."""
        zero = dict(self._zero)
        zero.pop("offload_optimizer", None)  # accel's optimizer steps where the fragments are
        offload = zero.pop("offload_param", None)
        if self.offload_parameters:
            zero["offload_param"] = {
                **(offload if isinstance(offload, dict) else {}),
                "device": "cpu",
            }
        size = min(_GLOO_BUCKET if transport == "gloo" else _BUCKET, numel + numel % 2)
        buckets = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        half: dict[torch.dtype, dict[str, Any]] = {
            torch.bfloat16: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            torch.float16: {
                "data_types": {"grad_accum_dtype": "fp16"}
            },  # DeepSpeed doesn't scale the loss
        }
        return {
            "steps_per_print": None,
            **{key: value for key, value in _given(self._config).items() if key in _PASSED},
            "zero_optimization": {**buckets, **zero, "stage": self.stage},
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # Left out, it would be 1.0.
            "gradient_clipping": 0.0,
            "managed_gradient_accumulation": False,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **half.get(dtype, {}),
        }


#: DeepSpeed's optimizers that treat each element alone.
_ELEMENTWISE: Final = ("DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion")


def refuse_optimizer(optimizer: Optimizer, settings: Configuration) -> None:
    """Raise OptimizerError if an optimizer can't step one rank's fragment of each parameter."""
    name = type(optimizer).__name__
    by_deepspeed = type(optimizer).__module__.startswith("deepspeed.ops.")
    if by_deepspeed and name == "FusedAdam":
        # It counts the steps of a group in its last parameter, which can be on a different rank.
        raise OptimizerError(
            "DeepSpeed's FusedAdam can't step shards. Use torch.optim.AdamW(fused=True)."
        )
    known = by_deepspeed and name in _ELEMENTWISE
    if not (
        known or type(optimizer) in ELEMENTWISE or elementwise(optimizer) or settings.any_optimizer
    ):
        raise OptimizerError(
            f"{name} can't step flat shards of parameters unless it treats each element alone, as AdamW does. "
            "If it does, set config={'zero_allow_untested_optimizer': True}."
        )


def refuse_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Raise BackendError for weights that DeepSpeed can't shard, or of several dtypes: it has one buffer for all."""
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in named.items():
        dtype = parameter.dtype
        if dtype is torch.float64 or dtype.is_complex or not parameter.numel():
            problem = str(dtype) if parameter.numel() else f"empty (shape {tuple(parameter.shape)})"
            raise BackendError(
                f'DeepSpeed can\'t shard {name}, which is {problem}. Use backend="fsdp".'
            )
        if dtype.is_floating_point:
            kinds.setdefault(dtype, name)
    if len(kinds) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items())
        raise BackendError(
            f'DeepSpeed needs one dtype for all weights, but {found}. Convert the model or use backend="ddp".'
        )
