//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Every proxy takes part in TLS in each of the ways, and fills the table.
func TestTLS(t *testing.T) {
	bin := builtCulvert(t)
	withKeys(t)
	s := &suite{
		rig:    rig{dir: t.TempDir(), culvert: bin},
		rounds: 1,
		slice:  50 * time.Millisecond,
		only:   regexp.MustCompile(""),
		log:    io.Discard,
	}
	b, err := s.newTLS(options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), suiteTime)
	defer cancel()
	for _, kind := range b.kinds {
		if kind.name == "terminated" {
			noTickets(ctx, t, kind.suite)
		}
	}
	if err := b.run(ctx); err != nil {
		t.Fatal(err)
	}
	for _, kind := range b.kinds {
		if len(kind.suite.trouble) > 0 {
			t.Errorf("%s: trouble: %q", kind.name, kind.suite.trouble)
		}
		for _, row := range tlsRows() {
			for _, p := range kind.suite.peers {
				if v, _, ok := kind.suite.results.median(row.id, p.name); !ok || v <= 0 && !costs(row.id) {
					t.Errorf("%s, %s: %s is %v, want more than 0", kind.name, p.name, row.title, v)
				}
			}
		}
	}
	var page strings.Builder
	b.report(&page)
	for want, n := range map[string]int{"| | culvert | haproxy | nginx |": len(tlsKinds()) - 1, "| | culvert | culvert-header | haproxy |": 1} {
		if strings.Count(page.String(), want) != n {
			t.Errorf("the page has not %d tables that begin with %q:\n%s", n, want, page.String())
		}
	}
}

// noTickets checks that no proxy of s spends time on tickets, which no client here uses.
func noTickets(ctx context.Context, t *testing.T, s *suite) {
	stop, err := s.cast()
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	for _, p := range s.peers {
		run, err := p.start(ctx, s.rig)
		if err != nil {
			t.Fatal(err)
		}
		defer run.stop()
		tickets := new(ticketCounter)
		config := toProxy()
		config.ServerName, config.ClientSessionCache = quicName, tickets
		c, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", run.addr.String())
		if err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		defer c.Close()
		h, err := hello(serviceName(0))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(opening(h, cmdEcho, 0)); err != nil {
			t.Fatalf("%s: %v", p.name, err)
		}
		if err := trip(c, make([]byte, payloadLen)); err != nil { // tickets come before it
			t.Fatalf("%s: %v", p.name, err)
		}
		if *tickets > 0 {
			t.Errorf("%s sent %d tickets, want none", p.name, *tickets)
		}
	}
}

// A ticketCounter is a tls.ClientSessionCache that keeps nothing.
type ticketCounter int

func (*ticketCounter) Get(string) (*tls.ClientSessionState, bool) { return nil, false }

func (n *ticketCounter) Put(_ string, s *tls.ClientSessionState) {
	if s != nil {
		*n++
	}
}

// A proxy that negotiates anything else than the others is not measured.
func TestTLSNegotiatesTheSame(t *testing.T) {
	withKeys(t)
	pair, err := tls.LoadX509KeyPair(keyFile("bench.crt"), keyFile("bench.key"))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name   string
		config *tls.Config
		want   string // in the error; "" for none
	}{
		{"the same", &tls.Config{}, ""},
		{"an older version", &tls.Config{MaxVersion: tls.VersionTLS12}, "got TLS 1.2"},
		{"another key exchange", &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP256}}, "handshake failure"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.config.Certificates = []tls.Certificate{pair}
			ln, err := tls.Listen("tcp", "127.0.0.1:0", tt.config)
			if err != nil {
				t.Fatal(err)
			}
			defer ln.Close()
			served := make(chan struct{})
			go func() {
				defer close(served)
				c, err := ln.Accept()
				if err != nil {
					return
				}
				defer c.Close()
				_ = c.(*tls.Conn).HandshakeContext(t.Context())
				_, _ = io.Copy(io.Discard, c) // until the client has ended
			}()
			c, err := toTLS(ln.Addr().String()).DialContext(t.Context(), "tcp", "")
			if err == nil {
				c.Close()
			}
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("error %v, want none", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
			<-served
		})
	}
}

// -tls chooses kinds by name.
func TestTLSChoice(t *testing.T) {
	s := new(suite)
	for pattern, want := range map[string]int{"": 4, "terminated": 1, "originated|re-encrypted": 2, "none": 0} {
		b, err := s.newTLS(options{tls: pattern})
		if err != nil || len(b.kinds) != want {
			t.Errorf("-tls %q: error %v, else %d kinds, want %d", pattern, err, len(b.kinds), want)
		}
	}
	if _, err := s.newTLS(options{tls: "("}); err == nil || !strings.Contains(err.Error(), "-tls") {
		t.Errorf("-tls with a bad pattern: error %v, want one that names the flag", err)
	}
}
