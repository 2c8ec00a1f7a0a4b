"""Worker processes from a script or a notebook, ``accel.launch``: what starts them, what they do, and what can be sent there."""

from __future__ import annotations

import contextlib
import copy
import copyreg
import functools
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, final

import torch
import torch.distributed as dist
from torch import nn

from .data import LoaderHandle, raw_loader
from .errors import LaunchError, whole_number
from .handles import ModelHandle, OptimizerHandle
from .handles import raw as raw_of
from .process import who_is_missing
from .process.environments import resolve
from .process.startup import RETURNED, place_now
from .trees import map_leaves
from .verbs import shut_down

if TYPE_CHECKING:
    from typing_extensions import Never, TypeVarTuple, Unpack

    Ts = TypeVarTuple("Ts")
T = TypeVar("T")

logger = logging.getLogger("accel")

# The path first, since it may be where accel is.
_START = "import json, sys; o = json.loads(sys.argv[1]); sys.path[:] = o.pop('path'); from accel.launch import work; work(**o)"
_GRACE = 0.5  # seconds in which the failures of one cause arrive
_PATIENCE = 3.0  # seconds from the request to end to the end


@final
class Memory:
    """A file in memory without a name, which workers inherit: nothing is left of it, however the processes end."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("accel") if fd is None else fd

    def close(self) -> None:
        os.close(self.fd)

    def write(self, value: object, name: str) -> None:
        """Put ``value`` there: tensors as their bytes, the rest pickled, functions and classes of ``__main__`` by value."""
        import cloudpickle

        try:
            with open(self.fd, "wb", closefd=False) as file:
                torch.save(value, file, pickle_module=cloudpickle)
        except Exception as error:
            require(value, name)
            raise LaunchError(f"{name} cannot be sent to another process: {error}") from error

    def read(self, *, mmap: bool) -> Any:
        """What was put there, on the CPU; with ``mmap`` the tensors' bytes are copied only where they are written to."""
        return torch.load(f"/proc/self/fd/{self.fd}", map_location="cpu", weights_only=False, mmap=mmap)


@dataclass(frozen=True, slots=True)
class Failure:
    """The exception of one worker."""

    rank: int
    moment: float
    trace: str
    #: Pickled; empty where that cannot be done.
    error: bytes
    #: The rank whose failure it tells of, where that is another one.
    of: int | None


def launch(fn: Callable[[Unpack[Ts]], T], *args: Unpack[Ts], num_processes: int | None = None, **unknown: Never) -> T:
    """Run ``fn(*args)`` in new processes, one a rank, and return rank 0's result; from a script or a notebook cell.

    Functions and classes may be defined in the cell or the script. Modules, optimizers, schedulers and whatever else
    has ``state_dict`` and ``load_state_dict``, among the arguments or reached by ``fn`` itself, come back with the
    state that they have on rank 0 in the end: the caller's own objects are filled in place. Everything else that
    ``fn`` changes stays in the workers. Tensors of the result are on the CPU.

    Args:
        fn: calls ``accel.setup`` as any training script does; each rank gets its own copy of the arguments.
        args: raw objects, not handles.
        num_processes: how many; None is one for each device of this machine.
        unknown: refused: it may be meant for ``fn``, whose arguments go by position, or for ``launch``.

    Raises:
        LaunchError: an argument cannot be sent (says which, by its path); a worker raised (its traceback and rank; the
            exception itself is the cause) or died. All other workers have ended then, and the caller's objects are as before.
    """
    number = _number(num_processes)
    _check_here(fn)
    if unknown:
        name = next(iter(unknown))
        advice = "did you mean num_processes? Arguments" if "proc" in name else "arguments"
        short = "fn" if "<lambda>" in name_of(fn) else name_of(fn).rpartition(".")[2]
        raise LaunchError(
            f"accel.launch has no option {name!r}: {advice} of {short} go by position, or as "
            f"functools.partial({short}, {name}=...)"
        )
    given: tuple[Any, ...] = args
    found = stateful({name_of(fn): fn, **{f"args[{i}]": argument for i, argument in enumerate(given)}})
    with contextlib.ExitStack() as stack:
        payload, states, result = (stack.enter_context(contextlib.closing(Memory())) for _ in range(3))
        payload.write((fn, args, found), "the arguments")
        files = {"payload": payload.fd, "states": states.fd, "result": result.fd}
        job = _Job(name_of(fn), number, files)
        with contextlib.closing(job):
            job.run()
        if not os.fstat(result.fd).st_size:
            raise LaunchError(
                f"rank 0 of {number} in accel.launch({name_of(fn)}) ended with exit status 0 before its function returned"
            )
        value: T = result.read(mmap=False)
        returned = states.read(mmap=True)
        for item, (state, _) in zip(found, returned, strict=True):
            _check_state(item, state)
        for item, (state, buffers) in zip(found, returned, strict=True):
            _give_state(item, state, buffers)
        return value


