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
    #: Options with which training differs from one process, as with weights that are averaged every
    #: few steps. The contract tests check that the ranks agree.
    approximate: ClassVar[tuple[Options, ...]] = ()
    #: Options that a memory report shows beside these on several ranks.
    shown: ClassVar[tuple[Options, ...]] = ()

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
            raise BackendError(f"{kind}({name}={value!r}): expected {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOptions(Options):
    """Options of backends with the model's own forward.

    Args:
        activation_checkpointing: keep only the inputs of blocks, and
            compute their activations again in backward. True selects the
            blocks that repeat in a ModuleList or Sequential and have
            submodules (with ``wrap``: the blocks that it selects). A tuple
            of classes selects the modules of these classes.
    """

    activation_checkpointing: bool | tuple[type[nn.Module], ...] = dataclasses.field(
        default=False, metadata={"or_classes": True}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOptions(LayerOptions):
    """Options of backends with averaged gradients and whole layers.

    Args:
        sequence_parallel: the number of neighboring ranks that share each
            sequence (``accel.shard_sequence``). They read the same batch
            and exchange attention heads.
        auto_refresh: before each forward, look for a change of
            ``requires_grad`` and compare it over the ranks.
    """

    sequence_parallel: int = 1
    auto_refresh: bool = True
