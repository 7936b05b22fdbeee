"""Runs programs that nobody has read: one sandbox a program, started in advance and used once.

```
 verifier process                 one sandbox: bubblewrap, no network, no file but a scratch folder
 pool ── control socket ───────►  guest: the judge ◄── calls and plain values ──► the candidate
         job, later the tests     runs the tests, never the program              runs the program, never sees a test
```

`isolation` builds the bubblewrap command; `pool` starts sandboxes, gives each one job under limits and ends it with all
it started; `guest` is the program inside, with the two roles above; `wire` is what they say to each other, plain values
only; `seccomp` is the filter of system calls that both roles run under.

Invariant that lives here:
 10. Errors are never rewards: whatever a program does to its sandbox is a wrong answer; a sandbox that could not be
     started or closed is an error.
"""
