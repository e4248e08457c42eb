import java.io.File;
import java.nio.file.Files;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.concurrent.atomic.AtomicLong;

public class Main {
    static long deep(long n) { return n == 0 ? 0 : 1 + deep(n - 1); }
    static long endless(long n) { return 1 + endless(n + 1); }
    static boolean opened(String path) {
        try {
            String[] names = new File(path).list();
            return names == null ? Files.readAllBytes(new File(path).toPath()).length > 0 : names.length > 0;
        } catch (java.io.IOException error) { return false; }
    }
    public static void main(String[] arguments) throws Exception {
        byte[] data = System.in.readAllBytes();
        int end = 0;
        while (end < data.length && data[end] != '\n') end++;
        String command = new String(data, 0, end);
        byte[] rest = Arrays.copyOfRange(data, Math.min(end + 1, data.length), data.length);
        switch (command) {
            case "" -> System.out.println("empty");
            case "length" -> System.out.println(rest.length);
            case "echo" -> { System.out.write(rest); System.out.flush(); }
            case "fail" -> throw new IllegalStateException("boom 42");
            case "bytes" -> { System.out.write(new byte[] {-1, -2}); System.out.flush(); }
            case "threads" -> {
                AtomicLong all = new AtomicLong();
                Thread[] threads = new Thread[4];
                for (int i = 0; i < 4; i++) {
                    threads[i] = new Thread(() -> { for (int j = 0; j < 100; j++) all.addAndGet(j); });
                    threads[i].start();
                }
                for (Thread thread : threads) thread.join();
                System.out.println(all);
            }
            case "deep" -> System.out.println(deep(Long.parseLong(new String(rest).trim())));
            case "endless" -> System.out.println(endless(0));
            case "memory" -> { var kept = new ArrayList<byte[]>(); while (true) kept.add(new byte[1 << 20]); }
            case "files" ->
                System.out.println(Arrays.stream(new String(rest).trim().split(" ")).filter(Main::opened).count());
        }
    }
}
