package cosmodrome.peers;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Phaser;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Producers that live as long as their input: each line is sent when it is read, and answered by
 * <code>sent</code> or <code>failed</code> with the times before and after. A failure ends nothing,
 * so servers may come and go meanwhile.
 *
 * <pre>
 * flow          NAMESRV TOPIC GROUP TIMEOUT_MS sync|async|avoiding PAUSE_MS
 * flow-transact NAMESRV TOPIC GROUP
 * </pre>
 *
 * <code>avoiding</code> is sync with the client's own avoidance of slow brokers switched on. A
 * message to flow-transact has the property outcome as with transact; asked about a message whose
 * local transaction was not run, the producer says rollback.
 */
final class Flow {
    private Flow() {
    }

    /** The client's intervals are half a minute; a test says -Dpeers.pollMs to see changes sooner. */
    static void hurry(ClientConfig client) {
        Integer poll = Integer.getInteger("peers.pollMs");
        if (poll != null) {
            client.setPollNameServerInterval(poll);
            client.setHeartbeatBrokerInterval(poll);
        }
    }

    static void send(String namesrv, String topic, String group, String timeout, String mode, String pause)
        throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(Integer.parseInt(timeout));
        hurry(producer);
        if (mode.equals("avoiding")) {
            producer.setSendLatencyFaultEnable(true);
            // The steps of the defaults, but minutes become seconds.
            producer.setNotAvailableDuration(new long[] {0, 0, 1000, 1000, 2000, 3000, 5000});
        }
        producer.start();
        Driver.print(Driver.event("started"));
        Phaser open = new Phaser(1);
        int index = 0;
        for (String line; (line = Driver.input().readLine()) != null; index++) {
            Message message = Driver.message(topic, JSON.parseObject(line));
            long before = System.currentTimeMillis();
            if (mode.equals("async")) {
                final int number = index;
                open.register();
                try {
                    producer.send(message, new SendCallback() {
                        @Override public void onSuccess(SendResult result) {
                            answer(message, before, Driver.sent(number, result));
                            open.arriveAndDeregister();
                        }

                        @Override public void onException(Throwable error) {
                            answer(message, before, failed(number, error));
                            open.arriveAndDeregister();
                        }
                    });
                } catch (Exception error) {
                    answer(message, before, failed(index, error));
                    open.arriveAndDeregister();
                }
            } else {
                try {
                    answer(message, before, Driver.sent(index, producer.send(message)));
                } catch (Exception error) {
                    answer(message, before, failed(index, error));
                }
            }
            Thread.sleep(Integer.parseInt(pause));
        }
        open.arriveAndAwaitAdvance();
        producer.shutdown();
        Driver.print(Driver.event("stopped"));
    }

    static void transact(String namesrv, String topic, String group) throws Exception {
        Map<String, String> run = new ConcurrentHashMap<>();
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setNamesrvAddr(namesrv);
        hurry(producer);
        producer.setTransactionListener(new TransactionListener() {
            @Override public LocalTransactionState executeLocalTransaction(Message message, Object index) {
                String outcome = message.getUserProperty("outcome");
                run.put(new String(message.getBody(), StandardCharsets.UTF_8), outcome);
                return Driver.state(outcome);
            }

            @Override public LocalTransactionState checkLocalTransaction(MessageExt message) {
                String outcome = run.getOrDefault(
                    new String(message.getBody(), StandardCharsets.UTF_8), "rollback");
                answer(message, System.currentTimeMillis(), Driver.event("checked"));
                return Driver.state(outcome.replace("later:", ""));
            }
        });
        producer.start();
        Driver.print(Driver.event("started"));
        int index = 0;
        for (String line; (line = Driver.input().readLine()) != null; index++) {
            Message message = Driver.message(topic, JSON.parseObject(line));
            long before = System.currentTimeMillis();
            try {
                TransactionSendResult result = producer.sendMessageInTransaction(message, index);
                JSONObject sent = Driver.sent(index, result);
                sent.put("state", result.getLocalTransactionState().name());
                answer(message, before, sent);
            } catch (Exception error) {
                answer(message, before, failed(index, error));
            }
            Thread.sleep(20);
        }
        producer.shutdown();
        Driver.print(Driver.event("stopped"));
    }

    /**
     * A listener for <code>judging:MAX:LEVEL</code>: a body that begins with "bad" always fails, one
     * that begins with "second" only at its first delivery.
     */
    static MessageListenerConcurrently judging(DefaultMQPushConsumer consumer, String mode) {
        String[] parts = mode.split(":");
        consumer.setMaxReconsumeTimes(Integer.parseInt(parts[1]));
        return (messages, context) -> {
            context.setDelayLevelWhenNextConsume(Integer.parseInt(parts[2]));
            boolean good = true;
            for (MessageExt message : messages) {
                Driver.received(message);
                String text = new String(message.getBody(), StandardCharsets.UTF_8);
                good &= !text.startsWith("bad")
                    && !(text.startsWith("second") && message.getReconsumeTimes() == 0);
            }
            return good ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        };
    }

    private static void answer(Message message, long before, JSONObject line) {
        line.put("body", Base64.getEncoder().encodeToString(message.getBody()));
        line.put("before_ms", before);
        line.put("at_ms", System.currentTimeMillis());
        Driver.print(line);
    }

    private static JSONObject failed(int index, Throwable error) {
        JSONObject line = Driver.event("failed");
        line.put("index", index);
        line.put("error", String.valueOf(error));
        return line;
    }
}
