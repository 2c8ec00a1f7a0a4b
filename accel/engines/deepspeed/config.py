"""What a user's DeepSpeed configuration means here, and what is handed to the library."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ...errors import BackendError, PrecisionError
from ..base.memory import MemoryUse, TensorSize, add_uses
from .library import library
from .offload import check_folder

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
_IGNORED: Final = "accel does not use it, and an ignored key would be silently wrong: remove it"
_LOSSY: Final = "8 or 4 bits for a number, so that weights would be others than in one process: remove it"
_MICS: Final = "DeepSpeed has no MiCS any more: use 'zero_hpz_partition_size', or accel.FSDP"
_OLD_OFFLOAD: Final = "DeepSpeed has 'offload_optimizer' and 'offload_param' now: give one of these {'device': 'cpu'}"
#: Keys of ``zero_optimization`` with which the model would not be the one of the loop, or that would do nothing, and why.
_REFUSED: Final = {
    "cpu_offload": _OLD_OFFLOAD,
    "cpu_offload_param": _OLD_OFFLOAD,
    "mics_hierarchical_params_gather": _MICS,
    "mics_shard_size": _MICS,
    "strict": "it is no key of DeepSpeed's: remove it",
    "zenflow": "ZenFlow steps by itself: remove it",
    "zenflow_config": "ZenFlow steps by itself: remove it",
    "zero_quantized_gradients": _LOSSY,
    "zero_quantized_nontrainable_weights": _LOSSY,
    "zero_quantized_weights": _LOSSY,
    "offload_optimizer.ratio": "accel offloads all of what the optimizer steps: remove it",
    "offload_optimizer.super_offload": "SuperOffload steps by itself: remove it",
}
#: The class of other keys' values, of which numbers are at least 1; or all values that there are.
_KINDS: Final[Mapping[str, tuple[Any, str]]] = {
    **dict.fromkeys(
        ("steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu"), (int, "a whole number of at least 1")
    ),
    **dict.fromkeys(
        (
            "disable_allgather",
            "dump_state",
            "memory_breakdown",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        (bool, "True or False"),
    ),
    "bf16": (dict, "a dict such as {'enabled': True}"),
    "activation_checkpointing": (dict, "a dict"),
    "aio": (dict, "a dict"),
    "comms_logger": (dict, "a dict"),
    "communication_data_type": (("fp16", "bf16", "fp32"), "'fp16', 'bf16' or 'fp32'"),
    "seq_parallel_communication_data_type": (("fp16", "bf16", "fp32"), "'fp16', 'bf16' or 'fp32'"),
}
#: Elements of a bucket, which is allocated whole: DeepSpeed's default is 5e8. Over gloo small ones are faster.
_BUCKET: Final = 200_000_000
_GLOO_BUCKET: Final = 8_000_000


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


def _told(one: Mapping[str, Any]) -> str:
    """What the library's schema says of one value."""
    key, why = ".".join(map(str, one["loc"])), one["msg"]
    why = f"{why[:1].lower()}{why[1:]}"
    return f"{key!r} is {one['input']!r} ({why})" if key else why


def _judged(module: str, schema: str, section: str, given: Any) -> Any:
    """A section as the library's own schema has it; BackendError names what that refuses of it."""
    try:
        return getattr(library(module), schema)(**given)
    except (AssertionError, TypeError, ValueError) as error:
        told = "; ".join(map(_told, getattr(error, "errors", list)())) or error
        raise BackendError(f"DeepSpeed configuration: {section}: {told}") from error


