package command

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"

	"culvert.dev/connect"
	"culvert.dev/connect/h2"
	"culvert.dev/connect/h3"
	"culvert.dev/connect/hbone"
	"culvert.dev/connect/socks5"
	"culvert.dev/connect/ws"
	"culvert.dev/internal/gateway"
	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// Here is what a part of the gateway is told by the configuration, whatever
// carries the request and whatever kind of listener it comes to: the gateway is
// made of a file, as "culvert gateway" makes it. A listener or a carrier that is
// added belongs into listenersOf or waysIn.

const patience = time.Minute

// A running gateway.
type running struct {
	dir    string
	addrs  []string // of the listeners, in order
	log    *syncBuffer
	source *file.Source
	ids    *identities
	*gateway.Gateway
}

// A syncBuffer may be read while it is written to.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (r *running) write(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// startFile runs a gateway by the configuration in files, of which culvert.yaml
// is the one that names the others.
func startFile(t *testing.T, files map[string]string) *running {
	t.Helper()
	r := &running{dir: t.TempDir(), log: &syncBuffer{}}
	for name, content := range files {
		r.write(t, name, content)
	}
	path := filepath.Join(r.dir, "culvert.yaml")
	c, err := loadAnyPort(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := gatewayConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	o := &gatewayOptions{}
	output, err := o.logOutput(r.log, c)
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(output.handler)
	r.source = &file.Source{Path: path, Load: loadAnyPort, Log: log}
	cfg.Log, cfg.DrainDelay, cfg.DrainTimeout = log, -1, -1
	cfg.Sources = []registry.Source{r.source}
	k, err := newKube(c, tunnel.Sockets{}, log)
	if err != nil {
		t.Fatal(err)
	}
	current := &kubeSources{}
	current.use(c, k)
	current.configure(&cfg)
	ids, err := newIdentities(t.Context(), c.Identity, tunnel.Sockets{}, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ids.close)
	r.ids, cfg.Identity, cfg.JWTSVID = ids, ids.store, ids.jwtSVID
	own := &credentials{store: ids.store, log: log}
	own.use(c.Credentials)
	g, err := gateway.New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	r.Gateway = g
	(&reloader{o: o, log: log, output: output, kube: current, ids: ids, own: own}).follow(t.Context(), g, r.source, c, cfg)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ran := make(chan error, 1)
	go func() { ran <- g.Run(ctx, nil) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("Run returned %v", err)
		}
		if t.Failed() {
			t.Logf("the gateway's log:\n%s", r.log)
		}
	})
	for _, a := range g.Addrs() {
		r.addrs = append(r.addrs, a.String())
	}
	testnet.Eventually(t, patience, func() bool { ok, _ := g.Ready(); return ok }, "the gateway is ready")
	return r
}

// loadAnyPort is file.Reload of a file in which ports 1 and 4 of listeners stand for any free
// one, and so do 2 of the admin port and 3 of DNS: a file has to name its ports.
func loadAnyPort(path string, current *file.Config) (*file.Config, error) {
	c, err := file.Reload(path, current)
	if err != nil || c == current {
		return c, err
	}
	c.Drain = file.Drain{}
	if host, ok := strings.CutSuffix(c.Admin, ":2"); ok {
		c.Admin = host + ":0"
	}
	if c.DNS != nil {
		for i, l := range c.DNS.Listeners {
			if host, ok := strings.CutSuffix(l.Address, ":3"); ok {
				c.DNS.Listeners[i].Address = host + ":0"
			}
		}
	}
	for i, l := range c.Listeners {
		for _, any := range []string{":1", ":4"} {
			if host, ok := strings.CutSuffix(l.Address, any); ok {
				c.Listeners[i].Address = host + ":0"
			}
		}
	}
	return c, nil
}

// A client is an identity and the way it connects.
type client struct {
	tls            *tls.Config // to the gateway; nil for the clear
	user, password string
	token          string
	host, origin   string // of WebSocket
}

