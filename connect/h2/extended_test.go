package h2

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// A teapot is an ExtendedService that finds the name of the service in the path.
type teapot struct{ wrapped chan *Stream }

func (teapot) Name() string { return "websocket" }

func (teapot) AdmitList(ctx context.Context, req *tunnel.Request, head *Head) (context.Context, connect.Fields, error) {
	if head.Scheme != "https" {
		return nil, nil, tunnel.Refusef(tunnel.NoRoute, "%+v", head)
	}
	req.Name, req.Port = tunnel.MustParseName(strings.TrimPrefix(head.Path, "/")), 1
	return ctx, connect.Fields{{Name: "A", Value: "b"}}, nil
}

func (teapot) Refusal(_ *tunnel.Request, err error) connect.Refusal {
	return connect.Refusal{Status: 418, Reason: tunnel.ReasonOf(err), Error: "http_request_error", Text: "no"}
}

func (p teapot) NewStream(s tunnel.Stream, _ connect.Fields) tunnel.Stream {
	p.wrapped <- s.(*Stream)
	return s
}

// TestExtended: an extended CONNECT goes to the ExtendedService, which says where to.
func TestExtended(t *testing.T) {
	wrapped := make(chan *Stream, 1)
	p := &Protocol{Extended: []connect.ExtendedService{teapot{wrapped}}}
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, p)
	d := newDialer(t, g.Addr)
	head := &Head{Protocol: "websocket", Scheme: "https", Path: "/svc", Authority: "gw:443"}
	s, answer, err := d.Open(t.Context(), head)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_ = s.SetDeadline(time.Now().Add(patience))
	testnet.Ping(t, s, "x")
	if got, _ := answer.Get("a"); got != "b" || len(wrapped) != 1 {
		t.Errorf("got fields %v and %d streams made into others, want a: b, and 1", answer, len(wrapped))
	}
	for what, head := range map[string]*Head{
		"by the service": {Protocol: "websocket", Scheme: "gopher", Path: "/svc", Authority: "gw:443"},
		"by the Handler": {Protocol: "websocket", Scheme: "https", Path: "/other", Authority: "gw:443"},
	} {
		_, _, err = d.Open(t.Context(), head)
		if tunneltest.WantReason(t, err, tunnel.NoRoute); err == nil || !strings.Contains(err.Error(), "with status 418") {
			t.Errorf("refused %s: got %v, want status 418", what, err)
		}
	}
}

// TestExtendedFields: what no CONNECT may have, an extended one may not have.
func TestExtendedFields(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{Extended: []connect.ExtendedService{teapot{make(chan *Stream, 1)}}})
	r := rawClient(t, g.Addr)
	for i, c := range []struct {
		name, value, status string
	}{{"content-length", "0", "400"}, {"host", "other:1", "400"}, {"host", "svc:1", "200"}} {
		id := uint32(2*i + 1)
		_ = r.request(id, false, ":method", "CONNECT", ":protocol", "websocket", ":scheme", "https", ":path", "/svc", ":authority", "svc:1", c.name, c.value)
		if a := r.answer(id); a.status != c.status {
			t.Errorf("%s: %s: got %+v, want status %s", c.name, c.value, a, c.status)
		}
	}
}

// TestNotSpoken: who takes no extended CONNECT, or wants HTTP/1.1 for it, is
// told from one that refuses.
func TestNotSpoken(t *testing.T) {
	head := &Head{Protocol: "websocket", Scheme: "https", Path: "/svc", Authority: "gw:443"}
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{})
	d := newDialer(t, g.Addr)
	if _, _, err := d.Open(t.Context(), head); !errors.Is(err, ErrNotSpoken) {
		t.Errorf("got %v from a proxy without extended CONNECT, want ErrNotSpoken", err)
	}
	testnet.Ping(t, open(t, d, "svc:1"), "x") // on the same connection
	if n := d.Conns(); n != 1 {
		t.Errorf("got %d connections, want 1", n)
	}
	want11 := testnet.Service(t, func(c net.Conn) {
		r := newRaw(t, c)
		_, _ = io.ReadFull(c, make([]byte, len(preface)))
		_ = r.fr.WriteSettings(http2.Setting{ID: http2.SettingEnableConnectProtocol, Val: 1})
		if f, err := r.next(); err == nil {
			_ = r.fr.WriteRSTStream(f.Header().StreamID, http2.ErrCodeHTTP11Required)
		}
		_, _ = r.next()
	})
	if _, _, err := newDialer(t, want11).Open(t.Context(), head); !errors.Is(err, ErrNotSpoken) {
		t.Errorf("got %v from a proxy that wants HTTP/1.1, want ErrNotSpoken", err)
	}
	mute := testnet.Service(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	d = newDialer(t, mute)
	d.Wait = 10 * time.Millisecond
	_, _, err := d.Open(t.Context(), head)
	tunneltest.WantReason(t, err, tunnel.DialTimeout)
}
