"""The load client's HTTP: framing, reuse of connections, and what is said when it goes wrong."""

import socket

import pytest
from scripted_server import END, STREAM_HEAD, ScriptedServer, answer, chunk, whole

from detour.bench.http_client import BrokenReply, ConnectFailed, HttpClient, Target
from detour.errors import BadRequest


def client(server: ScriptedServer) -> HttpClient:
    return HttpClient(Target(server.url), {"Authorization": "Bearer k"})


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999999"])
def test_what_is_no_url_is_refused_with_a_sentence(url):
    with pytest.raises(BadRequest, match="is not a server's URL"):
        Target(url)


def test_a_url_may_lack_its_scheme_and_have_a_prefix():
    target = Target("localhost:8000/proxy/")
    assert (target.host, target.port, target.prefix) == ("localhost", 8000, "/proxy")
    assert Target("https://x").port == 443


async def test_connections_are_kept():
    async with ScriptedServer(answer) as server:
        c = client(server)
        for _ in range(3):
            assert (await c.fetch("GET", "/health"))[0] == 200
        assert server.connections == 1
        await c.close()


async def test_a_connection_closed_in_the_meantime_is_replaced():
    async with ScriptedServer(answer, close_after_reply=True) as server:
        c = client(server)
        for _ in range(3):
            assert (await c.fetch("GET", "/health"))[0] == 200
        assert server.connections == 3
        await c.close()


async def test_body_without_length_ends_with_the_connection():
    async def script(asked, write):
        await write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it")

    async with ScriptedServer(script, close_after_reply=True) as server:
        assert await client(server).fetch("GET", "/") == (200, b"all of it")


@pytest.mark.parametrize(
    "said, nothing_came",
    [(b"", True), (STREAM_HEAD + chunk(b"part"), False), (b"HTTP/1.1 200 OK\r\nConte", False)],
)
async def test_a_reply_cut_short_is_an_error(said, nothing_came):
    async def script(asked, write):
        await write(said)

    async with ScriptedServer(script, close_after_reply=True) as server:
        with pytest.raises(BrokenReply, match="closed the connection") as caught:
            await client(server).fetch("GET", "/")
        assert caught.value.nothing_came == nothing_came


async def test_what_is_not_http_is_an_error():
    async def script(asked, write):
        await write(b"220 mail.example.org ESMTP\r\n")

    async with ScriptedServer(script) as server:
        with pytest.raises(BrokenReply, match="not HTTP"):
            await client(server).fetch("GET", "/")


async def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ConnectFailed, match="no server answers"):
        await HttpClient(Target(f"http://127.0.0.1:{port}"), {}).fetch("GET", "/")


async def test_status_decides_which_sink_hears_the_body():
    async def script(asked, write):
        ok = asked.path == "/good"
        await write(whole(200, {"a": 1}) if ok else whole(503, {"e": 2}))

    async with ScriptedServer(script) as server:
        c = client(server)
        good, bad = [], []
        for path in ("/good", "/bad"):
            await c.exchange(
                c.message("GET", path), lambda b, t: good.append(b), lambda b, t: bad.append(b)
            )
        assert (b"".join(good), b"".join(bad)) == (b'{"a": 1}', b'{"e": 2}')
        await c.close()


async def test_message_carries_headers_and_length():
    async with ScriptedServer(answer) as server:
        c = client(server)
        await c.fetch("POST", "/flush_cache", b"{}")
        asked = server.asked[0]
        assert asked.headers["authorization"] == "Bearer k"
        assert asked.headers["host"] == f"127.0.0.1:{server.port}"
        assert asked.body == b"{}"
        await c.close()


async def test_chunks_split_anywhere():
    reply = STREAM_HEAD + chunk(b"hello ") + chunk(b"world") + END

    async def script(asked, write):
        for i in range(len(reply)):
            await write(reply[i : i + 1])

    async with ScriptedServer(script) as server:
        c = client(server)
        assert await c.fetch("GET", "/") == (200, b"hello worlddata: [DONE]\n\n")
        await c.close()
