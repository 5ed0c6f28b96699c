package dns

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"culvert.dev/internal/testnet"
)

func dialStream(t *testing.T, r *rig, tr Transport) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", r.addr[tr])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if tr == TLS {
		return tls.Client(c, r.tls.Clone())
	}
	return c
}

func framed(b []byte) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func readFramed(t *testing.T, c io.Reader) *dns.Msg {
	t.Helper()
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	m := new(dns.Msg)
	if err := m.Unpack(b); err != nil {
		t.Fatal(err)
	}
	return m
}

// ends reports how long the server leaves a connection open that says nothing
// more.
func ends(t *testing.T, c net.Conn) time.Duration {
	t.Helper()
	begun := time.Now()
	n, err := io.Copy(io.Discard, c)
	var ne net.Error
	if n != 0 || errors.As(err, &ne) && ne.Timeout() {
		t.Errorf("%d bytes, %v, want the connection's end", n, err)
	}
	return time.Since(begun)
}

// Many questions in one piece, and one question in many.
func TestPipelining(t *testing.T) {
	r := start(t, &Server{})
	for _, tr := range []Transport{TCP, TLS} {
		c := dialStream(t, r, tr)
		var all []byte
		const n = 1000
		for i := range n {
			m := q("four.shop.svc.mesh.internal", dns.TypeA)
			m.Id = uint16(i)
			all = append(all, framed(message(t, m, nil))...)
		}
		done := make(chan error, 1)
		go func() { _, err := c.Write(all); done <- err }()
		seen := map[uint16]bool{}
		for range n {
			seen[readFramed(t, c).Id] = true
		}
		if err := <-done; err != nil || len(seen) != n {
			t.Errorf("%s: %d answers, %v", tr, len(seen), err)
		}
		one := framed(message(t, q("four.shop.svc.mesh.internal", dns.TypeA), nil))
		for i := range one {
			if _, err := c.Write(one[i : i+1]); err != nil {
				t.Fatal(err)
			}
		}
		if m := readFramed(t, c); len(m.Answer) != 1 {
			t.Errorf("%s, byte by byte: %v", tr, m)
		}
	}
}

// A slow answer does not hold up those behind it, RFC 7766 section 6.2.1.1;
// a hundred may wait, and then no more is read.
func TestPipelinedForwards(t *testing.T) {
	up := serve(t, "slow.test. 60 IN A 192.0.2.1")
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { return true })
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback})
	c := dialStream(t, r, TCP)
	slow := q("slow.test", dns.TypeA)
	fast := q("four.shop.svc.mesh.internal", dns.TypeA)
	if _, err := c.Write(append(framed(message(t, slow, nil)), framed(message(t, fast, nil))...)); err != nil {
		t.Fatal(err)
	}
	if m := readFramed(t, c); m.Id != fast.Id {
		t.Error("the fast answer came after the slow one")
	}
	if m := readFramed(t, c); m.Id != slow.Id || m.Rcode != dns.RcodeServerFailure {
		t.Errorf("%v", m)
	}
}

// Slow clients: 3 s for a question, 10 s of silence, whatever bytes come.
func TestSlowClients(t *testing.T) {
	r := start(t, &Server{})
	one := framed(message(t, q("four.shop.svc.mesh.internal", dns.TypeA), nil))
	t.Run("limits", func(t *testing.T) {
		for name, c := range map[string]struct {
			tr      Transport
			send    []byte
			trickle bool
			limit   time.Duration
		}{
			"silent":               {TCP, nil, false, tcpIdle},
			"one byte":             {TCP, one[:1], false, tcpRead},
			"half a question":      {TCP, one[:10], false, tcpRead},
			"a byte at a time":     {TCP, nil, true, tcpRead},
			"TLS: no hello":        {HTTPS, nil, false, tcpRead},
			"TLS: part of a hello": {TLS, nil, false, tcpRead},
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				conn, err := net.Dial("tcp", r.addr[c.tr])
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				_ = conn.SetReadDeadline(time.Now().Add(25 * time.Second))
				if strings.HasPrefix(name, "TLS: part") {
					c.send = []byte{22, 3, 1, 2, 0, 1, 0, 1}
				}
				_, _ = conn.Write(c.send)
				begun := time.Now()
				if c.trickle {
					go func() {
						tick := time.NewTicker(200 * time.Millisecond)
						defer tick.Stop()
						for i := range one {
							<-tick.C
							if _, err := conn.Write(one[i : i+1]); err != nil {
								return
							}
						}
					}()
				}
				n, err := io.Copy(io.Discard, conn)
				took := time.Since(begun)
				var ne net.Error
				if n != 0 || errors.As(err, &ne) && ne.Timeout() || took < c.limit-500*time.Millisecond || took > c.limit+12*time.Second {
					t.Errorf("%d bytes, %v after %v, want the end after %v", n, err, took, c.limit)
				}
			})
		}
	})
}

