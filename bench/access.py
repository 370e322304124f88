"""What access control costs a send: plain and signed sends, ours beside Java's.

A signature of 4.x has no time in it, so `bench.ring` signs all requests before the clock starts.
In the same run the HMAC alone is measured, over as many bytes as a request signs, and the walk
through signed requests that proves them: the header is read, the HMAC made and compared, the
account and its rights are looked up. The walk without the HMAC is the price of the checks. The
difference between signed and plain sends shows it too, but on a shared machine two brokers differ
by more than that.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from peers.java import class_path, java_command

from bench.brokers import ACCOUNT, GUARDED_TOPIC, JAVA_HEAP, ROOT, SERVER_CORE, pinned
from bench.loadgen import header_of, send_frame
from bench.ring import make_ring
from bench.verdict import Row, Sample, errors, figure, median, values
from cosmodrome.layout import CODE_SEND_V2, UNSIGNED_FIELDS

if TYPE_CHECKING:
    from bench.rows import Bench

CPU = "srv_cpu_us_msg"
PLAIN, CARRIED, SIGNED = "plain", "signed, not checked", "signed and checked"
SAID = "send 128 B, 8 × 16"
LOAD: dict[str, object] = {
    "topic": GUARDED_TOPIC.removesuffix("0000"),
    "queues": 8,
    "conns": 8,
    "window": 16,
    "size": 128,
}
SIGN = {"account": ":".join(ACCOUNT)}
# The server that is asked, and what is special about the load.
CASES: dict[str, tuple[str, Mapping[str, object]]] = {
    PLAIN: ("{}", {}),
    CARRIED: ("{}", SIGN),
    SIGNED: ("{} guarded", SIGN),
}
SERVERS = ("ours", "java")
CHECKS_PERCENT_MAX = 5.0
HMACS = 200_000
JAVA_WARM_S = 2.0


def access(bench: Bench) -> list[Row]:
    targets = {
        (case, server): bench.brokers.get(kind.format(server))
        for case, (kind, _) in CASES.items()
        for server in SERVERS
    }
    for (case, server), target in targets.items():
        if server == "java" and bench.warm_s:
            with target.awake():
                bench.ring(target, {**LOAD, **CASES[case][1]}, bench.warm_s)
    found: dict[tuple[str, str], list[Sample]] = {}
    ours_hmac, ours_walk = [], []
    for _ in range(bench.repetitions):
        for (case, server), target in targets.items():
            with target.awake():
                sample = bench.ring(target, {**LOAD, **CASES[case][1]}, bench.seconds)
            found.setdefault((case, server), []).append(sample)
        ours_hmac.append(hmac_us())
        ours_walk.append(walk_us())
    return rows_of(found, ours_hmac, ours_walk, java_hmac_us(bench.repetitions))


def rows_of(
    found: Mapping[tuple[str, str], Sequence[Sample]],
    ours_hmac: Sequence[float],
    ours_walk: Sequence[float],
    java_hmac: Sequence[float],
) -> list[Row]:
    rows = []
    for case in CASES:
        ours, java = found[case, "ours"], found[case, "java"]
        rates = " / ".join(figure(median(values(of, "tps"))) for of in (ours, java))
        cpu = values(ours, CPU), values(java, CPU)
        note = f"msg/s {rates}"
        name = f"{SAID}, {case}"
        rows.append(Row(name, "CPU-µs/msg", *cpu, errors=errors(ours, java), note=note))
    note = f"{sum(map(len, signed_parts()))} bytes; Java's as its AclSigner makes it"
    rows.append(Row("HMAC-SHA1 alone", "CPU-µs/msg", ours_hmac, java_hmac, note=note))
    rows.append(Row("proving a request, with the HMAC", "CPU-µs/msg", ours_walk))
    ours_share, java_share = (
        checks_percent(found[PLAIN, server], found[SIGNED, server], hmac)
        for server, hmac in (("ours", ours_hmac), ("java", java_hmac))
    )
    plain = median(values(found[PLAIN, "ours"], CPU))
    alone = [(walk - hmac) / plain * 100 for walk, hmac in zip(ours_walk, ours_hmac, strict=True)]
    differences = " / ".join(f"{figure(median(share))} %" for share in (ours_share, java_share))
    rows.append(
        Row(
            "the checks without the HMAC: (proving − HMAC) / plain",
            "%",
            alone,
            limit=CHECKS_PERCENT_MAX,
            errors=errors(*found.values()),
            note=f"(signed − plain − HMAC) / plain is {differences}",
        )
    )
    return rows


def checks_percent(
    plain: Sequence[Sample], signed: Sequence[Sample], hmac: Sequence[float]
) -> list[float]:
    """By repetition: what is neither a plain send nor the HMAC, in % of a plain send."""
    rounds = zip(values(plain, CPU), values(signed, CPU), hmac, strict=True)
    return [(after - before - alone) / before * 100 for before, after, alone in rounds if before]


def signed_parts() -> tuple[bytes, bytes]:
    """What a request of this load signs: values of the header, and the body."""
    options = argparse.Namespace(**LOAD, tag="TagA", batch=1, delay=0)
    options.topic = GUARDED_TOPIC
    ext, body = header_of(send_frame(options, 0, 0, ACCOUNT))
    return "".join(ext[name] for name in ext if name not in UNSIGNED_FIELDS).encode(), body


def hmac_us() -> float:
    from cosmodrome.speed.signed import native  # the other rows can do without compiled code

    first, second = signed_parts()
    began = time.process_time()
    native.hmac_sha1(ACCOUNT[1].encode(), first, second, plain=False, times=HMACS)
    return (time.process_time() - began) / HMACS * 1e6


def walk_us() -> float:
    """What `Signatures` takes for a request of this load, in reads of a window each."""
    from cosmodrome.speed.signed import native

    options = argparse.Namespace(**LOAD, **SIGN, topics=1, tag="TagA", batch=1, delay=0)
    ring, frame_bytes = make_ring(options)
    read_bytes = frame_bytes * int(str(LOAD["window"]))
    reads = [ring[at : at + read_bytes] for at in range(0, len(ring), read_bytes)]
    access_key, secret = ACCOUNT
    secrets = {access_key: secret.encode()}
    signatures = native.Signatures({CODE_SEND_V2: ("b",)}, secrets.get, lambda *_: True)
    requests = len(ring) // frame_bytes
    times = HMACS // requests + 1
    began = time.process_time()
    for _ in range(times):
        for read in reads:
            if signatures.proven_end(read, 0) != len(read):
                raise SystemExit("a signed request was not proven")
    return (time.process_time() - began) / (times * requests) * 1e6


def java_hmac_us(repetitions: int) -> list[float]:
    size = sum(map(len, signed_parts()))
    words = [ACCOUNT[1], str(size), str(HMACS), str(JAVA_WARM_S), str(repetitions)]
    source = ROOT / "bench" / "clients" / "HmacCost.java"
    command = [*java_command(*JAVA_HEAP), "-cp", class_path("server"), str(source), *words]
    done = subprocess.run(
        [*pinned(SERVER_CORE), *command], capture_output=True, text=True, check=True
    )
    return [float(each) for each in json.loads(done.stdout)]
