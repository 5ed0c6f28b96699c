package command

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/connect"
	"culvert.dev/gateway"
	"culvert.dev/internal/testca"
	"culvert.dev/registry"
	"culvert.dev/sni"
	"culvert.dev/tunnel"
)

func newDemo() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "See it work: a CA, services with mutual TLS, a gateway and a client, all on loopback",
		Long: `Demo makes a CA, starts two services that demand a client certificate, a private
one, and a gateway in front of them, all on loopback and in this process. Then a
client goes through the gateway to each of them, by SNI and by HTTP CONNECT, and
is refused where it should be.

It stays, and prints commands to try with curl and openssl, until it is
interrupted; with --once it exits: 0 if everything went as it should, 1 if not.`,
		Example: "  culvert demo\n  culvert demo --once",
		Args:    args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop, _ := signals(cmd.Context())
			defer stop()
			return runDemo(ctx, cmd.OutOrStdout(), once)
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "run the traffic and exit")
	return cmd
}

const demoDomain = "demo.test"

// A demo is the whole scene.
type demo struct {
	w     io.Writer
	dir   string
	ca    *testca.CA
	web   *testca.Pair // the client
	addr  string       // of the gateway
	fails int
}

func runDemo(ctx context.Context, w io.Writer, once bool) error {
	dir, err := os.MkdirTemp("", "culvert-demo-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithCancel(ctx)
	d := &demo{w: w, dir: dir}
	done, err := d.start(ctx)
	if err == nil {
		d.traffic(ctx)
		if !once {
			d.invite()
			<-ctx.Done()
		}
	}
	cancel()
	if done != nil {
		done()
	}
	switch {
	case err != nil:
		return err
	case d.fails > 0:
		return fmt.Errorf("%d of the demo's steps did not go as they should", d.fails)
	}
	if once {
		fmt.Fprintln(w, "\nall as it should be")
	}
	return nil
}

// start raises the scene. done waits for its end, after ctx's.
func (d *demo) start(ctx context.Context) (done func(), err error) {
	if d.ca, err = testca.New(demoDomain, nil); err != nil {
		return nil, err
	}
	if d.web, err = d.ca.Issue(testca.Options{SPIFFEID: "spiffe://" + demoDomain + "/ns/shop/sa/web", Usage: testca.ClientOnly}); err != nil {
		return nil, err
	}
	if err := errors.Join(d.ca.Save(d.dir), d.web.Save(d.dir, "web")); err != nil {
		return nil, err
	}
	d.say("made a CA for trust domain %s and a certificate for the client, spiffe://%[1]s/ns/shop/sa/web", demoDomain)

	var services []registry.Service
	for _, name := range []string{"orders", "stock", "payroll"} {
		addr, err := d.serve(ctx, name)
		if err != nil {
			return nil, err
		}
		private := ""
		if name == "payroll" {
			private = ", private"
		}
		d.say("service %s.%s at %s: serves only those who show a certificate of the CA%s", name, demoDomain, addr, private)
		services = append(services, registry.Service{
			Name:      name + "." + demoDomain,
			Names:     []tunnel.Pattern{{Suffix: tunnel.MustParseName(name + "." + demoDomain)}},
			Ports:     []uint16{443},
			Endpoints: []registry.Endpoint{{Addr: addr.Addr(), Port: addr.Port()}},
			Exposed:   private == "",
		})
	}
	g, err := gateway.New(ctx, gateway.Config{
		Listeners: []gateway.Listener{{Address: "127.0.0.1:0", Protocols: []tunnel.Protocol{&sni.Protocol{}, &connect.Protocol{}}}},
		Sources:   []registry.Source{registry.Static{Name: "demo", Snapshot: registry.Snapshot{Services: services}}},
		Log:       slog.New(slog.DiscardHandler),
		Lameduck:  -1, Grace: 2 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	d.addr = g.Addrs()[0].String()
	d.say("gateway at %s: TLS and HTTP CONNECT on one port. It holds no key and no certificate", d.addr)
	end := make(chan error, 1)
	go func() { end <- g.Run(ctx, nil) }()
	return func() { <-end }, nil
}

// serve starts one HTTPS service that demands a client certificate.
func (d *demo) serve(ctx context.Context, name string) (netip.AddrPort, error) {
	pair, err := d.ca.Issue(testca.Options{
		SPIFFEID: "spiffe://" + demoDomain + "/ns/shop/sa/" + name,
		DNSNames: []string{name + "." + demoDomain},
		Usage:    testca.ServerOnly,
	})
	if err != nil {
		return netip.AddrPort{}, err
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return netip.AddrPort{}, err
	}
	srv := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			id, _ := testca.PeerID(r.TLS.PeerCertificates[0])
			fmt.Fprintf(w, "%s here, you are %s\n", name, id)
		}),
		ReadHeaderTimeout: 5 * time.Second,
		ErrorLog:          slog.NewLogLogger(slog.DiscardHandler, slog.LevelError),
	}
	go func() { _ = srv.Serve(tls.NewListener(ln, pair.ServerConfig())) }()
	context.AfterFunc(ctx, func() { _ = srv.Close() })
	return ln.Addr().(*net.TCPAddr).AddrPort(), nil
}