func (c *client) authorization() string {
	switch {
	case c.token != "":
		return connect.BearerCredentials(c.token)
	case c.user != "":
		return connect.BasicCredentials(c.user, c.password)
	}
	return ""
}

// A wayIn is a carrier as a client of it.
type wayIn struct {
	name string
	dial func(addr string, c *client) tunnel.Dialer
}

var waysIn = []wayIn{
	{"connect", func(addr string, c *client) tunnel.Dialer {
		return &connect.Dialer{Proxy: addr, TLS: c.tls, Authorization: c.authorization()}
	}},
	{"connect-h2", func(addr string, c *client) tunnel.Dialer {
		return &h2.Dialer{Proxy: addr, TLS: c.tls, Authorization: c.authorization()}
	}},
	{"socks5", func(addr string, c *client) tunnel.Dialer {
		return &socks5.Dialer{Proxy: addr, Dialer: inTLS{c.tls}, User: c.user, Password: c.password}
	}},
	{"websocket", func(addr string, c *client) tunnel.Dialer { return webSocket(addr, c) }},
	{"websocket-h2", func(addr string, c *client) tunnel.Dialer {
		pool := &h2.Dialer{Proxy: addr, TLS: c.tls}
		d := webSocket(addr, c)
		d.Extended = pool.Open
		return pooledWebSocket{d, pool}
	}},
	{"connect-h3", func(addr string, c *client) tunnel.Dialer {
		return &h3.Dialer{Proxy: addr, TLS: c.tls, Authorization: c.authorization()}
	}},
	{"hbone", func(addr string, c *client) tunnel.Dialer {
		return &hbone.Dialer{Gateway: addr, TLS: c.tls}
	}},
}

func wayInBy(name string) wayIn {
	for _, w := range waysIn {
		if w.name == name {
			return w
		}
	}
	panic(name)
}

func webSocket(addr string, c *client) *ws.Dialer {
	d := &ws.Dialer{Dialer: inTLS{c.tls}.to(addr), Authorization: c.authorization()}
	host := c.host
	if host == "" {
		host = "gw.test"
	}
	d.URL = "ws://" + host + "/" // of which TLS is not the Dialer's business here
	if c.origin != "" {
		d.Header = func(context.Context, string) (connect.Fields, error) {
			return connect.Fields{{Name: "Origin", Value: c.origin}}, nil
		}
	}
	return d
}

// A pooledWebSocket closes the connections of its WebSockets.
type pooledWebSocket struct {
	tunnel.Dialer
	pool io.Closer
}

func (d pooledWebSocket) Close() error { return d.pool.Close() }

// inTLS dials in TLS, unless it has no configuration.
type inTLS struct{ config *tls.Config }

func (d inTLS) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if d.config == nil {
		return new(net.Dialer).DialContext(ctx, network, addr)
	}
	return (&tls.Dialer{Config: d.config}).DialContext(ctx, network, addr)
}

// to dials addr, whatever is asked for.
func (d inTLS) to(addr string) tunnel.Dialer {
	return dialerFunc(func(ctx context.Context, network, _ string) (net.Conn, error) {
		return d.DialContext(ctx, network, addr)
	})
}

type dialerFunc func(ctx context.Context, network, addr string) (net.Conn, error)

func (f dialerFunc) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return f(ctx, network, addr)
}

// try opens a tunnel to the service and has it answer.
func try(t *testing.T, w wayIn, addr string, c *client) error {
	t.Helper()
	return tryTo(t, w, addr, "svc.test:443", c)
}

// tryTo is try for a destination.
func tryTo(t *testing.T, w wayIn, addr, to string, c *client) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	d := w.dial(addr, c)
	if closer, ok := d.(io.Closer); ok {
		defer closer.Close()
	}
	conn, err := d.DialContext(ctx, "tcp", to)
	if err != nil {
		return err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(conn, "there and back"); err != nil {
		return err
	}
	got := make([]byte, len("there and back"))
	if _, err := io.ReadFull(conn, got); err != nil {
		return err
	}
	if string(got) != "there and back" {
		return fmt.Errorf("got %q", got)
	}
	return nil
}

