"""The viewer's HTTP side: the link's holder is served, everybody else gets nothing, and nothing but its own files."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from recorded import RecordedRun
from yarl import URL

from headway.errors import HeadwayError
from headway.monitor.viewer.command import runs_in
from headway.monitor.viewer.queries import Queries
from headway.monitor.viewer.server import Viewer

Scenario = Callable[[Viewer, aiohttp.ClientSession], Awaitable[Any]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    run = RecordedRun(tmp_path / "run")
    run.step()
    run.end()
    return tmp_path / "run"


def served(directory: Path, scenario: Scenario, *, enter: bool = True) -> Any:
    async def main() -> Any:
        viewer = Viewer(Queries([directory]).handlers)
        await viewer.open()
        try:
            async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as session:
                if enter:
                    async with session.get(viewer.url) as answer:
                        assert answer.status == 200 and "Headway" in await answer.text()
                return await scenario(viewer, session)
        finally:
            await viewer.close()

    return asyncio.run(asyncio.wait_for(main(), 30))


def status_of(directory: Path, path: str, *, enter: bool = True, **request: Any) -> tuple[int, str]:
    async def scenario(viewer: Viewer, session: aiohttp.ClientSession) -> tuple[int, str]:
        # Sent as it is: the client would tidy a path that climbs, and the server never see it.
        url = URL(f"http://127.0.0.1:{viewer.port}{path}", encoded=True)
        async with session.get(url, **request) as answer:
            return answer.status, await answer.text()

    return served(directory, scenario, enter=enter)


def test_the_link_opens_the_page_its_assets_and_its_queries(directory: Path) -> None:
    for path in ("/", "/assets/app.js", "/assets/vendor/uPlot.iife.min.js", "/api/runs", "/api/trajectories?run=0"):
        assert status_of(directory, path)[0] == 200, path


def test_without_the_token_or_with_a_wrong_one_nothing_is_served(directory: Path) -> None:
    for path in ("/", "/assets/app.js", "/api/runs", "/?token=wrong", "/api/runs?token=wrong"):
        status, body = status_of(directory, path, enter=False)
        assert status == 401 and "link" in body and "step" not in body, path


def test_a_token_that_is_no_text_is_wrong_like_any_other(directory: Path) -> None:
    async def scenario(viewer: Viewer, _session: aiohttp.ClientSession) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", viewer.port)
        host = f"127.0.0.1:{viewer.port}".encode()
        cookie = f"headway-{viewer.port}=".encode() + b"\xff\xfe"
        writer.write(b"GET /api/runs HTTP/1.1\r\nHost: " + host + b"\r\nCookie: " + cookie + b"\r\n\r\n")
        line = await reader.readline()
        writer.close()
        return line

    assert b" 401 " in served(directory, scenario)
    assert status_of(directory, "/?token=%ed%b0%80", enter=False)[0] == 401


def test_a_foreign_origin_or_a_rebound_host_name_is_refused_even_with_the_cookie(directory: Path) -> None:
    assert status_of(directory, "/api/runs", headers={"Origin": "http://evil.example"})[0] == 403
    assert status_of(directory, "/api/runs", headers={"Host": "evil.example"})[0] == 403


def test_nothing_outside_the_assets_is_readable(directory: Path) -> None:
    for path in (
        "/assets/../server.py",
        "/assets/%2e%2e/server.py",
        "/assets/..%2f..%2fview.py",
        "/assets//etc/passwd",
        "/../../../../etc/passwd",
        "/assets/../../../../../../../../../etc/passwd",
        "/assets/%2fetc/passwd",
        "/assets/style.css%00.py",
    ):
        status, body = status_of(directory, path)
        assert status in (400, 404) and "root:" not in body and "class" not in body, (path, status)


def test_a_wrong_parameter_is_a_sentence_and_an_unknown_query_is_named(directory: Path) -> None:
    status, body = status_of(directory, "/api/group?group=77")
    assert status == 400 and "has no group 77; it admitted 4" in body
    assert status_of(directory, "/api/nothing")[0] == 404


def test_answers_forbid_scripts_from_elsewhere(directory: Path) -> None:
    async def scenario(viewer: Viewer, session: aiohttp.ClientSession) -> Any:
        async with session.get(f"http://127.0.0.1:{viewer.port}/") as answer:
            return answer.headers

    policy = served(directory, scenario)["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "unsafe" not in policy


def test_a_port_in_use_is_one_sentence(directory: Path) -> None:
    async def scenario(viewer: Viewer, _session: aiohttp.ClientSession) -> None:
        with pytest.raises(HeadwayError, match="choose another with --port"):
            await Viewer({}).open(viewer.port)

    served(directory, scenario)


def test_a_directory_of_runs_is_all_its_runs_and_one_without_is_refused(directory: Path, tmp_path: Path) -> None:
    assert runs_in([tmp_path, directory]) == [directory]
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadwayError, match="is not a run directory"):
        runs_in([tmp_path / "empty"])
