//go:build unix

package interop

import (
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
)

const maxRecord = 16 << 10

// A segmented hello is sent in pieces, with a pause between them in which the
// gateway has seen the first one.
type segmented struct {
	name  string
	raw   []byte
	sizes []int // of the pieces; the last one counts for the rest too
}

// legitimate are the sixteen legal hellos that routers get wrong.
func legitimate() []segmented {
	pq := clientHello(postQuantum(), named(svc))
	inName := bytes.Index(pq, []byte(svc)) + 4
	return []segmented{
		{"one record with a post-quantum key share", inOne(pq), nil},
		{"split by TCP after 1 byte", inOne(pq), []int{1, 1 << 20}},
		{"split by TCP after 5 bytes", inOne(pq), []int{5, 1 << 20}},
		{"split by TCP after 1448 bytes", inOne(pq), []int{1448, 1 << 20}},
		{"in chunks of 100 bytes", inOne(pq), []int{100}},
		{"in two records, split inside the name", inRecords(pq, inName, maxRecord), nil},
		{"with a first record of 1 byte", inRecords(pq, 1, maxRecord), nil},
		{"in records of 64 bytes", inRecords(pq, 64), nil},
		{"in two records, the second one late", inRecords(pq, 300, maxRecord), []int{305, 1 << 20}},
		{"with a name in mixed case", hello("Svc.eXample.TEST"), nil},
		{"with a trailing dot", hello(svc + "."), nil},
		{"with 8 KiB before the name", inOne(clientHello(padding(8<<10), named(svc))), nil},
		{"of 15.9 KiB", inOne(clientHello(padding(15<<10+900), named(svc))), nil},
		{"of 17 KiB in two records", inRecords(clientHello(padding(17<<10), named(svc)), maxRecord), nil},
		{"of 60 KiB in four records", inRecords(clientHello(padding(60<<10), named(svc)), maxRecord), nil},
		{"of 60 KiB, the name first", inRecords(clientHello(named(svc), padding(60<<10)), maxRecord), nil},
	}
}

// Each reaches the service by its name, which gets the bytes that were sent
// and no others.
func TestLegitimateHellosReachTheirService(t *testing.T) {
	tap, decoy := testnet.NewTap(t), testnet.NewTap(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()), "--route", "*.example.test="+decoy.Addr())
	all := legitimate()
	if len(all) != 16 {
		t.Fatalf("%d hellos, want 16", len(all))
	}
	for i, h := range all {
		t.Run(h.name, func(t *testing.T) {
			c := dial(t, g.addr)
			defer c.Close()
			must(t, c.SetNoDelay(true))
			for raw, sizes := h.raw, h.sizes; len(raw) > 0; {
				n := len(raw)
				if len(sizes) > 0 {
					n = min(n, sizes[0])
					if len(sizes) > 1 {
						sizes = sizes[1:]
					}
				}
				_, err := c.Write(raw[:n])
				must(t, err)
				if raw = raw[n:]; len(raw) > 0 {
					pause(t)
				}
			}
			must(t, c.CloseWrite())
			testnet.Eventually(t, patience, func() bool {
				flows := tap.Flows()
				return len(flows) > i && flows[i].End == testnet.FIN
			}, "the hello at the service, and the end of the stream")
			same(t, "the hello", h.raw, tap.Flows()[i].Data)
			if _, err := io.Copy(io.Discard, c); err != nil {
				t.Errorf("the end at the client: %v", err)
			}
			if l := g.outcome(t, c.LocalAddr().String()); l.Target != svc || l.Reason != "done" || l.In != int64(len(h.raw)) {
				t.Errorf("the log: got %+v", l)
			}
		})
	}
	if tap.Accepted() != 16 || decoy.Accepted() != 0 {
		t.Errorf("the service took %d connections and the one beside it %d, want 16 and 0", tap.Accepted(), decoy.Accepted())
	}
}

