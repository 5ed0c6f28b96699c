//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"time"

	"github.com/quic-go/quic-go"

	"culvert.dev/connect/proxyproto"
	"culvert.dev/tunnel"
)

// What the backend serves by UDP, at the port of the rest of it: datagrams that
// come back as they are, and QUIC, a stream of which is what a connection is
// elsewhere.
const (
	echoHost, quicHost = "127.0.0.9", "127.0.0.10"
	quicName, quicALPN = "quic.bench.test", "bench"
)

// by returns the address of host with the port of addr: gateways listen there
// for what can't share an address.
func by(addr, host string) string {
	_, port, _ := net.SplitHostPort(addr)
	return net.JoinHostPort(host, port)
}

// Where carriersConfig has its further listeners.
const (
	proxiedHost, ownHost = "127.0.0.3", "127.0.0.4" // by TCP
	byNameHost, udpHost  = "127.0.0.3", "127.0.0.4" // by UDP
)

// A dialFunc is a tunnel.Dialer that goes to one place.
type dialFunc func(ctx context.Context) (net.Conn, error)

func (f dialFunc) DialContext(ctx context.Context, _, _ string) (net.Conn, error) { return f(ctx) }

// toPort connects and says nothing.
func toPort(addr string) tunnel.Dialer {
	return dialFunc(func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", addr) })
}

// behindProxy connects and sends a PROXY header, as a proxy in front does.
func behindProxy(addr string) tunnel.Dialer {
	return dialFunc(func(ctx context.Context) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
		if err != nil {
			return nil, err
		}
		h := proxyproto.Header{Version: 2, Source: netip.MustParseAddrPort("192.0.2.7:54321"), Destination: netip.MustParseAddrPort("192.0.2.1:443")}
		b, err := h.Append(nil)
		if err == nil {
			_, err = c.Write(b)
		}
		if err != nil {
			_ = c.Close()
			return nil, err
		}
		return c, nil
	})
}

// An echoed is a socket whose datagrams all come back, and so needs no command.
type echoed struct {
	net.Conn
	begun bool
}

func (f *echoed) Write(p []byte) (int, error) {
	if !f.begun {
		f.begun = true
		return len(p), nil
	}
	return f.Conn.Write(p)
}

func toUDP(addr string) tunnel.Dialer {
	return dialFunc(func(ctx context.Context) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "udp", addr)
		return &echoed{Conn: c}, err
	})
}

// A quicStream is the one stream of a QUIC connection.
type quicStream struct {
	*quic.Stream
	conn *quic.Conn
}

func (s *quicStream) LocalAddr() net.Addr  { return s.conn.LocalAddr() }
func (s *quicStream) RemoteAddr() net.Addr { return s.conn.RemoteAddr() }
func (s *quicStream) CloseWrite() error    { return s.Stream.Close() }
func (s *quicStream) Close() error         { return s.conn.CloseWithError(0, "") }

// quicConfig has no idle limit that a measurement could run into.
func quicConfig() *quic.Config { return &quic.Config{MaxIdleTimeout: time.Hour} }

func toQUIC(addr string) tunnel.Dialer {
	cfg := toProxy()
	cfg.ServerName, cfg.NextProtos = quicName, []string{quicALPN}
	return dialFunc(func(ctx context.Context) (net.Conn, error) {
		conn, err := quic.DialAddr(ctx, addr, cfg, quicConfig())
		if err != nil {
			return nil, err
		}
		s, err := conn.OpenStreamSync(ctx)
		if err != nil {
			return nil, err
		}
		return &quicStream{s, conn}, nil
	})
}

// serveDatagrams serves both at port, as long as the process lasts.
func serveDatagrams(port uint16) error {
	pc, err := net.ListenPacket("udp", net.JoinHostPort(echoHost, fmt.Sprint(port)))
	if err != nil {
		return err
	}
	go func() {
		b := make([]byte, 1<<16)
		for {
			if n, from, err := pc.ReadFrom(b); err == nil {
				_, _ = pc.WriteTo(b[:n], from)
			}
		}
	}()
	if !haveKeys() {
		return nil // nobody speaks TLS to anybody
	}
	return serveQUIC(net.JoinHostPort(quicHost, fmt.Sprint(port)))
}

// serveQUIC serves one stream of each connection to addr, as long as the process
// lasts.
func serveQUIC(addr string) error {
	cfg := toProxy()
	cfg.NextProtos = []string{quicALPN}
	ln, err := quic.ListenAddr(addr, cfg, quicConfig())
	if err != nil {
		return err
	}
	go func() {
		for {
			conn, err := ln.Accept(context.Background())
			if err != nil {
				return
			}
			go func() {
				s, err := conn.AcceptStream(context.Background())
				if err == nil {
					err = serveStream(&quicStream{s, conn})
				}
				if err != nil {
					_ = conn.CloseWithError(1, "")
				}
				// Otherwise it is the client's to close, who has not read all yet.
			}()
		}
	}()
	return nil
}

// serveStream is backendConn for a stream of QUIC, or of TCP.
func serveStream(s interface {
	io.ReadWriter
	CloseWrite() error
}) error {
	r := bufio.NewReaderSize(s, 64<<10)
	head, err := r.Peek(5)
	if err != nil {
		return err
	}
	if _, err := r.Discard(helloLen(head)); err != nil {
		return err
	}
	var command [commandLen]byte
	if _, err := io.ReadFull(r, command[:]); err != nil {
		return err
	}
	switch command[0] {
	case cmdEcho:
		_, err = io.Copy(s, r)
	case cmdUpload:
		var n int64
		if n, err = io.Copy(io.Discard, r); err == nil {
			_, err = s.Write(binary.BigEndian.AppendUint64(nil, uint64(n)))
		}
	case cmdDownload:
		until := time.Now().Add(time.Duration(binary.BigEndian.Uint64(command[8:])) * time.Millisecond)
		for p := make([]byte, chunk); err == nil && time.Now().Before(until); {
			_, err = s.Write(p)
		}
	}
	if err != nil {
		return err
	}
	return s.CloseWrite()
}

// nginxDatagrams passes datagrams on by the address they come to: it does not
// read names.
func nginxDatagrams(r rig) (*exec.Cmd, error) {
	server := func(host, to string) string {
		return fmt.Sprintf("\tserver {\n\t\tlisten %s udp reuseport;\n\t\tproxy_pass %s:%d;\n\t\tproxy_timeout 1h;\n\t}\n", by(r.listen, host), to, r.backend)
	}
	file, err := r.write("nginx.conf", fmt.Sprintf(`load_module %s;
daemon off;
user root;
pid %s/pid;
error_log stderr error;
worker_processes 2;
worker_rlimit_nofile 20000;
events {
	worker_connections 16384;
}
stream {
%s%s}
`, nginxModule, r.dir, server(udpHost, echoHost), server(byNameHost, quicHost)))
	if err != nil {
		return nil, err
	}
	return exec.Command("nginx", "-p", r.dir, "-c", file), nil
}
