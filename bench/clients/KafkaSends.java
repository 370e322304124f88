import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Semaphore;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.errors.TopicExistsException;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Keeps a number of sends in flight: address, topic, flush.messages of the topic (0: as the broker has it), partitions,
 * windows (comma between), body bytes, seconds to warm up, seconds measured, process id of the broker. One JSON line
 * per window, as bench.loadgen prints it.
 */
public class KafkaSends {
    static final int LATENCY_MAX_US = 5_000_000;

    // Written by the producer's thread alone while `measuring` says so.
    static final int[] latencies = new int[LATENCY_MAX_US + 1];
    static volatile boolean measuring;
    static volatile long messages;
    static volatile long errors;
    static volatile String firstError = "";

    public static void main(String[] words) throws Exception {
        String topic = words[1];
        int size = Integer.parseInt(words[5]);
        double warm = Double.parseDouble(words[6]);
        double seconds = Double.parseDouble(words[7]);
        makeTopic(words[0], topic, words[2], Integer.parseInt(words[3]));
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("acks", "all");
        settings.put("linger.ms", "0"); // a batch is what has come together, none is waited for
        byte[] body = new byte[size];
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings)) {
            for (String word : words[4].split(",")) {
                int window = Integer.parseInt(word);
                Semaphore free = new Semaphore(window);
                send(producer, free, topic, body, warm);
                java.util.Arrays.fill(latencies, 0);
                messages = errors = 0;
                double cpu = cpuSeconds(words[8]);
                long began = System.nanoTime();
                measuring = true;
                send(producer, free, topic, body, seconds);
                measuring = false;
                double took = (System.nanoTime() - began) / 1e9;
                cpu = cpuSeconds(words[8]) - cpu;
                free.acquire(window); // all are answered
                print(window, took, cpu, size);
            }
        }
    }

    static void send(KafkaProducer<byte[], byte[]> producer, Semaphore free, String topic, byte[] body, double seconds)
            throws InterruptedException {
        long until = System.nanoTime() + (long) (seconds * 1e9);
        while (System.nanoTime() < until) {
            free.acquire();
            long began = System.nanoTime();
            producer.send(new ProducerRecord<>(topic, body), (said, error) -> {
                if (measuring) {
                    long us = (System.nanoTime() - began) / 1000;
                    latencies[(int) Math.min(us, LATENCY_MAX_US)]++;
                    messages++;
                }
                if (error != null) {
                    errors++;
                    firstError = error.toString();
                }
                free.release();
            });
        }
    }

    static void makeTopic(String address, String topic, String flush, int partitions) throws Exception {
        NewTopic wanted = new NewTopic(topic, Optional.of(partitions), Optional.of((short) 1));
        if (!flush.equals("0")) {
            wanted.configs(Map.of("flush.messages", flush));
        }
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", address))) {
            admin.createTopics(java.util.List.of(wanted)).all().get();
        } catch (ExecutionException error) {
            if (!(error.getCause() instanceof TopicExistsException)) {
                throw error;
            }
        }
    }

    static double cpuSeconds(String pid) throws IOException {
        String line = Files.readString(Path.of("/proc/" + pid + "/stat"));
        String[] fields = line.substring(line.lastIndexOf(')') + 2).split(" ");
        return (Long.parseLong(fields[11]) + Long.parseLong(fields[12])) / 100.0; // ticks of 10 ms
    }

    static long percentile(long count, double share) {
        long seen = 0;
        for (int us = 0; us <= LATENCY_MAX_US; us++) {
            seen += latencies[us];
            if (seen >= count * share && seen > 0) {
                return us;
            }
        }
        return 0;
    }

    static void print(int window, double seconds, double cpu, int size) {
        long count = messages;
        System.out.printf(
                java.util.Locale.ROOT,
                "{\"window\":%d,\"tps\":%.0f,\"mb_s\":%.1f,\"p50_us\":%d,\"p99_us\":%d,\"p999_us\":%d,\"errors\":%d,"
                        + "\"first_error\":\"%s\",\"msgs\":%d,\"srv_cpu_us_msg\":%.2f}%n",
                window, count / seconds, count * size / seconds / 1e6, percentile(count, 0.5), percentile(count, 0.99),
                percentile(count, 0.999), errors, firstError.replaceAll("[^\\w .:,-]", " "), count,
                count > 0 ? cpu / count * 1e6 : 0);
    }
}
