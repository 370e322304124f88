package cosmodrome.peers;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Pull consumers that do what the lines of their input say, one JSON object each, and answer each
 * with one line (after the messages, if it brings any).
 *
 * <pre>
 * pull: {"do": "pull|commit|fetch|min|max|search", "queue": N, "offset": N, "count": N, "at_ms": N}
 * lite: {"do": "poll|seek|begin|end|pause|resume|commit|committed|search|queues", "queue": N, "offset": N, "ms": N}
 * </pre>
 */
final class Pulls {
    private Pulls() {
    }

    @SuppressWarnings("deprecation")
    static void pull(String namesrv, String topic, String group) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchSubscribeMessageQueues(topic);
        for (String text; (text = Driver.input().readLine()) != null; ) {
            JSONObject step = JSON.parseObject(text);
            MessageQueue queue = find(queues, step.getIntValue("queue"));
            JSONObject line = Driver.event(step.getString("do"));
            switch (step.getString("do")) {
                case "pull":
                    PullResult result =
                        consumer.pull(queue, "*", step.getLongValue("offset"), step.getIntValue("count"));
                    List<MessageExt> found =
                        result.getMsgFoundList() == null ? new ArrayList<>() : result.getMsgFoundList();
                    line.put("status", result.getPullStatus().name());
                    line.put("count", found.size());
                    line.put("bytes", found.stream().mapToInt(MessageExt::getStoreSize).sum());
                    line.put("first", found.isEmpty() ? null : found.get(0).getQueueOffset());
                    line.put("next", result.getNextBeginOffset());
                    line.put("min", result.getMinOffset());
                    line.put("max", result.getMaxOffset());
                    break;
                case "commit":
                    consumer.updateConsumeOffset(queue, step.getLongValue("offset"));
                    consumer.getOffsetStore().persist(queue);
                    consumer.getOffsetStore().updateConsumeOffsetToBroker(queue, step.getLongValue("offset"), false);
                    break;
                case "fetch": line.put("offset", consumer.fetchConsumeOffset(queue, true)); break;
                case "min": line.put("offset", consumer.minOffset(queue)); break;
                case "max": line.put("offset", consumer.maxOffset(queue)); break;
                case "search": line.put("offset", consumer.searchOffset(queue, step.getLongValue("at_ms"))); break;
                default: throw new IllegalArgumentException("unknown step " + text);
            }
            Driver.print(line);
        }
        consumer.shutdown();
    }

    static void litePull(String namesrv, String topic, String group, String mode) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPullThreadNums(2);
        consumer.setAutoCommit(false);
        if (mode.equals("subscribe")) {
            consumer.subscribe(topic, "*");
        }
        consumer.start();
        Collection<MessageQueue> queues = consumer.fetchMessageQueues(topic);
        if (mode.equals("assign")) {
            consumer.assign(queues);
        }
        Driver.print(Driver.event("started"));
        for (String text; (text = Driver.input().readLine()) != null; ) {
            JSONObject step = JSON.parseObject(text);
            MessageQueue queue = find(queues, step.getIntValue("queue"));
            JSONObject line = Driver.event(step.getString("do"));
            switch (step.getString("do")) {
                case "poll":
                    List<MessageExt> found = consumer.poll(step.getLongValue("ms"));
                    found.forEach(Driver::received);
                    line.put("count", found.size());
                    break;
                case "seek": consumer.seek(queue, step.getLongValue("offset")); break;
                case "begin": consumer.seekToBegin(queue); break;
                case "end": consumer.seekToEnd(queue); break;
                case "pause": consumer.pause(queues); break;
                case "resume": consumer.resume(queues); break;
                case "commit": consumer.commitSync(); break;
                case "committed": line.put("offset", consumer.committed(queue)); break;
                case "search": line.put("offset", consumer.offsetForTimestamp(queue, step.getLongValue("at_ms"))); break;
                case "queues": line.put("count", queues.size()); break;
                default: throw new IllegalArgumentException("unknown step " + text);
            }
            Driver.print(line);
        }
        consumer.shutdown();
    }

    private static MessageQueue find(Collection<MessageQueue> queues, int id) {
        return queues.stream().filter(queue -> queue.getQueueId() == id).findFirst().orElse(null);
    }
}
