package cosmodrome.golden;

import com.alibaba.fastjson.JSON;
import java.lang.reflect.Field;
import java.util.TreeMap;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.protocol.RequestCode;
import org.apache.rocketmq.common.protocol.ResponseCode;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * The client side of a recording. Standard output names the scenario that follows; the recorder
 * answers each line with one of its own.
 *
 * <pre>
 * codes                            names of request and response codes
 * all    NAMESRV BROKER BULK NAMES every scenario, or those named; BULK small messages in topic GBulk
 * flood  NAMESRV BROKER COUNT      COUNT messages to topic CBulk, each reported, then waits to be killed
 * </pre>
 */
public final class Scenarios {
    public static void main(String[] words) throws Exception {
        System.setOut(System.err);
        // Clients that were not shut down would keep a failed run alive.
        Thread.currentThread().setUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            Runtime.getRuntime().halt(1);
        });
        switch (words[0]) {
            case "codes":
                Stage.print(JSON.toJSONString(new Object[] {
                    constants(RequestCode.class), constants(ResponseCode.class)}));
                break;
            case "all": all(new Stage(words[1], words[2], words[4]), Integer.parseInt(words[3])); break;
            case "flood": flood(new Stage(words[1], words[2], ""), Integer.parseInt(words[3])); break;
            default: throw new IllegalArgumentException("unknown verb " + words[0]);
        }
        System.exit(0);
    }

    private static void all(Stage stage, int bulk) throws Exception {
        Admin admin = new Admin(stage);
        Consumes consumes = new Consumes(stage);
        admin.start();
        Sends sends = new Sends(stage);
        sends.play();
        consumes.play();
        sends.playOdd();
        if (stage.wants("heartbeat_two_consumers_rebalance")) {
            consumes.whileOnline((clientId, id) -> admin.online(clientId, id, consumes));
        }
        admin.play();
        stage.scenario("bulk", () -> {
            DefaultMQProducer producer = stage.producer("p_bulk");
            Sends.bulk(producer, "GBulk", 1, bulk, 120);
            producer.shutdown();
        });
        admin.stop();
        Stage.tell("scenario broker_stop_unregister");
        stage.end();
    }

    private static void flood(Stage stage, int count) throws Exception {
        DefaultMQAdminExt tool = stage.neutral(new DefaultMQAdminExt(5_000L));
        tool.start();
        tool.createAndUpdateTopicConfig(stage.broker, new TopicConfig("CBulk", 2, 2, 6));
        DefaultMQProducer producer = stage.producer("p_bulk");
        Sends.bulk(producer, "CBulk", 2, count, 300);
        Stage.print("sent");
        while (true) {
            Sends.bulk(producer, "CBulk", 2, 1, 300);
        }
    }

    private static TreeMap<String, String> constants(Class<?> type) throws Exception {
        TreeMap<String, String> names = new TreeMap<>();
        for (Field field : type.getFields()) {
            if (field.getType() == int.class) {
                names.putIfAbsent(String.valueOf(field.getInt(null)), field.getName());
            }
        }
        return names;
    }
}
