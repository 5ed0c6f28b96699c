//go:build linux

package main

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"sync"
	"time"
)

// A muxFloor is what streams on one connection of crypto/tls cost in Go at least: a frame is an id, a
// length and at most a record of bytes. It is written by the goroutine that reads the socket, and its
// bytes go to the other socket from the goroutine that reads the connection. There are no windows:
// one client that does not read stops all. Nobody else should be compared with it.
type muxFloor struct {
	conn *tls.Conn

	writing sync.Mutex // held over writes

	mu      sync.Mutex          // guards what follows
	streams map[uint32]net.Conn // that were begun; nil where they have ended
	last    uint32              // the gateway's highest id
}

const (
	muxHead  = 8                // bytes: the id of the stream, and the length; 0 is its end
	muxFrame = 16<<10 - muxHead // bytes, so that a frame fills a record
)

// muxFloorEnd is one end of it.
func muxFloorEnd(config *naiveConfig, both *tls.Config) error {
	if config.Reverse == "mux-connector" {
		for {
			if c, err := tls.Dial("tcp", config.At, both); err == nil {
				m := &muxFloor{conn: c, streams: map[uint32]net.Conn{}}
				m.read(func() (net.Conn, error) { return net.Dial("tcp", config.Routes[serviceName(0)]) })
			}
			time.Sleep(100 * time.Millisecond)
		}
	}
	at, err := tls.Listen("tcp", config.At, both)
	if err != nil {
		return err
	}
	m := &muxFloor{streams: map[uint32]net.Conn{}}
	for m.conn == nil {
		c, err := at.Accept()
		if err != nil {
			return err
		}
		if c := c.(*tls.Conn); c.Handshake() == nil { // or something looks whether we listen
			m.conn = c
		}
	}
	go m.read(nil)
	ln, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return err
	}
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		m.mu.Lock()
		m.last++
		m.streams[m.last] = c
		go m.carry(m.last, c)
		m.mu.Unlock()
	}
}

// carry sends what comes from c as the stream id.
func (m *muxFloor) carry(id uint32, c net.Conn) {
	buf := make([]byte, muxHead+muxFrame)
	binary.BigEndian.PutUint32(buf, id)
	for {
		n, err := c.Read(buf[muxHead:])
		if err != nil {
			n = 0
		}
		binary.BigEndian.PutUint32(buf[4:], uint32(n))
		m.writing.Lock()
		_, werr := m.conn.Write(buf[:muxHead+n])
		m.writing.Unlock()
		if err != nil || werr != nil {
			m.end(id)
			return
		}
	}
}

func (m *muxFloor) end(id uint32) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c := m.streams[id]; c != nil {
		_ = c.Close()
		m.streams[id] = nil // for good
	}
}

// read reads frames until the connection ends. dial connects a stream that the other end has begun.
func (m *muxFloor) read(dial func() (net.Conn, error)) {
	in := bufio.NewReaderSize(m.conn, 64<<10)
	buf := make([]byte, muxFrame)
	for {
		if _, err := io.ReadFull(in, buf[:muxHead]); err != nil {
			return
		}
		id, n := binary.BigEndian.Uint32(buf), binary.BigEndian.Uint32(buf[4:])
		if n > muxFrame {
			return
		}
		if _, err := io.ReadFull(in, buf[:n]); err != nil {
			return
		}
		if n == 0 {
			m.end(id)
			continue
		}
		m.mu.Lock()
		c, begun := m.streams[id]
		if !begun && dial != nil {
			m.streams[id] = nil
			if to, err := dial(); err == nil {
				c, m.streams[id] = to, to
				go m.carry(id, to)
			}
		}
		m.mu.Unlock()
		if c != nil {
			_, _ = c.Write(buf[:n])
		}
	}
}