// A listenerOf is a kind of listener, and what it carries.
type listenerOf struct {
	name     string
	yaml     string // with %[1]s in its tls and %[2]s beside it, for what a test adds
	tls      bool
	carriers []string
}

// listenersOf are the kinds of listener of a file at which clients say where they
// want to go, and who they are.
var listenersOf = []listenerOf{
	{"clear", `{address: "127.0.0.1:1", protocols: [sni, connect, connect-h2, socks5, websocket]%[2]s}`, false,
		[]string{"connect", "connect-h2", "socks5", "websocket", "websocket-h2"}},
	{"pinned to connect", `{address: "127.0.0.2:1", protocols: [connect]%[2]s}`, false, []string{"connect"}},
	{"pinned to connect-h2", `{address: "127.0.0.3:1", protocols: [connect-h2]%[2]s}`, false, []string{"connect-h2"}},
	{"pinned to socks5", `{address: "127.0.0.4:1", protocols: [socks5]%[2]s}`, false, []string{"socks5"}},
	{"pinned to websocket", `{address: "127.0.0.5:1", protocols: [websocket]%[2]s}`, false, []string{"websocket"}},
	{"all TLS", `{address: "127.0.0.6:1", tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [connect, connect-h2, websocket]%[1]s}%[2]s}`, true,
		[]string{"connect", "connect-h2", "websocket", "websocket-h2"}},
	{"socks5 in TLS", `{address: "127.0.0.9:1", tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [socks5]%[1]s}%[2]s}`, true, []string{"socks5"}},
	{"TLS beside sni", `{address: "127.0.0.7:1", protocols: [sni], tls: {certificateFile: gw.crt, keyFile: gw.key, names: [gw.test], protocols: [connect, connect-h2]%[1]s}%[2]s}`, true,
		[]string{"connect", "connect-h2"}},
	{"HTTP/3", `{address: "udp://127.0.0.1:1", tls: {certificateFile: gw.crt, keyFile: gw.key%[1]s}%[2]s}`, true, []string{"connect-h3"}},
	{"HTTP/3 beside QUIC", `{address: "udp://127.0.0.2:1", protocols: [quic], tls: {certificateFile: gw.crt, keyFile: gw.key, names: [gw.test]%[1]s}%[2]s}`, true, []string{"connect-h3"}},
}

// eachWayIn runs a gateway with a listener of each kind, of which each has tls
// and rest besides, and calls f for each carrier of each.
func eachWayIn(t *testing.T, kinds []listenerOf, tls, rest string, files map[string]string, f func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf)) {
	eachWayWithin(t, "{connectionRatePerClient: -1}", kinds, tls, rest, files, f)
}

// eachWayWithin is eachWayIn with limits.
func eachWayWithin(t *testing.T, limits string, kinds []listenerOf, tls, rest string, files map[string]string, f func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf)) {
	var yaml strings.Builder
	yaml.WriteString("limits: " + limits + "\nlisteners:\n")
	for _, kind := range kinds {
		rest := rest
		if !strings.Contains(kind.yaml, "websocket") {
			rest, _, _ = strings.Cut(rest, ", websocket:")
		}
		yaml.WriteString("  - " + strings.NewReplacer("%[1]s", tls, "%[2]s", rest).Replace(kind.yaml) + "\n")
	}
	fmt.Fprintf(&yaml, "services:\n  - {name: svc.test, ports: [443], endpoints: [%q]}\n", testnet.Echo(t).Addr())
	files["culvert.yaml"] = yaml.String()
	r := startFile(t, files)
	for i := range kinds {
		for _, carrier := range kinds[i].carriers {
			t.Run(kinds[i].name+"/"+carrier, func(t *testing.T) { f(t, r, wayInBy(carrier), r.addrs[i], &kinds[i]) })
		}
	}
}

