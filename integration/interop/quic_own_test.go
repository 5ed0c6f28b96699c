//go:build unix

package interop

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/quic-go/quic-go"

	gw "culvert.dev/gateway"
	"culvert.dev/registry"
	"culvert.dev/tunnel"
	"culvert.dev/udp"
)

// localIDs are connection ids by which the gateway knows the library's packets.
type localIDs struct{ *udp.Local }

func (l localIDs) GenerateConnectionID() (quic.ConnectionID, error) {
	return quic.ConnectionIDFromBytes(l.NewID()), nil
}
func (l localIDs) ConnectionIDLen() int { return udp.LocalIDLen }

// Names of the gateway's own end at a QUIC library behind the same port, and
// the others pass: the seam for HTTP/3. Both follow a client to a new address,
// and the library also one that moves on purpose.
func TestQUICEndsHere(t *testing.T) {
	w := newWorld(t)
	s := w.serveQUIC(t, nil)
	own := &quicService{}
	name, err := tunnel.ParseName("gateway.example.test")
	must(t, err)
	target, err := tunnel.ParseName(svc)
	must(t, err)
	to := netip.MustParseAddrPort(s.addr)
	g, err := gw.New(t.Context(), gw.Config{
		Listeners: []gw.Listener{{Address: "udp://127.0.0.1:0", Datagrams: &gw.Datagrams{
			Own: func(n tunnel.Name) bool { return n == name },
			End: func(ctx context.Context, c *udp.Local) error {
				tr := &quic.Transport{Conn: c, ConnectionIDGenerator: localIDs{c}}
				done := w.echo(t, tr, &quic.Config{}, own)
				<-ctx.Done()
				err := tr.Close()
				<-done
				return err
			},
		}}},
		Sources: []registry.Source{registry.Static{Name: "test", Snapshot: registry.Snapshot{Services: []registry.Service{{
			Name: svc, Names: []tunnel.Pattern{{Suffix: target}}, Exposed: true, Endpoints: []registry.Endpoint{{Addr: to.Addr(), Port: to.Port()}},
		}}}}},
		Lameduck: -1, Grace: -1,
	})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- g.Run(ctx, nil) }()
	t.Cleanup(func() {
		stop()
		must(t, <-ended)
	})
	r := newRelay(t, &gateway{addr: g.Addrs()[0].String()}, nil)
	c := w.quicClient(t)
	c.tls.InsecureSkipVerify = true // the certificate has the service's name
	here, there := c.mustDial(r.addr(), name.String()), c.mustDial(r.addr(), svc)
	for range 3 {
		for _, conn := range []*quic.Conn{here, there} {
			if id := c.exchange(conn, 200_000); id != clientID {
				t.Errorf("the client is %q, want %q", id, clientID)
			}
		}
		r.rebind(t)
	}
	if a, b := own.count(), s.count(); a != 1 || b != 1 {
		t.Errorf("%d connections end here and %d at the service, want one each", a, b)
	}

	// On purpose: the client validates another path and switches to it.
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	must(t, err)
	defer pc.Close()
	tr := &quic.Transport{Conn: pc}
	defer tr.Close()
	direct := c.mustDial(g.Addrs()[0].String(), name.String())
	c.exchange(direct, 1000)
	path, err := direct.AddPath(tr)
	must(t, err)
	must(t, path.Probe(t.Context()))
	must(t, path.Switch())
	c.exchange(direct, 200_000)
	if from := own.last().RemoteAddr().String(); from != pc.LocalAddr().String() {
		t.Errorf("the library sees %s, want the new path, %s", from, pc.LocalAddr())
	}
}
