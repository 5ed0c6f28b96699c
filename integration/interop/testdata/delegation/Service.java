import java.io.*;
import java.lang.reflect.Method;
import java.math.BigInteger;
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
 * A service behind a gateway that ends the clients' TLS. It tells each caller who it is and through
 * which gateways it came, and writes why it refuses one.
 *
 * Java before 25 has no exporter of TLS, so that the claim tls-exporter is not checked there. What
 * is left then: a gateway that is listed, with its certificate in this session and the key of that,
 * may show an assertion of its own a second time, in another session, until it expires.
 *
 * Usage: java Service.java PORT CA CERT KEY AUDIENCE GATEWAY
 */
public class Service {
    static String audience, gateway;

    public static void main(String[] args) throws Exception {
        audience = args[4];
        gateway = args[5];
        SSLServerSocket server = (SSLServerSocket) context(args[1], args[2], args[3]).getServerSocketFactory()
                .createServerSocket(Integer.parseInt(args[0]), 50, InetAddress.getByName("127.0.0.1"));
        server.setNeedClientAuth(true);
        System.out.println("listening " + (exporter() == null ? "without" : "with") + " an exporter");
        while (true) {
            SSLSocket socket = (SSLSocket) server.accept();
            new Thread(() -> {
                try (socket) {
                    socket.setSoTimeout(10_000);
                    String who = caller(socket);
                    if (who != null) {
                        socket.getOutputStream().write((who + "\n").getBytes(StandardCharsets.UTF_8));
                    }
                } catch (Exception e) {
                    System.err.println("refused: " + e.getMessage());
                }
            }).start();
        }
    }

    /** Verifies who calls. Java has verified the certificate. */
    static String caller(SSLSocket socket) throws Exception {
        SSLSession session = socket.getSession();
        X509Certificate shown = (X509Certificate) session.getPeerCertificates()[0];
        List<Object> uris = new ArrayList<>();
        for (List<?> name : Objects.requireNonNullElse(shown.getSubjectAlternativeNames(), List.<List<?>>of())) {
            if (name.get(0).equals(6)) {
                uris.add(name.get(1));
            }
        }
        check(uris.equals(List.of(gateway)), uris + " is not the gateway");
        String token = assertion(new DataInputStream(socket.getInputStream()));
        if (token == null) {
            return null;
        }

        String[] parts = token.split("\\.", -1);
        check(parts.length == 3, "the assertion is not a JWS");
        Base64.Decoder base64 = Base64.getUrlDecoder();
        Map<?, ?> header = (Map<?, ?>) new JSON(base64.decode(parts[0])).whole();
        check("culvert-peer+jwt".equals(header.get("typ")), "the token is no assertion");
        check("ES256".equals(header.get("alg")), "the algorithm is not that of the gateway's key");
        Signature signature = Signature.getInstance("SHA256withECDSAinP1363Format");
        signature.initVerify(shown.getPublicKey());
        signature.update((parts[0] + "." + parts[1]).getBytes(StandardCharsets.US_ASCII));
        check(signature.verify(base64.decode(parts[2])), "the signature is not by the gateway's key");

        Map<?, ?> claims = (Map<?, ?>) new JSON(base64.decode(parts[1])).whole();
        long now = System.currentTimeMillis() / 1000, issued = number(claims, "iat"), expires = number(claims, "exp");
        check(gateway.equals(claims.get("iss")), "the assertion is of another gateway");
        check(audience.equals(claims.get("aud")), "the assertion is for another service");
        check(issued <= now + 5 && expires > now - 5 && expires - issued <= 60, "the assertion is out of its time");
        Method export = exporter();
        if (export != null) {
            byte[] own = (byte[]) export.invoke(session, "EXPORTER-Channel-Binding", new byte[0], 32);
            check(MessageDigest.isEqual(own, base64.decode((String) claims.get("tls-exporter"))), "the assertion is of another TLS session");
        }
        List<Object> actors = new ArrayList<>();
        for (Map<?, ?> act = (Map<?, ?>) claims.get("act"); act != null; act = (Map<?, ?>) act.get("act")) {
            actors.add(act.get("sub"));
        }
        check(!actors.isEmpty() && actors.size() <= 4 && actors.get(0).equals(gateway), "the actors are wrong");
        StringJoiner through = new StringJoiner(" ", "[", "]");
        actors.forEach(a -> through.add((String) a));
        return claims.get("sub") + " by " + claims.get("method") + " through " + through;
    }