// keysOfGateway makes gw.crt and gw.key, and gw-ca.crt, which verifies them as roots do.
func keysOfGateway(t *testing.T) (files map[string]string, roots *x509.CertPool) {
	t.Helper()
	ca, err := testca.New("gw.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://gw.test/gw", DNSNames: []string{"gw.test"}, IPs: []net.IP{net.IPv4(127, 0, 0, 8)}})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]string{"gw.crt": string(pair.CertPEM), "gw.key": string(pair.KeyPEM), "gw-ca.crt": string(ca.CertPEM)}, ca.Pool()
}

// Whatever carries a request and whatever it comes to, credentials are asked for
// where the listener has auth, and what a reload takes away is refused at once.
func TestEveryCarrierAsksForCredentials(t *testing.T) {
	files, roots := keysOfGateway(t)
	hash := func(password string) string { return string(hashOf(t, password, bcrypt.MinCost)) }
	files["users.txt"] = "alice:" + hash("a-secret") + "\nbob:" + hash("b-secret") + "\n"
	files["tokens.txt"] = "ci:" + digestOf("t-one") + "\ncd:" + digestOf("t-two") + "\n"
	type trial struct {
		client client
		ok     bool
	}
	trials := func(gone bool) []trial {
		return []trial{
			{client{user: "alice", password: "a-secret"}, true},
			{client{user: "bob", password: "b-secret"}, !gone},
			{client{token: "t-one"}, true},
			{client{token: "t-two"}, !gone},
			{client{user: "carol", password: "c-secret"}, gone},
			{client{user: "alice", password: "b-secret"}, false},
			{client{user: "nobody", password: "a-secret"}, false},
			{client{token: "t-three"}, false},
			{client{}, false},
		}
	}
	judge := func(t *testing.T, w wayIn, addr string, kind *listenerOf, gone bool) {
		var all sync.WaitGroup // a wrong password waits for a second by SOCKS
		for _, trial := range trials(gone) {
			c := trial.client
			if kind.tls {
				c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
			}
			if w.name == "socks5" && c.token != "" {
				continue // there are none
			}
			all.Go(func() {
				switch err := try(t, w, addr, &c); {
				case trial.ok && err != nil, !trial.ok && err == nil:
					t.Errorf("user %q, token %q: got %v, want the tunnel opened: %v", c.user, c.token, err, trial.ok)
				case err != nil && tunnel.ReasonOf(err) != tunnel.NoAuth:
					t.Errorf("user %q, token %q: got %v, want %s", c.user, c.token, err, tunnel.NoAuth)
				}
			})
		}
		all.Wait()
	}
	type place struct {
		w    wayIn
		addr string
		kind *listenerOf
	}
	var places []place
	var r *running
	eachWayIn(t, listenersOf, "", ", auth: {usersFile: users.txt, tokensFile: tokens.txt}", files,
		func(t *testing.T, running *running, w wayIn, addr string, kind *listenerOf) {
			r = running
			places = append(places, place{w, addr, kind})
			judge(t, w, addr, kind, false)
		})
	r.write(t, "users.txt", "alice:"+hash("a-secret")+"\ncarol:"+hash("c-secret")+"\n")
	r.write(t, "tokens.txt", "ci:"+digestOf("t-one")+"\n")
	r.source.Reload()
	testnet.Eventually(t, patience, func() bool {
		return strings.Count(r.log.String(), "users_removed=1 users_changed=1 tokens_added=0 tokens_removed=1") == len(listenersOf)
	}, "every listener has its credentials anew")
	if strings.Contains(r.log.String(), "some changes need a restart") {
		t.Error("other credentials need a restart")
	}
	judgeAll := func(t *testing.T) {
		for _, p := range places {
			t.Run(p.kind.name+"/"+p.w.name, func(t *testing.T) {
				t.Parallel()
				judge(t, p.w, p.addr, p.kind, true)
			})
		}
	}
	t.Run("reloaded", judgeAll)
	const auth = ", auth: {usersFile: users.txt, tokensFile: tokens.txt}"
	r.rewrite(t, strings.ReplaceAll(files["culvert.yaml"], auth, ""), "the listener no longer requires credentials", len(listenersOf))
	for _, p := range places {
		t.Run("without auth/"+p.kind.name+"/"+p.w.name, func(t *testing.T) {
			c := client{}
			if p.kind.tls {
				c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
			}
			if err := try(t, p.w, p.addr, &c); err != nil {
				t.Errorf("got %v, want nobody asked for credentials", err)
			}
		})
	}
	r.rewrite(t, files["culvert.yaml"], "the listener now requires credentials", len(listenersOf))
	t.Run("with auth again", judgeAll)
	if strings.Contains(r.log.String(), "only a restart takes it up") {
		t.Error("an auth that comes or goes needs a restart")
	}
}

