package cosmodrome.golden;

import static cosmodrome.golden.Stage.fields;
import static cosmodrome.golden.Stage.message;
import static cosmodrome.golden.Stage.queue;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.protocol.RequestCode;

/** Everything that puts messages into the store. */
final class Sends {
    private final Stage stage;

    Sends(Stage stage) {
        this.stage = stage;
    }

    void play() throws Exception {
        DefaultMQProducer producer = stage.producer("p_normal");
        stage.scenario("send_v2", () -> plain(producer));
        stage.scenario("send_v2_unicode", () -> unicode(producer));
        stage.scenario("send_v1_code10", () -> byHand(10));
        stage.scenario("send_oneway", () -> {
            producer.sendOneway(message("GNormal", "TagC", "oneway", "sent one way"), queue("GNormal", 1));
            Thread.sleep(200);
        });
        stage.scenario("send_async", () -> async(producer));
        stage.scenario("send_ordered", () -> ordered(producer));
        stage.scenario("send_batch_320", () -> batch(producer));
        stage.scenario("send_autocreate",
            () -> producer.send(message("GAuto", "TagA", "auto", "this topic was not there")));
        for (String kind : new String[] {"ZLIB", "LZ4", "ZSTD"}) {
            stage.scenario("send_compressed_" + kind.toLowerCase(), () -> compressed(kind));
        }
        stage.scenario("send_incompressible", () -> producer.send(incompressible()));
        stage.scenario("send_delay", () -> delayed(producer));
        stage.scenario("send_error", () -> refused());
        stage.scenario("transaction", () -> transaction(LocalTransactionState.COMMIT_MESSAGE, 2));
        stage.scenario("transaction_rollback",
            () -> transaction(LocalTransactionState.ROLLBACK_MESSAGE, 1));
        stage.scenario("transaction_pending", () -> transaction(LocalTransactionState.UNKNOW, 1));
        stage.scenario("send_retry_source",
            () -> producer.send(message("GRetry", "Bad", "retry-0", "retry body 0")));
        stage.scenario("send_properties", () -> numbered(producer));
        stage.scenario("unregister_client", producer::shutdown);
        stage.scenario("wait_for_delayed", () -> await("GDelay", 0, 1, "GDelay", 1, 2));
    }

    /** Comes after consumers have run: they stumble over messages without a body. */
    void playOdd() throws Exception {
        stage.scenario("send_hand_made", () -> odd());
    }

    private void await(Object... topicsQueuesAndEnds) throws Exception {
        for (int i = 0; i < topicsQueuesAndEnds.length; i += 3) {
            Map<String, String> fields = fields("topic", topicsQueuesAndEnds[i].toString(),
                "queueId", topicsQueuesAndEnds[i + 1].toString());
            int tries = 0;
            while (Integer.parseInt(stage.ask(stage.broker, RequestCode.GET_MAX_OFFSET, fields, null)
                .getExtFields().get("offset")) < (Integer) topicsQueuesAndEnds[i + 2]) {
                if (++tries == 100) {
                    throw new IllegalStateException(fields + " does not reach its end");
                }
                Thread.sleep(200);
            }
        }
    }

    private void plain(DefaultMQProducer producer) throws Exception {
        String[] tags = {"TagA", "TagB", null, "HashAa", "HashBB", "TagA"};
        for (int i = 0; i < 12; i++) {
            Message message = message("GNormal", tags[i % tags.length],
                i % 3 == 0 ? null : "key-" + i + " common", "plain message " + i);
            message.putUserProperty("index", String.valueOf(i));
            if (i == 7) {
                message.setFlag(42);
            }
            if (i == 8) {
                message.setBody(new byte[] {0, 1, 2, (byte) 0xff, (byte) 0xfe, 0});
            }
            if (i == 9) {
                message.setTags("T".repeat(100));
                message.setKeys("k".repeat(120));
            }
            if (i == 10) {
                message.setWaitStoreMsgOK(false);
            }
            producer.send(message, queue("GNormal", i % 4));
        }
    }

    private void unicode(DefaultMQProducer producer) throws Exception {
        Message message = message("GNormal", "标签", "ключ 鍵 😀", "текст 文字 😀");
        message.putUserProperty("имя", "значение 值 😀");
        producer.send(message, queue("GNormal", 0));
        producer.send(message("GNormal", "TagÄ", "clé", "plus de café"), queue("GNormal", 1));
    }

    private Map<String, String> byHandFields(int queueId, String properties) {
        Map<String, String> fields = fields("producerGroup", "p_hand", "topic", "GNormal",
            "defaultTopic", "TBW102", "defaultTopicQueueNums", "4", "queueId", String.valueOf(queueId),
            "sysFlag", "0", "bornTimestamp", String.valueOf(System.currentTimeMillis()), "flag", "0",
            "reconsumeTimes", "0", "unitMode", "false", "batch", "false");
        if (properties != null) {
            fields.put("properties", properties);
        }
        return fields;
    }

    private void byHand(int code) throws Exception {
        byte[] body = "old header".getBytes(StandardCharsets.UTF_8);
        stage.ask(stage.broker, code,
            byHandFields(0, "TAGS\u0001TagA\u0002KEYS\u0001old-0\u0002WAIT\u0001true\u0002"), body);
        stage.ask(stage.broker, code, byHandFields(3, "KEYS\u0001old-1\u0002"), body);
    }

