package cosmodrome.peers;

import java.util.HashMap;
import java.util.Map;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.protocol.heartbeat.MessageModel;

/**
 * A mode with options: <code>MODE+NAME+NAME=VALUE</code>. clients.py lists those of all drivers.
 * Of this client alone:
 *
 * <pre>
 * compress=TYPE  ZLIB, LZ4 or ZSTD
 * max=BYTES      the largest body the client itself lets pass
 * pace=MS        waits after each message sent in sync or orderly mode
 * plain          compresses nothing
 * poll=MS        how often routes are asked for and queues are shared out
 * report         a refused message is printed as a line; the others are still sent
 * trace          writes trace records
 * unit=NAME, unitmode, vip
 * </pre>
 */
final class Options {
    final String mode;
    private final Map<String, String> values = new HashMap<>();

    private Options(String[] parts) {
        mode = parts[0];
        for (int i = 1; i < parts.length; i++) {
            String[] pair = parts[i].split("=", 2);
            values.put(pair[0], pair.length == 1 ? "" : pair[1]);
        }
    }

    static Options of(String text) {
        return new Options(text.split("\\+"));
    }

    boolean has(String name) {
        return values.containsKey(name);
    }

    int number(String name, int otherwise) {
        return has(name) ? Integer.parseInt(values.get(name)) : otherwise;
    }

    DefaultMQProducer producer(String group) {
        if (has("compress")) {
            System.setProperty("rocketmq.message.compressType", values.get("compress"));
        }
        DefaultMQProducer producer =
            new DefaultMQProducer(values.get("namespace"), group, null, has("trace"), null);
        configure(producer);
        if (has("plain")) {
            producer.setCompressMsgBodyOverHowmuch(Integer.MAX_VALUE);
        }
        if (has("max")) {
            producer.setMaxMessageSize(number("max", 0));
        }
        return producer;
    }

    DefaultMQPushConsumer consumer(String group) {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(
            values.get("namespace"), group, null, new AllocateMessageQueueAveragely(), has("trace"), null);
        configure(consumer);
        String from = values.getOrDefault("from", "first");
        if (from.equals("first")) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        } else if (from.equals("last")) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        } else {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_TIMESTAMP);
            consumer.setConsumeTimestamp(from);
        }
        if (has("broadcast")) {
            consumer.setMessageModel(MessageModel.BROADCASTING);
        }
        return consumer;
    }

    private void configure(ClientConfig client) {
        if (has("instance")) {
            client.setInstanceName(values.get("instance"));
        }
        if (has("unit")) {
            client.setUnitName(values.get("unit"));
        }
        client.setUnitMode(has("unitmode"));
        client.setVipChannelEnabled(has("vip"));
        if (has("poll")) {
            client.setPollNameServerInterval(number("poll", 0));
            System.setProperty("rocketmq.client.rebalance.waitInterval", values.get("poll"));
        }
    }
}
