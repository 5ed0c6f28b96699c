package udp

import (
	"context"
	"net"
	"runtime"
	"testing"

	"culvert.dev/tunnel"
)

// BenchmarkDatagram is a datagram of 1,200 bytes to the service and back, one
// at a time: two datagrams carried.
func BenchmarkDatagram(b *testing.B) {
	for _, c := range []struct {
		name string
		ln   Listener
		say  []byte
	}{
		{"plain", Listener{Service: name(b, "svc.test")}, make([]byte, 1200)},
		{"QUIC", Listener{Open: newOpening}, append(short(serverID, ""), make([]byte, 1195)...)},
	} {
		b.Run(c.name, func(b *testing.B) {
			r, svc, client := newRig(b, c.ln, nil), newPeer(b), newPeer(b)
			r.route("svc.test", svc.addr())
			if c.ln.Open != nil {
				shake(r, client, svc)
			}
			in, out := make([]byte, maxDatagram), make([]byte, maxDatagram)
			b.ReportAllocs()
			b.SetBytes(int64(2 * len(c.say)))
			for b.Loop() {
				if _, err := client.WriteToUDPAddrPort(c.say, r.addr); err != nil {
					b.Fatal(err)
				}
				n, from, err := svc.ReadFromUDPAddrPort(in)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := svc.WriteToUDPAddrPort(in[:n], from); err != nil {
					b.Fatal(err)
				}
				if _, _, err := client.ReadFromUDPAddrPort(out); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A session at rest takes little memory.
func TestSessionsTakeLittleMemory(t *testing.T) {
	r, svc := plainRig(t, func(s *Server) { s.Limits = tunnel.Limits{MaxPendingPerClient: -1, ConnectionRatePerClient: -1} })
	const n = 1000
	used := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	var conns []net.Conn
	before := used()
	for range n {
		var d net.Dialer
		c, err := d.DialContext(context.Background(), "udp", r.addr.String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		conns = append(conns, c)
		if _, err := c.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		svc.say(svc.hear([]byte("x")), []byte("y"))
	}
	// The clients' own sockets are in it, too.
	if each := (used() - before) / n; each > 16<<10 {
		t.Errorf("%d bytes for each of %d sessions and their clients", each, len(conns))
	} else {
		t.Logf("%d bytes for each", each)
	}
}
