package upstream

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// A mutualService asks for certificates, says whose it sees, and then echoes. With postgres it
// begins by an SSLRequest, and with speaksFirst it says something before it reads.
func mutualService(t *testing.T, ca *testca.CA, postgres, speaksFirst bool) (addr string, plaintext *atomic.Bool) {
	t.Helper()
	pair, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/service", DNSNames: []string{"shop.test"}})
	if err != nil {
		t.Fatal(err)
	}
	plaintext = new(atomic.Bool)
	config := &tls.Config{Certificates: []tls.Certificate{pair.TLS}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: ca.Pool()}
	return testnet.Service(t, func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(patience))
		if postgres {
			request := make([]byte, 8)
			if _, err := io.ReadFull(c, request); err != nil || string(request) != "\x00\x00\x00\x08\x04\xd2\x16\x2f" {
				plaintext.Store(err == nil)
				return
			}
			_, _ = c.Write([]byte("S"))
		}
		s := tls.Server(c, config)
		if err := s.Handshake(); err != nil {
			plaintext.CompareAndSwap(false, strings.Contains(err.Error(), "first record does not look like"))
			return
		}
		defer s.Close()
		if speaksFirst {
			_, _ = io.WriteString(s, "hello ")
		}
		_, _ = io.WriteString(s, s.ConnectionState().PeerCertificates[0].URIs[0].String()+" ")
		_, _ = io.Copy(s, s)
	}), plaintext
}

// A passingWorld is a Router that leads to a service with PassClientTLS.
type passingWorld struct {
	router *tunnel.Router
	ca     *testca.CA
	own    *testca.Pair // of a client
	ended  chan *tunnel.Outcome
}

func newPassingWorld(t *testing.T, addr string, ca *testca.CA, s *registry.Service) *passingWorld {
	t.Helper()
	w := &passingWorld{ca: ca, ended: make(chan *tunnel.Outcome, 1)}
	gateway, err := ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/gateway"})
	if err != nil {
		t.Fatal(err)
	}
	if w.own, err = ca.Issue(testca.Options{SPIFFEID: "spiffe://edge.test/program"}); err != nil {
		t.Fatal(err)
	}
	s.TLS = &registry.BackendTLS{ServerName: "shop.test", Roots: string(ca.CertPEM), Certificate: string(gateway.CertPEM), Key: registry.Secret(gateway.KeyPEM), PassClientTLS: true}
	up := &Transports{Direct: &tunnel.NetDialer{}}
	t.Cleanup(up.Close)
	way, err := up.New(s, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	if got := way.Info().Security; got != tunnel.Mutual {
		t.Errorf("the security of the way is %v, want mutual", got)
	}
	relay := &tunnel.Relay{}
	t.Cleanup(func() { _ = relay.Close() })
	at := netip.MustParseAddrPort(addr)
	w.router = &tunnel.Router{Relay: relay, Budget: &tunnel.Budget{Limit: 100}, Observe: func(o *tunnel.Outcome) { w.ended <- o }, Resolver: resolve(func(context.Context, *tunnel.Request) (tunnel.Route, error) {
		return tunnel.Route{Service: "shop", Endpoints: []tunnel.Endpoint{{Addr: at, Named: true, Transport: way}}}, nil
	})}
	return w
}

type resolve func(context.Context, *tunnel.Request) (tunnel.Route, error)

func (f resolve) Resolve(ctx context.Context, req *tunnel.Request) (tunnel.Route, error) {
	return f(ctx, req)
}

// ask returns the client's end of a tunnel.
func (w *passingWorld) ask(t *testing.T) *net.TCPConn {
	t.Helper()
	ln := testnet.Listen(t)
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		w.router.ServeTunnel(context.Background(), &tunnel.Request{
			Proto: "connect", Name: tunnel.MustParseName("shop.test"), Port: 443, Start: time.Now(), Source: netip.MustParseAddrPort("127.0.0.1:1"),
			Accept: func() (tunnel.Stream, error) { return server.(*net.TCPConn), nil },
			Refuse: func(err error) { t.Errorf("refused: %v", err); _ = server.Close() },
		})
	}()
	t.Cleanup(func() { _ = c.Close(); <-served })
	return c.(*net.TCPConn)
}

func (w *passingWorld) clientTLS(c net.Conn) net.Conn {
	return tls.Client(c, &tls.Config{ServerName: "shop.test", RootCAs: w.ca.Pool(), Certificates: []tls.Certificate{w.own.TLS}})
}

// exchange sends something, ends, and returns all that comes.
func exchange(t *testing.T, c net.Conn, send string) string {
	t.Helper()
	if _, err := io.WriteString(c, send); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(c)
	if err != nil {
		t.Errorf("after %q: %v", got, err)
	}
	return string(got)
}

const byGateway, byProgram = "spiffe://edge.test/gateway ", "spiffe://edge.test/program "

