package cosmodrome.golden;

import static cosmodrome.golden.Stage.fields;
import static cosmodrome.golden.Stage.queue;

import java.util.Collections;
import java.util.List;
import java.util.Properties;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.protocol.RequestCode;
import org.apache.rocketmq.common.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.remoting.protocol.LanguageCode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Topics, groups, tables and questions. */
final class Admin {
    private final Stage stage;
    private final DefaultMQAdminExt tool;

    Admin(Stage stage) {
        this.stage = stage;
        this.tool = stage.neutral(new DefaultMQAdminExt("golden-admin", 5_000L));
    }

    void start() throws Exception {
        stage.scenario("admin_start", tool::start);
        stage.scenario("create_topic_and_group", () -> {
            topic("GNormal", 4);
            topic("GBatch", 2);
            topic("GBig", 1);
            topic("GDelay", 2);
            topic("GOrder", 2);
            topic("GTxn", 2);
            topic("GRetry", 1);
            topic("GSql", 2);
            topic("GLive", 2);
            topic("GBulk", 1);
            // From now on the name server answers registrations with the order table.
            tool.createOrUpdateOrderConf("GOrder", Stage.BROKER_NAME + ":2", true);
            topic("GDelete", 1);
            SubscriptionGroupConfig group = new SubscriptionGroupConfig();
            group.setGroupName("g_custom");
            group.setConsumeBroadcastEnable(false);
            group.setRetryMaxTimes(5);
            tool.createAndUpdateSubscriptionGroupConfig(stage.broker, group);
            group.setGroupName("g_delete");
            tool.createAndUpdateSubscriptionGroupConfig(stage.broker, group);
        });
        stage.scenario("topic_route", () -> {
            tool.examineTopicRouteInfo("GNormal");
            expectRefusal(() -> tool.examineTopicRouteInfo("GMissing"));
            // Clients from before 4.9.4 are answered in the old dialect.
            stage.askAs(stage.namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC, fields("topic", "GNormal"), null,
                LanguageCode.GO, 317);
            stage.askAs(stage.namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC,
                fields("topic", "GNormal", "acceptStandardJsonOnly", "true"), null, LanguageCode.GO, 317);
        });
    }