def _number(asked: int | None) -> int:
    number = len(resolve("auto")) if asked is None else whole_number(asked)
    if number < 1:
        raise LaunchError(f"num_processes={asked!r}: expected a number of processes of at least 1, or None")
    return number


def _check_here(fn: object) -> None:
    if isinstance(fn, str):
        raise LaunchError(f"accel.launch expects a function; a script is started by python -m accel run {fn}")
    if not callable(fn):
        raise LaunchError(
            f"accel.launch expects a function and its arguments, got a {type(fn).__name__}: accel.launch(train, model, "
            "num_processes=2), not accel.launch(train(model), ...)"
        )
    if not hasattr(os, "pidfd_open"):
        raise LaunchError("accel.launch needs Linux: start the script with python -m accel run, or torchrun")
    place = place_now()
    if place.world_size > 1:
        raise LaunchError(
            f"this process is rank {place.rank} of {place.world_size} already (started by {place.launcher}): call the "
            "function itself, or start one process and let it launch"
        )
    if torch.cuda.is_initialized():
        logger.warning(
            "this process has initialised CUDA (%d MiB allocated): that memory stays taken beside the workers, and a GPU "
            "in exclusive mode is not free for them; build the model on the CPU, and launch before anything uses the GPU",
            torch.cuda.memory_allocated() >> 20,
        )


def _check_state(item: Any, state: Any) -> None:
    if not isinstance(item, nn.Module):
        return
    here, there = (
        {name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)}
        for values in (item.state_dict(), state)
    )
    changed = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if changed:
        raise LaunchError(
            f"this {type(item).__name__} came back with other tensors than it was sent with: {', '.join(changed[:5])}; "
            "nothing was filled. Change the model before accel.launch, or return the changed one"
        )