// pause gives a segment the time to arrive alone. If it does not, a case is
// weaker and nothing fails.
func pause(t *testing.T) {
	t.Helper()
	timer := time.NewTimer(5 * time.Millisecond)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

// What a client hears of a hello that is refused: an alert and an end of
// stream, or a reset.
func alert(n byte) []byte { return []byte{21, 3, 3, 0, 2, 2, n} }

const (
	unexpectedMessage = 10
	recordOverflow    = 22
	illegalParameter  = 47
	decodeError       = 50
	internalError     = 80
	unrecognizedName  = 112
)

// A malformed row is what is sent, and what comes of it.
type malformed struct {
	name   string
	raw    []byte
	want   []byte // nil for a reset
	reason string
}

func malformedHellos() []malformed {
	in := func(exts ...[]byte) []byte { return inOne(clientHello(exts...)) }
	good := clientHello(named(svc))
	cut := bytes.Index(good, []byte(svc))
	patched := func(at int, b byte) []byte {
		msg := bytes.Clone(good)
		msg[at] = b
		return inOne(msg)
	}
	long := strings.Repeat(strings.Repeat("a", 63)+".", 3)
	return []malformed{
		// As other routers take them to their default.
		{"two names in the list", in(named(svc, "a.example.test")), alert(illegalParameter), "bad-hello"},
		{"the extension twice", in(named(svc), named("a.example.test")), alert(illegalParameter), "bad-hello"},
		{"a NUL in the name", in(named(svc + "\x00.evil")), alert(illegalParameter), "bad-hello"},
		{"a record of 18 KiB", cat([]byte{22, 3, 1}, vector(2, clientHello(padding(18<<10), named(svc)))), alert(recordOverflow), "bad-hello"},
		{"a record of 16,385 bytes", cat([]byte{22, 3, 1}, vector(2, clientHello(named(svc), padding(maxRecord+1-len(good))))), alert(recordOverflow), "bad-hello"},
		{"an empty record first", cat(tlsRecord(22, nil), inOne(good)), alert(unexpectedMessage), "bad-hello"},
		{"an alert first", cat(tlsRecord(21, []byte{1, 0}), inOne(good)), alert(unexpectedMessage), "bad-hello"},
		{"application data first", cat(tlsRecord(23, []byte("data")), inOne(good)), alert(unexpectedMessage), "bad-hello"},
		{"no name", in(postQuantum()), alert(unrecognizedName), "no-sni"},
		{"no extensions", in(), alert(unrecognizedName), "no-sni"},
		{"an empty list", in(extension(0, vector(2))), alert(decodeError), "bad-hello"},
		{"an empty name", in(named("")), alert(decodeError), "bad-hello"},
		{"an IPv4 address", in(named("127.0.0.1")), alert(unrecognizedName), "no-sni"},
		{"an IPv6 address", in(named("::1")), alert(unrecognizedName), "no-sni"},
		{"an IPv4 address in one number", in(named("2130706433")), alert(unrecognizedName), "no-sni"},
		{"SSLv2", []byte{0x80, 0x2e, 1, 0, 2, 0, 0x15, 0, 0, 0, 0x10, 7, 0, 0xc0}, nil, "bad-hello"},
		{"SSH", []byte("SSH-2.0-OpenSSH_9.2\r\n"), nil, "bad-preamble"},
		{"PROXY", []byte("PROXY TCP4 127.0.0.1 127.0.0.1 1 2\r\n"), nil, "bad-preamble"},
		{"PROXY version 2", []byte("\r\n\r\n\x00\r\nQUIT\n\x21\x11\x00\x0c"), nil, "bad-preamble"},
		{"noise", bytes.Repeat([]byte{0xff, 0x00, 0x5a}, 30), nil, "bad-preamble"},

		// Names.
		{"two dots", in(named("svc..example.test")), alert(illegalParameter), "bad-hello"},
		{"a dot first", in(named("." + svc)), alert(illegalParameter), "bad-hello"},
		{"two dots at the end", in(named(svc + "..")), alert(illegalParameter), "bad-hello"},
		{"a label of 64 bytes", in(named(strings.Repeat("a", 64) + ".example.test")), alert(illegalParameter), "bad-hello"},
		{"a name of 254 bytes", in(named(long + strings.Repeat("b", 62))), alert(illegalParameter), "bad-hello"},
		{"raw UTF-8", in(named("bücher.example.test")), alert(illegalParameter), "bad-hello"},
		{"a line break", in(named("svc.example.test\r\nx: y")), alert(illegalParameter), "bad-hello"},
		{"an asterisk", in(named("*.example.test")), alert(illegalParameter), "bad-hello"},

		// Lengths and limits.
		{"a name longer than its list", patched(cut-1, byte(len(svc)+1)), alert(decodeError), "bad-hello"},
		{"bytes left over in the list", patched(cut-1, byte(len(svc)-2)), alert(decodeError), "bad-hello"},
		{"a list longer than its extension", patched(cut-4, 200), alert(decodeError), "bad-hello"},
		{"extensions longer than the hello", patched(cut-10, 200), alert(decodeError), "bad-hello"},
		{"a hello of 68 KiB and a byte", inRecords(clientHello(named(svc), padding(68<<10+1-(len(good)-4))), maxRecord), alert(illegalParameter), "bad-hello"},
		{"a hello that says 16 MiB", cat([]byte{22, 3, 1, 0x40, 0, 1, 0xff, 0xff, 0xff}, make([]byte, 1000)), alert(illegalParameter), "bad-hello"},
		{"4,097 records", inRecords(clientHello(named(svc), padding(4097-len(good))), 1), alert(illegalParameter), "bad-hello"},
		{"another record inside", cat(inRecords(good[:50], maxRecord), tlsRecord(20, []byte{1}), inRecords(good[50:], maxRecord)), alert(unexpectedMessage), "bad-hello"},
		{"a server_hello", inOne(handshake(2, good[4:])), alert(unexpectedMessage), "bad-hello"},
		{"TLS 0.2", patched(4, 2), alert(70), "bad-hello"},

		// Names that are well-formed and lead nowhere.
		{"an unknown name", hello("svc.example.org"), alert(unrecognizedName), "no-route"},
		{"a service that is down", hello("down.example.test"), alert(internalError), "dial-failed"},
	}
}

// Each gets its exact answer, and nothing is dialed: every route there is
// leads to a tap, also those that a wrong reading would find.
func TestMalformedHellosReachNobody(t *testing.T) {
	t.Parallel()
	tap := testnet.NewTap(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()), "--route", "*.example.test="+tap.Addr(),
		"--route", "evil.test="+tap.Addr(), "--route", "down.example.test=127.0.0.1:"+freePort(t))
	for _, row := range malformedHellos() {
		t.Run(row.name, func(t *testing.T) {
			a := exchange(t, g.addr, row.raw)
			l := g.outcome(t, a.source)
			switch {
			case row.want == nil && (len(a.data) > 0 || a.ending != testnet.RST):
				t.Errorf("got %q and %s, want a reset and nothing else", a.data, a.ending)
			case row.want != nil && (!bytes.Equal(a.data, row.want) || a.ending != testnet.FIN):
				t.Errorf("got % x and %s, want % x and FIN", a.data, a.ending, row.want)
			}
			if l.Reason != row.reason {
				t.Errorf("reason: got %q (%s), want %q", l.Reason, l.Err, row.reason)
			}
			if l.Reason == "bad-hello" && row.want != nil && !strings.Contains(l.Err, "offset") {
				t.Errorf("the log does not say where: %q", l.Err)
			}
		})
	}
	if n := tap.Accepted(); n != 0 {
		t.Errorf("%d connections reached a service, want 0", n)
	}
	if n := g.dials(t); n != 1 { // that of the service that is down
		t.Errorf("the gateway dialed %d times, want once", n)
	}
}

