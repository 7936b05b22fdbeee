"""Programs that try to get out of a sandbox, to harm the machine, or to pass tests they do not pass.

Each defines `answer(x)`, which the tests call and which gives a wrong answer unless the attack succeeded.
`HOST_PORT`, `HOST_PID` and `HOST_FILE` are put in by the test: a listening port, the test's process, a file.
"""

FORGERIES = {
    "sys.exit": "import sys; sys.exit(0)",
    "sys.exit in a call": "import sys\ndef answer(x): sys.exit(0)",
    "os._exit": "import os; os._exit(0)",
    "os._exit in a call": "import os\ndef answer(x): os._exit(0)",
    "exit at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef answer(x): raise SystemExit(0)",
    "equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __hash__ = None
def answer(x): return Yes()
""",
    "an int that equals everything": """
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def answer(x): return Yes(0)
""",
    "asserts patched away": """
import builtins, sys
builtins.AssertionError = type("Never", (Exception,), {})
builtins.print = builtins.len = builtins.sorted = lambda *a, **k: 1
for module in list(sys.modules.values()):
    for name in ("_report", "_judge", "_sentence", "encode", "send"):
        if hasattr(module, name): setattr(module, name, lambda *a, **k: {"passed": 2, "total": 2, "failure": ""})
def answer(x): return 0
""",
    "built-in names shadowed": "def set(x): return 1\ndef sorted(x): return 1\ndef answer(x): return 0",
    "frames and garbage searched": """
import gc, sys
def answer(x):
    found, frame = [], sys._getframe()
    while frame: found += [*frame.f_locals.values(), *frame.f_globals.values()]; frame = frame.f_back
    for thing in [*found, *gc.get_objects()]:
        if isinstance(thing, str) and "assert answer" in thing: return eval(thing.split("==")[1])
        if isinstance(thing, dict) and "asserts" in thing: return eval(thing["asserts"][0].split("==")[1])
    return 0
""",
    "reports written to every descriptor": """
import os, struct, sys
wire = sys.modules["headway.tasks.sandbox.wire"]
report = wire.encode({"passed": 2, "total": 2, "failure": ""})
def forge():
    for descriptor in range(64):
        for payload in (report, wire.encode("ready"), wire.encode("loaded")):
            try: os.write(descriptor, struct.pack(">I", len(payload)) + payload)
            except OSError: pass
forge()
def answer(x): forge(); return 0
""",
    "garbage on the line": """
import os
def answer(x):
    for descriptor in range(3, 64):
        try: os.write(descriptor, os.urandom(4096))
        except OSError: pass
    return 0
""",
    "false names": """
import sys
sys.modules["solution"].__dict__.update({"__builtins__": {}, "tests": 1, "check": lambda c: None})
def answer(x): return 0
""",
    "the judge's memory": """
import os
def answer(x):
    for pid in [1, 2, 3, 4, os.getppid()]:
        try:
            memory = open(f"/proc/{pid}/mem", "rb", 0)
            return 4 if memory else 0
        except OSError: pass
    return 0
""",
    "a result that calls back": """
class Sneaky:
    def __reduce__(self): return (print, ("out",))
def answer(x): return [Sneaky(), {"x": Sneaky()}]
""",
    "a result without end": "def answer(x):\n    a = []; a.append(a); return a",
    "a result too deep": "def answer(x):\n    a = []\n    for _ in range(10**5): a = [a]\n    return a",
    "a result too large": "def answer(x): return bytes(2 * 10**7)",
    "a refusal forged": """
import os, struct, sys
payload = sys.modules["headway.tasks.sandbox.wire"].encode({"refused": "the kernel", "answer": None})
for descriptor in range(3, 16):
    try: os.write(descriptor, struct.pack(">I", len(payload)) + payload)
    except OSError: pass
def answer(x): return 0
""",
    "calls forged to the judge": """
import gc, os, struct, sys
wire = sys.modules["headway.tasks.sandbox.wire"]
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    for message in (["call", [exec, ["import os; os._exit(0)"]]], ["getattr", [1, "x"]], ["return", [{}, {0: 4}]]):
        payload = wire.encode(message)
        os.write(peer._descriptor, struct.pack(">I", len(payload)) + payload)
    for number in range(9):
        try: peer.request("call", wire.Remote(peer, number), ["__import__('os')._exit(0)"])
        except BaseException: pass
    return 0
""",
    "a result that takes long to read": """
import gc, sys
wire = sys.modules["headway.tasks.sandbox.wire"]
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    number = b"C" + wire._SIZE.pack(18) + b"fractions.Fraction" + wire.encode(("1e100000000",))
    end = b"l" + wire._SIZE.pack(2) + number + wire.encode({})
    wire.send(peer._descriptor, b"l" + wire._SIZE.pack(2) + wire.encode("return") + end)
    return 0
""",
    "types built in the judge": """
import gc, sys
wire = sys.modules["headway.tasks.sandbox.wire"]
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    for same in (slice, complex, range, super, property, isinstance, setattr):
        try:
            made = peer.request("call", type, ["Yes", [object], {"__eq__": same, "__ne__": same, "__hash__": None}])
            return peer.request("call", made[0], [])[0]
        except BaseException: pass
    return 0
""",
    "answers sent ahead of the questions": """
import gc, sys
wire = sys.modules["headway.tasks.sandbox.wire"]
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    for _ in range(20): wire.send(peer._descriptor, wire.encode(["return", [True, {0: 4, -1: 4, "x": 4}]]))
    return 0
""",
    "library types with values of their own": """
import collections, fractions
class Half(fractions.Fraction):
    __str__ = lambda self: "4"
    __eq__ = lambda self, other: True
Half.__module__, Half.__qualname__ = "fractions", "Fraction"
class Queue(collections.deque): maxlen = property(lambda self: "all")
Queue.__module__, Queue.__qualname__ = "collections", "deque"
def answer(x): return Queue([Half(0)])
""",
    "tracing and destructors": """
import sys, threading
def trace(frame, event, argument):
    if "x" in frame.f_locals: frame.f_locals["result"] = 4
    return trace
sys.settrace(trace); threading.settrace(trace)
class Last:
    def __del__(self): import os; os._exit(0)
    __repr__ = lambda self: repr(self)
    __getattr__ = lambda self, name: getattr(self, name)
kept = [Last()]
def answer(x): return kept.pop()
""",
    "alarms and closed descriptors": """
import os, signal
signal.signal(signal.SIGALRM, lambda *_: os.closerange(0, 64))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
def answer(x):
    while True: pass
""",
    "a lying exception": """
class Meta(type):
    def mro(cls): return [cls, *Exception.__mro__]
    def __getattribute__(cls, name): return "\ud800" * 10**6 if name == "__name__" else type.__getattribute__(cls, name)
class Odd(Exception, metaclass=Meta):
    def __str__(self): return "\ud800" * 10**7
def answer(x): raise Odd
""",
    "exceptions of every kind": "class Odd(BaseException): pass\ndef answer(x): raise Odd",
    "a class that equals everything": """
class Meta(type):
    __eq__ = lambda cls, other: True
    __hash__ = lambda cls: hash(9)
class Yes(metaclass=Meta): pass
import builtins
builtins.Yes = Yes
def answer(x): return Yes if x == 2 else Yes()
""",
    "hooks of the interpreter": """
import gc, os, sys
sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)
class Finder:
    def find_spec(self, *a): raise SystemExit(0)