// rewrite changes the configuration, and waits until the log has said something so
// many times more.
func (r *running) rewrite(t *testing.T, yaml, says string, times int) {
	t.Helper()
	times += strings.Count(r.log.String(), says)
	r.write(t, "culvert.yaml", yaml)
	r.source.Reload()
	testnet.Eventually(t, patience, func() bool { return strings.Count(r.log.String(), says) == times }, "the log says: %s", says)
}

// TLS by name has no place for credentials: a listener that names no protocols takes
// it as long as there is no auth, which may come and go.
func TestAuthTakesTLSByNameAway(t *testing.T) {
	const auth = `, auth: {tokensFile: tokens.txt}`
	files := map[string]string{"tokens.txt": "ci:" + digestOf("t-one") + "\n"}
	with := func(auth string) string {
		return fmt.Sprintf("listeners: [{address: \"127.0.0.1:1\"%s}]\nservices:\n  - {name: svc.test, ports: [443], endpoints: [%q]}\n", auth, testnet.Echo(t).Addr())
	}
	files["culvert.yaml"] = with(auth)
	r := startFile(t, files)
	carried := func() bool {
		t.Helper()
		c, err := tls.Dial("tcp", r.addrs[0], &tls.Config{ServerName: "svc.test", InsecureSkipVerify: true})
		if err == nil {
			_ = c.Close()
			t.Fatal("there is no TLS to speak")
		}
		return strings.Contains(err.Error(), "clientHelloMsg") // which the service has sent back
	}
	anyone := func() error { return try(t, wayInBy("connect"), r.addrs[0], &client{}) }
	ci := func() error { return try(t, wayInBy("connect-h2"), r.addrs[0], &client{token: "t-one"}) }
	judge := func(when string, auth bool) {
		t.Helper()
		if got := carried(); got == auth {
			t.Errorf("%s: TLS by name is carried: %v", when, got)
		}
		if err := anyone(); (err == nil) == auth {
			t.Errorf("%s: CONNECT without credentials: %v", when, err)
		}
		if err := ci(); err != nil {
			t.Errorf("%s: CONNECT with a token: %v", when, err)
		}
	}
	judge("at first", true)
	r.rewrite(t, with(""), "the listener no longer requires credentials", 1)
	judge("without auth", false)
	r.rewrite(t, with(auth), "the listener now requires credentials", 1)
	judge("with auth again", true)
}

// A tunnel opened with credentials is reported under their identity.
func TestEveryCarrierTellsWhoAsks(t *testing.T) {
	files, roots := keysOfGateway(t)
	files["users.txt"] = "alice:" + string(hashOf(t, "a-secret", bcrypt.MinCost)) + "\n"
	eachWayIn(t, listenersOf, "", ", auth: {usersFile: users.txt}", files, func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf) {
		c := client{user: "alice", password: "a-secret"}
		if kind.tls {
			c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
		}
		before := strings.Count(r.log.String(), "peer=alice")
		if err := try(t, w, addr, &c); err != nil {
			t.Fatal(err)
		}
		testnet.Eventually(t, patience, func() bool { return strings.Count(r.log.String(), "peer=alice") > before }, "the log has the peer")
	})
}

