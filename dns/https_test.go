package dns

import (
	"bytes"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/tunnel"
)

// dialH2 returns a connection that has said what HTTP/2 begins with.
func dialH2(t *testing.T, r *rig) (*tls.Conn, *http2.Framer, *bytes.Buffer) {
	t.Helper()
	conf := r.tls.Clone()
	conf.NextProtos = []string{"h2"}
	c, err := tls.Dial("tcp", r.addr[HTTPS], conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	b := &bytes.Buffer{}
	b.WriteString(http2.ClientPreface)
	fr := http2.NewFramer(b, nil)
	_ = fr.WriteSettings()
	return c, fr, b
}

// headers are those of a question by GET.
func headers(t *testing.T, r *rig) []byte {
	t.Helper()
	question := "AAABAAABAAAAAAAAA3dlYgRzaG9wA3N2YwRtZXNoCGludGVybmFsAAABAAE"
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	for _, f := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", r.addr[HTTPS]}, {":path", dohPath + "?dns=" + question}} {
		if err := enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// A connection of HTTP/2 on which nothing is asked ends soon, and who asks by
// another hears nothing of it.
func TestHTTPSFloods(t *testing.T) {
	r := start(t, &Server{})
	stream := uint32(1)
	for name, flood := range map[string]func(fr *http2.Framer){
		"PING":          func(fr *http2.Framer) { _ = fr.WritePing(false, [8]byte{}) },
		"SETTINGS":      func(fr *http2.Framer) { _ = fr.WriteSettings() },
		"WINDOW_UPDATE": func(fr *http2.Framer) { _ = fr.WriteWindowUpdate(0, 1) },
		"PRIORITY":      func(fr *http2.Framer) { _ = fr.WritePriority(3, http2.PriorityParam{StreamDep: 5}) },
		"unknown":       func(fr *http2.Framer) { _ = fr.WriteRawFrame(0xbb, 0, 0, nil) },
		"CONTINUATION": func(fr *http2.Framer) {
			if stream == 1 {
				_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers(t, r)})
				stream++
			}
			_ = fr.WriteContinuation(1, false, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, fr, b := dialH2(t, r)
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				_, _ = io.Copy(io.Discard, c) // it would wait for us otherwise
			}()
			for range 200 {
				for range 100 {
					flood(fr)
				}
				if _, err := c.Write(b.Bytes()); err != nil {
					break
				}
				b.Reset()
			}
			<-gone // by the deadline at the latest, and then it was no flood
			r.expect(t, HTTPS, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
		})
	}
	floods := 0
	for len(r.results) > 0 {
		if res := <-r.results; res.Reason == tunnel.Flood && res.Transport == HTTPS {
			floods++
		}
	}
	if floods < 4 {
		t.Errorf("%d floods were observed, want at least 4", floods)
	}
}

// Questions that are taken back as soon as they are asked cost what questions
// cost: others are answered meanwhile.
func TestHTTPSRapidReset(t *testing.T) {
	r := start(t, &Server{})
	c, fr, b := dialH2(t, r)
	go func() { _, _ = io.Copy(io.Discard, c) }()
	block := headers(t, r)
	done := make(chan int)
	go func() {
		n := 0
		defer func() { done <- n }()
		for stream := uint32(1); n < 20_000; stream += 2 {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: block, EndStream: true, EndHeaders: true})
			_ = fr.WriteRSTStream(stream, http2.ErrCodeCancel)
			if b.Len() < 4096 {
				continue
			}
			n += b.Len() / (len(block) + 22)
			if _, err := c.Write(b.Bytes()); err != nil {
				return
			}
			b.Reset()
		}
	}()
	begun := time.Now()
	for i := 0; ; i++ {
		r.expect(t, HTTPS, q("four.shop.svc.mesh.internal", dns.TypeA), "NOERROR aa an: four.shop.svc.mesh.internal. 5 IN A 10.0.0.4")
		select {
		case n := <-done:
			if took := time.Since(begun) / time.Duration(i+1); took > 10*time.Second {
				t.Errorf("others waited for %v each", took)
			}
			t.Logf("%d resets, %d questions of others beside them", n, i+1)
			return
		default:
		}
	}
}

// Who asks for long is not taken for a flood, whatever the sizes.
func TestHTTPSManyQuestionsOfOneConnection(t *testing.T) {
	r := start(t, &Server{})
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: r.tls.Clone(), ForceAttemptHTTP2: true, MaxConnsPerHost: 1}}
	defer client.CloseIdleConnections()
	m := q("four.shop.svc.mesh.internal", dns.TypeA)
	m.SetEdns0(1232, false)
	m.IsEdns0().Option = append(m.IsEdns0().Option, &dns.EDNS0_PADDING{Padding: make([]byte, 3900)})
	body, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	conns := map[string]bool{}
	for range 300 {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+r.addr[HTTPS]+dohPath, bytes.NewReader(body))
		req.Header.Set("Content-Type", dohType)
		req.Header.Set("X-Long", strings.Repeat("x", 2000))
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, res.Body)
		_ = res.Body.Close()
		if res.StatusCode != http.StatusOK {
			t.Fatal(res.Status)
		}
	}
	for len(r.results) > 0 {
		res := <-r.results
		conns[res.From.String()] = true
		if res.Reason != "" {
			t.Errorf("%s", res.Reason)
		}
	}
	if len(conns) != 1 {
		t.Errorf("%d connections, want one", len(conns))
	}
}
