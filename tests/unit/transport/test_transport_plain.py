"""The blocking connection, against peers in threads that answer as a test wants."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from tests.plain_peer import HOST, Answer, Peer, answer

from cosmodrome.errors import Code, ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import FLAG_ONEWAY, SERIALIZE_BINARY
from cosmodrome.transport.plain import CALLS_AHEAD, PlainConnection
from cosmodrome.wire.commands import GetMaxOffset, NotifyConsumerIdsChanged
from cosmodrome.wire.frame import Frame, encode
from cosmodrome.wire.session import RepeatedRequest
from cosmodrome.wire.table import encode as encode_row

ASK = GetMaxOffset(topic="T", queue_id=3)


def offset_answers(frames: list[Frame]) -> bytes:
    """The queue id of a request comes back as the offset."""
    return b"".join(answer(frame, {"offset": frame.ext["queueId"]}) for frame in frames)


def connect(peer: Peer, **options: object) -> PlainConnection:
    return PlainConnection(peer.host, peer.port, **options)  # type: ignore[arg-type]


def dead_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_call_is_answered() -> None:
    with Peer(offset_answers) as peer:
        link = connect(peer)
        assert not link.is_open
        assert link.call(ASK).offset == 3
        assert link.call(GetMaxOffset(topic="T", queue_id=9)).offset == 9
        assert link.is_open and peer.connections == 1
        assert peer.requests[0].ext == {"topic": "T", "queueId": "3"}
        link.close()
        link.close()
        assert not link.is_open


def test_many_calls_keep_their_order_though_answers_do_not() -> None:
    with Peer(lambda frames: offset_answers(frames[::-1])) as peer:
        link = connect(peer)
        count = 2 * CALLS_AHEAD + 7
        asked = [GetMaxOffset(topic="T", queue_id=number) for number in range(count)]
        found = [reply.offset for reply in link.call_all(asked) if not isinstance(reply, Refused)]
        assert found == list(range(count))
        assert link.call_all([]) == []
        link.close()


def test_a_refusal_names_the_peer_and_leaves_the_connection_open() -> None:
    def respond(frames: list[Frame]) -> bytes:
        if frames[0].ext["queueId"] == "3":
            return answer(frames[0], code=Code.SYSTEM_ERROR, remark="Queue 3 does not exist.")
        return offset_answers(frames)

    with Peer(respond) as peer:
        link = connect(peer)
        with pytest.raises(Refused, match="Queue 3 does not exist") as raised:
            link.call(ASK)
        assert raised.value.code == Code.SYSTEM_ERROR
        assert peer.address in raised.value.remark and "GET_MAX_OFFSET" in raised.value.remark
        assert link.call(GetMaxOffset(topic="T", queue_id=4)).offset == 4
        assert peer.connections == 1
        link.close()


def test_an_answer_that_was_given_up_is_not_another_ones() -> None:
    with Peer(offset_answers) as peer:
        link = connect(peer)
        link.write(GetMaxOffset(topic="T", queue_id=8))
        assert link.call(ASK).offset == 3
        link.close()


def test_requests_that_were_not_sent_are_lost_with_the_connection() -> None:
    with Peer(offset_answers) as peer:
        link = connect(peer)
        link.write(GetMaxOffset(topic="T", queue_id=8))
        link.close()
        assert link.call(ASK).offset == 3
        assert len(peer.requests) == 1
        link.close()


def test_requests_of_the_peer_and_stray_answers_are_dropped() -> None:
    def respond(frames: list[Frame]) -> bytes:
        notice = NotifyConsumerIdsChanged(consumer_group="g")
        pushed = Frame(notice.request_code, 1, FLAG_ONEWAY, encode_row(notice), b"body")
        stray = answer(Frame(0, 999_999), {"offset": "1"}, body=b"late")
        return encode(pushed) + stray + offset_answers(frames)

    with Peer(respond) as peer:
        link = connect(peer)
        assert link.call(ASK).offset == 3
        link.close()


def test_binary_headers_are_read() -> None:
    def respond(frames: list[Frame]) -> bytes:
        reply = Frame(0, frames[0].opaque, 1, {"offset": "5"}, serialize=SERIALIZE_BINARY)
        return encode(reply)

    with Peer(respond) as peer:
        link = connect(peer)
        assert link.call(ASK).offset == 5
        link.close()


def test_what_is_written_leaves_together_and_bodies_are_views() -> None:
    bodies = [b"", b"x" * 10, b"y" * 3_000_000, b"z" * 70_000]

    def respond(frames: list[Frame]) -> bytes:
        return b"".join(answer(frame, body=bodies[int(frame.ext["queueId"])]) for frame in frames)

    with Peer(respond) as peer:
        link = connect(peer)
        request = RepeatedRequest(ASK, "queueId")
        for _ in range(3):
            waiting = [link.write_repeated(request, number) for number in range(4)]
            link.flush()
            for opaque, body in zip(waiting, bodies, strict=True):
                frame = link.read()
                assert frame.opaque == opaque and frame.body == body
                assert isinstance(frame.body, memoryview)
        assert {tuple(frame.ext) for frame in peer.requests} == {("topic", "queueId")}
        link.close()


def test_answers_in_small_pieces() -> None:
    whole = b""
    asked = threading.Event()

    def respond(frames: list[Frame]) -> bytes:
        nonlocal whole
        whole = offset_answers(frames)
        asked.set()
        return whole[:5]

    with Peer(respond) as peer:
        link = connect(peer)
        waiting = link.write(ASK)
        link.flush()
        assert asked.wait(60)
        for piece in (whole[5:9], whole[9:20], whole[20:]):
            time.sleep(0.01)
            peer._open[0].sendall(piece)
        frame = link.read()
        assert frame.opaque == waiting and frame.ext == {"offset": "3"}
        link.close()


def test_every_request_is_signed() -> None:
    def prepare(frame: Frame) -> None:
        frame.ext["Signature"] = "-".join(frame.ext.values())

    with Peer(offset_answers) as peer:
        link = connect(peer, prepare=prepare)
        link.call(ASK)
        opaque = link.write_repeated(RepeatedRequest(ASK, "queueId"), 8)
        link.flush()
        assert link.read().opaque == opaque
        signed = [frame.ext["Signature"] for frame in peer.requests]
        assert signed == ["T-3", "T-8"]
        link.close()


# --- faults ------------------------------------------------------------------------------------


def test_nobody_listens() -> None:
    port = dead_port()
    link = PlainConnection(HOST, port)
    with pytest.raises(Unreachable, match=rf"cannot connect to {HOST}:{port}: .*check the address"):
        link.call(ASK)
    assert not link.is_open


def test_a_peer_that_does_not_answer() -> None:
    with Peer(lambda frames: b"") as peer:
        link = connect(peer)
        with pytest.raises(TimedOut, match=r"did not answer GET_MAX_OFFSET within 60 ms"):
            link.call(ASK, timeout_ms=60)
        assert not link.is_open  # a late answer would be somebody else's


def test_a_peer_that_trickles() -> None:
    asked = threading.Event()

    def respond(frames: list[Frame]) -> bytes:
        asked.set()
        return b""

    with Peer(respond) as peer:
        link = connect(peer)
        link.write(ASK)
        link.flush()
        assert asked.wait(60)

        def trickle() -> None:
            for byte in b"\x00\x00\x10\x00" + bytes(4096):
                try:
                    peer._open[0].sendall(bytes([byte]))
                except OSError:
                    return
                time.sleep(0.01)

        peer._start(trickle)
        # Every byte comes in time; the frame would be whole, and wrong, after 40 s.
        with pytest.raises(TimedOut):
            link.read(200)


def test_a_connection_that_breaks_is_opened_again() -> None:
    broken = [True]

    def respond(frames: list[Frame]) -> bytes | None:
        if broken.pop() if broken else False:
            return None
        return offset_answers(frames)

    with Peer(respond) as peer:
        link = connect(peer)
        with pytest.raises(Unreachable, match=rf"{peer.address} closed the connection"):
            link.call(ASK)
        assert link.call(ASK).offset == 3
        assert peer.connections == 2
        link.close()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n", ProtocolError, "check that it is a broker"),
        (b"\x16\x03\x01\x00\x05aaaaa", Unreachable, "speaks tls instead of remoting"),
        (
            b"\x7f\xff\xff\xff" + b"a" * 20,
            ProtocolError,
            "frame length 2147483647 .* is above the limit",
        ),
        (b"\x00\x00\x00\x02" + b"a" * 20, ProtocolError, "frame length 2 is smaller"),
        (
            b"\x00\x00\x00\x08\x00\x00\xff\xff" + b"a" * 20,
            ProtocolError,
            "a header of 65535 bytes in a frame that has 4 left",
        ),
        (b"\x00\x00\x00\x08\x00\x00\x00\x04" + b"a" * 20, ProtocolError, "header"),
    ],
)
def test_what_is_no_frame(data: bytes, error: type[Exception], message: str) -> None:
    with Peer(lambda frames: data) as peer:
        link = connect(peer)
        with pytest.raises(error, match=message) as raised:
            link.call(ASK)
        assert peer.address in str(raised.value)
        assert not link.is_open


def test_the_frame_limit_is_the_connections() -> None:
    body = b"b" * 5_000
    respond: Answer = lambda frames: answer(frames[0], {"offset": "1"}, body=body)  # noqa: E731
    with Peer(respond) as peer:
        link = connect(peer, frame_bytes_max=6_000)
        assert link.call(ASK).offset == 1
        link.close()
        with pytest.raises(ProtocolError, match="above the limit of 5000 bytes"):
            connect(peer, frame_bytes_max=5_000).call(ASK)


def test_ipv6() -> None:
    try:
        peer = Peer(offset_answers, host="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with peer:
        link = PlainConnection("::1", peer.port)
        assert link.address == f"[::1]:{peer.port}"
        assert link.call(ASK).offset == 3
        link.close()


def test_a_peer_that_closed_meanwhile_is_noticed() -> None:
    with Peer(offset_answers) as peer:
        link = connect(peer)
        assert not link.looks_alive()
        link.call(ASK)
        assert link.looks_alive()
        assert link.call(ASK, timeout_ms=60_000).offset == 3  # a look changes nothing
    assert not link.looks_alive()
    link.close()


def test_tls(tmp_path: Path) -> None:
    import ssl

    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    made = subprocess.run(command.split(), capture_output=True)
    if made.returncode:
        pytest.skip(f"no certificate could be made: {made.stderr.decode()[-200:]}")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    body = b"t" * 100_000
    respond: Answer = lambda frames: answer(frames[0], {"offset": "1"}, body=body)  # noqa: E731
    with Peer(respond, tls=server) as peer:
        link = connect(peer, tls=ssl.create_default_context(cafile=str(certificate)))
        assert bytes(link.call(ASK).body) == body
        assert link.looks_alive()
        link.close()
        with pytest.raises(Unreachable, match="no TLS with"):
            connect(peer, tls=ssl.create_default_context()).call(ASK)
