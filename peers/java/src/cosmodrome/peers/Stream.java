package cosmodrome.peers;

import com.alibaba.fastjson.JSONObject;
import java.nio.charset.StandardCharsets;
import java.util.Base64;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/**
 * A producer that sends 0, 1, 2 … until the end of its input, in turn to all queues (mode sync) or to
 * the queue its number modulo the number of queues names (mode orderly). Prints a line <code>message</code>
 * with body, queue and offset of each that was acknowledged, and ends at the first that was not.
 */
final class Stream {
    private Stream() {
    }

    static void send(String namesrv, String topic, String group, String mode) throws Exception {
        Options options = Options.of(mode);
        DefaultMQProducer producer = options.producer(group);
        producer.setNamesrvAddr(namesrv);
        producer.setSendMsgTimeout(10_000);
        producer.start();
        Driver.print(Driver.event("started"));
        AtomicBoolean ended = new AtomicBoolean();
        Thread watcher = new Thread(() -> {
            try {
                Driver.untilEndOfInput();
            } catch (Exception error) {
                error.printStackTrace();
            }
            ended.set(true);
        });
        watcher.setDaemon(true);
        watcher.start();
        for (int number = 0; !ended.get(); number++) {
            byte[] body = String.valueOf(number).getBytes(StandardCharsets.US_ASCII);
            Message message = new Message(topic, body);
            SendResult result = options.mode.equals("orderly")
                ? producer.send(message, (queues, m, n) -> queues.get((Integer) n % queues.size()), number)
                : producer.send(message);
            JSONObject line = Driver.event("message");
            line.put("body", Base64.getEncoder().encodeToString(body));
            line.put("status", result.getSendStatus().name());
            line.put("queue_id", result.getMessageQueue().getQueueId());
            line.put("queue_offset", result.getQueueOffset());
            Driver.print(line);
            Thread.sleep(options.number("pace", 20));
        }
        producer.shutdown();
        Driver.print(Driver.event("stopped"));
    }
}
