//go:build linux

package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// naiveMain is the proxy that one writes in an afternoon: it reads the hello,
// looks up the name, dials, and starts two goroutines with io.Copy. It is told
// its listener and its routes in a file of JSON, and collects its garbage on
// SIGUSR1.
func naiveMain(file string) error {
	var config naiveConfig
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return err
	}
	switch config.Reverse {
	case "":
	case "ssh":
		return sshFloor(&config)
	case "captured":
		return captureFloor(&config)
	default:
		return tlsFloor(&config)
	}
	if config.Floor != "" {
		return floor(config.Listen, config.Floor)
	}
	ln, err := net.Listen("tcp", config.Listen)
	if err != nil {
		return err
	}
	collect := make(chan os.Signal, 1)
	signal.Notify(collect, syscall.SIGUSR1)
	go func() {
		for range collect {
			runtime.GC()
		}
	}()
	for {
		c, err := ln.Accept()
		if err != nil {
			return err
		}
		go config.serve(c.(*net.TCPConn))
	}
}

type naiveConfig struct {
	Listen string
	Routes map[string]string
	Bare   bool   // splice by bare system calls
	Floor  string // pass round trips to this address, and no more

	Reverse string // "gateway" or "connector" of the floor of reverse sessions, with "mux-" of that of one connection, "ssh" of that of ssh -R, or "captured" of captured connections
	At      string // where its connector connects to, or the gateway of captured connections
}

func (n *naiveConfig) serve(client *net.TCPConn) {
	defer client.Close()
	buf := make([]byte, 4096)
	got := 0
	for got < 5 || got < helloLen(buf) {
		m, err := client.Read(buf[got:]) // fails on a full buffer, too
		if err != nil || m == 0 {
			return
		}
		got += m
	}
	name, err := serverName(buf[5:helloLen(buf)])
	if err != nil {
		return
	}
	c, err := net.Dial("tcp", n.Routes[name])
	if err != nil {
		return
	}
	server := c.(*net.TCPConn)
	defer server.Close()
	if _, err := server.Write(buf[:got]); err != nil {
		return
	}
	if n.Bare {
		bare(client, server)
		return
	}
	copyBoth(client, server)
}

// copyBoth copies each direction until it ends, and passes its end on.
func copyBoth(client, server *net.TCPConn) {
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = io.Copy(server, client)
		_ = server.CloseWrite()
	})
	wg.Go(func() {
		_, _ = io.Copy(client, server)
		_ = client.CloseWrite()
	})
	wg.Wait()
}

// bare carries a tunnel with a thread for each direction that blocks in
// splice(2), gathers for a while, and does nothing else: what is left is what
// the kernel asks for the bytes.
func bare(client, server *net.TCPConn) {
	var wg sync.WaitGroup
	for _, way := range [][2]*net.TCPConn{{server, client}, {client, server}} {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			dst, err := way[0].File() // blocking, a duplicate
			if err != nil {
				return
			}
			defer dst.Close()
			src, err := way[1].File()
			if err != nil {
				return
			}
			defer src.Close()
			dstFD, srcFD := int(dst.Fd()), int(src.Fd())
			var p [2]int
			if err := syscall.Pipe2(p[:], syscall.O_CLOEXEC); err != nil {
				return
			}
			defer syscall.Close(p[0])
			defer syscall.Close(p[1])
			const setPipeSize, size, gather = 1031, 1 << 20, 200 * time.Microsecond
			_, _, _ = syscall.Syscall(syscall.SYS_FCNTL, uintptr(p[1]), setPipeSize, size)
			for {
				got, err := syscall.Splice(srcFD, nil, p[1], nil, size, 1)
				if err != nil || got == 0 {
					_ = way[0].CloseWrite()
					return
				}
				for left := got; left > 0; {
					put, err := syscall.Splice(p[0], nil, dstFD, nil, int(left), 1)
					if err != nil {
						return
					}
					left -= put
				}
				if got < size/2 {
					wait := syscall.NsecToTimespec(int64(gather))
					_ = syscall.Nanosleep(&wait, nil)
				}
			}
		})
	}
	wg.Wait()
}

// serverName walks a ClientHello (RFC 8446 section 4.1.2) to its server_name.
func serverName(p []byte) (name string, err error) {
	defer func() {
		if r := recover(); r != nil { // an index out of range: this is the naive one
			err = fmt.Errorf("bad hello: %v", r)
		}
	}()
	p = p[4+2+32:]
	p = p[1+int(p[0]):]
	p = p[2+int(binary.BigEndian.Uint16(p)):]
	p = p[1+int(p[0]):]
	p = p[2:]
	for len(p) > 4 {
		kind, size := binary.BigEndian.Uint16(p), int(binary.BigEndian.Uint16(p[2:]))
		if kind == 0 {
			return string(p[4+5 : 4+size]), nil
		}
		p = p[4+size:]
	}
	return "", errors.New("no name")
}