// Whatever carries a request inside of TLS, a client certificate is asked for
// where the listener says so, and its CA speaks for its own trust domain only.
func TestEveryCarrierKeepsTrustDomains(t *testing.T) {
	files, roots := keysOfGateway(t)
	cas := map[string]*testca.CA{}
	for _, domain := range []string{"a.test", "b.test"} {
		ca, err := testca.New(domain, nil)
		if err != nil {
			t.Fatal(err)
		}
		cas[domain] = ca
		files[domain+".pem"] = string(ca.CertPEM)
	}
	kinds := []listenerOf{{"HBONE", `{address: "127.0.0.8:1", tls: {certificateFile: gw.crt, keyFile: gw.key, protocols: [hbone]%[1]s}%[2]s}`, true, []string{"hbone"}}}
	for _, kind := range listenersOf {
		if kind.tls {
			kinds = append(kinds, kind)
		}
	}
	for name, trust := range map[string]struct {
		yaml string
		ok   []string // of the certificates that are tried
	}{
		"a CA each":       {", clientCAFile: {a.test: a.test.pem, b.test: b.test.pem}", []string{"a.test for a.test", "b.test for b.test"}},
		"one domain":      {", clientCAFile: a.test.pem, trustDomains: [a.test]", []string{"a.test for a.test"}},
		"another domain":  {", clientCAFile: a.test.pem, trustDomains: [b.test]", []string{"a.test for b.test"}},
		"any of one's CA": {", clientCAFile: b.test.pem", []string{"b.test for a.test", "b.test for b.test"}},
	} {
		t.Run(name, func(t *testing.T) {
			eachWayIn(t, kinds, trust.yaml, "", files, func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf) {
				for by, ca := range cas {
					for id := range cas {
						forger := *ca
						forger.TrustDomain = id
						pair, err := forger.Issue(testca.Options{SPIFFEID: "spiffe://" + id + "/alice"})
						if err != nil {
							t.Fatal(err)
						}
						c := client{tls: &tls.Config{RootCAs: roots, ServerName: "gw.test"}}
						c.tls.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair.TLS, nil }
						err = try(t, w, addr, &c)
						want := strings.Contains(strings.Join(trust.ok, ","), by+" for "+id)
						if (err == nil) != want {
							t.Errorf("an id of %s signed by the CA of %s: got %v, want it accepted: %v", id, by, err, want)
						}
					}
				}
				if err := try(t, w, addr, &client{tls: &tls.Config{RootCAs: roots, ServerName: "gw.test"}}); err == nil {
					t.Error("a client without a certificate is let in")
				}
			})
		})
	}
}

// Wherever WebSocket is spoken, it keeps to the hosts and origins of its listener.
func TestEveryWebSocketKeepsHostsAndOrigins(t *testing.T) {
	files, roots := keysOfGateway(t)
	var kinds []listenerOf
	for _, kind := range listenersOf {
		var sockets []string
		for _, carrier := range kind.carriers {
			if strings.HasPrefix(carrier, "websocket") {
				sockets = append(sockets, carrier)
			}
		}
		if kind.carriers = sockets; len(sockets) > 0 {
			kinds = append(kinds, kind)
		}
	}
	eachWayIn(t, kinds, "", `, websocket: {hosts: [gw.test], origins: ["https://app.test"]}`, files, func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf) {
		for _, trial := range []struct {
			host, origin string
			want         tunnel.Reason
		}{
			{"gw.test", "", tunnel.Done}, {"gw.test", "https://app.test", tunnel.Done},
			{"evil.test", "", tunnel.BadRequest}, {"gw.test", "https://evil.test", tunnel.Denied},
		} {
			c := client{host: trial.host, origin: trial.origin}
			if kind.tls {
				c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
			}
			if err := try(t, w, addr, &c); tunnel.ReasonOf(err) != trial.want {
				t.Errorf("host %q, origin %q: got %v, want %s", trial.host, trial.origin, err, trial.want)
			}
		}
	})
}

