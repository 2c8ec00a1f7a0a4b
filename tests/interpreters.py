"""What ``python`` is for the programs of the tests: an interpreter that has imported torch when it begins.

To import torch takes most of the time that a short program runs for. ``executable()`` is a command with the arguments,
signals, statuses, parent and open files of ``python``; in the variable ``PYTHON_EXEC`` it is also what programs start others
with. A program runs in a process that is forked from one which has torch, but none of accel and of the libraries of its
backends. What is of the start of an interpreter itself is tested with ``sys.executable``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import types
from multiprocessing import forkserver
from typing import Any

_MOST = 64  # descriptors that a program is given
_CLIENT = """#!{python} -IS
import json, os, resource, signal, socket, sys, time
server = socket.socket(socket.AF_UNIX)
begin = time.monotonic()
while server.connect_ex({address!r}):  # it may be importing
    if time.monotonic() > begin + 60:
        sys.exit("no server of tests/interpreters.py")
    time.sleep(0.02)
def passed(number):
    try:
        return os.get_inheritable(number)
    except OSError:  # of the folder that is listed
        return False
numbers = sorted(filter(passed, map(int, os.listdir("/proc/self/fd"))))
leads = os.getsid(0) == os.getpid()
message = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ), os.getppid(), numbers, leads]).encode()
socket.send_fds(server, [len(message).to_bytes(4, "little")], numbers)
server.sendall(message)
answers = server.makefile()
program = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: os.kill(program, number))
status = os.waitstatus_to_exitcode(int(answers.readline()))
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def _address(tests: int) -> str:
    """Of the server that belongs to the process which runs tests; a name without a file."""
    return f"\0accel-test-{tests}"


@functools.cache
def executable() -> str:
    """The command."""
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    forkserver.ensure_running()  # tests/preload.py calls serve()
    folder = tempfile.TemporaryDirectory(prefix="accel-test-")
    atexit.register(folder.cleanup)
    path = os.path.join(folder.name, "python")
    with open(path, "w") as file:
        file.write(_CLIENT.format(python=sys.executable, address=_address(os.getpid())))
    os.chmod(path, 0o755)
    return path


def serve() -> None:
    """Leave a process behind from which programs are forked, with all that this one has imported, as long as this one lives."""
    if not hasattr(os, "pidfd_open"):
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(os.getppid()))
    listener.listen(64)
    parent = os.pidfd_open(os.getpid())
    if os.fork():
        listener.close()
        os.close(parent)
        return
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none is waited for
    while listener.fileno() in select.select([listener.fileno(), parent], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            os.close(parent)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _attend(connection)
        connection.close()
    os._exit(0)


def _attend(connection: socket.socket) -> None:
    """Run one program, and tell how it ends; it ends with its client."""
    size, descriptors, _, _ = socket.recv_fds(connection, 4, _MOST)
    with connection.makefile("rb") as file:
        arguments, folder, environ, starter, numbers, leads = json.loads(file.read(int.from_bytes(size, "little")))
    program = os.fork()
    if program == 0:
        connection.close()
        if leads:
            os.setsid()
        above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for descriptor in descriptors]
        for target, descriptor in zip(numbers, above, strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        for descriptor in {*descriptors}.difference(numbers):
            os.close(descriptor)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        _has_parent(starter)
        _interpret(arguments)
    for descriptor in descriptors:
        os.close(descriptor)
    end = os.pidfd_open(program)
    with contextlib.suppress(OSError):
        connection.sendall(f"{program}\n".encode())
        if end not in select.select([end, connection.fileno()], [], [])[0]:
            (os.killpg if leads else os.kill)(program, signal.SIGKILL)
        connection.sendall(f"{os.waitpid(program, 0)[1]}\n".encode())
    os._exit(0)


def _has_parent(starter: int) -> None:
    """Let this process alone take the one that started it for its parent, as long as that lives."""
    me, ours = os.getpid(), os.getppid
    with contextlib.suppress(ProcessLookupError):
        end = os.pidfd_open(starter)
        os.getppid = lambda: starter if os.getpid() == me and not select.select([end], [], [], 0)[0] else ours()


def _interpret(arguments: list[str]) -> None:
    """What ``python`` does with its arguments, and with what comes out of the program."""
    status = 1
    try:
        _run(arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    ctypes.pythonapi.Py_Exit(status)


def _run(arguments: list[str]) -> None:
    unbuffered = arguments[0] == "-u"
    sys.executable = os.environ.get("PYTHON_EXEC", sys.executable)  # torchrun's variable
    sys.stdout.reconfigure(write_through=unbuffered or "PYTHONUNBUFFERED" in os.environ)  # type: ignore[union-attr]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = paths + [path for path in sys.path if path not in ("", *paths)]
    importlib.invalidate_caches()
    main: Any = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main
    first, *rest = arguments[unbuffered:]
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, os.path.dirname(os.path.abspath(first)))
        main.__file__ = os.path.abspath(first)
        with open(first, encoding="utf-8") as file:
            source = file.read()
        exec(compile(source, first, "exec"), main.__dict__)
