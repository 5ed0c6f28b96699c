import java.io.*;
import java.net.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.security.*;
import java.security.cert.*;
import java.security.cert.Certificate;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Base64;
import javax.net.ssl.*;

/** Usage: java Client.java GATEWAY NAME CA CERT KEY */
public class Client {
    public static void main(String[] args) throws Exception {
        String host = args[0].split(":")[0];
        int port = Integer.parseInt(args[0].split(":")[1]);
        String name = args[1];
        SSLSocketFactory factory = context(args[2], args[3], args[4]).getSocketFactory();

        // By SNI: the name that is given beside the socket is the server's.
        try (SSLSocket socket = (SSLSocket) factory.createSocket(new Socket(host, port), name, 443, true)) {
            SSLParameters parameters = socket.getSSLParameters();
            parameters.setEndpointIdentificationAlgorithm("HTTPS");
            socket.setSSLParameters(parameters);
            OutputStream out = socket.getOutputStream();
            out.write(("GET / HTTP/1.0\r\nHost: " + name + "\r\n\r\n").getBytes(StandardCharsets.US_ASCII));
            out.flush();
            String body = new String(socket.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
            System.out.println("sni: " + body.substring(body.indexOf("\r\n\r\n") + 4).trim());
        }

        // By CONNECT.
        Proxy proxy = new Proxy(Proxy.Type.HTTP, new InetSocketAddress(host, port));
        HttpsURLConnection connection = (HttpsURLConnection) new URL("https://" + name + "/").openConnection(proxy);
        connection.setSSLSocketFactory(factory);
        try (InputStream in = connection.getInputStream()) {
            System.out.println("connect: " + new String(in.readAllBytes(), StandardCharsets.UTF_8).trim());
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
