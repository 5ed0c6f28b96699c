import java.net.HttpURLConnection;
import java.net.InetSocketAddress;
import java.net.Proxy;
import java.net.ProxySelector;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Usage: java Ask URL ["http"|"socks5" PORT]: reads a page, by a proxy of loopback. */
public class Ask {
    public static void main(String[] args) throws Exception {
        var url = URI.create(args[0]);
        var proxy = args.length > 1 ? new InetSocketAddress("127.0.0.1", Integer.parseInt(args[2])) : null;
        if (proxy != null && args[1].equals("socks5")) { // which HttpClient does not have
            var connection = (HttpURLConnection) url.toURL().openConnection(new Proxy(Proxy.Type.SOCKS, proxy));
            System.out.println(new String(connection.getInputStream().readAllBytes()));
            return;
        }
        var client = HttpClient.newBuilder();
        if (proxy != null) {
            client.proxy(ProxySelector.of(proxy));
        }
        System.out.println(client.build().send(HttpRequest.newBuilder(url).build(), HttpResponse.BodyHandlers.ofString()).body());
    }
}
