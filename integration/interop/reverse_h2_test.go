//go:build unix

package interop

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/summerwind/h2spec/config"
	"github.com/summerwind/h2spec/generic"
	"github.com/summerwind/h2spec/hpack"
	h2specs "github.com/summerwind/h2spec/http2"
	"github.com/summerwind/h2spec/spec"

	sessions "culvert.dev/reverse"
	"culvert.dev/tunnel"
)

// A sessionPort is a gateway of the test's own: each TCP connection that it takes becomes the
// stream of a reverse session with a connector, on which the connector is the server of
// HTTP/2.
type sessionPort struct {
	t       *testing.T
	ctx     context.Context
	ln      net.Listener
	running sync.WaitGroup
}

func newSessionPort(t *testing.T) *sessionPort {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	p := &sessionPort{t: t, ctx: t.Context(), ln: ln}
	p.running.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			p.running.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = ln.Close()
		p.running.Wait()
	})
	return p
}

// serve has a connector open a session, and passes on c and the session's stream to each
// other.
func (p *sessionPort) serve(c net.Conn) {
	defer c.Close()
	ctx, stop := context.WithCancel(p.ctx)
	defer stop()
	session := &onceTransport{made: make(chan net.Conn, 1)}
	connector := &sessions.Client{
		Gateways: []sessions.Gateway{{Name: "h2spec", Transport: session}},
		Handler: tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {
			req.Refuse(tunnel.Refusef(tunnel.NoRoute, "h2spec opens no tunnel"))
		}),
	}
	connector.SetNames([]sessions.Registration{{Name: tunnel.Pattern{Suffix: tunnel.MustParseName(svc)}}})
	var connecting sync.WaitGroup
	connecting.Go(func() { _ = connector.Run(ctx) })
	defer connecting.Wait()
	defer stop()
	var far net.Conn
	select {
	case far = <-session.made:
	case <-ctx.Done():
		return
	}
	defer far.Close()
	in := bufio.NewReader(far)
	line, err := in.ReadBytes('\n')
	var hello struct{ Version int }
	if err == nil {
		err = json.Unmarshal(line, &hello)
	}
	if err == nil {
		_, err = io.WriteString(far, `{"version": `+strconv.Itoa(hello.Version)+`, "replica": "h2spec"}`+"\n")
	}
	if err != nil {
		p.t.Errorf("the connector opens no session: %v", err)
		return
	}
	var up sync.WaitGroup
	up.Go(func() {
		_, _ = io.Copy(far, c)
		_ = far.(*net.TCPConn).CloseWrite()
	})
	_, _ = io.Copy(c, in)
	_ = c.Close() // h2spec sees the end of the session, and the copy up ends
	up.Wait()
}

// A onceTransport connects once, to whoever takes the other end.
type onceTransport struct {
	made chan net.Conn
	once sync.Once
}

func (o *onceTransport) Dial(ctx context.Context, _ *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	err := net.ErrClosed
	var near net.Conn
	o.once.Do(func() {
		var ln net.Listener
		if ln, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
			return
		}
		defer ln.Close()
		if near, err = new(net.Dialer).DialContext(ctx, "tcp", ln.Addr().String()); err != nil {
			return
		}
		var far net.Conn
		if far, err = ln.Accept(); err == nil {
			o.made <- far
		}
	})
	return near, err
}

func (*onceTransport) Check(*tunnel.Endpoint) error { return nil }

func (*onceTransport) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// TestH2SpecInSessions runs h2spec's 145 cases against the connector's side of reverse
// sessions, where the side that has connected is the server.
func TestH2SpecInSessions(t *testing.T) {
	host, port, err := net.SplitHostPort(newSessionPort(t).ln.Addr().String())
	must(t, err)
	n, err := strconv.Atoi(port)
	must(t, err)
	cfg := &config.Config{Host: host, Port: n, Path: "/", Timeout: patience / 3, MaxHeaderLen: 4000}
	passed := 0
	var failed []string
	for _, group := range []*spec.TestGroup{generic.Spec(), h2specs.Spec(), hpack.Spec()} {
		group.Test(cfg)
		passed += group.PassedCount
		failed = append(failed, failures(group)...)
	}
	if passed != 145 || len(failed) > 0 {
		t.Errorf("%d cases passed, want 145; failed:\n%s", passed, strings.Join(failed, "\n"))
	}
}
