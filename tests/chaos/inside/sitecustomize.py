"""Harm from inside a worker: Python imports this at the start of every process whose PYTHONPATH has this directory.

In a run's directory, `harm.json` says which worker is to go wrong and how; it does when the file `harm-now` appears
there, which it renames to `harm-done`, so that its next life is whole. Everywhere else this does nothing.
"""

import json
import os
import sys
import threading
import time

PLAN, TRIGGER, DONE = "harm.json", "harm-now", "harm-done"


def _worker_name():
    words = sys.orig_argv
    return words[words.index("headway.runtime.worker") + 1] if "headway.runtime.worker" in words else ""


def _wait_and_harm(plan):
    while not _claimed():
        time.sleep(0.002)
    HARMS[plan["harm"]](plan)


def _claimed():
    try:
        os.rename(TRIGGER, DONE)
    except OSError:
        return False
    return True


# Channels


def _watch_connections():
    """Connections to this worker in the order in which they were made: the first is the controller's."""
    from headway.runtime.worker import Connection

    made, original = [], Connection.connection_made

    def connection_made(self, transport):
        made.append(self)
        original(self, transport)

    Connection.connection_made = connection_made
    return made


def _lose_bytes(plan):
    """Whatever is sent is lost; sockets stay open. `deaf` spares the controller's channel."""
    from headway.runtime.channel import Channel

    spared = CONNECTIONS[:1] if plan["harm"] == "deaf" else []
    send, buffer_updated = Channel.send, Channel.buffer_updated

    def lost(self):
        return not any(self is one for one in spared)

    Channel.send = lambda self, *args, **kwargs: None if lost(self) else send(self, *args, **kwargs)
    Channel.buffer_updated = lambda self, count: None if lost(self) else buffer_updated(self, count)


def _cut(plan):
    for connection in CONNECTIONS:
        connection._loop.call_soon_threadsafe(connection.transport.abort)


# Answers


def _talk_nonsense(plan):
    from dataclasses import replace

    import numpy as np

    modules = ("headway.engine.embedded", "headway.engine.vllm")
    (module,) = [sys.modules[name] for name in modules if name in sys.modules][-1:]
    engine = getattr(module, "VllmEngine", None) or module.EmbeddedEngine
    generate = engine.generate
    wrong = {
        "token": lambda item: replace(item, tokens=item.tokens + 1_000_000),
        "logprob": lambda item: replace(item, logprobs=np.full_like(item.logprobs, np.nan)),
        "version": lambda item: replace(item, versions=item.versions + 1000),
        "other": lambda item: replace(item, tokens=np.flip(item.tokens).copy(), logprobs=-item.logprobs + 1),
    }[("token", "logprob", "version", "other")[plan["draw"] % 4]]

    async def nonsense(self, request):
        async for item in generate(self, request):
            yield wrong(item)

    engine.generate = nonsense


# Weights


def _flip_a_bit(plan):
    """Of the next weights that this engine receives."""
    from headway import weights

    receive = weights.receive

    def corrupt(update, into):
        receive(update, into)
        tensor = list(into.values())[plan["draw"] % len(into)]
        memory = weights.bytes_of(tensor)
        memory[plan["draw"] % len(memory)] ^= 1 << plan["draw"] % 8

    def open_corrupt(update):
        # vLLM's proof is a score: a bit of one number would be within what it allows.
        tensors = open_whole(update)
        name = sorted(key for key in tensors if "proj" in key)[0]
        return tensors | {name: -tensors[name]}

    open_whole = weights.open_whole
    weights.receive, weights.open_whole = corrupt, open_corrupt


def _break_transfers(plan):
    """Once or twice, where there are three tries."""
    from headway.weight_stream import WeightServer

    answer, left = WeightServer._answer, [1 + plan["draw"] % 2]

    def broken(self, client):
        if left[0]:
            left[0] -= 1
            raise ConnectionResetError
        return answer(self, client)

    WeightServer._answer = broken


HARMS = {
    "partition": _lose_bytes,
    "deaf": _lose_bytes,
    "cut": _cut,
    "nonsense": _talk_nonsense,
    "flip": _flip_a_bit,
    "break": _break_transfers,
}

if (_name := _worker_name()) and os.path.exists(PLAN):
    with open(PLAN) as _file:
        _plan = json.load(_file)
    if _plan["worker"] == _name:
        CONNECTIONS = _watch_connections() if _plan["harm"] in ("partition", "deaf", "cut") else []
        threading.Thread(target=_wait_and_harm, args=(_plan,), daemon=True).start()
