import java.io.*;
import java.net.InetAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.security.*;
import java.security.cert.Certificate;
import java.security.cert.*;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.*;
import javax.net.ssl.*;

/**
 * Tells each client the SPIFFE id in its certificate.
 *
 * Usage: java Server.java PORT CA CERT KEY
 */
public class Server {
    public static void main(String[] args) throws Exception {
        SSLServerSocket server = (SSLServerSocket) context(args[1], args[2], args[3]).getServerSocketFactory()
                .createServerSocket(Integer.parseInt(args[0]), 50, InetAddress.getByName("127.0.0.1"));
        server.setNeedClientAuth(true);
        while (true) {
            SSLSocket socket = (SSLSocket) server.accept();
            new Thread(() -> {
                try (socket) {
                    BufferedReader in = new BufferedReader(new InputStreamReader(socket.getInputStream(), StandardCharsets.US_ASCII));
                    for (String line = in.readLine(); line != null && !line.isEmpty(); line = in.readLine()) {}
                    StringBuilder ids = new StringBuilder();
                    for (List<?> name : ((X509Certificate) socket.getSession().getPeerCertificates()[0]).getSubjectAlternativeNames()) {
                        if (name.get(0).equals(6)) { // a URI
                            ids.append(name.get(1));
                        }
                    }
                    socket.getOutputStream().write(("HTTP/1.0 200 OK\r\n\r\nyou are " + ids + "\n").getBytes(StandardCharsets.US_ASCII));
                } catch (Exception e) {
                    System.err.println(e);
                }
            }).start();
        }
    }

    static SSLContext context(String ca, String cert, String key) throws Exception {
        KeyStore trusted = KeyStore.getInstance(KeyStore.getDefaultType());
        trusted.load(null, null);
        trusted.setCertificateEntry("ca", certificate(ca));
        TrustManagerFactory trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(trusted);

        String pem = Files.readString(Path.of(key)).replaceAll("-----[A-Z ]+-----|\\s", "");
        PrivateKey privateKey = KeyFactory.getInstance("EC").generatePrivate(new PKCS8EncodedKeySpec(Base64.getDecoder().decode(pem)));
        KeyStore own = KeyStore.getInstance(KeyStore.getDefaultType());
        own.load(null, null);
        own.setKeyEntry("me", privateKey, new char[0], new Certificate[] {certificate(cert)});
        KeyManagerFactory keys = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        keys.init(own, new char[0]);

        SSLContext context = SSLContext.getInstance("TLS");
        context.init(keys.getKeyManagers(), trust.getTrustManagers(), null);
        return context;
    }

    static Certificate certificate(String file) throws Exception {
        try (InputStream in = Files.newInputStream(Path.of(file))) {
            return CertificateFactory.getInstance("X.509").generateCertificate(in);
        }
    }
}
