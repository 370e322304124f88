"""JSON bodies: every client's habits in, upstream's bytes out."""

from __future__ import annotations

import pytest
from tests.goldens import Golden, each_golden

from cosmodrome.errors import ProtocolError
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    BrokerData,
    ClusterInfo,
    ConsumerOffsetSerializeWrapper,
    ConsumeStats,
    DataVersion,
    HeartbeatData,
    KVTable,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    OffsetWrapper,
    QueueData,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfigSerializeWrapper,
    TopicRouteData,
    TopicStatsTable,
    decode,
    encode,
)

QUEUE = MessageQueue(broker_name="b", queue_id=3, topic="T")


class TestHeartbeats:
    def test_java(self) -> None:
        beat = decode(
            HeartbeatData,
            b'{"clientID":"c","consumerDataSet":[{"consumeFromWhere":"CONSUME_FROM_FIRST_OFFSET",'
            b'"consumeType":"CONSUME_PASSIVELY","groupName":"CG","messageModel":"CLUSTERING",'
            b'"subscriptionDataSet":[{"classFilterMode":false,"codeSet":[2598919],'
            b'"expressionType":"TAG","subString":"TagA","subVersion":5,"tagsSet":["TagA"],'
            b'"topic":"T"}],"unitMode":false}],"heartbeatFingerprint":0,'
            b'"producerDataSet":[{"groupName":"PG"}],"withoutSub":false}',
        )
        assert beat.client_id == "c"
        assert [group.group_name for group in beat.producer_data_set] == ["PG"]
        (group,) = beat.consumer_data_set
        assert group.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
        assert group.subscription_data_set[0].code_set == [2598919]

    def test_go_sends_hashes_as_text_over_utf8(self) -> None:
        beat = decode(
            HeartbeatData,
            b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":"consume_actively",'
            b'"messageModel":"Clustering","subscriptionDataSet":[{"topic":"T","subString":"\xe4\xb8\xad'
            b'\xe6\x96\x87","subVersion":1700000000000000000,"tagsSet":["\xe4\xb8\xad\xe6\x96\x87"],'
            b'"codeSet":["12345"]}]}],"producerDataSet":null}',
        )
        (group,) = beat.consumer_data_set
        assert (group.consume_type, group.message_model) == ("CONSUME_ACTIVELY", "CLUSTERING")
        assert group.subscription_data_set[0].code_set == [646394]
        assert beat.producer_data_set == []

    def test_cpp_sends_ordinals_and_leaves_sets_out(self) -> None:
        beat = decode(
            HeartbeatData,
            b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":1,"messageModel":0,'
            b'"consumeFromWhere":4,"subscriptionDataSet":[{"topic":"T","subString":"TagA||TagB ",'
            b'"subVersion":"17"}]}]}\n',
        )
        (group,) = beat.consumer_data_set
        assert group.consume_type == "CONSUME_PASSIVELY"
        assert group.message_model == "BROADCASTING"
        assert group.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
        (wanted,) = group.subscription_data_set
        assert wanted.expression_type == "TAG"
        assert wanted.sub_version == 17
        assert wanted.tags_set == ["TagA", "TagB"]
        assert wanted.code_set == [2598919, 2598920]

    @pytest.mark.parametrize("ordinal", [b"9", b'"9"', b'"999999"'])
    def test_an_ordinal_nobody_knows_means_the_first(self, ordinal: bytes) -> None:
        text = b'{"clientID":"c","consumerDataSet":[{"groupName":"g","consumeType":%s}]}' % ordinal
        assert decode(HeartbeatData, text).consumer_data_set[0].consume_type == "CONSUME_ACTIVELY"

    def test_without_client_id_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match=r"HeartbeatData: .*clientID"):
            decode(HeartbeatData, b"{}")


class TestSubscriptions:
    def test_everything_has_no_codes(self) -> None:
        assert SubscriptionData(topic="T", code_set=[1]).code_set == []

    def test_an_empty_expression_type_is_tag(self) -> None:
        assert SubscriptionData(topic="T", expression_type="").expression_type == "TAG"

    def test_expressions_of_other_types_are_left_alone(self) -> None:
        wanted = SubscriptionData(topic="T", expression_type="SQL92", sub_string="a || b")
        assert (wanted.tags_set, wanted.code_set) == ([], [])

    def test_equal_tags_count_once(self) -> None:
        wanted = SubscriptionData(topic="T", sub_string="A || A || || B")
        assert wanted.tags_set == ["A", "B"]