// A program without TLS has that of the gateway, and one with TLS has its own from end to end.
func TestFirstBytesDecideWhoSpeaksTLS(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	sslRequest := "\x00\x00\x00\x08\x04\xd2\x16\x2f"
	for _, row := range []struct {
		name       string
		postgres   bool
		first      bool // the service speaks first
		before     []string
		answers    string // to before
		ownTLS     bool
		send, want string
	}{
		{name: "plaintext", send: "GET / HTTP/1.1\r\n\r\n", want: byGateway + "GET / HTTP/1.1\r\n\r\n"},
		{name: "one byte", send: "x", want: byGateway + "x"},
		{name: "nothing", want: byGateway},
		{name: "what is nearly TLS", send: "\x16\x03\x01\x00", want: byGateway + "\x16\x03\x01\x00"},
		{name: "a record that is no hello", send: "\x17\x03\x03\x00\x01x", want: byGateway + "\x17\x03\x03\x00\x01x"},
		{name: "TLS", ownTLS: true, send: "hi", want: byProgram + "hi"},
		{name: "a service that speaks first, and a client with TLS", first: true, ownTLS: true, send: "hi", want: "hello " + byProgram + "hi"},
		{name: "a service that speaks first", first: true, want: "hello " + byGateway},
		{name: "PostgreSQL without TLS", postgres: true, send: "\x00\x00\x00\x09\x00\x03\x00\x00\x00", want: byGateway + "\x00\x00\x00\x09\x00\x03\x00\x00\x00"},
		{name: "PostgreSQL with direct TLS", postgres: true, ownTLS: true, send: "hi", want: byProgram + "hi"},
		{name: "PostgreSQL with an SSLRequest", postgres: true, before: []string{sslRequest}, answers: "S", ownTLS: true, send: "hi", want: byProgram + "hi"},
		{name: "PostgreSQL in pieces, by GSSAPI first", postgres: true, before: []string{"\x00\x00\x00\x08\x04\xd2\x16\x30", sslRequest}, answers: "NS", ownTLS: true, send: "hi", want: byProgram + "hi"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			addr, plaintext := mutualService(t, ca, row.postgres, row.first)
			s := &registry.Service{}
			if row.postgres {
				s.StartTLS = "postgres"
			}
			w := newPassingWorld(t, addr, ca, s)
			c := net.Conn(w.ask(t))
			for i, b := range row.before {
				_, _ = io.WriteString(c, b)
				answer := make([]byte, 1)
				if _, err := io.ReadFull(c, answer); err != nil || answer[0] != row.answers[i] {
					t.Fatalf("the answer is %q, %v, want %q", answer, err, row.answers[i])
				}
			}
			if row.ownTLS {
				c = w.clientTLS(c)
			}
			if got := exchange(t, c, row.send); got != row.want {
				t.Errorf("got %q, want %q", got, row.want)
			}
			_ = c.Close()
			if plaintext.Load() {
				t.Error("the service got plaintext")
			}
			if o := <-w.ended; o.Reason != tunnel.Done {
				t.Errorf("the outcome is %s, %v", o.Reason, o.Err)
			}
			if n := w.router.Budget.Clients().Idle(); n != nil {
				t.Error(n)
			}
		})
	}
}

// Where a service cannot be verified, or a client does not do what it has asked for, nothing of
// the client goes on, and the tunnel ends with the reason.
func TestUndecidedEndsWithoutPlaintext(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	other, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	const sslRequest = "\x00\x00\x00\x08\x04\xd2\x16\x2f"
	for _, row := range []struct {
		name, send, then string
		by               *testca.CA
		postgres         bool
		want             tunnel.Reason
	}{
		{"another CA", "hello", "", other, false, tunnel.DialFailed},
		{"plaintext after an SSLRequest", sslRequest, "\x00\x00\x00\x09\x00\x03\x00\x00\x00", ca, true, tunnel.Insecure},
		{"bytes before the answer", sslRequest + "\x16\x03\x01\x00\x01\x01", "", ca, true, tunnel.BadPreamble},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			addr, plaintext := mutualService(t, row.by, row.postgres, false)
			s := &registry.Service{}
			if row.postgres {
				s.StartTLS = "postgres"
			}
			w := newPassingWorld(t, addr, ca, s)
			c := w.ask(t)
			_, _ = io.WriteString(c, row.send)
			if row.then != "" {
				_, _ = io.ReadFull(c, make([]byte, 1))
				_, _ = io.WriteString(c, row.then)
			}
			_, _ = io.Copy(io.Discard, c)
			o := <-w.ended
			if o.Reason != row.want {
				t.Errorf("the outcome is %s, %v, want %s", o.Reason, o.Err, row.want)
			}
			if plaintext.Load() {
				t.Error("the service got plaintext")
			}
			if n := w.router.Budget.Clients().Idle(); n != nil {
				t.Error(n)
			}
		})
	}
}

// The stream of a process that cannot be looked at has the gateway's TLS, and one on which nothing
// is decided carries nothing.
func TestUndecidedWithoutAClient(t *testing.T) {
	ca, err := testca.New("edge.test", nil)
	if err != nil {
		t.Fatal(err)
	}
	addr, _ := mutualService(t, ca, false, false)
	w := newPassingWorld(t, addr, ca, &registry.Service{})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	s, err := w.router.Open(ctx, &tunnel.Request{Proto: "dial", Name: tunnel.MustParseName("shop.test"), Port: 443, Start: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	if got := exchange(t, s.Conn, "x"); got != byGateway+"x" {
		t.Errorf("got %q", got)
	}
	_ = s.Conn.Close()
	s.End(tunnel.End{Reason: tunnel.Done})
	u := &undecided{layer: &passingLayer{}}
	if _, err := u.Write([]byte("x")); err != errUndecided {
		t.Errorf("a write before the decision: %v", err)
	}
	if _, err := u.Read(make([]byte, 1)); err != errUndecided {
		t.Errorf("a read before the decision: %v", err)
	}
}
