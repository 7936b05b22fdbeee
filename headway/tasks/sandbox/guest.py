"""The program inside a sandbox, sent there as code objects: it gets one job, and plays the roles the job needs.

For tests, the process splits before it has received any: the *candidate* runs the program and then answers calls; the
*judge* hears the tests afterwards, runs them, and reports. Names of the program are `Remote` objects to the tests, so
that what is compared is compared in a process in which the program never ran. For runs (standard input to standard
output) each input gets a candidate of its own, and what it printed is reported; what it should have printed is never
in the sandbox. The control socket belongs to the judge: a candidate closes it before the program's first line.

Invariant that lives here:
 10. Errors are never rewards: a report says "passed" only when the judge itself ran every test to its end.

Standard library only, and of that only what is quick to load.
"""

from __future__ import annotations

import os
import sys
import types

from headway.tasks.sandbox.seccomp import install
from headway.tasks.sandbox.wire import CallPeer, Remote, WireError, decode, encode, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:  # as a name alone: the module typing takes longer to load than all that is used here
    from collections.abc import Callable
    from typing import Any, NoReturn

_MODULE = "solution"
_ERROR_BYTES = 4000
_WATCH_S = 0.05


def main(control: int) -> None:
    """Say that this interpreter is ready, get the job, do it, end."""
    import ctypes  # noqa: F401, loaded while nobody waits
    import resource  # noqa: F401

    os.set_inheritable(control, False)
    send(control, encode("ready"))
    _silence(1, 2)
    job = decode(receive(control))
    roles = {"tests": _tests, "runs": _runs}
    try:
        report = roles[job["kind"]](control, job)
    except _Refused as error:
        report = {"refused": str(error)}
    send(control, encode(report))
    os._exit(0)


def _silence(*descriptors: int) -> None:
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in descriptors:
        os.dup2(quiet, descriptor)
    os.close(quiet)


class _Refused(Exception):
    """The sandbox could not be closed, so nothing ran in it."""


def _confine(job: dict[str, Any]) -> None:
    """Limits and the filter of system calls, for this process and for ever."""
    import resource

    limits = job["limits"]
    for name, value in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_mb"] << 20),
        ("FSIZE", limits["scratch_mb"] << 20),
        ("NOFILE", 64),
        ("NPROC", limits["threads"]),
        (
            "SIGPENDING",
            64,
        ),  # timers and queued signals, of which the kernel keeps a count for all of a user's processes
        ("CORE", 0),
    ):
        if value >= 0:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    if refusal := install(job["filter"]):
        raise _Refused(f"the kernel takes no filter of system calls: {refusal}")


def _too_many_files(job: dict[str, Any]) -> bool:
    """The scratch folder's size limit counts no empty files, of which the kernel would keep millions in memory."""
    folder = os.statvfs("/tmp")
    return bool(0 < job["limits"]["scratch_files"] < folder.f_files - folder.f_ffree)


def _watch_scratch(job: dict[str, Any]) -> NoReturn:
    import time

    while not _too_many_files(job):
        time.sleep(_WATCH_S)
    os._exit(1)  # and with this process the sandbox


# Tests: the judge and its candidate


def _tests(control: int, job: dict[str, Any]) -> dict[str, Any]:
    import _socket  # not socket, which loads much that is not needed here

    ours, theirs = _socket.socketpair()
    if os.fork() == 0:
        os.close(control)
        ours.close()
        _candidate(theirs.fileno(), job)
    theirs.close()
    import _thread  # not threading, which loads more

    _thread.start_new_thread(_watch_scratch, (job,))
    if refusal := decode(receive(ours.fileno())):  # said before the program's first line
        raise _Refused(refusal)
    try:
        names = decode(receive(ours.fileno()))
    except WireError as error:
        return _report(0, 0, f"the program ended before its tests: {error}")
    if not isinstance(names, dict):
        return _report(0, 0, str(names)[:_ERROR_BYTES])
    send(control, encode("loaded"))
    tests = decode(receive(control))  # the candidate has long been running: none of this is in its memory
    _confine(job)
    peer = CallPeer(ours.fileno(), _serve_judge)
    scope = _scope_of_tests(peer, names, tests)
    return _judge(peer, scope, tests)


def _scope_of_tests(peer: CallPeer, names: dict[str, Any], tests: dict[str, Any]) -> dict[str, Any]:
    """What tests see by name: the program's objects, and the standard library's modules from here, never from there."""
    sys.modules[_MODULE] = module = types.ModuleType(_MODULE)
    for name in tests["names"]:
        if name in names:
            found = peer.request("global", name)
            module.__dict__[name] = found
    scope = {**{name: value for name, value in vars(module).items() if not name.startswith("__")}, "__name__": "tests"}
    for name in tests["modules"]:
        scope[name] = __import__(name)
    return scope


