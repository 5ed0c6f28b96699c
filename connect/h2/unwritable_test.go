package h2

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A closedPeer has closed its side: nothing can be written. What it has said before comes
// later, or never.
type closedPeer struct {
	net.Conn
	says  error // nil for nothing
	woken chan struct{}
	once  sync.Once
}

func (c *closedPeer) Write([]byte) (int, error) { return 0, syscall.EPIPE }

func (c *closedPeer) Read([]byte) (int, error) {
	if c.says == nil {
		<-c.woken
		return 0, os.ErrDeadlineExceeded
	}
	time.Sleep(lingerTimeout / 2)
	return 0, c.says
}

func (c *closedPeer) SetReadDeadline(t time.Time) error {
	if t.Before(time.Now()) && !t.IsZero() {
		c.once.Do(func() { close(c.woken) })
	}
	return nil
}

func (*closedPeer) SetWriteDeadline(time.Time) error { return nil }
func (*closedPeer) SetDeadline(time.Time) error      { return nil }
func (c *closedPeer) Close() error                   { c.once.Do(func() { close(c.woken) }); return nil }

// A closedDialer dials closedPeers that say the same.
type closedDialer struct{ says error }

func (d closedDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	return &closedPeer{says: d.says, woken: make(chan struct{})}, nil
}

// A peer that has closed has said why: that counts, and not that nothing can be written to
// it. One that says nothing is not waited for.
func TestPeerSaysWhyItHasClosed(t *testing.T) {
	alert := errors.New("remote error: tls: bad certificate")
	for says, want := range map[error]error{alert: alert, io.EOF: io.EOF, nil: syscall.EPIPE} {
		synctest.Test(t, func(t *testing.T) {
			d := &Dialer{Proxy: "proxy.test:443", Dialer: closedDialer{says}}
			defer d.Close()
			start := time.Now()
			_, err := d.DialContext(t.Context(), "tcp", "svc.test:443")
			if err == nil || !strings.Contains(err.Error(), want.Error()) {
				t.Errorf("the peer says %v: got %v, want %v", says, err, want)
			}
			if took := time.Since(start); took > 10*lingerTimeout {
				t.Errorf("the peer says %v: it took %v, want %v at most", says, took, 10*lingerTimeout)
			}
		})
	}
}
