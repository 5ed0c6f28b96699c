package h3

import (
	"context"
	"errors"
	"io"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestMostUnread: the connection that has sent what nobody reads is found and
// ended, and not one that has moved much more, either way.
func TestMostUnread(t *testing.T) {
	router := &tunnel.Router{Relay: &tunnel.Relay{}, Dialer: &tunnel.NetDialer{}, Resolver: tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}}
	defer router.Relay.Close()
	stop := make(chan struct{})
	defer close(stop)
	srv := &Server{}
	addr := serveHandler(t, srv, tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
		if req.Port == 1 {
			router.ServeTunnel(ctx, req)
			return
		}
		s, err := req.Accept()
		if err != nil {
			return
		}
		<-stop // it reads nothing
		_ = s.Close()
	}))
	honest, deaf := newDialer(t, addr), newDialer(t, addr)
	honest.Idle, deaf.Idle = time.Minute, time.Minute

	s := open(t, honest, "svc:1")
	sent := random(8<<20, 1)
	go func() { _, _ = s.Write(sent) }()
	if _, err := io.CopyN(io.Discard, s, int64(len(sent))); err != nil {
		t.Fatal(err)
	}
	if u := srv.MostUnread(); u.Bytes != 0 {
		t.Errorf("%d bytes of %s were not read, want none", u.Bytes, u.Client)
	}
	var mute []*Stream
	for range 20 {
		m := open(t, deaf, "svc:2")
		_ = m.SetWriteDeadline(time.Now().Add(testTimeout))
		if _, err := m.Write(make([]byte, streamWindow*3/4)); err != nil {
			t.Fatal(err)
		}
		mute = append(mute, m)
	}
	// They are on several connections.
	ended := 0
	testnet.Eventually(t, testTimeout, func() bool {
		if u := srv.MostUnread(); u.Bytes > 0 {
			u.End()
			ended++
		}
		return srv.MostUnread().Bytes == 0 && ended > 1
	}, "they are seen, and ended")
	for _, m := range mute {
		_ = m.SetReadDeadline(time.Now().Add(testTimeout))
		if _, err := m.Read(make([]byte, 1)); err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("a stream of the connection that was ended: %v", err)
		}
	}
	testnet.Ping(t, s, "the other one stands")
}
