import java.io.*;
import java.net.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.security.*;
import java.security.cert.Certificate;
import java.security.cert.*;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.*;
import javax.net.ssl.*;

/**
 * Shows certificates, whatever these are like.
 *
 * java Show.java to ADDRESS NAME FOLDER CERTIFICATE...: one after another to a server; says
 * how each connection ended, by the last line of the answer or by the alert.
 *
 * java Show.java at FOLDER CERTIFICATE=PORT...: to clients, at a port each; answers whatever
 * they ask for by 200.
 */
public class Show {
    public static void main(String[] args) throws Exception {
        if (args[0].equals("at")) {
            serve(args);
            return;
        }
        args = Arrays.copyOfRange(args, 1, args.length);
        String host = args[0].split(":")[0];
        int port = Integer.parseInt(args[0].split(":")[1]);
        for (String name : Arrays.copyOfRange(args, 3, args.length)) {
            String said;
            SSLSocketFactory factory = context(args[2] + "/" + name).getSocketFactory();
            try (SSLSocket socket = (SSLSocket) factory.createSocket(new Socket(host, port), args[1], 443, true)) {
                OutputStream out = socket.getOutputStream();
                out.write(("GET / HTTP/1.0\r\nHost: " + args[1] + "\r\n\r\n").getBytes(StandardCharsets.US_ASCII));
                out.flush();
                String[] lines = new String(socket.getInputStream().readAllBytes(), StandardCharsets.UTF_8).trim().split("\r?\n");
                said = lines[lines.length - 1];
            } catch (IOException e) {
                said = e.getMessage();
            }
            System.out.println(name + ": " + said);
        }
    }

    static void serve(String[] args) throws Exception {
        for (String one : Arrays.copyOfRange(args, 2, args.length)) {
            String[] nameAndPort = one.split("=");
            ServerSocket socket = context(args[1] + "/" + nameAndPort[0]).getServerSocketFactory()
                    .createServerSocket(Integer.parseInt(nameAndPort[1]), 50, InetAddress.getByName("127.0.0.1"));
            new Thread(() -> {
                while (true) {
                    try (Socket client = socket.accept()) {
                        client.getInputStream().read();
                        client.getOutputStream().write("HTTP/1.0 200 OK\r\n\r\nserved\n".getBytes(StandardCharsets.US_ASCII));
                    } catch (IOException e) {
                        // the client did not like it
                    }
                }
            }).start();
        }
        System.out.println("listening");
    }

    static SSLContext context(String path) throws Exception {
        X509Certificate[] chain;
        try (InputStream in = Files.newInputStream(Path.of(path + ".crt"))) {
            chain = CertificateFactory.getInstance("X.509").generateCertificates(in).toArray(new X509Certificate[0]);
        }
        byte[] pem = Base64.getDecoder().decode(Files.readString(Path.of(path + ".key")).replaceAll("-----[A-Z ]+-----|\\s", ""));
        PrivateKey key = KeyFactory.getInstance(chain[0].getPublicKey().getAlgorithm()).generatePrivate(new PKCS8EncodedKeySpec(pem));
        SSLContext context = SSLContext.getInstance("TLS");
        context.init(new KeyManager[] {new One(chain, key)}, new TrustManager[] {new Any()}, null);
        return context;
    }

    /** Has one certificate, and takes it for what every peer wants. */
    static class One extends X509ExtendedKeyManager {
        final X509Certificate[] chain;
        final PrivateKey key;

        One(X509Certificate[] chain, PrivateKey key) {
            this.chain = chain;
            this.key = key;
        }

        boolean is(String... types) {
            return Arrays.asList(types).contains(key.getAlgorithm());
        }

        @Override
        public String chooseClientAlias(String[] types, Principal[] issuers, Socket socket) {
            return is(types) ? "me" : null;
        }

        @Override
        public String chooseServerAlias(String type, Principal[] issuers, Socket socket) {
            return is(type) ? "me" : null;
        }

        @Override
        public String[] getClientAliases(String type, Principal[] issuers) {
            return new String[] {"me"};
        }

        @Override
        public String[] getServerAliases(String type, Principal[] issuers) {
            return new String[] {"me"};
        }

        @Override
        public X509Certificate[] getCertificateChain(String alias) {
            return chain;
        }

        @Override
        public PrivateKey getPrivateKey(String alias) {
            return key;
        }
    }

    /** Trusts every server: what is tested is how the other side judges. */
    static class Any extends X509ExtendedTrustManager {
        @Override
        public void checkClientTrusted(X509Certificate[] chain, String type, Socket socket) {}

        @Override
        public void checkServerTrusted(X509Certificate[] chain, String type, Socket socket) {}

        @Override
        public void checkClientTrusted(X509Certificate[] chain, String type, SSLEngine engine) {}

        @Override
        public void checkServerTrusted(X509Certificate[] chain, String type, SSLEngine engine) {}

        @Override
        public void checkClientTrusted(X509Certificate[] chain, String type) {}

        @Override
        public void checkServerTrusted(X509Certificate[] chain, String type) {}

        @Override
        public X509Certificate[] getAcceptedIssuers() {
            return new X509Certificate[0];
        }
    }
}
