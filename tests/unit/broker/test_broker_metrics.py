"""What a broker and a name server tell when scraped, after real traffic over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.later_kit import SetClock
from tests.unit.broker.metrics_kit import Node, node

from cosmodrome.broker.announce import Announce
from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.counts.slow_requests import SlowSends
from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.operate import metric_table, runtime_info
from cosmodrome.broker.operate.metrics import extra_labels
from cosmodrome.cli.serve import worker_metrics
from cosmodrome.errors import ConfigError
from cosmodrome.nameserver import metrics as nameserver_metrics
from cosmodrome.transport.http import exposition, process_metrics
from cosmodrome.wire import commands

ROOT = Path(__file__).parents[3]
BOARD = ROOT / "deploy" / "grafana" / "cosmodrome.json"
RULES = [ROOT / "deploy" / "prometheus" / name for name in ("alerts.yml", "alerts_test.yml")]
OPEN = "application/openmetrics-text; version=1.0.0"


async def test_every_metric_of_the_tables_is_told(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await running.everything()
        await running.nameserver._values.put("N", "k", "v")
        scrape = await running.scrape()
        tables = (
            metric_table.TABLE,
            nameserver_metrics.TABLE,
            process_metrics.TABLE,
            exposition.TABLE,
        )
        names = {re.sub("_(bucket|count|sum)$", "", name) for name in scrape.names}
        missing = {metric.name for table in tables for metric in table} - names
        # Those of a pair, which are no metrics of one node, are in test_broker_replication_view,
        # and that of a certificate is in test_broker_tls.
        assert {name for name in missing if not re.search("_(replication|tls)_", name)} == set()
        declared = {metric.name: metric for table in tables for metric in table}
        for name, labels, _ in scrape.samples:
            metric = declared[re.sub("_(bucket|count|sum)$", "", name)]
            own = set(labels) - {*exposition.NODE_LABELS, "le"}
            assert own == set(metric.labels), name
        # A page of either format tells the same.
        openly = await running.scrape(OPEN)
        assert openly.text.endswith("# EOF\n")
        assert scrape.names - openly.names == {"rocketmq_rpc_latency_count"}


async def test_board_and_alerts_use_only_what_is_told(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await running.everything()
        scrape = await running.scrape()
    of_pairs = [metric for metric in metric_table.TABLE if "_replication_" in metric.name]
    told = scrape.names | {metric.name for metric in (*worker_metrics.TABLE, *of_pairs)}
    labels = {label for _, has, _ in scrape.samples for label in has} | {
        *(label for metric in of_pairs for label in metric.labels),
        "worker",
        "instance",
        "job",
    }
    board = json.loads(BOARD.read_text())
    expressions = [text for panel in board["panels"] for text in _expressions(panel)]
    expressions += [item["query"]["query"] for item in board["templating"]["list"][1:]]
    assert len(expressions) > 40
    texts = [*expressions, *(path.read_text() for path in RULES)]
    for text in texts:
        used = set(re.findall(r"\b(?:rocketmq|cosmodrome|process)_[a-z0-9_]+\b", text))
        assert used - told == set()
        for inside in re.findall(r"\b(?:by|on|ignoring|without) \(([^)]*)\)", text):
            assert set(inside.replace(" ", "").split(",")) <= labels, text
        for name in re.findall(r'[{,]\s*([a-z_]+)\s*(?:=~|!=|=)\s*"', text):
            assert name in labels, text
        for name in re.findall(r"\{\{ ?(?:\$labels\.)?([a-z_]+) ?\}\}", text):
            assert name in labels, text
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    alerts = re.findall(r"alert: (\w+)", RULES[0].read_text())
    assert len(set(alerts)) == len(alerts) > 20
    assert set(re.findall(r"alertname: (\w+)", RULES[1].read_text())) <= set(alerts)


def _expressions(panel: dict[str, Any]) -> Iterator[str]:
    for target in panel.get("targets", ()):
        yield f"{target['expr']} {target['legendFormat']}"


async def test_traffic_is_counted_by_topic_and_group(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await running.everything()
        scrape = await running.scrape()
        topic = {"topic": "T", "is_system": "false", "node_id": "b"}
        # Five plain ones, and the committed one.
        assert scrape.get("rocketmq_messages_in_total", **topic) == 6
        assert scrape.get("rocketmq_throughput_in_total", **topic) == sum(
            value
            for name, has, value in scrape.samples
            if name == "rocketmq_throughput_in_total" and has["topic"] == "T"
        )
        delayed = scrape.get(
            "rocketmq_messages_in_total", topic="SCHEDULE_TOPIC_XXXX", message_type="delay"
        )
        assert delayed == 1
        group = {"topic": "T", "consumer_group": "G", "is_retry": "false"}
        assert scrape.get("rocketmq_messages_out_total", **group) == 3
        assert scrape.get("rocketmq_commit_messages_total", topic="T") == 1
        assert scrape.get("rocketmq_rollback_messages_total", topic="T") == 1
        assert scrape.get("rocketmq_finish_message_latency_count", topic="T") == 2
        assert scrape.get("rocketmq_finish_message_latency_bucket", topic="T", le="5000") == 2
        assert scrape.get("rocketmq_send_to_dlq_messages_total", consumer_group="G") == 1
        assert scrape.get("cosmodrome_messages_retried_total") == 1
        assert scrape.get("cosmodrome_delay_level_messages", level="18") == 2
        assert scrape.get("cosmodrome_delay_level_late_seconds", level="18") == 0
        assert scrape.get("rocketmq_timing_messages") == 1
        assert scrape.get("rocketmq_rpc_latency_count", request_code="send_message") == 9
        assert (
            scrape.get("rocketmq_rpc_latency_bucket", le="+Inf", request_code="send_message") == 9
        )
        sends = scrape.get("cosmodrome_requests_total", request_code="send_message_v2")
        assert sends == 9
        assert scrape.get("cosmodrome_store_messages_total") == 14


async def test_lag_in_messages_and_seconds(tmp_path: Path) -> None:
    clock = SetClock()
    async with node(tmp_path, clock) as running:
        for _ in range(5):
            await running.send("T", 1)
        await running.commit("G", "T", 1, 2)
        await running.commit("Done", "T", 1, 5)
        await running.commit("Lost", "T", 1, 77)
        clock.ms += 90_000
        scrape = await running.scrape()
        group = {"consumer_group": "G", "topic": "T", "is_retry": "false", "is_system": "false"}
        assert scrape.get("rocketmq_consumer_lag_messages", **group) == 3
        seconds = scrape.get("cosmodrome_consumer_lag_seconds", **group)
        latency_ms = scrape.get("rocketmq_consumer_lag_latency", **group)
        assert (seconds, latency_ms) == (90, 90_000)
        assert scrape.get("rocketmq_consumer_inflight_messages", **group) is None, "nobody pulled"
        done = {"consumer_group": "Done"}
        assert scrape.get("rocketmq_consumer_lag_messages", **done) == 0
        assert scrape.get("cosmodrome_consumer_lag_seconds", **done) == 0
        lost = {"consumer_group": "Lost"}
        for name in ("rocketmq_consumer_lag_messages", "cosmodrome_consumer_lag_seconds"):
            assert scrape.get(name, **lost) is None, "what is not known is not 0"
        assert scrape.get("cosmodrome_consumer_unknown_queues", **lost) == 1

        await running.pull("G", "T", 1, 2, 2)
        scrape = await running.scrape()
        assert scrape.get("rocketmq_consumer_inflight_messages", **group) == 2
        assert scrape.get("rocketmq_consumer_ready_messages", **group) == 1
        assert scrape.get("rocketmq_consumer_queueing_latency", **group) is not None


async def test_a_topic_made_anew_does_not_show_old_ages(tmp_path: Path) -> None:
    clock = SetClock()
    async with node(tmp_path, clock) as running:
        await running.send("T")
        await running.commit("G", "T", 0, 0)
        clock.ms += 90_000
        old = (await running.scrape()).get("cosmodrome_consumer_lag_seconds", consumer_group="G")
        await running.channel.call(commands.DeleteTopicInBroker(topic="T"))
        await running.send("T")
        await running.commit("G", "T", 0, 0)
        scrape = await running.scrape()
        new = scrape.get("cosmodrome_consumer_lag_seconds", consumer_group="G")
        assert (old, new) == (90, 0)
        assert scrape.get("rocketmq_messages_in_total", topic="T") == 1


async def test_members(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await running.heart_beat("G", "T")
        scrape = await running.scrape()
        found = [
            (has, value)
            for name, has, value in scrape.samples
            if name in ("rocketmq_producer_connections", "rocketmq_consumer_connections")
        ]
        assert [value for _, value in found] == [1, 1]
        producer, consumer = (has for has, _ in found)
        assert producer["protocol_type"] == "remoting"
        assert re.fullmatch(r"v4_9_\d", producer["version"])
        assert (consumer["consumer_group"], consumer["consume_mode"]) == ("G", "push")
        assert scrape.get("cosmodrome_connections", node_type="broker") == 1


async def test_the_number_of_series_is_bounded(tmp_path: Path) -> None:
    async with node(tmp_path, metrics_series_max=150) as running:
        for number in range(60):
            await running.send(f"T{number}")
            await running.commit("G", f"T{number}", 0, 0)
        scrape = await running.scrape()
        assert len(scrape.samples) <= 153
        dropped = scrape.get("cosmodrome_scrape_dropped_series_total")
        assert dropped is not None and dropped > 100
        assert scrape.get("cosmodrome_ready", node_type="broker") == 1, "what matters most stays"
        await running.channel.call(commands.UpdateBrokerConfig(body=b"metricsSeriesMax=5000\n"))
        scrape = await running.scrape()
        assert len([name for name in scrape.samples if "lag_messages" in name[0]]) == 60
        assert scrape.get("cosmodrome_scrape_dropped_series_total") == dropped


async def test_nothing_is_told_of_a_broker_that_does_not_run(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await running.broker.stop()
        scrape = await running.scrape()
        assert not [name for name in scrape.names if name.startswith("rocketmq_")]
        assert scrape.get("cosmodrome_ready", node_type="nameserver") == 1
        assert scrape.get("cosmodrome_build_info") == 1


async def test_the_name_server(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        scrape = await running.scrape()
        assert scrape.get("cosmodrome_nameserver_brokers", broker_cluster="DefaultCluster") == 1
        silence = scrape.get("cosmodrome_nameserver_broker_silence_seconds", broker_name="b")
        assert silence is not None and 0 <= silence < 60
        asked = {"node_type": "nameserver", "request_code": "register_broker"}
        assert (scrape.get("cosmodrome_requests_total", **asked) or 0) >= 1
        topics = scrape.get("cosmodrome_nameserver_topics")
        assert topics == scrape.get("rocketmq_topic_number")


async def test_requests_are_served_while_many_groups_are_walked(tmp_path: Path) -> None:
    async with node(tmp_path) as running:
        await _many(running, topics=20, groups=60)
        # CPU time without the collector of a large test process: what is counted is ours.
        longest, turns, done = 0.0, 0, False

        async def watch() -> None:
            nonlocal longest, turns
            last = time.thread_time()
            while not done:
                await asyncio.sleep(0)
                now = time.thread_time()
                longest, last, turns = max(longest, now - last), now, turns + 1

        gc.collect()
        gc.disable()
        watcher = asyncio.create_task(watch())
        page = await running.page()
        done = True
        await watcher
        gc.enable()
        lags = b"".join(page.chunks).count(b"\nrocketmq_consumer_lag_messages{")
        assert lags == 20 * 60
        assert turns > 5
        assert longest < 0.02  # slices are 2 ms


async def _many(running: Node, *, topics: int, groups: int) -> None:
    for number in range(topics):
        await running.send(f"T{number}")
        for group in range(groups):
            await running.commit(f"G{group}", f"T{number}", 0, 0)


def test_extra_labels() -> None:
    assert extra_labels("") == {}
    assert extra_labels("zone:eu, team:pay:ments") == {"zone": "eu", "team": "pay:ments"}
    for wrong in ("zone", "1:x", "__x:y", "topic:x", "node_id:x", "le:1", "a-b:c"):
        with pytest.raises(ConfigError, match="metricsLabel"):
            extra_labels(wrong)
    with pytest.raises(ConfigError, match="at most"):
        extra_labels(",".join(f"l{number}:x" for number in range(17)))


async def test_extra_labels_are_on_every_series_of_the_broker(tmp_path: Path) -> None:
    async with node(tmp_path, metrics_label="zone:eu") as running:
        scrape = await running.scrape()
        broker = [has for _, has, _ in scrape.samples if has["node_type"] == "broker"]
        assert broker and all(has["zone"] == "eu" for has in broker)


# --- slow requests -------------------------------------------------------------------------------


def test_times_of_sends_since_the_start() -> None:
    times = PutTimes()
    for ms in (0, 0, 2, 9, 10, 99, 100, 2500):
        times.add_ms(ms)
    counts = [2, 3, 3, 3, 4, 7, 7, 7, 8, 8]
    assert times.below((1, 3, 5, 7, 10, 100, 1000, 2000, 3000)) == counts
    for _ in range(3):
        times.turn()
    assert times.below((1, 3, 5, 7, 10, 100, 1000, 2000, 3000)) == counts, (
        "windows end, counts stay"
    )
    assert [times.longer_than(ms) for ms in (1, 100, 1000, 3000, 99_999)] == [6, 1, 1, 0, 0]


def test_slow_sends_of_the_fast_lane_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    times, stats, limit_ms = PutTimes(), Stats(), 1000
    watch = SlowSends(times, stats, lambda: limit_ms)
    watch.look()
    times.add_ms(1500, 3)
    times.add_ms(20, 100)
    watch.look()
    assert "slow_sends count=3 longer_than_ms=1000 longest_ms=1500" in caplog.text
    stats.got("G", "T", 0, 1, 10, took_ms=1200, next_offset=1)
    caplog.clear()
    watch.look()
    assert "slow_pull took_ms=1200" in caplog.text and "count=" not in caplog.text
    caplog.clear()
    watch.look()
    limit_ms = 10  # what was slow before is nothing new
    watch.look()
    limit_ms = 0
    times.add_ms(9000)
    watch.look()
    assert caplog.text == ""


async def test_a_broker_looks_for_slow_sends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_info, "SAMPLE_SECONDS", 0.02)
    async with node(tmp_path) as running:
        running.broker._rooms.send.put_times.add_ms(5000)
        async with asyncio.timeout(20):
            while "slow_sends count=1 longer_than_ms=1000" not in caplog.text:
                await asyncio.sleep(0.02)


async def test_slow_requests_are_counted_and_logged_with_their_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def announced(self: Announce) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(Announce, "announced", announced)
    async with node(tmp_path, slow_request_millis=20) as running:
        create = commands.UpdateAndCreateTopic(
            topic="Slow",
            default_topic="TBW102",
            read_queue_nums=1,
            write_queue_nums=1,
            perm=6,
            topic_filter_type="SINGLE_TAG",
            topic_sys_flag=0,
            order=False,
        )
        await running.channel.call(create)
        scrape = await running.scrape()
        asked = {"request_code": "update_and_create_topic"}
        assert scrape.get("cosmodrome_slow_requests_total", **asked) == 1
        line = next(line for line in caplog.messages if line.startswith("slow_request "))
        assert "request=UPDATE_AND_CREATE_TOPIC code=17 took_ms=" in line
        assert "peer=127.0.0.1:" in line

        # A pull on hold waits because its client asked for it.
        before = caplog.text.count("slow_request ")
        reply = await running.channel.call(
            commands.PullMessage(
                consumer_group="G",
                topic="Slow",
                queue_id=0,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=6,
                commit_offset=0,
                suspend_timeout_millis=50,
                subscription="*",
                sub_version=0,
            )
        )
        assert reply.code == 19 and caplog.text.count("slow_request ") == before
        await running.channel.call(commands.UpdateBrokerConfig(body=b"slowRequestMillis=0\n"))
        await running.channel.call(create)
        again = (await running.scrape()).get("cosmodrome_slow_requests_total", **asked)
        assert again == 1
