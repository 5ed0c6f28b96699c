package h3

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"testing"
	"time"
)

// A Plain asks and is answered, and hears why it is not.
func TestRawQUIC(t *testing.T) {
	server, client := credentials()
	server, client = server.Clone(), client.Clone()
	server.NextProtos, client.NextProtos = []string{"x"}, []string{"x"}
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	ended := make(chan error, 1)
	go func() {
		ended <- ServeRawQUIC(ctx, pc, server, func(who *tls.ConnectionState, question []byte) []byte {
			return append(question, " "+who.ServerName...)
		})
	}()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("ServeRawQUIC: %v, want its end with the context's", err)
		}
	}()

	p, err := DialRawQUIC(ctx, pc.LocalAddr().String(), client)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	for range 3 {
		if got, err := p.Ask(ctx, []byte("who?")); string(got) != "who? gw.test" || err != nil {
			t.Errorf("got %q, %v, want the answer", got, err)
		}
	}
	if s := p.State(); s.NegotiatedProtocol != "x" || len(s.PeerCertificates) != 1 {
		t.Errorf("got %q and %d certificates, want x and one", s.NegotiatedProtocol, len(s.PeerCertificates))
	}
	if err := p.Accepted(time.Millisecond); err != nil {
		t.Errorf("accepted: %v", err)
	}

	client.NextProtos = []string{"y"}
	const noApplicationProtocol = tls.AlertError(120)
	if _, err := DialRawQUIC(ctx, pc.LocalAddr().String(), client); !errors.Is(err, noApplicationProtocol) {
		t.Errorf("another protocol: got %v, want the alert %v", err, noApplicationProtocol)
	}
}

// What a server thinks of its client's certificate comes after the handshake.
func TestRawQUICIsNotAccepted(t *testing.T) {
	server, client := credentials()
	server, client = server.Clone(), client.Clone()
	server.NextProtos, client.NextProtos, server.ClientAuth = []string{"x"}, []string{"x"}, tls.RequireAnyClientCert
	pc, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer pc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	ended := make(chan error, 1)
	go func() { ended <- ServeRawQUIC(ctx, pc, server, nil) }()
	defer func() { cancel(); <-ended }()
	p, err := DialRawQUIC(ctx, pc.LocalAddr().String(), client)
	if err == nil {
		defer p.Close()
		err = p.Accepted(testTimeout)
	}
	const certificateRequired = tls.AlertError(116)
	if !errors.Is(err, certificateRequired) {
		t.Errorf("got %v, want the alert %v", err, certificateRequired)
	}
}