def _read(config: Mapping[str, Any] | str | Path | None) -> dict[str, Any]:
    if config is None or isinstance(config, Mapping):
        return copy.deepcopy(dict(config or {}))
    if not isinstance(config, str | Path):
        raise BackendError(f"DeepSpeed(config={config!r}): expected a dict, or the path of a JSON file")
    try:
        found = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BackendError(f"DeepSpeed(config={str(config)!r}) cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BackendError(f"DeepSpeed(config={str(config)!r}): expected a JSON object, found {type(found).__name__}")
    return found


def _with_master(tensor: TensorSize) -> TensorSize:
    """Return the sizes of a 2-byte parameter whose optimizer steps an fp32 copy."""
    if tensor.is_buffer:
        return tensor
    state = tensor.state_bytes * 4 // tensor.itemsize
    if tensor.trainable and tensor.optimizer is not None:
        state += 4 * tensor.numel
    return replace(tensor, itemsize=2, state_bytes=state)


class Configuration:
    """What the options and the user's configuration say together. Errors (BackendError) name the key, and what to do instead."""

    def __init__(self, options: Any) -> None:
        self._given = _read(options.config)
        self._zero: dict[str, Any] = self._given.get("zero_optimization", {})
        if not isinstance(self._zero, Mapping):
            raise _contradiction("zero_optimization", self._zero, "a dict was expected, such as {'stage': 2}")
        #: The ZeRO stage; 2 where neither says.
        self.stage = self._stage(options.stage)
        #: Whether what the optimizer steps is in CPU memory, and whether the parts of weights are; where in files, their folder.
        self.offload_optimizer, self.state_folder = self._offloaded("offload_optimizer", options.offload_optimizer)
        self.offload_parameters, self.weights_folder = self._offloaded("offload_param", options.offload_parameters)
        given: Any = self._zero.get("offload_optimizer")
        unpinned = isinstance(given, Mapping) and given.get("pin_memory") is False
        #: Whether what the optimizer steps there is pinned memory.
        self.pins = self.offload_optimizer and not unpinned and self.state_folder is None
        #: Whether DeepSpeed's Adam steps there in the place of torch's, and whether its op may have to be compiled first.
        self.compiles_adam = self._given.get("zero_force_ds_cpu_optimizer") is True
        self.chooses_adam = self.offload_optimizer and self._given.get("zero_force_ds_cpu_optimizer") is not False
        #: Whether the optimizer steps fp32 copies of bfloat16 weights.
        self.masters = not _off(self._given.get("bf16"))
        norm: Any = self._given.get("gradient_clipping")
        if not (_off(norm) or (isinstance(norm, int | float) and norm is not True and norm >= 0)):
            raise _contradiction("gradient_clipping", norm, "a number of at least 0 was expected")
        #: The norm to which every step clips; 0.0 for none.
        self.clipping = 0.0 if _off(norm) else float(norm)
        #: Whether it vouches for optimizers that are not torch's.
        self.any_optimizer = self._given.get("zero_allow_untested_optimizer") is True

    def _stage(self, stage: int | None) -> int:
        given = self._zero.get("stage")
        given = None if given == "auto" else given
        if stage is not None and given not in (None, stage):
            raise _contradiction("zero_optimization.stage", given, f"DeepSpeed(stage={stage}) was asked for: drop one")
        found = stage if stage is not None else 2 if given is None else given
        if type(found) is not int or found not in (0, 1, 2, 3):
            raise BackendError(f"DeepSpeed(stage={found!r}): expected 0, 1, 2 or 3")
        return found

    def _offloaded(self, key: str, option: bool) -> tuple[bool, str | None]:
        given = self._zero.get(key)
        device = given.get("device", "none") if isinstance(given, Mapping) else "none" if _off(given) else given
        folder = given.get("nvme_path") if isinstance(given, Mapping) and device == "nvme" else None
        if device not in ("cpu", "nvme", "none"):
            raise _contradiction(f"zero_optimization.{key}.device", device, "'cpu', 'nvme' or 'none' was expected")
        if device == "nvme" and not (folder and isinstance(folder, str | Path)):
            raise _contradiction(f"zero_optimization.{key}.device", device, "there is no 'nvme_path', a folder on it")
        return option or device != "none", folder and str(folder)

    def check(self, world_size: int) -> None:
        """Refuse (BackendError) what would be ignored, be without effect, or contradict the loop."""
        for key, value in self._given.items():
            if key not in _PASSED and key not in _READ and not _off(value):
                instead = _INSTEAD.get(key, _IGNORED)
                raise BackendError(f"DeepSpeed configuration: {key!r} has no place in a raw loop: {instead}")
        for key, (allowed, expected) in _KINDS.items():
            found: Any = self._given.get(key)
            fits = found in allowed if isinstance(allowed, tuple) else type(found) is allowed
            if not (fits or _off(found)) or (allowed is int and fits and found < 1):
                raise _contradiction(key, found, f"{expected} was expected")
        self._check_parts()
        steps = self._given.get("gradient_accumulation_steps", 1)
        if steps not in (1, "auto", None) or steps is True:
            raise _contradiction("gradient_accumulation_steps", steps, "a raw loop accumulates by itself: drop the key")
        whole, each = (self._given.get(key) for key in ("train_batch_size", "train_micro_batch_size_per_gpu"))
        if isinstance(whole, int) and isinstance(each, int) and whole != each * world_size:
            expected = f"{world_size} batches of {each} are a step, and a raw loop accumulates by itself: drop the key"
            raise _contradiction("train_batch_size", whole, expected)
        self._check_zero(world_size)
        if self.masters and self.stage == 0:
            expected = "stage 0 has no master weights: use stage 1, or drop the key"
            raise _contradiction("bf16", self._given["bf16"], expected)
        self._check_divided(world_size)
        for folder in filter(None, (self.state_folder, self.weights_folder)):
            check_folder(folder)

    def _check_parts(self) -> None:
        """Of the dicts beside ``zero_optimization``."""
        half: Any = self._given.get("bf16")
        for key, value in ({} if _off(half) else half).items():
            if key != "enabled" and not _off(value):
                raise _contradiction(f"bf16.{key}", value, _IGNORED)
            if key == "enabled" and type(value) is not bool and not _off(value):
                raise _contradiction("bf16.enabled", value, "True or False was expected")
        if not _off(given := self._given.get("comms_logger")):
            _judged("deepspeed.comm.config", "CommsLoggerConfig", "comms_logger", given)

    def _check_zero(self, world_size: int) -> None:
        for key, reason in _REFUSED.items():
            parent, _, name = key.rpartition(".")
            given: Any = self._zero.get(parent) if parent else self._zero
            usual = 1 if name == "ratio" else False
            if isinstance(given, Mapping) and not _off(value := given.get(name)) and value != usual:
                raise _contradiction(f"zero_optimization.{key}", value, reason)
        key, found = "zero_hpz_partition_size", self._checked_by_library("zero_hpz_partition_size", 1)
        if found not in (0, 1) and (self.stage != 3 or world_size % found):
            expected = (
                f"it needs stage 3 and must divide the number of processes: the stage is {self.stage}, on {world_size}"
            )
            raise _contradiction(f"zero_optimization.{key}", found, expected)

    def _checked_by_library(self, key: str, usual: Any) -> Any:
        """A value of ``zero_optimization``; BackendError names what the library's own schema refuses of all of it."""
        given = {k: v for k, v in _without_auto(self._zero).items() if v is not None}
        for name in ("offload_optimizer", "offload_param"):
            if isinstance(given.get(name), str | bool):  # in accel's short form
                del given[name]
        if not given:
            return usual
        judged = _judged(
            "deepspeed.runtime.zero.config", "DeepSpeedZeroConfig", "zero_optimization", {**given, "stage": self.stage}
        )
        return getattr(judged, key)

    def _check_divided(self, world_size: int) -> None:
        asked = {
            "offload_parameters=True": self.offload_parameters,
            "offload_optimizer=True": self.offload_optimizer,
            "config={'bf16': ...}": self.masters,
        }
        if self.offload_parameters and self.stage != 3:
            raise BackendError(f"DeepSpeed(offload_parameters=True) needs stage 3, but the stage is {self.stage}")
        if self.offload_optimizer and self.stage == 0:
            raise BackendError("DeepSpeed(offload_optimizer=True) needs stage 1, 2 or 3, but the stage is 0")
        if world_size == 1 and any(asked.values()):
            option = next(option for option in asked if asked[option])
            raise BackendError(
                f"DeepSpeed({option}) on one process: there the model is not divided, and the option would be without "
                "effect: use more processes, or leave it out"
            )

    def check_precision(self, name: str) -> None:
        """Refuse (PrecisionError) master weights beside another precision than theirs."""
        if self.masters and name != "bf16-true":
            raise PrecisionError(
                f"DeepSpeed configuration: 'bf16' stores the model in bfloat16 with fp32 master weights, which is an option of "
                f"precision='bf16-true', but precision is {name!r}"
            )

    def predict(self, tensors: Sequence[TensorSize], world_size: int) -> MemoryUse:
        """Return the bytes on each rank, as in the ZeRO paper (Rajbhandari et al., 1910.02054).

        Stage 1 also keeps only its shards of the gradients after they are reduced. Stage 3 keeps
        small weights in full in addition to their shards, and a bucket to reduce gradients in.
        """
        if self.stage == 0 or world_size == 1:
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
        """The user's configuration, and what this engine needs, for the library; gradients travel by ``transport``."""
        passed = _without_auto({k: v for k, v in self._given.items() if k in _PASSED})
        zero = {k: v for k, v in passed.get("zero_optimization", {}).items() if v is not None}
        zero.pop("offload_optimizer", None)  # the engine steps where it keeps the copies, without the library's help
        offload = zero.pop("offload_param", None)
        if self.offload_parameters:
            zero["offload_param"] = {**(offload if isinstance(offload, Mapping) else {}), "device": "cpu"}
        size = min(_GLOO_BUCKET if transport == "gloo" else _BUCKET, numel + numel % 2)
        buckets = {"reduce_bucket_size": size, "allgather_bucket_size": size}
        half: dict[torch.dtype, dict[str, Any]] = {
            torch.bfloat16: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            torch.float16: {"data_types": {"grad_accum_dtype": "fp16"}},  # without its scaling of the loss
        }
        return {
            "steps_per_print": None,
            **passed,
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


def refuse_parameters(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse (BackendError) weights that DeepSpeed cannot divide, or of several dtypes, which it would put into one buffer."""
    kinds: dict[torch.dtype, str] = {}
    for name, parameter in named.items():
        if parameter.is_complex() or not parameter.numel():
            empty = f"has no elements (shape {tuple(parameter.shape)})"
            what = f"is {parameter.dtype}" if parameter.is_complex() else empty
            raise BackendError(f"DeepSpeed cannot divide {name}, which {what}: use stage 0, or another backend")
        if parameter.is_floating_point():
            kinds.setdefault(parameter.dtype, name)
    if len(kinds) > 1:
        found = ", ".join(f"{name} is {dtype}" for dtype, name in kinds.items())
        raise BackendError(f"DeepSpeed keeps all weights in one dtype, but {found}: convert the model, or use 'ddp'")
