"""The options of backends, as in ``backend=accel.FSDP(replicas=2)``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import nn

from ...errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Base class of the option dataclasses.

    An option with a bool or int as default accepts only bools or positive
    ints. ``choices`` and ``check_values`` check the other options.

    Args:
        drift_check: compare replicated state at steps 1, 10, 100 and then
            every ``drift_check`` steps. None: every 1,000 steps. 0: never.
    """

    drift_check: int | None = None

    #: The allowed values of options that have a fixed set of them.
    choices: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    #: The option for a value without a name, as in ``ACCEL_BACKEND=deepspeed:3``.
    leading: ClassVar[str] = ""
    #: Options that the contract tests run too.
    variants: ClassVar[tuple[Options, ...]] = ()
    #: Options that train differently from a single process, such as PowerSGD's compression. The
    #: contract tests only check that ranks agree.
    approximate: ClassVar[tuple[Options, ...]] = ()
    #: Options that a memory report also shows if there are several ranks.
    shown: ClassVar[tuple[Options, ...]] = ()

    def __str__(self) -> str:
        """Return the options that aren't defaults, such as ``FSDP(replicas=2)``."""
        changed = []
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if option.repr and value != option.default:
                changed.append(f"{option.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    @final
    def __post_init__(self) -> None:
        """Raise BackendError for a wrong value of an option."""
        for option in dataclasses.fields(self):
            value = getattr(self, option.name)
            if "or_classes" in option.metadata:
                valid = type(value) in (bool, tuple)
                expected = "True, False or a tuple of module classes"
                self.expect(option.name, valid, expected)
            elif type(option.default) is bool:
                self.expect(option.name, type(value) is bool, "True or False")
            elif type(option.default) is int:
                valid = type(value) is int and value > 0
                self.expect(option.name, valid, "a whole number of at least 1")
        for name, allowed in self.choices.items():
            values = " or ".join(map(repr, allowed))
            self.expect(name, getattr(self, name) in allowed, values)
        interval = self.drift_check
        valid = interval is None or (type(interval) is int and interval >= 0)
        self.expect("drift_check", valid, "a number of steps, 0 or None")
        self.check_values()

    def check_values(self) -> None:
        """Raise BackendError for other wrong values."""

    @final
    def expect(self, name: str, valid: bool, expected: str) -> None:
        """Raise BackendError for an option, unless it is valid."""
        if not valid:
            kind, value = type(self).__name__, getattr(self, name)
            raise BackendError(f"{kind}({name}={value!r}) is invalid. Use {expected}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions(Options):
    """Options of backends that run the model's own forward.

    Args:
        activation_checkpointing: keep only the inputs of blocks, and
            recompute their activations in backward. True selects repeated
            blocks of a ModuleList or Sequential if they have submodules, or
            the blocks that ``wrap`` selects. A tuple selects the modules of
            these classes.
    """

    activation_checkpointing: bool | tuple[type[nn.Module], ...] = dataclasses.field(
        default=False, metadata={"or_classes": True}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions(LayerOptions):
    """Options of backends that average gradients over ranks.

    Args:
        sequence_parallel: the number of neighboring ranks that share each
            sequence (``accel.shard_sequence``). They read the same batch
            and exchange attention heads.
        auto_refresh: check for changes to ``requires_grad`` before each
            forward, and compare them across ranks.
    """

    sequence_parallel: int = 1
    auto_refresh: bool = True
