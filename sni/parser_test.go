package sni

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"culvert.dev/tunnel"
)

// mustParse parses a legal hello.
func mustParse(t *testing.T, raw []byte) Hello {
	t.Helper()
	h, err := Parse(raw)
	if err != nil {
		t.Fatalf("Parse: %v", err)
	}
	return h
}

func TestParseRealClients(t *testing.T) {
	type want struct {
		name    string // "" means none
		nameErr error
		version uint16
		alpn    string
		ech     bool
	}
	// By the beginning of the fixture's name, the longest that fits.
	wants := map[string]want{
		"botan-":        {"", ErrNoName, 0x0303, "", false},
		"curl-":         {svc, nil, 0x0304, "h2 http/1.1", false},
		"chromium-":     {svc, nil, 0x0304, "h2 http/1.1", true},
		"firefox-":      {svc, nil, 0x0304, "h2 http/1.1", true},
		"gnutls-":       {svc, nil, 0x0304, "", false},
		"go-":           {svc, nil, 0x0304, "", false},
		"java-":         {svc, nil, 0x0304, "", false},
		"mbedtls-":      {svc, nil, 0x0303, "", false},
		"nmap-":         {"", ErrNoName, 0x0303, "", false},
		"node-":         {svc, nil, 0x0304, "", false},
		"openssl-":      {svc, nil, 0x0304, "", false},
		"python-":       {svc, nil, 0x0304, "", false},
		"wget-":         {"localhost", nil, 0x0304, "", false},
		"wolfssl-":      {svc, nil, 0x0304, "", false},
		"-alpn":         {svc, nil, 0x0304, "h2 http/1.1", false},
		"-http11":       {svc, nil, 0x0304, "http/1.1", false},
		"-http2":        {svc, nil, 0x0304, "h2", false},
		"-httpclient":   {"localhost", nil, 0x0304, "h2 http/1.1", false},
		"-tls10":        {svc, nil, 0x0301, "", false},
		"-tls11":        {svc, nil, 0x0302, "", false},
		"-tls12":        {svc, nil, 0x0303, "", false},
		"-ip":           {"", tunnel.ErrNameAddress, 0x0304, "", false},
		"-istio":        {"outbound_.443_._.svc.example.test", nil, 0x0304, "istio-peer-exchange istio", false},
		"-noservername": {"", ErrNoName, 0x0304, "", false},

		"gnutls-3.7.9-tls12":  {svc, nil, 0x0303, "h2", false},
		"openssl-3.0.19-alpn": {svc, nil, 0x0304, "h2 http/1.1 acme-tls/1", false},
	}
	for file, raw := range fixtures(t) {
		t.Run(file, func(t *testing.T) {
			if strings.HasSuffix(file, "-sslv2") {
				var bad *ParseError
				if _, err := Parse(raw); !errors.As(err, &bad) || !strings.Contains(err.Error(), "SSLv2") {
					t.Errorf("Parse = %v, want a refusal that names SSLv2", err)
				}
				return
			}
			w, ok := wants[file]
			if i := strings.LastIndexByte(file, '-'); !ok {
				w, ok = wants[file[i:]]
			}
			if i := strings.IndexByte(file, '-'); !ok {
				w, ok = wants[file[:i+1]]
			}
			if !ok {
				t.Fatal("no expectation for this fixture")
			}
			h := mustParse(t, raw)
			if h.Name.String() != w.name || !errors.Is(h.NameErr, w.nameErr) {
				t.Errorf("name %q (%v), want %q (%v)", h.Name, h.NameErr, w.name, w.nameErr)
			}
			if got := strings.Join(h.ALPN(), " "); got != w.alpn {
				t.Errorf("ALPN %q, want %q", got, w.alpn)
			}
			if h.Version != w.version || h.ECH != w.ech || h.Len != len(raw) {
				t.Errorf("version %#04x, ECH %t, %d bytes, want %#04x, %t, %d", h.Version, h.ECH, h.Len, w.version, w.ech, len(raw))
			}
		})
	}
}

func TestParseLegal(t *testing.T) {
	for _, c := range legals() {
		t.Run(c.name, func(t *testing.T) {
			h := mustParse(t, c.raw)
			if h.Name.String() != c.want || h.NameErr != nil {
				t.Errorf("name %q (%v), want %q", h.Name, h.NameErr, c.want)
			}
		})
	}
}

func TestParseChromium(t *testing.T) {
	raw := one(chromium("SVC.example.test."))
	h := mustParse(t, append(raw, "more"...))
	if h.Name != tunnel.MustParseName(svc) || h.RawName != "SVC.example.test." {
		t.Errorf("name %q, sent %q, want %q, SVC.example.test.", h.Name, h.RawName, svc)
	}
	if !h.ECH || h.Version != 0x0304 || !slices.Equal(h.ALPN(), []string{"h2", "http/1.1"}) {
		t.Errorf("ECH %t, version %#04x, ALPN %q, want true, 0x0304, [h2 http/1.1]", h.ECH, h.Version, h.ALPN())
	}
	if h.Len != len(raw) {
		t.Errorf("Len %d, want %d", h.Len, len(raw))
	}
}

