package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"github.com/spf13/cobra"

	"culvert.dev/internal/testca"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

func newDemo() *cobra.Command {
	var once bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run a CA, services with mutual TLS, a gateway and a client on loopback",
		Long: `Demo creates a CA and starts two services that demand a client certificate, a
private one, a gateway in front of them, and five more gateways for chains and
the PROXY protocol, all on loopback and in this process. Then a client reaches
the first service over every protocol, including QUIC and a chain of three
gateways, and each time the service sees the client's certificate. Requests that
must be refused are refused.

It then keeps running, and prints commands to try with curl and openssl, until
it is interrupted. With --once it exits: 0 if every step passed, 1 if not.`,
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
	fails int

	// Where the gateway listens: on one port for all protocols that can be
	// told apart, on others for what can't.
	addr, https, hbone, proxy, orders, http3, quic, udp string
	far                                                 string // the last of three gateways
	bySOCKS, twice, told                                string // those of one more

	services sync.WaitGroup // those that end with the context

	// Where orders also listens: where connections begin with a PROXY header.
	ordersProxy netip.AddrPort
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
		return fmt.Errorf("%d steps of the demo failed", d.fails)
	}
	if once {
		fmt.Fprintln(w, "\nall steps passed")
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
	d.say("created a CA for trust domain %s and a certificate for the client, spiffe://%[1]s/ns/shop/sa/web", demoDomain)

	var services []*registry.Service
	for _, name := range []string{"orders", "stock", "payroll"} {
		addr, err := d.serve(ctx, name)
		if err != nil {
			return nil, err
		}
		private := ""
		if name == "payroll" {
			private = ", private"
		}
		d.say("service %s.%s at %s: serves only clients with a certificate of the CA%s", name, demoDomain, addr, private)
		s := demoService(name)
		s.Endpoints = []registry.Endpoint{{Addr: addr.Addr(), Port: addr.Port()}}
		s.Exposed = private == ""
		services = append(services, s)
	}
	return d.gateways(ctx, services)
}

func demoService(name string) *registry.Service {
	name += "." + demoDomain
	return &registry.Service{Name: name, Names: []tunnel.Pattern{{Suffix: tunnel.MustParseName(name)}}, Ports: []uint16{443}, Exposed: true}
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
	fmt.Fprintf(d.w, "%s %-69s  %s\n", mark, what, got)
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
