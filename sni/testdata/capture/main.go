// Capture records the ClientHellos of the TLS clients on this machine, the
// fixtures of package sni. Run it from the module's root:
//
//	go run ./sni/testdata/capture
//
// It listens on loopback, runs each client of the table below against itself,
// and writes the bytes that came before the client waited for an answer to
// sni/testdata/hellos/<client>-<version>[-<options>].bin. Clients that are not
// installed are named and left out; fixtures are never deleted, so that the
// ones of old versions stay.
//
// On Debian the clients are: openssl curl wget python3 nodejs
// openjdk-17-jdk-headless gnutls-bin botan nmap sslscan libmbedtls-dev
// libwolfssl-dev gcc chromium firefox-esr.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"time"
)

const (
	host  = "svc.example.test"
	out   = "sni/testdata/hellos"
	quiet = 400 * time.Millisecond // a client that sends nothing for this long waits for the server
)

// A client is a command and the way to ask for its version.
type client struct {
	name    string // of the fixture, without version
	options string // of the fixture, after the version; "" for the defaults
	version string // a command that prints the version
	run     string // $PORT, $HOST and $TMP are set
}

const (
	openssl = "openssl version"
	curl    = "curl --version"
	python  = "/usr/bin/python3 --version"
	node    = "node --version"
	java    = "java -version 2>&1"
	gnutls  = "gnutls-cli --version"
)