// The inner type belongs to hellos that a front end has opened.
func TestParseInnerECH(t *testing.T) {
	if h := mustParse(t, one(hello(ext(0xfe0d, []byte{1}), sniExt(svc)))); h.ECH {
		t.Error("ECH is true for an inner hello, want false")
	}
}

func TestParseNameless(t *testing.T) {
	for _, c := range nameless() {
		t.Run(c.name, func(t *testing.T) {
			h := mustParse(t, c.raw)
			if !h.Name.IsZero() || !errors.Is(h.NameErr, c.want) {
				t.Errorf("name %q (%v), want none (%v)", h.Name, h.NameErr, c.want)
			}
		})
	}
}

// A refusal comes with the field that shows it, and not a byte later.
func TestParseIllegal(t *testing.T) {
	for _, c := range illegals() {
		t.Run(c.name, func(t *testing.T) {
			_, err := Parse(c.raw)
			var bad *ParseError
			if !errors.As(err, &bad) {
				t.Fatalf("Parse = %v, want a *ParseError", err)
			}
			if bad.Reason != c.reason || bad.Alert != c.alert {
				t.Errorf("reason %s, alert %d, want %s, %d (%v)", bad.Reason, bad.Alert, c.reason, c.alert, err)
			}
			if bad.Offset != c.offset || bad.Limit != c.limit {
				t.Errorf("offset %d, limit %d, want %d, %d (%v)", bad.Offset, bad.Limit, c.offset, c.limit, err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %q, want it to say %q", err, c.says)
			}
			if _, err := Parse(c.raw[:c.at-1]); err != ErrMore {
				t.Errorf("after %d bytes: %v, want ErrMore", c.at-1, err)
			}
			if _, err := Parse(c.raw[:c.at]); !errors.As(err, &bad) {
				t.Errorf("after %d bytes: %v, want a *ParseError", c.at, err)
			}
		})
	}
}

func TestParseErrorText(t *testing.T) {
	_, err := Parse(join([]byte{22, 3, 1, 0x40, 0, 1}, u24(70000)))
	if got, want := fmt.Sprint(err), "sni: hello is 70000 bytes, limit 69632, at offset 6"; got != want {
		t.Errorf("error %q, want %q", got, want)
	}
}

// every calls f with all good hellos there are.
func every(t *testing.T, f func(t *testing.T, raw []byte)) {
	for name, raw := range seeds(t) {
		if _, err := Parse(raw); err == nil {
			t.Run(name, func(t *testing.T) { f(t, raw) })
		}
	}
}

// Every proper prefix of a hello needs more, and what comes after it does not
// matter.
func TestParsePrefixes(t *testing.T) {
	every(t, func(t *testing.T, raw []byte) {
		h := mustParse(t, raw)
		step := 1 + h.Len/2000
		for n := 0; n < h.Len; n += step {
			if _, err := Parse(raw[:n]); err != ErrMore {
				t.Fatalf("after %d of %d bytes: %v, want ErrMore", n, h.Len, err)
			}
			if complete(raw[:n]) {
				t.Fatalf("complete is true after %d of %d bytes, want false", n, h.Len)
			}
		}
		if !complete(raw[:h.Len]) || !complete(raw) {
			t.Errorf("complete is false after %d and %d bytes, want true for a hello of %d", h.Len, len(raw), h.Len)
		}
		if _, err := Parse(raw[:h.Len-1]); err != ErrMore {
			t.Errorf("without the last byte: %v, want ErrMore", err)
		}
		if got := mustParse(t, raw[:h.Len]); !same(got, h) {
			t.Errorf("without what follows: %+v, want %+v", got, h)
		}
	})
}

// The same hello says the same, however it is cut into records and segments.
func TestParseRecut(t *testing.T) {
	every(t, func(t *testing.T, raw []byte) {
		h := mustParse(t, raw)
		msg := payload(raw[:h.Len])
		for _, size := range []int{1, 2, 5, 64, 511, MaxRecord} {
			if len(msg) > size*MaxRecords {
				continue
			}
			cut := records(msg, size)
			want := h
			want.Len = len(cut)
			if got := mustParse(t, cut); !same(got, want) {
				t.Errorf("records of %d bytes: %+v, want %+v", size, got, want)
			}
			var p Parser
			for n := range cut {
				if _, err := p.Feed(cut[:n]); err != ErrMore {
					t.Fatalf("records of %d bytes, fed byte by byte: after %d bytes %v, want ErrMore", size, n, err)
				}
			}
			if got, err := p.Feed(cut); err != nil || !same(got, want) {
				t.Errorf("records of %d bytes, fed byte by byte: %+v (%v), want %+v", size, got, err, want)
			}
		}
	})
}

// A Parser gives the final answer again, whatever follows.
func TestFeedIsFinal(t *testing.T) {
	raw := one(hello(sniExt(svc)))
	var p Parser
	first, err := p.Feed(raw)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := p.Feed(append(raw, 0)); err != nil || !same(again, first) {
		t.Errorf("Feed again = %+v (%v), want %+v", again, err, first)
	}
	p = Parser{}
	_, err = p.Feed([]byte{22, 2})
	if _, again := p.Feed(raw); again != err || err == nil {
		t.Errorf("Feed after an error = %v, want %v again", again, err)
	}
}

// The Hello does not change when its bytes do.
func TestHelloIsACopy(t *testing.T) {
	raw := one(chromium(svc))
	h := mustParse(t, raw)
	clear(raw)
	if h.RawName != svc || !slices.Equal(h.ALPN(), []string{"h2", "http/1.1"}) {
		t.Errorf("name %q, ALPN %q after the bytes changed", h.RawName, h.ALPN())
	}
}

// work counts the bytes a Parser goes over: each one once, whatever the
// pieces.
func TestFeedLooksAtEachByteOnce(t *testing.T) {
	for _, raw := range [][]byte{
		records(sized(4+MaxHello), 18),
		one(hello(many(3000), sniExt(svc))),
	} {
		var p Parser
		steps := 0
		for n := range raw {
			before := p.off
			if _, err := p.Feed(raw[:n]); err != ErrMore {
				t.Fatalf("after %d bytes: %v, want ErrMore", n, err)
			}
			if p.off < before || p.off > n {
				t.Fatalf("after %d bytes the cursor is at %d, was at %d", n, p.off, before)
			}
			if steps += p.off - before; n-p.off > 5 {
				t.Fatalf("after %d bytes only %d are read: the rest is looked at again", n, p.off)
			}
		}
		if steps > len(raw) {
			t.Errorf("%d bytes read, want at most %d", steps, len(raw))
		}
	}
}

func TestParseAllocations(t *testing.T) {
	for _, c := range []struct {
		name string
		raw  []byte
		want float64
	}{
		{"Go's hello: the name and a list of types", fixtures(t)["go-1.26.8"], 2},
		{"only the name", one(hello(sniExt(svc))), 1},
		{"more to come", one(hello(sniExt(svc)))[:60], 0},
		{"name split over records", records(hello(sniExt(svc)), 7), 1},
	} {
		if got := testing.AllocsPerRun(100, func() { _, _ = Parse(c.raw) }); got > c.want {
			t.Errorf("%s: %v allocations, want at most %v", c.name, got, c.want)
		}
	}
}

func same(a, b Hello) bool {
	return a.Name == b.Name && fmt.Sprint(a.NameErr) == fmt.Sprint(b.NameErr) && a.RawName == b.RawName &&
		a.Version == b.Version && a.ECH == b.ECH && a.Len == b.Len && a.alpn == b.alpn
}

func TestTypeSet(t *testing.T) {
	var s typeSet
	for i := range 1 << 16 {
		v := uint16(i * 40503) // an odd factor: every value once
		if s.add(v) {
			t.Fatalf("%#04x, the %d. type, was there before it was added", v, i)
		}
		if !s.add(v) {
			t.Fatalf("%#04x, the %d. type, is not there after it was added", v, i)
		}
	}
	if s.list != nil || s.bits == nil {
		t.Error("the list is kept beside the bits")
	}
}

func BenchmarkComplete(b *testing.B) {
	raw := one(chromium(svc))
	b.ReportAllocs()
	for b.Loop() {
		if !complete(raw) {
			b.Fatal("the hello is not complete")
		}
	}
}

func BenchmarkParse(b *testing.B) {
	all := fixtures(b)
	for _, c := range []struct {
		name string
		raw  []byte
	}{
		{"openssl", all["openssl-3.0.19"]},
		{"go", all["go-1.26.8"]},
		{"chromium", one(chromium(svc))},
		{"records of 64", records(chromium(svc), 64)},
		{"largest", records(sized(4+MaxHello), 1<<14)},
		{"16,000 extensions", records(hello(many(16000), sniExt(svc)), 1<<14)},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.SetBytes(int64(len(c.raw)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Parse(c.raw); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	b.Run("byte by byte", func(b *testing.B) {
		raw := bytes.Clone(all["go-1.26.8"])
		b.SetBytes(int64(len(raw)))
		b.ReportAllocs()
		for b.Loop() {
			var p Parser
			for n := range raw {
				_, _ = p.Feed(raw[:n])
			}
		}
	})
}