    void play() throws Exception {
        stage.scenario("cluster_info", tool::examineBrokerClusterInfo);
        stage.scenario("topic_list", () -> {
            tool.fetchAllTopicList();
            tool.fetchTopicsByCLuster(Stage.CLUSTER);
            for (int code : new int[] {RequestCode.GET_UNIT_TOPIC_LIST,
                RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST}) {
                stage.ask(stage.namesrv, code, fields(), null);
            }
        });
        stage.scenario("system_topics", () -> {
            stage.ask(stage.namesrv, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, fields(), null);
            stage.ask(stage.broker, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, fields(), null);
        });
        stage.scenario("kv_config", () -> {
            tool.createAndUpdateKvConfig("golden", "key", "value 值");
            tool.getKVConfig("golden", "key");
            expectRefusal(() -> tool.getKVConfig("golden", "missing"));
            tool.getKVListByNamespace("golden");
            tool.deleteKvConfig("golden", "key");
            expectRefusal(() -> tool.getKVListByNamespace("missing"));
        });
        stage.scenario("namesrv_config", () -> tool.getNameServerConfig(List.of(stage.namesrv)));
        stage.scenario("broker_config", () -> {
            tool.getBrokerConfig(stage.broker);
            Properties change = new Properties();
            change.setProperty("maxTransferCountOnMessageInMemory", "33");
            tool.updateBrokerConfig(stage.broker, change);
        });
        stage.scenario("broker_runtime_info", () -> tool.fetchBrokerRuntimeStats(stage.broker));
        stage.scenario("topic_config", () -> tool.getAllTopicConfig(stage.broker, 5_000));
        stage.scenario("subscription_groups", () -> tool.getAllSubscriptionGroup(stage.broker, 5_000));
        stage.scenario("topic_stats", () -> tool.examineTopicStats("GNormal"));
        stage.scenario("consume_stats", () -> {
            tool.examineConsumeStats("g_normal");
            stage.ask(stage.broker, RequestCode.GET_BROKER_CONSUME_STATS, fields("isOrder", "false"), null);
        });
        stage.scenario("offset_tables", () -> {
            stage.ask(stage.broker, RequestCode.GET_ALL_CONSUMER_OFFSET, fields(), null);
            stage.ask(stage.broker, RequestCode.GET_ALL_DELAY_OFFSET, fields(), null);
        });
        stage.scenario("query_message_by_key", () -> {
            tool.queryMessage("GNormal", "common", 32, 0, Long.MAX_VALUE);
            expectRefusal(() -> tool.queryMessage("GNormal", "nobody-has-this", 32, 0, Long.MAX_VALUE));
        });
        stage.scenario("view_message_by_id", () -> {
            stage.ask(stage.broker, RequestCode.VIEW_MESSAGE_BY_ID, fields("offset", "0"), null);
            stage.ask(stage.broker, RequestCode.VIEW_MESSAGE_BY_ID, fields("offset", "123456789"), null);
        });
        stage.scenario("query_consume_queue",
            () -> tool.queryConsumeQueue(stage.broker, "GNormal", 0, 0, 2, "g_normal"));
        stage.scenario("query_topic_consume_by_who", () -> tool.queryTopicConsumeByWho("GNormal"));
        stage.scenario("query_consume_time_span", () -> tool.queryConsumeTimeSpan("GNormal", "g_normal"));
        stage.scenario("clone_group_offset", () -> tool.cloneGroupOffset("g_normal", "g_copy", "GNormal", true));
        stage.scenario("update_consume_offset_admin",
            () -> tool.updateConsumeOffset(stage.broker, "g_copy", queue("GNormal", 1), 2));
        if (stage.names("clean_ops")) {
            stage.scenario("clean_ops", () -> {
                tool.cleanUnusedTopicByAddr(stage.broker);
                tool.cleanExpiredConsumerQueueByAddr(stage.broker);
            });
        }
        // Deleting any topic also drops the consume queues of half messages.
        if (stage.names("delete_topic")) {
            stage.scenario("delete_topic", () -> {
                tool.deleteTopicInBroker(Collections.singleton(stage.broker), "GDelete");
                tool.deleteTopicInNameServer(Collections.singleton(stage.namesrv), Stage.CLUSTER, "GDelete");
                stage.ask(stage.namesrv, RequestCode.GET_ROUTEINFO_BY_TOPIC, fields("topic", "GDelete"), null);
            });
        }
        stage.scenario("wipe_write_perm", () -> {
            tool.wipeWritePermOfBroker(stage.namesrv, Stage.BROKER_NAME);
            tool.examineTopicRouteInfo("GNormal");
            tool.addWritePermOfBroker(stage.namesrv, Stage.BROKER_NAME);
            tool.examineTopicRouteInfo("GNormal");
        });
        stage.scenario("delete_group", () -> tool.deleteSubscriptionGroup(stage.broker, "g_delete", false));
    }

    /** Questions about clients that are connected. */
    void online(String clientId, String offsetMessageId, Consumes consumes) throws Exception {
        stage.scenario("consumer_connection", () -> tool.examineConsumerConnectionInfo("g_live"));
        stage.scenario("producer_connection", () -> {
            tool.examineProducerConnectionInfo("p_live", "GLive");
            tool.getAllProducerInfo(stage.broker);
        });
        stage.scenario("consumer_running_info", () -> tool.getConsumerRunningInfo("g_live", clientId, false));
        stage.scenario("consumer_status", () -> tool.getConsumeStatus("GLive", "g_live", clientId));
        stage.scenario("consume_message_directly", () -> consumes.directly(clientId, offsetMessageId));
        stage.scenario("reset_offset_by_timestamp", () -> {
            tool.resetOffsetByTimestamp("GLive", "g_live", 0, true);
            Thread.sleep(500);
        });
        if (MessageDecoder.decodeMessageId(offsetMessageId).getOffset() <= 0) {
            throw new IllegalStateException(offsetMessageId + " is no offset id");
        }
    }

    void stop() throws Exception {
        stage.scenario("admin_shutdown", tool::shutdown);
    }

    private void topic(String name, int queues) throws Exception {
        tool.createAndUpdateTopicConfig(stage.broker, new TopicConfig(name, queues, queues, 6));
    }

    private static void expectRefusal(Stage.Act act) throws Exception {
        try {
            act.play();
        } catch (MQClientException | MQBrokerException refused) {
            return;
        }
        throw new IllegalStateException("this was expected to be refused");
    }
}
