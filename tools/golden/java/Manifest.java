package cosmodrome.golden;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import com.alibaba.fastjson.serializer.SerializerFeature;
import java.io.File;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.common.message.MessageClientExt;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * Writes down what the Java client reads from a running broker, and what the Java decoder sees in
 * the files of that broker: {@code NAMESRV BROKER STORE OUT}.
 */
@SuppressWarnings("deprecation")
public final class Manifest {
    private static final int PADDING_MAGIC = 0xCBD43194;
    private static final int ENTRY_BYTES = 20;
    private static final int KEYS_PER_TOPIC = 25;

    private final Path store;
    private final Map<Long, JSONObject> walked = new TreeMap<>();
    private final JSONObject out = new JSONObject(true);

    public static void main(String[] words) throws Exception {
        System.setOut(System.err);
        Thread.currentThread().setUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        });
        Stage stage = new Stage(words[0], words[1], "");
        Manifest manifest = new Manifest(Path.of(words[2]));
        DefaultMQAdminExt tool = stage.neutral(new DefaultMQAdminExt(5_000L));
        tool.start();
        manifest.walkLog(manifest.logEnd(tool, stage));
        manifest.readThroughClient(tool, stage);
        tool.shutdown();
        Files.writeString(Path.of(words[3]), JSON.toJSONString(manifest.out,
            SerializerFeature.DisableCircularReferenceDetect, SerializerFeature.MapSortField));
        System.exit(0);
    }

    private Manifest(Path store) {
        this.store = store;
    }

    /** Behind this offset the files may still hold what recovery has cut off. */
    private long logEnd(DefaultMQAdminExt tool, Stage stage) throws Exception {
        Map<String, String> facts = tool.fetchBrokerRuntimeStats(stage.broker).getTable();
        long end = Long.parseLong(facts.get("commitLogMaxOffset"));
        out.put("brokerMaxCommitLogOffset", end);
        out.put("brokerMinCommitLogOffset", Long.parseLong(facts.get("commitLogMinOffset")));
        return end;
    }

    private void walkLog(long logEnd) throws Exception {
        List<JSONObject> files = new ArrayList<>();
        List<JSONObject> padding = new ArrayList<>();
        long end = 0;
        File[] segments = store.resolve("commitlog").toFile().listFiles();
        Arrays.sort(segments);
        for (File segment : segments) {
            JSONObject file = new JSONObject(true);
            file.put("file", "commitlog/" + segment.getName());
            file.put("size", segment.length());
            files.add(file);
            ByteBuffer data = ByteBuffer.wrap(Files.readAllBytes(segment.toPath()));
            long base = Long.parseLong(segment.getName());
            while (data.remaining() >= 8 && base + data.position() < logEnd) {
                int size = data.getInt(data.position());
                int magic = data.getInt(data.position() + 4);
                if (magic == PADDING_MAGIC) {
                    JSONObject blank = new JSONObject(true);
                    blank.put("offset", base + data.position());
                    blank.put("size", size);
                    blank.put("magic", "0xcbd43194");
                    padding.add(blank);
                    break;
                }
                if (size <= 0) {
                    break;
                }
                int at = data.position();
                MessageExt message = MessageDecoder.decode(data, true, false);
                if (message == null || message.getCommitLogOffset() != base + at) {
                    break;
                }
                data.position(at + size);
                end = base + at + size;
                walked.put(base + at, raw(message));
            }
        }
        out.put("commitlog_files", files);
        out.put("commitlog_walk_end", end);
        out.put("commitlog_padding", padding);
        out.put("commitlog_walk_count", walked.size());
        out.put("commitlog_walk", walked.values());
    }

    private static JSONObject common(MessageExt message) {
        JSONObject one = new JSONObject(true);
        one.put("topic", message.getTopic());
        one.put("queueId", message.getQueueId());
        one.put("queueOffset", message.getQueueOffset());
        one.put("commitLogOffset", message.getCommitLogOffset());
        one.put("storeSize", message.getStoreSize());
        one.put("flag", message.getFlag());
        one.put("sysFlag", message.getSysFlag());
        one.put("bodyCRC", message.getBodyCRC());
        one.put("bornTimestamp", message.getBornTimestamp());
        one.put("bornHost", host(message.getBornHost()));
        one.put("storeTimestamp", message.getStoreTimestamp());
        one.put("storeHost", host(message.getStoreHost()));
        one.put("reconsumeTimes", message.getReconsumeTimes());
        one.put("preparedTransactionOffset", message.getPreparedTransactionOffset());
        return one;
    }

    private static JSONObject raw(MessageExt message) throws Exception {
        JSONObject one = common(message);
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        one.put("raw_body_len", body.length);
        one.put("raw_body_sha256", sha256(body));
        one.put("properties", new TreeMap<>(message.getProperties()));
        return one;
    }

    private void readThroughClient(DefaultMQAdminExt tool, Stage stage) throws Exception {
        DefaultMQPullConsumer consumer = stage.puller("TOOLS_CONSUMER");
        Set<String> known = tool.getAllTopicConfig(stage.broker, 5_000).getTopicConfigTable().keySet();
        Map<String, Map<String, Object>> queues = new TreeMap<>();
        List<JSONObject> messages = new ArrayList<>();
        List<JSONObject> searches = new ArrayList<>();
        List<JSONObject> queries = new ArrayList<>();
        File[] topics = store.resolve("consumequeue").toFile().listFiles();
        Arrays.sort(topics);
        for (File topic : topics) {
            if (!known.contains(topic.getName())) {
                continue;
            }
            Set<String> keys = new LinkedHashSet<>();
            File[] ids = topic.listFiles();
            Arrays.sort(ids);
            for (File id : ids) {
                MessageQueue queue = Stage.queue(topic.getName(), Integer.parseInt(id.getName()));
                List<MessageExt> found = pull(consumer, queue);
                JSONObject bounds = new JSONObject(true);
                bounds.put("min", consumer.minOffset(queue));
                bounds.put("max", consumer.maxOffset(queue));
                queues.computeIfAbsent(topic.getName(), name -> new TreeMap<>()).put(id.getName(), bounds);
                for (MessageExt message : found) {
                    messages.add(delivered(message, id));
                    if (message.getKeys() != null) {
                        keys.addAll(Arrays.asList(message.getKeys().split(" ")));
                    }
                }
                search(consumer, queue, found, searches);
            }
            query(tool, topic.getName(), keys, queries);
        }
        out.put("queues", queues);
        out.put("search_offset", searches);
        out.put("key_queries", queries);
        out.put("messages", messages);
        consumer.shutdown();
    }

    private static List<MessageExt> pull(DefaultMQPullConsumer consumer, MessageQueue queue) throws Exception {
        List<MessageExt> found = new ArrayList<>();
        long next = consumer.minOffset(queue);
        long end = consumer.maxOffset(queue);
        while (next < end) {
            PullResult result = consumer.pull(queue, "*", next, 32);
            if (result.getMsgFoundList() != null) {
                found.addAll(result.getMsgFoundList());
            }
            if (result.getNextBeginOffset() <= next) {
                throw new IllegalStateException(queue + " stays at " + next + ": " + result);
            }
            next = result.getNextBeginOffset();
        }
        return found;
    }

    private JSONObject delivered(MessageExt message, File queue) throws Exception {
        JSONObject one = new JSONObject(true);
        one.put("msgId", message.getMsgId());
        one.put("offsetMsgId", ((MessageClientExt) message).getOffsetMsgId());
        one.putAll(common(message));
        one.put("tags", message.getTags());
        one.put("keys", message.getKeys());
        one.put("properties", properties(message));
        byte[] body = message.getBody() == null ? new byte[0] : message.getBody();
        one.put("body_len", body.length);
        one.put("body_sha256", sha256(body));
        String text = text(body);
        if (text != null) {
            one.put("body_text", text);
        }
        File[] files = queue.listFiles();
        Arrays.sort(files);
        long at = message.getQueueOffset() * ENTRY_BYTES;
        int size = (int) files[0].length();
        byte[] data = Files.readAllBytes(queue.toPath().resolve(String.format("%020d", at / size * size)));
        ByteBuffer entry = ByteBuffer.wrap(data, (int) (at % size), ENTRY_BYTES);
        one.put("cq_offset", entry.getLong());
        one.put("cq_size", entry.getInt());
        one.put("cq_tagsCode", entry.getLong());
        JSONObject stored = walked.get(message.getCommitLogOffset());
        one.put("raw_body_len", stored.get("raw_body_len"));
        one.put("raw_body_sha256", stored.get("raw_body_sha256"));
        return one;
    }

    /** Without what the client adds to each message it hands over. */
    private static Map<String, String> properties(MessageExt message) {
        Map<String, String> properties = new TreeMap<>(message.getProperties());
        properties.remove("MIN_OFFSET");
        properties.remove("MAX_OFFSET");
        return properties;
    }

    private static void search(DefaultMQPullConsumer consumer, MessageQueue queue, List<MessageExt> found,
        List<JSONObject> searches) throws Exception {
        Set<Long> times = new LinkedHashSet<>();
        times.add(0L);
        if (!found.isEmpty()) {
            long first = found.get(0).getStoreTimestamp();
            long last = found.get(found.size() - 1).getStoreTimestamp();
            times.addAll(Arrays.asList(first - 1, first, found.get(found.size() / 2).getStoreTimestamp(),
                last, last + 60_000));
        }
        for (long time : times) {
            JSONObject one = new JSONObject(true);
            one.put("topic", queue.getTopic());
            one.put("queueId", queue.getQueueId());
            one.put("timestamp", time);
            one.put("offset", consumer.searchOffset(queue, time));
            searches.add(one);
        }
    }

    private static void query(DefaultMQAdminExt tool, String topic, Set<String> keys, List<JSONObject> queries)
        throws Exception {
        int left = KEYS_PER_TOPIC;
        for (String key : keys) {
            if (left-- == 0) {
                break;
            }
            List<String> ids = new ArrayList<>();
            try {
                for (MessageExt message : tool.queryMessage(topic, key, 64, 0, Long.MAX_VALUE).getMessageList()) {
                    ids.add(MessageDecoder.createMessageId(message.getStoreHost(), message.getCommitLogOffset()));
                }
            } catch (MQClientException nothing) {
                // The client says "nothing found" by throwing; an empty list says it here.
                ids.clear();
            }
            JSONObject one = new JSONObject(true);
            one.put("topic", topic);
            one.put("key", key);
            one.put("offsetMsgIds", ids);
            queries.add(one);
        }
    }

    private static String host(SocketAddress address) {
        InetSocketAddress host = (InetSocketAddress) address;
        return host.getAddress().getHostAddress() + ":" + host.getPort();
    }

    private static String text(byte[] body) {
        if (body.length > 50) {
            return null;
        }
        try {
            return StandardCharsets.UTF_8.newDecoder().decode(ByteBuffer.wrap(body)).toString();
        } catch (CharacterCodingException binary) {
            return null;
        }
    }

    private static String sha256(byte[] data) throws Exception {
        StringBuilder text = new StringBuilder();
        for (byte one : MessageDigest.getInstance("SHA-256").digest(data)) {
            text.append(String.format("%02x", one));
        }
        return text.toString();
    }
}
