"""What a user's DeepSpeed configuration means here, and what is handed to the library."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...errors import BackendError, PrecisionError
from ..base import memory as memory
from ..base.memory import Footprint, MemoryUse

#: Keys that are handed on as they are.
_PASSED: Final = frozenset(
    {"activation_checkpointing", "aio", "comms_logger", "communication_data_type", "disable_allgather", "dump_state",
     "memory_breakdown", "seq_parallel_communication_data_type", "steps_per_print", "zero_optimization"}
)  # fmt: skip
#: Keys that this engine reads itself.
_READ: Final = frozenset(
    {"bf16", "gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
     "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
)  # fmt: skip
#: Keys that cannot mean anything beside a loop of the user's own, with what to do instead.
_INSTEAD: Final = {
    "optimizer": "give accel.setup the optimizer of your loop",
    "scheduler": "step a torch scheduler in your loop",
    "fp16": "DeepSpeed's own fp16 scales the loss inside its backward: use precision='bf16-mixed'",
    "amp": "use precision=",
    "torch_autocast": "use precision='bf16-mixed'",
    "data_types": "the dtypes follow from precision= and 'bf16'",
}
_ZERO_INSTEAD: Final = {
    "zenflow_config": "ZenFlow steps by itself",
    "zenflow": "ZenFlow steps by itself",
}
#: A bucket is allocated whole, and small ones are faster over gloo; DeepSpeed's default is 5e8 elements.
_BUCKET: Final = 8_000_000


def read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    """The configuration as a dict of one's own.

    Raises:
        BackendError: no such file, or not a JSON object.
    """
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"DeepSpeed(config={str(config)!r}) cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BackendError(f"DeepSpeed(config={str(config)!r}): expected a JSON object, found {type(found).__name__}")
    return found


def _off(value: Any) -> bool:
    """Whether a value asks for nothing."""
    if isinstance(value, Mapping):
        return not value or _off(value.get("enabled", True))
    return value is None or value is False or value == "auto"


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_auto(v) for k, v in value.items() if not (isinstance(v, str) and v == "auto")}
    return value


def _contradiction(key: str, found: Any, expected: str) -> BackendError:
    return BackendError(f"DeepSpeed configuration: {key!r} is {found!r}, but {expected}")


def stage_of(config: Mapping[str, Any], stage: int | None) -> int:
    """The ZeRO stage of option and configuration together; 2 where neither says.

    Raises:
        BackendError: they differ, or there is no such stage.
    """
    given = config.get("zero_optimization", {}).get("stage")
    given = None if given == "auto" else given
    if stage is not None and given not in (None, stage):
        raise _contradiction("zero_optimization.stage", given, f"DeepSpeed(stage={stage}) was asked for: drop one")
    found = stage if stage is not None else 2 if given is None else given
    if found not in (0, 1, 2, 3):
        raise BackendError(f"DeepSpeed(stage={found!r}): expected 0, 1, 2 or 3")
    return int(found)


def offloaded(config: Mapping[str, Any], key: str, option: bool) -> bool:
    """Whether ``offload_optimizer`` or ``offload_param`` is asked for, by the option or the configuration.

    Raises:
        BackendError: it is asked for on NVMe, or with another value.
    """
    given = config.get("zero_optimization", {}).get(key)
    device = given.get("device", "none") if isinstance(given, Mapping) else "none" if _off(given) else given
    if device == "nvme":
        raise BackendError(
            f"DeepSpeed configuration: 'zero_optimization.{key}.device' is 'nvme', which needs DeepSpeed's compiled op "
            "'async_io' and is not supported by accel: use 'cpu'"
        )
    if device not in ("cpu", "none"):
        raise _contradiction(f"zero_optimization.{key}.device", device, "'cpu' or 'none' was expected")
    return option or device == "cpu"


def check(config: Mapping[str, Any], stage: int, precision: str | None = None) -> None:
    """Refuse, by its key, what would be ignored or would contradict the loop.

    Raises:
        BackendError, PrecisionError: names the key and what to do instead.
    """
    for key, value in config.items():
        if key in _PASSED or key in _READ or _off(value):
            continue
        instead = _INSTEAD.get(key, "accel does not use it, and an ignored key would be silently wrong: remove it")
        raise BackendError(f"DeepSpeed configuration: {key!r} has no place in a raw loop: {instead}")
    steps = config.get("gradient_accumulation_steps", 1)
    if steps not in (1, "auto", None):
        raise _contradiction("gradient_accumulation_steps", steps, "a raw loop accumulates by itself: drop the key")
    zero = config.get("zero_optimization", {})
    for key, value in zero.items():
        if key in _ZERO_INSTEAD and not _off(value):
            raise _contradiction(f"zero_optimization.{key}", value, f"{_ZERO_INSTEAD[key]}: remove it")
    if not _off(config.get("bf16")) and precision not in (None, "bf16-true"):
        raise PrecisionError(
            f"DeepSpeed configuration: 'bf16' stores the model in bfloat16 with fp32 master weights, which is an option of "
            f"precision='bf16-true', but precision is {precision!r}"
        )
    if not _off(config.get("bf16")) and stage == 0:
        raise _contradiction("bf16", config["bf16"], "stage 0 has no master weights: use stage 1, or drop the key")


def check_divided(config: Mapping[str, Any], stage: int, options: Any, world_size: int) -> None:
    """Refuse an option for parts of the model where the model is not divided, since it would be without effect.

    Raises:
        BackendError: names the option.
    """
    offload_optimizer = offloaded(config, "offload_optimizer", options.offload_optimizer)
    offload_parameters = offloaded(config, "offload_param", options.offload_parameters)
    if offload_parameters and stage != 3:
        raise BackendError(f"DeepSpeed(offload_parameters=True) needs stage 3, but the stage is {stage}")
    if offload_optimizer and stage == 0:
        raise BackendError("DeepSpeed(offload_optimizer=True) needs stage 1, 2 or 3, but the stage is 0")
    asked = {
        "offload_parameters=True": offload_parameters,
        "offload_optimizer=True": offload_optimizer,
        "config={'bf16': ...}": masters(config),
    }
    for option in asked if world_size == 1 else ():
        if asked[option]:
            raise BackendError(
                f"DeepSpeed({option}) on one process: there the model is not divided, and the option would be without "
                "effect: use more processes, or leave it out"
            )


def clipping(config: Mapping[str, Any]) -> float:
    """The norm to which every step clips; 0.0 for none."""
    value = config.get("gradient_clipping", 0.0)
    return 0.0 if _off(value) else float(value)


def masters(config: Mapping[str, Any]) -> bool:
    """Whether the optimizer steps fp32 copies of bfloat16 weights."""
    return not _off(config.get("bf16"))


def predicted(footprint: Footprint, config: Mapping[str, Any], stage: int, world_size: int) -> tuple[MemoryUse, ...]:
    """What each rank will hold."""
    if stage == 0:
        return memory.whole(footprint, world_size)
    given = config.get("zero_optimization", {})
    threshold = given.get("stage3_param_persistence_threshold", 100_000)
    bucket = given.get("reduce_bucket_size", _BUCKET)
    numbers = [
        value if isinstance(value, int) else default for value, default in ((threshold, 100_000), (bucket, _BUCKET))
    ]
    return memory.zero(footprint, world_size, stage, masters=masters(config), whole_below=numbers[0], bucket=numbers[1])


def complete(
    config: Mapping[str, Any], stage: int, *, offload_parameters: bool, dtype: torch.dtype, numel: int
) -> dict[str, Any]:
    """What the library is given: the user's configuration, and what this engine needs."""
    passed = {
        k: _without_auto(v) for k, v in config.items() if k in _PASSED and not (isinstance(v, str) and v == "auto")
    }
    zero = dict(passed.get("zero_optimization", {}))
    zero.pop("offload_optimizer", None)  # the engine steps where it keeps the copies, without the library's help
    if not offload_parameters or stage != 3:
        zero.pop("offload_param", None)
    else:
        given = zero.get("offload_param")
        zero["offload_param"] = {**(given if isinstance(given, Mapping) else {}), "device": "cpu"}
    size = min(_BUCKET, numel + numel % 2)
    buckets = {"reduce_bucket_size": size, "allgather_bucket_size": size}
    half = dtype is torch.bfloat16
    return {
        "steps_per_print": None,
        **passed,
        "zero_optimization": {**buckets, **zero, "stage": stage},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Left out, it would be 1.0.
        "gradient_clipping": 0.0,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}} if half else {}),
    }


def refuse_parameters(parameters: Sequence[nn.Parameter], names: Sequence[str]) -> None:
    """Refuse weights that DeepSpeed cannot divide, or of several floating dtypes, which it would put into one buffer.

    Raises:
        BackendError: names them.
    """
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.is_complex() or not parameter.numel():
            what = (
                f"is {parameter.dtype}"
                if parameter.is_complex()
                else f"has no elements (shape {tuple(parameter.shape)})"
            )
            raise BackendError(f"DeepSpeed cannot divide {name}, which {what}: use stage 0, or another backend")
        if parameter.is_floating_point():
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items())
        raise BackendError(f"DeepSpeed keeps all weights in one dtype, but {found}: convert the model, or use 'fsdp'")
