package tunnel_test

import (
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// What a Relay says by service is of the tunnels that are open, by both of its ways to
// carry.
func TestFiguresByService(t *testing.T) {
	r := &tunnel.Relay{}
	if open, bytes := r.OpenByService(), r.BytesByService(); len(open) > 0 || len(bytes) > 0 {
		t.Fatalf("without a tunnel: %v and %v", open, bytes)
	}
	var ended sync.WaitGroup
	carry := func(about *tunnel.Outcome, pair func() (net.Conn, net.Conn)) (client net.Conn) {
		client, near := pair()
		server, far := pair()
		ended.Add(1)
		r.Carry(tunnel.Tunnel{Client: near, Server: server, About: about, Ended: func(tunnel.End) { ended.Done() }})
		go func() {
			defer far.Close()
			p := make([]byte, 64)
			for {
				n, err := far.Read(p)
				if _, werr := far.Write(append(p[:n:n], p[:n]...)); err != nil || werr != nil {
					return
				}
			}
		}()
		return client
	}
	tcp := func() (net.Conn, net.Conn) { return tcpPair(t) }
	one := carry(&tunnel.Outcome{ID: 1, Service: "orders"}, tcp)
	two := carry(&tunnel.Outcome{ID: 2, Service: "orders"}, net.Pipe)
	three := carry(nil, tcp)
	for _, c := range []net.Conn{one, two, three} {
		defer c.Close()
		if _, err := c.Write([]byte("12345")); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 10)
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "1234512345" {
			t.Fatalf("read %q, %v", got, err)
		}
	}
	if open, want := r.OpenByService(), map[string]int{"orders": 2, "": 1}; !maps.Equal(open, want) {
		t.Errorf("open are %v, want %v", open, want)
	}
	want := map[string]tunnel.ServiceBytes{"orders": {In: 10, Out: 20}, "": {In: 5, Out: 10}}
	testnet.Eventually(t, patience, func() bool { return maps.Equal(r.BytesByService(), want) }, "the bytes of open tunnels are counted")
	_ = one.Close()
	testnet.Eventually(t, patience, func() bool { return r.OpenByService()["orders"] == 1 }, "one tunnel is over")
	if got := r.BytesByService()["orders"]; got != (tunnel.ServiceBytes{In: 5, Out: 10}) {
		t.Errorf("the open tunnel of orders carried %+v, want 5 and 10 bytes", got)
	}
	if err := r.Close(); err != nil { // aborts the others
		t.Error(err)
	}
	ended.Wait()
	testnet.Eventually(t, patience, func() bool { return len(r.OpenByService())+len(r.BytesByService()) == 0 }, "all are over")
}

// BenchmarkBytesByService sums what 4,000 tunnels of a thousand services have carried, as a
// scrape of metrics does.
func BenchmarkBytesByService(b *testing.B) {
	const n = 4000
	r := &tunnel.Relay{}
	var ended sync.WaitGroup
	var ends []net.Conn
	for i := range n {
		client, near := tcpPair(b)
		server, far := tcpPair(b)
		ended.Add(1)
		r.Carry(tunnel.Tunnel{Client: near, Server: server, About: &tunnel.Outcome{Service: fmt.Sprint("service-", i%1000)}, Ended: func(tunnel.End) { ended.Done() }})
		ends = append(ends, client, far)
	}
	b.ReportAllocs()
	for b.Loop() {
		if got := len(r.BytesByService()); got != 1000 {
			b.Fatalf("%d services, want 1000", got)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/tunnel")
	if err := r.Close(); err != nil {
		b.Error(err)
	}
	ended.Wait()
	for _, c := range ends {
		_ = c.Close()
	}
}
