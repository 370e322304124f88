"""The metrics of RocketMQ 5.x: each name is told with its labels, or left out with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cosmodrome.broker.operate import metric_table
from cosmodrome.cli.serve import worker_metrics
from cosmodrome.nameserver import metrics as nameserver_metrics
from cosmodrome.transport.http import exposition, process_metrics

ROOT = Path(__file__).parents[3]
SPEC = ROOT / "../shared/spec/06-beyond.md"

_LAG = "consumer_group topic is_retry is_system"
_STORAGE = "storage_type storage_medium"
# Names and labels of 5.x, counters and histograms as Prometheus shows them.
UPSTREAM = {
    "rocketmq_processor_watermark": "processor",
    "rocketmq_broker_permission": "",
    "rocketmq_topic_number": "",
    "rocketmq_consumer_group_number": "",
    "rocketmq_messages_in_total": "topic message_type is_system",
    "rocketmq_throughput_in_total": "topic message_type is_system",
    "rocketmq_messages_out_total": "topic consumer_group is_system is_retry",
    "rocketmq_throughput_out_total": "topic consumer_group is_system is_retry",
    "rocketmq_message_size": "topic message_type",
    "rocketmq_producer_connections": "language version protocol_type",
    "rocketmq_consumer_connections": (
        "consumer_group language version consume_mode protocol_type is_system"
    ),
    "rocketmq_consumer_lag_messages": _LAG,
    "rocketmq_consumer_lag_latency": _LAG,
    "rocketmq_consumer_inflight_messages": _LAG,
    "rocketmq_consumer_queueing_latency": _LAG,
    "rocketmq_consumer_ready_messages": _LAG,
    "rocketmq_send_to_dlq_messages_total": "consumer_group topic is_system",
    "rocketmq_commit_messages_total": "topic",
    "rocketmq_rollback_messages_total": "topic",
    "rocketmq_finish_message_latency": "topic",
    "rocketmq_half_messages": "topic",
    "rocketmq_topic_create_execution_time": "invocation_status",
    "rocketmq_consumer_group_create_execution_time": "invocation_status",
    "rocketmq_rpc_latency": "protocol_type request_code response_code is_long_polling result",
    "rocketmq_storage_size": _STORAGE,
    "rocketmq_storage_flush_behind_bytes": _STORAGE,
    "rocketmq_storage_dispatch_behind_bytes": _STORAGE,
    "rocketmq_storage_message_reserve_time": _STORAGE,
    "rocketmq_timer_enqueue_lag": "topic",
    "rocketmq_timer_enqueue_latency": "topic",
    "rocketmq_timer_dequeue_lag": "topic",
    "rocketmq_timer_dequeue_latency": "topic",
    "rocketmq_timing_messages": "topic",
    "rocketmq_timer_message_snapshot": "topic",
    "rocketmq_timer_enqueue_total": "topic",
    "rocketmq_timer_dequeue_total": "topic",
    "rocketmq_delay_message_latency": "topic",
    "rocketmq_pop_revive_in_message_total": "",
    "rocketmq_pop_revive_out_message_total": "",
    "rocketmq_pop_revive_retry_messages_total": "",
    "rocketmq_pop_revive_lag": "",
    "rocketmq_pop_revive_latency": "",
    "rocketmq_pop_offset_buffer_size": "",
    "rocketmq_pop_checkpoint_buffer_size": "",
    "rocketmq_pop_buffer_scan_time_consume": "",
    "rocketmq_proxy_up": "proxy_mode",
}
EVERYWHERE = (
    metric_table.TABLE,
    nameserver_metrics.TABLE,
    process_metrics.TABLE,
    exposition.TABLE,
    worker_metrics.TABLE,
)
METRICS = [metric for table in EVERYWHERE for metric in table]
SERVED = {metric.name: metric for metric in metric_table.TABLE}


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_name_of_upstream_is_served_with_its_labels_or_has_a_reason(name: str) -> None:
    metric = SERVED.get(name)
    assert (metric is None) == (name in metric_table.UNSERVED)
    if metric is not None:
        left_out = metric_table.LEFT_OUT.get(name, ("", ""))[0]
        assert set(metric.labels) == set(UPSTREAM[name].split()) - {left_out}


def test_nothing_else_has_the_name_of_upstream() -> None:
    ours = {name for name in SERVED if name.startswith("rocketmq_")}
    assert ours <= set(UPSTREAM)
    assert set(metric_table.LEFT_OUT) <= ours


def test_the_list_above_is_the_one_of_the_specification() -> None:
    if not SPEC.exists():
        pytest.skip("the specification is not beside this repository")
    text = SPEC.read_text().split("## 1. Metrics")[1].split("The older separate exporter")[0]
    parts = re.findall(r"(?<![A-Za-z0-9])(?:rocketmq)?_[a-z_]+", text.split("| metric |")[1])
    known = [*UPSTREAM, *metric_table.UNSERVED]
    missing = [part for part in parts if not any(name.endswith(part) for name in known)]
    # `rocketmq_storage_` and `rocketmq_storage_…` are how the text abbreviates.
    assert [part for part in missing if part != "rocketmq_storage_"] == []
    for name in UPSTREAM:
        said = [part for part in parts if name.endswith(part) and len(part) > 3]
        assert said, f"{name} is not in the specification"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_help_are_in_order(metric: exposition.Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.help.endswith(".") and "\n" not in metric.help and "\\" not in metric.help
    assert len(set(metric.labels)) == len(metric.labels)
    assert not set(metric.labels) & {*exposition.NODE_LABELS, "le"}


def test_a_name_has_one_kind_everywhere() -> None:
    kinds: dict[str, set[tuple[str, tuple[str, ...]]]] = {}
    for metric in METRICS:
        kinds.setdefault(metric.name, set()).add((metric.kind, metric.labels))
    assert [name for name, seen in kinds.items() if len(seen) > 1] == []
    assert len(SERVED) == len(metric_table.TABLE)


def test_the_document_is_current() -> None:
    from tools.metric_docs import DOCUMENT, render

    assert DOCUMENT.read_text() == render(DOCUMENT.read_text()), "run `make docs`"
