package cosmodrome.peers;

import com.alibaba.fastjson.JSON;
import com.alibaba.fastjson.JSONObject;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.List;
import java.util.regex.Pattern;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Runs commands of upstream's admin tool one after the other in one JVM, which takes milliseconds
 * where a JVM of its own takes seconds. See mqadmin.py for the other end.
 *
 * A line of input is {"words": [...], "until": EXPRESSION or nothing, "timeout_ms": N}; the line of
 * output is {"printed": TEXT, "ended": BOOLEAN}. A command that never ends is interrupted as soon as
 * what it printed contains EXPRESSION, and every command when its time is over.
 */
public final class AdminTool extends MQAdminStartup {
    private static final int POLL_MS = 20;
    private static final int INTERRUPT_MS = 10_000;

    private static final PrintStream OUT =
        new PrintStream(new FileOutputStream(FileDescriptor.out), true, StandardCharsets.UTF_8);

    public static void main(String[] ignored) {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream errors = System.err;
        try {
            for (String line = in.readLine(); line != null; line = in.readLine()) {
                OUT.println(answer(JSON.parseObject(line)).toJSONString());
            }
        } catch (IOException | InterruptedException | RuntimeException | Error error) {
            error.printStackTrace(errors);
        }
        Runtime.getRuntime().halt(0); // whatever the commands left running
    }

    private static JSONObject answer(JSONObject ask) throws InterruptedException {
        List<String> words = ask.getJSONArray("words").toJavaList(String.class);
        String until = ask.getString("until");
        Pattern awaited = until == null ? null : Pattern.compile(until);
        long deadline = System.nanoTime() + ask.getLongValue("timeout_ms") * 1_000_000;

        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream capture = new PrintStream(printed, true, StandardCharsets.UTF_8);
        System.setOut(capture);
        System.setErr(capture);
        // A JVM of its own would have fresh commands, too.
        subCommandList.clear();
        Thread command = new Thread(() -> main0(words.toArray(new String[0]), null), "command");
        command.setDaemon(true);
        command.start();
        boolean ended = false;
        while (System.nanoTime() < deadline) {
            command.join(POLL_MS);
            ended = !command.isAlive();
            if (ended || awaited != null && awaited.matcher(text(printed)).find()) {
                break;
            }
        }
        if (!ended) {
            command.interrupt();
            command.join(INTERRUPT_MS);
        }
        JSONObject answer = new JSONObject();
        answer.put("printed", text(printed));
        answer.put("ended", ended);
        return answer;
    }

    private static String text(ByteArrayOutputStream printed) {
        return printed.toString(StandardCharsets.UTF_8);
    }
}