// exchange sends raw and reads to the end.
func exchange(t *testing.T, addr string, raw []byte) answer {
	t.Helper()
	c := dial(t, addr)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	_, werr := c.Write(raw)
	data, err := io.ReadAll(c)
	if err == nil {
		err = io.EOF
	}
	a := answer{data: data, ending: testnet.EndingOf(err), source: c.LocalAddr().String()}
	if a.ending == testnet.Open {
		t.Fatalf("no end within %v, after %q (write: %v)", patience, data, werr)
	}
	return a
}

// A client that leaves in its hello, by a reset after any byte, leaves no trace
// at a service.
func TestAHelloCutAnywhereReachesNobody(t *testing.T) {
	tap := testnet.NewTap(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()))
	cuts := 0
	for _, raw := range [][]byte{inOne(clientHello(named(svc))), inRecords(clientHello(named(svc)), 11)} {
		for n := 1; n < len(raw); n++ { // a client that sends nothing never leaves the kernel
			cuts++
			c := dial(t, g.addr)
			_, err := c.Write(raw[:n])
			must(t, err)
			must(t, testnet.Abort(c))
		}
	}
	g.await(t, "logged every client that left", func() bool { return strings.Count(g.output(), `"msg":"left"`) == cuts })
	// One that is whole, to see that it is counted.
	exchangeWhole(t, g, tap)
	if tap.Accepted() != 1 || g.dials(t) != 1 {
		t.Errorf("%d connections reached the service and %d were dialed, want 1", tap.Accepted(), g.dials(t))
	}
}

