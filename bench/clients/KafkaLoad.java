import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Sends what bench.spark_load sends, to Kafka: address, topic, file of bodies, size, count, rate, queues.
 * Every message there has an id among its properties; here it is a header of the same name and size.
 */
public class KafkaLoad {
    static final int RUN = 32; // neighbours that go to the same partition
    static final int TICKS = 100; // per second, when there is a rate

    public static void main(String[] words) throws Exception {
        String topic = words[1];
        byte[] bodies = Files.readAllBytes(Path.of(words[2]));
        int size = Integer.parseInt(words[3]);
        long count = Long.parseLong(words[4]);
        long rate = Long.parseLong(words[5]);
        int queues = Integer.parseInt(words[6]);
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        settings.put("acks", "1");
        settings.put("linger.ms", rate > 0 ? "0" : "5");
        AtomicLong failed = new AtomicLong();
        long run = rate > 0 ? Math.max(1, rate / TICKS / queues) : RUN;
        int held = bodies.length / size;
        long began = System.nanoTime();
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings)) {
            for (long number = 0; number < count; number++) {
                if (rate > 0 && number % (run * queues) == 0) {
                    long wait = began + number * 1_000_000_000L / rate - System.nanoTime();
                    if (wait > 0) {
                        LockSupport.parkNanos(wait);
                    }
                }
                int at = (int) (number % held) * size;
                byte[] body = Arrays.copyOfRange(bodies, at, at + size);
                int partition = (int) (number / run % queues);
                byte[] id = String.format("%032X", number).getBytes();
                List<Header> headers = List.of(new RecordHeader("UNIQ_KEY", id));
                producer.send(new ProducerRecord<>(topic, partition, null, null, body, headers), (said, error) -> {
                    if (error != null) {
                        failed.incrementAndGet();
                    }
                });
            }
        }
        if (failed.get() > 0) {
            System.err.println(failed.get() + " sends failed");
            System.exit(1);
        }
    }
}
