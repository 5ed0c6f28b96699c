package socks5

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"testing"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// FuzzServe sends anything to a Protocol, cut anywhere. What is made of it must
// not depend on the cut, only a request that can be written again is made, and
// every refusal is said and ends the connection.
func FuzzServe(f *testing.F) {
	for _, row := range badRows {
		f.Add(row.in, 3, false)
	}
	for _, row := range passwordRows {
		f.Add(row.in, 5, true)
	}
	f.Add(join(greetNone, askV4, []byte("early")), 4, false)
	f.Add(join(greetNone, askV6), 4, false)
	f.Add(join(greetPassword, password("alice", "secret"), askName), 9, true)
	f.Fuzz(func(t *testing.T, in []byte, cut int, verify bool) {
		if cut < 0 || cut > len(in) {
			cut = 0
		}
		var whole result
		testnet.Bounded(t, 10*len(in)+64<<10, func() { whole = run(t, in, len(in), verify) }) // with what the test takes
		split := run(t, in, cut, verify)
		if whole != split {
			t.Errorf("whole: %+v; cut after %d bytes: %+v", whole, cut, split)
		}
	})
}

// FuzzRequest reads a request and writes it again.
func FuzzRequest(f *testing.F) {
	f.Add(askName)
	f.Add(askV4)
	f.Add(askV6)
	f.Fuzz(func(t *testing.T, in []byte) {
		var to destination
		var n int
		var err error
		testnet.Bounded(t, 2*len(in)+4<<10, func() { to, n, err = parseRequest(in) })
		if err != nil {
			return
		}
		if n > len(in) || to.port == 0 || to.name.IsZero() == !to.addr.IsValid() {
			t.Fatalf("got %+v of %d bytes from %d", to, n, len(in))
		}
		again, m, err := parseRequest(appendRequest(nil, to))
		if err != nil || again != to || m != len(appendRequest(nil, to)) {
			t.Fatalf("got %+v, %v, want %+v again", again, err, to)
		}
		for i := range n {
			if _, _, err := parseRequest(in[:i]); err != errMore {
				t.Fatalf("%d of %d bytes: got %v, want more", i, n, err)
			}
		}
	})
}

// FuzzAnswer has a proxy answer a Dialer with anything, cut anywhere. What it is
// taken for must not depend on the cut, what stands behind a yes belongs to the
// tunnel, and who is refused leaves nothing open.
func FuzzAnswer(f *testing.F) {
	yes := []byte{5, 0, 5, 0, 0, 1, 127, 0, 0, 1, 1, 187}
	f.Add(append(yes, "early"...), 3, false)
	f.Add([]byte{5, 2, 1, 0, 5, 0, 0, 3, 3, 'a', '.', 'b', 0, 80}, 6, true)
	f.Add([]byte{5, 0, 5, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 80, 'x'}, 10, false)
	f.Add([]byte{5, 0, 5, 2, 0, 1, 0, 0, 0, 0, 0, 0}, 4, false)
	f.Add([]byte{5, 2, 1, 1}, 2, true)
	f.Add([]byte{5, 0xff}, 1, false)
	f.Add([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"), 4, false)
	type answer struct {
		yes    bool
		rest   string
		reason tunnel.Reason
	}
	f.Fuzz(func(t *testing.T, in []byte, cut int, password bool) {
		if cut < 0 || cut > len(in) {
			cut = 0
		}
		dial := func(cut int) (a answer) {
			conn := &script{in: [][]byte{bytes.Clone(in[:cut]), bytes.Clone(in[cut:])}}
			d := &Dialer{Proxy: "proxy:1080", Dialer: testnet.DialOnce(conn)}
			if password {
				d.User, d.Password = "alice", "secret"
			}
			c, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			if err != nil {
				if !conn.closed {
					t.Error("a refused connection is left open")
				}
				return answer{reason: tunnel.ReasonOf(err)}
			}
			rest, _ := io.ReadAll(c)
			if !bytes.HasSuffix(in, rest) || conn.closed {
				t.Errorf("got %q behind the answer %q, closed %v", rest, in, conn.closed)
			}
			if used := in[:len(in)-len(rest)]; len(used) < 9 || used[0] != 5 || !password && (used[1] != 0 || used[3] != 0) {
				t.Errorf("%q is a yes", used)
			}
			return answer{yes: true, rest: string(rest)}
		}
		var whole answer
		testnet.Bounded(t, 10*len(in)+16<<10, func() { whole = dial(len(in)) })
		if split := dial(cut); split != whole {
			t.Errorf("whole: %+v; cut after %d bytes: %+v", whole, cut, split)
		}
	})
}

// A result is all that there is to see of a connection.
type result struct {
	out    string // said to the client
	to     destination
	calls  int
	early  string
	reason tunnel.Reason // of a refusal
}

func run(t *testing.T, in []byte, cut int, verify bool) (r result) {
	conn := &script{in: [][]byte{bytes.Clone(in[:cut]), bytes.Clone(in[cut:])}}
	p := &Protocol{}
	if verify {
		p.Verify = func(context.Context, netip.Addr, string, string) error { return nil } // a wrong one waits
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // so that nothing waits
	err := p.ServeConn(ctx, tunnel.NewConn(conn), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
		r.calls++
		r.to = destination{req.Name, req.Addr, req.Port}
		if verify != (req.Peer.ID != "") {
			t.Errorf("a request by %+v, a password is wanted: %v", req.Peer, verify)
		}
		s, err := req.Accept()
		if err != nil {
			t.Errorf("Accept: %v", err)
			return
		}
		early, _ := io.ReadAll(s)
		r.early = string(early)
		_ = s.Close()
	}))
	r.out = string(conn.out)
	if err != nil {
		r.reason = tunnel.ReasonOf(err)
	}
	if (err == nil) != (r.calls == 1) || !conn.closed {
		t.Errorf("%d requests, %v, closed %v", r.calls, err, conn.closed)
	}
	return r
}
