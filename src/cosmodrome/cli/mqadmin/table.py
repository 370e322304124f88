"""What upstream's `mqadmin` can do, and what does it here. A row is one command of 4.9.8.

A row has upstream's flags and one of three ways: `verbs` are templates of `cosmo` commands; `call`
names a coroutine for what no verb does alone (`groups:producers` is in `groups.py`);
`instead` says what to use when there is nothing of the kind. The commands, their help and
docs/mqadmin.md are derived from here.

Flags are written `b=brokerAddr`; `t!=topic` must be given, `m~=moreStats` takes no value. In a
template `{t}` is the value of -t, and a part in brackets is left out unless its flag was given. The
first template whose condition holds is used: "g d" when both are given, "m=get" when -m is get.
Where values may begin with a dash, they are behind `--`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

COUNT_ALL = 100_000


class Flag(NamedTuple):
    letter: str
    name: str
    required: bool
    takes_value: bool


class Row(NamedTuple):
    name: str
    does: str
    flags_text: str = ""
    verbs: tuple[tuple[str, str], ...] = ()
    call: str = ""
    instead: str = ""
    one_of: str = ""  # letters of which exactly one must be given
    each: str = ""  # the letter whose value may be a list with commas: the verb runs for each
    unused: Mapping[str, str] = {}  # letters that are taken and change nothing, and why

    @property
    def flags(self) -> tuple[Flag, ...]:
        return tuple(_flag(text) for text in self.flags_text.split())


def _flag(text: str) -> Flag:
    letter, _, name = text.partition("=")
    return Flag(letter[0], name, required=letter.endswith("!"), takes_value=letter[-1] != "~")


_WHERE = "b=brokerAddr c=clusterName"
_WHOLE = "bodies that are UTF-8 are shown as text, others as base64 (--output json)"
_ALWAYS = "messages are always shown with their bodies"
_ASKED_ANYWAY = "all brokers are always asked"

ROWS = (
    # --- topics ----------------------------------------------------------------------------------
    Row(
        "updateTopic",
        "Create a topic. If it exists, replace all its settings.",
        f"{_WHERE} t!=topic r=readQueueNums w=writeQueueNums p=perm o=order u=unit s=hasUnitSub",
        call="topics:update_topic",
        one_of="bc",
    ),
    Row(
        "deleteTopic",
        "Delete a topic from brokers and name servers.",
        "t!=topic c!=clusterName",
        verbs=(("", "topic delete {t} --cluster {c} --yes"),),
    ),
    Row(
        "updateTopicPerm",
        "Change who may read and write a topic.",
        f"{_WHERE} t!=topic p!=perm",
        call="topics:update_topic_perm",
        one_of="bc",
    ),
    Row(
        "topicRoute",
        "Brokers and queues that clients of a topic use.",
        "t!=topic l~=list",
        verbs=(("", "topic route {t}"),),
        unused={"l": "the output is always a table; --output chooses another form"},
    ),
    Row(
        "topicStatus",
        "First and last offset of every queue.",
        "t!=topic",
        verbs=(("", "topic describe {t} --queues"),),
    ),
    Row(
        "topicClusterList",
        "Clusters that have a topic.",
        "t!=topic",
        verbs=(("", "topic route {t}"),),
    ),
    Row(
        "topicList",
        "All topics.",
        "c~=clusterModel",
        verbs=(("c", "topic stats"), ("", "topic list --all")),
    ),
    Row(
        "updateOrderConf",
        "Show or change the numbers of queues that name servers keep for an ordered topic.",
        "t!=topic v=orderConf m!=method",
        verbs=(
            ("m=get", "namesrv kv get -- ORDER_TOPIC_CONFIG {t}"),
            ("m=put v", "namesrv kv set -- ORDER_TOPIC_CONFIG {t} {v}"),
            ("m=delete", "namesrv kv delete --yes -- ORDER_TOPIC_CONFIG {t}"),
        ),
    ),
    Row(
        "allocateMQ",
        "How these clients would share the queues of a topic.",
        "t!=topic i!=ipList",
        call="topics:allocate",
    ),
    Row(
        "statsAll",
        "Messages that go into topics and out to groups.",
        "a~=activeTopic t=topic",
        verbs=(("t", "topic stats {t}"), ("", "topic stats")),
        unused={"a": "topics without traffic are shown as well"},
    ),
    # --- groups ----------------------------------------------------------------------------------
    Row(
        "updateSubGroup",
        "Create a group. If it exists, replace all its settings.",
        f"{_WHERE} g!=groupName s=consumeEnable m=consumeFromMinEnable d=consumeBroadcastEnable"
        " q=retryQueueNums r=retryMaxTimes i=brokerId w=whichBrokerWhenConsumeSlowly"
        " a=notifyConsumerIdsChanged",
        call="groups:update_group",
        one_of="bc",
    ),
    Row(
        "deleteSubGroup",
        "Delete a group; with -c also its retry and dead-letter topics.",
        f"{_WHERE} g!=groupName r=removeOffset",
        call="groups:delete_group",
        one_of="bc",
    ),
    Row(
        "getConsumerConfig",
        "Settings of a group on each broker.",
        "g!=groupName",
        call="groups:group_config",
    ),
    Row(
        "consumerProgress",
        "Lag of consumer groups.",
        "g=groupName s=showClientIP",
        verbs=(
            ("g s=true", "group lag {g} --output wide"),
            ("g", "group lag {g}"),
            ("", "group list"),
        ),
    ),
    Row(
        "consumerConnection",
        "Members and subscriptions of a group.",
        "g!=consumerGroup b=brokerAddr",
        verbs=(("", "group describe {g}"),),
        unused={"b": _ASKED_ANYWAY},
    ),
    Row(
        "consumerStatus",
        "What members of a group report about themselves.",
        "g!=consumerGroup i=clientId b=brokerAddr s~=jstack",
        verbs=(("s", "client stack {g} [{i}]"),),
        call="groups:running_info",
        unused={"b": _ASKED_ANYWAY},
    ),
    Row(
        "producerConnection",
        "Members of a producer group.",
        "g!=producerGroup t!=topic",
        verbs=(("", "client list --role producer --group {g}"),),
        unused={"t": _ASKED_ANYWAY},
    ),
    Row("producer", "Producers that a broker knows.", "b!=broker", call="groups:producers"),
    Row(
        "resetOffsetByTime",
        "Move a group to a time.",
        "g!=group t!=topic s!=timestamp f=force c~=cplus",
        call="groups:reset_offset",
        unused={"c": "every member is notified in the form that it can read"},
    ),
    Row(
        "skipAccumulatedMessage",
        "Skip everything that a group has not consumed.",
        "g!=group t!=topic f=force",
        verbs=(("", "group skip {g} --topic {t} --yes"),),
        unused={"f": "skipping always moves forwards, as with -f true"},
    ),
    Row(
        "cloneGroupOffset",
        "Give one group the progress of another.",
        "s!=srcGroup d!=destGroup t!=topic o=offline",
        verbs=(("", "group clone {s} {d} --topic {t} --yes"),),
        unused={"o": "brokers ignore it"},
    ),
    # --- messages --------------------------------------------------------------------------------
    Row(
        "queryMsgById",
        "Show a message by its offset id, or send it again.",
        "i!=msgId g=consumerGroup d=clientId s=sendMessage u=unitName",
        verbs=(
            ("g d", "msg resend {i} --group {g} --client {d} --yes"),
            ("s=true", "msg resend {i} --yes"),
            ("", "msg get {i}"),
        ),
        each="i",
        unused={"u": "units make no difference here"},
    ),
    Row(
        "queryMsgByKey",
        "Messages with a key.",
        "t!=topic k!=msgKey",
        verbs=(("", "msg find {t} --key {k} --count 64"),),
    ),
    Row(
        "queryMsgByUniqueKey",
        "Show a message by the unique id from its sender.",
        "i!=msgId g=consumerGroup d=clientId t!=topic a~=showAll",
        verbs=(
            ("g d", "msg resend {i} --topic {t} --group {g} --client {d} --yes"),
            ("", "msg get {i} --topic {t}"),
        ),
        unused={"a": "only the message that was stored first is shown"},
    ),
    Row(
        "queryMsgByOffset",
        "The message at an offset of a queue.",
        "t!=topic b!=brokerName i!=queueId o!=offset",
        verbs=(("", "msg print {t} --broker {b} --queue {i} --from {o} --count 1"),),
    ),
    Row(
        "queryMsgTraceById",
        "What clients traced about a message.",
        "i!=msgId t=traceTopic",
        verbs=(("", "msg trace {i} [--trace-topic {t}]"),),
    ),
    Row(
        "printMsg",
        "Messages of a topic.",
        "t!=topic c=charsetName s=subExpression b=beginTimestamp e=endTimestamp d=printBody",
        verbs=(
            ("", f"msg print {{t}} [--tag {{s}}] [--from {{b}}] [--to {{e}}] --count {COUNT_ALL}"),
        ),
        unused={"c": _WHOLE, "d": _ALWAYS},
    ),
    Row(
        "printMsgByQueue",
        "Messages of one queue.",
        "t!=topic a!=brokerName i!=queueId c=charsetName s=subExpression b=beginTimestamp"
        " e=endTimestamp p=print d=printBody f=calculate",
        verbs=(
            (
                "",
                "msg print {t} --broker {a} --queue {i} [--tag {s}] [--from {b}] [--to {e}]"
                f" --count {COUNT_ALL}",
            ),
        ),
        unused={"c": _WHOLE, "p": _ALWAYS, "d": _ALWAYS, "f": "to count tags, use --output jsonl"},
    ),
    Row(
        "consumeMessage",
        "Messages of a topic, starting at an offset or a time.",
        "t!=topic b=brokerName i=queueId o=offset g=consumerGroup s=beginTimestamp"
        " e=endTimestamp c=MessageNumber",
        verbs=(
            ("o", "msg print {t} --broker {b} --queue {i} --from {o} [--to {e}] [--count {c}]"),
            (
                "",
                "msg print {t} [--broker {b}] [--queue {i}] [--from {s}] [--to {e}] [--count {c}]",
            ),
        ),
        unused={"g": "no progress is stored for any group"},
    ),
    Row(
        "sendMessage",
        "Send one message.",
        "t!=topic p!=body k=key c=tags b=broker i=qid m=msgTraceEnable",
        call="messages:send_message",
    ),
    Row(
        "sendMsgStatus",
        "Send messages to a broker, and time them.",
        "b!=brokerName s=messageSize c=count",
        call="messages:time_broker",
    ),
    Row(
        "checkMsgSendRT",
        "Send messages to a topic, and time them.",
        "t!=topic a=amount s=size",
        call="messages:time_topic",
    ),
    Row(
        "queryCq",
        "Entries of a consume queue.",
        "t!=topic q!=queue i!=index c=count b=broker g=consumer",
        call="messages:queue_entries",
    ),
    # --- brokers and clusters --------------------------------------------------------------------
    Row(
        "clusterList",
        "Every broker and how busy it is.",
        "m~=moreStats i=interval",
        verbs=(
            ("m i", "cluster status --output wide --watch={i}"),
            ("i", "cluster status --watch={i}"),
            ("m", "cluster status --output wide"),
            ("", "cluster status"),
        ),
    ),
    Row(
        "clusterRT",
        "Send messages to every broker, and time them.",
        "a=amount s=size c=cluster p=print m=machine i=interval",
        call="messages:time_cluster",
        unused={
            "p": "--output chooses the form",
            "m": "it was only printed in the output",
            "i": "there is only one round",
        },
    ),
    Row(
        "brokerStatus",
        "Figures of running brokers.",
        _WHERE,
        verbs=(("", "broker stats [--broker {b}] [--cluster {c}]"),),
        one_of="bc",
    ),
    Row(
        "brokerConsumeStats",
        "Progress of every group of a broker.",
        "b!=brokerAddr t=timeoutMillis l=level o=order",
        call="brokers:consume_stats",
        unused={"t": "use --timeout, in seconds"},
    ),
    Row(
        "getBrokerConfig",
        "Settings of running brokers.",
        _WHERE,
        verbs=(("", "broker config get [--broker {b}] [--cluster {c}]"),),
        one_of="bc",
    ),
    Row(
        "updateBrokerConfig",
        "Change a setting of running brokers.",
        f"{_WHERE} k!=key v!=value",
        verbs=(("", "broker config set {k}={v} [--broker {b}] [--cluster {c}]"),),
        one_of="bc",
    ),
    Row(
        "cleanExpiredCQ",
        "Drop queue files whose messages are gone.",
        "b=brokerAddr c=cluster",
        call="brokers:clean_queues",
    ),
    Row(
        "cleanUnusedTopic",
        "Drop queues on disk that belong to no topic.",
        "b=brokerAddr c=cluster",
        call="brokers:clean_topics",
    ),
    Row(
        "deleteExpiredCommitLog",
        "Drop expired log files now.",
        "b=brokerAddr c=cluster",
        call="brokers:delete_expired",
    ),
    # --- name servers ----------------------------------------------------------------------------
    Row(
        "wipeWritePerm",
        "Take a broker out of the routes for writing.",
        "b!=brokerName",
        call="brokers:wipe_write_perm",
    ),
    Row(
        "addWritePerm",
        "Put a broker back into the routes for writing.",
        "b!=brokerName",
        call="brokers:add_write_perm",
    ),
    Row(
        "updateKvConfig",
        "Set an entry of the name servers' table.",
        "s!=namespace k!=key v!=value",
        verbs=(("", "namesrv kv set -- {s} {k} {v}"),),
    ),
    Row(
        "deleteKvConfig",
        "Delete an entry of the name servers' table.",
        "s!=namespace k!=key",
        verbs=(("", "namesrv kv delete --yes -- {s} {k}"),),
    ),
    Row(
        "getNamesrvConfig",
        "Settings of running name servers.",
        verbs=(("", "namesrv config get"),),
    ),
    Row(
        "updateNamesrvConfig",
        "Change a setting of running name servers.",
        "k!=key v!=value",
        verbs=(("", "namesrv config set {k}={v}"),),
    ),
    # --- not here --------------------------------------------------------------------------------
    Row(
        "startMonitoring",
        "Watch groups all the time.",
        instead="`cosmo check` is for monitoring systems and `cosmo top` for people;"
        " `cosmo group list --watch` shows the lag of groups",
    ),
    Row(
        "exportConfigs",
        "Write settings of brokers to a file.",
        "c!=clusterName f=filePath",
        instead="`cosmo broker config get --output json` prints them, `cosmo bundle` collects all",
    ),
    Row(
        "exportMetadata",
        "Write topics and groups to a file.",
        "c=clusterName b=brokerAddr f=filePath t~=topic g~=subscriptionGroup s~=specialTopic",
        instead="`cosmo topic list --all --output json` and `cosmo group list --all --output json`"
        " print them",
    ),
    Row(
        "exportMetrics",
        "Write figures of brokers to a file.",
        "c!=clusterName f=filePath",
        instead="`cosmo broker stats --output json` and `cosmo topic stats --output json` print"
        " them",
    ),
    Row(
        "updateAclConfig",
        "Change an account.",
        f"{_WHERE} a!=accessKey s!=secretKey w=whiteRemoteAddress i=defaultTopicPerm"
        " u=defaultGroupPerm t=topicPerms g=groupPerms m=admin",
        verbs=(
            (
                "",
                "acl set [--white {w}] [--default-topic {i}] [--default-group {u}] [--topics {t}]"
                " [--groups {g}] [--admin {m}] [--broker {b}] [--cluster {c}] --secret-key {s}"
                " -- {a}",
            ),
        ),
        one_of="bc",
    ),
    Row(
        "deleteAclConfig",
        "Delete an account.",
        f"{_WHERE} a!=accessKey",
        verbs=(("", "acl delete [--broker {b}] [--cluster {c}] --yes -- {a}"),),
        one_of="bc",
    ),
    Row(
        "clusterAclConfigVersion",
        "Versions of the accounts' files.",
        _WHERE,
        verbs=(("", "acl versions [--broker {b}] [--cluster {c}]"),),
        one_of="bc",
    ),
    Row(
        "updateGlobalWhiteAddr",
        "Addresses that need no account.",
        f"{_WHERE} g!=globalWhiteRemoteAddresses p=aclFileFullPath",
        verbs=(("", "acl white --set {g} [--file {p}] [--broker {b}] [--cluster {c}]"),),
        one_of="bc",
    ),
)
BY_NAME = {row.name.lower(): row for row in ROWS}