// traffic is what the client does.
func (d *demo) traffic(ctx context.Context) {
	fmt.Fprintln(d.w)
	for _, service := range []string{"orders", "stock"} {
		host := service + "." + demoDomain
		want := fmt.Sprintf("%s here, you are spiffe://%s/ns/shop/sa/web", service, demoDomain)
		for _, how := range []string{"sni", "connect"} {
			d.expect(fmt.Sprintf("%s by %s", host, how), want, func() (string, error) { return d.get(ctx, how, host, true) })
		}
	}
	d.expect("orders."+demoDomain+" by sni without a certificate: the service itself says no", "certificate required",
		func() (string, error) { return d.get(ctx, "sni", "orders."+demoDomain, false) })
	d.expect("payroll."+demoDomain+" by sni: private, the gateway says no", "unrecognized name",
		func() (string, error) { return d.get(ctx, "sni", "payroll."+demoDomain, true) })
	d.expect("nobody."+demoDomain+" by connect: no such service, the gateway says no", "no-route",
		func() (string, error) { return d.get(ctx, "connect", "nobody."+demoDomain, true) })
	d.expect("127.0.0.1 by connect: not an open proxy, the gateway says no", "prohibited",
		func() (string, error) { return d.get(ctx, "connect", "127.0.0.1", true) })
}

// get asks host for / through the gateway and returns its answer.
func (d *demo) get(ctx context.Context, how, host string, withCert bool) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var dialer tunnel.Dialer = new(net.Dialer)
	addr := d.addr
	if how == "connect" {
		dialer, addr = &connect.Dialer{Proxy: d.addr}, net.JoinHostPort(host, "443")
	}
	raw, err := dialer.DialContext(ctx, "tcp", addr)
	if err != nil {
		return "", err
	}
	defer raw.Close()
	cfg := d.web.ClientConfig(host)
	if !withCert {
		cfg.Certificates = nil
	}
	c := tls.Client(raw, cfg)
	if err := c.HandshakeContext(ctx); err != nil {
		return "", err
	}
	deadline, _ := ctx.Deadline()
	_ = c.SetDeadline(deadline)
	if _, err := fmt.Fprintf(c, "GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", host); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 4096))
	return strings.TrimSpace(string(body)), err
}

// expect runs one step and says whether its answer or error holds want.
func (d *demo) expect(what, want string, step func() (string, error)) {
	got, err := step()
	if err != nil {
		got = err.Error()
	}
	mark := "ok  "
	if !strings.Contains(got, want) {
		mark, got = "FAIL", fmt.Sprintf("%s (want %q)", got, want)
		d.fails++
	}
	fmt.Fprintf(d.w, "%s %s\n       %s\n", mark, what, got)
}

func (d *demo) say(format string, a ...any) { fmt.Fprintf(d.w, format+"\n", a...) }

// invite prints commands to try.
func (d *demo) invite() {
	_, port, _ := net.SplitHostPort(d.addr)
	file := func(name string) string { return filepath.Join(d.dir, name) }
	host := "orders." + demoDomain
	certs := fmt.Sprintf("--cacert %s --cert %s --key %s", file("ca.crt"), file("web.crt"), file("web.key"))
	fmt.Fprintf(d.w, `
try it, from another terminal:

  # by SNI
  curl --resolve %[1]s:%[2]s:127.0.0.1 %[3]s https://%[1]s:%[2]s/
  openssl s_client -quiet -connect %[4]s -servername %[1]s -CAfile %[5]s -cert %[6]s -key %[7]s

  # by HTTP CONNECT
  curl -x http://%[4]s %[3]s https://%[1]s/
  openssl s_client -quiet -proxy %[4]s -connect %[1]s:443 -servername %[1]s -CAfile %[5]s -cert %[6]s -key %[7]s

  # step by step
  culvert probe %[1]s --via %[4]s --ca %[5]s --cert %[6]s --key %[7]s

interrupt to end
`, host, port, certs, d.addr, file("ca.crt"), file("web.crt"), file("web.key"))
}
