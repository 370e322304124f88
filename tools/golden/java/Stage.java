package cosmodrome.golden;

import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyRemotingClient;
import org.apache.rocketmq.remoting.protocol.LanguageCode;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;

/** Where scenarios play: addresses, clients with neutral names, and the talk with the recorder. */
final class Stage {
    static final String CLIENT_IP = "192.0.2.2";
    static final String BROKER_NAME = "broker-a";
    static final String CLUSTER = "DefaultCluster";

    private static final PrintStream OUT =
        new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);
    private static final BufferedReader IN =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    final String namesrv;
    final String broker;
    private final NettyRemotingClient remoting = new NettyRemotingClient(new NettyClientConfig());
    private final Set<String> wanted;
    private int instances;

    /** `wanted` are the names of the scenarios to play, separated by commas; all when it is empty. */
    Stage(String namesrv, String broker, String wanted) throws Exception {
        this.wanted = wanted.isEmpty() ? Set.of() : Set.of(wanted.split(","));
        this.namesrv = namesrv;
        this.broker = broker;
        remoting.start();
        giveIdsNeutralStart();
    }

    interface Act {
        void play() throws Exception;
    }

    /** Plays one scenario; what passes the proxies meanwhile is recorded under this name. */
    void scenario(String name, Act act) throws Exception {
        if (!wants(name)) {
            return;
        }
        tell("scenario " + name);
        try {
            act.play();
        } catch (Exception error) {
            throw new IllegalStateException("scenario " + name, error);
        }
        Thread.sleep(100);
    }

    /** Whether a scenario was asked for by its name: for those that would spoil the store. */
    boolean names(String name) {
        return wanted.contains(name);
    }

    boolean wants(String name) {
        return wanted.isEmpty() || wanted.contains(name);
    }

    /** Says one line to the recorder and waits until it was heard. */
    static void tell(String line) throws Exception {
        OUT.println(line);
        if (IN.readLine() == null) {
            throw new IllegalStateException("the recorder is gone");
        }
    }

    static void print(String line) {
        OUT.println(line);
    }

    void end() {
        remoting.shutdown();
    }

    <T extends ClientConfig> T neutral(T client) {
        client.setNamesrvAddr(namesrv);
        client.setClientIP(CLIENT_IP);
        client.setInstanceName("golden" + instances++);
        // The proxies know nothing of the broker's second port.
        client.setVipChannelEnabled(false);
        client.setPollNameServerInterval(600_000);
        return client;
    }

    DefaultMQProducer producer(String group) throws Exception {
        DefaultMQProducer producer = neutral(new DefaultMQProducer(group));
        producer.setSendMsgTimeout(10_000);
        producer.start();
        return producer;
    }

    DefaultMQPushConsumer consumer(String group) {
        DefaultMQPushConsumer consumer = neutral(new DefaultMQPushConsumer(group));
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(1);
        consumer.setConsumeThreadMax(1);
        consumer.setPersistConsumerOffsetInterval(3_000);
        return consumer;
    }

    @SuppressWarnings("deprecation")
    DefaultMQPullConsumer puller(String group) throws Exception {
        DefaultMQPullConsumer consumer = neutral(new DefaultMQPullConsumer(group));
        consumer.start();
        return consumer;
    }

    static Message message(String topic, String tags, String keys, String body) {
        return new Message(topic, tags, keys, body.getBytes(StandardCharsets.UTF_8));
    }

    static MessageQueue queue(String topic, int id) {
        return new MessageQueue(topic, BROKER_NAME, id);
    }

    static Map<String, String> fields(String... namesAndValues) {
        Map<String, String> map = new HashMap<>();
        for (int i = 0; i < namesAndValues.length; i += 2) {
            map.put(namesAndValues[i], namesAndValues[i + 1]);
        }
        return map;
    }

    /** A request made by hand, for what the client library does not offer. */
    RemotingCommand ask(String address, int code, Map<String, String> fields, byte[] body)
        throws Exception {
        return askAs(address, code, fields, body, LanguageCode.JAVA, 0);
    }

    /** The same in the name of another client; version 0 means this library's. */
    RemotingCommand askAs(String address, int code, Map<String, String> fields, byte[] body,
        LanguageCode language, int version) throws Exception {
        RemotingCommand request = RemotingCommand.createRequestCommand(code, null);
        request.setExtFields(new HashMap<>(fields));
        request.setBody(body);
        request.setLanguage(language);
        if (version != 0) {
            request.setVersion(version);
        }
        return remoting.invokeSync(address, request, 5_000);
    }

    /** Message ids start with the machine's address and the process id: replaced by fixed ones. */
    private static void giveIdsNeutralStart() throws Exception {
        Field field = MessageClientIDSetter.class.getDeclaredField("FIX_STRING");
        field.setAccessible(true);
        char[] start = (char[]) field.get(null);
        "C0000202".getChars(0, 8, start, 0);
    }
}
