package cosmodrome.golden;

import static cosmodrome.golden.Stage.fields;
import static cosmodrome.golden.Stage.message;
import static cosmodrome.golden.Stage.queue;

import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.RequestCode;

/** Every way to read messages. */
@SuppressWarnings("deprecation")
final class Consumes {
    private final Stage stage;

    Consumes(Stage stage) {
        this.stage = stage;
    }

    void play() throws Exception {
        pulls();
        stage.scenario("consume_cluster", () -> {
            DefaultMQPushConsumer consumer = stage.consumer("g_normal");
            consumer.subscribe("GNormal", "*");
            // 12 plain, 2 unicode, 2 old, 1 one-way, 2 async
            until(consumer, 19);
        });
        stage.scenario("consume_tag_filter", () -> {
            DefaultMQPushConsumer consumer = stage.consumer("g_tags");
            consumer.subscribe("GSql", "HashAa || 标签");
            until(consumer, 2);
        });
        stage.scenario("consume_sql92", () -> {
            DefaultMQPushConsumer consumer = stage.consumer("g_sql");
            consumer.subscribe("GSql", MessageSelector.bySql("a between 1 and 2"));
            until(consumer, 2);
        });
        stage.scenario("consume_orderly_lock", () -> orderly());
        stage.scenario("consume_retry_dlq", () -> retry());
        stage.scenario("lite_pull", () -> litePull());
        stage.scenario("pull_long_poll_wakeup", () -> wakeUp());
    }

    private void pulls() throws Exception {
        DefaultMQPullConsumer[] puller = new DefaultMQPullConsumer[1];
        stage.scenario("pull_start", () -> {
            puller[0] = stage.puller("g_pull");
            puller[0].fetchSubscribeMessageQueues("GNormal");
            puller[0].pull(queue("GNormal", 1), "*", 0, 1);
        });
        MessageQueue first = queue("GNormal", 0);
        long end = puller[0].maxOffset(first);
        stage.scenario("pull_found", () -> puller[0].pull(first, "*", 0, 32));
        stage.scenario("pull_not_found", () -> puller[0].pull(first, "*", end, 32));
        stage.scenario("pull_offset_illegal", () -> puller[0].pull(first, "*", end + 1_000, 32));
        stage.scenario("pull_tag_filtered", () -> puller[0].pull(first, "NobodySendsThis", 0, 32));
        stage.scenario("offset_queries", () -> {
            puller[0].minOffset(first);
            puller[0].maxOffset(first);
            puller[0].earliestMsgStoreTime(first);
            puller[0].searchOffset(first, System.currentTimeMillis() - 3_600_000);
            puller[0].searchOffset(first, System.currentTimeMillis());
        });
        stage.scenario("update_consumer_offset", () -> {
            puller[0].updateConsumeOffset(first, 3);
            puller[0].getDefaultMQPullConsumerImpl().getOffsetStore().persist(first);
            puller[0].getDefaultMQPullConsumerImpl().getOffsetStore().updateConsumeOffsetToBroker(first, 3, false);
        });
        stage.scenario("query_consumer_offset", () -> {
            puller[0].fetchConsumeOffset(first, true);
            puller[0].fetchConsumeOffset(queue("GNormal", 2), true);
        });
        stage.scenario("pull_stop", () -> puller[0].shutdown());
    }