def _judge(peer: CallPeer, scope: dict[str, Any], tests: dict[str, Any]) -> dict[str, Any]:
    steps: list[Callable[[], Any]] = []
    try:
        exec(compile(tests["setup"], "setup.py", "exec"), scope)
    except BaseException as error:
        return _report(0, len(tests["asserts"]), _sentence(error, "setup"))
    for source in tests["asserts"]:
        steps.append(_step(compile(source, "tests.py", "exec"), scope))
    if tests["suite"]:
        try:
            exec(compile(tests["suite"], "tests.py", "exec"), scope)
        except BaseException as error:
            return _report(0, 1, _sentence(error, "tests"))
        steps += _steps_of_suite(scope, tests["entry_point"])
    passed, failure = 0, ""
    for number, step in enumerate(steps, start=1):
        try:
            step()
        except BaseException as error:
            failure = failure or _sentence(error, f"test {number}")
        else:
            passed += not peer.broken
    if peer.broken:
        return _report(min(passed, len(steps) - 1), len(steps), failure or "the program ended during its tests")
    return _report(passed, len(steps), failure)


def _step(code: types.CodeType, scope: dict[str, Any]) -> Callable[[], Any]:
    return lambda: exec(code, scope)


def _steps_of_suite(scope: dict[str, Any], entry_point: str) -> list[Callable[[], Any]]:
    """`check(candidate)`, functions called test_… and unittest's test cases; the suite itself, where it has none."""
    steps: list[Callable[[], Any]] = []
    own = {name: value for name, value in scope.items() if not isinstance(value, Remote)}
    if entry_point and callable(own.get("check")):
        steps.append(lambda: own["check"](scope[entry_point]))
    functions = {name: value for name, value in own.items() if isinstance(value, types.FunctionType)}
    steps += [function for name, function in functions.items() if name.startswith("test_")]
    if "unittest" in sys.modules:
        import unittest

        cases = [v for v in own.values() if isinstance(v, type) and issubclass(v, unittest.TestCase)]
        for case in cases:
            steps += [_run_case(case, name) for name in unittest.defaultTestLoader.getTestCaseNames(case)]
    return steps or [lambda: None]


def _run_case(case: Any, name: str) -> Callable[[], Any]:
    def run() -> None:
        import unittest

        result = unittest.TestResult()
        case(name).run(result)
        if result.testsRun != 1 or not result.wasSuccessful() or result.skipped:
            (_, text) = (result.failures + result.errors + [(None, "was not run")])[0]
            raise AssertionError(text[-_ERROR_BYTES:])

    return run


def _serve_judge(operation: str, *arguments: Any) -> Any:
    """All that a candidate may ask of the judge: to call a function that a test gave it as an argument."""
    function, args = arguments[0], arguments[1]
    if operation != "call" or not isinstance(function, types.FunctionType | types.BuiltinFunctionType | type):
        raise TypeError("only functions of the tests can be called")
    return (function(*args), {})


def _report(passed: int, total: int, failure: str) -> dict[str, Any]:
    return {"passed": passed, "total": max(total, 1), "failure": failure}


def _sentence(error: BaseException, where: str) -> str:
    try:
        text = str(error)
    except BaseException:
        text = ""
    return f"{where}: {type(error).__name__}" + (f": {text[:_ERROR_BYTES]}" if text else "")


def _candidate(line: int, job: dict[str, Any]) -> NoReturn:
    """Run the program, say which names it has, and answer calls until the judge is gone."""
    try:
        _silence(0, 1, 2)
        try:
            _confine(job)
        except _Refused as error:
            send(line, encode(str(error)))
            os._exit(1)
        send(line, encode(""))
        module = types.ModuleType(_MODULE)
        sys.modules[_MODULE] = module
        _add_exit()
        try:
            exec(compile(job["program"], f"{_MODULE}.py", "exec"), module.__dict__)
        except BaseException as error:
            send(line, encode(_sentence(error, "the program")))
            os._exit(1)
        names = [name for name in module.__dict__ if isinstance(name, str)]
        send(line, encode(dict.fromkeys(names)))
        CallPeer(line, _Candidate(module.__dict__)).serve_forever()
    finally:
        os._exit(1)