// exchangeWhole sends a hello that is served, and waits for its tunnel's end.
func exchangeWhole(t *testing.T, g *gateway, tap *testnet.Tap) {
	t.Helper()
	c := dial(t, g.addr)
	defer c.Close()
	_, err := c.Write(hello(svc))
	must(t, err)
	testnet.Eventually(t, patience, func() bool {
		f := tap.Flows()
		return len(f) > 0 && len(f[len(f)-1].Data) > 0
	}, "the whole hello at the service")
	must(t, c.CloseWrite())
	g.outcome(t, c.LocalAddr().String()) // the metrics know of it by now
}

// Half a hello and silence end at the deadline, five seconds after the first
// byte and ten seconds after the accept without one. Bytes do not extend it.
func TestUnfinishedHellosEndAtTheDeadline(t *testing.T) {
	tap := testnet.NewTap(t)
	g := startGateway(t, "--listen", "127.0.0.1:0", "--route", route(tap.Addr()))
	raw := hello(svc)
	for _, c := range []struct {
		name     string
		send     int // bytes at once
		drip     bool
		from, to time.Duration
		reason   string
	}{
		{"half a hello", len(raw) / 2, false, 5 * time.Second, 12 * time.Second, "hello-timeout"},
		{"a byte at a time", 1, true, 5 * time.Second, 12 * time.Second, "hello-timeout"},
		{"half a CONNECT", 0, false, 5 * time.Second, 12 * time.Second, "hello-timeout"},
		{"nothing", 0, false, 10 * time.Second, 17 * time.Second, "hello-timeout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			conn := dial(t, g.addr)
			defer conn.Close()
			begin := time.Now()
			first := raw[:c.send]
			if c.name == "half a CONNECT" {
				first = []byte("CONNECT svc.example.test:443 HTTP/1.1\r\nHost:")
			}
			_, err := conn.Write(first)
			must(t, err)
			if c.drip {
				stop := make(chan struct{})
				defer close(stop)
				go drip(conn, raw[1:], stop)
			}
			must(t, conn.SetReadDeadline(begin.Add(patience)))
			data, err := io.ReadAll(conn)
			took := time.Since(begin)
			if c.name == "half a CONNECT" {
				if !strings.HasPrefix(string(data), "HTTP/1.1 408 ") {
					t.Errorf("got %q, want a 408", data)
				}
			} else if len(data) > 0 {
				t.Errorf("got % x, want nothing", data)
			}
			if took < c.from-50*time.Millisecond || took > c.to {
				t.Errorf("it ended after %v (%v), want %v", took, err, c.from)
			}
			if l := g.outcome(t, conn.LocalAddr().String()); l.Reason != c.reason {
				t.Errorf("reason: got %q, want %q", l.Reason, c.reason)
			}
		})
	}
	t.Cleanup(func() {
		if n := tap.Accepted(); n != 0 {
			t.Errorf("%d connections reached the service, want 0", n)
		}
	})
}

// drip sends a byte every 100 ms.
func drip(c net.Conn, b []byte, stop <-chan struct{}) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for i := range b {
		select {
		case <-stop:
			return
		case <-tick.C:
			if _, err := c.Write(b[i : i+1]); err != nil {
				return
			}
		}
	}
}
