package gateway

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/netip"
	"testing"
	"time"

	"culvert.dev/identity"
	"culvert.dev/internal/gateway/inbound"

	"culvert.dev/connect/h3"
	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/internal/termination"
	"culvert.dev/internal/testnet"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
)

// gatewayKeys are of a gateway at loopback, called gw.test, and its roots in PEM.
func gatewayKeys(t *testing.T) (*termination.Keys, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{"gw.test"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return &termination.Keys{Certificates: []*identity.Key{identity.NewKey(&tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key})}},
		string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

// startHTTP3 starts a gateway whose one listener is of UDP, and returns its
// address, the roots to verify it by, and what stops it in order.
func startHTTP3(t *testing.T, alone bool, drainTimeout time.Duration, services ...*registry.Service) (addr, roots string, stop func() error) {
	t.Helper()
	keys, roots := gatewayKeys(t)
	addr, stop = startHTTP3With(t, keys, alone, drainTimeout, services...)
	return addr, roots, stop
}

// startHTTP3With is startHTTP3 with keys of the caller's.
func startHTTP3With(t *testing.T, keys *termination.Keys, alone bool, drainTimeout time.Duration, services ...*registry.Service) (addr string, stop func() error) {
	t.Helper()
	h := &inbound.HTTP3{CurrentVia: func() string { return "far" }, TerminateAll: alone}
	if err := h.Use(termination.Item{Keys: keys, Any: alone}); err != nil {
		t.Fatal(err)
	}
	g, err := New(t.Context(), Config{
		Via: "far", Listeners: []Listener{{Address: "udp://127.0.0.1:0", Datagrams: &inbound.Datagrams{HTTP3: h}}},
		Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: services}}}, DrainDelay: -1, DrainTimeout: drainTimeout,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- g.Run(ctx, nil) }()
	stop = func() error {
		cancel()
		err := <-ran
		ran <- err
		return err
	}
	t.Cleanup(func() { _ = stop() })
	addr = g.Addrs()[0].String()
	testnet.Eventually(t, patience, func() bool { ok, _ := g.Ready(); return ok }, "the gateway is ready")
	return addr, stop
}

// serveHTTP3 serves routes without a gateway, and returns where, and the roots
// to verify it by.
func serveHTTP3(t *testing.T, routes tunnel.Resolver) (addr, roots string) {
	t.Helper()
	keys, roots := gatewayKeys(t)
	pair, err := keys.Certificates[0].Certificate()
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{*pair}, NextProtos: []string{"h3"}}
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	s := &h3.Server{TLS: cfg}
	served := make(chan error, 1)
	go func() {
		served <- s.Serve(t.Context(), c, &tunnel.Router{Relay: &tunnel.Relay{}, Dialer: &tunnel.NetDialer{}, Resolver: routes})
	}()
	t.Cleanup(func() {
		_ = s.Close()
		if err := <-served; err != tunnel.ErrServerClosed {
			t.Errorf("Serve returned %v", err)
		}
	})
	return c.LocalAddr().String(), roots
}

func byHTTP3(roots string, to ...string) registry.Hop {
	return registry.Hop{Proto: "connect-h3", Addresses: to, Roots: roots}
}

// A gateway behind UDP is a hop like the others, alone at its address and
// beside QUIC that goes on.
func TestHTTP3IsAHop(t *testing.T) {
	for _, alone := range []bool{true, false} {
		far, roots, _ := startHTTP3(t, alone, 0, service(testnet.Echo(t).Addr()))
		hop := byHTTP3(roots, far)
		if !alone { // its connections are told by their name, and an address is none
			hop.Addresses = []string{"gw.test:" + far[len("127.0.0.1:"):]}
		}
		d := &upstream.Transports{Direct: &tunnel.NetDialer{}, CurrentVia: func() string { return "near" }, Lookup: func(context.Context, string) ([]netip.Addr, error) {
			return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
		}}
		t.Cleanup(d.Close)
		way, err := d.NextHop([]registry.Hop{hop})
		if err != nil {
			t.Fatal(err)
		}
		err = check(t, way)
		if alone && err != nil {
			t.Error(err)
		}
		if !alone { // the name leads to loopback, which a name must not
			if tunnel.ReasonOf(err) != tunnel.Prohibited {
				t.Errorf("got %v, want it prohibited", err)
			}
			pool := x509.NewCertPool()
			pool.AppendCertsFromPEM([]byte(roots))
			direct := &h3.Dialer{Proxy: far, TLS: &tls.Config{RootCAs: pool, ServerName: "gw.test"}}
			if err := check(t, direct); err != nil {
				t.Error(err)
			}
			_ = direct.Close()
		}
		looping := &upstream.Transports{Direct: &tunnel.NetDialer{}, CurrentVia: func() string { return "far" }}
		t.Cleanup(looping.Close)
		if alone {
			way, _ := looping.NextHop([]registry.Hop{hop})
			if err := check(t, way); tunnel.ReasonOf(err) != tunnel.Loop {
				t.Errorf("got %v, want a loop", err)
			}
		}
	}
}

// The address of a hop by UDP is judged like any other, and it can't be behind
// another.
func TestHTTP3HopIsGuarded(t *testing.T) {
	d := &upstream.Transports{Direct: &tunnel.NetDialer{}, Lookup: func(_ context.Context, host string) ([]netip.Addr, error) {
		if host == "metadata.test" {
			return []netip.Addr{netip.MustParseAddr("169.254.169.254")}, nil
		}
		return nil, errors.New("no such name")
	}}
	t.Cleanup(d.Close)
	for to, want := range map[string]tunnel.Reason{"metadata.test:80": tunnel.Prohibited, "nobody.test:80": tunnel.LookupError} {
		way, err := d.NextHop([]registry.Hop{byHTTP3("", to)})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := way.DialContext(t.Context(), "tcp", "svc.test:443"); tunnel.ReasonOf(err) != want {
			t.Errorf("%s: got %v, want %s", to, err, want)
		}
	}
	if _, err := d.NextHop([]registry.Hop{byConnect("a.test:1"), byHTTP3("", "b.test:1")}); err == nil {
		t.Error("a hop by UDP behind one that carries streams was made")
	}
}

// Tunnels go on while a gateway drains, new ones are refused, and it stops when
// the last one has ended.
func TestHTTP3Drains(t *testing.T) {
	for _, alone := range []bool{true, false} {
		far, roots, stop := startHTTP3(t, alone, time.Minute, service(testnet.Echo(t).Addr()))
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM([]byte(roots))
		d := &h3.Dialer{Proxy: far, TLS: &tls.Config{RootCAs: pool, ServerName: "gw.test"}}
		c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
		if err != nil {
			t.Fatal(err)
		}
		stopped := make(chan error, 1)
		go func() { stopped <- stop() }()
		testnet.Eventually(t, patience, func() bool { return d.Conns() == 0 }, "the connection left the pool") // GOAWAY has come
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(c, "still here"); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(c, make([]byte, len("still here"))); err != nil {
			t.Error(err)
		}
		select {
		case err := <-stopped:
			t.Fatalf("stopped with a tunnel open: %v", err)
		default:
		}
		if err := c.(tunnel.Stream).CloseWrite(); err != nil {
			t.Error(err)
		}
		if b, err := io.ReadAll(c); len(b) > 0 || err != nil {
			t.Errorf("at the end: %q and %v", b, err)
		}
		_ = c.Close()
		if err := <-stopped; err != nil {
			t.Error(err)
		}
		_ = d.Close()
	}
}
