//go:build linux

package main

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"culvert.dev/internal/testca"
)

// tlsServiceMain is a service inside TLS, as backendMain is one without. It prints its
// address and serves until its standard input ends. With identity it wants a certificate,
// and a PROXY header before TLS or inside of it.
func tlsServiceMain(identity bool) error {
	pair, err := tls.LoadX509KeyPair(keyFile("bench.crt"), keyFile("bench.key"))
	if err != nil {
		return err
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	config := &tls.Config{
		Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519},
		SessionTicketsDisabled: true, DynamicRecordSizingDisabled: true,
	}
	if identity {
		ca, err := testca.Load(os.Getenv(keysVar), nil)
		if err != nil {
			return err
		}
		config.ClientAuth, config.ClientCAs = tls.RequireAndVerifyClientCert, ca.Pool()
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if identity {
				go serveTold(c, config)
				continue
			}
			inside := tls.Server(c, config)
			go serveInside(inside, inside)
		}
	}()
	fmt.Println(ln.Addr())
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// serveTold serves a client of whom a PROXY header tells.
func serveTold(c net.Conn, config *tls.Config) {
	raw := bufio.NewReader(c)
	before, err := skipHeader(raw)
	if err != nil {
		_ = c.Close()
		return
	}
	inside := tls.Server(&bufferedConn{c, raw}, config)
	r := bufio.NewReaderSize(inside, 64<<10)
	if !before {
		if told, err := skipHeader(r); err == nil && !told {
			fmt.Fprintln(os.Stderr, "bench: the TLS service got no PROXY header")
		}
	}
	serveInside(inside, r)
}

// A bufferedConn is a connection that was read from.
type bufferedConn struct {
	net.Conn
	r *bufio.Reader
}

func (c *bufferedConn) Read(b []byte) (int, error) { return c.r.Read(b) }

// skipHeader skips a PROXY header of version 2, and reports whether there was one.
func skipHeader(r *bufio.Reader) (bool, error) {
	first, err := r.Peek(1)
	if err != nil || first[0] != '\r' {
		return false, err
	}
	head, err := r.Peek(16)
	if err != nil {
		return false, err
	}
	_, err = r.Discard(16 + int(binary.BigEndian.Uint16(head[14:])))
	return true, err
}

// serveInside does what the client's opening says, which it reads by r, inside of c.
func serveInside(c *tls.Conn, r io.Reader) {
	defer c.Close()
	head := make([]byte, 5)
	if _, err := io.ReadFull(r, head); err != nil {
		return
	}
	rest := make([]byte, helloLen(head)-len(head)+commandLen)
	if _, err := io.ReadFull(r, rest); err != nil {
		return
	}
	command := rest[len(rest)-commandLen:]
	switch buf := make([]byte, 64<<10); command[0] {
	case cmdEcho:
		for {
			n, err := r.Read(buf)
			if err == nil {
				_, err = c.Write(buf[:n])
			}
			if err != nil {
				return
			}
		}
	case cmdUpload:
		count := uint64(0)
		for {
			n, err := r.Read(buf)
			if count += uint64(n); err != nil {
				break
			}
		}
		_, _ = c.Write(binary.BigEndian.AppendUint64(nil, count))
	case cmdDownload:
		until := time.Now().Add(time.Duration(binary.BigEndian.Uint64(command[8:])) * time.Millisecond)
		for time.Now().Before(until) {
			if _, err := c.Write(buf); err != nil {
				return
			}
		}
		_ = c.CloseWrite()
		_, _ = io.Copy(io.Discard, r)
	default:
		fmt.Fprintf(os.Stderr, "bench: the TLS service got the command %q: a proxy changed the stream\n", command[0])
	}
}
