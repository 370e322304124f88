package cosmodrome.peers;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.impl.factory.MQClientInstance;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Drives the Java client from a test. The interface shared by all drivers is in clients.py.
 *
 * <pre>
 * send      NAMESRV TOPIC GROUP sync|async|oneway|batch|orderly   messages on standard input
 * consume   NAMESRV TOPIC GROUP EXPRESSION push|orderly|replying|failing:MAX:LEVEL|judging:MAX:LEVEL PROPERTIES   until end of input
 * transact  NAMESRV TOPIC GROUP SECONDS   messages on standard input, see below
 * request   NAMESRV TOPIC GROUP           messages on standard input, waits for a reply to each
 * pull      NAMESRV TOPIC GROUP EXPRESSION    every queue from its first to its last message
 * litepull  NAMESRV TOPIC GROUP EXPRESSION    until end of input
 * stream    NAMESRV TOPIC GROUP - sync|orderly    sends until end of input, see Stream
 * pulls     NAMESRV TOPIC GROUP            steps on standard input, see Pulls
 * lite      NAMESRV TOPIC GROUP assign|subscribe    the same
 * query-key NAMESRV TOPIC KEY
 * query-id  NAMESRV TOPIC ID
 * flow      NAMESRV TOPIC GROUP TIMEOUT_MS sync|async|avoiding PAUSE_MS   see Flow
 * flow-transact NAMESRV TOPIC GROUP                                       see Flow
 * </pre>
 *
 * A message to transact has the property outcome: commit, rollback, or the same behind later:, which
 * is what its producer says only when it is asked; SECONDS bounds the wait for that.
 *
 * A mode of send and consume may carry options, see Options.
 *
 * EXPRESSION names tags, or is an SQL92 condition behind the word <code>sql:</code>, or, to consume,
 * the name of a filter behind the word <code>class:</code>.
 */
public final class Driver {
    /** Trace records leave in the background, and a producer that stops drops what has not left. */
    private static final int TRACE_LINGER_MS = 3_000;

