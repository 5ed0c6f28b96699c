package testnet

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"
)

const (
	tokenMagic  = "\xc5pair\r\n\x00"
	tokenLen    = len(tokenMagic) + 8
	tokenWait   = 30 * time.Second
	maxPreamble = 128 << 10 // bytes that may come before a token
)

// A Backend is the far end of the path under test: it accepts connections and
// tells which client each belongs to, by a token that the client's end sends
// first of all.
type Backend struct {
	*Server

	mu      sync.Mutex
	next    uint64
	waiting map[uint64]chan arrival
}

type arrival struct {
	conn   net.Conn
	before []byte // what came ahead of the token
}

// NewBackend starts a Backend that ends with the test.
func NewBackend(t testing.TB) *Backend {
	b := &Backend{waiting: make(map[uint64]chan arrival)}
	b.Server = serve(t, b.accept)
	return b
}

// Through returns a Dial that opens the client's end with dial, sends the
// preamble (a ClientHello, say; the backend must get it unchanged) and the
// token, and waits for the other end. It may be used by many at once.
func (b *Backend) Through(dial func(context.Context) (net.Conn, error), preamble []byte) Dial {
	return func(ctx context.Context) (client, server net.Conn, err error) {
		id, came := b.expect()
		defer b.forget(id, came)
		client, err = dial(ctx)
		if err != nil {
			return nil, nil, err
		}
		first := append(bytes.Clone(preamble), tokenMagic...)
		first = binary.BigEndian.AppendUint64(first, id)
		if _, err := client.Write(first); err != nil {
			_ = client.Close()
			return nil, nil, fmt.Errorf("testnet: send the token: %w", err)
		}
		select {
		case a := <-came:
			if !bytes.Equal(a.before, preamble) {
				_, _ = client.Close(), a.conn.Close()
				return nil, nil, fmt.Errorf("testnet: the backend got a preamble of %d bytes that is not the one of %d bytes sent", len(a.before), len(preamble))
			}
			return client, a.conn, nil
		case <-ctx.Done():
			_ = client.Close()
			return nil, nil, fmt.Errorf("testnet: the backend has no connection for the client: %w", ctx.Err())
		}
	}
}

// Direct returns a Dial without anything in between.
func (b *Backend) Direct() Dial {
	return b.Through(func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", b.Addr())
	}, nil)
}

func (b *Backend) expect() (uint64, <-chan arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.next++
	c := make(chan arrival, 1)
	b.waiting[b.next] = c
	return b.next, c
}

// forget closes what has come too late.
func (b *Backend) forget(id uint64, came <-chan arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.waiting, id)
	select {
	case a := <-came:
		_ = a.conn.Close()
	default:
	}
}

// accept reads up to the token and hands the connection over. The client
// sends nothing after the token before it has the connection, so a token is
// always the last that was read.
func (b *Backend) accept(_ *Server, c *net.TCPConn) (keep bool) {
	_ = c.SetReadDeadline(time.Now().Add(tokenWait))
	buf := make([]byte, 4<<10)
	for n := 0; ; {
		if n == len(buf) {
			if n >= maxPreamble {
				return false
			}
			buf = append(buf, make([]byte, n)...)
		}
		m, err := c.Read(buf[n:])
		n += m
		if i := n - tokenLen; i >= 0 && string(buf[i:i+len(tokenMagic)]) == tokenMagic {
			_ = c.SetReadDeadline(time.Time{})
			return b.arrived(binary.BigEndian.Uint64(buf[n-8:]), arrival{c, buf[:i]})
		}
		if err != nil {
			return false
		}
	}
}

// arrived hands a over to the Dial that waits for it, if it still does.
func (b *Backend) arrived(id uint64, a arrival) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	came := b.waiting[id]
	if came == nil {
		return false
	}
	delete(b.waiting, id)
	came <- a
	return true
}
