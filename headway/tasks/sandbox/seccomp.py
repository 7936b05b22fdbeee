"""The filter of system calls for programs that nobody has read, as the kernel takes it: classic BPF for seccomp.

A filtered process can compute, read and write files it can see, make threads and pipes. It cannot start processes or
programs, signal or trace any, open sockets, mount, use shared memory that outlives a mapping, or talk to kernel
subsystems no program of a task needs. Numbers the kernel added after this table was written are unknown to it
(ENOSYS), so that a new system call is refused until someone has read what it does.
"""

from __future__ import annotations

import errno
import os
import struct

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data; arguments are little-endian
_CLONE_THREAD = 0x10000
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 4, 38, 22, 2

_NEWEST = 462
"""The highest number this table knows (`mseal`); later ones are alike on all architectures."""

_REFUSED = """
    fork 57 -          vfork 58 -           execve 59 221        execveat 322 281     kill 62 129
    tkill 200 130      tgkill 234 131       rt_sigqueueinfo 129 138                   rt_tgsigqueueinfo 297 240
    pidfd_send_signal 424 424               pidfd_open 434 434   pidfd_getfd 438 438  ptrace 101 117
    process_vm_readv 310 270                process_vm_writev 311 271                 process_madvise 440 440
    process_mrelease 448 448                kcmp 312 272         setpriority 141 140  ioprio_set 251 30
    sched_setscheduler 144 119              sched_setparam 142 118                    sched_setattr 314 274
    sched_setaffinity 203 122               socket 41 198        connect 42 203       bind 49 200
    listen 50 201      accept 43 202        accept4 288 242      shmget 29 194        shmat 30 196
    shmctl 31 195      semget 64 190        semop 65 193         semtimedop 220 192   semctl 66 191
    msgget 68 186      msgsnd 69 189        msgrcv 70 188        msgctl 71 187        mq_open 240 180
    memfd_create 319 279                    memfd_secret 447 447                      userfaultfd 323 282
    io_setup 206 0     io_uring_setup 425 425                    io_uring_enter 426 426
    io_uring_register 427 427               bpf 321 280          perf_event_open 298 241
    add_key 248 217    request_key 249 218  keyctl 250 219       unshare 272 97       setns 308 268
    mount 165 40       umount2 166 39       pivot_root 155 41    chroot 161 51        open_tree 428 428
    move_mount 429 429                      fsopen 430 430       fsconfig 431 431     fsmount 432 432
    fspick 433 433     mount_setattr 442 442                     name_to_handle_at 303 264
    open_by_handle_at 304 265               mknod 133 -          mknodat 259 33       quotactl 179 60
    quotactl_fd 443 443                     swapon 167 224       swapoff 168 225      reboot 169 142
    kexec_load 246 104                      kexec_file_load 320 294                   init_module 175 105
    finit_module 313 273                    delete_module 176 106                     iopl 172 -
    ioperm 173 -       modify_ldt 154 -     personality 135 92   syslog 103 116       vhangup 153 58
    acct 163 89        settimeofday 164 170                      clock_settime 227 112
    clock_adjtime 305 266                   adjtimex 159 171     sethostname 170 161  setdomainname 171 162
    fanotify_init 300 262                   inotify_init 253 -   inotify_init1 294 26 lookup_dcookie 212 18
    move_pages 279 239                      migrate_pages 256 238                     mbind 237 235
    set_mempolicy 238 237
"""
"""Name, number on x86_64, number on aarch64."""


class _Machine:
    """What differs between processors; `alien` is where the numbers of another calling convention (x32) begin."""

    def __init__(self, audit: int, column: int, clone: int, prlimit: int, openat: int, alien: int | None) -> None:
        self.audit, self.column, self.alien = audit, column, alien
        self.clone, self.prlimit, self.openat = clone, prlimit, openat


_MACHINES = {
    "x86_64": _Machine(0xC000003E, 1, clone=56, prlimit=302, openat=257, alien=0x40000000),
    "aarch64": _Machine(0xC00000B7, 2, clone=220, prlimit=261, openat=56, alien=None),
}
_CLONE3 = 435
_SECOND_ARGUMENT, _THIRD_ARGUMENT = 24, 32
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_OPEN = 2

_CHANGES_FILES = """
    creat 85 -         truncate 76 45       ftruncate 77 46      rename 82 -          renameat 264 38
    renameat2 316 276  mkdir 83 -           mkdirat 258 34       rmdir 84 -           link 86 -
    linkat 265 37      unlink 87 -          unlinkat 263 35      symlink 88 -         symlinkat 266 36
    chmod 90 -         fchmod 91 52         fchmodat 268 53      chown 92 -           fchown 93 55
    lchown 94 -        fchownat 260 54      utimensat 280 88     openat2 437 437      setxattr 188 5
"""


def refused(machine: str, table: str = _REFUSED) -> dict[str, int]:
    """The numbers of the refused system calls on a machine, by name."""
    words = table.split()
    rows = [words[start : start + 3] for start in range(0, len(words), 3)]
    column = _MACHINES[machine].column
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def program(machine: str | None = None, read_only: bool = False) -> bytes:
    """The filter for this machine (or a named one); empty where it is neither x86_64 nor aarch64. With `read_only` no
    file can be changed or opened for writing either."""
    name = machine or os.uname().machine
    if name not in _MACHINES:
        return b""
    this = _MACHINES[name]
    code = [_op(_LOAD, _ARCHITECTURE), _op(_EQUAL, this.audit, 1, 0), _op(_RETURN, _KILL), _op(_LOAD, _NUMBER)]
    if this.alien is not None:
        code += [_op(_AT_LEAST, this.alien, 0, 1), _op(_RETURN, _KILL)]
    code += _refuse(_CLONE3, errno.ENOSYS)  # its flags lie in memory no filter can read; the C library takes clone then
    code += [_op(_AT_LEAST, _NEWEST + 1, 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in sorted(refused(name).values()):
        code += _refuse(number, errno.EPERM)
    if read_only:
        for number in sorted(refused(name, _CHANGES_FILES).values()):
            code += _refuse(number, errno.EACCES)
        code += _refuse_writing(this.openat, _THIRD_ARGUMENT)
        if name == "x86_64":
            code += _refuse_writing(_OPEN, _SECOND_ARGUMENT)
    # A new thread is allowed, a new process is not; another process's limits are not ours to set.
    code += [_op(_EQUAL, this.clone, 0, 4), _op(_LOAD, _FIRST_ARGUMENT), _op(_ANY_BIT, _CLONE_THREAD, 1, 0)]
    code += [_op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW)]
    code += [_op(_EQUAL, this.prlimit, 0, 4), _op(_LOAD, _FIRST_ARGUMENT), _op(_EQUAL, 0, 1, 0)]
    code += [_op(_RETURN, _ERRNO | errno.EPERM), _op(_RETURN, _ALLOW), _op(_RETURN, _ALLOW)]
    return b"".join(code)


def _refuse(number: int, code: int) -> list[bytes]:
    return [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | code)]


def _refuse_writing(number: int, flags: int) -> list[bytes]:
    ending = [_op(_RETURN, _ERRNO | errno.EACCES), _op(_RETURN, _ALLOW)]
    return [_op(_EQUAL, number, 0, 4), _op(_LOAD, flags), _op(_ANY_BIT, _WRITING, 0, 1), *ending]


def install(code: bytes) -> str:
    """Put this process behind a filter for ever; "" when it is, else why the kernel refused."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if not code:
        return ""
    kept = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(kept, ctypes.c_void_p))
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        return os.strerror(ctypes.get_errno())
    return ""


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