// What is no question ends the connection: what comes behind can't be trusted.
func TestNoQuestionEndsTheConnection(t *testing.T) {
	r := start(t, &Server{})
	good := framed(message(t, q(known, dns.TypeA), nil))
	answer := message(t, q(known, dns.TypeA), func(b []byte) []byte { b[2] |= 0x80; return b })
	for name, b := range map[string][]byte{
		"an answer":        append(framed(answer), good...),
		"length 0":         append([]byte{0, 0}, good...),
		"a short header":   append(framed(make([]byte, 11)), good...),
		"length 4097":      append(framed(make([]byte, maxQuery+1)), good...),
		"length 65535":     append(framed(make([]byte, 65535)), good...),
		"HTTP":             []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("x", 40000)),
		"length 65535 cut": {0xff, 0xff, 1},
	} {
		for _, tr := range []Transport{TCP, TLS} {
			c := dialStream(t, r, tr)
			go func() { _, _ = c.Write(b) }()
			if took := ends(t, c); took > tcpRead+20*time.Second {
				t.Errorf("%s by %s: open for %v", name, tr, took)
			}
		}
	}
	// FORMERR does not: it is a question, if not a good one.
	c := dialStream(t, r, TCP)
	bad := message(t, q(known, dns.TypeA), func(b []byte) []byte { b[5] = 2; return b })
	_, _ = c.Write(append(framed(bad), good...))
	if m := readFramed(t, c); m.Rcode != dns.RcodeFormatError {
		t.Errorf("%v", m)
	}
	if m := readFramed(t, c); m.Rcode != dns.RcodeSuccess {
		t.Errorf("%v", m)
	}
}

