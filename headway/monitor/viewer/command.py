"""`headway view`: checks the runs, serves them until Ctrl-C, and says where."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from headway.errors import HeadwayError
from headway.monitor.viewer.queries import Queries
from headway.monitor.viewer.server import Viewer
from headway.record.log import EVENTS_NAME


def runs_in(paths: list[Path]) -> list[Path]:
    """The run directories that are named, or that lie in a named directory."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(log.parent for log in path.glob(f"*/{EVENTS_NAME}"))
        if (path / EVENTS_NAME).is_file():
            found.append(path)
        elif inside:
            found += inside
        else:
            raise HeadwayError(
                f"{path} is not a run directory: it has no {EVENTS_NAME}; name one that headway train made"
            )
    return list({path.resolve(): path for path in found}.values())


async def serve(paths: list[Path], port: int, announce: Callable[[str], None]) -> None:
    """Returns when the process is interrupted."""
    viewer = Viewer(Queries(runs_in(paths)).handlers)
    await viewer.open(port)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        announce(viewer.url)
        await stopped.wait()
    finally:
        await viewer.close()
