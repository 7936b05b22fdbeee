"""Start a class somewhere and call it: in this process, in a process of its own, or on a node of a Ray cluster.

Knows nothing of RL. A worker is an ordinary class. Callers await its public methods: `async` methods and async
generators run on the worker's event loop, synchronous methods on its compute thread, one at a time. It may define
`async` methods `open` (called inside the running event loop, after construction) and `close` (called at the end).
Importing this package imports nothing: import each name from its module.

`protocol` is what every runtime does; `inline`, `local` and `ray` (with `driver`, the one process that talks to
Ray) are the three. `launch` starts a worker process, `worker` is its main; `handle` is the calling side and `channel`
the frames between them. `guardian` runs a foreign program and `process_tree` ends whole process trees; `compute` moves
heavy work off the event loop; `gather` awaits several calls together, `semaphore` limits them.

Invariant that lives here:
 15. Bounded waits: every wait has a deadline; one that expires fails with the name of what was awaited.
"""