// Connections are limited, of one client and of all; places come back.
func TestConnectionLimits(t *testing.T) {
	r := start(t, &Server{MaxConns: 20})
	dial := func(from string, tr Transport) net.Conn {
		t.Helper()
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		c, err := d.Dial("tcp", r.addr[tr])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		return c
	}
	one := framed(message(t, q(known, dns.TypeA), nil))
	served := func(c net.Conn) bool {
		_, _ = c.Write(one)
		_, err := io.ReadFull(c, make([]byte, 2))
		return err == nil
	}
	var open []net.Conn
	for i := range 18 {
		c := dial("127.0.0.1", TCP)
		if got, want := served(c), i < connsEach; got != want {
			t.Errorf("connection %d of one client: served %v, want %v", i, got, want)
		} else if got {
			open = append(open, c)
		}
	}
	for i := range 6 {
		if got, want := served(dial("127.0.0.2", TCP)), i < 4; got != want {
			t.Errorf("connection %d of another: served %v, want %v", i, got, want)
		}
	}
	open[0].Close()
	testnet.Eventually(t, time.Minute, func() bool { return served(dial("127.0.0.3", TCP)) }, "the place is free again")
	// HTTPS has its own.
	for i := range 18 {
		c := tls.Client(dial("127.0.0.1", HTTPS), r.tls.Clone())
		if err := c.Handshake(); (err == nil) != (i < connsEach) {
			t.Errorf("HTTPS connection %d: %v", i, err)
		}
	}
	r.expect(t, UDP, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
}

func TestHTTPS(t *testing.T) {
	r := start(t, &Server{})
	question := message(t, q("host.example.com", dns.TypeA), nil)
	b64 := base64.RawURLEncoding.EncodeToString
	big := make([]byte, maxQuery+1)
	for _, h2 := range []bool{false, true} {
		tr := &http.Transport{TLSClientConfig: r.tls.Clone(), ForceAttemptHTTP2: h2}
		if !h2 {
			tr.TLSClientConfig.NextProtos = []string{"http/1.1"}
		}
		client := &http.Client{Transport: tr}
		for name, c := range map[string]struct {
			method, path, body, ctype string
			want                      int
		}{
			"GET":                {"GET", "/dns-query?dns=" + b64(question), "", "", 200},
			"GET, other values":  {"GET", "/dns-query?x=y&dns=" + b64(question), "", "", 200},
			"POST":               {"POST", "/dns-query", string(question), dohType, 200},
			"POST at the limit":  {"POST", "/dns-query", string(append(question[:len(question):len(question)], make([]byte, maxQuery-len(question))...)), dohType, 200},
			"GET without":        {"GET", "/dns-query", "", "", 400},
			"GET not base64":     {"GET", "/dns-query?dns=!!!", "", "", 400},
			"GET padded":         {"GET", "/dns-query?dns=AA==", "", "", 400},
			"GET too long":       {"GET", "/dns-query?dns=" + b64(big), "", "", 414},
			"GET far too long":   {"GET", "/dns-query?x=" + strings.Repeat("x", 2*maxQuery), "", "", 414},
			"GET an answer":      {"GET", "/dns-query?dns=" + b64(append([]byte{0, 0, 0x80}, question[3:]...)), "", "", 400},
			"POST too long":      {"POST", "/dns-query", string(big), dohType, 413},
			"POST another type":  {"POST", "/dns-query", string(question), "text/plain", 415},
			"POST no type":       {"POST", "/dns-query", string(question), "", 415},
			"POST nothing":       {"POST", "/dns-query", "", dohType, 400},
			"PUT":                {"PUT", "/dns-query", string(question), dohType, 405},
			"another path":       {"GET", "/?dns=" + b64(question), "", "", 404},
			"a path above":       {"GET", "/dns-query/../metrics", "", "", 404},
			"POST a bad message": {"POST", "/dns-query", string(append(append([]byte{}, question[:5]...), append([]byte{2}, question[6:]...)...)), dohType, 200},
		} {
			req, err := http.NewRequestWithContext(t.Context(), c.method, "https://"+r.addr[HTTPS]+c.path, strings.NewReader(c.body))
			if err != nil {
				t.Fatal(err)
			}
			if c.ctype != "" {
				req.Header.Set("Content-Type", c.ctype)
			}
			res, err := client.Do(req)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			body, _ := io.ReadAll(res.Body)
			res.Body.Close()
			if res.StatusCode != c.want || (res.ProtoMajor == 2) != h2 {
				t.Errorf("%s: %s by %s, want %d", name, res.Status, res.Proto, c.want)
			}
			if c.want != 200 {
				if c.want == 405 && res.Header.Get("Allow") == "" {
					t.Errorf("%s: no Allow", name)
				}
				continue
			}
			m := new(dns.Msg)
			if err := m.Unpack(body); err != nil || res.Header.Get("Content-Type") != dohType {
				t.Errorf("%s: %v, %s", name, err, res.Header.Get("Content-Type"))
			}
			wantAge := "max-age=90"
			if m.Rcode != 0 {
				wantAge = "max-age=0"
			}
			if got := res.Header.Get("Cache-Control"); got != wantAge || m.Rcode == 0 && len(m.Answer) != 1 {
				t.Errorf("%s: %s, %v, want %s", name, got, m.Answer, wantAge)
			}
		}
		client.CloseIdleConnections()
	}
}
