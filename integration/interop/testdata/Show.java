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
 * Shows one certificate after another to a server, whether it asks for it or not, and says
 * how each connection ended: by the last line of the answer, or by the alert.
 *
 * Usage: java Show.java ADDRESS NAME FOLDER CERTIFICATE...
 */
public class Show {
    public static void main(String[] args) throws Exception {
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
