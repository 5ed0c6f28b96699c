//go:build unix

package tunnel_test

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A localListener is one of LocalConns, by the process 4711.
type localListener struct{ net.Listener }

type localConn struct{ net.Conn }

func (localConn) Process() (tunnel.Process, bool) { return tunnel.Process{UID: 1000, PID: 4711}, true }

func (l localListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return localConn{c}, nil
}

// A process that AdmitProcess refuses gets no answer, and is reported.
func TestAdmitProcessRefuses(t *testing.T) {
	dir, err := os.MkdirTemp("", "culvert")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ln, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	asked, reported := make(chan *tunnel.Process, 1), make(chan *tunnel.Outcome, 1)
	config := &tunnel.ListenerConfig{
		Name: "local", Protocols: []tunnel.Protocol{&tunnel.Fixed{To: tunnel.MustParseName("a.example")}},
		AdmitProcess: func(p *tunnel.Process) error {
			asked <- p
			return tunnel.Refusef(tunnel.Denied, "not this one")
		},
	}
	srv := &tunnel.Server{
		Handler: tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
			t.Error("the request of a refused process is handled")
			acceptAndClose(ctx, req)
		}),
		Observe: func(o *tunnel.Outcome) { reported <- o },
	}
	served := make(chan error, 1)
	go func() {
		served <- srv.Serve(t.Context(), tunnel.Listener{Listener: localListener{ln}, Current: func() *tunnel.ListenerConfig { return config }})
	}()
	c, err := net.Dial("unix", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || os.IsTimeout(err) {
		t.Errorf("read %d bytes, %v, want the end", n, err)
	}
	if p := <-asked; p == nil || p.UID != 1000 {
		t.Errorf("asked for %+v", p)
	}
	if o := <-reported; o.Reason != tunnel.Denied {
		t.Errorf("reported %s, want %s", o.Reason, tunnel.Denied)
	}
	srv.Close()
	<-served
}