sys.meta_path.insert(0, Finder())
gc.callbacks.append(lambda *a: sys.addaudithook(lambda *a: os._exit(0)))
def answer(x): return 0
""",
    "built-ins of the judge called": """
import gc, os, sys
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    for function in (eval, exec, __import__, open, compile, vars, breakpoint):
        try: return peer.request("call", function, ["4"])[0]
        except BaseException: pass
    for operation in ("global", "getattr", "setattr", "str", "list", "next"):
        try: return peer.request(operation, "answer")
        except BaseException: pass
    return 0
""",
    "an answer in drops": """
import gc, os, time
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    while True: os.write(peer._descriptor, b"\\0"); time.sleep(0.2)
""",
}

ESCAPES = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "fork bomb that bears refusal": """
import os
n = 0
for _ in range(2000):
    try: n += os.fork() == 0
    except OSError: pass
def answer(x): return 4 if n else 0
""",
    "memory bomb": "x = []\nwhile True: x.append(bytearray(10**7))",
    "endless output": "while True: print('x' * 10**6)",
    "host files read": """
from glob import glob
try: found = open("HOST_FILE").read()
except OSError: found = [glob(p) for p in ("/home/*", "/root/*", "/etc/pass*", "/var/*", "/proc/*") if glob(p)]
def answer(x): return 4 if found else 0
""",
    "host environment read": "import os\ndef answer(x): return 4 if 'SECRET' in str(os.environ) else 0",
    "network": """