// Whatever carries a request, its tunnel counts for the identity of the caller, and another
// one at the same address has a share of its own.
func TestEveryCarrierKeepsLimitsOfPrincipals(t *testing.T) {
	files, roots := keysOfGateway(t)
	hash := func(password string) string { return string(hashOf(t, password, bcrypt.MinCost)) }
	files["users.txt"] = "alice:" + hash("a-secret") + "\nbob:" + hash("b-secret") + "\n"
	for i := range listenersOf {
		kind := listenersOf[i]
		t.Run(kind.name, func(t *testing.T) {
			t.Parallel()
			for _, carrier := range kind.carriers {
				kind.carriers = []string{carrier}
				eachWayWithin(t, "{maxConnectionsPerPrincipal: 2}", []listenerOf{kind}, "", ", auth: {usersFile: users.txt}", maps.Clone(files), func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf) {
					open := func(user, password string) error {
						c := client{user: user, password: password}
						if kind.tls {
							c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
						}
						d := w.dial(addr, &c)
						if closer, ok := d.(io.Closer); ok {
							t.Cleanup(func() { _ = closer.Close() })
						}
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						defer cancel()
						conn, err := d.DialContext(ctx, "tcp", "svc.test:443")
						if err == nil {
							t.Cleanup(func() { _ = conn.Close() })
						}
						return err
					}
					for i := range 3 {
						if err := open("alice", "a-secret"); (err != nil) != (i == 2) {
							t.Errorf("tunnel %d of alice: %v, want two, and the third one refused", i+1, err)
						}
					}
					if err := open("bob", "b-secret"); err != nil {
						t.Errorf("the first tunnel of bob: %v", err)
					}
					testnet.Eventually(t, patience, func() bool {
						return strings.Contains(r.log.String(), "limits.maxConnectionsPerPrincipal: alice has 2 tunnels open, the limit is 2")
					}, "the log says which limit, and whose")
				})
			}
		})
	}
}

// Whatever carries a request and whatever it comes to, one client opens no more
// connections in a second than it may, and has no more tunnels.
func TestEveryCarrierKeepsLimits(t *testing.T) {
	files, roots := keysOfGateway(t)
	for key, limits := range map[string]string{
		"limits.connectionRatePerClient": "{connectionRatePerClient: 2}", "limits.maxConnectionsPerClient": "{maxConnectionsPerClient: 2}",
	} {
		for i := range listenersOf {
			t.Run(key+"/"+listenersOf[i].name, func(t *testing.T) {
				t.Parallel()
				for _, carrier := range listenersOf[i].carriers {
					kind := listenersOf[i]
					kind.carriers = []string{carrier}
					eachWayWithin(t, limits, []listenerOf{kind}, "", "", maps.Clone(files), func(t *testing.T, r *running, w wayIn, addr string, kind *listenerOf) {
						c := client{}
						if kind.tls {
							c.tls = &tls.Config{RootCAs: roots, ServerName: "gw.test"}
						}
						d := w.dial(addr, &c) // whose tunnels may share a connection
						if closer, ok := d.(io.Closer); ok {
							defer closer.Close()
						}
						var all sync.WaitGroup
						var refused atomic.Int32
						for range 10 {
							all.Go(func() {
								var err error
								if key == "limits.connectionRatePerClient" {
									err = try(t, w, addr, &c)
								} else {
									ctx, cancel := context.WithTimeout(t.Context(), patience)
									defer cancel()
									var conn net.Conn
									if conn, err = d.DialContext(ctx, "tcp", "svc.test:443"); err == nil {
										t.Cleanup(func() { _ = conn.Close() })
									}
								}
								if err != nil {
									refused.Add(1)
								}
							})
						}
						all.Wait()
						if refused.Load() == 0 {
							t.Error("none of ten at once is refused")
						}
						testnet.Eventually(t, patience, func() bool {
							return strings.Contains(r.log.String(), key+": ") && strings.Contains(r.log.String(), "reason=overload")
						}, "the log says which limit")
					})
				}
			})
		}
	}
}