class TestMapsWithOtherKeys:
    ROUTE = TopicRouteData(
        broker_datas=[BrokerData(broker_addrs={1: "s", 0: "m"}, broker_name="b", cluster="C")],
        queue_datas=[
            QueueData(
                broker_name="b",
                perm=6,
                read_queue_nums=4,
                write_queue_nums=4,
                topic_sys_flag=1,
            )
        ],
    )

    def test_route_in_both_dialects(self) -> None:
        rest = (
            b'"brokerName":"b","cluster":"C"}],"filterServerTable":{},"queueDatas":[{"brokerName":"b",'
            b'"perm":6,"readQueueNums":4,"topicSynFlag":1,"topicSysFlag":1,"writeQueueNums":4}]}'
        )
        loose = b'{"brokerDatas":[{"brokerAddrs":{0:"m",1:"s"},' + rest
        strict = b'{"brokerDatas":[{"brokerAddrs":{"0":"m","1":"s"},' + rest
        assert encode(self.ROUTE) == loose
        assert encode(self.ROUTE, standard=True) == strict
        assert decode(TopicRouteData, loose) == decode(TopicRouteData, strict) == self.ROUTE

    @pytest.mark.parametrize("name", ["topicSysFlag", "topicSynFlag"])
    def test_either_name_of_the_system_flag(self, name: str) -> None:
        text = (
            f'{{"queueDatas":[{{"brokerName":"b","perm":6,"readQueueNums":1,"{name}":2,'
            '"writeQueueNums":1}]}'
        )
        (row,) = decode(TopicRouteData, text.encode()).queue_datas
        assert (row.topic_sys_flag, row.topic_syn_flag) == (2, 2)

    def test_order_conf_is_left_out_unless_set(self) -> None:
        assert b"orderTopicConf" not in encode(TopicRouteData())
        assert b'"orderTopicConf":"b:4"' in encode(TopicRouteData(order_topic_conf="b:4"))

    def test_cluster_info_keys_are_bare(self) -> None:
        info = ClusterInfo(
            broker_addr_table={"b": BrokerData(broker_addrs={0: "m"}, broker_name="b")},
            cluster_addr_table={"C": ["b"]},
        )
        assert b'{"brokerAddrs":{0:"m"},' in encode(info)
        assert decode(ClusterInfo, encode(info)) == info

    @pytest.mark.parametrize("standard", [False, True])
    def test_object_keys(self, standard: bool) -> None:
        stats = ConsumeStats(offset_table={QUEUE: OffsetWrapper(broker_offset=10)})
        text = encode(stats, standard=standard)
        inline = b'{{"brokerName":"b","queueId":3,"topic":"T"}:{"brokerOffset":10,'
        assert (inline in text) is not standard
        assert decode(ConsumeStats, text) == stats

    def test_object_keys_that_are_no_queue_are_refused(self) -> None:
        with pytest.raises(ProtocolError, match=r"TopicStatsTable: .*brokerName"):
            decode(TopicStatsTable, b'{"offsetTable":{{"topic":"T"}:{}}}')

    def test_text_that_looks_like_an_object_is_a_key_elsewhere(self) -> None:
        text = b'{"table":{"{x":"1","n":null}}'
        assert decode(KVTable, text).table == {"{x": "1"}

    def test_offsets_of_a_5x_broker_keep_their_version(self) -> None:
        text = (
            b'{"dataVersion":{"counter":1,"stateVersion":2,"timestamp":3},'
            b'"offsetTable":{"T@g":{0:5}}}'
        )
        wrapper = decode(ConsumerOffsetSerializeWrapper, text)
        assert wrapper.offset_table == {"T@g": {0: 5}}
        assert encode(wrapper) == text

    def test_references(self) -> None:
        queue = '{"brokerName":"b","queueId":3,"topic":"T"}'
        text = f'{{"clientId":"c","consumerGroup":"g","mqSet":[{queue},{{"$ref":"$.mqSet[0]"}}]}}'
        assert decode(LockBatchRequestBody, text.encode()).mq_set == [QUEUE, QUEUE]


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "why"),
        [
            (b"", "ends early"),
            (b"[]", "Expected `object`"),
            (b'{"counter":"x"}', "counter"),
            (b'{"counter":1', "not JSON at character"),
            (b"\xff", "not UTF-8"),
            (b'{"x":' * 100_000, "nested"),
        ],
    )
    def test_names_type_and_cause(self, data: bytes, why: str) -> None:
        with pytest.raises(ProtocolError, match=f"DataVersion: .*{why}") as caught:
            decode(DataVersion, data)
        assert caught.value.__cause__ is not None

    def test_deep_values_are_refused_before_the_stack_ends(self) -> None:
        data = b'{"counter":"x","y":' + b"[" * 700 + b"]" * 700 + b"}"
        with pytest.raises(ProtocolError, match=r"DataVersion: .*(nested|counter)"):
            decode(DataVersion, data)


class TestFiles:
    @each_golden
    @pytest.mark.parametrize(
        ("kind", "name"),
        [
            (TopicConfigSerializeWrapper, "topics.json"),
            (SubscriptionGroupWrapper, "subscriptionGroup.json"),
            (ConsumerOffsetSerializeWrapper, "consumerOffset.json"),
        ],
    )
    def test_upstreams_files_come_back_byte_for_byte(
        self, golden: Golden, kind: type[bodies.Body], name: str
    ) -> None:
        path = golden.path / "store/config" / name
        assert encode(decode(kind, path.read_bytes()), pretty=True) == path.read_bytes()

    def test_settings_of_5x_groups_survive(self) -> None:
        text = (
            b'{"attributes":{},"brokerId":0,"consumeBroadcastEnable":true,"consumeEnable":true,'
            b'"consumeFromMinEnable":true,"consumeMessageOrderly":false,"consumeTimeoutMinute":15,'
            b'"groupName":"g","groupRetryPolicy":{"type":"CUSTOMIZED"},"groupSysFlag":0,'
            b'"notifyConsumerIdsChangedEnable":true,"retryMaxTimes":16,"retryQueueNums":1,'
            b'"whichBrokerWhenConsumeSlowly":1}'
        )
        assert encode(decode(SubscriptionGroupConfig, text)) == text


def test_lock_answer_has_its_odd_name() -> None:
    assert encode(LockBatchResponseBody(lock_ok_mq_set=[QUEUE])) == (
        b'{"lockOKMQSet":[{"brokerName":"b","queueId":3,"topic":"T"}]}'
    )
