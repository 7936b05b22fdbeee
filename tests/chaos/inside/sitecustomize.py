"""Harm from inside a worker: Python imports this at the start of every process whose PYTHONPATH has this directory.

A file `harm-now` in a run's directory says which process is to go wrong and how; that worker, or the controller,
renames it to `harm-done` and does. A file `poison` names a request that no engine can answer with numbers, a file
`fatal` a group that ends the process of every rollout worker. Everywhere else this does nothing.
"""

import json
import os
import sys
import threading
import time

TRIGGER, DONE, POISON, FATAL, REACHED = "harm-now", "harm-done", "poison", "fatal", "reached"
CONNECTIONS = []
"""To this worker, in the order in which they were made: the first is the controller's."""


def _name():
    """Of this worker, or of the controller."""
    words = sys.orig_argv
    if "headway.runtime.worker" in words:
        return words[words.index("headway.runtime.worker") + 1]
    return "controller" if "headway.cli" in words else ""


def _wait_and_harm(name):
    done, waiting = None, {"engine": (POISON, _poison), "rollout": (FATAL, _end_at_group)}.get(name.partition("-")[0])
    while True:
        time.sleep(0.01)
        try:
            if waiting and os.path.exists(waiting[0]):
                waiting[1]()
                waiting = None
            with open(TRIGGER) as file:
                plan = json.load(file)
            if plan["worker"] == name and plan["number"] != done:
                done = plan["number"]
                if plan["harm"] not in LATER:
                    os.rename(TRIGGER, DONE)
                HARMS[plan["harm"]](plan)
        except FileNotFoundError:
            pass


# Channels


def _watch_connections():
    from headway.runtime.channel import Channel

    original = Channel.connection_made

    def connection_made(self, transport):
        if type(self).__module__ == "__main__":  # the worker's own end
            CONNECTIONS.append(self)
        original(self, transport)

    Channel.connection_made = connection_made


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


CLASSES = {
    "engine": [("headway.engine.vllm.engine", "VllmEngine"), ("headway.engine.embedded.service", "EmbeddedEngine")],
    "rollout": [("headway.rollout.worker", "RolloutWorker")],
    "trainer": [("headway.training.trainer", "Trainer")],
    "controller": [("headway.control.controller", "Controller")],
}


def _loaded():
    """The class of this worker, once it is there: an import in this thread before that may break the worker's own."""
    places = CLASSES[_name().partition("-")[0]]
    while True:
        for module, name in places:
            if hasattr(sys.modules.get(module), name):
                return getattr(sys.modules[module], name)
        time.sleep(0.01)


def _talk_nonsense(plan):
    from dataclasses import replace

    import numpy as np

    engine = _loaded()
    generate = engine.generate
    wrong = (
        lambda item: replace(item, tokens=item.tokens + 1_000_000),
        lambda item: replace(item, logprobs=np.full_like(item.logprobs, np.nan)),
        lambda item: replace(item, versions=item.versions + 1_000_000),
        lambda item: replace(item, logprobs=1 - item.logprobs),
    )[plan["draw"] % 4]

    async def nonsense(self, request):
        async for item in generate(self, request):
            yield wrong(item)

    engine.generate = nonsense


def _poison():
    """Of one request, on every engine: its activations are no numbers."""
    from dataclasses import replace

    import numpy as np

    engine = _loaded()
    generate = engine.generate

    async def poisoned(self, request):
        async for item in generate(self, request):
            # Read each time: the next plan is of another request.
            with open(POISON) as file:
                plan = json.load(file)
            key = request.key
            if key.stream == "train" and (key.group, key.trajectory) == (plan["group"], plan["trajectory"]):
                item = replace(item, logprobs=np.full_like(item.logprobs, np.nan))
                open(REACHED, "w").close()
            yield item

    engine.generate = poisoned


def _end_at_group():
    """As a workflow that crashes native code would."""
    worker = _loaded()
    run = worker.run

    async def fatal(self, admission):
        with open(FATAL) as file:
            group = json.load(file)["group"]
        if admission.stream == "train" and admission.group == group:
            open(REACHED, "w").close()
            os._exit(1)
        return await run(self, admission)

    worker.run = fatal


# Training


def _run_out_of_memory(plan):
    """Once, in one of the next backward passes."""
    _loaded()
    import torch

    backward, left = torch.Tensor.backward, [1 + plan["draw"] % 3]

    def failing(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            os.rename(TRIGGER, DONE)
            raise torch.OutOfMemoryError("no memory is left (chaos)")
        return backward(self, *args, **kwargs)

    torch.Tensor.backward = failing


def _linger(plan):
    """In the middle of the next checkpoint, for long enough to be killed there."""
    import shutil

    _loaded()
    from headway.training import checkpoint

    write_part, replace, left = checkpoint.write_part, checkpoint.replace, [1]

    def wait():
        if left:
            left.pop()
            os.rename(TRIGGER, DONE)
            time.sleep(10)

    def written(*args):
        part = write_part(*args)
        wait()
        return part

    def replaced(unfinished, directory):
        if left:
            shutil.rmtree(directory, ignore_errors=True)
        wait()
        replace(unfinished, directory)

    checkpoint.write_part, checkpoint.replace = written, replaced


# Weights


def _flip_a_bit(plan):
    """Of all weights that this engine receives from now on."""
    _loaded()
    from headway.weights import fingerprints, shadow
    from headway.weights import receive as receiving

    receive, open_whole = receiving.receive, receiving.open_whole

    def corrupt(update, into):
        receive(update, into)
        tensor = list(into.values())[plan["draw"] % len(into)]
        memory = fingerprints.bytes_of(tensor)
        memory[plan["draw"] % len(memory)] ^= 1 << plan["draw"] % 8

    def open_corrupt(update):
        # vLLM's proof is a score: a bit of one number would be within what it allows.
        tensors = open_whole(update)
        name = sorted(key for key in tensors if "proj" in key)[0]
        return tensors | {name: -tensors[name]}

    shadow.receive = receiving.receive = corrupt
    receiving.open_whole = open_corrupt


def _break_transfers(plan):
    """Once or twice, where there are three tries."""
    _loaded()
    from headway.weights.stream import WeightServer

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
    "memory": _run_out_of_memory,
    "linger": _linger,
}
LATER = {"memory", "linger"}
"""What is done only when it comes to that."""

if _name() and os.path.exists("chaos"):  # what a run's directory has, and no other
    if _name() != "controller":
        _watch_connections()
    threading.Thread(target=_wait_and_harm, args=(_name(),), daemon=True).start()
