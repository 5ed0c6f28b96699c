package command

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"math/big"
	"strings"
	"testing"
	"time"
)

func TestTheWriterLeavesATerminalNothingToObey(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"plain text\n\tand a tab", "plain text\n\tand a tab"},
		{"grüße, 世界 🙂", "grüße, 世界 🙂"},
		{"\x1b[2J\x1b]0;title\x07", "�[2J�]0;title�"},
		{"over\rwritten\b\b", "over�written��"},
		{"C1 \u009b31m", "C1 �31m"},
		{"bidi \u202e and zero width \u200b", "bidi � and zero width �"},
		{"broken \xff\xc3", "broken ��"},
		{"no color: " + good("up"), "no color: up"},
	} {
		var whole, pieces bytes.Buffer
		w := &cleanWriter{w: &whole}
		_, _ = w.Write([]byte(tt.in))
		_ = w.Close()
		if whole.String() != tt.want {
			t.Errorf("%q: got %q, want %q", tt.in, whole.String(), tt.want)
		}
		w = &cleanWriter{w: &pieces}
		for i := range len(tt.in) {
			if n, err := w.Write([]byte{tt.in[i]}); n != 1 || err != nil {
				t.Fatal(n, err)
			}
		}
		_ = w.Close()
		if pieces.String() != tt.want {
			t.Errorf("%q byte by byte: got %q, want %q", tt.in, pieces.String(), tt.want)
		}
	}
}

func TestColorsAreForTerminals(t *testing.T) {
	var b bytes.Buffer
	w := &cleanWriter{w: &b, color: true}
	_, _ = w.Write([]byte(bad("down") + " " + printable(good("up")+"\x1b[32m")))
	if got, want := b.String(), "\x1b[31mdown\x1b[m �up��[32m"; got != want {
		t.Errorf("got %q, want %q: what others wrote has no color", got, want)
	}
	if newCleanWriter(&b).color {
		t.Error("colors in a file")
	}
	if got := padded(good("up"), 4, false); width(got) != 4 || !strings.HasSuffix(got, "  ") {
		t.Errorf("%q has %d columns, want 4", got, width(got))
	}
}

// JSON goes through the same writer and means the same behind it.
func TestJSONKeepsItsMeaning(t *testing.T) {
	const in = "\x1b[31m \u009b \u202e \u200b \U000e0001 \x7f grüße 🙂 \uf8f0"
	var b bytes.Buffer
	w := &cleanWriter{w: &b, color: true}
	if err := writeJSON(w, in); err != nil {
		t.Fatal(err)
	}
	if bytes.ContainsAny(b.Bytes(), "\x1b\x7f") || bytes.ContainsRune(b.Bytes(), '�') {
		t.Errorf("the output is %q", b.String())
	}
	var got string
	if err := json.Unmarshal(b.Bytes(), &got); err != nil || got != in {
		t.Errorf("got %q, %v, want %q", got, err, in)
	}
}

// What an unverified certificate says is shown as text: it neither moves the
// cursor nor writes lines of its own.
func TestACertificateCanNotWriteToTheTerminal(t *testing.T) {
	const evil = "a\x1b[2J\x1b]0;owned\x07\nreached in 1ms\r"
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), DNSNames: []string{evil}, NotAfter: time.Now().Add(time.Hour),
		Subject: pkix.Name{CommonName: evil},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).HandshakeContext(t.Context())
			defer c.Close()
		}
	}()
	defer func() { _ = ln.Close(); <-done }()
	for _, output := range []string{"text", "json"} {
		var stdout, stderr bytes.Buffer
		Main(t.Context(), []string{"probe", "a.test", "--via", ln.Addr().String(), "--mode", "tcp", "-o", output}, &stdout, &stderr)
		if stdout.Len() == 0 || bytes.ContainsAny(stdout.Bytes(), "\x1b\x07\r") || stderr.Len() > 0 {
			t.Errorf("%s: %q %q", output, stdout.String(), stderr.String())
		}
		if strings.Contains(stdout.String(), "\nreached") {
			t.Errorf("%s: a name wrote a line:\n%s", output, stdout.String())
		}
		if output == "json" {
			var r probeReport
			if err := json.Unmarshal(stdout.Bytes(), &r); err != nil || r.Service == nil || r.Service.Chain[0].SANs[0] != evil {
				t.Errorf("%v, %+v: JSON has the name as it is", err, r.Service)
			}
		}
	}
}
