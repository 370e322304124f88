"""Names of topics and groups: what is allowed, and which ones mean something.

A name becomes a directory, so every name from outside passes through here first.
"""

from __future__ import annotations

import re

from cosmodrome.errors import Code, Refused
from cosmodrome.layout import TOPIC_BYTES_MAX

GROUP_CHARACTERS_MAX = 255
_ALLOWED = re.compile(r"[%|a-zA-Z0-9_-]+\Z")

RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
SYSTEM_PREFIX = "rmq_sys_"
SYSTEM_GROUP_PREFIX = "CID_RMQ_SYS_"
TOOLS_GROUP = "TOOLS_CONSUMER"  # of upstream's own tools; nobody relies on its progress
# Groups that every broker has for tools, in upstream's order.
BUILT_IN_GROUPS = (
    TOOLS_GROUP,
    "FILTERSRV_CONSUMER",
    "SELF_TEST_C_GROUP",
    "CID_ONS-HTTP-PROXY",
    "CID_ONSAPI_PULL",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_OWNER",
)
SYSTEM_GROUPS = frozenset({*BUILT_IN_GROUPS, "__MONITOR_CONSUMER"})  # nobody's consumers

AUTO_CREATE_TOPIC = "TBW102"
SELF_TEST_TOPIC = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC = "BenchmarkTest"
OFFSET_MOVED_TOPIC = "OFFSET_MOVED_EVENT"
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
TIMER_TOPIC = "rmq_sys_wheel_timer"
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_HALF_TOPIC = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
CHECK_MAX_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"
REPLY_TOPIC_SUFFIX = "_REPLY_TOPIC"

SYSTEM_TOPICS = frozenset(
    {
        AUTO_CREATE_TOPIC,
        SELF_TEST_TOPIC,
        BENCHMARK_TOPIC,
        OFFSET_MOVED_TOPIC,
        SCHEDULE_TOPIC,
        TRACE_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TOPIC,
    }
)

# Topics that only the broker itself may write to.
SEND_FORBIDDEN_TOPICS = frozenset(
    {
        SCHEDULE_TOPIC,
        TIMER_TOPIC,
        HALF_TOPIC,
        OP_HALF_TOPIC,
        CHECK_MAX_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
    }
)


def check_topic(name: str) -> None:
    _check("topic", name, TOPIC_BYTES_MAX)


def check_group(name: str) -> None:
    _check("group", name, GROUP_CHARACTERS_MAX)


def retry_topic(group: str) -> str:
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    return DLQ_PREFIX + group


def is_system_topic(name: str) -> bool:
    return name in SYSTEM_TOPICS or name.startswith(SYSTEM_PREFIX)


def is_system_group(name: str) -> bool:
    return name in SYSTEM_GROUPS or name.startswith(SYSTEM_GROUP_PREFIX)


def _check(kind: str, name: str, length_max: int) -> None:
    if not name:
        raise Refused(Code.SYSTEM_ERROR, f"The {kind} name is empty; give it a name.")
    if len(name) > length_max:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"The {kind} name has {len(name)} characters; shorten it to {length_max} or fewer.",
        )
    if not _ALLOWED.match(name):
        raise Refused(
            Code.SYSTEM_ERROR,
            f"The {kind} name {name[:64]!r} has characters that are not allowed;"
            " use letters, digits and the characters % | _ -",
        )