    /** Returns what exports keying material of a session, null before Java 25. */
    static Method exporter() {
        try {
            return ExtendedSSLSession.class.getMethod("exportKeyingMaterialData", String.class, byte[].class, int.class);
        } catch (NoSuchMethodException e) {
            return null;
        }
    }

    /** Reads a PROXY header of version 2, and returns its value 0xE1; null for a health check. */
    static String assertion(DataInputStream in) throws Exception {
        byte[] head = new byte[16];
        in.readFully(head);
        check(new String(head, 0, 12, StandardCharsets.ISO_8859_1).equals("\r\n\r\n\0\r\nQUIT\n"), "there is no PROXY header of version 2");
        int length = (head[14] & 255) << 8 | head[15] & 255;
        check(length <= 4096, "the PROXY header is too large");
        byte[] body = new byte[length];
        in.readFully(body);
        if (head[12] == 0x20) {
            return null;
        }
        Integer at = Map.of(0x00, 0, 0x11, 12, 0x21, 36, 0x31, 216).get((int) head[13]);
        check(head[12] == 0x21 && at != null, "the PROXY header is malformed");
        String found = null;
        while (at < length) {
            check(at + 3 <= length, "a value of the PROXY header overruns it");
            int size = (body[at + 1] & 255) << 8 | body[at + 2] & 255;
            check(at + 3 + size <= length, "a value of the PROXY header overruns it");
            if ((body[at] & 255) == 0xE1) {
                check(found == null, "there are two assertions");
                found = new String(body, at + 3, size, StandardCharsets.ISO_8859_1);
            }
            at += 3 + size;
        }
        check(found != null, "there is no assertion");
        return found;
    }

    static long number(Map<?, ?> claims, String name) throws Exception {
        check(claims.get(name) instanceof Long, name + " is not a number");
        return (Long) claims.get(name);
    }

    static void check(boolean holds, String otherwise) throws Exception {
        if (!holds) {
            throw new Exception(otherwise);
        }
    }

    /** A parser of the JSON that assertions have: objects, texts and whole numbers. */
    static class JSON {
        final String text;
        int at;

        JSON(byte[] b) {
            text = new String(b, StandardCharsets.UTF_8);
        }

        Object whole() throws Exception {
            Object v = value(0);
            check(at == text.length(), "something is behind the JSON");
            return v;
        }

        char next() throws Exception {
            check(at < text.length(), "the JSON is cut short");
            return text.charAt(at++);
        }

        Object value(int depth) throws Exception {
            char c = next();
            if (c == '"') {
                return string();
            }
            if (c == '{' && depth < 8) {
                return object(depth);
            }
            int from = at - 1;
            while (at < text.length() && Character.isDigit(text.charAt(at))) {
                at++;
            }
            return Long.valueOf(text.substring(from, at));
        }

        Map<String, Object> object(int depth) throws Exception {
            Map<String, Object> all = new HashMap<>();
            char c = next();
            while (c != '}') {
                check(c == '"', "a name is missing in the JSON");
                String name = string();
                check(next() == ':', "a colon is missing in the JSON");
                check(all.put(name, value(depth + 1)) == null, name + " is given twice");
                c = next();
                if (c == ',') {
                    c = next();
                } else {
                    check(c == '}', "a comma is missing in the JSON");
                }
            }
            return all;
        }

        String string() throws Exception {
            StringBuilder s = new StringBuilder();
            for (char c = next(); c != '"'; c = next()) {
                if (c == '\\') {
                    c = next();
                    if (c == 'u') {
                        check(at + 4 <= text.length(), "the JSON is cut short");
                        c = (char) new BigInteger(text.substring(at, at += 4), 16).intValue();
                    } else {
                        check("\"\\/".indexOf(c) >= 0, "an escape in the JSON is unknown");
                    }
                }
                s.append(c);
            }
            return s.toString();
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
        SSLContext context = SSLContext.getInstance("TLSv1.3");
        context.init(keys.getKeyManagers(), trust.getTrustManagers(), null);
        return context;
    }

    static Certificate certificate(String file) throws Exception {
        try (InputStream in = Files.newInputStream(Path.of(file))) {
            return CertificateFactory.getInstance("X.509").generateCertificate(in);
        }
    }
}