    /** What no library sends: bodies and properties left out, and properties that are no pairs. */
    private void odd() throws Exception {
        byte[] body = "hand made".getBytes(StandardCharsets.UTF_8);
        stage.ask(stage.broker, 10, byHandFields(2, null), null);
        stage.ask(stage.broker, 10, byHandFields(2, "TAGS\u0001Empty\u0002KEYS\u0001hand-1\u0002"), null);
        stage.ask(stage.broker, 10, byHandFields(2, null), body);
        stage.ask(stage.broker, 10, byHandFields(2, "TAGS\u0001Cut\u0002KEYS\u0001hand-3"), body);
        stage.ask(stage.broker, 10,
            byHandFields(2, "lonely\u0002TAGS\u0001Odd\u0002a\u0001b\u0001c\u0002\u0002KEYS\u0001hand-4\u0002"),
            body);
    }

    private void async(DefaultMQProducer producer) throws Exception {
        CountDownLatch answered = new CountDownLatch(2);
        for (int i = 0; i < 2; i++) {
            producer.send(message("GNormal", "TagB", "async-" + i, "sent async " + i), queue("GNormal", i),
                new SendCallback() {
                    @Override public void onSuccess(SendResult result) {
                        answered.countDown();
                    }

                    @Override public void onException(Throwable error) {
                        throw new IllegalStateException(error);
                    }
                });
        }
        if (!answered.await(10, TimeUnit.SECONDS)) {
            throw new IllegalStateException("async sends were not answered");
        }
    }

    private void ordered(DefaultMQProducer producer) throws Exception {
        for (int i = 0; i < 9; i++) {
            producer.send(message("GOrder", "Step" + i / 3, "order-" + i % 3, "stream " + i % 3 + " step " + i / 3),
                (queues, message, stream) -> queues.get((Integer) stream % queues.size()), i % 3);
        }
    }

    private void batch(DefaultMQProducer producer) throws Exception {
        for (int count : new int[] {4, 3}) {
            List<Message> messages = new ArrayList<>();
            for (int i = 0; i < count; i++) {
                messages.add(message("GBatch", "TagA", "batch-" + count + "-" + i, "batched " + i));
            }
            producer.send(messages, queue("GBatch", count % 2));
        }
    }

    private void compressed(String kind) throws Exception {
        System.setProperty("rocketmq.message.compressType", kind);
        DefaultMQProducer producer = stage.producer("p_" + kind.toLowerCase());
        producer.send(message("GBig", kind, "big-" + kind, (kind + " compresses this. ").repeat(300)));
        producer.shutdown();
        System.clearProperty("rocketmq.message.compressType");
    }

    private Message incompressible() {
        byte[] noise = new byte[4_200];
        new Random(7).nextBytes(noise);
        return new Message("GBig", "Noise", "big-noise", noise);
    }

    private void delayed(DefaultMQProducer producer) throws Exception {
        for (int level : new int[] {1, 1, 2, 14, 18}) {
            Message message = message("GDelay", "Level" + level, "delay-" + level, "delayed by level " + level);
            message.setDelayTimeLevel(level);
            producer.send(message, queue("GDelay", level % 2));
        }
    }

    /** Sends that the broker refuses. */
    private void refused() throws Exception {
        Map<String, String> noTopic = byHandFields(0, "KEYS\u0001x\u0002");
        noTopic.put("topic", "GMissing");
        noTopic.put("defaultTopic", "GAlsoMissing");
        stage.ask(stage.broker, 10, noTopic, new byte[1]);
        Map<String, String> badName = byHandFields(0, null);
        badName.put("topic", "bad topic!");
        stage.ask(stage.broker, 10, badName, new byte[1]);
        stage.ask(stage.broker, 10, byHandFields(77, null), new byte[1]);
        stage.ask(stage.broker, 9_999, fields(), null);
    }

    private void transaction(LocalTransactionState outcome, int count) throws Exception {
        TransactionMQProducer producer = stage.neutral(new TransactionMQProducer("p_txn"));
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                return outcome;
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                return outcome;
            }
        });
        producer.start();
        for (int i = 0; i < count; i++) {
            String name = outcome.name().toLowerCase();
            producer.sendMessageInTransaction(message("GTxn", "TagA", name + "-" + i, name + " " + i), null);
        }
        Thread.sleep(300);
        producer.shutdown();
    }

    private void numbered(DefaultMQProducer producer) throws Exception {
        for (int i = 0; i < 4; i++) {
            Message message = message("GSql", i / 2 == 0 ? "HashAa" : "HashBB", "sql-" + i, "number " + i);
            message.putUserProperty("a", String.valueOf(i));
            producer.send(message, queue("GSql", i % 2));
        }
    }

    /** Small messages into one queue, until files of every kind have been filled. */
    static void bulk(DefaultMQProducer producer, String topic, int queues, int count, int bodyBytesMax)
        throws Exception {
        Random random = new Random(11);
        for (int i = 0; i < count; i++) {
            MessageQueue queue = queue(topic, i % queues);
            try {
                producer.send(message(topic, "T" + i % 5, "bulk-" + i, "b".repeat(random.nextInt(bodyBytesMax))), queue);
            } catch (MQClientException | MQBrokerException error) {
                throw new IllegalStateException("bulk message " + i, error);
            }
        }
    }
}