var clients = []client{
	{"openssl", "", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST"},
	{"openssl", "split64", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -max_send_frag 512 -split_send_frag 64"},
	{"openssl", "noservername", openssl, "openssl s_client -connect 127.0.0.1:$PORT -noservername"},
	{"openssl", "ip", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername 192.0.2.1"},
	{"openssl", "tls13", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -tls1_3"},
	{"openssl", "tls12", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -tls1_2"},
	{"openssl", "tls11", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -tls1_1 -cipher ALL:@SECLEVEL=0"},
	{"openssl", "tls10", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -tls1 -cipher ALL:@SECLEVEL=0"},
	{"openssl", "alpn", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST -alpn h2,http/1.1,acme-tls/1"},
	{"openssl", "mixedcase", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername Svc.Example.TEST"},
	{"openssl", "dot", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername $HOST."},
	{"openssl", "istio", openssl, "openssl s_client -connect 127.0.0.1:$PORT -servername outbound_.443_._.svc.example.test -alpn istio-peer-exchange,istio"},
	{"curl", "", curl, "curl -sk --resolve $HOST:$PORT:127.0.0.1 https://$HOST:$PORT/"},
	{"curl", "http11", curl, "curl -sk --http1.1 --resolve $HOST:$PORT:127.0.0.1 https://$HOST:$PORT/"},
	{"wget", "", "wget --version", "wget -q -O- --no-check-certificate --tries=1 https://localhost:$PORT/"},
	{"python", "", python, `/usr/bin/python3 -c 'import os,socket,ssl
c=ssl._create_unverified_context()
c.wrap_socket(socket.create_connection(("127.0.0.1",int(os.environ["PORT"]))),server_hostname=os.environ["HOST"])'`},
	{"node", "", node, `node -e 'require("tls").connect({port:+process.env.PORT,host:"127.0.0.1",servername:process.env.HOST})'`},
	{"node", "http2", node, `node -e 'require("http2").connect("https://"+process.env.HOST+":"+process.env.PORT,{lookup:(h,o,f)=>o.all?f(null,[{address:"127.0.0.1",family:4}]):f(null,"127.0.0.1",4)})'`},
	{"java", "", java, `cat >$TMP/Hello.java <<'X'
import java.net.Socket;
import javax.net.ssl.*;
public class Hello {
	public static void main(String[] a) throws Exception {
		int port = Integer.parseInt(System.getenv("PORT"));
		SSLSocketFactory f = (SSLSocketFactory) SSLSocketFactory.getDefault();
		SSLSocket s = (SSLSocket) f.createSocket(new Socket("127.0.0.1", port), System.getenv("HOST"), port, true);
		s.startHandshake();
	}
}
X
java $TMP/Hello.java`},
	{"java", "httpclient", java, `cat >$TMP/Http.java <<'X'
import java.net.URI;
import java.net.http.*;
public class Http {
	public static void main(String[] a) throws Exception {
		HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create("https://localhost:" + System.getenv("PORT") + "/")).build(), HttpResponse.BodyHandlers.ofString());
	}
}
X
java $TMP/Http.java`},
	{"gnutls", "", gnutls, "gnutls-cli --insecure --sni-hostname $HOST -p $PORT 127.0.0.1"},
	{"gnutls", "tls12", gnutls, "gnutls-cli --insecure --priority NORMAL:-VERS-ALL:+VERS-TLS1.2 --sni-hostname $HOST --alpn h2 -p $PORT 127.0.0.1"},
	{"botan", "", "botan version", "botan tls_client 127.0.0.1 --port=$PORT --skip-system-cert-store"},
	{"nmap", "", "nmap --version", "nmap -Pn -p$PORT --script ssl-cert --script-args tls.servername=$HOST 127.0.0.1"},
	{"sslscan", "sslv2", "sslscan --version 2>&1", "sslscan --no-colour --sni-name=$HOST 127.0.0.1:$PORT"},
	{"chromium", "", "chromium --version", `exec chromium --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync --user-data-dir=$TMP --host-resolver-rules="MAP $HOST 127.0.0.1" --ignore-certificate-errors --dump-dom https://$HOST:$PORT/`},
	{"firefox", "", "firefox-esr --version", `cat >$TMP/user.js <<X
user_pref("network.dns.localDomains", "$HOST");
user_pref("app.update.enabled", false);
user_pref("network.captive-portal-service.enabled", false);
X
export HOME=$TMP; exec firefox-esr --headless --profile $TMP --screenshot $TMP/x.png https://$HOST:$PORT/`},
	{"mbedtls", "", `dpkg-query -W -f '${Version}\n' libmbedtls-dev`, `cat >$TMP/m.c <<'X'
#include <stdlib.h>
#include <mbedtls/ssl.h>
#include <mbedtls/net_sockets.h>
#include <mbedtls/entropy.h>
#include <mbedtls/ctr_drbg.h>
int main(void) {
	mbedtls_net_context n; mbedtls_ssl_context s; mbedtls_ssl_config c; mbedtls_entropy_context e; mbedtls_ctr_drbg_context r;
	mbedtls_net_init(&n); mbedtls_ssl_init(&s); mbedtls_ssl_config_init(&c); mbedtls_entropy_init(&e); mbedtls_ctr_drbg_init(&r);
	mbedtls_ctr_drbg_seed(&r, mbedtls_entropy_func, &e, 0, 0);
	mbedtls_net_connect(&n, "127.0.0.1", getenv("PORT"), MBEDTLS_NET_PROTO_TCP);
	mbedtls_ssl_config_defaults(&c, MBEDTLS_SSL_IS_CLIENT, MBEDTLS_SSL_TRANSPORT_STREAM, MBEDTLS_SSL_PRESET_DEFAULT);
	mbedtls_ssl_conf_rng(&c, mbedtls_ctr_drbg_random, &r);
	mbedtls_ssl_setup(&s, &c);
	mbedtls_ssl_set_hostname(&s, getenv("HOST"));
	mbedtls_ssl_set_bio(&s, &n, mbedtls_net_send, mbedtls_net_recv, 0);
	return mbedtls_ssl_handshake(&s) != 0;
}
X
gcc -o $TMP/m $TMP/m.c -lmbedtls -lmbedx509 -lmbedcrypto && $TMP/m`},
	{"wolfssl", "", `dpkg-query -W -f '${Version}\n' libwolfssl-dev`, `cat >$TMP/w.c <<'X'
#include <stdlib.h>
#include <string.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <wolfssl/options.h>
#include <wolfssl/ssl.h>
int main(void) {
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(atoi(getenv("PORT"))), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	connect(fd, (struct sockaddr *)&a, sizeof a);
	wolfSSL_Init();
	WOLFSSL *s = wolfSSL_new(wolfSSL_CTX_new(wolfTLS_client_method()));
	wolfSSL_UseSNI(s, WOLFSSL_SNI_HOST_NAME, getenv("HOST"), strlen(getenv("HOST")));
	wolfSSL_set_fd(s, fd);
	return wolfSSL_connect(s) != SSL_SUCCESS;
}
X
gcc -o $TMP/w $TMP/w.c -lwolfssl && $TMP/w`},
}

func main() {
	only := flag.String("only", "", "record this client alone")
	flag.Parse()
	for _, c := range clients {
		if *only != "" && *only != c.name {
			continue
		}
		if err := record(c); err != nil {
			fmt.Fprintf(os.Stderr, "capture: %s %s: %v\n", c.name, c.options, err)
		}
	}
	if *only != "" && *only != "go" {
		return
	}
	for options, cfg := range map[string]*tls.Config{
		"":      {},
		"p256":  {CurvePreferences: []tls.CurveID{tls.CurveP256}},
		"alpn":  {NextProtos: []string{"h2", "http/1.1"}},
		"tls12": {MaxVersion: tls.VersionTLS12},
	} {
		if err := recordGo(options, cfg); err != nil {
			fmt.Fprintf(os.Stderr, "capture: go %s: %v\n", options, err)
		}
	}
}

// record runs c and keeps what it sends first.
func record(c client) error {
	v, err := exec.Command("sh", "-c", c.version).Output()
	number := regexp.MustCompile(`\d+(\.\d+)+`).FindString(string(v))
	if err != nil || number == "" {
		return errors.New("not installed")
	}
	tmp, err := os.MkdirTemp("", "capture")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	return listen(c.name, number, c.options, func(ctx context.Context, port string) {
		cmd := exec.CommandContext(ctx, "sh", "-c", c.run)
		cmd.Env = append(os.Environ(), "PORT="+port, "HOST="+host, "TMP="+tmp)
		var said bytes.Buffer
		cmd.Stderr = &said
		cmd.WaitDelay = time.Second
		_ = cmd.Run() // every client fails: nobody answers it
		if strings.Contains(said.String(), "not found") {
			fmt.Fprint(os.Stderr, said.String())
		}
	})
}

func recordGo(options string, cfg *tls.Config) error {
	return listen("go", strings.TrimPrefix(runtime.Version(), "go"), options, func(ctx context.Context, port string) {
		cfg.ServerName = host
		if c, err := (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", "127.0.0.1:"+port); err == nil {
			c.Close()
		}
	})
}

// listen takes the first connection that run makes and writes its bytes.
func listen(name, version, options string, run func(ctx context.Context, port string)) error {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer ln.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, port, _ := net.SplitHostPort(ln.Addr().String())
		run(ctx, port)
		ln.Close()
	}()
	var raw []byte
	for len(raw) == 0 { // scanners connect once to see whether the port is open
		c, err := ln.Accept()
		if err != nil {
			return fmt.Errorf("no hello: %w", err)
		}
		raw = read(c)
		c.Close()
	}
	ln.Close()
	cancel()
	<-over
	file := strings.TrimSuffix(name+"-"+version+"-"+options, "-") + ".bin"
	fmt.Printf("%5d bytes  %s\n", len(raw), file)
	return os.WriteFile(filepath.Join(out, file), raw, 0o644)
}

func read(c net.Conn) []byte {
	var raw []byte
	buf := make([]byte, 64<<10)
	_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
	for {
		n, err := c.Read(buf)
		raw = append(raw, buf[:n]...)
		if err != nil {
			return raw
		}
		_ = c.SetReadDeadline(time.Now().Add(quiet))
	}
}
