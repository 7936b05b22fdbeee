"""A Ray cluster of several nodes on this machine, for tests: 127.0.0.1 is its head, and each node has its own address.

Ray tells nodes apart by their addresses, so to everything here they are different machines.
"""

import atexit
import os
import secrets
import shutil
import tempfile
from functools import cache
from typing import Any

NODES = {
    "127.0.0.1": {"rollouts": 8},
    "127.0.0.2": {"engines": 8, "ranks": 1},
    "127.0.0.3": {"trainers": 8, "ranks": 1},
}
"""Each node's address, and a resource that only it has; `ranks` is for one trainer rank a node."""

PLACES = {
    "probe": {"engines": 1},
    "engine": {"engines": 1},
    "trainer": {"trainers": 1},
    "caller": {"trainers": 1},
    "rollout": {"rollouts": 1},
    "reward": {"node:127.0.0.1": 0.01},
}
"""Where workers of each kind go: in runtime tests `probe` and `caller`, else the kinds of a run."""


@cache
def cluster() -> Any:
    """Started when first asked for; it ends with this process."""
    # 127.0.0.1 stays what it is, where Ray would replace it by the machine's outer address; strangers are turned away.
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    directory = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    for host, resources in NODES.items():
        add_node(nodes, host, resources)

    def end() -> None:
        nodes.shutdown()
        shutil.rmtree(directory, ignore_errors=True)

    atexit.register(end)
    return nodes


def add_node(nodes: Any, host: str, resources: dict[str, int]) -> Any:
    memory = 80 * 2**20
    return nodes.add_node(
        node_ip_address=host, num_cpus=2, resources=resources, object_store_memory=memory, include_dashboard=False
    )