    private static MessageListenerConcurrently counting(CountDownLatch left) {
        return (messages, context) -> {
            messages.forEach(message -> left.countDown());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
    }

    private static void await(CountDownLatch latch) throws Exception {
        if (!latch.await(30, TimeUnit.SECONDS)) {
            throw new IllegalStateException(latch.getCount() + " messages did not come");
        }
    }

    private static void until(DefaultMQPushConsumer consumer, int count) throws Exception {
        CountDownLatch left = new CountDownLatch(count);
        consumer.registerMessageListener(counting(left));
        consumer.start();
        await(left);
        consumer.shutdown();
    }

    private void orderly() throws Exception {
        DefaultMQPushConsumer consumer = stage.consumer("g_order");
        consumer.subscribe("GOrder", "*");
        CountDownLatch left = new CountDownLatch(9);
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            messages.forEach(message -> left.countDown());
            return ConsumeOrderlyStatus.SUCCESS;
        });
        consumer.start();
        await(left);
        // Unlocking by this call, since a shutdown leaves the lock to its timeout now and then.
        consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().unlockAll(false);
        consumer.shutdown();
    }

    /** One message fails twice: it is retried once and then put aside. */
    private void retry() throws Exception {
        DefaultMQPushConsumer consumer = stage.consumer("g_retry");
        consumer.setMaxReconsumeTimes(1);
        // The retry topic is made by the first heartbeat; its route must be found before long.
        consumer.setPollNameServerInterval(1_000);
        consumer.subscribe("GRetry", "*");
        CountDownLatch left = new CountDownLatch(2);
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> left.countDown());
            context.setDelayLevelWhenNextConsume(1);
            return ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        Thread.sleep(2_500);
        consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().rebalanceImmediately();
        await(left);
        Thread.sleep(500);
        consumer.shutdown();
    }

    private void litePull() throws Exception {
        DefaultLitePullConsumer consumer = stage.neutral(new DefaultLitePullConsumer("g_lite"));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullThreadNums(1);
        consumer.subscribe("GBatch", "*");
        consumer.start();
        int count = 0;
        for (int tries = 0; count < 7 && tries < 40; tries++) {
            count += consumer.poll(500).size();
        }
        if (count < 7) {
            throw new IllegalStateException("only " + count + " messages were polled");
        }
        consumer.commitSync();
        consumer.shutdown();
    }

    private void wakeUp() throws Exception {
        DefaultMQPullConsumer consumer = stage.puller("g_wake");
        DefaultMQProducer producer = stage.producer("p_wake");
        MessageQueue queue = queue("GRetry", 0);
        long end = consumer.maxOffset(queue);
        Thread sender = new Thread(() -> {
            try {
                Thread.sleep(500);
                producer.send(message("GRetry", "Wake", "wake", "this ends the wait"), queue);
            } catch (Exception error) {
                throw new IllegalStateException(error);
            }
        });
        sender.start();
        List<MessageExt> found =
            consumer.pullBlockIfNotFound(queue, "*", end, 32).getMsgFoundList();
        if (found == null || found.size() != 1) {
            throw new IllegalStateException("the waiting pull found " + found);
        }
        sender.join();
        producer.shutdown();
        consumer.shutdown();
    }

    /** A group that stays while `act` plays, so that admin calls have something to look at. */
    void whileOnline(Online act) throws Exception {
        DefaultMQProducer producer = stage.producer("p_live");
        DefaultMQPushConsumer[] members = new DefaultMQPushConsumer[2];
        CountDownLatch left = new CountDownLatch(2);
        SendResult[] sent = new SendResult[1];
        stage.scenario("heartbeat_two_consumers_rebalance", () -> {
            for (int i = 0; i < 2; i++) {
                sent[0] = producer.send(message("GLive", "TagA", "live-" + i, "live " + i), queue("GLive", i));
            }
            producer.getDefaultMQProducerImpl().getMqClientFactory().sendHeartbeatToAllBrokerWithLock();
            for (int i = 0; i < 2; i++) {
                members[i] = stage.consumer("g_live");
                members[i].subscribe("GLive", "TagA");
                members[i].registerMessageListener(counting(left));
                members[i].start();
            }
            await(left);
            members[0].getDefaultMQPushConsumerImpl().persistConsumerOffset();
            members[1].getDefaultMQPushConsumerImpl().persistConsumerOffset();
        });
        act.play(members[0].buildMQClientId(), sent[0].getOffsetMsgId());
        stage.scenario("consumer_leave_notify", () -> {
            members[1].shutdown();
            Thread.sleep(300);
        });
        stage.scenario("clients_stop", () -> {
            members[0].shutdown();
            producer.shutdown();
        });
    }

    interface Online {
        void play(String clientId, String offsetMessageId) throws Exception;
    }

    void directly(String clientId, String offsetMessageId) throws Exception {
        stage.ask(stage.broker, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields("consumerGroup", "g_live",
            "clientId", clientId, "msgId", offsetMessageId, "brokerName", Stage.BROKER_NAME), null);
    }
}