    private static final PrintStream OUT =
        new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true, StandardCharsets.UTF_8);

    public static void main(String[] words) {
        // The client prints to standard output on occasion; results must stay readable.
        System.setOut(System.err);
        try {
            run(words);
        } catch (Exception error) {
            // Threads of a started client would keep the process alive.
            error.printStackTrace();
            System.exit(1);
        }
        System.exit(0);
    }

    private static void run(String[] words) throws Exception {
        String namesrv = words[1];
        String topic = words[2];
        switch (words[0]) {
            case "send": send(namesrv, topic, words[3], words[4]); break;
            case "transact": transact(namesrv, topic, words[3], Integer.parseInt(words[4])); break;
            case "request": request(namesrv, topic, words[3]); break;
            case "flow": Flow.send(namesrv, topic, words[3], words[4], words[5], words[6]); break;
            case "flow-transact": Flow.transact(namesrv, topic, words[3]); break;
            case "consume": consume(namesrv, topic, words[3], words[4], words[5]); break;
            case "pull": pull(namesrv, topic, words[3], words[4]); break;
            case "litepull": litePull(namesrv, topic, words[3], words[4]); break;
            case "stream": Stream.send(namesrv, topic, words[3], words[5]); break;
            case "pulls": Pulls.pull(namesrv, topic, words[3]); break;
            case "lite": Pulls.litePull(namesrv, topic, words[3], words[4]); break;
            case "query-key": query(namesrv, topic, words[3], true); break;
            case "query-id": query(namesrv, topic, words[3], false); break;
            default: throw new IllegalArgumentException("unknown verb " + words[0]);
        }
    }

    private static void send(String namesrv, String topic, String group, String mode) throws Exception {
        Options options = Options.of(mode);
        mode = options.mode;
        DefaultMQProducer producer = options.producer(group);
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        List<JSONObject> asked = new ArrayList<>();
        for (String line; (line = input().readLine()) != null; ) {
            asked.add(JSON.parseObject(line));
        }
        List<Message> messages = new ArrayList<>();
        for (JSONObject one : asked) {
            messages.add(message(topic, one));
        }
        if (options.has("report")) {
            sendAndReport(producer, messages, mode);
            producer.shutdown();
            return;
        }
        if (mode.equals("batch")) {
            SendResult result = producer.send(messages);
            // One result for all: ids are joined by commas, the offset is that of the first.
            String[] ids = result.getMsgId().split(",");
            String[] offsetIds = result.getOffsetMsgId().split(",");
            for (int i = 0; i < messages.size(); i++) {
                print(sent(i, result, ids[i], offsetIds[i], result.getQueueOffset() + i));
            }
            producer.shutdown();
            return;
        }
        CountDownLatch answered = new CountDownLatch(messages.size());
        for (int i = 0; i < messages.size(); i++) {
            Message message = messages.get(i);
            final int index = i;
            switch (mode) {
                case "sync":
                    print(sent(index, producer.send(message)));
                    Thread.sleep(options.number("pace", 0));
                    break;
                case "orderly":
                    print(sent(index, producer.send(message,
                        (queues, m, shard) -> queues.get((Integer) shard % queues.size()),
                        asked.get(i).getInteger("shard"))));
                    Thread.sleep(options.number("pace", 0));
                    break;
                case "oneway":
                    producer.sendOneway(message);
                    JSONObject line = event("sent");
                    line.put("index", index);
                    print(line);
                    break;
                case "async":
                    producer.send(message, new SendCallback() {
                        @Override public void onSuccess(SendResult result) {
                            print(sent(index, result));
                            answered.countDown();
                        }

                        @Override public void onException(Throwable error) {
                            JSONObject failed = event("failed");
                            failed.put("index", index);
                            failed.put("error", String.valueOf(error));
                            print(failed);
                            answered.countDown();
                        }
                    });
                    break;
                default: throw new IllegalArgumentException("unknown mode " + mode);
            }
        }
        if (mode.equals("async")) {
            answered.await();
        }
        if (options.has("trace")) {
            Thread.sleep(TRACE_LINGER_MS);
        }
        producer.shutdown();
    }

    /** Prints what became of each message, or of the batch, instead of ending at the first failure. */
    private static void sendAndReport(DefaultMQProducer producer, List<Message> messages, String mode) {
        int count = mode.equals("batch") ? 1 : messages.size();
        for (int i = 0; i < count; i++) {
            try {
                print(sent(i, mode.equals("batch") ? producer.send(messages) : producer.send(messages.get(i))));
            } catch (Exception error) {
                JSONObject failed = event("failed");
                failed.put("index", i);
                failed.put("code", error instanceof MQBrokerException
                    ? ((MQBrokerException) error).getResponseCode() : null);
                failed.put("client_code", error instanceof MQClientException
                    ? ((MQClientException) error).getResponseCode() : null);
                failed.put("error", String.valueOf(error));
                print(failed);
            }
        }
    }

    private static void transact(String namesrv, String topic, String group, int seconds) throws Exception {
        List<Message> messages = new ArrayList<>();
        int undecided = 0;
        for (String line; (line = input().readLine()) != null; ) {
            Message message = message(topic, JSON.parseObject(line));
            messages.add(message);
            undecided += message.getUserProperty("outcome").startsWith("later:") ? 1 : 0;
        }
        CountDownLatch asked = new CountDownLatch(undecided);
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(10_000);
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object index) {
                return state(message.getUserProperty("outcome"));
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                JSONObject line = event("checked");
                line.put("topic", message.getTopic());
                line.put("body", Base64.getEncoder().encodeToString(message.getBody()));
                line.put("transaction_id", message.getTransactionId());
                line.put("properties", message.getProperties());
                print(line);
                asked.countDown();
                return state(message.getUserProperty("outcome").replace("later:", ""));
            }
        });
        producer.start();
        for (int i = 0; i < messages.size(); i++) {
            TransactionSendResult result = producer.sendMessageInTransaction(messages.get(i), i);
            JSONObject line = sent(i, result);
            line.put("state", result.getLocalTransactionState().name());
            print(line);
        }
        asked.await(seconds, TimeUnit.SECONDS);
        // The answers are one-way requests of another thread.
        Thread.sleep(500);
        producer.shutdown();
    }

    static LocalTransactionState state(String outcome) {
        switch (outcome) {
            case "commit": return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback": return LocalTransactionState.ROLLBACK_MESSAGE;
            default: return LocalTransactionState.UNKNOW;
        }
    }

    private static void request(String namesrv, String topic, String group) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        producer.start();
        for (String line; (line = input().readLine()) != null; ) {
            Message reply = producer.request(message(topic, JSON.parseObject(line)), 20_000);
            JSONObject got = event("reply");
            got.put("body", Base64.getEncoder().encodeToString(reply.getBody()));
            got.put("properties", reply.getProperties());
            print(got);
        }
        producer.shutdown();
    }

    private static MessageListenerConcurrently replying(String namesrv, String group) throws Exception {
        DefaultMQProducer replier = new DefaultMQProducer("r_" + group);
        replier.setNamesrvAddr(namesrv);
        replier.start();
        return (messages, context) -> {
            for (MessageExt message : messages) {
                received(message);
                try {
                    byte[] answer = ("re: " + new String(message.getBody(), StandardCharsets.UTF_8))
                        .getBytes(StandardCharsets.UTF_8);
                    replier.send(MessageUtil.createReplyMessage(message, answer), 10_000);
                } catch (Exception error) {
                    error.printStackTrace();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        };
    }

    private static void consume(
        String namesrv, String topic, String group, String expression, String mode) throws Exception {
        Options options = Options.of(mode);
        mode = options.mode;
        DefaultMQPushConsumer consumer = options.consumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        Flow.hurry(consumer);
        if (expression.startsWith("class:")) {
            consumer.subscribe(topic, expression.substring(6), "source text that nobody runs");
        } else {
            consumer.subscribe(topic, selector(expression));
        }
        if (mode.equals("orderly")) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
                messages.forEach(Driver::received);
                return ConsumeOrderlyStatus.SUCCESS;
            });
        } else if (mode.equals("replying")) {
            consumer.registerMessageListener(replying(namesrv, group));
        } else if (mode.startsWith("judging:")) {
            consumer.registerMessageListener(Flow.judging(consumer, mode));
        } else if (mode.startsWith("failing:")) {
            String[] parts = mode.split(":");
            consumer.setMaxReconsumeTimes(Integer.parseInt(parts[1]));
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(Driver::received);
                context.setDelayLevelWhenNextConsume(Integer.parseInt(parts[2]));
                return ConsumeConcurrentlyStatus.RECONSUME_LATER;
            });
        } else if (mode.equals("push")) {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                messages.forEach(Driver::received);
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
        } else {
            throw new IllegalArgumentException("unknown mode " + mode);
        }
        consumer.start();
        Thread watcher = new Thread(() -> reportAssignment(consumer, topic));
        watcher.setDaemon(true);
        watcher.start();
        print(event("started"));
        untilEndOfInput();
        consumer.shutdown();
        print(event("stopped"));
    }

    /** Prints the queues of this member whenever they change. */
    private static void reportAssignment(DefaultMQPushConsumer consumer, String topic) {
        TreeSet<String> last = null;
        while (true) {
            TreeSet<Integer> ids = new TreeSet<>();
            TreeSet<String> now = new TreeSet<>();
            for (MessageQueue queue
                : consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable().keySet()) {
                if (queue.getTopic().equals(topic)) {
                    ids.add(queue.getQueueId());
                    now.add(queue.getBrokerName() + "/" + queue.getQueueId());
                }
            }
            if (!now.equals(last)) {
                JSONObject line = event("assigned");
                line.put("queues", ids);
                line.put("places", now);
                print(line);
                last = now;
            }
            try {
                Thread.sleep(100);
            } catch (InterruptedException end) {
                return;
            }
        }
    }

    @SuppressWarnings("deprecation")
    private static void pull(String namesrv, String topic, String group, String expression) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.start();
        // The client asks for SQL92 only a broker whose version a heartbeat brought; the first
        // one after the route is known would be sent half a minute later.
        MQClientInstance client =
            consumer.getDefaultMQPullConsumerImpl().getRebalanceImpl().getmQClientFactory();
        client.updateTopicRouteInfoFromNameServer(topic);
        client.sendHeartbeatToAllBrokerWithLock();
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            long next = consumer.minOffset(queue);
            long end = consumer.maxOffset(queue);
            while (next < end) {
                PullResult result = consumer.pull(queue, selector(expression), next, 7);
                if (result.getMsgFoundList() != null) {
                    result.getMsgFoundList().forEach(Driver::received);
                }
                next = result.getNextBeginOffset();
            }
            JSONObject line = event("queue");
            line.put("queue_id", queue.getQueueId());
            line.put("min_offset", consumer.minOffset(queue));
            line.put("max_offset", end);
            print(line);
        }
        consumer.shutdown();
    }

    private static void litePull(String namesrv, String topic, String group, String expression) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullThreadNums(2);
        consumer.subscribe(topic, selector(expression));
        consumer.start();
        Thread poller = new Thread(() -> {
            while (consumer.isRunning()) {
                consumer.poll(200).forEach(Driver::received);
            }
        });
        poller.start();
        print(event("started"));
        untilEndOfInput();
        consumer.shutdown();
        poller.join();
        print(event("stopped"));
    }

    private static MessageSelector selector(String expression) {
        return expression.startsWith("sql:")
            ? MessageSelector.bySql(expression.substring(4)) : MessageSelector.byTag(expression);
    }

    private static void query(String namesrv, String topic, String what, boolean byKey) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("g_query");
        producer.setNamesrvAddr(namesrv);
        producer.start();
        if (byKey) {
            long now = System.currentTimeMillis();
            producer.queryMessage(topic, what, 64, now - 3_600_000, now + 60_000)
                .getMessageList().forEach(Driver::received);
        } else {
            received(producer.viewMessage(topic, what));
        }
        producer.shutdown();
    }

    static Message message(String topic, JSONObject asked) {
        Message message = new Message(topic, Base64.getDecoder().decode(asked.getString("body")));
        if (asked.getString("tags") != null) {
            message.setTags(asked.getString("tags"));
        }
        if (asked.getString("keys") != null) {
            message.setKeys(asked.getString("keys"));
        }
        if (asked.getInteger("delay") != null) {
            message.setDelayTimeLevel(asked.getInteger("delay"));
        }
        JSONObject properties = asked.getJSONObject("properties");
        if (properties != null) {
            for (Map.Entry<String, Object> entry : properties.entrySet()) {
                message.putUserProperty(entry.getKey(), (String) entry.getValue());
            }
        }
        return message;
    }

    static JSONObject sent(int index, SendResult result) {
        return sent(index, result, result.getMsgId(), result.getOffsetMsgId(), result.getQueueOffset());
    }

    private static JSONObject sent(
        int index, SendResult result, String id, String offsetId, long queueOffset) {
        JSONObject line = event("sent");
        line.put("index", index);
        line.put("status", result.getSendStatus().name());
        line.put("msg_id", id);
        line.put("offset_msg_id", offsetId);
        line.put("broker", result.getMessageQueue().getBrokerName());
        line.put("queue_id", result.getMessageQueue().getQueueId());
        line.put("queue_offset", queueOffset);
        return line;
    }

    static void received(MessageExt message) {
        JSONObject line = event("message");
        line.put("at_ms", System.currentTimeMillis());
        line.put("broker", message.getBrokerName());
        line.put("msg_id", message.getMsgId());
        if (message instanceof org.apache.rocketmq.common.message.MessageClientExt) {
            line.put("offset_msg_id",
                ((org.apache.rocketmq.common.message.MessageClientExt) message).getOffsetMsgId());
        }
        line.put("topic", message.getTopic());
        line.put("queue_id", message.getQueueId());
        line.put("queue_offset", message.getQueueOffset());
        line.put("born_ms", message.getBornTimestamp());
        line.put("store_ms", message.getStoreTimestamp());
        line.put("sys_flag", message.getSysFlag());
        line.put("reconsume_times", message.getReconsumeTimes());
        line.put("tags", message.getTags());
        line.put("keys", message.getKeys());
        line.put("properties", message.getProperties());
        line.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        print(line);
    }

    static JSONObject event(String name) {
        JSONObject line = new JSONObject();
        line.put("event", name);
        return line;
    }

    static synchronized void print(JSONObject line) {
        OUT.println(JSON.toJSONString(line, SerializerFeature.DisableCircularReferenceDetect,
            SerializerFeature.WriteMapNullValue));
    }

    private static BufferedReader input;

    static BufferedReader input() {
        if (input == null) {
            input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        }
        return input;
    }

    static void untilEndOfInput() throws Exception {
        while (input().readLine() != null) {
            continue;
        }
    }
}
