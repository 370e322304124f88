import java.lang.management.ManagementFactory;
import java.lang.management.ThreadMXBean;
import java.util.Arrays;
import org.apache.rocketmq.acl.common.AclSigner;

/**
 * What upstream's signature costs by itself: secret, bytes that are signed, signatures per repetition, seconds to warm
 * up, repetitions. Prints a JSON list of CPU microseconds per signature.
 */
public class HmacCost {
    public static void main(String[] words) {
        String secret = words[0];
        byte[] text = new byte[Integer.parseInt(words[1])];
        Arrays.fill(text, (byte) 'x');
        int count = Integer.parseInt(words[2]);
        long warmUntil = System.nanoTime() + (long) (Double.parseDouble(words[3]) * 1e9);
        double[] found = new double[Integer.parseInt(words[4])];
        ThreadMXBean threads = ManagementFactory.getThreadMXBean();
        long characters = 0;
        while (System.nanoTime() < warmUntil) {
            characters += AclSigner.calSignature(text, secret).length();
        }
        for (int at = 0; at < found.length; at++) {
            long began = threads.getCurrentThreadCpuTime();
            for (int turn = 0; turn < count; turn++) {
                characters += AclSigner.calSignature(text, secret).length();
            }
            found[at] = (threads.getCurrentThreadCpuTime() - began) / 1e3 / count;
        }
        if (characters == 0) {
            throw new IllegalStateException("nothing was signed");
        }
        System.out.println(Arrays.toString(found));
    }
}