def _give_state(item: Any, state: Any, buffers: dict[str, torch.Tensor]) -> None:
    # A module copies the values; others may keep the tensors, which must not keep the whole file.
    item.load_state_dict(state if isinstance(item, nn.Module) else copy.deepcopy(state))
    for name, value in buffers.items():
        item.get_buffer(name).data.copy_(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """One worker process; it leads a process group, in which its own children are."""

    rank: int
    process: subprocess.Popen[bytes]
    report: Memory

    def signal(self, number: int) -> None:
        """To the worker and its children; while it is not reaped its number is no one else's."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self) -> int:
        """Reap it, once its remaining children are gone too; returns its exit status."""
        self.signal(signal.SIGKILL)
        return self.process.wait()


#: With which the ranks' torch begins its keys in the store; which one depends on its version.
_BEGINNINGS: Final = ("", "/worker/attempt_0/")


@final
class _Job:
    """The workers of one launch."""

    def __init__(self, name: str, number: int, files: dict[str, int]) -> None:
        self._name, self._number, self._files = name, number, files
        # Where the ranks meet: in this process, where a free port is found and taken at once.
        self._store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._alive: dict[Any, _Worker] = {}  # by what is ready once it has ended
        self._stack = contextlib.ExitStack()

    def run(self) -> None:
        """Start the workers and wait until all have ended; the first failure ends them."""
        for rank in range(self._number):
            self._start(rank)
        for first in self._ended(None):
            if first[1] == 0:
                for where in _BEGINNINGS:
                    self._store.set(f"{where}accel/{RETURNED}", str(first[0].rank))
            else:
                self._raise([first, *(other for other in self._ended(_GRACE) if other[1] != 0)])

    def close(self) -> None:
        for worker in self._alive.values():
            worker.signal(signal.SIGTERM)
        for _ in self._ended(_PATIENCE):
            pass
        while self._alive:
            self._alive.popitem()[1].end()
        self._stack.close()
        self._store = None  # here, and not when the last traceback that knows this job is forgotten

    def _start(self, rank: int) -> None:
        report = self._stack.enter_context(contextlib.closing(Memory()))
        options = {"rank": rank, "parent": os.getpid(), "path": sys.path, "argv": sys.argv, "report": report.fd}
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps({**options, **self._files})],
            env=self._environment(rank),
            stdin=subprocess.DEVNULL,
            pass_fds=[report.fd, *self._files.values()],
            start_new_session=True,
        )
        pidfd = os.pidfd_open(process.pid)
        self._stack.callback(os.close, pidfd)
        self._alive[pidfd] = _Worker(rank=rank, process=process, report=report)

    def _environment(self, rank: int) -> dict[str, str]:
        threads = max(1, len(os.sched_getaffinity(0)) // self._number)
        size = str(self._number)
        place = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
        store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
        # This process has the store, as torchrun's agent would.
        agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        return {"OMP_NUM_THREADS": str(threads), **os.environ, **place, **store, **agent}

    def _ended(self, seconds: float | None) -> Iterator[tuple[_Worker, int]]:
        """The workers as they end, with their exit status; for so many seconds, or until none is left."""
        until = None if seconds is None else time.monotonic() + seconds
        while self._alive:
            ready = wait(self._alive, None if until is None else max(0.0, until - time.monotonic()))
            if not ready:
                return
            for pidfd in ready:
                worker = self._alive.pop(pidfd)
                yield worker, worker.end()

    def _raise(self, failures: list[tuple[_Worker, int]]) -> NoReturn:
        """Tell what failed first: what broke a rank's connections comes before the complaints about it."""
        reports = [(_read(worker.report), worker.rank, status) for worker, status in failures]
        died = [(rank, status) for failure, rank, status in reports if failure is None]
        told = sorted((failure for failure, *_ in reports if failure is not None), key=lambda f: f.moment)
        aborted = [rank for rank, status in died if status == -signal.SIGABRT]
        where = f"of {self._number} in accel.launch({self._name})"
        if died and not (told and len(aborted) == len(died)):
            rank, status = died[0]
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            hint = "; out of memory, perhaps" if status == -signal.SIGKILL else ""
            raise LaunchError(f"rank {rank} {where} {how}, without an exception{hint}; the others were ended")
        first = next((failure for failure in told if failure.rank == told[0].of), told[0])
        cause = None
        with contextlib.suppress(Exception):
            found = pickle.loads(first.error)
            cause = found[0](*found[1:]) if isinstance(found, tuple) else found
        raise LaunchError(f"rank {first.rank} {where} raised; its traceback:\n\n{first.trace}") from cause


def _read(report: Memory) -> Failure | None:
    with open(f"/proc/self/fd/{report.fd}", "rb") as file:
        data = file.read()
    failure: Failure | None = pickle.loads(data) if data else None
    return failure


# -- a worker ----------------------------------------------------------------------------------------------------------


def _take_state(obj: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """What ``_give_state`` needs: the object's own state, and a module's buffers that are not part of it."""
    state = obj.state_dict()
    buffers = dict(obj.named_buffers()) if isinstance(obj, nn.Module) else {}
    return state, {name: buffer for name, buffer in buffers.items() if name not in state}


def work(*, rank: int, parent: int, argv: list[str], payload: int, states: int, result: int, report: int) -> None:
    """Run the function of the payload on this rank, and end this process; ``parent`` must live as long.

    The last four are file descriptors: of a Memory with the function, its arguments, and what in them has a state; of those
    where rank 0 leaves that state and the function's result; of a file for this rank's Failure.
    """
    sys.argv[:] = argv
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    # A scheduler loses its mark on the optimizer's step when it is pickled, and would complain of the order of calls.
    warnings.filterwarnings("ignore", message="Seems like `optimizer.step.*has been overridden")
    try:
        fn, args, found = Memory(payload).read(mmap=True)
        _publish(fn, [*args, *found])
        value = fn(*args)
        shut_down("has returned from its function, and does not come")
        if rank == 0:
            Memory(states).write([_take_state(item) for item in found], "states")
            Memory(result).write(map_leaves(_behind_handle, value, "result"), "result")
    except BaseException as error:
        moment, trace = time.time(), traceback.format_exc()
        if missing := who_is_missing(error):
            trace = f"{trace}\n{missing}"
        failure = Failure(rank, moment, trace, _pickled(error), getattr(error, "failed_rank", None))
        with open(report, "wb") as file:
            pickle.dump(failure, file)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through the exit of the interpreter, which may wait for ranks that wait for this one


def _behind_handle(value: Any, path: str) -> Any:
    """What is sent of a function's result: a handle has ended with its engine, and its object has the trained values."""
    if isinstance(value, ModelHandle | OptimizerHandle):
        return raw_of(value)
    return raw_loader(value) if isinstance(value, LoaderHandle) else value


def _publish(fn: Any, items: list[Any]) -> None:
    """Make functions and classes of the launching ``__main__`` known by their names here, where plain pickle looks."""
    names = vars(sys.modules["__main__"])
    for function in _functions(fn):
        found = getattr(function, "__globals__", {})
        names.update(found if found.get("__name__") in ("__main__", "__mp_main__") else {})
    for item in items:
        for part in item.modules() if isinstance(item, nn.Module) else [item]:
            if type(part).__module__ == "__main__":
                names.setdefault(type(part).__qualname__, type(part))


_LAYERS: Final = 32  # of partials and decorators; some objects have any attribute


def _functions(fn: Any) -> list[Any]:
    """What runs when ``fn`` is called: itself, and what it is a partial, a method or a decorated form of."""
    found, seen = [fn, type(fn).__call__], set[int]()
    for one in found:
        if id(one) not in seen and len(seen) < _LAYERS:
            seen.add(id(one))
            found += [inner for name in ("func", "__wrapped__", "__func__") if (inner := getattr(one, name, None))]
    return found


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)


def _pickled(error: BaseException) -> bytes:
    import cloudpickle

    plain = error.with_traceback(None)
    for sent in (plain, (_made_again, type(error), error.args, vars(error))):
        with contextlib.suppress(Exception):
            data: bytes = cloudpickle.dumps(sent)
            cloudpickle.loads(data)
            return data
    return b""


def _made_again(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An error whose class takes other arguments than those that it has passed on, so that it cannot be unpickled."""
    made = kind.__new__(kind, *args)
    made.args = args
    vars(made).update(attributes)
    return made


# -- what can be sent to another process, and where the rest is: the path of each thing that cannot ---------------------

_MOST = 5  # culprits that an error names

# A function that calls torch.ops... brings it along, as a module of a class of its own, which pickle does not know.
copyreg.pickle(type(torch.ops), lambda ops: (getattr, (torch, "ops")))


def _attempt(obj: object, plainly: bool) -> list[Any]:
    """Pickles an object without keeping it; returns the objects on the way that have a state to load."""
    import cloudpickle

    found: dict[int, Any] = {}

    class Attempt(pickle.Pickler if plainly else cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, item: Any) -> str | None:
            kind = type(item)
            if kind is ModelHandle and not plainly:  # there it would be a raw module, which trains for itself
                raise TypeError("a handle belongs to this process")
            if isinstance(item, torch.storage.TypedStorage | torch.UntypedStorage):
                return "storage"  # not its bytes
            if hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict"):
                found.setdefault(id(item), item)
            return None

    with open(os.devnull, "wb") as nowhere:
        Attempt(nowhere, protocol=4).dump(obj)
    return list(found.values())


def stateful(parts: dict[str, object]) -> list[Any]:
    """What ``parts`` reach that has a state to load: modules (not those inside others), optimizers, schedulers; or raise."""
    found: dict[int, Any] = {}
    for name, part in parts.items():
        found.update({id(item): item for item in require(part, name)})
    modules = [item for item in found.values() if isinstance(item, nn.Module)]
    inside = {id(child) for module in modules for child in module.modules() if child is not module}
    return [item for key, item in found.items() if key not in inside]


def check_picklable(obj: object, name: str = "obj") -> None:
    """Check that ``obj`` can be pickled, as ``torch.save(obj)`` and the workers of a spawning loader do.

    ``accel.launch`` sends more than that: lambdas, and functions and classes of a notebook or a script.

    Args:
        obj: a model, a dataset, anything.
        name: what the error calls it.

    Raises:
        LaunchError: names the path and kind of each thing that cannot: ``model.head.act: lambda at train.py:12``.
    """
    require(obj, name, plainly=True)


def require(obj: object, name: str, plainly: bool = False) -> list[Any]:
    """What of ``obj`` has a state to load; a LaunchError names what cannot be pickled, ``plainly`` or by value."""
    try:
        return _attempt(obj, plainly)
    except Exception as error:
        culprits = list(dict.fromkeys(_culprits(obj, name, plainly, set())))
        more = f" and {len(culprits) - _MOST} more" if len(culprits) > _MOST else ""
        what = "; ".join(culprits[:_MOST]) or f"{name}: {error}"
        raise LaunchError(f"cannot be pickled, and so not sent to another process: {what}{more}") from error


def _culprits(obj: object, path: str, plainly: bool, seen: set[int]) -> Iterator[str]:
    """Descends to what fails though nothing inside it does."""
    seen.add(id(obj))
    deeper = False
    for suffix, child in _children(raw_of(obj) if plainly and type(obj) is ModelHandle else obj):
        if _error(child, plainly) is not None:
            deeper = True
            if id(child) not in seen:
                yield from _culprits(child, path + suffix, plainly, seen)
    if not deeper:
        yield f"{path}: {_describe(obj, _error(obj, plainly))}"


def _error(obj: object, plainly: bool) -> Exception | None:
    try:
        _attempt(obj, plainly)
    except Exception as error:
        return error
    return None


def _children(obj: Any) -> Iterator[tuple[str, object]]:
    if isinstance(obj, ModelHandle | OptimizerHandle | type | ModuleType):
        return
    if isinstance(obj, dict):
        yield from ((f"[{_shown(key)}]", value) for key, value in obj.items())
    elif isinstance(obj, list | tuple):
        yield from ((f"[{index}]", value) for index, value in enumerate(obj))
    elif isinstance(obj, set | frozenset):
        yield from ((f"{{{_shown(value)}}}", value) for value in obj)
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, MethodType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, FunctionType):
        yield from _of_function(obj)
    else:
        yield from _attributes(obj)


def _shown(key: object) -> str:
    """A key as it is written; by its class where it cannot be written."""
    try:
        return repr(key)
    except Exception:
        return type(key).__qualname__


def _attributes(obj: Any) -> Iterator[tuple[str, object]]:
    try:
        attributes = dict(vars(obj))
    except Exception:  # it has none, or says so in its own way
        return
    for name, value in attributes.items():
        if isinstance(obj, nn.Module) and name in ("_parameters", "_buffers", "_modules"):
            yield from ((f".{key}", child) for key, child in value.items())
        else:
            yield f".{name}", value


def _of_function(function: FunctionType) -> Iterator[tuple[str, object]]:
    """What a function that is sent by its value takes along; one that is sent by its name takes nothing."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"()'s {name}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in sorted(_names(function.__code__) & function.__globals__.keys()):
        yield f"()'s {name}", function.__globals__[name]
    yield " (defaults)", function.__defaults__
    yield " (keyword defaults)", function.__kwdefaults__


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _describe(obj: Any, error: Exception | None) -> str:
    if type(obj) in (ModelHandle, OptimizerHandle):
        kind = type(raw_of(obj)).__name__
        return f"{type(obj).__name__}; send the raw {kind}, and call accel.setup in the function that runs there"
    if isinstance(obj, FunctionType):
        where = f"{os.path.basename(obj.__code__.co_filename)}:{obj.__code__.co_firstlineno}"
        return f"lambda at {where}" if obj.__name__ == "<lambda>" else f"function {obj.__qualname__} at {where}"
    return f"{type(obj).__module__}.{type(obj).__qualname__} ({type(error).__name__}: {error})"


def name_of(function: Callable[..., Any]) -> str:
    """What errors call a function."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
