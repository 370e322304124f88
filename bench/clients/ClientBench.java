import java.lang.management.ManagementFactory;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/** One case of bench.client with the Java client: CASE NAMESRV TOPIC MESSAGES SIZE. */
public final class ClientBench {
    static final int THREADS = 64;
    static final int WINDOW = 512;
    static final int BATCH = 32;
    static final int RATE = 1000;

    static long beganNs;
    static long beganCpuNs;

    static long cpuNs() {
        return ((com.sun.management.OperatingSystemMXBean)
            ManagementFactory.getOperatingSystemMXBean()).getProcessCpuTime();
    }

    static void begin() {
        beganNs = System.nanoTime();
        beganCpuNs = cpuNs();
    }

    static void say(int messages, int failed, long[] latencies) {
        double seconds = (System.nanoTime() - beganNs) / 1e9;
        double cpu = (cpuNs() - beganCpuNs) / 1e9;
        double p50 = 0, p99 = 0;
        if (latencies != null) {
            Arrays.sort(latencies);
            p50 = latencies[latencies.length / 2] / 1e6;
            p99 = latencies[(int) (latencies.length * 0.99)] / 1e6;
        }
        System.out.printf(java.util.Locale.ROOT,
            "{\"messages\":%d,\"failed\":%d,\"seconds\":%f,\"cpu_seconds\":%f,\"p50_ms\":%f,"
            + "\"p99_ms\":%f}%n", messages, failed, seconds, cpu, p50, p99);
    }

    public static void main(String[] words) throws Exception {
        String topic = words[2];
        int count = Integer.parseInt(words[3]);
        byte[] body = new byte[Integer.parseInt(words[4])];
        switch (words[0]) {
            case "consume": consume(words[1], topic, count); break;
            case "e2e": endToEnd(words[1], topic, count, body.length); break;
            default: produce(words[0], words[1], topic, count, body);
        }
        System.exit(0);
    }

    static DefaultMQProducer producer(String namesrv) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("bench_java");
        producer.setNamesrvAddr(namesrv);
        producer.setRetryTimesWhenSendFailed(0);
        producer.setRetryTimesWhenSendAsyncFailed(0);
        producer.start();
        return producer;
    }

    static void produce(String how, String namesrv, String topic, int count, byte[] body)
            throws Exception {
        DefaultMQProducer producer = producer(namesrv);
        send(producer, how, topic, count / 2, body); // until the compiler is done with it
        begin();
        int failed = send(producer, how, topic, count, body);
        say(count - failed, failed, null);
    }

    static int send(DefaultMQProducer producer, String how, String topic, int count, byte[] body)
            throws Exception {
        AtomicInteger failed = new AtomicInteger();
        if (how.equals("pipelined")) {
            Semaphore window = new Semaphore(WINDOW);
            SendCallback answered = new SendCallback() {
                public void onSuccess(SendResult result) {
                    window.release();
                }

                public void onException(Throwable error) {
                    failed.incrementAndGet();
                    window.release();
                }
            };
            for (int i = 0; i < count; i++) {
                window.acquire();
                producer.send(new Message(topic, body), answered);
            }
            window.acquire(WINDOW);
            return failed.get();
        }
        int step = how.equals("batch") ? BATCH : 1;
        int threads = how.equals("batch") ? WINDOW / BATCH : THREADS;
        AtomicInteger left = new AtomicInteger(count);
        CountDownLatch done = new CountDownLatch(threads);
        for (int t = 0; t < threads; t++) {
            new Thread(() -> {
                while (left.addAndGet(-step) >= 0) {
                    try {
                        if (step == 1) {
                            producer.send(new Message(topic, body));
                        } else {
                            List<Message> batch = new ArrayList<>(step);
                            for (int i = 0; i < step; i++) {
                                batch.add(new Message(topic, body));
                            }
                            producer.send(batch);
                        }
                    } catch (Exception error) {
                        failed.addAndGet(step);
                    }
                }
                done.countDown();
            }).start();
        }
        done.await();
        return failed.get();
    }

    static DefaultMQPushConsumer consumer(String namesrv, String topic, String tags,
            MessageListenerConcurrently listener) throws Exception {
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer("bench_" + UUID.randomUUID().toString().replace("-", ""));
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, tags);
        consumer.registerMessageListener(listener);
        consumer.start();
        return consumer;
    }

    static void consume(String namesrv, String topic, int count) throws Exception {
        AtomicInteger seen = new AtomicInteger();
        CountDownLatch enough = new CountDownLatch(1);
        int first = count / 4;
        consumer(namesrv, topic, "*", (messages, context) -> {
            int before = seen.getAndAdd(messages.size());
            if (before < first && before + messages.size() >= first) {
                begin();
            } else if (before < count && before + messages.size() >= count) {
                enough.countDown();
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        enough.await();
        say(count - first, 0, null);
    }

    static void endToEnd(String namesrv, String topic, int count, int size) throws Exception {
        DefaultMQProducer producer = producer(namesrv);
        String tag = UUID.randomUUID().toString();
        int warm = RATE * 5;
        long[] latencies = new long[count];
        AtomicInteger seen = new AtomicInteger(-warm);
        CountDownLatch enough = new CountDownLatch(1);
        CountDownLatch reached = new CountDownLatch(1);
        producer.send(new Message(topic, tag, new byte[size]));
        consumer(namesrv, topic, tag, (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                long sent = ByteBuffer.wrap(message.getBody()).getLong();
                if (sent == 0) {
                    reached.countDown();
                    continue;
                }
                int at = seen.getAndIncrement();
                if (at >= 0 && at < count) {
                    latencies[at] = now - sent;
                }
                if (at == count - 1) {
                    enough.countDown();
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        reached.await();
        SendCallback nothing = new SendCallback() {
            public void onSuccess(SendResult result) { }

            public void onException(Throwable error) { }
        };
        long start = System.nanoTime();
        for (int i = 0; i < warm + count; i++) {
            if (i == warm) {
                begin();
            }
            long wait = start + i * (1_000_000_000L / RATE) - System.nanoTime();
            if (wait > 0) {
                Thread.sleep(wait / 1_000_000, (int) (wait % 1_000_000));
            }
            byte[] body = ByteBuffer.allocate(size).putLong(0, System.nanoTime()).array();
            producer.send(new Message(topic, tag, body), nothing);
        }
        enough.await();
        say(count, 0, latencies);
    }
}