class _Candidate:
    """What the judge may ask of the program's objects."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self._scope = scope

    def __call__(self, operation: str, *arguments: Any) -> Any:
        if operation == "global":
            return self._scope[arguments[0]]
        if operation == "call":
            return self._call(*arguments)
        functions: dict[str, Callable[..., Any]] = {
            "getattr": getattr,
            "setattr": setattr,
            "getitem": lambda thing, key: thing[key],
            "setitem": lambda thing, key, value: thing.__setitem__(key, value),
            "len": len,
            "list": list,
            "next": next,
            "str": str,
        }
        return functions[operation](*arguments)

    def _call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[int, Any]]:
        places = [i for i, value in enumerate(args) if isinstance(value, list | dict | set | bytearray)]
        before = {i: _plain(args[i]) for i in places}
        result = function(*args, **kwargs)
        return result, {i: args[i] for i in places if before[i] is not None and _plain(args[i]) != before[i]}


def _plain(value: Any) -> bytes | None:
    try:
        return encode(value)
    except WireError:
        return None


def _add_exit() -> None:
    import builtins

    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # which the site module would have added


# Runs: standard input to standard output


def _runs(control: int, job: dict[str, Any]) -> dict[str, Any]:
    runs = []
    for given in job["inputs"]:
        runs.append(_run(control, job, given))
        if "refused" in runs[-1]:
            raise _Refused(runs[-1]["refused"])
        if job["stop_at_error"] and (runs[-1]["status"] or runs[-1]["too_long"]):
            break
    return {"runs": runs}


def _run(control: int, job: dict[str, Any], given: bytes) -> dict[str, Any]:
    pipes = [os.pipe() for _ in range(4)]  # input, output, errors, refusal
    child = os.fork()
    if child == 0:
        os.close(control)
        _run_program(job, pipes)
    for index, (reading, writing) in enumerate(pipes):
        os.close(reading if index == 0 else writing)
    gone = os.read(pipes[3][0], _ERROR_BYTES)
    output, errors, too_long = _exchange(child, given, pipes, job)
    _, status = os.waitpid(child, 0)
    for index, (reading, writing) in enumerate(pipes):
        try:
            os.close(writing if index == 0 else reading)
        except OSError:  # the input is closed already where all of it was read
            continue
    if gone:
        return {"refused": gone.decode(errors="replace")}
    code = os.waitstatus_to_exitcode(status)
    return {"output": output, "errors": errors, "status": code, "too_long": too_long}


def _exchange(child: int, given: bytes, pipes: list[tuple[int, int]], job: dict[str, Any]) -> tuple[bytes, bytes, bool]:
    """Feed the input and gather both outputs; a program that prints more than it may, or makes too many files, is
    killed."""
    import select

    most = job["limits"]["output_kb"] << 10

    source, output, errors = pipes[0][1], pipes[1][0], pipes[2][0]
    os.set_blocking(source, False)
    said: dict[int, bytearray] = {output: bytearray(), errors: bytearray()}
    poll, rest = select.poll(), memoryview(given)
    for descriptor in said:
        poll.register(descriptor, select.POLLIN)
    poll.register(source, select.POLLOUT)
    waiting = set(said)
    while waiting:
        if _too_many_files(job):
            os.kill(child, 9)
        for descriptor, _ in poll.poll(1000 * _WATCH_S):
            if descriptor == source:
                try:
                    rest = rest[os.write(source, rest[: 1 << 16]) :]
                except OSError:
                    rest = rest[:0]
                if not rest:
                    poll.unregister(source)
                    os.close(source)
                continue
            part = os.read(descriptor, 1 << 16)
            said[descriptor] += part
            if not part:
                poll.unregister(descriptor)
                waiting.discard(descriptor)
            if len(said[output]) + len(said[errors]) > most:
                os.kill(child, 9)
                return bytes(said[output][:most]), bytes(said[errors][:_ERROR_BYTES]), True
    return bytes(said[output]), bytes(said[errors][-_ERROR_BYTES:]), False


def _run_program(job: dict[str, Any], pipes: list[tuple[int, int]]) -> NoReturn:
    code = 1
    try:
        os.dup2(pipes[0][0], 0)
        os.dup2(pipes[1][1], 1)
        os.dup2(pipes[2][1], 2)
        refusal = pipes[3][1]
        os.set_inheritable(refusal, False)
        try:
            _confine(job)
        except _Refused as error:
            os.write(refusal, str(error).encode())
            os._exit(1)
        os.closerange(3, 64)
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        _add_exit()
        code = _exit_code(lambda: exec(compile(job["program"], "program.py", "exec"), module.__dict__))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _exit_code(run: Callable[[], Any]) -> int:
    """As an interpreter ends: threads are waited for, exit functions called."""
    import atexit

    code: Any = 0
    try:
        run()
    except SystemExit as error:
        code = error.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    return code & 0xFF if isinstance(code, int) else int(code is not None)