import socket
try:
    line = socket.create_connection(("127.0.0.1", HOST_PORT), timeout=1); line.send(b"out")
    reached = 4
except OSError: reached = 0
def answer(x): return reached
""",
    "network by number": """
import ctypes
libc = ctypes.CDLL(None)
made = [f for f in (1, 2, 10, 16, 17) for kind in (1, 2, 3) if libc.socket(f, kind, 0) >= 0]
def answer(x): return 4 if made else 0
""",
    "signals": """
import os, signal
sent = 0
for pid in [HOST_PID, -1, 1, *range(2, 300), os.getppid(), -HOST_PID]:
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        try: os.kill(pid, number); sent = 4
        except OSError: pass
def answer(x): return sent
""",
    "ptrace": """
import ctypes
libc = ctypes.CDLL(None)
done = [pid for pid in [HOST_PID, 1, *range(2, 50)] if libc.ptrace(16, pid, 0, 0) == 0]
done += [1] if libc.ptrace(0, 0, 0, 0) == 0 else []
def answer(x): return 4 if done else 0
""",
    "system calls that open doors": """
import ctypes
libc = ctypes.CDLL(None)
space = ctypes.create_string_buffer(256)
numbers = dict(unshare=(272, 0x10000000), setns=(308, 0, 0), mount=(165, b"a", b"/tmp", b"tmpfs", 0, 0),
    bpf=(321, 0, 0, 0), keyctl=(250, 0, -3, 1), io_uring=(425, 8, space), userfaultfd=(323, 0), memfd=(319, b"m", 0),
    shmget=(29, 0, 4096, 0o1600), perf=(298, space, 0, -1, -1, 0), pidfd=(434, 1, 0),
    clone=(56, 17, 0, 0, 0, 0), clone3=(435, space, 88), chroot=(161, b"/tmp"), unknown=(9999,))
opened = [name for name, call in numbers.items() if libc.syscall(*call) >= 0]
def answer(x): return opened or (4 if opened else 0)
""",
    "symbolic links": """
import os
seen = 0
for target in ("HOST_FILE", "/", "/proc/1/root/etc/passwd", "../../../../HOST_FILE"):
    for make in (os.symlink, os.link):
        try:
            make(target, "/tmp/way")
            if os.path.isfile("/tmp/way") and open("/tmp/way").read(): seen = 4
        except OSError: pass
        try: os.unlink("/tmp/way")
        except OSError: pass
def answer(x): return seen
""",
    "children left behind": """
import subprocess, sys
try: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True); left = 4
except OSError: left = 0
def answer(x): return left
""",
    "another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'while True: pass'])",
    "the verifier's files written": """
import os, sys
written = 0
for folder in ("/", "/usr/lib", os.path.dirname(os.__file__), os.path.dirname("HOST_FILE"), sys.prefix, "/dev"):
    for flags in (os.O_WRONLY | os.O_CREAT, os.O_RDWR | os.O_CREAT):
        try: os.open(os.path.join(folder, "os.py"), flags); written = 4
        except OSError: pass
def answer(x): return written
""",
    "disk filled": """
try:
    for n in range(64):
        with open(f"/tmp/{n}", "wb") as file: file.write(bytes(1 << 20))
    full = 4
except OSError: full = 0
def answer(x): return full
""",
    "empty files without end": """
import os
n = 0
while True: os.close(os.open(f"/tmp/{n}", os.O_CREAT | os.O_WRONLY)); n += 1
""",
    "folders without end": "import os\nos.chdir('/tmp')\nwhile True: os.mkdir('a'); os.chdir('a')",
    "memory that is no file": """
import fcntl, mmap, os
kept = []
try:
    while True:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, 1031, 1 << 20)
        kept += [mmap.mmap(-1, 1 << 22)]; kept[-1][:] = bytes(1 << 22)
except (OSError, ValueError, MemoryError): pass
def answer(x): return 0
""",
    "kernel files read": """
found = 0
for path in ("self/environ", "1/environ", "self/mem", "mounts", "../sys/kernel", "../dev/shm/x", "../dev/mem"):
    try: open("/proc/" + path, "rb").read(1); found = 4
    except OSError: pass
def answer(x): return found
""",
    "memory of others": """
