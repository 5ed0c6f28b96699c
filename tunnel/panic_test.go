package tunnel_test

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
)

// A faulty is a stream, one of whose methods panics.
type faulty struct {
	net.Conn
	method string
}

func (f *faulty) at(method string) {
	if f.method == method {
		panic("a fault of " + method)
	}
}

func (f *faulty) Read(p []byte) (int, error)  { f.at("Read"); return f.Conn.Read(p) }
func (f *faulty) Write(p []byte) (int, error) { f.at("Write"); return f.Conn.Write(p) }
func (f *faulty) CloseWrite() error           { f.at("CloseWrite"); return testnet.CloseWrite(f.Conn) }
func (f *faulty) Close() error {
	err := f.Conn.Close()
	f.at("Close")
	return err
}
func (f *faulty) Broken() error { f.at("Broken"); return nil }

func (f *faulty) Abort() error {
	err := f.Conn.Close()
	f.at("Abort")
	return err
}

// A faultyWaiter panics where it is asked to wake the Relay.
type faultyWaiter struct{ *faulty }

func (f faultyWaiter) WaitRead(func()) bool { f.at("WaitRead"); return true }

// TestPanicInATunnel: a stream that panics ends its own tunnel, which is reported
// once, and nothing else.
func TestPanicInATunnel(t *testing.T) {
	for _, c := range []struct {
		method string
		wrap   func(*faulty) net.Conn
		do     func(client, service net.Conn)
	}{
		{"Read", func(f *faulty) net.Conn { return f }, nil},
		{"Write", func(f *faulty) net.Conn { return f }, func(_, service net.Conn) { _, _ = service.Write([]byte("x")) }},
		{"CloseWrite", func(f *faulty) net.Conn { return f }, func(_, service net.Conn) { _ = testnet.CloseWrite(service) }},
		{"Abort", func(f *faulty) net.Conn { return f }, func(_, service net.Conn) {
			_ = service.(*net.TCPConn).SetLinger(0)
			_ = service.Close()
		}},
		{"Broken", func(f *faulty) net.Conn { return f }, func(client, _ net.Conn) { _ = testnet.CloseWrite(client) }},
		{"WaitRead", func(f *faulty) net.Conn { return faultyWaiter{f} }, nil},
	} {
		t.Run(c.method, func(t *testing.T) {
			var log bytes.Buffer
			budget := &tunnel.Budget{Limit: 100}
			loops := &tunnel.Loops{Budget: budget}
			relay := &tunnel.Relay{Loops: loops, Log: slog.New(slog.NewTextHandler(&log, nil))}
			defer loops.Close()
			client, gatewaysClient := tcpPair(t)
			service, gatewaysService := tcpPair(t)
			beside, gatewaysBeside := tcpPair(t)
			besideService, gatewaysBesideService := tcpPair(t)
			relay.Carry(tunnel.Tunnel{Client: plain{gatewaysBeside}, Server: plain{gatewaysBesideService}, Ended: func(tunnel.End) {}})
			ends := make(chan tunnel.End, 2)
			f := &faulty{Conn: gatewaysClient, method: c.method}
			relay.Carry(tunnel.Tunnel{Client: c.wrap(f), Server: gatewaysService, Ended: func(e tunnel.End) { ends <- e }})
			if c.do != nil {
				c.do(client, service)
			}
			select {
			case e := <-ends:
				_, caught := errors.AsType[*tunnel.Panic](e.Err)
				if (!caught || e.Reason != tunnel.Internal) && (c.method != "Abort" || e.Reason != tunnel.Reset) {
					t.Errorf("the tunnel ended as %s, %v", e.Reason, e.Err)
				}
			case <-time.After(patience):
				t.Fatal("the tunnel does not end")
			}
			_ = client.SetReadDeadline(time.Now().Add(patience))
			if _, err := client.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("the client's connection: %v", err)
			}
			_, _ = beside.Write([]byte("x"))
			_ = besideService.SetReadDeadline(time.Now().Add(patience))
			if _, err := besideService.Read(make([]byte, 1)); err != nil {
				t.Errorf("the tunnel beside: %v", err)
			}
			_ = relay.Close()
			if n := budget.Buffered(); n != 0 {
				t.Errorf("%d bytes are held at the end", n)
			}
			if len(ends) != 0 {
				t.Error("the end was reported twice")
			}
			if text := log.String(); !strings.Contains(text, "a fault of "+c.method) || !strings.Contains(text, "faulty") {
				t.Errorf("logged: %s", text)
			}
		})
	}
}

// plain hides all but what a net.Conn has.
type plain struct{ net.Conn }