import ctypes
libc = ctypes.CDLL(None)
class Part(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
space = ctypes.create_string_buffer(64)
here, there = Part(ctypes.addressof(space), 64), Part(id(answer) if "answer" in globals() else id(libc), 64)
calls = (libc.process_vm_readv, libc.process_vm_writev)
done = [call for call in calls for pid in range(50) if call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0]
def answer(x): return 4 if done else 0
""",
    "sockets by pairs and names": """
import socket
out = 0
one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for name in ("\0/tmp/.X11-unix/X0", "/dev/log", "/run/systemd/notify", "\0headway"):
    for call in (one.connect, one.bind, lambda name: one.sendto(b"out", name)):
        try: call(name); out = 4
        except OSError: pass
def answer(x): return out
""",
    "timers without end": """
import ctypes
libc, timers = ctypes.CDLL(None), 0
while libc.syscall(222, 0, 0, ctypes.byref(ctypes.c_int())) >= 0: timers += 1
def answer(x): return 4 if timers > 64 else 0
""",
    "descriptors hidden in messages": """
import array, os, socket
hidden, (one, other) = 0, socket.socketpair()
one.setblocking(False)
try:
    while True:
        pair = os.pipe()
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", pair))])
        for descriptor in pair: os.close(descriptor)
        hidden += 1
except OSError: pass
def answer(x): return 4 if hidden > 200 else 0
""",
    "the stop signal": """
import ctypes, os, signal, threading
stop = signal.SIGSTOP
libc = ctypes.CDLL(None)
for call in (lambda: os.kill(0, stop), lambda: signal.raise_signal(stop), lambda: libc.pthread_kill(0, stop),
             lambda: signal.pthread_kill(threading.get_ident(), stop)):
    try: call()
    except OSError: pass
def answer(x): return 0
""",
    "names that hang": """
import sys, time
class Slow(str):
    def __hash__(self): time.sleep(600)
    def __eq__(self, other): return True
sys.modules["solution"] = None
sys.modules["headway.tasks.sandbox.wire"].__dict__.clear()
def answer(x): return 4
""",
    "signals by descriptors": """
import fcntl, gc
def answer(x):
    peer = next(thing for thing in gc.get_objects() if type(thing).__name__ == "CallPeer")
    for pid in (1, 2, 3, HOST_PID):
        try: fcntl.fcntl(peer._descriptor, 8, pid); fcntl.fcntl(peer._descriptor, 10, 9)
        except OSError: pass
    fcntl.fcntl(peer._descriptor, 4, 0o20000)
    return 0
""",
    "the filter taken off": """
import ctypes
libc = ctypes.CDLL(None)
for call in ((4, 1), (22, 0), (38, 0), (24, 21), (0x59616D61, -1)): libc.prctl(*call, 0, 0, 0)
alien = libc.fork() >= 0 or libc.unshare(0x10000000) == 0
def answer(x): return 4 if alien else 0
""",
    "another calling convention": "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 57)\ndef answer(x): return 4",
    "a thread that blocks exit": """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
def answer(x): return 0
""",
    "threads without end": """
import threading, time
threading.stack_size(32768)
n = 0
try:
    while True: threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); n += 1
except (RuntimeError, MemoryError): pass
def answer(x): return 0
""",
    "limits raised": """
import resource
raised = 0
for name in ("CPU", "AS", "FSIZE", "NOFILE"):
    try: resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (resource.RLIM_INFINITY,) * 2); raised = 4
    except (OSError, ValueError): pass
def answer(x): return raised
""",
    "a program of its own making": """
import os
ran = 0
for path in ("/tmp/own", "/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1"):
    try:
        if path == "/tmp/own": open(path, "w").write("#!/bin/sh\\n"); os.chmod(path, 0o6755)
        os.posix_spawn(path, [path, "/bin/true"], {}); ran = 4
    except OSError: pass
def answer(x): return ran
""",
    "keys forged into a terminal": """
import fcntl, os, termios
typed = 0
for descriptor in [*range(64), *(os.open(p, 0) for p in ("/dev/tty", "/dev/ptmx", "/dev/pts/0") if os.path.exists(p))]:
    try: fcntl.ioctl(descriptor, termios.TIOCSTI, b"x"); typed = 4
    except OSError: pass
def answer(x): return typed
""",
    "the limit's signal ignored": "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    "sleep without end": "import time\nwhile True: time.sleep(60)",
    "sleep without end in a call": "import time\ndef answer(x): time.sleep(60)",
    "a null pointer": "import ctypes; ctypes.string_at(0)",
    "a stack without end": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
    "a number without end": "def answer(x): return 9**9**9",
}
